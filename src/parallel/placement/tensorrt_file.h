// The YAML file of TensorRT-LLM's expert load balancer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::parallel {

/// Returns whether the text has the key of the file's assignments.
bool IsTensorRtYaml(std::string_view text);

/// Parses the experts of all slots, [layers][slots], in the order of the file. Accepted is the YAML that
/// TensorRT-LLM's tools write: top-level keys with numbers, and "initial_global_assignments" with one list
/// per layer, in brackets or with one "- EXPERT" per line. Layer numbers must ascend, and each layer must
/// have "num_slots" slots. InvalidArgument names the line of a fault.
StatusOr<std::vector<std::vector<double>>> ParseTensorRtYaml(std::string_view text,
                                                             const std::string& source);

}  // namespace moesaic::parallel
