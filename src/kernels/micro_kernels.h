// Micro-kernels: what each computes, in the types that their implementations share. Included by files
// compiled for one instruction set, so nothing here may bring inline code with it (see impl_list.h).
//
// A micro-kernel is single-threaded and instruction-set specific; the operators in ops.h cut work into tasks
// for the thread pool and call micro-kernels on each. Every micro-kernel has a twin in ref/ with the same
// signature.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/static_scale.h"

namespace moesaic::kernels {

/// One tile of C = A W^T: `m` rows of prepared activations times `panels` panels of 16 outputs.
struct GemmTile {
  const std::byte* a;     // [m][a_stride bytes]: rows as the same table's prepare wrote them
  int64_t a_stride;       // bytes between rows
  const float* a_scales;  // [m], kI8 only
  const std::byte* w;     // first panel
  int64_t panel_bytes;    // bytes between panels
  const float* w_scales;  // [16 * panels], kI8 and group-scaled, at the first panel's first output
  const int32_t* w_sums;  // [16 * panels], kI8 only
  const float* bias;      // [columns] or null
  float* c;               // [m][c_stride]
  int64_t c_stride;       // floats between rows
  int m;                  // >= 1
  int k_padded;           // multiple of 64
  int panels;             // >= 1
  int columns;            // outputs written: <= 16 * panels, cuts the last panel
  bool accumulate;        // C += instead of C =
};

/// Rounds and lays out one row of activations for the gemm of the same table.
/// `x` [k] f32; `out` k_padded elements of the format's activation type, the tail zeroed.
/// kI8: q = round_half_even(x * static_scale.inverse) in [-127, 127] if there is one; else
/// round_half_even(x / scale), scale = amax/127 (0 for a zero row). Returns the scale. Group-scaled formats
/// do so for every 32 inputs, without a static scale, and put scales and corrections behind the elements
/// (cpu/gemm_group_formats-inl.h). They and others return 0.
using PrepareRowFn = float (*)(const float* x, int k, int k_padded, tensor::StaticScale static_scale,
                               std::byte* out);
using GemmTileFn = void (*)(const GemmTile& tile);

/// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; x and y may be the same.
using RmsNormRowFn = void (*)(const float* x, const float* weight, int n, float eps, float* y);

/// y[i] = silu(gate[i]) * up[i].
using SiluMulRowFn = void (*)(const float* gate, const float* up, int n, float* y);

/// y[i] += scale * x[i], fused (rounded once) where there are instructions for it; ref rounds twice.
using AxpyRowFn = void (*)(float scale, const float* x, int n, float* y);

/// y[i] = a * x[i] + b * y[i], each product and the sum rounded: the same bits on every instruction set.
using AxpbyRowFn = void (*)(float a, const float* x, float b, int n, float* y);

/// x[i] *= 2^-halvings by adding to the exponent's bits (AMLA, arXiv 2509.25224), without rounding; a number
/// that would not be normal then, or was not before, becomes 0. Infinities and NaN stay. halvings >= 0.
using RescaleRowFn = void (*)(float* x, int n, int halvings);

/// Rotates pairs of x by (cos, sin) [dim/2] each. Half-split pairs are (x[i], x[i + dim/2]); interleaved
/// pairs are (x[2i], x[2i + 1]).
using RopeRowFn = void (*)(float* x, const float* cos, const float* sin, int dim);

constexpr int kRouteRows = 64;  ///< of a RouteTask, at most

/// Some tokens' routing: see RouteParams in ops.h, whose checks hold.
struct RouteTask {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts] or null
  int rows;             // 1..kRouteRows
  int experts, top_k, groups, top_groups;
  bool sigmoid;    // else softmax
  bool top_two;    // groups score by the sum of their best two, else by their best
  bool normalize;  // weights divided by their sum
  float scale;
  float* scratch;  // [RouteScratch(experts)]
  int32_t* ids;    // out [rows, top_k], by falling choice score, ties to the lower id
  float* weights;  // out [rows, top_k]
};
constexpr int RouteScratch(int experts) { return 5 * experts + 16; }
using RouteFn = void (*)(const RouteTask& task);

constexpr int kAttentionRuns = 4;    ///< of an AttentionTile, at most
constexpr int kAttentionRows = 128;  ///< likewise

