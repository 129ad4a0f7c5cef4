// Attention of few rows to many keys in pages: the step that makes one token a sequence, or verifies a few.
//
// It reads every key and value once and computes little on them: what counts is that copies never stop. Contexts are
// split as in FlashDecoding (Dao et al. 2023) and lie in pages as in PagedAttention (Kwon et al. 2023,
// arXiv:2309.06180).
//
// grid            (decode items or more, num_kv_heads); an item is a range of one sequence's keys
// block           kWarps warps
// shared memory   a ring of tiles for each warp; once they are drained, the outputs and sums that the warps merge.
//                 At head_dim 256 the queries behind them
// registers       about 110, 127, 167 and 243 at head_dim 64, 96, 128 and 256: head_dim / 2 of them hold the output,
//                 head_dim / 4 the query, except at 256
// occupancy       4, 3, 3 and 3 blocks an SM on sm_90; 3, 2, 2 and 2 on sm_80, which has less shared memory
//
// The 16 rows of mma.m16n8k16 are the query heads of one kv head, times the new tokens: keys are read once for all.
// A warp takes every kWarps-th tile of 16 keys, and meets the others only at the end, to merge:
//
//   keys   | tile 0 | tile 1 | tile 2 | tile 3 | tile 4 | tile 5 | ...        first_key .. end_key
//   warp       0        1        2        3        0        1
//
//   ring of a warp   | keys 16 x head_dim | values 16 x head_dim |  x kStages, swizzled (shared_tile.cuh)
//                      one stage is computed while the other kStages - 1 arrive
#include "decode_rows.cuh"

// First the rings; in their place, once all are drained, the results.
template <class T, int kHeadDim, int kWarps, int kStages> union DecodeShared {
  T rings[kWarps][kStages][2 * kTileKeys * kHeadDim];
  WarpResults<kHeadDim, kWarps> results;
};

