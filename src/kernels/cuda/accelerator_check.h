// Checks that an accelerator computes correctly: small products, factors and roundings with known results.
// It runs when a card is opened, before any weight is rounded on it.
#pragma once

#include "base/status.h"
#include "kernels/gptq_accelerator.h"

namespace moesaic::kernels::cuda {

/// Products and roundings must be bit-exact, factors within f32 accuracy. The error names the wrong result.
/// Uses a few megabytes of device memory during the check. It also triggers the libraries' lazy loading.
Status CheckAccelerator(GptqAccelerator& device);

}  // namespace moesaic::kernels::cuda
