// Folds smoothing into weights: some weights are multiplied and others divided so that the model's function
// stays the same (smooth.h).
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "quantizer/format/model_items.h"

namespace moesaic::quantizer {

class Folding {
 public:
  /// Returns the module that produces the inputs of linear `module` and can be divided in their place:
  /// "model.layers.0.input_layernorm" for q_proj, "model.layers.1.mlp.experts.3.up_proj" for its down_proj.
  /// Empty if there is none. `sandwich`: the model also norms outputs (DecoderSpec::sandwich_norm).
  static std::string MakerOf(const std::string& module, bool sandwich);

  explicit Folding(bool sandwich = false) : sandwich_(sandwich) {}
  /// Divides the outputs of `maker` by scales and multiplies the inputs of all linears that read them.
  void Add(const std::string& maker, std::vector<float> scales);
  /// Returns DataLoss unless the scales fit the items that they fold: one positive and finite number for each
  /// input or output. Apply requires it. `file` is named by the error.
  Status Check(std::span<const ModelItem> items, const std::string& file) const;
  bool empty() const { return scales_.empty(); }
  const std::map<std::string, std::vector<float>>& scales() const { return scales_; }

  /// True if folding changes the item, a linear's module or a tensor's name.
  bool Touches(const std::string& item) const {
    return InputsOf(item) != nullptr || OutputsOf(item) != nullptr;
  }
  /// Folds rows [first, first + count) of an item, each of `columns` values; a vector is one row.
  void Apply(const kernels::ExecContext& ctx, const std::string& item, int64_t first, int64_t count,
             int64_t columns, float* rows) const;
  /// The same for one row. Thread-safe.
  void ApplyToRow(const std::string& item, int64_t row, int64_t columns, float* values) const;

 private:
  const std::vector<float>* Find(const std::string& maker) const;
  const std::vector<float>* InputsOf(const std::string& item) const { return Find(MakerOf(item, sandwich_)); }
  const std::vector<float>* OutputsOf(const std::string& item) const;

  bool sandwich_;
  std::map<std::string, std::vector<float>> scales_;
};

}  // namespace moesaic::quantizer
