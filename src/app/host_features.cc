#include "app/host_features.h"

#include <cstdlib>

namespace moesaic::app {

StatusOr<runtime::CpuFeatures> FeaturesOfHost() {
  runtime::CpuFeatures cpu = runtime::DetectCpu();
  if (const char* limit = std::getenv("MOESAIC_ISA"); limit != nullptr && *limit != '\0') {
    const auto isa = runtime::ParseIsa(limit);
    if (!isa.ok()) return Annotate(isa.status(), "MOESAIC_ISA");
    const auto limited = runtime::LimitTo(cpu, *isa);
    if (!limited.ok()) return Annotate(limited.status(), "MOESAIC_ISA");
    cpu = *limited;
  }
  return cpu;
}

}  // namespace moesaic::app
