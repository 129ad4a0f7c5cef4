// Paged attention for the CPU: every query row by one fixed order of additions.
//
// A packed row is one query row and one of the G heads that share a kv head. Its keys are taken in steps
// of STEP, four 16-key tiles, with an online softmax (Milakov and Gimelshein 2018); steps start at
// multiples of STEP, and every SPLIT keys a new partial sum begins; the partial sums are added in order
// (as in Flash-Decoding). All of that depends on the row's own position alone. Which rows
// share an item, which thread takes it, and whether an item walks its splits or the threads share them,
// decides speed and nothing else: a step that a row does not see leaves the row's bits as they are.
//
// Keys are TILED16 (kernels/layout.py): [block_size / 16][head_dim][16], so that one load is one dim of
// sixteen keys and scores need no sum across lanes. Slots of no sequence may hold NaN: scores of hidden
// keys are selected away and values that no row of a micro block sees are not read.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_math.h"
#include "simd.h"
#include "team.h"

namespace pageturner {

// Mirrored by ctypes in ops.py. Strides are in elements. 0 means none for window, chunk and softcap.
struct AttentionArgs {
  const void* query;  // Row [T, num_heads, head_dim], rows query_stride apart
  void* output;       // Row [T, num_heads, head_dim]
  const void* kv_layer;
  const std::int32_t* query_start_loc;
  const std::int32_t* seq_lens;
  const std::int32_t* block_tables;
  const float* sinks;
  std::int64_t query_stride, table_stride, block_stride, value_stride, head_stride;
  std::int32_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  std::int32_t sliding_window, chunk;
  float scale, softcap;
};

constexpr int SPLIT = 512;
constexpr int ITEM_ROWS = 48;     // packed rows of one item: each step's keys are read once for all of them
constexpr float LOWEST = -1e30f;  // of a row that has seen nothing
constexpr float SLACK = 8.0f;     // weights grow to e^SLACK before a row's sums are shrunk

// The rows of one sequence and one kv head that are computed together.
struct Item {
  int kv_head;
  int first_row;   // in the flat batch
  int query_rows;  // consecutive rows; each has G packed rows
  int position;    // of first_row
  const std::int32_t* table;
};

// Sums of some packed rows over some keys: sixteen partial totals and the weighted values, where a key's weight
// is e^(score - anchor). The anchor is the highest score, less SLACK at most.
struct Sums {
  float* anchor;
  float* total;
  float* value;

  static std::size_t floats(int rows, int head_dim) { return std::size_t(rows) * (1 + LANES + head_dim); }
  Sums(float* memory, int rows) : anchor(memory), total(anchor + rows), value(total + rows * LANES) {}

  void clear(int rows, int head_dim) {
    std::fill_n(anchor, rows, LOWEST);
    std::fill_n(total, rows * LANES, 0.0f);
    std::fill_n(value, rows * head_dim, 0.0f);
  }

  void copy(const Sums& other, int rows, int head_dim) {
    std::copy_n(other.anchor, rows, anchor);
    std::copy_n(other.total, rows * LANES, total);
    std::copy_n(other.value, rows * head_dim, value);
  }

  void shrink(int row, int head_dim, float factor) {
    const auto multiply = [&](float* at) { store(at, load(at) * factor); };
    for (int i = 0; i < LANES; i += WIDTH) multiply(total + row * LANES + i);
    for (int d = 0; d < head_dim; d += WIDTH) multiply(value + row * head_dim + d);
  }

  void add(const Sums& later, int rows, int head_dim) {
    for (int first = 0; first < rows; first += WIDTH) {
      const int count = std::min(WIDTH, rows - first);
      float own[WIDTH] = {}, other[WIDTH] = {};
      std::copy_n(anchor + first, count, own);
      std::copy_n(later.anchor + first, count, other);
      const Floats raised = max(load(own), load(other));
      store(own, exp(load(own) - raised));
      store(other, exp(load(other) - raised));
      for (int i = 0; i < count; i++) {
        const float mine = own[i], theirs = other[i];
        const auto merge = [&](float* into, const float* from) {
          store(into, load(into) * mine + load(from) * theirs);
        };
        const int row = first + i;
        anchor[row] = raised[i];
        for (int lane = row * LANES; lane < (row + 1) * LANES; lane += WIDTH)
          merge(total + lane, later.total + lane);
        for (int d = row * head_dim; d < (row + 1) * head_dim; d += WIDTH) merge(value + d, later.value + d);
      }
    }
  }
};

// T is the dtype of the pool. That of the rows is a matter of their first load and last store alone, and so no
// reason to compile all between once more.
template <class T, class Math = typename MathOf<T>::type>
class Attention {
  using Number = typename Math::Number;
  using Step = KeyStep<T>;

