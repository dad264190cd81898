#include "quantizer/calibrate/calibration_tokens.h"

#include <cstring>

#include "checkpoint/checkpoint.h"

namespace moesaic::quantizer {
namespace {

constexpr int32_t kPadding = -1;  // fills the ends of sequences that are shorter than the longest

}  // namespace

StatusOr<std::vector<std::vector<int32_t>>> ReadCalibrationTokens(const std::string& path, int vocab,
                                                                  int max_tokens) {
  ASSIGN_OR_RETURN(const std::unique_ptr<checkpoint::Checkpoint> file, checkpoint::Checkpoint::Open(path));
  const checkpoint::TensorEntry* entry = file->Find("tokens");
  if (entry == nullptr || entry->dtype != tensor::DType::kI32 || entry->shape.size() != 2 ||
      entry->shape[1] < 2) {
    return InvalidArgument("{}: needs a tensor \"tokens\" of dtype I32 and shape [sequences, length]", path);
  }
  const int64_t length = entry->shape[1];
  std::vector<std::vector<int32_t>> sequences;
  int64_t tokens = 0;
  for (int64_t i = 0; i < entry->shape[0]; ++i) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    std::memcpy(ids.data(), entry->bytes.data() + i * length * 4, ids.size() * 4);
    while (!ids.empty() && ids.back() == kPadding) ids.pop_back();
    if (ids.empty()) return InvalidArgument("{}: sequence {} is empty", path, i);
    tokens += std::ssize(ids);
    if (tokens > max_tokens) break;
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab)
        return InvalidArgument("{}: token ids must be in [0, {}), found {}", path, vocab, id);
    }
    sequences.push_back(std::move(ids));
  }
  if (sequences.empty()) {
    return InvalidArgument("{}: the first sequence is longer than {} tokens", path, max_tokens);
  }
  return sequences;
}

}  // namespace moesaic::quantizer
