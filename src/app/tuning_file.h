// Stores the choices of `moesaic tune` (kernels/tuning.h) in a file for the machine they were measured on.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"
#include "kernels/tuning.h"
#include "runtime/cpu_features.h"
#include "runtime/topology.h"

namespace moesaic::app {

/// Returns the conditions of the choices: CPU, instruction sets, caches, threads and kernel version.
nlohmann::json TuningMachine(const runtime::Topology& topology, const runtime::CpuFeatures& cpu, int threads);

/// Returns MOESAIC_TUNING if it names a file, else moesaic/tuning-THREADS.json in XDG_CACHE_HOME or ~/.cache;
/// "" without a home folder.
std::string TuningPath(int threads);

/// Returns "cut" and "few_below" in the form of the file.
nlohmann::json ChoicesJson(const kernels::Tuning& tuning);
/// Formats and parses the file. Parsing fails if the text is invalid, or if the choices belong to another
/// machine or number of threads; the error names the difference.
std::string TuningText(const nlohmann::json& machine, const kernels::Tuning& tuning);
StatusOr<kernels::Tuning> ParseTuning(const std::string& text, const nlohmann::json& machine);

/// Outcome of reading the file: "tuned by /path", or "not tuned" with the reason.
struct TuningState {
  std::string text;
  bool ignored = false;  // a file exists but is damaged or belongs to another machine
};

/// Applies the file's choices to `table`. Does nothing without `wanted`, with MOESAIC_TUNING=off, or without
/// a file. A damaged file, or one of another machine, is ignored, except that a file named by MOESAIC_TUNING
/// must be valid.
StatusOr<TuningState> TuneKernels(bool wanted, const nlohmann::json& machine, kernels::KernelTable& table);

}  // namespace moesaic::app