 public:
  Attention(const AttentionArgs& args, bool narrow_rows)
      : args(args), narrow_rows(narrow_rows), group(args.num_heads / args.num_kv_heads), height(std::max(1, ITEM_ROWS / group)) {}

  void run(Team& team) const {
    const std::vector<Item> items = make_items();
    int most_splits = 1;
    for (const Item& item : items) most_splits = std::max(most_splits, end_split(item) - begin_split(item));
    if (most_splits == 1 || int(items.size()) >= 2 * team.size())
      run_items(team, items);
    else
      run_splits(team, items);
  }

 private:
  const AttentionArgs& args;
  const bool narrow_rows;  // bf16, not float
  const int group, height;

  int packed(const Item& item) const { return item.query_rows * group; }
  std::size_t query_floats() const { return std::size_t(height) * group * args.head_dim * sizeof(Number) / sizeof(float); }
  std::size_t sums_floats() const { return Sums::floats(height * group, args.head_dim); }

  int first_key(int position) const {
    int first = 0;
    if (args.sliding_window) first = std::max(first, position - args.sliding_window + 1);
    if (args.chunk) first = std::max(first, position - position % args.chunk);
    return first;
  }
  int begin_split(const Item& item) const { return first_key(item.position) / SPLIT; }
  int end_split(const Item& item) const { return (item.position + item.query_rows - 1) / SPLIT + 1; }

  std::vector<Item> make_items() const {
    std::vector<Item> items;
    for (int sequence = 0; sequence < args.num_sequences; sequence++) {
      const int begin = args.query_start_loc[sequence], end = args.query_start_loc[sequence + 1];
      for (int row = begin; row < end; row += height)
        for (int kv_head = 0; kv_head < args.num_kv_heads; kv_head++)
          items.push_back({kv_head, row, std::min(height, end - row), args.seq_lens[sequence] - (end - row),
                           args.block_tables + sequence * args.table_stride});
    }
    return items;
  }

  void run_items(Team& team, const std::vector<Item>& items) const {
    team.for_each(items.size(), [&](std::int64_t i) {
      float* memory = scratch(2 * sums_floats() + query_floats());
      Sums sums(memory, height * group), part(memory + sums_floats(), height * group);
      Number* query = reinterpret_cast<Number*>(memory + 2 * sums_floats());
      const Item& item = items[i];
      load_query(item, query);
      const Item& later = items[std::min(std::size_t(i) + team.size(), items.size() - 1)];
      for (int split = begin_split(item), end = end_split(item); split < end; split++) {
        const Step after = split + 1 < end ? first_step(item, split + 1) : first_step(later, begin_split(later));
        compute(item, split, after, query, split == begin_split(item) ? sums : part);
        if (split != begin_split(item)) sums.add(part, packed(item), args.head_dim);
      }
      finish(item, sums);
    });
  }

  // Few items with long contexts: the threads share the splits, then add them in the same order.
  void run_splits(Team& team, const std::vector<Item>& items) const {
    std::vector<std::pair<std::size_t, int>> units;  // item, split
    std::vector<std::size_t> first_unit;
    for (std::size_t i = 0; i < items.size(); i++) {
      first_unit.push_back(units.size());
      for (int split = begin_split(items[i]); split < end_split(items[i]); split++)
        units.emplace_back(i, split);
    }
    first_unit.push_back(units.size());
    const std::unique_ptr<float[]> parts(new float[units.size() * sums_floats()]);
    const auto part = [&](std::size_t unit) { return Sums(parts.get() + unit * sums_floats(), height * group); };
    team.for_each(units.size(), [&](std::int64_t unit) {
      const auto [item, split] = units[unit];
      const auto [later, later_split] = units[std::min(std::size_t(unit) + team.size(), units.size() - 1)];
      Number* query = reinterpret_cast<Number*>(scratch(query_floats()));
      load_query(items[item], query);
      Sums into = part(unit);
      compute(items[item], split, first_step(items[later], later_split), query, into);
    });
    team.for_each(items.size(), [&](std::int64_t i) {
      Sums sums(scratch(sums_floats()), height * group);
      sums.copy(part(first_unit[i]), packed(items[i]), args.head_dim);
      for (std::size_t unit = first_unit[i] + 1; unit < first_unit[i + 1]; unit++)
        sums.add(part(unit), packed(items[i]), args.head_dim);
      finish(items[i], sums);
    });
  }

