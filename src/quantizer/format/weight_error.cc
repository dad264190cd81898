#include "quantizer/format/weight_error.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "base/round.h"
#include "models/model_info.h"
#include "quantizer/calibrate/analysis.h"
#include "quantizer/format/source_form.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;
using checkpoint::LinearSource;

// Rows per task. Their values are held twice as f32: a few megabytes per thread.
constexpr int64_t kErrorRows = kRowStep;

Status AddErrors(const Checkpoint& quantized, const Checkpoint& source, const Folding& folding,
                 const ModelItem& item, runtime::ThreadPool& pool, LinearError* to) {
  const int64_t n = item.shape[0], k = item.shape[1];
  ASSIGN_OR_RETURN(const LinearSource now, quantized.FindLinear(item.name, n, k));
  ASSIGN_OR_RETURN(const LinearSource then, source.FindLinear(item.name, n, k));
  const int64_t blocks = base::CeilDiv(n, kErrorRows);
  // Added in order, so that the result does not depend on threads.
  std::vector<LinearError> sums(static_cast<size_t>(blocks));
  std::mutex mutex;
  Status failure;
  pool.Run(blocks, [&](int64_t block, int) {
    const int64_t first = block * kErrorRows, rows = std::min(kErrorRows, n - first);
    std::vector<float> a(static_cast<size_t>(rows * k)), b(a.size());
    Status status = quantized.ReadLinearRows(now, first, rows, a);
    if (status.ok()) status = source.ReadLinearRows(then, first, rows, b);
    for (int64_t r = 0; r < rows; ++r) folding.ApplyToRow(item.name, first + r, k, b.data() + r * k);
    LinearError& sum = sums[static_cast<size_t>(block)];
    for (size_t i = 0; i < a.size(); ++i) {
      const double difference = static_cast<double>(a[i]) - b[i];
      sum.error += difference * difference;
      sum.weight += static_cast<double>(b[i]) * b[i];
    }
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure.ok()) failure = std::move(status);
  });
  for (const LinearError& sum : sums) {
    to->error += sum.error;
    to->weight += sum.weight;
  }
  return failure;
}

}  // namespace

std::string KindOf(const std::string& module) {
  const std::string kind = module.substr(module.rfind('.') + 1);
  if (module.find(".shared_experts.") != std::string::npos) return "shared_experts." + kind;
  return module.find(".experts.") != std::string::npos ? "experts." + kind : kind;
}

double LinearError::relative() const { return weight > 0 ? std::sqrt(error / weight) : 0; }

StatusOr<std::vector<LinearError>> WeightErrors(
    const Checkpoint& quantized, const Checkpoint& source, runtime::ThreadPool& pool,
    const std::function<bool(int64_t done, int64_t total)>& progress) {
  ASSIGN_OR_RETURN(const std::vector<ModelItem> items, ListItems(source));
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  Folding folding(spec.sandwich_norm);
  const std::string path = quantized.path() + "/" + kAnalysisFile;
  StatusOr<Analysis> analysis = Analysis::Load(path, /*key=*/"", spec.sandwich_norm);
  if (analysis.ok()) {
    RETURN_IF_ERROR(analysis->folding.Check(items, path));
    folding = std::move(analysis->folding);
  } else if (analysis.status().code() != StatusCode::kNotFound) {
    return analysis.status();
  }
  const auto linears = std::ranges::count(items, true, &ModelItem::roundable);
  std::vector<LinearError> errors;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].roundable) continue;
    LinearError& error = errors.emplace_back();
    error.name = items[i].name;
    error.kind = KindOf(items[i].name);
    error.layer = items[i].layer;
    RETURN_IF_ERROR(AddErrors(quantized, source, folding, items[i], pool, &error));
    source.ForgetMaps();
    quantized.ForgetMaps();
    if (progress && !progress(std::ssize(errors), linears)) return Cancelled("interrupted");
  }
  return errors;
}

StatusOr<TokenBytes> BytesOf(const Checkpoint& source) {
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  ASSIGN_OR_RETURN(const std::vector<ModelItem> items, ListItems(source));
  ASSIGN_OR_RETURN(const std::vector<SourceForm> forms, FormsOf(source, items));
  TokenBytes bytes;
  for (size_t i = 0; i < items.size(); ++i) {
    bytes.total += forms[i].bytes;
    if (LayerOf(items[i].name) >= spec.layers) continue;  // MTP modules
    int64_t active = forms[i].bytes;
    if (items[i].routed) active = active * spec.moe.top_k / spec.moe.experts;
    if (items[i].name.starts_with("model.embed_tokens") && !spec.tied) active /= spec.vocab;
    bytes.active += active;
  }
  return bytes;
}

}  // namespace moesaic::quantizer
