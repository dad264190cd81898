// gptq.cu, which the program carries as text, made into code for a card.
#pragma once

#include <string>

#include "base/status.h"
#include "kernels/cuda/libraries.h"

namespace moesaic::kernels::cuda {

/// A CUBIN for cards of compute capability `arch` (80, 90: ten times the number), or PTX, which the driver
/// compiles, where NVRTC does not know them yet. An error has the compiler's log.
StatusOr<std::string> CompileGptq(const Nvrtc& nvrtc, int arch);

}  // namespace moesaic::kernels::cuda
