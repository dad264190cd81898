#include "carve/carve_plan.h"

#include <cmath>
#include <cstring>
#include <span>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors_writer.h"

namespace moesaic::carve {
namespace {

using checkpoint::HeldTensor;
using checkpoint::TensorOutput;
using tensor::DType;

constexpr char kOptions[] = "options";

std::vector<int32_t> OptionValues(const CarveOptions& options) {
  return {options.slices, options.shared, options.active};
}

std::string Prefix(int64_t layer) { return fmt::format("layers.{}.", layer); }

// Largest router weight that is accepted. A search finds at most 31; beyond this limit scores could leave the
// range of kRouterScale (carve.cc).
constexpr float kLargestWeight = 1000;

template <typename T>
StatusOr<std::vector<T>> Read(const checkpoint::Checkpoint& file, const std::string& name, DType dtype,
                              const std::vector<int64_t>& shape) {
  ASSIGN_OR_RETURN(const checkpoint::TensorEntry* entry, file.Expect(name, shape));
  if (entry->dtype != dtype) {
    return InvalidArgument("{}: {} must be {}, found {}", file.path(), name, tensor::DTypeName(dtype),
                           tensor::DTypeName(entry->dtype));
  }
  std::vector<T> values(entry->bytes.size() / sizeof(T));
  std::memcpy(values.data(), entry->bytes.data(), entry->bytes.size());
  return values;
}

StatusOr<std::vector<float>> ReadRouter(const checkpoint::Checkpoint& file, const std::string& name,
                                        const std::vector<int64_t>& shape) {
  ASSIGN_OR_RETURN(std::vector<float> values, Read<float>(file, name, DType::kF32, shape));
  for (const float v : values) {
    if (!(std::fabs(v) <= kLargestWeight)) {
      return InvalidArgument("{}: {} must lie within +-{}, found {}", file.path(), name, kLargestWeight, v);
    }
  }
  return values;
}

StatusOr<LayerPlan> ReadLayer(const checkpoint::Checkpoint& file, int layer, int64_t width, int64_t hidden,
                              const CarveOptions& options) {
  const int64_t routed = options.slices - options.shared, slice = width / options.slices;
  const std::string prefix = Prefix(layer), name = prefix + "expert";
  ASSIGN_OR_RETURN(const std::vector<int32_t> expert, Read<int32_t>(file, name, DType::kI32, {width}));
  LayerPlan plan;
  plan.experts.resize(static_cast<size_t>(routed));
  for (int j = 0; j < width; ++j) {
    if (expert[j] < -1 || expert[j] >= routed) {
      return InvalidArgument("{}: {}[{}] must be in [-1, {}), found {}", file.path(), name, j, routed,
                             expert[j]);
    }
    (expert[j] < 0 ? plan.shared : plan.experts[expert[j]]).push_back(j);
  }
  for (int64_t e = 0; e < routed; ++e) {
    if (std::ssize(plan.experts[e]) != slice) {
      return InvalidArgument("{}: {} must give each expert {} neurons, found {} for expert {}", file.path(),
                             name, slice, plan.experts[e].size(), e);
    }
  }
  ASSIGN_OR_RETURN(const std::vector<float> weights,
                   ReadRouter(file, prefix + "router.weight", {routed, hidden}));
  plan.router.weights = Eigen::Map<const RowMatrix>(weights.data(), routed, hidden);
  ASSIGN_OR_RETURN(plan.router.bias, ReadRouter(file, prefix + "router.bias", {routed}));
  return plan;
}

}  // namespace

StatusOr<std::vector<LayerPlan>> ReadCarvePlan(const std::string& path, const models::DecoderSpec& spec,
                                               const CarveOptions& options) {
  ASSIGN_OR_RETURN(const auto file, checkpoint::Checkpoint::Open(path));
  ASSIGN_OR_RETURN(const std::vector<int32_t> made_for, Read<int32_t>(*file, kOptions, DType::kI32, {3}));
  if (made_for != OptionValues(options)) {
    return InvalidArgument(
        "{}: was made for --slices {} --shared {} --active {}, found --slices {} --shared {} --active {}",
        path, made_for[0], made_for[1], made_for[2], options.slices, options.shared, options.active);
  }
  std::vector<LayerPlan> plans;
  for (int i = 0; i < spec.layers; ++i) {
    ASSIGN_OR_RETURN(LayerPlan plan, ReadLayer(*file, i, spec.intermediate, spec.hidden, options));
    plans.push_back(std::move(plan));
  }
  constexpr int kTensorsOfLayer = 3;
  const int64_t expected = 1 + int64_t{spec.layers} * kTensorsOfLayer;
  if (std::ssize(file->tensors()) != expected) {
    return InvalidArgument("{}: has {} tensors, but a plan of {} layers has {}", path, file->tensors().size(),
                           spec.layers, expected);
  }
  return plans;
}

Status WriteCarvePlan(const std::string& path, const CarveOptions& options,
                      const std::vector<LayerPlan>& plans) {
  std::vector<TensorOutput> outputs;
  const std::vector<int32_t> made_for = OptionValues(options);
  outputs.push_back(HeldTensor(kOptions, DType::kI32, {3}, std::as_bytes(std::span(made_for))));
  for (int64_t i = 0; i < std::ssize(plans); ++i) {
    const LayerPlan& plan = plans[i];
    const auto routed = std::ssize(plan.experts);
    int64_t width = std::ssize(plan.shared);
    for (const std::vector<int>& neurons : plan.experts) width += std::ssize(neurons);
    std::vector<int32_t> expert(static_cast<size_t>(width), -1);
    for (int64_t e = 0; e < routed; ++e) {
      for (const int j : plan.experts[e]) expert[j] = static_cast<int32_t>(e);
    }
    const RowMatrix& weights = plan.router.weights;
    outputs.push_back(
        HeldTensor(Prefix(i) + "expert", DType::kI32, {width}, std::as_bytes(std::span(expert))));
    outputs.push_back(
        HeldTensor(Prefix(i) + "router.weight", DType::kF32, {routed, weights.cols()},
                   std::as_bytes(std::span(weights.data(), static_cast<size_t>(weights.size())))));
    outputs.push_back(HeldTensor(Prefix(i) + "router.bias", DType::kF32, {routed},
                                 std::as_bytes(std::span(plan.router.bias))));
  }
  return checkpoint::WriteSafetensors(path, outputs, {{"format", "moesaic carve plan"}});
}

}  // namespace moesaic::carve
