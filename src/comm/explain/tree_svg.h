// A picture of a topology.
#pragma once

#include <string>

#include "base/status.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Maximum number of devices of a picture. Pictures have more than explanations, whose plans take longer.
inline constexpr int kMaxDrawnDevices = 2048;

/// The tree as an SVG file: groups are boxes around their children, devices are labelled by their ranks. The
/// first line of a box has its name and the bandwidth of its port, the second one the link between its
/// children. InvalidArgument for more than kMaxDrawnDevices devices.
StatusOr<std::string> TreeSvg(const Topology& topology);

}  // namespace moesaic::comm
