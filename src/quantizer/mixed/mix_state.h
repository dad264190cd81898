// Saves the progress of measuring a mix, so that an interrupted run resumes from it.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "quantizer/io/hidden_state.h"
#include "quantizer/io/state_store.h"
#include "quantizer/mixed/mix.h"
#include "quantizer/mixed/mix_gain.h"

namespace moesaic::quantizer {

/// Measurements so far. Losses are those of the passes, without the gains of GPTQ.
struct MixState {
  int gain_layers = 0;  // number of layers whose gains under GPTQ are measured
  MixGains gains;
  int layers = 0;  // passes whose variants begin before this layer are complete
  Mix measured;    // groups and routers of these layers, and the number of tokens
  /// The unfinished pass has variants of the layers [layers, pass_end) and has done the layers before
  /// pass_layer. `variants` is the progress of its measurer. pass_end is 0 if there is no such pass.
  int pass_end = 0, pass_layer = 0;
  nlohmann::ordered_json variants;
  StateStore::Files files;  // hidden states

  bool any() const { return gain_layers > 0 || layers > 0 || pass_end > 0; }
};

/// Returns the error for a saved state whose measurement of `unit` does not match this program's, although
/// the keys are equal.
Status OtherGroups(const std::string& unit);

class MixStore {
 public:
  /// `key` identifies everything that decides the losses. `share` is the maximum share of the time that
  /// saving may take. If `folder` is empty, nothing is saved.
  MixStore(std::string folder, nlohmann::ordered_json key, double share)
      : store_(std::move(folder), kMixStateFile, std::move(key), share) {}

  /// Returns the part of a saved state whose files are complete; removes nothing. Fails if the state has
  /// another key, and names the difference.
  StatusOr<MixState> Load() const;
  /// Removes states of analyses that `state` does not need.
  Status RemoveOthers(const MixState& state) const { return store_.RemoveOthers(state.files); }
  /// Fails if the folder has measurements of a mix, for a run without one.
  static Status CheckNone(const std::string& folder);

  bool due() const { return store_.due(); }

  using Values = StateStore::Hidden;
  /// Saves `state` with these hidden states and removes all others.
  Status Save(MixState* state, const std::vector<Values>& hidden);
  /// Reads hidden states that Load has found complete.
  Status Read(const MixState& state, const std::string& name, std::span<float> values) const;

  /// Names of files with hidden states before `layer`: of all tokens, of the first variant, of all variants
  /// of a pass.
  static std::string AllTokens(int layer);
  static std::string FirstVariant(int layer);
  static std::string Variants(int layer);

 private:
  static bool Needs(const MixState& state, const std::string& name);

  StateStore store_;
};

}  // namespace moesaic::quantizer
