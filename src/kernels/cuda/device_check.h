// Whether a device works: small products, factors and roundings whose results are known.
#pragma once

#include "base/status.h"
#include "kernels/device.h"

namespace moesaic::kernels::cuda {

/// Products and roundings must come out to the bit, factors as near as f32 gets. An error says which did not.
/// Takes a few megabytes of the device while it runs. Has libraries load what they load at the first call.
Status CheckDevice(Device& device);

}  // namespace moesaic::kernels::cuda
