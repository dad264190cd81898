// `moesaic inspect MODEL` reports the architecture, contents and memory of a checkpoint without reading its
// weights.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "app/layout_table.h"
#include "app/output.h"
#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "checkpoint/checkpoint.h"
#include "engine/kv_budget.h"
#include "models/model_info.h"

namespace moesaic::app {
namespace {

struct InspectFlags {
  std::string model;
  std::string dtype = "auto";
  std::string kv_dtype = "auto";
  bool tensors = false;
  bool json = false;
  std::vector<int> contexts;
  std::vector<int> sequences = {1, 8, 32};
  std::string topology;
};

// Those below the model's context, and that context.
constexpr int kUsualContexts[] = {4096, 16384, 32768, 131072};

// The KV cache as the engine allocates it without --speculative. The spec also counts MTP layers.
struct Cache {
  std::string dtype;
  int64_t block_bytes;

  int64_t BytesPerToken() const { return block_bytes / tensor::kKvBlockTokens; }
  int64_t Bytes(int context, int sequences) const {
    return block_bytes * tensor::KvBlocksFor(context) * sequences;
  }
};

StatusOr<Cache> CacheOf(const models::ModelInfo& info, const std::string& kv_dtype) {
  ASSIGN_OR_RETURN(const tensor::DType dtype, engine::KvDType(kv_dtype, info));
  models::KvSpec kv = info.kv;
  kv.layers = info.layers;
  const char* name = dtype == tensor::DType::kF32 ? "f32" : dtype == tensor::DType::kI8 ? "int8" : "bf16";
  return Cache{name, engine::LayoutFor(kv, dtype, /*key_summaries=*/false).block_bytes()};
}

StatusOr<std::vector<int>> ContextsOf(const models::ModelInfo& info, const std::vector<int>& asked) {
  for (const int context : asked) {
    if (context > info.context_length) {
      return InvalidArgument("the model's context has {} tokens, fewer than --ctx-size {}",
                             info.context_length, context);
    }
  }
  if (!asked.empty()) return asked;
  std::vector<int> contexts;
  for (const int context : kUsualContexts) {
    if (context < info.context_length) contexts.push_back(context);
  }
  contexts.push_back(info.context_length);
  return contexts;
}

nlohmann::json Facts(const models::ModelInfo& info, const checkpoint::Checkpoint& source,
                     const Cache& cache) {
  nlohmann::json facts = {{"architecture", info.architecture},
                          {"model_type", info.model_type},
                          {"container", source.container()},
                          {"layers", info.layers},
                          {"mtp_layers", info.mtp_layers},
                          {"hidden_size", info.hidden_size},
                          {"vocab_size", info.vocab_size},
                          {"context_length", info.context_length},
                          {"experts", info.experts},
                          {"experts_per_token", info.experts_per_token},
                          {"parameters", info.parameters},
                          {"active_parameters", info.active_parameters},
                          {"mtp_parameters", info.mtp_parameters},
                          {"mtp_weight_bytes", info.mtp_weight_bytes},
                          {"weight_format", info.weight_format},
                          {"weight_bytes", info.weight_bytes},
                          {"active_weight_bytes", info.active_weight_bytes},
                          {"kv_dtype", cache.dtype},
                          {"kv_bytes_per_token", cache.BytesPerToken()},
                          {"tensors", source.tensors().size()}};
  return facts;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void PrintTypes(const checkpoint::Checkpoint& source) {
  std::map<std::string, std::pair<int64_t, int64_t>> types;  // dtype -> tensors, bytes
  for (const checkpoint::TensorEntry& entry : source.tensors()) {
    auto& [count, bytes] = types[tensor::DTypeName(entry.dtype)];
    ++count;
    bytes += static_cast<int64_t>(entry.bytes.size());
  }
  std::vector<std::vector<std::string>> rows = {{"stored as", "tensors", "bytes"}};
  for (const auto& [name, sum] : types) {
    rows.push_back({name, std::to_string(sum.first), FormatBytes(static_cast<double>(sum.second))});
  }
  WriteOutput(FormatTable(rows, false));
}

std::string SequencesText(int sequences) {
  return sequences == 1 ? "1 sequence" : fmt::format("{} sequences", sequences);
}

void PrintMemory(const models::ModelInfo& info, const Cache& cache, const std::vector<int>& contexts,
                 const std::vector<int>& sequences) {
  std::vector<std::vector<std::string>> rows = {{"weights and KV cache"}};
  for (const int count : sequences) rows[0].push_back(SequencesText(count));
  for (const int context : contexts) {
    std::vector<std::string> row = {fmt::format("context {}", context)};
    for (const int count : sequences) {
      row.push_back(FormatBytes(static_cast<double>(info.weight_bytes + cache.Bytes(context, count))));
    }
    rows.push_back(row);
  }
  WriteOutput(FormatTable(rows, false));
}

nlohmann::json MemoryJson(const models::ModelInfo& info, const Cache& cache, const std::vector<int>& contexts,
                          const std::vector<int>& sequences) {
  nlohmann::json cells = nlohmann::json::array();
  for (const int context : contexts) {
    for (const int count : sequences) {
      const int64_t kv = cache.Bytes(context, count);
      cells.push_back(
          {{"context", context}, {"sequences", count}, {"kv_bytes", kv}, {"bytes", info.weight_bytes + kv}});
    }
  }
  return cells;
}

void PrintFacts(const models::ModelInfo& info, const checkpoint::Checkpoint& source, const Cache& cache) {
  Print("{}\n", source.path());
  std::vector<std::vector<std::string>> rows = {
      {"", ""},
      {"architecture", fmt::format("{} ({})", info.architecture, info.model_type)},
      {"container", source.container()},
      {"layers", std::to_string(info.layers)},
      {"hidden size", std::to_string(info.hidden_size)},
      {"vocabulary", std::to_string(info.vocab_size)},
      {"context", std::to_string(info.context_length)},
      {"parameters", FormatCount(static_cast<double>(info.parameters))},
      {"active", fmt::format("{} a token", FormatCount(static_cast<double>(info.active_parameters)))},
      {"experts",
       info.experts > 0 ? fmt::format("{} of {} a token", info.experts_per_token, info.experts) : "none"},
      {"weights",
       fmt::format("{} as {}", FormatBytes(static_cast<double>(info.weight_bytes)), info.weight_format)},
      {"read a token", FormatBytes(static_cast<double>(info.active_weight_bytes))},
      {"KV cache",
       fmt::format("{} a token as {}", FormatBytes(static_cast<double>(cache.BytesPerToken())), cache.dtype)},
  };
  if (info.mtp_layers > 0) {
    rows.push_back(
        {"MTP", fmt::format("{}, {} parameters, {}, not loaded", Counted(info.mtp_layers, "extra layer"),
                            FormatCount(static_cast<double>(info.mtp_parameters)),
                            FormatBytes(static_cast<double>(info.mtp_weight_bytes)))});
  }
  WriteOutput(FormatTable(rows, false).substr(1));
  WriteOutput("\n");
  if (!source.tensors().empty()) {
    PrintTypes(source);
    WriteOutput("\n");
  }
}

using Predictions = std::vector<planner::LayoutPlanner::Prediction>;

nlohmann::json LayoutsJson(const Predictions& predictions) {
  nlohmann::json layouts = nlohmann::json::array();
  for (const planner::LayoutPlanner::Prediction& prediction : predictions) {
    const parallel::Degrees& degrees = prediction.layout.degrees();
    nlohmann::json steps = nlohmann::json::array();
    for (size_t i = 0; i < prediction.steps.size(); ++i) {
      const planner::StepTime& step = prediction.steps[i];
      steps.push_back({{"sequences", PredictedSteps()[i].sequences},
                       {"rows_per_sequence", PredictedSteps()[i].rows_per_sequence},
                       {"seconds", step.seconds},
                       {"communication_seconds", step.communication},
                       {"interval_seconds", step.interval},
                       {"parts", step.parts}});
    }
    layouts.push_back({{"tensor_parallel_size", degrees.tensor},
                       {"pipeline_parallel_size", degrees.pipeline},
                       {"data_parallel_size", degrees.data},
                       {"expert_parallel_size", degrees.expert},
                       {"weight_bytes", prediction.weight_bytes},
                       {"fits", prediction.fits},
                       {"steps", std::move(steps)}});
  }
  return layouts;
}

void PrintLayouts(const Predictions& predictions, const std::string& topology) {
  Print("\n{} ranks, devices and links of {}; predicted times of steps\n{}", predictions[0].layout.ranks(),
        topology, LayoutTable(predictions, predictions.size()));
}

void PrintTensors(const checkpoint::Checkpoint& source) {
  std::vector<std::vector<std::string>> tensors = {{"tensor", "dtype", "shape"}};
  for (const checkpoint::TensorEntry& entry : source.tensors()) {
    tensors.push_back({entry.name, tensor::DTypeName(entry.dtype), ShapeText(entry.shape)});
  }
  Print("\n{}", FormatTable(tensors, false));
}

Status RunInspect(const InspectFlags& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<checkpoint::Checkpoint> source,
                   checkpoint::Checkpoint::Open(options.model));
  ASSIGN_OR_RETURN(const models::ModelInfo info, models::InfoOf(*source, options.dtype));
  ASSIGN_OR_RETURN(const Cache cache, CacheOf(info, options.kv_dtype));
  ASSIGN_OR_RETURN(const std::vector<int> contexts, ContextsOf(info, options.contexts));
  Predictions layouts;
  if (!options.topology.empty()) {
    ASSIGN_OR_RETURN(layouts, PredictLayouts({.model = *source,
                                              .dtype = options.dtype,
                                              .kv_dtype = options.kv_dtype,
                                              .topology = options.topology}));
  }
  if (options.json) {
    nlohmann::json facts = Facts(info, *source, cache);
    if (!layouts.empty()) facts["layouts"] = LayoutsJson(layouts);
    facts["memory"] = MemoryJson(info, cache, contexts, options.sequences);
    if (options.tensors) {
      for (const checkpoint::TensorEntry& entry : source->tensors()) {
        facts["tensor_list"].push_back(
            {{"name", entry.name}, {"dtype", tensor::DTypeName(entry.dtype)}, {"shape", entry.shape}});
      }
    }
    Print("{}\n", facts.dump(2));
  } else {
    PrintFacts(info, *source, cache);
    PrintMemory(info, cache, contexts, options.sequences);
    if (!layouts.empty()) PrintLayouts(layouts, options.topology);
    if (options.tensors) PrintTensors(*source);
  }
  return OkStatus();
}

}  // namespace

void AddInspect(Verb& root, VerbRun& run) {
  auto options = std::make_shared<InspectFlags>();
  Verb verb = root.AddVerb("inspect", "Report the architecture, contents and memory of a checkpoint");
  AddModelPath(verb, options->model, "Folder, .gguf, .safetensors or packed file, or a config.json alone");
  AddDtypeFlag(verb, options->dtype);
  AddKvDtypeFlag(verb, options->kv_dtype);
  verb.AddOption("-c,--ctx-size", options->contexts,
                 "Comma-separated contexts for the memory table; default: usual ones and the model's")
      .Delimiter(',')
      .OneValue()
      .Range(1, 1 << 24);
  verb.AddOption("-s,--sequences", options->sequences,
                 "Comma-separated numbers of concurrent sequences for the memory table")
      .Delimiter(',')
      .OneValue()
      .Range(1, 1 << 16)
      .ShowDefault();
  verb.AddFlag("--tensors", options->tensors, "List every tensor");
  verb.AddFlag("--json", options->json, "Print JSON");
  verb.AddOption("--topology", options->topology,
                 "Topology file: compare the layouts of the model on its devices (docs/parallelism.md)")
      .ExistingFile();
  verb.Footer(
      "The table counts weights and KV cache; buffers of a step are additional.\n\n"
      "Examples:\n"
      "  moesaic inspect models/moesaic-tiny\n"
      "  moesaic inspect model.gguf --tensors --json\n"
      "  moesaic inspect model/ --dtype int8 --kv-dtype int8 -c 8192,65536 -s 1,4,16\n"
      "  moesaic inspect model/ --topology topologies/h100-2x8-infiniband.json");
  verb.OnParsed([options, &run] { run = [options] { return RunInspect(*options); }; });
}

}  // namespace moesaic::app
