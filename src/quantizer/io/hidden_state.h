// The hidden states of a walk in a file, for a run that goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::quantizer {

/// Files of states: what was decided, what is measured of a mix, and, with StateFile, hidden states behind so
/// many layers.
inline constexpr char kAnalysisStateFile[] = "analysis-decided.state", kMixStateFile[] = "analysis-mix.state";
inline constexpr char kAnalysisState[] = "analysis-", kFirstLaneState[] = "analysis-lane-",
                      kLanesState[] = "analysis-lanes-", kCalibrationState[] = "calibration-";
std::string StateFile(std::string_view kind, int layers);

/// Writes hidden states, f32 [tokens, hidden], which appear under `path` only when whole; returns their XXH3.
StatusOr<std::string> SaveHidden(const std::string& path, std::span<const float> values);

/// Reads them back. False, with `values` as they were, where the file is not there or not of this checksum.
bool LoadHidden(const std::string& path, const std::string& xxh3, std::span<float> values);

/// XXH3 of a file that is to have `bytes` bytes; "none" if it has not.
std::string ChecksumOfFile(const std::string& path, int64_t bytes);

/// Whether a file of this name is a state that an analysis saves ("analysis-3.state"), or what a killed run
/// had written of one. No other name is, whatever it begins with.
bool IsAnalysisState(std::string_view name);

/// Bytes of the whole states in `folder`.
int64_t StateBytesIn(const std::string& folder);

enum class States {
  kUnfinished,  // what killed runs had written of any
  kAnalysis,    // of analyses, unfinished or not
  kAll,
};
/// Removes states in `folder`, to which no other process writes, but those whose name `keeps` says yes to.
Status RemoveStates(const std::string& folder, States which,
                    const std::function<bool(const std::string& name)>& keeps = nullptr);

}  // namespace moesaic::quantizer
