// Micro-kernel interfaces: parameter types shared by all implementations. Files compiled for one instruction
// set include this header, so it must not contain inline code (see impl_list.h).
//
// A micro-kernel is single-threaded and specific to an instruction set. The operators split work into tasks
// for the thread pool and call micro-kernels on each. Every micro-kernel has a reference version in ref/ with
// the same signature.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/static_scale.h"

namespace moesaic::kernels {

/// One tile of C = A W^T: `m` rows of quantized activations times `panels` panels of 16 outputs.
struct GemmTile {
  const std::byte* a;     // [m][a_stride bytes]: rows written by `prepare` of the same table entry
  int64_t a_stride;       // bytes between rows
  const float* a_scales;  // [m], kI8 only
  const std::byte* w;     // first panel
  int64_t panel_bytes;    // bytes between panels
  const float* w_scales;  // [16 * panels], kI8 and group-scaled, starting at the first panel's first output
  const int32_t* w_sums;  // [16 * panels], kI8 only
  const float* bias;      // [columns] or null
  float* c;               // [m][c_stride]
  int64_t c_stride;       // floats between rows
  int m;                  // >= 1
  int k_padded;           // multiple of 64
  int panels;             // >= 1
  int columns;            // outputs written: <= 16 * panels, truncates the last panel
  bool accumulate;        // adds to C instead of overwriting it
};

/// Quantizes and lays out one row of activations for the gemm of the same table entry. `x` is [k] f32; `out`
/// has k_padded elements of the format's activation type, with a zeroed tail.
/// - kI8 with static_scale: q = round_half_even(x * static_scale.inverse), clamped to [-127, 127].
/// - kI8 without: q = round_half_even(x / scale) with scale = amax/127 (0 for a zero row).
/// - Group-scaled formats quantize every 32 inputs, without a static scale, and store scales and corrections
///   after the elements (cpu/gemm_group_formats-inl.h).
/// - The scale of a row (of a group, in group-scaled formats) with infinity or NaN is infinity or NaN, even
///   with a static scale.
///
/// Returns the scale for kI8, otherwise 0.
using PrepareRowFn = float (*)(const float* x, int k, int k_padded, tensor::StaticScale static_scale,
                               std::byte* out);
using GemmTileFn = void (*)(const GemmTile& tile);

/// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; x and y may be the same array.
using RmsNormRowFn = void (*)(const float* x, const float* weight, int n, float eps, float* y);

/// y[i] = silu(gate[i]) * up[i].
using SiluMulRowFn = void (*)(const float* gate, const float* up, int n, float* y);

/// y[i] += scale * x[i], fused (rounded once) where the instruction set supports it; ref rounds twice.
using AxpyRowFn = void (*)(float scale, const float* x, int n, float* y);

/// y[i] = a * x[i] + b * y[i]. Each product and the sum are rounded: bit-identical on every instruction set.
using AxpbyRowFn = void (*)(float a, const float* x, float b, int n, float* y);

/// x[i] *= 2^-halvings by adding to the exponent's bits (AMLA, arXiv 2509.25224), without rounding. A number
/// that is or becomes denormal is set to 0. Infinities and NaN are unchanged. halvings >= 0.
using RescaleRowFn = void (*)(float* x, int n, int halvings);

/// Rotates pairs of x by (cos, sin) [dim/2] each. Half-split pairs are (x[i], x[i + dim/2]); interleaved
/// pairs are (x[2i], x[2i + 1]).
using RopeRowFn = void (*)(float* x, const float* cos, const float* sin, int dim);

constexpr int kRouteRows = 64;  ///< maximum rows of a RouteTask

/// Routing of up to kRouteRows tokens; see RouteParams, whose preconditions hold.
struct RouteTask {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts] or null
  int rows;             // 1..kRouteRows
  int experts, top_k, groups, top_groups;
  bool sigmoid;    // otherwise softmax
  bool top_two;    // a group's score is the sum of its best two scores, otherwise its best score
  bool normalize;  // divides weights by their sum
  float scale;
  float* scratch;  // [RouteScratch(experts)]
  int32_t* ids;    // out [rows, top_k], by descending choice score, ties to the lower id
  float* weights;  // out [rows, top_k]
};
constexpr int RouteScratch(int experts) { return 5 * experts + 16; }
using RouteFn = void (*)(const RouteTask& task);

/// Keys of a KV block, layer and head: of a run of an AttentionTile, and of a key summary. It is
/// tensor::kKvBlockTokens, whose header has inline code; attention.cc compares them.
constexpr int kBlockKeys = 64;

