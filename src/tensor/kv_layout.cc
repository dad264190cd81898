#include "tensor/kv_layout.h"

#include <cstring>

namespace moesaic::tensor {

KvBlockView KvLayout::Flat(std::byte* memory) const {
  if (summary_bytes == 0) return {.data = memory};
  return {.data = memory, .summaries = memory + block_bytes(), .summary_step = summary_stride()};
}

void KvLayout::Copy(const KvBlockView& from, const KvBlockView& to) const {
  std::memcpy(to.data, from.data, block_bytes());
  for (int layer = 0; layer < layers && summary_bytes > 0; ++layer) {
    std::memcpy(to.summaries + layer * to.summary_step, from.summaries + layer * from.summary_step,
                summary_stride());
  }
}

void KvLayout::CopyTokens(const KvBlockView& from, const KvBlockView& to, int tokens) const {
  const auto copy_rows = [&](int64_t offset, int64_t stride, int64_t row_bytes) {
    for (int head = 0; head < heads; ++head) {
      const int64_t at = offset + head * stride;
      std::memcpy(to.data + at, from.data + at, tokens * row_bytes);
    }
  };
  for (int layer = 0; layer < layers; ++layer) {
    const int64_t offset = layer * layer_bytes();
    copy_rows(offset, head_stride(), key_dim * element_bytes());
    if (!shared) copy_rows(offset + value_offset(), head_stride(), value_dim * element_bytes());
    if (scales_bytes() == 0) continue;
    const int64_t scales = offset + scale_offset();
    copy_rows(scales, kKvBlockTokens * sizeof(float), sizeof(float));
    copy_rows(scales + scales_bytes() / 2, kKvBlockTokens * sizeof(float), sizeof(float));
  }
}

}  // namespace moesaic::tensor
