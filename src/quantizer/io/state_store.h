// Saves the progress of a walk over calibration tokens, from which an interrupted run resumes.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {

/// Default share of a walk's time that saving its states may take.
inline constexpr double kSaveShare = 0.05;

/// Stores the state of one walk in a folder.
///
/// A state is a JSON object in one file. Hidden states and other large data are in files of their own, which
/// the object names with their checksums. Each of these files is complete before the object names it, and is
/// removed after the object no longer names it. A kill at any moment therefore leaves a complete state.
class StateStore {
 public:
  /// `name` is the file of the object; `key` identifies everything that the state depends on. `share` is the
  /// maximum share of the time that saving may take; 1 saves at every opportunity. Without a folder nothing
  /// is saved.
  StateStore(std::string folder, std::string name, nlohmann::ordered_json key, double share = kSaveShare)
      : folder_(std::move(folder)), name_(std::move(name)), key_(std::move(key)), share_(share) {}

  bool saves() const { return !folder_.empty(); }
  /// True if another save keeps within the share.
  bool due() const { return saves() && (share_ >= 1 || took_ <= share_ * Since(saved_)); }

  using Files = std::map<std::string, std::string>;  // XXH3 by name
  struct Saved {
    nlohmann::ordered_json key, state;
    Files files;
  };
  /// Returns the saved object, whose key may be another one; nothing if it is missing or incomplete.
  std::optional<Saved> Load() const { return LoadFrom(PathOf(name_)); }
  static std::optional<Saved> LoadFrom(const std::string& path);
  const nlohmann::ordered_json& key() const { return key_; }
  const std::string& folder() const { return folder_; }

  /// Hidden states of a file, f32 [tokens, hidden].
  struct Hidden {
    std::string name;
    std::span<const float> values;
    bool reuse = false;  // keeps the file if the previous state has it
  };
  /// Saves a state with its hidden states. `written` names files that the caller has just written. `files`
  /// has those of the previous state and is replaced.
  Status Save(const nlohmann::ordered_json& state, const std::vector<Hidden>& hidden,
              const std::vector<std::string>& written, Files* files);
  /// Removes states of analyses, or else of calibrated runs, except this object and `files`.
  Status RemoveOthers(const Files& files) const;
  /// True if the file has its checksum.
  bool IsWhole(const Files& files, const std::string& name) const;
  /// Reads hidden states. Returns false if the file is missing or has another checksum or size.
  bool Read(const Files& files, const std::string& name, std::span<float> values) const;

  std::string PathOf(const std::string& name) const { return folder_ + "/" + name; }

 private:
  const std::string folder_, name_;
  const nlohmann::ordered_json key_;
  const double share_;
  Clock::time_point saved_ = Clock::now();
  double took_ = 0;  // seconds of the last save
};

}  // namespace moesaic::quantizer
