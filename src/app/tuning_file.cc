#include "app/tuning_file.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace moesaic::app {
namespace {

using nlohmann::json;

constexpr char kOff[] = "off", kThreads[] = "threads";
// TuningText writes less than 2 KiB. Its nesting depth is that of a machine's caches.
constexpr size_t kMaxBytes = 64 << 10;
constexpr int kMaxDepth = 4;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// Reads a file that a cache or an environment variable names. It may be anything.
StatusOr<std::string> ReadText(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status found = std::filesystem::status(path, ignored);
  if (!std::filesystem::exists(found)) return NotFound("the file does not exist");
  if (!std::filesystem::is_regular_file(found)) return InvalidArgument("not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return IoError("it cannot be opened");
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), std::ssize(text));
  if (file.bad()) return IoError("it cannot be read");
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxBytes) return InvalidArgument("longer than {} bytes", kMaxBytes);
  return text;
}

// Values are compared and copied recursively, so the depth must be bounded.
StatusOr<json> ParseShallow(const std::string& text) {
  bool too_deep = false;
  const auto check = [&](int depth, json::parse_event_t event, const json&) {
    const bool opens =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (opens && depth >= kMaxDepth) too_deep = true;
    return !too_deep;
  };
  json parsed = json::parse(text, check, /*allow_exceptions=*/false);
  if (too_deep) return InvalidArgument("nested deeper than {} levels", kMaxDepth);
  if (parsed.is_discarded()) return InvalidArgument("not JSON");
  return parsed;
}

// Reads an integer of `object`; `value` is unchanged if there is none.
Status ReadInteger(const json& object, const char* key, auto* value) {
  const auto found = object.find(key);
  if (found == object.end()) return OkStatus();
  if (!found->is_number_integer())
    return InvalidArgument("\"{}\" must be an integer, found {}", key, found->dump());
  const auto read = found->get<int64_t>();
  if (!std::in_range<std::remove_pointer_t<decltype(value)>>(read)) {
    return InvalidArgument("\"{}\" is out of range: {}", key, read);
  }
  *value = static_cast<std::remove_pointer_t<decltype(value)>>(read);
  return OkStatus();
}

Status CheckKeys(const json& object, const char* what, std::initializer_list<const char*> known) {
  if (!object.is_object())
    return InvalidArgument("{} must be an object, found {}", what, object.dump().substr(0, 40));
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return InvalidArgument("{} has an unknown key \"{}\"", what, key);
    }
  }
  return OkStatus();
}

Status CheckMachine(const json& stored, const json& machine) {
  if (!stored.is_object()) return InvalidArgument("\"machine\" must be an object");
  for (const auto& [key, value] : machine.items()) {
    const json found = stored.value(key, json());
    if (found == value) continue;
    if (std::string_view(key) == kThreads) {
      return InvalidArgument("for {} threads, but this run has {}", found.dump(), value.dump());
    }
    return InvalidArgument("for another machine: its \"{}\" is {}, but here it is {}", key, found.dump(),
                           value.dump());
  }
  return OkStatus();
}

}  // namespace

json TuningMachine(const runtime::Topology& topology, const runtime::CpuFeatures& cpu, int threads) {
  json machine = {{"processor", topology.cpu_model},
                  {"instruction_sets", json::array()},
                  {"caches", json::array()},
                  {kThreads, threads > 0 ? threads : topology.DefaultThreads()},
                  {"kernels", kernels::kTuningVersion}};
  for (const runtime::Isa isa : runtime::HostIsas(cpu)) {
    machine["instruction_sets"].push_back(runtime::IsaName(isa));
  }
  for (const runtime::CacheLevel& cache : topology.caches) {
    machine["caches"].push_back({{"level", cache.level}, {"bytes", cache.bytes}});
  }
  return machine;
}

