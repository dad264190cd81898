// Reference implementation of the router: the oracle of its tests, and the fallback for shapes that the
// others do not support.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

void Route(const RouteTask& task);

}  // namespace moesaic::kernels::ref
