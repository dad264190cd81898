// Fuzzes a GGUF file opened as a Hub checkpoint, and reads the first and last rows of its tensors.
#include "checkpoint/gguf_checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto checkpoint = moesaic::checkpoint::ReadGguf(std::as_bytes(std::span(data, size)), "fuzz.gguf");
  if (!checkpoint.ok()) return 0;
  (void)(*checkpoint)->ReadText("chat_template.jinja");
  for (const auto& entry : (*checkpoint)->tensors()) {
    const int64_t columns = entry.shape.back();
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < entry.shape.size(); ++i) rows *= entry.shape[i];
    std::vector<float> values(static_cast<size_t>(columns));
    (void)(*checkpoint)->ReadRows(entry, 0, 1, values);
    (void)(*checkpoint)->ReadRows(entry, rows - 1, 1, values);
  }
  return 0;
}
