// Fuzzes config.json: reads each field with every reader, and parses quantization_config with its patterns.
#include "checkpoint/config_reader.h"
#include "checkpoint/json_text.h"
#include "checkpoint/linear_source.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::checkpoint;  // NOLINT: a fuzzer is one function
  const auto config = ParseJsonObject({reinterpret_cast<const char*>(data), size}, "config.json");
  if (!config.ok()) return 0;
  ConfigReader reader(*config, "config.json");
  const auto check = [](bool holds) {
    if (!holds) __builtin_trap();
  };
  for (const auto& [key, value] : config->items()) {
    const int64_t integer = reader.Int(key, -3, 1000);
    const double number = reader.Number(key, -0.5, 1e6);
    check(integer >= -3 && integer <= 1000);
    check(number >= -0.5 && number <= 1e6);
    (void)reader.BoolOr(key, true);
    (void)reader.StringOr(key, "");
    for (const int64_t element : reader.IntsOr(key, -1, 7, {})) check(element >= -1 && element <= 7);
    (void)reader.Object(key);
    reader.OnlyString(key, {"silu"});
    reader.OnlyBool(key, false);
  }
  (void)reader.Finish();
  if (const auto quant = ParseQuantConfig(*config, "config.json"); quant.ok()) {
    for (const char* module : {"lm_head", "model.layers.10.mlp.experts.127.gate_proj"})
      (void)quant->GroupOf(module);
  }
  return 0;
}
