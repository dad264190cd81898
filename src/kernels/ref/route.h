// The router in plain code: what the others are tested against, and what takes the shapes that they don't.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

void Route(const RouteTask& task);

}  // namespace moesaic::kernels::ref
