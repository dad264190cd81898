// What measuring a mix has done so far, in files of the output folder, for a run that goes on.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "quantizer/mixed/mix.h"
#include "quantizer/mixed/mix_gain.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {

/// What is measured. Losses are those of the passes alone, without what GPTQ leaves of them.
struct MixState {
  int gain_layers = 0;  // whose gains under GPTQ are measured
  MixGains gains;
  int layers = 0;  // passes are over whose lanes begin in the layers before this one
  Mix measured;    // units and routers of these layers, and the tokens
  /// The pass that is under way, with lanes of the layers [layers, pass_end), is behind the layers before
  /// pass_layer; what its measurer knows is in `lanes`. pass_end is 0 where none is.
  int pass_end = 0, pass_layer = 0;
  nlohmann::ordered_json lanes;
  std::map<std::string, std::string> files;  // XXH3 of hidden states, by the file's name

  bool any() const { return gain_layers > 0 || layers > 0 || pass_end > 0; }
};

/// Of a state that has something else of `unit` than this program would measure under the same key.
Status OtherUnits(const std::string& unit);

class MixStore {
 public:
  /// Of `folder`, for the run of this key, an object that names all that losses depend on; no folder: saves
  /// nothing.
  MixStore(std::string folder, nlohmann::ordered_json key, double save_seconds)
      : folder_(std::move(folder)), key_(std::move(key)), save_seconds_(save_seconds) {}

  /// What a run of the same key has saved, as far as its files are whole; removes nothing. Refuses what was
  /// saved under another key, with what differs.
  StatusOr<MixState> Load() const;
  /// Removes states of analyses that `state` does not go on from.
  Status RemoveOthers(const MixState& state) const;
  /// Refuses a folder that has what was measured of a mix, for a run that wants none.
  static Status CheckNone(const std::string& folder);

  /// Whether it is time to save what is not finished: `save_seconds` after the last time, and ten times what
  /// saving took; 0: always.
  bool due() const;
  bool saves() const { return !folder_.empty(); }

  /// Hidden states of a file.
  struct Values {
    std::string name;
    std::span<const float> values;
  };
  /// Saves `state` with these hidden states, and removes others. A file of the first lane that was saved
  /// before stays as it is, whatever the values.
  Status Save(MixState* state, const std::vector<Values>& hidden);
  /// Reads back hidden states that Load has found whole.
  Status Read(const MixState& state, const std::string& name, std::span<float> values) const;

  /// Names of files: behind the layers before `layer` all tokens, the first lane, all lanes of a pass.
  static std::string AllTokens(int layer);
  static std::string FirstLane(int layer);
  static std::string Lanes(int layer);

 private:
  std::string PathOf(const std::string& name) const { return folder_ + "/" + name; }
  bool IsWhole(const MixState& state, const std::string& name) const;
  static bool Needs(const MixState& state, const std::string& name);

  const std::string folder_;
  const nlohmann::ordered_json key_;
  const double save_seconds_;
  Clock::time_point saved_ = Clock::now();
  double took_ = 0;  // seconds of the last time
};

}  // namespace moesaic::quantizer
