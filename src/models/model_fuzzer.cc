// Builds a model from a config.json or a GGUF file's metadata, up to the allocation of weights: its spec, the
// plan of its weights against the file's tensors, and its memory needs. Input: a GGUF file, otherwise a
// config.json.
#include <cstdint>
#include <span>
#include <string_view>

#include "checkpoint/gguf_checkpoint.h"
#include "checkpoint/json_text.h"
#include "models/model_info.h"
#include "models/weight_plan.h"

namespace moesaic::models {
namespace {

void Inform(const StatusOr<DecoderSpec>& spec) {
  if (!spec.ok()) return;
  const AttentionSpec& attention = spec->attention;
  const bool mla = attention.kind == AttentionSpec::Kind::kMla;
  if (spec->rope.dim > (mla ? attention.rope_dim : attention.head_dim)) __builtin_trap();
  DecoderSpec fewer = *spec;
  (void)OverrideTopK(fewer, 1).ok();
  for (const char* dtype : {"auto", "f32", "int8", "nvfp4"}) {
    const StatusOr<ModelInfo> info = InfoFromSpec(*spec, dtype);
    if (info.ok() && info->parameters < 0) __builtin_trap();
  }
}

void Plan(const checkpoint::Checkpoint& checkpoint) {
  StatusOr<DecoderSpec> spec = SpecFromConfig(checkpoint.config(), ConfigFile(checkpoint));
  Inform(spec);
  if (!spec.ok()) return;
  DropAbsentMtp(checkpoint, *spec);
  for (const WeightDtype dtype : {WeightDtype(), WeightDtype(tensor::PackedFormat::kI8)}) {
    (void)PlanFromCheckpoint(*spec, checkpoint, dtype).ok();
  }
}

}  // namespace
}  // namespace moesaic::models

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic;  // NOLINT: a fuzzer is one function
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.starts_with("GGUF")) {
    const auto checkpoint = checkpoint::ReadGguf(std::as_bytes(std::span(data, size)), "fuzz.gguf");
    if (checkpoint.ok()) models::Plan(**checkpoint);
  } else {
    const auto config = checkpoint::ParseJsonObject(text, "config.json");
    if (config.ok()) models::Inform(models::SpecFromConfig(*config, "config.json"));
  }
  return 0;
}
