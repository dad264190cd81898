#include "quantizer/format/source_form.h"

#include <nlohmann/json.hpp>

#include <algorithm>

#include "base/round.h"
#include "checkpoint/linear_source.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;
using checkpoint::LinearSource;
using checkpoint::TensorEntry;
using checkpoint::WeightScheme;
using tensor::DType;

bool IsPlain(const TensorEntry& entry) {
  return entry.rows == nullptr && tensor::BlockOf(entry.dtype).elements == 1 && entry.dtype != DType::kF64;
}

// Returns the tensors of a linear: weight, scale, zero point, group index.
std::array<const TensorEntry*, 4> PartsOf(const LinearSource& linear) {
  return {linear.weight, linear.scale, linear.zero_point, linear.group_index};
}

SourceForm FormOfTensor(const TensorEntry& entry) {
  return {IsPlain(entry), entry.dtype, static_cast<int64_t>(entry.bytes.size())};
}

SourceForm FormOfLinear(const LinearSource& linear) {
  SourceForm form = FormOfTensor(*linear.weight);
  form.plain &= linear.scheme == WeightScheme::kPlain;
  for (const TensorEntry* part : PartsOf(linear)) {
    if (part != nullptr && part != linear.weight) form.bytes += static_cast<int64_t>(part->bytes.size());
  }
  // Permuted rows of a GGUF file are read through the map (SourceRows).
  if (linear.group_index != nullptr && linear.weight->rows == nullptr) {
    form.whole_bytes = static_cast<int64_t>(linear.group_index->bytes.size());
  }
  return form;
}

// Checks that a block begins at each multiple of kRowStep rows, where linears are cut.
Status CheckBlockRows(const LinearSource& linear) {
  if (linear.out <= linear.block_rows || kRowStep % linear.block_rows == 0) return OkStatus();
  return Unimplemented(
      "{}: {}: scale blocks of {} rows cannot be quantized again because their size does not divide {}; "
      "convert the checkpoint to bf16 first",
      linear.weight->file, linear.module, linear.block_rows, kRowStep);
}

DType ConfigDType(const nlohmann::json& config) {
  for (const char* key : {"torch_dtype", "dtype"}) {
    const auto found = config.find(key);
    if (found == config.end()) continue;
    if (*found == "float32") return DType::kF32;
    if (*found == "float16") return DType::kF16;
  }
  return DType::kBF16;
}

// Returns the likely form of an item when only the config is available.
SourceForm GuessForm(const ModelItem& item, DType dtype, const checkpoint::QuantConfig& quant) {
  SourceForm form{true, dtype, tensor::BytesOf(dtype, item.elements())};
  if (!item.linear) return form;
  const int64_t n = item.shape[0], k = item.shape[1];
  using Method = checkpoint::QuantConfig::Method;
  // DeepSeek's releases do not quantize embeddings, heads, routers and eh_proj, but they quantize kv_b_proj.
  if (quant.method == Method::kFp8Blocks && (item.roundable || item.name.ends_with(".kv_b_proj"))) {
    return {false, DType::kF8E4M3,
            n * k + 4 * base::CeilDiv(n, quant.block_rows) * base::CeilDiv(k, quant.block_cols)};
  }
  const checkpoint::QuantGroup* group =
      quant.method == Method::kCompressedTensors && item.roundable ? quant.GroupOf(item.name) : nullptr;
  if (group == nullptr) return form;
  const int64_t scales = group->group_size > 0 ? n * base::CeilDiv(k, group->group_size) : n;
  const int64_t group_index = group->needs_group_index ? 4 * k : 0;
  return {false, DType::kI32, base::CeilDiv(n * k * group->num_bits, 8) + 2 * scales + group_index,
          group_index};
}

