// The hidden states of a walk in a file, for a run that goes on.
#pragma once

#include <string>
#include <string_view>

#include "quantizer/calibration_stream.h"

namespace moesaic::quantizer {

/// Writes the stream's hidden states, f32 [tokens, hidden], which appear under `path` only when whole;
/// returns their XXH3.
StatusOr<std::string> SaveHidden(const std::string& path, CalibrationStream& stream);

/// Reads them back. False, with the stream as it was, where the file is not there or not of this checksum.
bool LoadHidden(const std::string& path, const std::string& xxh3, CalibrationStream& stream);

/// Whether a file of this name is a state that an analysis saved, or what a killed run had written of one.
bool IsAnalysisState(std::string_view name);

/// Removes the states that runs have saved in `folder`, of analyses alone if `analysis`.
Status RemoveStates(const std::string& folder, bool analysis = false);

}  // namespace moesaic::quantizer
