// Parses arbitrary bytes as a PyTorch checkpoint.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "science/torch_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file =
      moesaic::science::ParseTorchFile({reinterpret_cast<const std::byte*>(data), size}, "fuzz");
  if (!file.ok() && file.status().message().empty()) std::abort();
  return 0;
}
