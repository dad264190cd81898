// The choices of `moesaic tune` (kernels/tuning.h) in a file, for the machine that they were measured on.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"
#include "kernels/tuning.h"
#include "runtime/cpu_features.h"
#include "runtime/topology.h"

namespace moesaic::app {

/// What choices hold for: processor, instruction sets, caches, threads and the version of the kernels.
nlohmann::json TuningMachine(const runtime::Topology& topology, const runtime::CpuFeatures& cpu, int threads);

/// MOESAIC_TUNING if it names a file, else moesaic/tuning-THREADS.json below XDG_CACHE_HOME or ~/.cache; ""
/// if there is no home.
std::string TuningPath(int threads);

/// "cut" and "few_below", as in the file.
nlohmann::json ChoicesJson(const kernels::Tuning& tuning);
/// The file's text, and back. Parsing fails with what is wrong, or with what differs if the choices are of
/// another machine or number of threads.
std::string TuningText(const nlohmann::json& machine, const kernels::Tuning& tuning);
StatusOr<kernels::Tuning> ParseTuning(const std::string& text, const nlohmann::json& machine);

/// What became of the file: "tuned by /path", or "not tuned" and why.
struct TuningState {
  std::string text;
  bool ignored = false;  // there is one, and it is damaged or of another machine
};

/// Puts the file's choices into `table`. Without `wanted`, with MOESAIC_TUNING=off and without a file nothing
/// is done. A file that is damaged or of another machine is left alone; one that MOESAIC_TUNING names must be
/// good, or TuneKernels fails.
StatusOr<TuningState> TuneKernels(bool wanted, const nlohmann::json& machine, kernels::KernelTable& table);

}  // namespace moesaic::app
