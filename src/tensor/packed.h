// Weight layouts that kernels read. Weights are packed once, by `convert`, `quantize` or at load time.
//
// A matrix W [n, k] (n outputs, k inputs) is divided into panels of 16 outputs. Inside a panel the inputs
// form groups of g = 4 bytes / element size (f32: 1, bf16: 2, i8: 4):
//
//   element W[16 p + r, g q + s] is stored at panel p, group q, row r, slot s:   [n/16][k/g][16][g]
//
// One group is 64 bytes: one AVX-512 register, two AVX2 registers, or one row of an AMX B tile (16
// consecutive groups are a whole tile). n is padded to 16 and k to 64 elements with zeros, so that kernels
// need no tail loop over k. For i8, two arrays follow the elements, each 64-byte aligned: f32 scales
// [n_padded] and i32 sums of each output's weights [n_padded]. Kernels that bias activations by 128 subtract
// 128 x sum.
//
// Group-scaled formats have one scale per 16 or 32 inputs of an output. Their panel is a sequence of units of
// 64 inputs, each with its scales before its elements: see tensor/group_format.h. The panels are followed by
// f32 output scales [n_padded], which multiply the group scales. kF8G128 has units of 128 inputs: see
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

inline constexpr int kPanelRows = 16;    // outputs per panel: one per f32 lane of a 64-byte register
inline constexpr int kPackedKUnit = 64;  // k is padded to multiples of this: one AMX tile row of int8

enum class PackedFormat : uint8_t {
  kF32,     ///< f32 elements, f32 activations.
  kBF16,    ///< bf16 elements, bf16 activations (rounded per row by the kernel's preparation), f32 sums.
  kI8,      ///< int8 elements with one f32 scale per output; int8 activations with one scale per row (W8A8).
  kF8G128,  ///< e4m3 elements with one f32 scale per 128 inputs; bf16 activations (tensor/fp8_format.h).
  // Group-scaled; int8 activations with one scale per 32 inputs.
  kI8G32,  ///< int8, f16 scale per 32 inputs: Q8_0.
  kI4G32,  ///< int4, f16 scale per 32 inputs: Q4_0, and compressed-tensors groups of 32, 64 or 128.
  kMxfp4,  ///< e2m1, power-of-two scale per 32 inputs (OCP MX).
  kNvfp4,  ///< e2m1, e4m3 scale per 16 inputs.
  kQ4K,    ///< GGUF's Q4_K: int4, 6-bit scale and minimum per 32 inputs, f16 factors per 256.
  kQ6K,    ///< GGUF's Q6_K: int6, int8 scale per 16 inputs, f16 factor per 256.
};
inline constexpr int kPackedFormats = 10;

std::string PackedFormatName(PackedFormat format);  ///< "f32", "bf16", "int8", "fp8_g128", "int8_g32", ...
StatusOr<PackedFormat> ParsePackedFormat(const std::string& name);
inline bool IsGroupScaled(PackedFormat format) { return format >= PackedFormat::kI8G32; }
/// Returns whether PackRows accepts arbitrary values. The other formats are only copied from checkpoints that
/// store them.
inline bool CanQuantize(PackedFormat format) { return format < PackedFormat::kQ4K; }
std::vector<std::string> QuantizableFormatNames();
/// Returns the inputs of an output that share a scale; 1 if all or none do. A matrix can be divided at
/// multiples of it.
int ScaledInputs(PackedFormat format);

/// Offsets of the parts of a packed matrix, computed from its format and shape alone.
struct PackedLayout {
  PackedFormat format;
  int n, k;                // unpadded dimensions
  int n_padded, k_padded;  // multiples of kPanelRows and kPackedKUnit (kF8G128: of 128)
  int64_t panel_bytes;     // bytes of one panel of k_padded inputs
  int64_t scales_offset;   // bytes from the start; 0 if the format has no scales
  int64_t sums_offset;     // bytes from the start; 0 if the format has no sums
  int64_t total_bytes;     // a multiple of 64

  /// n and k must be >= 1. For kI8, k <= 65536, so that int32 sums of u8 x s8 products cannot overflow.
  static PackedLayout Of(PackedFormat format, int n, int k);
  int panels() const { return n_padded / kPanelRows; }
};

/// View of a packed matrix, or of consecutive panels of it, in memory owned elsewhere (a mapped file or a
/// Buffer). Copies are cheap.
///
/// On a machine with several NUMA nodes the matrix may have `images`: one per node, image_stride bytes apart.
/// Images are either copies of one another, or slices of slice_panels panels each in node order. Each slice
/// has the layout of a matrix with that many outputs.
struct PackedMatrix {
  PackedLayout layout{};  // layout of the whole matrix at `data`, but n and n_padded are those of this view
  const std::byte* data = nullptr;  // start of the whole matrix, or of its first image: 64-byte aligned
  int first_row = 0;                // output of the whole matrix at which this view begins; a multiple of 16
  StaticScale input_scale = {};     // kI8: static scale of the activations
  int images = 1;
  int slice_panels = 0;      // 0: each image is the whole matrix
  int64_t image_stride = 0;  // bytes

  bool empty() const { return data == nullptr; }
  int n() const { return layout.n; }
  int k() const { return layout.k; }
  /// Returns the number of panels of a slice, or of the view if images are not slices.
  int image_panels() const { return slice_panels > 0 ? slice_panels : layout.panels(); }
  /// Returns the view from panel `p` to its end, or to the end of p's slice, in the image for NUMA node
  /// `node` (numbered like the thread pool's nodes). The result is one contiguous piece of memory, so
  /// panel(), scales() and sums() are valid on it. They are not valid across slices.
  PackedMatrix At(int p, int node) const;
  const std::byte* panel(int p) const { return data + (first_row / kPanelRows + p) * layout.panel_bytes; }
  bool has_scales() const { return layout.scales_offset > 0; }
  bool has_sums() const { return layout.sums_offset > 0; }
  /// Scales and weight sums of this view's outputs, if the format has them.
  const float* scales() const {
    return reinterpret_cast<const float*>(data + layout.scales_offset) + first_row;
  }
  const int32_t* sums() const {
    return reinterpret_cast<const int32_t*>(data + layout.sums_offset) + first_row;
  }
  /// Returns the view of outputs [first, first + count); first must be a multiple of kPanelRows.
  PackedMatrix Rows(int first, int count) const;
};

/// Packs rows [first_row, first_row + rows) of W from f32 values [rows, k] into `out`. `out` has
/// layout.total_bytes bytes; the caller zeroes it before the first call. first_row must be a multiple of 16.
/// kI8 quantizes each output symmetrically to [-127, 127] with scale amax/127, rounding half to even.
/// Group-scaled formats are quantized by QuantizeGroups (CanQuantize). Values must be finite. Calls for
/// different rows may run concurrently.
void PackRows(const PackedLayout& layout, int first_row, int rows, const float* values, std::byte* out);

/// Packs columns [first_column, first_column + layout.k) of `rows` rows from f32 values [rows, k] like
/// PackRows. The elements have the values that they have in the whole matrix: they are quantized with the
/// scales of whole rows. first_column must be a multiple of ScaledInputs.
void PackColumns(const PackedLayout& layout, int first_row, int rows, const float* values, int k,
                 int first_column, std::byte* out);

/// Packs int8 values [rows, k] that are already quantized, with their scales [rows]. Nothing is rounded
/// again.
void PackRowsI8(const PackedLayout& layout, int first_row, int rows, const int8_t* values,
                const float* scales, std::byte* out);

/// Dequantizes output `row` to f32 [k]: the values with which the kernels multiply.
void UnpackRow(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
