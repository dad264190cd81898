// The actions of `moesaic placement` on loads.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "app/input.h"
#include "app/output.h"
#include "app/placement_flags.h"
#include "app/table.h"
#include "parallel/placement/balance.h"
#include "parallel/placement/bounded_input.h"
#include "parallel/placement/load_file.h"
#include "parallel/placement/load_generator.h"
#include "parallel/placement/numpy_file.h"
#include "runtime/atomic_file.h"
#include "science/torch_file.h"

namespace moesaic::app {
namespace {

// Mean over layers with tokens.
double DefaultOrderImbalance(const parallel::LoadMatrix& load, int ranks) {
  const parallel::LayerPlacement order = parallel::InOrder(load.experts, ranks);
  double sum = 0;
  int layers = 0;
  for (int layer = 0; layer < load.layers; ++layer) {
    if (!parallel::HasTokens(load, layer)) continue;
    sum += parallel::Imbalance(order, load.layer(layer));
    ++layers;
  }
  return sum / layers;
}

// A file of torch.save(), as SGLang's recorder writes it.
StatusOr<parallel::Workload> ParseTorchLoad(std::string_view bytes, const std::string& name) {
  ASSIGN_OR_RETURN(const science::TorchFile file,
                   science::ParseTorchFile(std::as_bytes(std::span(bytes)), name));
  const auto counts = file.tensors.find("logical_count");
  if (counts == file.tensors.end())
    return InvalidArgument("{}: a PyTorch file of loads has a tensor \"logical_count\" (SGLang)", name);
  const std::vector<double> values(counts->second.values.begin(), counts->second.values.end());
  return parallel::ParseLoad(parallel::NumpyBytes(std::span<const double>(values), counts->second.shape),
                             name);
}

StatusOr<parallel::Workload> ReadWorkload(const std::string& path) {
  std::error_code error;
  if (path != kStandardInput && std::filesystem::is_directory(path, error)) return parallel::ReadLoad(path);
  ASSIGN_OR_RETURN(const std::string bytes,
                   path == kStandardInput ? ReadInput(path) : parallel::ReadBoundedFile(path));
  const std::string name = InputName(path);
  return parallel::IsZipFile(bytes) ? ParseTorchLoad(bytes, name) : parallel::ParseLoad(bytes, name);
}

Status CheckShapes(std::span<const parallel::Workload> workloads) {
  const parallel::LoadMatrix& first = workloads.front().total;
  for (const parallel::Workload& workload : workloads) {
    if (workload.total.layers == first.layers && workload.total.experts == first.experts) continue;
    return InvalidArgument("{}: must have {} layers of {} experts as {}, found {} of {}", workload.name,
                           first.layers, first.experts, workloads.front().name, workload.total.layers,
                           workload.total.experts);
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<parallel::Workload>> ReadLoads(const PlacementFlags& flags) {
  std::vector<parallel::Workload> loads;
  for (const std::string& path : flags.files) {
    ASSIGN_OR_RETURN(parallel::Workload load, ReadWorkload(path));
    if (!flags.windows || load.windows.empty()) {
      loads.push_back(std::move(load));
      continue;
    }
    for (size_t i = 0; i < load.windows.size(); ++i)
      loads.push_back({fmt::format("{} window {}", load.name, i), std::move(load.windows[i]), {}});
  }
  RETURN_IF_ERROR(CheckShapes(loads));
  return loads;
}

namespace {

// Options of generated loads that are like those of the files.
StatusOr<parallel::GeneratorOptions> FittedOptions(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<parallel::Workload> workloads, ReadLoads(flags));
  const std::vector<parallel::LoadMatrix> loads = parallel::Totals(workloads);
  if (loads.size() > 1 && flags.gives_correlation)
    return InvalidArgument("--correlation: excludes several loads, which determine it");
  const std::string& first = workloads.front().name;
  parallel::GeneratorOptions fit = parallel::FitGenerator(loads, flags.correlation);
  if (fit.layers == 0)
    return InvalidArgument(
        "{}: no layer has tokens in all of the {} loads; leave out loads of other models or empty windows",
        first, loads.size());
  if (fit.tokens_per_layer < 1)
    return InvalidArgument(
        "{}: layers must have 1 token or more on average, found {:.3g}; scale loads to counts", first,
        fit.tokens_per_layer);
  const auto [least, most] = std::ranges::minmax(fit.spreads);
  if (most == parallel::kMaxSpread) Tell("spreads are limited to {}\n", parallel::kMaxSpread);
  Tell("{} of {} experts, {} {:.2f} to {:.2f}, correlation {:.2f}\n", Counted(fit.layers, "layer"),
       fit.experts, fit.skew == parallel::Skew::kLogNormal ? "log-normal of sigma" : "power law of alpha",
       least, most, fit.correlation);
  return fit;
}

}  // namespace

Status RunPlacementExplain(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<parallel::Workload> loads, ReadLoads(flags));
  const int ranks = flags.ranks > 0 ? flags.ranks : std::min(32, loads.front().total.experts);
  std::vector<std::vector<std::string>> rows = {
      {"load", "hottest over mean", "variation", "sigma", "alpha", "fits", "default order", "correlation"}};
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const parallel::Workload& load : loads) {
    const parallel::FittedSkew skew = parallel::FitSkew(load.total);
    const double imbalance = DefaultOrderImbalance(load.total, ranks);
    const double correlation = parallel::LoadCorrelation(loads.front().total, load.total);
    const char* fits = skew.log_normal_error <= skew.power_law_error ? "log-normal" : "power law";
    rows.push_back({load.name, fmt::format("{:.2f}", skew.max_over_mean),
                    fmt::format("{:.2f}", skew.variation), fmt::format("{:.2f}", skew.sigma),
                    fmt::format("{:.2f}", skew.alpha), fits, fmt::format("{:.3f}", imbalance),
                    fmt::format("{:.2f}", correlation)});
    json.push_back({{"name", load.name},
                    {"max_over_mean", skew.max_over_mean},
                    {"variation", skew.variation},
                    {"sigma", skew.sigma},
                    {"alpha", skew.alpha},
                    {"fits", fits},
                    {"default_order", imbalance},
                    {"correlation_with_first", correlation}});
  }
  if (!flags.html.empty())
    RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.html, ExplanationHtml(ranks, rows, loads)));
  if (flags.json) {
    WriteOutput(json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  } else {
    Print("{} layers of {} experts; default order on {} ranks; correlation with the first load\n\n{}",
          loads.front().total.layers, loads.front().total.experts, ranks,
          FormatTable(rows, /*markdown=*/false));
  }
  return OkStatus();
}

