#include "checkpoint/gguf_rows.h"

#include <nlohmann/json.hpp>

#include <algorithm>

#include "checkpoint/ggml_blocks.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;

std::string ShapeText(const std::vector<int64_t>& shape) { return nlohmann::json(shape).dump(); }

Status CheckReadable(const TensorEntry& entry) {
  const bool scalar = entry.dtype == DType::kF32 || entry.dtype == DType::kF16 || entry.dtype == DType::kBF16;
  if (scalar || tensor::BlockOf(entry.dtype).elements > 1) return OkStatus();
  return InvalidArgument("{}: tensor {} must be of a floating-point or block type, found {}", entry.file,
                         entry.name, tensor::DTypeName(entry.dtype));
}

// Reads `count` rows of `columns` elements, from row `first` on, in the order in which `entry` stores them.
void ReadStored(const TensorEntry& entry, int64_t columns, int64_t first, int64_t count, float* out) {
  DequantizeBlocks(entry.dtype, entry.bytes.data() + tensor::BytesOf(entry.dtype, first * columns),
                   count * columns, out);
}

class RotaryRows : public RowReader {
 public:
  RotaryRows(TensorEntry stored, int64_t head_dim)
      : stored_(std::move(stored)),
        half_(head_dim / 2),
        is_bias_(stored_.shape.size() == 1),
        columns_(is_bias_ ? 1 : stored_.shape.back()) {}

  void Read(int64_t first, int64_t count, float* out) const override {
    if (is_bias_) {  // ReadRows treats a bias as one row of all values
      first = 0;
      count = stored_.shape[0];
    }
    for (int64_t row = first; row < first + count; ++row, out += columns_) {
      ReadStored(stored_, columns_, FileRow(row), 1, out);
    }
  }

  int64_t FileRow(int64_t row) const override {
    const int64_t head_start = row / (2 * half_) * (2 * half_), in_head = row % (2 * half_);
    return head_start + 2 * (in_head % half_) + in_head / half_;
  }

 private:
  TensorEntry stored_;
  int64_t half_;
  bool is_bias_;
  int64_t columns_;
};

class KvExpansionRows : public RowReader {
 public:
  KvExpansionRows(TensorEntry k, TensorEntry v, const KvExpansion& sizes)
      : k_(std::move(k)), v_(std::move(v)), sizes_(sizes) {}

  void Read(int64_t first, int64_t count, float* out) const override {
    const int64_t per_head = sizes_.nope + sizes_.v;
    while (count > 0) {
      const int64_t head = first / per_head, row = first % per_head;
      const int64_t end = row < sizes_.nope ? sizes_.nope : per_head;
      const int64_t run = std::min(count, end - row);
      if (row < sizes_.nope) {
        ReadKeyRows(head, row, run, out);
      } else {
        ReadStored(v_, sizes_.latent, head * sizes_.v + row - sizes_.nope, run, out);
      }
      first += run;
      count -= run;
      out += run * sizes_.latent;
    }
  }

 private:
  // Reads rows of the transpose of [latent, nope]. Blocks run along nope, so whole heads are dequantized.
  void ReadKeyRows(int64_t head, int64_t row, int64_t count, float* out) const {
    thread_local std::vector<float> stored;
    stored.resize(static_cast<size_t>(sizes_.latent * sizes_.nope));
    ReadStored(k_, sizes_.nope, head * sizes_.latent, sizes_.latent, stored.data());
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < sizes_.latent; ++j) {
        out[i * sizes_.latent + j] = stored[static_cast<size_t>(j * sizes_.nope + row + i)];
      }
    }
  }

  TensorEntry k_, v_;
  KvExpansion sizes_;
};

}  // namespace

StatusOr<TensorEntry> UndoRotaryOrder(TensorEntry entry, int64_t heads) {
  RETURN_IF_ERROR(CheckReadable(entry));
  const bool is_bias = entry.shape.size() == 1 && tensor::BlockOf(entry.dtype).elements == 1;
  if ((entry.shape.size() != 2 && !is_bias) || entry.shape[0] % (2 * heads) != 0) {
    return InvalidArgument("{}: tensor {} must have rows in multiples of {}, found {}", entry.file,
                           entry.name, 2 * heads, ShapeText(entry.shape));
  }
  entry.rows = std::make_shared<RotaryRows>(entry, entry.shape[0] / heads);
  return entry;
}

StatusOr<TensorEntry> JoinKvExpansion(const TensorEntry& k, const TensorEntry& v, const KvExpansion& sizes,
                                      const std::string& name) {
  RETURN_IF_ERROR(CheckReadable(k));
  RETURN_IF_ERROR(CheckReadable(v));
  const std::vector<int64_t> k_shape = {sizes.heads, sizes.latent, sizes.nope};
  const std::vector<int64_t> v_shape = {sizes.heads, sizes.v, sizes.latent};
  for (const auto& [half, shape] : {std::pair(&k, &k_shape), std::pair(&v, &v_shape)}) {
    if (half->shape == *shape) continue;
    return InvalidArgument("{}: tensor {} must be {}, found {}", half->file, half->name, ShapeText(*shape),
                           ShapeText(half->shape));
  }
  TensorEntry joined = k;
  joined.name = name;
  joined.dtype = k.dtype == DType::kF32 ? v.dtype : k.dtype;  // f32 only if both are f32
  joined.shape = {sizes.heads * (sizes.nope + sizes.v), sizes.latent};
  joined.rows = std::make_shared<KvExpansionRows>(k, v, sizes);
  return joined;
}

}  // namespace moesaic::checkpoint
