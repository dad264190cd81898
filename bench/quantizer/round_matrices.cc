// round_matrices IN OUT GRID METHOD rounds matrices, given samples of their inputs.
//
// IN and OUT are safetensors in f32. IN holds matrices "W:<name>@<inputs>" [n, k] and tokens "X:<inputs>"
// [count, k]; OUT gets "<name>" [n, k] in its dequantized form. GRID is int8, int4_g32, int4_g128, nvfp4 or
// fp8; METHOD nearest, searched (scales by squared error), weighted (by the inputs' squares), gptq, or
// gptq_searched and gptq_weighted (GPTQ with such scales). Prints the loss on the tokens' own Hessian,
// damped, over that of nearest, for each matrix, and their sum's.
#include <cstdio>
#include <cstring>
#include <map>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_writer.h"
#include "kernels/kernel_table.h"
#include "quantizer/gptq/gptq.h"

namespace moesaic::quantizer {
namespace {

struct Tool {
  explicit Tool(int threads) : pool(*runtime::ThreadPool::Create({.threads = threads, .pin = true})) {}
  kernels::ExecContext context() { return {.kernels = &table, .pool = pool.get(), .scratch = &scratch}; }
  kernels::KernelTable table = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> pool;
  runtime::Arena scratch;
};

StatusOr<Grid> GridOf(const std::string& name) {
  static const std::map<std::string, Grid> kGrids = {{"int8", {GridKind::kInt8Channel, 0}},
                                                     {"int4_g32", {GridKind::kInt4Group, 32}},
                                                     {"int4_g128", {GridKind::kInt4Group, 128}},
                                                     {"nvfp4", {GridKind::kNvfp4, 16}},
                                                     {"fp8", {GridKind::kFp8Block, 128}}};
  const auto found = kGrids.find(name);
  if (found == kGrids.end()) return InvalidArgument("unknown grid \"{}\"", name);
  return found->second;
}

std::span<const float> Floats(const checkpoint::TensorEntry& entry) {
  return {reinterpret_cast<const float*>(entry.bytes.data()), entry.bytes.size() / sizeof(float)};
}

double LossOf(const kernels::ExecContext& ctx, const HessianFactor& factor, std::span<const float> weights,
              const std::vector<float>& rounded) {
  std::vector<float> errors(rounded.size());
  for (size_t i = 0; i < errors.size(); ++i) errors[i] = weights[i] - rounded[i];
  return OutputLoss(ctx, factor, errors.data(), static_cast<int>(errors.size() / factor.k));
}

Status Run(const std::string& in, const std::string& out, const std::string& grid_name,
           const std::string& method) {
  Tool tool(2);
  const kernels::ExecContext ctx = tool.context();
  ASSIGN_OR_RETURN(const Grid grid, GridOf(grid_name));
  ASSIGN_OR_RETURN(const auto mapped, runtime::MappedFile::Open(in));
  ASSIGN_OR_RETURN(const auto file, checkpoint::ParseSafetensors(mapped->bytes(), in));
  const bool gptq = method.starts_with("gptq");
  const bool weighted = method.ends_with("weighted"), searched = weighted || method.ends_with("searched");
  std::map<std::string, HessianFactor> factors;
  for (const auto& entry : file.tensors) {
    if (!entry.name.starts_with("X:")) continue;
    const auto k = static_cast<int>(entry.shape[1]);
    ASSIGN_OR_RETURN(Hessian hessian, Hessian::Create(k));
    hessian.Add(ctx, {.f32 = Floats(entry).data(),
                      .bf16 = nullptr,
                      .stride = k,
                      .count = static_cast<int>(entry.shape[0])});
    ASSIGN_OR_RETURN(factors[entry.name.substr(2)], FactorHessian(ctx, hessian, {}));
  }
  std::vector<checkpoint::TensorOutput> outputs;
  double total = 0, total_nearest = 0;
  for (const auto& entry : file.tensors) {
    if (!entry.name.starts_with("W:")) continue;
    const size_t at = entry.name.find('@');
    const auto name = entry.name.substr(2, at - 2);
    const HessianFactor& factor = factors.at(entry.name.substr(at + 1));
    const auto n = static_cast<int>(entry.shape[0]), k = static_cast<int>(entry.shape[1]);
    const std::span<const float> weights = Floats(entry);
    const auto nearest = RoundToNearest(ctx, grid, weights.data(), n, k, {});
    RETURN_IF_ERROR(Annotate(nearest.status(), name));
    ScaleSearch search{.by_error = searched, .importance = {}, .global_scale = 0};
    if (weighted) search.importance = factor.diagonal;
    GptqReport report;
    const auto rounded = gptq ? RoundByGptq(ctx, grid, weights.data(), n, k, factor, search, &report)
                              : RoundToNearest(ctx, grid, weights.data(), n, k, search);
    RETURN_IF_ERROR(Annotate(rounded.status(), name));
    std::vector<float> values(weights.size());
    Dequantize(*nearest, 0, n, values.data());
    const double before = LossOf(ctx, factor, weights, values);
    Dequantize(*rounded, 0, n, values.data());
    const double after = LossOf(ctx, factor, weights, values);
    std::printf("%-60s %.4f\n", name.c_str(), after / before);
    total += after;
    total_nearest += before;
    outputs.push_back(checkpoint::HeldTensor(name, tensor::DType::kF32, entry.shape,
                                             std::as_bytes(std::span<const float>(values))));
  }
  std::printf("loss of %s on %s, of nearest: %.4f\n", method.c_str(), grid_name.c_str(),
              total / total_nearest);
  return checkpoint::WriteSafetensors(out, outputs, {});
}

}  // namespace
}  // namespace moesaic::quantizer

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: round_matrices IN OUT GRID METHOD\n");
    return 2;
  }
  const auto status = moesaic::quantizer::Run(argv[1], argv[2], argv[3], argv[4]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", moesaic::Message(status).c_str());
  return status.ok() ? 0 : 1;
}
