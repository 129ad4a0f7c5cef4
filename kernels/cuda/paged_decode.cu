// Attention of few rows to many keys in pages: the step that makes one token (or verifies a few) a sequence.
//
// It moves every key and value once and computes little on them, so all of it serves to keep copies in flight.
// Split-KV as FlashDecoding's (Dao et al. 2023), over pages as PagedAttention's (Kwon et al. 2023, arXiv:2309.06180).
//
// grid            (decode items or more, num_kv_heads); an item is a range of one sequence's keys
// block           kWarps warps
// shared memory   kWarps private rings; once they are drained, the outputs and sums that the warps merge
// registers       some 112, 128, 167 and 245 at head_dim 64, 96, 128 and 256, of which head_dim / 4 hold the query and
//                 head_dim / 2 the output; an SM's registers and rings allow 4, 3, 2 and 2 blocks (sm_90)
//
// The 16 rows of mma.m16n8k16 are the query heads of one kv head, times the new tokens: keys are read once for all.
// A warp takes every kWarps-th tile of 16 keys and needs none of the others until the end:
//
//   keys   | tile 0 | tile 1 | tile 2 | tile 3 | tile 4 | tile 5 | ...        first_key .. end_key
//   warp       0        1        2        3        0        1
//
//   ring of a warp   | keys 16 x head_dim | values 16 x head_dim |  x kStages, swizzled (shared_tile.cuh)
//                      one stage is computed while the other kStages - 1 arrive
#include "attention_tile.cuh"

// Up to head_dim 128 the queries stay in registers, as fragments. 256 dims of 16 rows take 64 registers a lane beside
// the output's 128, too many: there each step reads its fragment from shared memory.
template <int kHeadDim> constexpr bool kQueryInShared = kHeadDim > 128;

// Floats behind each row of what the warps merge. A warp stores 32 bytes of 8 rows at once; rows of a multiple of 128
// bytes would all begin in the same bank, and these begin in the next eighth of the banks each.
constexpr int kMergePadding = 8;

// What the warps leave to be merged: their parts of each row's output, anchor and sum. A warp that saw no key leaves
// kNegativeInfinity and 0.
template <int kHeadDim, int kWarps> struct WarpResults {
  float outputs[kWarps][kMmaRows][kHeadDim + kMergePadding];
  float2 sums[kWarps][kMmaRows];
};

// The rings; once all are drained, in their place the results.
template <class T, int kHeadDim, int kWarps, int kStages> union DecodeShared {
  T rings[kWarps][kStages][2 * kTileKeys * kHeadDim];
  WarpResults<kHeadDim, kWarps> results;
};

// Of packed row `row` of a partial result, in partial_sums; in partial_outputs it is head_dim times that.
__device__ __forceinline__ int64_t partial_row(const AttentionArguments& arguments, int partial, int kv_head, int row) {
  return (int64_t(partial) * arguments.num_kv_heads + kv_head) * kMmaRows + row;
}

// The packed rows as operand A, straight from global memory: each is read once. Rows beyond the last are zeros.
template <class T, int kHeadDim>
__device__ __forceinline__ void load_query(uint32_t (&query)[kHeadDim / 16][4], const AttentionArguments& arguments,
                                           const PackedRows& rows) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = row_of_lane(half);
    const bool exists = row < rows.count;
    const int64_t offset = exists ? rows.offset<kHeadDim>(row, arguments.query_stride) : 0;
    const T* const source = static_cast<const T*>(arguments.query) + offset + column_of_lane();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      query[step][half] = exists ? *reinterpret_cast<const uint32_t*>(source + step * 16) : 0;
      query[step][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(source + step * 16 + 8) : 0;
    }
  }
}

// Adds a part of a row's keys to what sums (anchor and sum) and values (two dims) hold. The anchor is the highest of
// all parts.
__device__ __forceinline__ void add_part(float2& sums, float2& values, float2 part_sums, float2 part_values) {
  const float factor = exp2_approximate(part_sums.x - sums.x);
  sums.y += factor * part_sums.y;
  values.x += factor * part_values.x;
  values.y += factor * part_values.y;
}

