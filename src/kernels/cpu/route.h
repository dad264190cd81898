// Routers of each instruction set; micro_kernels.h documents them.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void RouteAvx512(const RouteTask& task);

}  // namespace moesaic::kernels::cpu
