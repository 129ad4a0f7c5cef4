// The lean decoder's forward with quantised weights as one call: hundreds of operations of microseconds, by
// one team of threads that stays awake through all of them.
//
// service/model/decoder.py is the same flow op by op, and gives the same bits. Activations are float32. Of the
// last layer only keys and values of all rows are needed: what follows them is for rows that want logits.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "embedding.h"
#include "fused.h"
#include "packed_low_rank.h"
#include "scores.h"
#include "thread_team.h"

namespace pageturner {

// Mirrored by ctypes in forward.py, as the next two. What pointers name must outlive the model.
struct DecoderLayer {
  PackedWeight qkv, out, gate_up, down;
  const float* attention_norm;  // [hidden_size], as mlp_norm
  const float* mlp_norm;
  const float* q_norm;  // [head_dim], as k_norm; null: none
  const float* k_norm;
  const float* sinks;  // [num_heads], or null
  std::int32_t rotated, sliding_window, chunk;
  float scale, softcap;
};

struct DecoderModel {
  PackedWeight embedding, head;
  const DecoderLayer* layers;
  const float* norm;  // [hidden_size]
  const float* cos;   // [positions, head_dim], as sin
  const float* sin;
  std::int32_t num_layers, num_heads, num_kv_heads, head_dim;
  float eps;
};

// T rows of S sequences, as kernels/layout.py's AttentionBatch has them; R of them want logits.
struct DecoderStep {
  const std::int64_t* token_ids;  // [T]
  const std::int64_t* positions;
  const std::int64_t* slot_mapping;
  const std::int32_t* query_start_loc;  // [S + 1]
  const std::int32_t* seq_lens;         // [S]
  const std::int32_t* block_tables;     // [S], table_stride apart
  const std::int64_t* logit_rows;       // [R]
  void* pool;                           // strides in elements
  float* logits;                        // [R - known.num_rows, vocab_size], of the rows that score nothing
  const AdapterLayer* const* adapters;  // [num_adapters], each with its layers
  const std::int32_t* adapter_of_row;   // [T], -1 for none; null where there are no adapters
  std::int64_t table_stride, layer_stride, block_stride, value_stride, head_stride;
  std::int32_t num_rows, num_sequences, num_logit_rows, block_size;
  std::int32_t num_adapters, adapter_ranks;  // ranks: the most of one adapter in one product, all parts together
  KnownTokens known;                         // of the last of the R rows, which yield these in place of logits
};

// What a profile tells apart. Mirrored by forward.py.
enum class Phase { host, embed, norm, qkv, rope, attention, quantise, out, gate_up, down, head, count };

class DecoderForward {
 public:
  DecoderForward(const DecoderModel& model, int num_threads)
      : model(model), layers(model.layers, model.layers + model.num_layers), team(num_threads) {}

  // Writes the KV of every row that has a slot, and the logits. T is the dtype of the pool.
  template <class T>
  void forward(const DecoderStep& step) {
    int rows = step.num_rows;
    make_room(std::max(rows, step.num_logit_rows));
    adapters.begin(step.adapters, step.num_adapters, step.adapter_of_row, rows, step.adapter_ranks);
    lap(Phase::host);
    embed(team, model.embedding, step.token_ids, rows, residual.data());
    gather(model.cos, model.head_dim, model.head_dim, step.positions, rows, cos.data());
    gather(model.sin, model.head_dim, model.head_dim, step.positions, rows, sin.data());
    lap(Phase::embed);
    const float* hidden = nullptr;  // what the product before adds to the residual
    Queries queries{rows, step.num_sequences, step.query_start_loc, step.seq_lens, step.block_tables};
    for (int index = 0; index < model.num_layers; index++) {
      const DecoderLayer& layer = layers[index];
      T* kv_layer = static_cast<T*>(step.pool) + index * step.layer_stride;
      norm(hidden, layer.attention_norm, rows, layer.qkv);
      multiply(index, layer.qkv, &AdapterLayer::qkv, codes.data(), rows, qkv.data(), Phase::qkv);
      queries.heads = write_kv<T>(layer, step, kv_layer);
      if (index + 1 == model.num_layers) {
        if (!step.num_logit_rows) return;
        queries = pick(step, queries.heads);
        rows = queries.num_rows;
      }
      attend(layer, step, queries, kv_layer);
      quantise(attended.data(), rows, layer.out);
      multiply(index, layer.out, &AdapterLayer::out, codes.data(), rows, added.data(), Phase::out);
      norm(added.data(), layer.mlp_norm, rows, layer.gate_up);
      gate(index, layer, rows);
      multiply(index, layer.down, &AdapterLayer::down, gated.data(), rows, added.data(), Phase::down);
      hidden = added.data();
    }
    norm(hidden, model.norm, rows, model.head);
    const int sampled = rows - step.known.num_rows;
    product(team, model.head, codes.data(), sampled, step.logits, model.head.out_features);
    scores.score(team, model.head, codes.data() + sampled * model.head.code_row_bytes(), step.known);
    lap(Phase::head);
  }

