#include "quantizer/mixed/mix_state.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/io/checksum.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/io/journal.h"
#include "runtime/atomic_file.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

ordered_json JsonOf(const MixState& state) {
  ordered_json gains = ordered_json::array(), files = ordered_json::object();
  for (const auto& [of, sum] : state.gains.sums) {
    gains.push_back({{"unit", of.first},
                     {"precision", of.second},
                     {"gptq", InfiniteJson(sum.gptq)},
                     {"nearest", InfiniteJson(sum.nearest)}});
  }
  for (const auto& [name, xxh3] : state.files) files[name] = xxh3;
  return {{"gain_layers", state.gain_layers},
          {"gains", std::move(gains)},
          {"layers", state.layers},
          {"measured", state.measured.Json()},
          {"pass_end", state.pass_end},
          {"pass_layer", state.pass_layer},
          {"lanes", state.lanes},
          {"files", std::move(files)}};
}

StatusOr<MixState> StateOf(const ordered_json& json) {
  const auto layers = [&](const char* key) { return static_cast<int>(NumberIn(json, key)); };
  MixState state;
  state.gain_layers = layers("gain_layers");
  state.layers = layers("layers");
  for (const ordered_json& gain : json.value("gains", ordered_json::array())) {
    state.gains.sums[{TextIn(gain, "unit"), TextIn(gain, "precision")}] = {InfiniteIn(gain, "gptq"),
                                                                           InfiniteIn(gain, "nearest")};
  }
  ASSIGN_OR_RETURN(state.measured, Mix::FromJson(json.value("measured", ordered_json::object())));
  state.pass_end = layers("pass_end");
  state.pass_layer = layers("pass_layer");
  state.lanes = json.value("lanes", ordered_json());
  const ordered_json files = json.value("files", ordered_json::object());
  for (const auto& [name, xxh3] : files.items()) {
    state.files[name] = xxh3.is_string() ? xxh3.get<std::string>() : "";
  }
  return state;
}

std::string ChecksumOf(const ordered_json& key, const ordered_json& state) {
  Xxh3 sum;
  sum.AddText(key.dump());
  sum.AddText(state.dump());
  return sum.Hex();
}

// Returns the content that Save wrote to `path`; null if it is missing or incomplete.
ordered_json WholeIn(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ordered_json json = ordered_json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("key") || !json.contains("state")) return nullptr;
  const ordered_json &key = json["key"], &state = json["state"];
  const bool whole = key.is_object() && state.is_object() && TextIn(json, "xxh3") == ChecksumOf(key, state);
  if (!whole) return nullptr;
  return json;
}

}  // namespace

Status OtherUnits(const std::string& unit) {
  return DataLoss(
      "{}: its measurements of {} do not fit this program; delete the folder's analysis-*.state to "
      "measure again",
      kMixStateFile, unit);
}

std::string MixStore::AllTokens(int layer) { return StateFile(kAnalysisState, layer); }
std::string MixStore::FirstLane(int layer) { return StateFile(kFirstLaneState, layer); }
std::string MixStore::Lanes(int layer) { return StateFile(kLanesState, layer); }

StatusOr<MixState> MixStore::Load() const {
  if (!saves()) return MixState();
  const ordered_json json = WholeIn(PathOf(kMixStateFile));
  if (json.is_null()) return MixState();
  if (const std::string difference = FirstDifference(json["key"], key_); !difference.empty()) {
    return InvalidArgument(
        "{}: was measured with another {}; repeat the command it was measured with, use another folder, or "
        "delete {}/analysis-*.state to measure again",
        PathOf(kMixStateFile), difference, folder_);
  }
  ASSIGN_OR_RETURN(MixState state, StateOf(json["state"]));
  const auto lost = [&](const std::string& name) { return !IsWhole(state, name); };
  // What is going on first, then what it builds on.
  if (state.pass_end > 0 && (lost(Lanes(state.pass_layer)) ||
                             (state.pass_layer > state.pass_end && lost(FirstLane(state.pass_end))))) {
    state.pass_end = 0;
  }
  if (state.files.contains(FirstLane(state.layers)) && lost(FirstLane(state.layers))) {
    state.layers = state.pass_end = 0;
    state.measured = {};
  }
  // Gains come before passes: their hidden states are there only while they are measured.
  if (state.files.contains(AllTokens(state.gain_layers)) && lost(AllTokens(state.gain_layers))) state = {};
  std::erase_if(state.files, [&](const auto& file) { return !Needs(state, file.first); });
  return state;
}

Status MixStore::CheckNone(const std::string& folder) {
  const std::string path = folder + "/" + kMixStateFile;
  if (WholeIn(path).is_null()) return OkStatus();
  return InvalidArgument(
      "{}: was measured for a mix; repeat that --mix, use another folder, or delete "
      "{}/analysis-*.state",
      path, folder);
}

bool MixStore::Needs(const MixState& state, const std::string& name) {
  if (name == AllTokens(state.gain_layers)) return true;
  if (state.layers > 0 && name == FirstLane(state.layers)) return true;
  return state.pass_end > 0 && (name == Lanes(state.pass_layer) || name == FirstLane(state.pass_end));
}

bool MixStore::due() const {
  return saves() && (save_seconds_ <= 0 || Since(saved_) >= std::max(save_seconds_, 10 * took_));
}

Status MixStore::Save(MixState* state, const std::vector<Values>& hidden) {
  if (!saves()) return OkStatus();
  const Clock::time_point start = Clock::now();
  std::map<std::string, std::string> files;
  for (const Values& of : hidden) {
    const auto there = state->files.find(of.name);
    if (there != state->files.end() && of.name.starts_with(kFirstLaneState)) {
      files.insert(*there);
      continue;
    }
    ASSIGN_OR_RETURN(files[of.name], SaveHidden(PathOf(of.name), of.values));
  }
  state->files = std::move(files);
  const ordered_json json = JsonOf(*state);
  const ordered_json whole = {{"key", key_}, {"xxh3", ChecksumOf(key_, json)}, {"state", json}};
  RETURN_IF_ERROR(runtime::WriteFileAtomically(PathOf(kMixStateFile), whole.dump()));
  saved_ = Clock::now();
  took_ = Since(start);
  return RemoveOthers(*state);
}

Status MixStore::Read(const MixState& state, const std::string& name, std::span<float> values) const {
  const auto found = state.files.find(name);
  if (found != state.files.end() && LoadHidden(PathOf(name), found->second, values)) return OkStatus();
  return DataLoss("{}: changed after this run started; run it again",
                  PathOf(name));
}

bool MixStore::IsWhole(const MixState& state, const std::string& name) const {
  const auto found = state.files.find(name);
  std::error_code error;
  const auto bytes = static_cast<int64_t>(fs::file_size(PathOf(name), error));
  return found != state.files.end() && !error && ChecksumOfFile(PathOf(name), bytes) == found->second;
}

Status MixStore::RemoveOthers(const MixState& state) const {
  if (!saves()) return OkStatus();
  return RemoveStates(folder_, States::kAnalysis, [&](const std::string& name) {
    return name == kMixStateFile || state.files.contains(name);
  });
}

}  // namespace moesaic::quantizer