constexpr int kAttentionRuns = 4;    ///< maximum runs of an AttentionTile
constexpr int kAttentionRows = 128;  ///< maximum rows of an AttentionTile

/// Attention of `rows` query rows over shared runs of 64 keys, each run in its own KV block. Computes the
/// softmax over the keys visible to a row, and the weighted sum of their values.
struct AttentionTile {
  // [rows rounded up to 8][q_stride]: already scaled; rows beyond `rows` are read but not used
  const float* q;
  int64_t q_stride;  // floats
  // Buffer for the kernel's packed form of the queries, or null. With q_is_packed the last call with this
  // buffer had the same queries, so that the kernel need not pack them again.
  std::byte* packed_q;  // [rows rounded up to 16][key_dim] times 4 bytes, 64-byte aligned
  bool q_is_packed;
  // Keys of each run, [64][key_stride bytes] with key_dim elements each. Keys that are not visible may be
  // read. Runs without visible keys may be null.
  const std::byte* runs[kAttentionRuns];
  // Runs of the next call, which a kernel may prefetch, or null. Only the offset of their scales may differ
  // (after_scales).
  const std::byte* after[kAttentionRuns];
  int64_t key_stride;    // bytes
  int64_t value_offset;  // bytes from a run's keys to its values; 0: values are the keys' first dimensions
  // bytes; values are [64][value_dim elements]; values of keys that are not visible are not read
  int64_t value_stride;
  tensor::DType kv_dtype;  // kF32, kBF16 or kI8
  int rows;                // 1..kAttentionRows
  int key_dim;             // multiple of 8
  int value_dim;           // multiple of 8
  const int* visible;      // [rows]: row r sees keys [0, visible[r]) of all runs
  // State of each row: output, and with `resume` also input, the state after the preceding keys. The initial
  // state is -inf, 0 and zeros.
  float* max;          // [rows]: a bound from the largest score to ln 2 above it; -inf if no key is visible
  float* sum;          // [rows]: sum of exp(score - max)
  float* acc;          // [rows][acc_stride]: weighted values, not divided by sum
  int64_t acc_stride;  // floats
  bool resume;
  // kI8 only: bytes from a run's keys to its f32 scales, [64] each, one per key; those of keys that are not
  // visible are undefined. key_scales multiplies a key's dimensions [0, key_split), rest_scales the others,
  // if any.
  int64_t key_scales;
  int64_t rest_scales;
  int64_t value_scales;
  int key_split;         // multiple of 8
  int64_t after_scales;  // bytes to add to the three offsets above for the scales of `after`
};
using AttentionTileFn = void (*)(const AttentionTile& tile);

/// Header of a key summary: bounds on the 64 keys of one block and KV head that avoid reading them. int8
/// centers [key_dim] and uint8 radii [key_dim] follow; each is multiplied by its part's scale, and |key[d] -
/// center[d]| <= radius[d] for every key. Parts are the dimensions [0, key_split) and the others.
struct KeySummaryHeader {
  float center_scale[2];  // NaN: some key is beyond 1e17 or not a number
  float radius_scale[2];
  float ball[2];    // maximum distance of a key from the center in a part's dimensions
  float sketch[2];  // multiplier of the sketches' factors
};
constexpr int kMaxKeySummaryDim = 1024;  ///< maximum key_dim
/// Factor that makes a computed norm an upper bound. The sum of up to kMaxKeySummaryDim squares, added in
/// f32 in any order, and its root have a relative error below 2^-14.
constexpr float kNormSlack = 1 + 0x1p-14F;
constexpr int64_t BoxBytes(int key_dim) {
  return static_cast<int64_t>(sizeof(KeySummaryHeader)) + 2 * int64_t{key_dim};
}

/// Sketches follow the box. For each key and part, a sketch encodes the rotated difference from the center as
/// signs:
///   key's part - center ~ factor * header.sketch * (rotated back) signs
///
/// It stores uint8 factors [parts][64], then, 64-byte aligned, bits [part][width / 64][4][16 / 8][64]. Bit i
/// of byte 4 n + j of [step][group][half] is the sign of dimension 64 step + 4 (8 half + i) + j of key 16
/// group + n; 1 is plus. This is the layout of right operands of tile products. A part of at most 64
/// dimensions has two consecutive planes of signs, of which the first has twice the weight.
struct SketchLayout {
  int width[2];     // sign bits per key in each part, multiples of 64; 0: the part does not exist
  int64_t factors;  // bytes from the summary to the factors
  int64_t planes;   // bytes from the summary to the planes of signs
  int64_t bytes;    // bytes of the whole summary: a multiple of 64
};
constexpr int64_t kSketchStepBytes = 512;  ///< 64 signs of 64 keys

