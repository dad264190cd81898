// Detects the container at a path and opens it: the implementations of Checkpoint::Open.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

StatusOr<std::unique_ptr<Checkpoint>> OpenContainer(const std::string& path);

/// Reads a Hub checkpoint from memory: the text of config.json and one safetensors file.
StatusOr<std::unique_ptr<Checkpoint>> ReadContainer(std::string_view config,
                                                    std::span<const std::byte> safetensors);

/// Returns the error for a checkpoint without tensors. It names files of the folder `path` that hold weights
/// which cannot be opened: shards without their index, and PyTorch pickles.
Status WeightsAreMissing(const std::string& path);

}  // namespace moesaic::checkpoint