  std::int64_t row_offset(const Item& item, int packed_row, std::int64_t row_stride) const {
    return (item.first_row + packed_row / group) * row_stride +
           (item.kv_head * group + packed_row % group) * std::int64_t(args.head_dim);
  }

  void load_query(const Item& item, Number* query) const {
    if (narrow_rows)
      load_query<bf16>(item, query);
    else
      load_query<float>(item, query);
  }
  template <class Row>
  void load_query(const Item& item, Number* query) const {
    for (int row = 0; row < packed(item); row++) {
      const Row* from = static_cast<const Row*>(args.query) + row_offset(item, row, args.query_stride);
      for (int d = 0; d < args.head_dim; d += WIDTH) store(query + row * args.head_dim + d, load(from + d));
    }
  }

  void finish(const Item& item, const Sums& sums) const {
    if (narrow_rows)
      finish<bf16>(item, sums);
    else
      finish<float>(item, sums);
  }
  template <class Row>
  void finish(const Item& item, const Sums& sums) const {
    for (int row = 0; row < packed(item); row++) {
      const std::int64_t row_stride = args.num_heads * std::int64_t(args.head_dim);
      Row* to = static_cast<Row*>(args.output) + row_offset(item, row, row_stride);
      Sixteen totals;
      for (int i = 0; i < LANES / WIDTH; i++) totals.part[i] = load(sums.total + row * LANES + i * WIDTH);
      float total = totals.sum(), factor = 1.0f;
      if (args.sinks) {
        const float sink = args.sinks[item.kv_head * group + row % group];
        const float raised = std::max(sums.anchor[row], sink);
        factor = exp(sums.anchor[row] - raised);
        total = total * factor + exp(sink - raised);
      }
      factor /= total;
      for (int d = 0; d < args.head_dim; d += WIDTH)
        store(to + d, load(sums.value + row * args.head_dim + d) * factor);
    }
  }

  Step locate(const Item& item, int begin, int end) const {
    Step step;
    step.begin = begin, step.end = end;
    for (int tile = 0; tile < STEP_TILES; tile++) {
      // A tile past the end stands for the first one: it is read, and hidden.
      const int position = begin + tile * LANES < end ? begin + tile * LANES : begin;
      const std::int64_t block = item.table[position / args.block_size];
      const int offset = position % args.block_size;
      const T* keys = static_cast<const T*>(args.kv_layer) + block * args.block_stride +
                      item.kv_head * args.head_stride;
      step.keys[tile] = keys + offset * args.head_dim;
      step.values[tile] = step.keys[tile] + args.value_stride;
      if constexpr (is_code<T>) {
        step.key_scales[tile] = scales_of(keys, args.block_size, args.head_dim) + offset;
        step.value_scales[tile] = scales_of(keys + args.value_stride, args.block_size, args.head_dim) + offset;
      }
    }
    return step;
  }

  // A split's first step, of at least one key.
  Step first_step(const Item& item, int split) const {
    const int begin = std::max(split * SPLIT, first_key(item.position) / STEP * STEP);
    return locate(item, begin, std::min(begin + STEP, end_key(item, split)));
  }
  int end_key(const Item& item, int split) const {
    return std::min((split + 1) * SPLIT, item.position + item.query_rows);
  }

  // The keys of one split. after: the step that this thread may take next, of another split.
  void compute(const Item& item, int split, const Step& after, const Number* query, Sums& sums) const {
    sums.clear(packed(item), args.head_dim);
    const int end = end_key(item, split);
    Step step = first_step(item, split);
    for (int begin = step.begin; begin < end; begin += STEP) {
      const bool is_last = begin + STEP >= end;
      const Step next = is_last ? after : locate(item, begin + STEP, std::min(begin + 2 * STEP, end));
      for (int row = 0; row < packed(item); row += MICRO_ROWS)
        dispatch(std::min(MICRO_ROWS, packed(item) - row),
                 [&](auto rows) { advance<rows>(item, step, row ? step : next, row, query, sums); });
      step = next;
    }
  }