Status RunPlacementGenerate(const PlacementFlags& flags) {
  parallel::GeneratorOptions options = {
      .layers = flags.layers,
      .experts = flags.experts,
      .skew = flags.skew == "log-normal" ? parallel::Skew::kLogNormal : parallel::Skew::kPowerLaw,
      .spread = flags.spread,
      .drift = flags.drift == "mixtures" ? parallel::Drift::kMixtures : parallel::Drift::kIndependent,
      .correlation = flags.correlation};
  if (!flags.files.empty()) {
    ASSIGN_OR_RETURN(options, FittedOptions(flags));
  }
  options.workloads = flags.workloads;
  options.seed = static_cast<uint64_t>(flags.seed);
  ASSIGN_OR_RETURN(const std::vector<parallel::Workload> loads, parallel::GenerateLoads(options));
  std::error_code error;
  std::filesystem::create_directories(flags.out, error);
  if (error) return IoError("{}: cannot be created: {}", flags.out, error.message());
  for (const parallel::Workload& load : loads) {
    const std::vector<int64_t> counts(load.total.tokens.begin(), load.total.tokens.end());
    const int64_t shape[] = {load.total.layers, load.total.experts};
    RETURN_IF_ERROR(runtime::WriteFileAtomically(
        flags.out + "/" + load.name + ".npy", parallel::NumpyBytes(std::span<const int64_t>(counts), shape)));
  }
  Tell("{} loads written to {}\n", loads.size(), flags.out);
  return OkStatus();
}

}  // namespace moesaic::app