/// Builds the box of a summary of 64 keys, all of which are read. Centers are those of the smallest boxes
/// around the keys, rounded to int8. Radii are measured from the rounded centers and rounded up, so that the
/// bound holds.
struct KeySummaryTask {
  const std::byte* keys;     // [64][key_stride bytes], key_dim elements each
  int64_t key_stride;        // bytes
  tensor::DType kv_dtype;    // kF32, kBF16 or kI8
  int key_dim;               // multiple of 8, at most kMaxKeySummaryDim
  int key_split;             // multiple of 8: first dimension of the second part; key_dim: there is one part
  const float* key_scales;   // [64], kI8 only: scales of the first part
  const float* rest_scales;  // [64], kI8 only: scales of the second part
  std::byte* summary;        // out [BoxBytes(key_dim)], 4-byte aligned
};
using KeySummaryFn = void (*)(const KeySummaryTask& task);

constexpr int kScoreGroup = 16;  ///< rows whose scores of a block are stored together
constexpr int kMaxEstimateRows = 128;

/// Estimates a score of each of `rows` queries for each of `count` blocks, for block selection:
///   scale * (q . center + share * spread)
///
/// The spread is a sum over the parts of min(|q| . radius, |q|_2 ball). The estimates are not bounds. Kernels
/// may round q to 2^-15, and |q| in the product with radii to 2^-8, of the largest element of its part.
struct KeySummaryEstimates {
  const float* q;                     // [rows][q_stride]
  int64_t q_stride;                   // floats
  float scale;                        // multiplies q
  const std::byte* const* summaries;  // [count]
  int rows;                           // 1..kMaxEstimateRows
  int count;
  int key_dim, key_split;  // multiples of 8, key_dim at most kMaxKeySummaryDim
  float share;             // multiplier of the spread
  // out [ceil(rows / 16)][stride][16]; NaN for a summary with a NaN. Unused entries are undefined.
  float* scores;
  int64_t stride;  // blocks, >= count
  // Prefetch hint: leading bytes of each summary that are probably not in a cache yet, those of the heads
  // that are scored next included. 0 disables prefetching. Kernels may ignore it.
  int64_t prefetch_bytes;
  // Summaries that this worker scores next, with equal dimensions, and their prefetch hint.
  const std::byte* const* next;
  int next_count;
  int64_t next_prefetch_bytes;
};
using KeySummaryEstimatesFn = void (*)(const KeySummaryEstimates& estimates);

/// A score that is more than 72 below the largest of its row contributes nothing to shares. exp(-72) is
/// 2^-104, so that even the share of one of 2^22 such blocks is not denormal; denormals are slow.
constexpr float kMinPower = -72;

/// Sums the softmax over blocks of up to 16 rows:
///   shares[b] = sum over rows of exp(scores[b][row]) / sum over blocks c of exp(scores[c][row])
///
/// A NaN score contributes nothing. However, shares[b] is NaN if the first row's score of b is not finite, as
/// it is for a summary with a NaN. `scores` [blocks][16] is overwritten; unused entries may have any value.
using BlockSharesFn = void (*)(float* scores, int rows, int blocks, float* shares);

/// Scores of `rows` queries in `count` blocks by the keys' sketches: for each block, the logarithm of the sum
/// over its keys of exp(estimate of q . key). The error is at most 0.06 if no estimate differs by more than
/// 69 from the center's product; larger differences are clamped.
struct SketchScores {
  // [rows rounded up to 16][q_stride]: written by SketchQuery; rows beyond `rows` may have any value
  const int8_t* q;
  int64_t q_stride;                   // sum of the widths
  const float* q_scales;              // [rows][2]: scales of the parts
  const int32_t* q_sums;              // [rows][2]: sums of the parts' elements
  const std::byte* const* summaries;  // [count]
  int rows, count;
  SketchLayout layout;
  // [ceil(rows / 16)][stride][16]; in: q . center from KeySummaryEstimates; out: the logarithms. NaN is
  // preserved.
  float* scores;
  int64_t stride;  // blocks, >= count
};
using SketchScoresFn = void (*)(const SketchScores& scores);

}  // namespace moesaic::kernels
