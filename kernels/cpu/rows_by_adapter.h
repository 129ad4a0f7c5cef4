// The rows of a step by the adapter that they have, so that an adapter's factors are read once for all of its rows
// (Chen et al. 2023, "Punica": rows of a batch as segments, one an adapter).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pageturner {

// Stretches of a product's outputs with low-rank parts of their own, such as q, k and v: at most so many.
constexpr int PARTS = 3;

class RowsByAdapter {
 public:
  // Rows of one adapter: rows()[begin .. end), ascending.
  struct Run {
    std::int32_t adapter, begin, end;

    int size() const { return end - begin; }
  };

  // of_row: [num_rows] adapters below num_adapters, -1 for none. It must outlive this.
  void sort(const std::int32_t* of_row, int num_rows, int num_adapters) {
    adapters = of_row;
    starts.assign(num_adapters + 1, 0);
    for (int row = 0; row < num_rows; row++)
      if (of_row[row] >= 0) starts[of_row[row] + 1]++;
    for (int i = 0; i < num_adapters; i++) starts[i + 1] += starts[i];
    sorted.resize(starts[num_adapters]);
    all_runs.clear();
    all_pieces.clear();
    for (int i = 0; i < num_adapters; i++) {
      if (starts[i] < starts[i + 1]) all_runs.push_back({i, starts[i], starts[i + 1]});
      for (int begin = starts[i]; begin < starts[i + 1]; begin += TOGETHER)
        all_pieces.push_back({i, begin, std::min(begin + TOGETHER, starts[i + 1])});
    }
    for (int row = 0; row < num_rows; row++)
      if (of_row[row] >= 0) sorted[starts[of_row[row]]++] = row;
  }

  const std::int32_t* of_row() const { return adapters; }
  const std::int32_t* rows() const { return sorted.data(); }
  int num_rows() const { return sorted.size(); }

  // Of each adapter that has rows.
  const std::vector<Run>& runs() const { return all_runs; }
  // The same, cut into as many rows as one piece of work should take.
  const std::vector<Run>& pieces() const { return all_pieces; }

 private:
  static constexpr int TOGETHER = 32;

  const std::int32_t* adapters = nullptr;
  std::vector<std::int32_t> starts, sorted;
  std::vector<Run> all_runs, all_pieces;
};

}  // namespace pageturner
