// Compiles gptq.cu, which the program contains as text, for a card.
#pragma once

#include <string>

#include "base/status.h"
#include "kernels/cuda/libraries.h"

namespace moesaic::kernels::cuda {

/// Returns a CUBIN for cards of compute capability `arch` (80, 90: ten times the number), or PTX, which the
/// driver compiles, if NVRTC does not support the capability. Errors contain the compiler's log.
StatusOr<std::string> CompileGptq(const Nvrtc& nvrtc, int arch);

}  // namespace moesaic::kernels::cuda
