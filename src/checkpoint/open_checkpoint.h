// Finds out what a path holds and opens it: the containers behind Checkpoint::Open.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

StatusOr<std::unique_ptr<Checkpoint>> OpenContainer(const std::string& path);

/// A Hub checkpoint in memory: the text of config.json and one safetensors file.
StatusOr<std::unique_ptr<Checkpoint>> ReadContainer(std::string_view config,
                                                    std::span<const std::byte> safetensors);

/// The error for a checkpoint without tensors. Names files of the folder `path` that hold weights which can't
/// be opened: shards without their index, and PyTorch's pickles.
Status WeightsAreMissing(const std::string& path);

}  // namespace moesaic::checkpoint