  // Seconds in each phase since the last call; the first turns the clock on.
  std::array<double, int(Phase::count)> profile() {
    profiling = true;
    std::array<double, int(Phase::count)> found = seconds;
    seconds.fill(0);
    return found;
  }

 private:
  const DecoderModel model;
  const std::vector<DecoderLayer> layers;
  ThreadTeam team;
  StepAdapters adapters;
  RowScores scores;

  // [rows, ...] of the step. codes: what the next product reads; gated: what down reads.
  Buffer<float> residual, added, picked, qkv, normed_query, normed_key, query, picked_query, attended, cos, sin;
  Buffer<std::int8_t> codes, gated;
  Buffer<std::int32_t> picked_starts, picked_lens, picked_tables;

  bool profiling = false;
  std::array<double, int(Phase::count)> seconds{};
  std::chrono::steady_clock::time_point last;

  // [rows, heads, head_dim], rows `stride` apart.
  struct Heads {
    const float* rows;
    std::int64_t stride;
  };

  // The rows that attend, in sequences as DecoderStep has them.
  struct Queries {
    int num_rows, num_sequences;
    const std::int32_t* query_start_loc;
    const std::int32_t* seq_lens;
    const std::int32_t* block_tables;
    Heads heads;
  };

  int hidden_size() const { return model.embedding.in_features; }
  int query_size() const { return model.num_heads * model.head_dim; }
  int key_size() const { return model.num_kv_heads * model.head_dim; }

  void make_room(std::int64_t rows) {
    for (Buffer<float>* buffer : {&residual, &added, &picked}) buffer->of(rows * hidden_size());
    for (Buffer<float>* buffer : {&normed_query, &query, &picked_query, &attended}) buffer->of(rows * query_size());
    normed_key.of(rows * key_size());
    qkv.of(rows * (query_size() + 2 * key_size()));
    for (Buffer<float>* buffer : {&cos, &sin}) buffer->of(rows * model.head_dim);
    std::int64_t bytes = model.head.code_row_bytes(), gated_bytes = 0;
    for (const DecoderLayer& layer : layers) {
      for (const PackedWeight* weight : {&layer.qkv, &layer.out, &layer.gate_up})
        bytes = std::max(bytes, weight->code_row_bytes());
      gated_bytes = std::max(gated_bytes, layer.down.code_row_bytes());
    }
    codes.of(rows * bytes);
    gated.of(rows * gated_bytes);
  }

  // The rows of a table, `stride` apart in it, that the indices name.
  void gather(const float* table, std::int64_t stride, int size, const std::int64_t* indices, int rows, float* to) {
    for_each_row(team, rows, size,
                 [&](std::int64_t row) { std::copy_n(table + indices[row] * stride, size, to + row * size); });
  }

  // The residual takes in `hidden`, unless null; its norm becomes the codes that `weight` wants.
  void norm(const float* hidden, const float* weights, int rows, const PackedWeight& weight) {
    const NormRows args{hidden ? hidden : residual.data(), hidden ? residual.data() : nullptr, weights,
                        residual.data(), hidden_size(), rows, hidden_size(), model.eps};
    norm_and_quantise(team, args, weight.group, codes.data());
    lap(Phase::norm);
  }

  void quantise(const float* from, int rows, const PackedWeight& weight) {
    quantise_rows(team, from, weight.in_features, rows, weight.in_features, weight.group, codes.data());
    lap(Phase::quantise);
  }

  // A layer's product, with what adapters add to it.
  void multiply(int layer, const PackedWeight& weight, PackedLowRank AdapterLayer::*low_rank, const void* rows_of_codes,
                int rows, float* output, Phase phase) {
    if (adapters)
      product(team, weight, rows_of_codes, rows, output, weight.out_features,
              addend(layer, weight, low_rank, rows_of_codes));
    else
      product(team, weight, rows_of_codes, rows, output, weight.out_features);
    lap(phase);
  }

  void gate(int index, const DecoderLayer& layer, int rows) {
    if (adapters)
      gated_product(team, layer.gate_up, codes.data(), rows, layer.down.group, gated.data(),
                    addend(index, layer.gate_up, &AdapterLayer::gate_up, codes.data()));
    else
      gated_product(team, layer.gate_up, codes.data(), rows, layer.down.group, gated.data());
    lap(Phase::gate_up);
  }

