// What smoothing moves from activations into weights: which weights are multiplied and which divided so that
// the model computes what it did (smooth.h).
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"

namespace moesaic::quantizer {

class Folding {
 public:
  /// The part of a layer that makes the inputs of linear `module`, and may be divided in their stead:
  /// "model.layers.0.input_layernorm" of q_proj, "model.layers.1.mlp.experts.3.up_proj" of its down_proj.
  /// Empty: there is none. `sandwich`: the model norms outputs as well (DecoderSpec::sandwich_norm).
  static std::string MakerOf(const std::string& module, bool sandwich);

  explicit Folding(bool sandwich = false) : sandwich_(sandwich) {}
  /// `maker`'s outputs are divided by scales, and the inputs of all linears that read them multiplied.
  void Add(const std::string& maker, std::vector<float> scales);
  bool empty() const { return scales_.empty(); }
  const std::map<std::string, std::vector<float>>& scales() const { return scales_; }

  /// Whether the item, a linear's module or a tensor's name, is changed at all.
  bool Touches(const std::string& item) const {
    return InputsOf(item) != nullptr || OutputsOf(item) != nullptr;
  }
  /// Folds rows [first, first + count) of an item, each of `columns` values; a vector is one row.
  void Apply(const kernels::ExecContext& ctx, const std::string& item, int64_t first, int64_t count,
             int64_t columns, float* rows) const;
  /// One of them; any thread may call it.
  void ApplyToRow(const std::string& item, int64_t row, int64_t columns, float* values) const;

 private:
  const std::vector<float>* Find(const std::string& maker) const;
  const std::vector<float>* InputsOf(const std::string& item) const { return Find(MakerOf(item, sandwich_)); }
  const std::vector<float>* OutputsOf(const std::string& item) const;

  bool sandwich_;
  std::map<std::string, std::vector<float>> scales_;
};

}  // namespace moesaic::quantizer