template <class T, int kHeadDim, int kWarps, int kStages, bool kBounded, bool kSoftcap>
__global__ void __launch_bounds__(kWarps * kWarpSize) paged_decode(AttentionArguments arguments) {
  constexpr int kTileElements = kTileKeys * kHeadDim;
  static_assert(kStages >= 2, "one stage is computed while another arrives");
  using Shared = DecodeShared<T, kHeadDim, kWarps, kStages>;
  constexpr int kQueryBytes = kQueryInShared<kHeadDim> ? kMmaRows * kHeadDim * sizeof(T) : 0;
  DYNAMIC_SHARED(shared_bytes, sizeof(Shared) + kQueryBytes);
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  T* const query_tile = reinterpret_cast<T*>(shared_bytes + sizeof(Shared));  // if the query is in shared memory

  if (int(blockIdx.x) >= *arguments.num_decode_items) return;
  const DecodeItem item = arguments.decode_items[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int warp = kept(threadIdx.x / kWarpSize);
  const PackedRows rows(arguments, item.sequence, kv_head);
  BOUNDS_CHECK(rows.count <= kMmaRows);
  if constexpr (kQueryInShared<kHeadDim>) {
    start_query_copy<T, kHeadDim, kMmaRows, kWarps * kWarpSize>(query_tile, arguments, rows, 0);
    cp_async_commit();
  }

  BOUNDS_CHECK(item.first_key % kTileKeys == 0);
  const int first_tile = item.first_key + warp * kTileKeys;
  const PagedSequence<T, kHeadDim> pages(arguments, item.sequence, kv_head);
  const T* const keys = kept(pages.keys);
  const T* const values = kept(pages.values);
  const TileCopy<T, kHeadDim> copy;
  int copy_key = first_tile;
  int copy_stage = 0;
  int copy_block = copy_key < item.end_key ? pages.block_of(copy_key) : 0;

  // Starts to copy this warp's next tile, as one group. After the last tile the group is empty, because the waits
  // below count groups. The tile's block was looked up one copy earlier, so no copy waits for the table.
  const auto start_copy = [&] {
    if (copy_key < item.end_key) {
      T* const stage = shared.rings[warp][copy_stage];
      const int64_t offset = pages.offset(copy_block, copy_key);
      copy.start(stage, keys + offset, item.end_key - copy_key);
      copy.start(stage + kTileElements, values + offset, item.end_key - copy_key);
      copy_key += kWarps * kTileKeys;
      copy_stage = copy_stage + 1 == kStages ? 0 : copy_stage + 1;
      if (copy_key < item.end_key) copy_block = pages.block_of(copy_key);
    }
    cp_async_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) start_copy();

  // While the first tiles arrive: the queries, the scale and the masks.
  const FragmentReader<T, kHeadDim> reader;
  uint32_t query[kHeadDim / 16][4];  // if it is in registers
  if constexpr (kQueryInShared<kHeadDim>) {
    cp_async_wait<kStages - 1>();  // the oldest group is the query's
    __syncthreads();               // all threads' parts of it are there
  } else {
    load_query<T, kHeadDim>(query, arguments, rows);
  }
  const auto read_query = [&](uint32_t (&fragment)[1][4], int step) {
    if constexpr (kQueryInShared<kHeadDim>) {
      reader.read_queries(fragment[0], query_tile, step);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[0][i] = query[step][i];
    }
  };
  const ScoreScale<kSoftcap> scale(arguments);
  // `kept`, or else the compiler would hold the rows' ranges in registers throughout the loop: few tiles need them.
  const auto visible = [&](int, int half) {
    return visible_keys<kBounded>(arguments, end_of_visible_keys(rows, kept(row_of_lane(half))));
  };
  // The keys that every row sees: a tile among them needs no mask.
  const KeyRange of_first = visible_keys<kBounded>(arguments, end_of_visible_keys(rows, 0));
  const KeyRange of_last = visible_keys<kBounded>(arguments, end_of_visible_keys(rows, rows.count - 1));
  const KeyRange unmasked = {of_last.first, of_first.end};

  RowSums<kHeadDim, 1> sums;
  int stage = 0;
  for (int key = first_tile; key < item.end_key; key += kWarps * kTileKeys) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // all lanes' copies of this stage are there, and all lanes have done with the stage before ...
    start_copy();  // ... which this overwrites
    const T* const key_tile = shared.rings[warp][stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;

    float scores[1][kTileKeys / 8][4];
    compute_scores<T, kHeadDim, 1, kTileKeys>(scores, reader, read_query, key_tile);
    if (kSoftcap) cap_scores<1, kTileKeys>(scores, scale);
    if (!unmasked.contains<kBounded>(key, kTileKeys)) mask_scores<1, kTileKeys>(scores, key, visible);
    compute_weights<kHeadDim, 1, kTileKeys>(scores, sums, scale.unit);
    add_values<T, kHeadDim, 1, kTileKeys>(sums, reader, scores, key_tile + kTileElements);
  }
  sums.finish();

  __syncthreads();  // the rings are free: all copies have been waited for, and all warps have read their last tile
  leave_results<kHeadDim, kWarps>(shared.results, sums, warp, rows.count);
  __syncthreads();  // all results are there
  merge_results<T, kHeadDim, kWarps>(shared.results, arguments, rows, item.partial);
}

// Adds up the partial results of each sequence that was split, in the order of its items: whichever ran first, the
// result is the same to the bit.
//
// grid        (merge items or more, num_kv_heads, packed rows of a sequence or more)
// block       head_dim / 2 threads, two neighbouring dims each; no shared memory
// registers   64 at head_dim 64, else 34
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim / 2) decode_merge(AttentionArguments arguments) {
  if (int(blockIdx.x) >= *arguments.num_merge_items) return;
  const MergeItem item = arguments.merge_items[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int row = blockIdx.z;
  const int dim = threadIdx.x * 2;
  const PackedRows rows(arguments, item.sequence, kv_head);
  if (row >= rows.count) return;

  const int64_t first = partial_row(arguments, item.first_partial, kv_head, row);
  const int64_t stride = int64_t(arguments.num_kv_heads) * kMmaRows;
  const float2* const part_sums = arguments.partial_sums + first;
  const float* const part_outputs = arguments.partial_outputs + first * kHeadDim + dim;

  float anchor = kNegativeInfinity;
  for (int part = 0; part < item.num_partials; ++part) anchor = fmaxf(anchor, part_sums[part * stride].x);
  float2 sums = {anchor, 0.0f};
  float2 values = {0.0f, 0.0f};
  for (int part = 0; part < item.num_partials; ++part) {
    add_part(sums, values, part_sums[part * stride],
             *reinterpret_cast<const float2*>(part_outputs + part * stride * kHeadDim));
  }
  store_output<T, kHeadDim>(arguments, rows, row, dim, sums, values);
}
