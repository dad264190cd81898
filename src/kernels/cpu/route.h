// The routers of each instruction set; what they compute is said in micro_kernels.h.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void RouteAvx512(const RouteTask& task);

}  // namespace moesaic::kernels::cpu
