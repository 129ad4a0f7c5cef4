// paged_prefill over a pool of codes.
//
// The walk is that of paged_prefill.cu, to be read first. Between the arrival of a step and its products, the block makes
// numbers of its codes, once for all its rows: see code_tile.cuh.
//
// grid, block     as of paged_prefill
// shared memory   the block's queries, the numbers of one step, then kStages steps of codes and scales, then the end of
//                 what each row sees
// registers       as of paged_prefill
#include "code_tile.cuh"

template <class T, int kHeadDim, class Code, int kWarps, int kRowTiles, int kKeys, int kStages, bool kBounded, bool kSoftcap>
__global__ void __launch_bounds__(kWarps * kWarpSize) coded_prefill(AttentionArguments arguments) {
  constexpr int kWarpRows = kRowTiles * kMmaRows;
  constexpr int kRows = kWarps * kWarpRows;
  using Stage = CodeStage<Code, kHeadDim, kKeys>;
  using Numbers = CodeNumbers<T, kHeadDim, kKeys>;
  // A step is copied in parts of 16 keys or 16 values, each in one block of the cache, by one warp.
  constexpr int kParts = 2 * kKeys / kTileKeys;
  constexpr int kWarpParts = kParts / kWarps;
  static_assert(kKeys % kTileKeys == 0, "whole tiles a step");
  static_assert(kParts % kWarps == 0, "each warp copies as much");
  static_assert(kStages >= 2, "one step is computed while another arrives");
  constexpr int kQueryBytes = kRows * kHeadDim * sizeof(T);
  DYNAMIC_SHARED(shared, kQueryBytes + sizeof(Numbers) + kStages * sizeof(Stage) + kRows * sizeof(int));

  const PrefillTile tile = arguments.prefill_tiles[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int warp = kept(threadIdx.x / kWarpSize);
  const PackedRows rows(arguments, tile.sequence, kv_head);
  const PagedSequence<Code, kHeadDim> pages(arguments, tile.sequence, kv_head);
  const ScoreScale<kSoftcap> scale(arguments);
  BOUNDS_CHECK(tile.first_row < rows.count);

  T* const query_tile = reinterpret_cast<T*>(shared);
  Numbers& numbers = *reinterpret_cast<Numbers*>(shared + kQueryBytes);
  Stage* const ring = reinterpret_cast<Stage*>(shared + kQueryBytes + sizeof(Numbers));
  int* const ends = reinterpret_cast<int*>(ring + kStages);
  start_query_copy<T, kHeadDim, kRows, kWarps * kWarpSize>(query_tile, arguments, rows, tile.first_row);

  // From the first key that the first row sees to the last that the last row sees; positions rise with the rows.
  const int last_row = min(tile.first_row + kRows, rows.count) - 1;
  const KeyRange of_first = visible_keys<kBounded>(arguments, end_of_visible_keys(rows, tile.first_row));
  const KeyRange of_last = visible_keys<kBounded>(arguments, end_of_visible_keys(rows, last_row));
  // Steps begin at multiples of kKeys, so that a row's result has the same bits however a prompt is cut into chunks.
  const int first_key = of_first.first / kKeys * kKeys;
  const int end_key = of_last.end;
  const KeyRange unmasked = {of_last.first, of_first.end};  // every row sees these

  const int warp_row = warp * kWarpRows;
  static_assert(kRows <= kWarps * kWarpSize, "a thread for each row");
  if (const int row = threadIdx.x; row < kRows) {
    ends[row] = end_of_visible_keys(rows, tile.first_row + row);  // read after the loop's first barrier
  }
  const auto visible = [&](int row_tile, int half) {
    return visible_keys<kBounded>(arguments, ends[warp_row + row_tile * kMmaRows + row_of_lane(half)]);
  };

  int copy_key = first_key;
  int copy_stage = 0;
  const auto key_of_part = [&](int part) { return copy_key + (warp * kWarpParts + part) / 2 * kTileKeys; };
  // Keys beyond the end are not copied: any block will do for them.
  const auto block_of_part = [&](int part) {
    const int key = key_of_part(part);
    return key < end_key ? pages.block_of(key) : 0;
  };
  const Code* copy_sources[kWarpParts];
  int copy_blocks[kWarpParts];
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
    const bool is_keys = (warp * kWarpParts + part) % 2 == 0;
    copy_sources[part] = kept(is_keys ? pages.keys : pages.values);
    copy_blocks[part] = block_of_part(part);
  }

  // Starts this warp's copies of the next step, as one group. After the last step the group is empty, because the
  // waits below count groups. The blocks were looked up one step earlier, so no copy waits for the table.
  const auto start_copy = [&] {
    if (copy_key < end_key) {
      Stage& stage = ring[copy_stage];
#pragma unroll
      for (int part = 0; part < kWarpParts; ++part) {
        const int index = warp * kWarpParts + part;
        const int key = key_of_part(part);
        const int in_step = index / 2 * kTileKeys;
        const Code* const source = copy_sources[part];
        start_code_copy<Code, kHeadDim>((index % 2 ? stage.values : stage.keys) + in_step * kHeadDim,
                                        source + pages.offset(copy_blocks[part], key), end_key - key);
        start_scale_copy((index % 2 ? stage.value_scales : stage.key_scales) + in_step,
                         source + scale_offset(pages, copy_blocks[part], key), end_key - key);
      }
      copy_key += kKeys;
      copy_stage = copy_stage + 1 == kStages ? 0 : copy_stage + 1;
#pragma unroll
      for (int part = 0; part < kWarpParts; ++part) copy_blocks[part] = block_of_part(part);
    }
    cp_async_commit();
  };

  RowSums<kHeadDim, kRowTiles> sums;
  const FragmentReader<T, kHeadDim> reader;
  const auto read_query = [&](uint32_t (&fragments)[kRowTiles][4], int step) {
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      const T* const rows_of_tile = query_tile + (warp_row + row_tile * kMmaRows) * kHeadDim;
      reader.read_queries(fragments[row_tile], rows_of_tile, step);
    }
  };

  for (int stage = 0; stage < kStages - 1; ++stage) start_copy();
  int stage = 0;
  for (int key = first_key; key < end_key; key += kKeys) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // all warps' copies of this stage are there, and all have done with the stage before and its
    start_copy();     // numbers: this overwrites the one, what follows the others
    const Stage& codes = ring[stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;
    make_numbers<T, Code, kHeadDim, kKeys, kWarps * kWarpSize>(numbers.keys, codes.keys, threadIdx.x);
    make_numbers<bfloat16, Code, kHeadDim, kKeys, kWarps * kWarpSize>(numbers.values, codes.values, threadIdx.x);
    __syncthreads();  // all threads' numbers are there

    float scores[kRowTiles][kKeys / 8][4];
    compute_scores<T, kHeadDim, kRowTiles, kKeys>(scores, reader, read_query, numbers.keys);
    apply_scales<kRowTiles, kKeys>(scores, codes.key_scales);
    if (kSoftcap) cap_scores<kRowTiles, kKeys>(scores, scale);
    if (!unmasked.contains<kBounded>(key, kKeys)) mask_scores<kRowTiles, kKeys>(scores, key, visible);
    compute_weights<kHeadDim, kRowTiles, kKeys>(scores, sums, scale.unit);
    apply_scales<kRowTiles, kKeys>(scores, codes.value_scales);
    add_values<bfloat16, kHeadDim, kRowTiles, kKeys>(sums, reader, scores, numbers.values);
  }
  sums.finish();

  // `kept`, or else the compiler would hold what it knows of the rows in registers throughout the loop, which needs
  // them all.
  const int first_row = kept(tile.first_row + warp_row);
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = first_row + row_tile * kMmaRows + row_of_lane(half);
      if (row < rows.count) {
        const float factor = normalization(sums.anchor[row_tile][half], sums.sum[row_tile][half], arguments.sinks,
                                           rows.head(row));
        T* const output = static_cast<T*>(arguments.output) + column_of_lane() +
                          rows.offset<kHeadDim>(row, rows.num_heads * kHeadDim);
#pragma unroll
        for (int dims = 0; dims < kHeadDim / 8; ++dims) {
          const float(&pairs)[4] = sums.output[row_tile][dims];
          *reinterpret_cast<uint32_t*>(output + dims * 8) =
              pack<T>(pairs[half * 2] * factor, pairs[half * 2 + 1] * factor);
        }
      }
    }
  }
}
