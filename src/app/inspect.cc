// `moesaic inspect MODEL`: what a checkpoint is, holds and needs, without reading its weights.
#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "checkpoint/checkpoint.h"
#include "engine/kv_budget.h"
#include "models/model_info.h"

namespace moesaic::app {
namespace {

struct Options {
  std::string model;
  std::string dtype = "auto";
  std::string kv_dtype = "auto";
  bool tensors = false;
  bool json = false;
};

constexpr int kContexts[] = {4096, 16384, 32768, 131072};
constexpr int kBatches[] = {1, 8, 32};

// The cache as the engine makes it. No verb runs the MTP layers, which the spec counts.
struct Cache {
  std::string dtype;
  int64_t bytes_per_token;
};

StatusOr<Cache> CacheOf(const models::ModelInfo& info, const std::string& kv_dtype) {
  ASSIGN_OR_RETURN(const tensor::DType dtype, engine::KvDType(kv_dtype, info));
  models::KvSpec kv = info.kv;
  kv.layers = info.layers;
  const int64_t block = engine::LayoutFor(kv, dtype).block_bytes();
  const char* name = dtype == tensor::DType::kF32 ? "f32" : dtype == tensor::DType::kI8 ? "int8" : "bf16";
  return Cache{name, block / kernels::kKvBlockTokens};
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
                          {"kv_bytes_per_token", cache.bytes_per_token},
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
  std::fputs(FormatTable(rows, false).c_str(), stdout);
}

void PrintMemory(const models::ModelInfo& info, const Cache& cache) {
  std::vector<std::vector<std::string>> rows = {{"memory", "batch 1", "batch 8", "batch 32"}};
  const auto per_token = static_cast<double>(cache.bytes_per_token);
  for (const int context : kContexts) {
    if (context > info.context_length && context != kContexts[0]) continue;
    const int tokens = std::min(context, info.context_length);
    std::vector<std::string> row = {fmt::format("context {}", tokens)};
    for (const int batch : kBatches) {
      row.push_back(FormatBytes(static_cast<double>(info.weight_bytes) + per_token * tokens * batch));
    }
    rows.push_back(row);
  }
  std::fputs(FormatTable(rows, false).c_str(), stdout);
}

void Print(const models::ModelInfo& info, const checkpoint::Checkpoint& source, const Cache& cache,
           bool all_tensors) {
  std::printf("%s\n", source.path().c_str());
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
       fmt::format("{} a token as {}", FormatBytes(static_cast<double>(cache.bytes_per_token)), cache.dtype)},
  };
  if (info.mtp_layers > 0) {
    rows.push_back(
        {"MTP", fmt::format("{} more, {} parameters, {}, not loaded",
                            info.mtp_layers == 1 ? "1 layer" : fmt::format("{} layers", info.mtp_layers),
                            FormatCount(static_cast<double>(info.mtp_parameters)),
                            FormatBytes(static_cast<double>(info.mtp_weight_bytes)))});
  }
  std::fputs(FormatTable(rows, false).substr(1).c_str(), stdout);
  std::putchar('\n');
  if (!source.tensors().empty()) {
    PrintTypes(source);
    std::putchar('\n');
  }
  PrintMemory(info, cache);
  if (!all_tensors) return;
  std::putchar('\n');
  std::vector<std::vector<std::string>> tensors = {{"tensor", "dtype", "shape"}};
  for (const checkpoint::TensorEntry& entry : source.tensors()) {
    tensors.push_back({entry.name, tensor::DTypeName(entry.dtype), ShapeText(entry.shape)});
  }
  std::fputs(FormatTable(tensors, false).c_str(), stdout);
}

Status RunInspect(const Options& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<checkpoint::Checkpoint> source,
                   checkpoint::Checkpoint::Open(options.model));
  ASSIGN_OR_RETURN(const models::ModelInfo info, models::InfoOf(*source, options.dtype));
  ASSIGN_OR_RETURN(const Cache cache, CacheOf(info, options.kv_dtype));
  if (options.json) {
    nlohmann::json facts = Facts(info, *source, cache);
    if (options.tensors) {
      for (const checkpoint::TensorEntry& entry : source->tensors()) {
        facts["tensor_list"].push_back(
            {{"name", entry.name}, {"dtype", tensor::DTypeName(entry.dtype)}, {"shape", entry.shape}});
      }
    }
    std::printf("%s\n", facts.dump(2).c_str());
  } else {
    Print(info, *source, cache, options.tensors);
  }
  return OkStatus();
}

}  // namespace

void AddInspect(CLI::App& root, VerbRun& run) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = root.add_subcommand("inspect", "Say what a checkpoint is, holds and needs");
  AddModelPath(*verb, options->model, "Folder, .gguf, .safetensors or packed file, or a config.json alone");
  AddDtypeFlag(*verb, options->dtype);
  AddKvDtypeFlag(*verb, options->kv_dtype);
  verb->add_flag("--tensors", options->tensors, "List every tensor");
  verb->add_flag("--json", options->json, "Print JSON");
  verb->footer(
      "Examples:\n  moesaic inspect models/moesaic-tiny\n  moesaic inspect model.gguf --tensors --json");
  verb->callback([options, &run] { run = [options] { return RunInspect(*options); }; });
}

}  // namespace moesaic::app
