// The weight layouts that kernels read, packed once by `convert`, `quantize` or at load time.
//
// A matrix W [n, k] (n outputs, k inputs) is cut into panels of 16 outputs. Inside a panel the inputs go by
// groups of g = 4 bytes / element size (f32: 1, bf16: 2, i8: 4):
//
//   element W[16 p + r, g q + s]  stands at  panel p, group q, row r, slot s:   [n/16][k/g][16][g]
//
// so one group is 64 bytes: one AVX-512 register, two AVX2 registers, or one row of an AMX B tile (16 groups
// in a row are a whole tile). n is padded to 16 and k to 64 elements with zeros, so that no kernel has a
// ragged k. After the elements come, each 64-byte aligned: for i8, f32 scales [n_padded] and i32 sums of each
// output's weights [n_padded] (kernels that bias activations by 128 subtract 128 x sum).
//
// Group-scaled formats have a scale for every 16 or 32 inputs of an output. Their panel is a run of units of
// 64 inputs, each with its scales before its elements: see tensor/group_format.h. After the panels come f32
// scales [n_padded], one an output, that multiply those of the groups. kF8G128 has units of 128 inputs: see
// tensor/fp8_format.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tensor/static_scale.h"

namespace moesaic::tensor {

inline constexpr int kPanelRows = 16;    // outputs in a panel: one per f32 lane of a 64-byte register
inline constexpr int kPackedKUnit = 64;  // k is padded to one AMX tile row of int8

enum class PackedFormat : uint8_t {
  kF32,     ///< f32 elements, f32 activations.
  kBF16,    ///< bf16 elements, bf16 activations (rounded per row by the kernel's own preparation), f32 sums.
  kI8,      ///< int8 elements with one f32 scale an output; int8 activations with one scale a row (W8A8).
  kF8G128,  ///< e4m3 elements with one f32 scale for 128 inputs; bf16 activations (tensor/fp8_format.h).
  // Group-scaled; int8 activations with one scale for 32 inputs.
  kI8G32,  ///< int8, f16 scales of 32 inputs: Q8_0.
  kI4G32,  ///< int4, f16 scales of 32 inputs: Q4_0, and compressed-tensors' groups of 32, 64 or 128.
  kMxfp4,  ///< e2m1, powers of two for scales of 32 inputs (OCP MX).
  kNvfp4,  ///< e2m1, e4m3 scales of 16 inputs.
  kQ4K,    ///< GGUF's Q4_K: int4, 6-bit scales and minima of 32 inputs, f16 ones of 256.
  kQ6K,    ///< GGUF's Q6_K: int6, int8 scales of 16 inputs, f16 ones of 256.
};
inline constexpr int kPackedFormats = 10;

std::string PackedFormatName(PackedFormat format);  ///< "f32", "bf16", "int8", "fp8_g128", "int8_g32", ...
StatusOr<PackedFormat> ParsePackedFormat(const std::string& name);
inline bool IsGroupScaled(PackedFormat format) { return format >= PackedFormat::kI8G32; }
/// Whether PackRows can make it of any values; the others are only taken over as they are stored.
inline bool CanQuantize(PackedFormat format) { return format < PackedFormat::kQ4K; }
std::vector<std::string> QuantizableFormatNames();

/// Where the parts of a packed matrix lie, from its format and shape alone.
struct PackedLayout {
  PackedFormat format;
  int n, k;                // as the model means it
  int n_padded, k_padded;  // multiples of kPanelRows and kPackedKUnit (kF8G128: of 128)
  int64_t panel_bytes;     // one panel of k_padded inputs
  int64_t scales_offset;   // bytes from the start; 0 when the format has none
  int64_t sums_offset;     // likewise
  int64_t total_bytes;     // a multiple of 64

  /// n and k must be >= 1; for kI8, k <= 65536 (int32 sums of u8 x s8 products can't overflow).
  static PackedLayout Of(PackedFormat format, int n, int k);
  int panels() const { return n_padded / kPanelRows; }
};

/// A packed matrix, or a run of its panels, that somebody else owns (a mapped file or a Buffer). Copies are
/// cheap.
///
/// On a machine with several NUMA nodes there may be `images` of it, one on each node, image_stride apart.
/// They are copies of one another; or slices of slice_panels panels each, the first node's first, every one
/// laid out as a matrix of so many outputs.
struct PackedMatrix {
  PackedLayout layout{};            // of the whole matrix at `data`, but n and n_padded are this run's
  const std::byte* data = nullptr;  // the whole matrix, or its first image: 64-byte aligned
  int first_row = 0;                // output of the whole matrix at which this run begins; a multiple of 16
  StaticScale input_scale = {};     // kI8: of activations
  int images = 1;
  int slice_panels = 0;      // 0: an image is the whole matrix
  int64_t image_stride = 0;  // bytes

  bool empty() const { return data == nullptr; }
  int n() const { return layout.n; }
  int k() const { return layout.k; }
  /// Panels of a slice, or of the run if images are not slices.
  int image_panels() const { return slice_panels > 0 ? slice_panels : layout.panels(); }
  /// This run from panel `p` on, to its end or that of p's slice, in the image that NUMA node `node` is to
  /// read (thread pools number nodes): one piece of memory, where panel(), scales() and sums() find their
  /// way, as they do not over slices.
  PackedMatrix At(int p, int node) const;
  const std::byte* panel(int p) const { return data + (first_row / kPanelRows + p) * layout.panel_bytes; }
  bool has_scales() const { return layout.scales_offset > 0; }
  bool has_sums() const { return layout.sums_offset > 0; }
  /// Scales and weight sums of this run's outputs, the first one's first, where the format has them.
  const float* scales() const {
    return reinterpret_cast<const float*>(data + layout.scales_offset) + first_row;
  }
  const int32_t* sums() const {
    return reinterpret_cast<const int32_t*>(data + layout.sums_offset) + first_row;
  }
  /// The sub-matrix of outputs [first, first + count) of this one; first must be a multiple of kPanelRows.
  PackedMatrix Rows(int first, int count) const;
};

/// Packs rows [first_row, first_row + rows) of W from f32 values [rows, k] into `out` (layout.total_bytes
/// long, zeroed by the caller before the first call). first_row must be a multiple of 16. kI8 quantises each
/// output symmetrically to [-127, 127] with scale amax/127, rounding half to even; group-scaled formats as
/// QuantizeGroups does (CanQuantize). Values must be finite. Calls for different rows may run at the same
/// time.
void PackRows(const PackedLayout& layout, int first_row, int rows, const float* values, std::byte* out);

/// Packs int8 values that are already quantised, [rows, k], with their scales [rows]; nothing is rounded
/// again.
void PackRowsI8(const PackedLayout& layout, int first_row, int rows, const int8_t* values,
                const float* scales, std::byte* out);

/// Reads output `row` back as f32 [k]: what the kernels multiply with.
void UnpackRow(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
