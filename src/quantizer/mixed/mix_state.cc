#include "quantizer/mixed/mix_state.h"

#include <algorithm>

#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/io/journal.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

ordered_json JsonOf(const MixState& state) {
  ordered_json gains = ordered_json::array();
  for (const auto& [of, sum] : state.gains.sums) {
    gains.push_back({{"unit", of.first},
                     {"precision", of.second},
                     {"gptq", InfiniteJson(sum.gptq)},
                     {"nearest", InfiniteJson(sum.nearest)}});
  }
  return {{"gain_layers", state.gain_layers},  {"gains", std::move(gains)},  {"layers", state.layers},
          {"measured", state.measured.Json()}, {"pass_end", state.pass_end}, {"pass_layer", state.pass_layer},
          {"variants", state.variants}};
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
  state.variants = json.value("variants", ordered_json());
  return state;
}

}  // namespace

Status OtherGroups(const std::string& unit) {
  return DataLoss(
      "{}: its measurements of {} do not fit this program; delete the folder's analysis-*.state to "
      "measure again",
      kMixStateFile, unit);
}

std::string MixStore::AllTokens(int layer) { return StateFile(kAnalysisState, layer); }
std::string MixStore::FirstVariant(int layer) { return StateFile(kFirstVariantState, layer); }
std::string MixStore::Variants(int layer) { return StateFile(kVariantsState, layer); }

StatusOr<MixState> MixStore::Load() const {
  if (!store_.saves()) return MixState();
  const std::optional<StateStore::Saved> saved = store_.Load();
  if (!saved) return MixState();
  if (const std::string difference = FirstDifference(saved->key, store_.key()); !difference.empty()) {
    return InvalidArgument(
        "{}: was measured with another {}; repeat the command it was measured with, use another folder, or "
        "delete {}/analysis-*.state to measure again",
        store_.PathOf(kMixStateFile), difference, store_.folder());
  }
  ASSIGN_OR_RETURN(MixState state, StateOf(saved->state));
  state.files = saved->files;
  const auto lost = [&](const std::string& name) { return !store_.IsWhole(state.files, name); };
  // Checks the unfinished pass first, then the passes before it.
  if (state.pass_end > 0 && (lost(Variants(state.pass_layer)) ||
                             (state.pass_layer > state.pass_end && lost(FirstVariant(state.pass_end))))) {
    state.pass_end = 0;
  }
  if (state.files.contains(FirstVariant(state.layers)) && lost(FirstVariant(state.layers))) {
    state.layers = state.pass_end = 0;
    state.measured = {};
  }
  // Gains are measured before the passes; their hidden states exist only until then.
  if (state.files.contains(AllTokens(state.gain_layers)) && lost(AllTokens(state.gain_layers))) state = {};
  std::erase_if(state.files, [&](const auto& file) { return !Needs(state, file.first); });
  return state;
}

Status MixStore::CheckNone(const std::string& folder) {
  const std::string path = folder + "/" + kMixStateFile;
  if (!StateStore::LoadFrom(path)) return OkStatus();
  return InvalidArgument(
      "{}: was measured for a mix; repeat that --mix, use another folder, or delete "
      "{}/analysis-*.state",
      path, folder);
}

bool MixStore::Needs(const MixState& state, const std::string& name) {
  if (name == AllTokens(state.gain_layers)) return true;
  if (state.layers > 0 && name == FirstVariant(state.layers)) return true;
  return state.pass_end > 0 && (name == Variants(state.pass_layer) || name == FirstVariant(state.pass_end));
}

Status MixStore::Save(MixState* state, const std::vector<Values>& hidden) {
  return store_.Save(JsonOf(*state), hidden, {}, &state->files);
}

Status MixStore::Read(const MixState& state, const std::string& name, std::span<float> values) const {
  if (store_.Read(state.files, name, values)) return OkStatus();
  return DataLoss("{}: changed after this run started; run it again", store_.PathOf(name));
}

}  // namespace moesaic::quantizer
