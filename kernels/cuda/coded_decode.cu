// paged_decode over a pool of codes: half the bytes of 16-bit numbers are read, which is what decoding waits for.
//
// The walk is that of paged_decode.cu, to be read first; its decode_merge adds up partial results here, too. Between
// the arrival of a tile and its products, its warp makes numbers of its codes: see code_tile.cuh.
//
// grid, block     as of paged_decode
// shared memory   each warp's ring of codes and scales, then its numbers of one tile; once all are drained, what the
//                 warps merge. At head_dim 256 the queries behind them
// registers       as of paged_decode, and some ten
#include "code_tile.cuh"
#include "decode_rows.cuh"

// First the rings and the numbers; in their place, once all are drained, the results.
template <class T, class Code, int kHeadDim, int kWarps, int kStages> union CodedDecodeShared {
  struct {
    CodeStage<Code, kHeadDim, kTileKeys> rings[kWarps][kStages];
    CodeNumbers<T, kHeadDim, kTileKeys> numbers[kWarps];
  };
  WarpResults<kHeadDim, kWarps> results;
};

template <class T, int kHeadDim, class Code, int kWarps, int kStages, bool kBounded, bool kSoftcap>
__global__ void __launch_bounds__(kWarps * kWarpSize) coded_decode(AttentionArguments arguments) {
  static_assert(kStages >= 2, "one stage is computed while another arrives");
  using Shared = CodedDecodeShared<T, Code, kHeadDim, kWarps, kStages>;
  constexpr int kQueryBytes = kQueryInShared<kHeadDim> ? kMmaRows * kHeadDim * sizeof(T) : 0;
  DYNAMIC_SHARED(shared_bytes, sizeof(Shared) + kQueryBytes);
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  T* const query_tile = reinterpret_cast<T*>(shared_bytes + sizeof(Shared));  // if the query is in shared memory

  if (int(blockIdx.x) >= *arguments.num_decode_items) return;
  const DecodeItem item = arguments.decode_items[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int warp = kept(threadIdx.x / kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  const PackedRows rows(arguments, item.sequence, kv_head);
  BOUNDS_CHECK(rows.count <= kMmaRows);
  if constexpr (kQueryInShared<kHeadDim>) {
    start_query_copy<T, kHeadDim, kMmaRows, kWarps * kWarpSize>(query_tile, arguments, rows, 0);
    cp_async_commit();
  }

  BOUNDS_CHECK(item.first_key % kTileKeys == 0);
  const int first_tile = item.first_key + warp * kTileKeys;
  const PagedSequence<Code, kHeadDim> pages(arguments, item.sequence, kv_head);
  const Code* const keys = kept(pages.keys);
  const Code* const values = kept(pages.values);
  int copy_key = first_tile;
  int copy_stage = 0;
  int copy_block = copy_key < item.end_key ? pages.block_of(copy_key) : 0;

  // As in paged_decode: this warp's next tile, as one group, which is empty after the last tile.
  const auto start_copy = [&] {
    if (copy_key < item.end_key) {
      CodeStage<Code, kHeadDim, kTileKeys>& stage = shared.rings[warp][copy_stage];
      const int num_tokens = item.end_key - copy_key;
      const int64_t codes = pages.offset(copy_block, copy_key);
      const int64_t scales = scale_offset(pages, copy_block, copy_key);
      start_code_copy<Code, kHeadDim>(stage.keys, keys + codes, num_tokens);
      start_code_copy<Code, kHeadDim>(stage.values, values + codes, num_tokens);
      start_scale_copy(stage.key_scales, keys + scales, num_tokens);
      start_scale_copy(stage.value_scales, values + scales, num_tokens);
      copy_key += kWarps * kTileKeys;
      copy_stage = copy_stage + 1 == kStages ? 0 : copy_stage + 1;
      if (copy_key < item.end_key) copy_block = pages.block_of(copy_key);
    }
    cp_async_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) start_copy();

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
  const auto visible = [&](int, int half) {
    return visible_keys<kBounded>(arguments, end_of_visible_keys(rows, kept(row_of_lane(half))));
  };
  const KeyRange of_first = visible_keys<kBounded>(arguments, end_of_visible_keys(rows, 0));
  const KeyRange of_last = visible_keys<kBounded>(arguments, end_of_visible_keys(rows, rows.count - 1));
  const KeyRange unmasked = {of_last.first, of_first.end};

  RowSums<kHeadDim, 1> sums;
  CodeNumbers<T, kHeadDim, kTileKeys>& numbers = shared.numbers[warp];
  int stage = 0;
  for (int key = first_tile; key < item.end_key; key += kWarps * kTileKeys) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // all lanes' copies of this stage are there; all have done with the stage before and its numbers ...
    start_copy();  // ... of which this overwrites the one
    const CodeStage<Code, kHeadDim, kTileKeys>& codes = shared.rings[warp][stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;
    make_numbers<T, Code, kHeadDim, kTileKeys, kWarpSize>(numbers.keys, codes.keys, lane);
    make_numbers<bfloat16, Code, kHeadDim, kTileKeys, kWarpSize>(numbers.values, codes.values, lane);
    __syncwarp();  // all lanes' numbers are there

    float scores[1][kTileKeys / 8][4];
    compute_scores<T, kHeadDim, 1, kTileKeys>(scores, reader, read_query, numbers.keys);
    apply_scales<1, kTileKeys>(scores, codes.key_scales);
    if (kSoftcap) cap_scores<1, kTileKeys>(scores, scale);
    if (!unmasked.contains<kBounded>(key, kTileKeys)) mask_scores<1, kTileKeys>(scores, key, visible);
    compute_weights<kHeadDim, 1, kTileKeys>(scores, sums, scale.unit);
    apply_scales<1, kTileKeys>(scores, codes.value_scales);
    add_values<bfloat16, kHeadDim, 1, kTileKeys>(sums, reader, scores, numbers.values);
  }
  sums.finish();

  __syncthreads();  // the rings are free: all copies have been waited for, and all warps have read their last tile
  leave_results<kHeadDim, kWarps>(shared.results, sums, warp, rows.count);
  __syncthreads();  // all results are there
  merge_results<T, kHeadDim, kWarps>(shared.results, arguments, rows, item.partial);
}
