// `moesaic inspect MODEL`: what a checkpoint is, holds and needs, without reading its weights.
#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "app/table.h"
#include "app/verb.h"
#include "checkpoint/checkpoint.h"
#include "models/model_info.h"

namespace moesaic::app {
namespace {

struct Options {
  std::string model;
  std::string dtype = "auto";
  std::string kv_dtype = "bf16";
  bool tensors = false;
  bool json = false;
};

constexpr int kContexts[] = {4096, 16384, 32768, 131072};
constexpr int kBatches[] = {1, 8, 32};

int64_t KvBytesPerToken(const models::KvSpec& kv, const std::string& dtype) {
  const int64_t row = kv.key_dim + (kv.shared ? 0 : kv.value_dim);
  constexpr int64_t kScales = 2 * sizeof(float);  // of int8
  const int64_t bytes = dtype == "int8" ? row + kScales : row * (dtype == "f32" ? 4 : 2);
  return bytes * kv.layers * kv.heads;
}

nlohmann::json Facts(const models::ModelInfo& info, const checkpoint::Checkpoint& source,
                     const Options& options) {
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
                          {"weight_format", info.weight_format},
                          {"weight_bytes", info.weight_bytes},
                          {"active_weight_bytes", info.active_weight_bytes},
                          {"kv_bytes_per_token", KvBytesPerToken(info.kv, options.kv_dtype)},
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

void PrintMemory(const models::ModelInfo& info, const Options& options) {
  std::vector<std::vector<std::string>> rows = {{"memory", "batch 1", "batch 8", "batch 32"}};
  const auto per_token = static_cast<double>(KvBytesPerToken(info.kv, options.kv_dtype));
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

void Print(const models::ModelInfo& info, const checkpoint::Checkpoint& source, const Options& options) {
  std::printf("%s\n", source.path().c_str());
  std::vector<std::vector<std::string>> rows = {
      {"", ""},
      {"architecture", fmt::format("{} ({})", info.architecture, info.model_type)},
      {"container", source.container()},
      {"layers", info.mtp_layers > 0
                     ? fmt::format("{} and {} for multi-token prediction", info.layers, info.mtp_layers)
                     : std::to_string(info.layers)},
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
      {"KV cache", fmt::format("{} a token as {}",
                               FormatBytes(static_cast<double>(KvBytesPerToken(info.kv, options.kv_dtype))),
                               options.kv_dtype)},
  };
  std::fputs(FormatTable(rows, false).substr(1).c_str(), stdout);
  std::putchar('\n');
  if (!source.tensors().empty()) {
    PrintTypes(source);
    std::putchar('\n');
  }
  PrintMemory(info, options);
  if (!options.tensors) return;
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
  if (options.json) {
    nlohmann::json facts = Facts(info, *source, options);
    if (options.tensors) {
      for (const checkpoint::TensorEntry& entry : source->tensors()) {
        facts["tensor_list"].push_back(
            {{"name", entry.name}, {"dtype", tensor::DTypeName(entry.dtype)}, {"shape", entry.shape}});
      }
    }
    std::printf("%s\n", facts.dump(2).c_str());
  } else {
    Print(info, *source, options);
  }
  return OkStatus();
}

}  // namespace

void AddInspect(CLI::App& root, VerbRun& run) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = root.add_subcommand("inspect", "Say what a checkpoint is, holds and needs");
  verb->add_option("model", options->model,
                   "Folder, .gguf, .safetensors or packed file, or a config.json alone")
      ->required();
  verb->add_option("--dtype", options->dtype, "Weights in memory: auto, f32, bf16 or int8")
      ->capture_default_str();
  verb->add_option("--kv-dtype", options->kv_dtype, "KV cache: f32, bf16 or int8")
      ->check(CLI::IsMember({"f32", "bf16", "int8"}))
      ->capture_default_str();
  verb->add_flag("--tensors", options->tensors, "List every tensor");
  verb->add_flag("--json", options->json, "Print JSON");
  verb->footer(
      "Examples:\n  moesaic inspect models/moesaic-tiny\n  moesaic inspect model.gguf --tensors --json");
  verb->callback([options, &run] { run = [options] { return RunInspect(*options); }; });
}

}  // namespace moesaic::app