// Returns the rows of `entry` that rows [first, first + rows) of the linear need. One row of the tensor
// covers `per_row` outputs; a tensor of one row is needed completely.
TensorEntry CutRows(const TensorEntry& entry, int64_t per_row, int64_t first, int64_t rows) {
  TensorEntry cut = entry;
  if (per_row == 0 || entry.shape.empty() || entry.shape[0] <= 1) return cut;
  const int64_t begin = first / per_row, end = std::min(base::CeilDiv(first + rows, per_row), entry.shape[0]);
  const auto row_bytes = entry.bytes.size() / static_cast<size_t>(entry.shape[0]);
  cut.bytes = entry.bytes.subspan(static_cast<size_t>(begin) * row_bytes,
                                  static_cast<size_t>(end - begin) * row_bytes);
  cut.shape[0] = end - begin;
  return cut;
}

}  // namespace

int64_t RowsOf(const ModelItem& item) { return item.shape.size() == 2 ? item.shape[0] : 1; }

StatusOr<std::vector<SourceForm>> FormsOf(const Checkpoint& source, const std::vector<ModelItem>& items) {
  std::vector<SourceForm> forms;
  forms.reserve(items.size());
  if (source.tensors().empty()) {
    ASSIGN_OR_RETURN(const checkpoint::QuantConfig quant,
                     checkpoint::ParseQuantConfig(source.config(), source.path()));
    const DType dtype = ConfigDType(source.config());
    for (const ModelItem& item : items) forms.push_back(GuessForm(item, dtype, quant));
    return forms;
  }
  for (size_t i = 0; i < items.size(); ++i) {
    const ModelItem& item = items[i];
    if (i % kItemsAMap == 0) source.ForgetMaps();
    if (!item.linear) {
      forms.push_back(FormOfTensor(*source.Find(item.name)));
      continue;
    }
    ASSIGN_OR_RETURN(const LinearSource linear, source.FindLinear(item.name, item.shape[0], item.shape[1]));
    RETURN_IF_ERROR(CheckBlockRows(linear));
    forms.push_back(FormOfLinear(linear));
  }
  return forms;
}

StatusOr<SourceRows> SourceRows::Find(const Checkpoint& source, const ModelItem& item, int64_t first,
                                      int64_t rows) {
  SourceRows found;
  found.first_ = first;
  found.is_linear_ = item.linear;
  found.part_of_.fill(-1);
  if (!item.linear) {
    found.entry_ = source.Find(item.name);
    if (found.entry_->rows != nullptr) return found;
    found.parts_.push_back(CutRows(*found.entry_, item.shape.size() == 2 ? 1 : 0, first, rows));
    return found;
  }
  ASSIGN_OR_RETURN(found.linear_, source.FindLinear(item.name, item.shape[0], item.shape[1]));
  if (found.linear_.weight->rows != nullptr) return found;
  const int64_t per_row[] = {1, found.linear_.block_rows, 32 / found.linear_.bits, 0};
  const auto parts = PartsOf(found.linear_);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == nullptr) continue;
    found.part_of_[i] = static_cast<int>(found.parts_.size());
    found.parts_.push_back(CutRows(*parts[i], per_row[i], first, rows));
  }
  found.linear_.out = rows;
  return found;
}

Status SourceRows::Read(const Checkpoint& source, int64_t first, int64_t count, std::span<float> out) const {
  if (through_map()) {
    return is_linear_ ? source.ReadLinearRows(linear_, first, count, out)
                      : source.ReadRows(*entry_, first, count, out);
  }
  if (!is_linear_) return source.ReadRows(parts_.front(), first - first_, count, out);
  LinearSource linear = linear_;
  const TensorEntry** places[] = {&linear.weight, &linear.scale, &linear.zero_point, &linear.group_index};
  for (size_t i = 0; i < part_of_.size(); ++i) {
    if (part_of_[i] >= 0) *places[i] = &parts_[static_cast<size_t>(part_of_[i])];
  }
  return source.ReadLinearRows(linear, first - first_, count, out);
}

}  // namespace moesaic::quantizer
