// The instruction sets that verbs use.
#pragma once

#include "base/status.h"
#include "runtime/cpu_features.h"

namespace moesaic::app {

/// Returns this machine's features, limited by MOESAIC_ISA.
StatusOr<runtime::CpuFeatures> FeaturesOfHost();

}  // namespace moesaic::app
