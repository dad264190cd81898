// Presents a GGUF file as a Hugging Face checkpoint.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"
#include "runtime/memory.h"

namespace moesaic::checkpoint {

StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(std::shared_ptr<const runtime::MappedFile> file);

/// Opens a GGUF file from memory that must outlive the result; for tests and fuzzers. `path` is for messages.
StatusOr<std::unique_ptr<Checkpoint>> ReadGguf(std::span<const std::byte> bytes, const std::string& path);

/// Translates a file's metadata to the fields of config.json. Supports llama, qwen3, qwen3moe and deepseek2.
StatusOr<nlohmann::json> ConfigFromGguf(const GgufFile& gguf, const std::string& file);

/// Returns the Hub name of a ggml tensor, with "{}" in place of the expert of a stack. Unknown names are
/// errors.
StatusOr<std::string> HubName(const std::string& ggml_name, const std::string& file);

}  // namespace moesaic::checkpoint
