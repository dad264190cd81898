// Topologies, inputs and brute-force results for tests of the exchange.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "comm/exchange/exchange.h"
#include "comm/topology/topology_builder.h"
#include "comm/transport/local_transport.h"

namespace moesaic::comm {

/// Topology of a shape: "4" is a flat group, "1+3" has two groups, "(2+2)+(1+3)" three levels. Levels are
/// named "L0", the root, "L1", and so on.
class ShapeReader {
 public:
  static Topology Read(const std::string& shape) {
    ShapeReader reader(shape);
    const bool flat = shape.find('+') == std::string::npos;
    if (flat) return Topology::Flat(std::stoi(shape), kOuter);
    const int root = reader.builder_.AddGroup(-1, "L0", kOuter, 0);
    reader.Sum(root, 1);
    return reader.builder_.Finish(shape, "test", {DeviceType{}});
  }

 private:
  static constexpr Link kOuter = {.latency_s = 5e-6, .bytes_per_s = 1e9};
  static constexpr Link kInner = {.latency_s = 1e-6, .bytes_per_s = 20e9, .shared = false};

  explicit ShapeReader(const std::string& text) : text_(text) {}

  void Sum(int parent, int depth) {
    for (;;) {
      const int group = builder_.AddGroup(parent, "L" + std::to_string(depth), kInner, 0);
      if (text_[at_] == '(') {
        ++at_;
        Sum(group, depth + 1);
        ++at_;  // ')'
      } else {
        const int count = text_[at_++] - '0';
        for (int i = 0; i < count; ++i) builder_.AddDevice(group, 0, 0);
      }
      if (at_ == text_.size() || text_[at_] != '+') return;
      ++at_;
    }
  }

  const std::string text_;
  size_t at_ = 0;
  TopologyBuilder builder_;
};

/// Input of one rank.
struct RankInput {
  int64_t tokens = 0;
  std::vector<float> x;        // [tokens, hidden]
  std::vector<int32_t> ids;    // [tokens, k]
  std::vector<float> weights;  // [tokens, k]