// Two neighbouring dims of a row's result. sums: anchor and sum; values: not yet divided by the sum.
template <class T, int kHeadDim>
__device__ __forceinline__ void store_output(const AttentionArguments& arguments, const PackedRows& rows, int row,
                                             int dim, float2 sums, float2 values) {
  const float factor = normalization(sums.x, sums.y, arguments.sinks, rows.head(row));
  T* const output = static_cast<T*>(arguments.output) + rows.offset<kHeadDim>(row, rows.num_heads * kHeadDim) + dim;
  *reinterpret_cast<uint32_t*>(output) = pack<T>(values.x * factor, values.y * factor);
}

template <int kHeadDim, int kWarps>
__device__ __forceinline__ void leave_results(WarpResults<kHeadDim, kWarps>& results, const RowSums<kHeadDim, 1>& sums,
                                              int warp, int num_rows) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = row_of_lane(half);
    if (row < num_rows) {
#pragma unroll
      for (int dims = 0; dims < kHeadDim / 8; ++dims) {
        const float2 pair = make_float2(sums.output[0][dims][half * 2], sums.output[0][dims][half * 2 + 1]);
        *reinterpret_cast<float2*>(&results.outputs[warp][row][dims * 8 + column_of_lane()]) = pair;
      }
      if (column_of_lane() == 0) results.sums[warp][row] = make_float2(sums.anchor[0][half], sums.sum[0][half]);
    }
  }
}

// Adds up what the warps left, warp by warp, and stores it: as the output, or as partial result `partial`.
template <class T, int kHeadDim, int kWarps>
__device__ __forceinline__ void merge_results(const WarpResults<kHeadDim, kWarps>& results,
                                              const AttentionArguments& arguments, const PackedRows& rows,
                                              int partial) {
  constexpr int kPairs = kHeadDim / 2;  // of neighbouring dims
  for (int index = threadIdx.x; index < rows.count * kPairs; index += kWarps * kWarpSize) {
    const int row = index / kPairs;
    const int dim = index % kPairs * 2;
    float anchor = kNegativeInfinity;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) anchor = fmaxf(anchor, results.sums[warp][row].x);
    float2 sums = {anchor, 0.0f};
    float2 values = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      add_part(sums, values, results.sums[warp][row],
               *reinterpret_cast<const float2*>(&results.outputs[warp][row][dim]));
    }
    if (partial < 0) {
      store_output<T, kHeadDim>(arguments, rows, row, dim, sums, values);
    } else {
      const int64_t place = partial_row(arguments, partial, rows.kv_head, row);
      *reinterpret_cast<float2*>(arguments.partial_outputs + place * kHeadDim + dim) = values;
      if (dim == 0) arguments.partial_sums[place] = sums;
    }
  }
}

template <class T, int kHeadDim, int kWarps, int kStages, bool kBounded, bool kSoftcap>
__global__ void __launch_bounds__(kWarps * kWarpSize) paged_decode(AttentionArguments arguments) {
  constexpr int kTileElements = kTileKeys * kHeadDim;
  using Shared = DecodeShared<T, kHeadDim, kWarps, kStages>;
  constexpr int kQueryBytes = kQueryInShared<kHeadDim> ? kMmaRows * kHeadDim * sizeof(T) : 0;
  DYNAMIC_SHARED(shared_bytes, sizeof(Shared) + kQueryBytes);
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  T* const query_tile = reinterpret_cast<T*>(shared_bytes + sizeof(Shared));  // where it is in shared memory

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

  // Starts the copies of this warp's next tile as one group, an empty one after the last tile: groups are counted.
  // The block is known since the copy before, so that no copy waits for the table.
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
  uint32_t query[kHeadDim / 16][4];  // where it is in registers
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
  // Hidden from the compiler, which would else carry the rows' ranges through the loop: few tiles need them.
  const auto visible = [&](int, int half) {
    return visible_keys<kBounded>(arguments, end_of_visible_keys(rows, kept(row_of_lane(half))));
  };
  // What every row sees: a tile inside needs no mask.
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

  __syncthreads();  // the rings are free: every copy has been waited for, groups after the last tile's are empty
  leave_results<kHeadDim, kWarps>(shared.results, sums, warp, rows.count);
  __syncthreads();  // all results are there
  merge_results<T, kHeadDim, kWarps>(shared.results, arguments, rows, item.partial);
}

// Adds up the partial results of each sequence that was cut, in the order of its items: whatever ran first, the
// result is the same to the bit.
//
// grid     (merge items or more, num_kv_heads, 16 or at least the packed rows of a sequence)
// block    head_dim / 2 threads, two neighbouring dims each
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