  StepAdapters::Addend addend(int layer, const PackedWeight& weight, PackedLowRank AdapterLayer::*low_rank,
                              const void* rows_of_codes) {
    std::array<int, PARTS> parts = {weight.out_features, 0, 0};
    if (low_rank == &AdapterLayer::qkv) parts = {query_size(), key_size(), key_size()};
    if (low_rank == &AdapterLayer::gate_up) parts[0] = parts[1] = weight.out_features / 2;
    return adapters.addend(team, layer, low_rank, weight, rows_of_codes, parts);
  }

  // qkv -> the keys and values of every row that has a slot, in a layer's part of the pool; returns the queries.
  template <class T>
  Heads write_kv(const DecoderLayer& layer, const DecoderStep& step, T* kv_layer) {
    Heads query_heads{qkv.data(), layer.qkv.out_features};
    Heads key_heads{qkv.data() + query_size(), layer.qkv.out_features};
    const Heads value_heads{qkv.data() + query_size() + key_size(), layer.qkv.out_features};
    if (layer.q_norm) {
      query_heads = norm_heads(query_heads, step.num_rows, model.num_heads, layer.q_norm, normed_query.data());
      key_heads = norm_heads(key_heads, step.num_rows, model.num_kv_heads, layer.k_norm, normed_key.data());
    }
    const KvWriteArgs write{key_heads.rows, value_heads.rows, kv_layer, step.slot_mapping,
                            key_heads.stride, value_heads.stride,
                            step.block_stride, step.value_stride, step.head_stride,
                            step.num_rows, model.num_kv_heads, model.head_dim, step.block_size};
    if (layer.rotated) {
      const RotateArgs rotate{query_heads.rows, query.data(), cos.data(), sin.data(), query_heads.stride,
                              model.num_heads};
      rope_and_write_kv<float, T, float>(team, rotate, write);
      query_heads = {query.data(), query_size()};
    } else {
      pageturner::write_kv<float, T>(team, write);
    }
    lap(Phase::rope);
    return query_heads;
  }

  // The rows that want logits go on alone, in that order: residuals and queries, each a sequence of one row.
  Queries pick(const DecoderStep& step, Heads heads) {
    const int rows = step.num_logit_rows;
    adapters.pick(step.logit_rows, rows);
    gather(residual.data(), hidden_size(), hidden_size(), step.logit_rows, rows, picked.data());
    std::swap(residual, picked);
    gather(heads.rows, heads.stride, query_size(), step.logit_rows, rows, picked_query.data());
    std::int32_t* starts = picked_starts.of(rows + 1);
    std::int32_t* lens = picked_lens.of(rows);
    std::int32_t* tables = picked_tables.of(rows * step.table_stride);
    const std::int32_t* ends = step.query_start_loc + 1;
    starts[0] = 0;
    for (int i = 0; i < rows; i++) {
      const std::int64_t row = step.logit_rows[i];
      const std::int64_t sequence = std::upper_bound(ends, ends + step.num_sequences, row) - ends;
      starts[i + 1] = i + 1;
      lens[i] = std::int32_t(step.seq_lens[sequence] - (ends[sequence] - row) + 1);
      std::copy_n(step.block_tables + sequence * step.table_stride, step.table_stride,
                  tables + i * step.table_stride);
    }
    return {rows, rows, starts, lens, tables, {picked_query.data(), query_size()}};
  }

  template <class T>
  void attend(const DecoderLayer& layer, const DecoderStep& step, const Queries& queries, const T* kv_layer) {
    attention<float, T>(team, {queries.heads.rows, attended.data(), kv_layer,
                               queries.query_start_loc, queries.seq_lens, queries.block_tables, layer.sinks,
                               queries.heads.stride, step.table_stride,
                               step.block_stride, step.value_stride, step.head_stride,
                               queries.num_sequences, model.num_heads, model.num_kv_heads, model.head_dim,
                               step.block_size, layer.sliding_window, layer.chunk,
                               layer.scale, layer.softcap});
    lap(Phase::attention);
  }

  Heads norm_heads(const Heads& heads, int rows, int count, const float* norm, float* to) {
    rms_norm<float>(team, {heads.rows, nullptr, norm, to, nullptr, heads.stride, model.head_dim, rows, count,
                           model.head_dim, model.eps});
    return {to, std::int64_t{count} * model.head_dim};
  }

  void lap(Phase phase) {
    if (!profiling) return;
    const auto now = std::chrono::steady_clock::now();
    if (phase != Phase::host) seconds[int(phase)] += std::chrono::duration<double>(now - last).count();
    last = now;
  }
};

}  // namespace pageturner