std::string TuningPath(int threads) {
  const std::string named = Environment("MOESAIC_TUNING");
  if (!named.empty() && named != kOff) return named;
  std::string cache = Environment("XDG_CACHE_HOME");
  if (cache.empty()) {
    const std::string home = Environment("HOME");
    if (home.empty()) return "";
    cache = home + "/.cache";
  }
  return fmt::format("{}/moesaic/tuning-{}.json", cache, threads);
}

json ChoicesJson(const kernels::Tuning& tuning) {
  json choices = {{"cut",
                   {{"panel_bytes", tuning.tile_sizes.panel_bytes},
                    {"row_bytes", tuning.tile_sizes.row_bytes},
                    {"tasks_per_thread", tuning.tile_sizes.tasks_per_thread}}},
                  {"few_below", json::object()}};
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    if (!tuning.few_below[f].has_value()) continue;
    choices["few_below"][tensor::PackedFormatName(static_cast<tensor::PackedFormat>(f))] =
        *tuning.few_below[f];
  }
  return choices;
}

std::string TuningText(const json& machine, const kernels::Tuning& tuning) {
  json text = ChoicesJson(tuning);
  text["machine"] = machine;
  return text.dump(2) + "\n";
}

StatusOr<kernels::Tuning> ParseTuning(const std::string& text, const json& machine) {
  ASSIGN_OR_RETURN(const json parsed, ParseShallow(text));
  RETURN_IF_ERROR(CheckKeys(parsed, "the file", {"machine", "cut", "few_below"}));
  RETURN_IF_ERROR(CheckMachine(parsed.value("machine", json()), machine));
  kernels::Tuning tuning;
  const json cut = parsed.value("cut", json::object());
  RETURN_IF_ERROR(CheckKeys(cut, "\"cut\"", {"panel_bytes", "row_bytes", "tasks_per_thread"}));
  RETURN_IF_ERROR(ReadInteger(cut, "panel_bytes", &tuning.tile_sizes.panel_bytes));
  RETURN_IF_ERROR(ReadInteger(cut, "row_bytes", &tuning.tile_sizes.row_bytes));
  RETURN_IF_ERROR(ReadInteger(cut, "tasks_per_thread", &tuning.tile_sizes.tasks_per_thread));
  const json few = parsed.value("few_below", json::object());
  if (!few.is_object()) return InvalidArgument("\"few_below\" must be an object");
  for (const auto& [name, value] : few.items()) {
    ASSIGN_OR_RETURN(const tensor::PackedFormat format, tensor::ParsePackedFormat(name));
    int below = 0;
    RETURN_IF_ERROR(ReadInteger(few, name.c_str(), &below));
    tuning.few_below[static_cast<int>(format)] = below;
  }
  return tuning;
}

StatusOr<TuningState> TuneKernels(bool wanted, const json& machine, kernels::KernelTable& table) {
  const std::string named = Environment("MOESAIC_TUNING");
  if (!wanted) return TuningState{"not tuned: --no-tuning"};
  if (named == kOff) return TuningState{"not tuned: MOESAIC_TUNING=off"};
  const int threads = machine.at(kThreads);
  const std::string path = TuningPath(threads);
  std::error_code ignored;
  if (named.empty() && (path.empty() || !std::filesystem::exists(path, ignored))) {
    return TuningState{
        fmt::format("not tuned: moesaic tune was not run on this machine with {} threads", threads)};
  }
  const auto apply = [&]() -> Status {
    ASSIGN_OR_RETURN(const std::string text, ReadText(path));
    ASSIGN_OR_RETURN(const kernels::Tuning tuning, ParseTuning(text, machine));
    return kernels::ApplyTuning(tuning, table);
  };
  const Status applied = apply();
  if (applied.ok()) return TuningState{"tuned by " + path};
  if (!named.empty()) return Annotate(applied, fmt::format("MOESAIC_TUNING={}", path));
  return TuningState{.text = fmt::format("not tuned: {} is ignored: {}; run moesaic tune to make a new "
                                         "one",
                                         path, Message(applied)),
                     .ignored = true};
}

}  // namespace moesaic::app