  TopK topk(int k) const { return {tokens, k, ids, weights, {}}; }
};

struct RandomInput {
  int hidden = 48, experts = 12, k = 3;
  int max_tokens = 9;
  double absent = 0.1;        ///< Share of ids that are -1.
  bool duplicates = false;    ///< Whether a token may have an expert twice.
  double empty_ranks = 0.15;  ///< Share of ranks without tokens.
};

inline RankInput MakeInput(const RandomInput& shape, uint32_t seed, int rank) {
  std::mt19937 random(seed * 1000 + static_cast<uint32_t>(rank));
  const auto uniform = [&] { return static_cast<double>(random()) / 4294967296.0; };
  RankInput input;
  input.tokens = uniform() < shape.empty_ranks ? 0 : random() % (shape.max_tokens + 1);
  for (int64_t i = 0; i < input.tokens * shape.hidden; ++i)
    input.x.push_back(static_cast<float>(4 * uniform() - 2));
  for (int64_t token = 0; token < input.tokens; ++token) {
    std::vector<int32_t> order(shape.experts);
    for (int e = 0; e < shape.experts; ++e) order[e] = e;
    std::shuffle(order.begin(), order.end(), random);
    for (int slot = 0; slot < shape.k; ++slot) {
      int32_t id = order[slot % shape.experts];
      if (shape.duplicates && slot > 0 && uniform() < 0.3) id = input.ids.back();
      if (uniform() < shape.absent) id = -1;
      input.ids.push_back(id);
      input.weights.push_back(static_cast<float>(uniform()));
    }
  }
  return input;
}

/// Placement with experts per rank that differ, ranks without experts, and replicas.
inline ExpertMap UnevenMap(int experts, int ranks, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<int>> by_rank(ranks);
  for (int e = 0; e < experts; ++e) {
    std::vector<int> order(ranks);
    for (int r = 0; r < ranks; ++r) order[r] = r;
    std::shuffle(order.begin(), order.end(), random);
    const int copies = std::min<int>(ranks, 1 + static_cast<int>(random() % 3) / 2);
    // Rank 1 of several has no experts.
    for (int i = 0, placed = 0; i < ranks && placed < copies; ++i) {
      if (ranks > 1 && order[i] == 1) continue;
      by_rank[order[i]].push_back(e);
      ++placed;
    }
  }
  return *ExpertMap::Create(experts, by_rank);
}

/// The output of an expert for one row: any function that differs between experts.
inline std::vector<float> ExpertOutput(int expert, std::span<const float> x) {
  std::vector<float> y(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    y[i] = x[i] * (1.0F + 0.25F * static_cast<float>(expert)) - static_cast<float>(expert % 5);
  return y;
}

/// A row of x as experts see it.
inline std::vector<float> AfterWire(std::span<const float> x, Payload wire) {
  const auto hidden = static_cast<int64_t>(x.size());
  std::vector<std::byte> bytes(static_cast<size_t>(WireRowBytes(wire, hidden)));
  EncodeRow(Payload::kF32, std::as_bytes(x).data(), hidden, wire, bytes.data());
  std::vector<float> row(x.size());
  DecodeRow(wire, bytes.data(), hidden, row.data());
  return row;
}

/// Expected sums of a rank's tokens, and the sums of magnitudes that bound their rounding.
struct Expected {
  std::vector<double> sum, magnitude;  // [tokens, hidden]
};
inline Expected BruteForce(const RankInput& input, const RandomInput& shape, Payload wire,
                           const std::vector<bool>& lost_experts = {}) {
  Expected expected;
  expected.sum.resize(input.x.size());
  expected.magnitude.resize(input.x.size());
  for (int64_t token = 0; token < input.tokens; ++token) {
    const auto x = AfterWire(std::span(input.x).subspan(token * shape.hidden, shape.hidden), wire);
    for (int slot = 0; slot < shape.k; ++slot) {
      const int32_t id = input.ids[token * shape.k + slot];
      if (id < 0 || (!lost_experts.empty() && lost_experts[id])) continue;
      const auto y = ExpertOutput(id, x);
      for (int i = 0; i < shape.hidden; ++i) {
        const double term = static_cast<double>(input.weights[token * shape.k + slot]) * y[i];
        expected.sum[token * shape.hidden + i] += term;
        expected.magnitude[token * shape.hidden + i] += std::abs(term);
      }
    }
  }
  return expected;
}

/// Runs the experts of a rank over dispatched rows.
inline std::vector<float> RunExperts(const ExpertMap& map, int rank, int hidden, const Dispatched& rows) {
  std::vector<float> y;
  const int64_t scales = ScalesPerRow(rows.payload(), hidden), bytes = hidden * ElementBytes(rows.payload());
  std::vector<std::byte> wire(static_cast<size_t>(WireRowBytes(rows.payload(), hidden)));
  std::vector<float> x(hidden);
  for (int local = 0; local < map.local_experts(rank); ++local) {
    for (int64_t row = rows.expert_begin()[local]; row < rows.expert_begin()[local + 1]; ++row) {
      std::copy_n(rows.data().data() + row * bytes, bytes, wire.data());
      if (scales > 0) {
        const auto from = std::as_bytes(rows.scales().subspan(row * scales, scales));
        std::copy(from.begin(), from.end(), wire.begin() + hidden);
      }
      DecodeRow(rows.payload(), wire.data(), hidden, x.data());
      const auto out = ExpertOutput(map.physical(map.PhysicalIndex(rank, local)).expert, x);
      y.insert(y.end(), out.begin(), out.end());
    }
  }
  return y;
}

inline std::vector<tensor::BF16> ToBF16(std::span<const float> values) {
  std::vector<tensor::BF16> rounded;
  for (const float value : values) rounded.push_back(tensor::ToBF16(value));
  return rounded;
}

}  // namespace moesaic::comm