/// Runs of 64 keys, each in a KV block of its own, against `rows` query rows that share them: softmax over
/// the keys that a row sees, and the values weighted by it.
struct AttentionTile {
  const float* q;    // [rows rounded up to 8][q_stride]: already scaled; those beyond rows are read, not used
  int64_t q_stride;  // floats
  // Memory in which a kernel may keep its own form of the queries from call to call, or null; and whether the
  // last call with that memory was of the same queries.
  std::byte* packed_q;  // [rows rounded up to 16][key_dim] times 4 bytes, 64-byte aligned
  bool q_is_packed;
  // Keys of each run, [64][key_stride bytes], key_dim elements each; unseen ones are read at most. Runs of
  // which no row sees a key may be null.
  const std::byte* runs[kAttentionRuns];
  // Runs that will be asked for next, laid out as these but for the last field, or null.
  const std::byte* after[kAttentionRuns];
  int64_t key_stride;      // bytes
  int64_t value_offset;    // bytes from a run's keys to its values; 0: values are the keys' first dimensions
  int64_t value_stride;    // bytes; values are [64][value_dim elements], unseen ones are not read
  tensor::DType kv_dtype;  // kF32, kBF16 or kI8
  int rows;                // 1..kAttentionRows
  int key_dim;             // multiple of 8
  int value_dim;           // multiple of 8
  const int* visible;      // [rows]: keys [0, visible[r]) of all runs are seen by row r
  // The state of each row: out, and with `resume` in as well: then it is that of keys that came before, -inf,
  // 0 and zeros if there were none, and these go on from there.
  float* max;          // [rows]: the largest score or up to ln 2 more, -inf if no key is seen
  float* sum;          // [rows]: of exp(score - max)
  float* acc;          // [rows][acc_stride]: weighted values, not divided by sum
  int64_t acc_stride;  // floats
  bool resume;
  // kI8 only: bytes from a run's keys to what its numbers are multiplied by, [64] floats, one a key; others
  // than the seen ones may be anything. A key's dimensions [0, key_split) go by key_scales, the others, if
  // any, by rest_scales.
  int64_t key_scales;
  int64_t rest_scales;
  int64_t value_scales;
  int key_split;         // multiple of 8
  int64_t after_scales;  // bytes by which the scales of `after` stand further from their keys
};
using AttentionTileFn = void (*)(const AttentionTile& tile);

/// What is known of the 64 keys of one block and KV head without reading them. Behind this stand int8
/// centers [key_dim] and uint8 radii [key_dim], each multiplied by its part's scale: |key[d] - center[d]| <=
/// radius[d] for every key. Parts are the dimensions [0, key_split) and the others.
struct DigestHeader {
  float center_scale[2];  // NaN: some key is beyond 1e17 or not a number
  float radius_scale[2];
  float ball[2];    // no key is further from the center than this, in a part's dimensions
  float sketch[2];  // what the sketches' factors are multiplied by
};
constexpr int kMostDigestDim = 1024;  ///< key_dim, at most
/// Makes an upper bound of a norm: the sum of up to kMostDigestDim squares, in any order of f32 additions,
/// and its root are off by less than 2^-14 of themselves.
constexpr float kNormSlack = 1 + 0x1p-14F;
constexpr int64_t BoxBytes(int key_dim) {
  return static_cast<int64_t>(sizeof(DigestHeader)) + 2 * int64_t{key_dim};
}

/// Behind the box stand sketches: of each key and part, how it lies around the center, rotated, in signs.
///   key's part - center ~ factor * header.sketch * (rotated back) signs
/// uint8 factors [parts][64], then, 64-byte aligned, bits [part][width / 64][4][16 / 8][64]: bit i of byte
/// 4 n + j of [step][group][half] is the sign of dimension 64 step + 4 (8 half + i) + j of key 16 group + n;
/// 1 is plus. That is how tiles want the products' right sides. A part of at most 64 dimensions has two
/// planes of signs, one behind the other, of which the first counts twice.
struct SketchLayout {
  int width[2];     // signs of a key's parts, multiples of 64; 0: there is no such part
  int64_t factors;  // bytes from the digest to these
  int64_t planes;   // likewise, of signs
  int64_t bytes;    // of the whole digest: a multiple of 64
};
constexpr int64_t kSketchStepBytes = 512;  ///< 64 signs of 64 keys

