// Cosines and sines of rotary position embedding, with plain, linear, YaRN (arXiv 2309.00071) and Llama 3
// scaling.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace moesaic::layers {

struct RopeSpec {
  enum class Scaling { kNone, kLinear, kYarn, kLlama3 };
  int dim = 0;  ///< rotated elements of a head: its first ones (GQA) or its rope part (MLA)
  double theta = 10000;
  bool interleaved = false;  ///< pairs (2i, 2i + 1) instead of (i, i + dim/2)
  Scaling scaling = Scaling::kNone;
  double factor = 1;
  int original_context = 0;
  double beta_fast = 32, beta_slow = 1;              // YaRN
  double attention_factor = 1;                       // YaRN: multiplies cos and sin
  double low_freq_factor = 1, high_freq_factor = 4;  // Llama 3

  bool operator==(const RopeSpec&) const = default;
};

/// Returns frequencies [dim / 2] with scaling applied: a token at position p is rotated by p * frequency[i].
/// Values are rounded to f32 like the releases' own code, because models were trained with exactly these.
std::vector<float> RopeFrequencies(const RopeSpec& spec);

/// Tables for positions [0, context), filled on demand. Use by one thread at a time.
class RopeTable {
 public:
  /// Reserves address space for the whole context without computing entries.
  static StatusOr<RopeTable> Create(const RopeSpec& spec, int context);

  /// Fills positions [0, positions) if they are not filled yet; positions <= context.
  void Reserve(runtime::ThreadPool& pool, int positions);

  const float* cos() const { return cos_.as<float>(); }  // [context, dim / 2]
  const float* sin() const { return sin_.as<float>(); }
  int dim() const { return 2 * half_; }
  bool interleaved() const { return interleaved_; }

 private:
  RopeTable() = default;
  std::vector<float> frequencies_;  // [half_]
  float factor_ = 1;
  int half_ = 0, context_ = 0, filled_ = 0;
  bool interleaved_ = false;
  runtime::Buffer cos_, sin_;
};

}  // namespace moesaic::layers