  // Calls f with the run-time count as a constant.
  template <class F>
  static void dispatch(int count, F f) {
    switch (count) {
      case 1: return f(std::integral_constant<int, 1>{});
      case 2: return f(std::integral_constant<int, 2>{});
      case 3: return f(std::integral_constant<int, 3>{});
      case 4: return f(std::integral_constant<int, 4>{});
      case 5: return f(std::integral_constant<int, 5>{});
      default: return f(std::integral_constant<int, MICRO_ROWS>{});
    }
  }

  // Packed rows [row, row + ROWS) of the item take in one step of keys, while the next one is fetched.
  template <int ROWS>
  void advance(const Item& item, const Step& step, const Step& next, int row, const Number* query,
               Sums& sums) const {
    const int lowest = item.position + row / group, highest = item.position + (row + ROWS - 1) / group;
    const int begin = std::max(step.begin, first_key(lowest)), end = std::min(step.end, highest + 1);
    if (begin >= end) return;
    alignas(64) float scores[ROWS][STEP];
    Math::template score<ROWS>(step, next, args.head_dim, query + row * args.head_dim, scores);
    alignas(64) Number weights[ROWS][STEP];
    for (int r = 0; r < ROWS; r++) {
      const int position = item.position + (row + r) / group;
      weigh(step, scores[r], first_key(position) - step.begin, position - step.begin, row + r, weights[r], sums);
    }
    Math::template add_values<ROWS>(step, next, begin - step.begin, end - step.begin, args.head_dim, weights,
                                    sums.value + row * args.head_dim);
  }

  // Scores -> weights, for the keys first .. last of the step; raises the row's anchor where it must, and its total.
  void weigh(const Step& step, const float* from, int first, int last, int row, Number* to, Sums& sums) const {
    const auto hidden = [&](int i) {
      const Ints key = LANE_INDEX + i * WIDTH;
      return (key < first) | (key > last);
    };
    const bool sees_all = first <= 0 && last >= STEP - 1;
    Floats scores[STEP / WIDTH], highest = splat(LOWEST);
    for (int i = 0; i < STEP / WIDTH; i++) {
      scores[i] = load(from + i * WIDTH) * args.scale;
      if constexpr (is_code<T>) scores[i] *= scales(step.key_scales, i);
      if (args.softcap != 0) scores[i] = tanh(scores[i] / args.softcap) * args.softcap;
      if (!sees_all) scores[i] = hidden(i) ? splat(LOWEST) : scores[i];
      highest = max(scores[i], highest);
    }
    float& anchor = sums.anchor[row];
    if (any_above(highest, anchor + SLACK)) {
      const float raised = max_lanes(highest);
      if (anchor != LOWEST) sums.shrink(row, args.head_dim, exp(anchor - raised));
      anchor = raised;
    }
    for (int i = 0; i < STEP / WIDTH; i++) {
      scores[i] = Math::weight(scores[i], anchor);
      if (!sees_all) scores[i] = hidden(i) ? Floats{} : scores[i];
    }
    if constexpr (is_code<T>) {
      add_totals(scores, sums.total + row * LANES);
      for (int i = 0; i < STEP / WIDTH; i++) {
        scores[i] *= scales(step.value_scales, i);
        if (!sees_all) scores[i] = hidden(i) ? splat(0) : scores[i];  // the scale of a hidden key may be NaN
      }
      Math::keep(scores, to);
    } else {
      Math::keep(scores, to, sums.total + row * LANES);
    }
  }

  // Of keys [i * WIDTH, (i + 1) * WIDTH) of a step.
  static Floats scales(const bf16* const (&tiles)[STEP_TILES], int i) {
    return load(tiles[i * WIDTH / LANES] + i * WIDTH % LANES);
  }
};

// Row is the dtype of queries and outputs, T that of the pool.
template <class Row, class T>
void attention(Team& team, const AttentionArgs& args) {
  static_assert(std::is_same_v<Row, float> || std::is_same_v<Row, bf16>);
  Attention<T>(args, std::is_same_v<Row, bf16>).run(team);
}

}  // namespace pageturner