/// Makes a digest of 64 keys, all of which are read. Centers are those of the smallest boxes around the keys,
/// rounded to int8; radii are taken around the rounded centers and rounded up, so that they hold.
struct DigestTask {
  const std::byte* keys;     // [64][key_stride bytes], key_dim elements each
  int64_t key_stride;        // bytes
  tensor::DType kv_dtype;    // kF32, kBF16 or kI8
  int key_dim;               // multiple of 8, at most kMostDigestDim
  int key_split;             // multiple of 8: where the second part begins; key_dim: there is one part
  const float* key_scales;   // [64], kI8 only: of the first part
  const float* rest_scales;  // [64], kI8 only: of the second part
  std::byte* digest;         // out [BoxBytes(key_dim)], 4-byte aligned
};
using DigestFn = void (*)(const DigestTask& task);

constexpr int kScoreGroup = 16;  ///< rows whose scores of a block stand together
constexpr int kMostEstimateRows = 128;

/// What `rows` queries most likely find in `count` blocks, to choose by: no bound, and queries may be rounded
/// to 2^-15 of the largest element of their part, their magnitudes beside radii to 2^-8.
struct DigestEstimates {
  const float* q;                   // [rows][q_stride]
  int64_t q_stride;                 // floats
  float scale;                      // multiplies q
  const std::byte* const* digests;  // [count]
  int rows;                         // 1..kMostEstimateRows
  int count;
  int key_dim, key_split;  // multiples of 8, key_dim at most kMostDigestDim
  float share;             // of the spread, as DigestScores has it, that is added to the center's product
  float* scores;   // out [ceil(rows / 16)][stride][16]; NaN of a digest that has one. Idle ones are anything
  int64_t stride;  // blocks, >= count
  // What kernels may ask memory for, each in its way or not at all. Bytes from each digest on that are not in
  // a cache yet, nor on their way: this head's and those of heads whose turn comes next. 0: none.
  int64_t ask;
  // Digests that this worker scores next, of as many dimensions, and likewise of them.
  const std::byte* const* after;
  int after_count;
  int64_t after_ask;
};
using DigestEstimatesFn = void (*)(const DigestEstimates& estimates);

/// Scores below their row's largest plus this count for nothing as shares: exp(-72) is 2^-104, of which the
/// share of one of 2^22 blocks is still no denormal. Those are slow.
constexpr float kLeastPower = -72;

/// shares[b] = sum over up to 16 rows of the share that block b has of sum_b exp(scores[b][row]). What is NaN
/// counts for nothing, and a row of nothing else has no shares, but shares[b] is NaN where the first row's
/// score is not finite. `scores` [blocks][16] is overwritten; idle ones may be anything.
using BlockSharesFn = void (*)(float* scores, int rows, int blocks, float* shares);

/// What `rows` queries find in `count` blocks by the keys' sketches: of each block, the logarithm of the sum
/// over its keys of exp(estimate of q . key), off by 0.06 at most where no estimate is more than 69 away from
/// the center's product, and beyond that cut.
struct SketchScores {
  const int8_t* q;  // [rows rounded up to 16][q_stride]: as SketchQuery makes them; of those beyond rows, any
  int64_t q_stride;                 // the widths' sum
  const float* q_scales;            // [rows][2]: of the parts
  const int32_t* q_sums;            // [rows][2]: of the parts' elements
  const std::byte* const* digests;  // [count]
  int rows, count;
  SketchLayout layout;
  // [ceil(rows / 16)][stride][16], in: q . center of DigestEstimates; out: the logarithms. NaN stays NaN.
  float* scores;
  int64_t stride;  // blocks, >= count
};
using SketchScoresFn = void (*)(const SketchScores& scores);

/// What `rows` queries may find in `count` blocks: for every key k of a block, q . k lies within
/// centers +- spreads, but for the rounding of the sums. NaN where a digest has a NaN.
struct DigestScores {
  const float* q;    // [rows rounded up to 8][q_stride]: already scaled; those beyond rows are read, not used
  int64_t q_stride;  // floats
  const float* q_norms;             // [rows rounded up to 8][2]: lengths of a query's parts
  const std::byte* const* digests;  // [count]
  int rows, count;
  int key_dim, key_split;
  float* centers;  // out [rows][stride]: q . center
  float* spreads;  // out [rows][stride]: of each part the smaller of |q| . radius and the ball's
  int64_t stride;  // floats, >= count
};
using DigestScoresFn = void (*)(const DigestScores& scores);

/// out[i] = exp(min(x[i] + spread * y[i] - shift, 80)), 0 for NaN; returns their sum. x and out may be the
/// same.
using ExpSumFn = float (*)(const float* x, const float* y, float spread, float shift, int n, float* out);

}  // namespace moesaic::kernels
