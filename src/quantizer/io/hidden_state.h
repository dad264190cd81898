// State files of a quantization: the hidden states of the calibration tokens after some layers, from which
// a run resumes. docs/contracts/quantize-journal.md defines them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::quantizer {

/// Files of the objects that a StateStore saves: of an analysis, of the measurement of a mix, and of a
/// calibrated run.
inline constexpr char kAnalysisStateFile[] = "analysis-walk.state", kMixStateFile[] = "analysis-mix.state",
                      kCalibrationStateFile[] = "calibration-run.state";
/// First parts of the names of other state files, to which StateFile() adds a number of layers: hidden states
/// of an analysis, its decisions, the tokens and the variants of a mix, and hidden states of a calibrated
/// run.
inline constexpr char kAnalysisState[] = "analysis-", kDecidedState[] = "analysis-decided-",
                      kFirstVariantState[] = "analysis-variant-", kVariantsState[] = "analysis-variants-",
                      kCalibrationState[] = "calibration-";
/// Returns the name of a state file: "analysis-3.state" for kAnalysisState and 3 layers.
std::string StateFile(std::string_view kind, int layers);

/// Writes hidden states, f32 [tokens, hidden], to `path` atomically. Returns their XXH3.
StatusOr<std::string> SaveHidden(const std::string& path, std::span<const float> values);

/// Reads hidden states. Returns false and leaves `values` unchanged if the file is missing or has another
/// checksum.
bool LoadHidden(const std::string& path, const std::string& xxh3, std::span<float> values);

/// Returns the XXH3 of a file; a missing file counts as empty. Sets `bytes`, if not null, to its size.
std::string ChecksumOfFile(const std::string& path, int64_t* bytes = nullptr);

/// True if `name` is a state of an analysis ("analysis-3.state") or an unfinished file of one. Other names
/// that begin with "analysis-" do not match.
bool IsAnalysisState(std::string_view name);

/// Returns the total size of complete states in `folder`.
int64_t StateBytesIn(const std::string& folder);

enum class States {
  kUnfinished,   // unfinished files of killed runs
  kAnalysis,     // states of analyses, finished or not
  kCalibration,  // states of calibrated runs, finished or not
  kAll,
};
/// Removes states in `folder`, except those for whose names `keeps` returns true. No other process may write
/// to the folder.
Status RemoveStates(const std::string& folder, States which,
                    const std::function<bool(const std::string& name)>& keeps = nullptr);

}  // namespace moesaic::quantizer
