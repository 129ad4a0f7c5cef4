// Scattered blocks of the pool to and from a packed row of blocks: so that a swap of many small fragments is
// one copy between device and host.
//
//   pool    [ .. | id 1 | .. | .. | id 0 | .. ]
//   packed  [ id 0 | id 1 | .. ]                   all layers of a block, in the order of block_ids
//
//   grid       (groups of columns, ids; more ids than 65,535 go round)   block   128 threads, no barrier
//   registers  32                                                        access   see columns.cuh
#include "arguments.cuh"
#include "columns.cuh"

__global__ void __launch_bounds__(kRowThreads) gather_blocks(const PackBlocksArguments args) {
  const Columns columns(args.block_bytes);
  for (int i = blockIdx.y; i < args.num_ids; i += gridDim.y) {
    const int32_t block = args.block_ids[i];
    BOUNDS_CHECK(block >= 0 && block < args.num_blocks);
    uint4 bytes[kColumns];
    columns.load(bytes, args.pool, block);
    columns.store(args.packed, i, bytes);
  }
}

// The ids are distinct.
__global__ void __launch_bounds__(kRowThreads) scatter_blocks(const PackBlocksArguments args) {
  const Columns columns(args.block_bytes);
  for (int i = blockIdx.y; i < args.num_ids; i += gridDim.y) {
    const int32_t block = args.block_ids[i];
    BOUNDS_CHECK(block >= 0 && block < args.num_blocks);
    uint4 bytes[kColumns];
    columns.load(bytes, args.packed, i);
    columns.store(args.pool, block, bytes);
  }
}
