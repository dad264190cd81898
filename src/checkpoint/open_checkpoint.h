// Finds out what a path holds and opens it: the containers behind Checkpoint::Open.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

StatusOr<std::unique_ptr<Checkpoint>> OpenContainer(const std::string& path);

}  // namespace moesaic::checkpoint
