// A GGUF file seen as a Hugging Face checkpoint.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"
#include "runtime/memory.h"

namespace moesaic::checkpoint {

StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(std::shared_ptr<const runtime::MappedFile> file);

/// The same from memory that must outlive the result: for tests and fuzzers. `path` is for messages.
StatusOr<std::unique_ptr<Checkpoint>> ReadGguf(std::span<const std::byte> bytes, const std::string& path);

/// config.json's equivalent of a file's metadata. The architectures: llama, qwen3, qwen3moe and deepseek2.
StatusOr<nlohmann::json> ConfigFromGguf(const GgufFile& gguf, const std::string& file);

/// The Hub name of a ggml tensor; "{}" in it stands for the expert of a stack. Unknown names are refused.
StatusOr<std::string> HubName(const std::string& ggml_name, const std::string& file);

}  // namespace moesaic::checkpoint
