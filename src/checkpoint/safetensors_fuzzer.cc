// Fuzzes a safetensors file with its config: parses the header, then reads every apparent linear layer whole.
// Input: 2 bytes with the length of config.json, config.json, the safetensors file.
#include <cstring>

#include "checkpoint/checkpoint.h"

namespace {

using moesaic::checkpoint::Checkpoint;
using moesaic::checkpoint::TensorEntry;

constexpr int64_t kMaxElements = 1 << 16;

// Takes modules and sizes from the tensors themselves; packed ones are tried with every size that could fit.
void ReadLinear(const Checkpoint& checkpoint, const TensorEntry& entry) {
  const size_t dot = entry.name.rfind('.');
  if (dot == std::string::npos || entry.shape.size() != 2) return;
  const std::string module = entry.name.substr(0, dot);
  for (const int64_t factor : {1, 2, 8}) {
    const int64_t out = entry.shape[0], in = entry.shape[1] * factor;
    if (out < 1 || in < 1 || out > kMaxElements / in) continue;
    const auto source = checkpoint.FindLinear(module, out, in);
    if (!source.ok()) continue;
    std::vector<float> values(static_cast<size_t>(out * in));
    (void)checkpoint.ReadLinearRows(*source, 0, out, values);
    std::vector<int8_t> rows(values.size());
    std::vector<float> scales(static_cast<size_t>(out));
    (void)checkpoint.ReadLinearRowsI8(*source, 0, out, rows, scales);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint16_t config_bytes = 0;
  if (size < sizeof(config_bytes)) return 0;
  std::memcpy(&config_bytes, data, sizeof(config_bytes));
  const auto all = std::as_bytes(std::span(data, size)).subspan(sizeof(config_bytes));
  const auto config = all.first(std::min<size_t>(config_bytes, all.size()));
  const auto checkpoint = Checkpoint::FromMemory(
      {reinterpret_cast<const char*>(config.data()), config.size()}, all.subspan(config.size()));
  if (!checkpoint.ok()) return 0;
  for (const TensorEntry& entry : (*checkpoint)->tensors()) {
    int64_t elements = 1;
    for (const int64_t length : entry.shape) elements *= length;
    if (elements <= kMaxElements) (void)(*checkpoint)->ReadF32(entry.name, entry.shape);
    ReadLinear(**checkpoint, entry);
  }
  return 0;
}
