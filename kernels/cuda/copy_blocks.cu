// Copies of whole blocks within the pool, all layers at once, as if every source were read before any
// destination is written.
//
//   grid       (groups of columns, chains; more than 65,535 go round)   block   128 threads, no barrier
//   registers  48: kColumns columns in hand and as many carried         access  see columns.cuh
//
// No barrier is needed, because a byte only ever meets the same byte of another block: what must be in order
// is what one thread does. The host (block_moves.py) sorts the moves into chains. A chain overwrites no block
// that another reads or writes, and each of its blocks only after all that read it:
//
//   pairs  a -> b, b -> c                chain  (b, c) (a, b)
//   pairs  a -> b, a -> c                chains (a, b) and (a, c)
//   pairs  a -> b, b -> c, c -> a        chain  (a, -) (c, a) (b, c) (-, b)     a's bytes are carried
#include "arguments.cuh"
#include "columns.cuh"

constexpr int32_t kCarried = -1;  // block_moves.CARRIED

__global__ void __launch_bounds__(kRowThreads) copy_blocks(const CopyBlocksArguments args) {
  const Columns columns(args.block_bytes);
  for (int chain = blockIdx.y; chain < args.num_chains; chain += gridDim.y) {
    uint4 carried[kColumns] = {};
    for (int i = args.chain_starts[chain]; i < args.chain_starts[chain + 1]; i++) {
      const BlockMove move = args.moves[i];
      BOUNDS_CHECK(move.source >= kCarried && move.source < args.num_blocks);
      BOUNDS_CHECK(move.destination >= kCarried && move.destination < args.num_blocks);
      if (move.destination == kCarried) {
        columns.load(carried, args.pool, move.source);
      } else if (move.source == kCarried) {
        columns.store(args.pool, move.destination, carried);
      } else {
        uint4 bytes[kColumns];
        columns.load(bytes, args.pool, move.source);
        columns.store(args.pool, move.destination, bytes);
      }
    }
  }
}
