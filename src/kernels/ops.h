// The operators. Each takes one parameter struct and runs on the whole thread pool. Results do not depend on
// the number of threads, and a row's result does not depend on the other rows of the batch.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// Resources of every operator. All are borrowed and must outlive the context's use. Each operator rewinds
/// `scratch`.
struct ExecContext {
  const KernelTable* kernels;
  runtime::ThreadPool* pool;
  runtime::Arena* scratch;
};

/// Activations quantized once and shared by all matrices with the same format and k (q/k/v, gate/up).
struct QuantizedActivations {
  tensor::PackedFormat format;
  int rows = 0;
  int k = 0;
  int k_padded = 0;
  int64_t stride = 0;         // bytes between rows
  std::span<std::byte> data;  // [rows][stride]
  std::span<float> scales;    // [rows], kI8 only
};

/// Quantizes x [rows, k] (row stride x_stride floats) for `format`. The memory comes from ctx.scratch and is
/// valid until the caller rewinds it. static_scale is described at PrepareRowFn.
QuantizedActivations QuantizeActivations(const ExecContext& ctx, tensor::PackedFormat format, const float* x,
                                         int64_t x_stride, int rows, int k,
                                         tensor::StaticScale static_scale = {});

/// C [rows, n] = A W^T (+ bias), or C += with accumulate.
struct LinearParams {
  const QuantizedActivations* a;  // [rows, k], in the format of w
  const tensor::PackedMatrix* w;  // [n, k]
  const float* bias = nullptr;    // [n] or null
  float* c;                       // [rows, c_stride]
  int64_t c_stride;               // floats
  bool accumulate = false;
};
void Linear(const ExecContext& ctx, const LinearParams& params);

/// Runs several independent linears in one parallel loop (q/k/v; per-head MLA absorption).
void LinearGroup(const ExecContext& ctx, std::span<const LinearParams> group);

/// y = RMSNorm(x) for rows of n floats; x == y is allowed.
struct RmsNormParams {
  const float* x;  // [rows, x_stride]
  int64_t x_stride;
  const float* weight;  // [n]
  float* y;             // [rows, y_stride]
  int64_t y_stride;
  int rows, n;
  float eps;
};
void RmsNorm(const ExecContext& ctx, const RmsNormParams& params);

/// y[i] = silu(gate[i]) * up[i] for every row i of n floats.
struct SiluMulParams {
  const float* gate;  // [rows, gate_stride]
  const float* up;    // [rows, up_stride]
  float* y;           // [rows, n]
  int64_t gate_stride, up_stride, y_stride;
  int rows, n;
};
void SiluMul(const ExecContext& ctx, const SiluMulParams& params);

/// y += x over `count` floats.
void Add(const ExecContext& ctx, const float* x, int64_t count, float* y);

/// Rotates the `dim` floats at x + row * stride + head * head_stride, for every row and head, by the angles
/// of positions[row]. The cos/sin tables are [max_position, dim/2].
struct RopeParams {
  float* x;
  int64_t stride, head_stride;  // floats
  int rows, heads, dim;
  const int32_t* positions;  // [rows]
  const float* cos;
  const float* sin;
  bool interleaved;
};
void Rope(const ExecContext& ctx, const RopeParams& params);

struct BlockSparsity;

/// One sequence's part of a ragged batch: `count` new tokens at positions start..start+count-1, which are
/// rows row..row+count-1 of the batch; its keys and values stand in the blocks of `block_table`.
struct SequenceSlice {
  const int32_t* block_table;  // [ceil((start + count) / 64)] block numbers
  int start = 0;
  int count = 0;
  int row = 0;
  const BlockSparsity* sparsity = nullptr;  // SparseAttention only; null: every row reads all blocks
  int kv_head = -1;                         // Attention only: of this KV head alone; -1: of all
};

inline constexpr int kKvBlockTokens = 64;

/// One layer's keys and values in a pool of 64-token blocks. Inside a block, head after head: keys
/// [64][key_dim], then values [64][value_dim], so that a head that reads this block and not the next finds
/// all in one place. MLA keeps one row a token, latent then rope: heads = 1, and values are the first
/// value_dim elements of the keys (value_offset = 0, shared = true). Digests stand beside the blocks,
/// those of all blocks of a layer together, so that scoring them reads few pages: [heads][KeySummaryBytes] of
/// a block's 64 keys, of two parts when shared: values, and what is left of the keys. kI8: an element is
/// scale * q with q in [-127, 127]; f32 scales [2][heads][64] stand at scale_offset: those of keys, then
/// those of values. Shared: those of values, then those of what is left of the keys.
struct KvLayer {
  std::byte* base = nullptr;     // this layer's part of block 0
  int64_t block_stride = 0;      // bytes from one block to the next
  int64_t head_stride = 0;       // bytes from one head's keys to the next one's
  int64_t value_offset = 0;      // bytes from a head's keys to its values
  int64_t scale_offset = 0;      // bytes from a block's first key to its scales (kI8)
  std::byte* digests = nullptr;  // of block 0; null: there are none
  int64_t digest_stride = 0;     // bytes from one block's to the next one's
  tensor::DType dtype = tensor::DType::kF32;
  int heads = 0;  // KV heads
  int key_dim = 0;
  int value_dim = 0;
  bool shared = false;    // values are a prefix of keys (MLA)
  bool sketches = false;  // digests have them
  int index = 0;          // of the layer among those of its blocks
};

/// Where the second part of a key begins, of those that digests and scales have apart; key_dim: it has one.
inline int KeySplit(const KvLayer& cache) { return cache.shared ? cache.value_dim : cache.key_dim; }

/// Stores new keys [rows, heads, key_dim] and values [rows, heads, value_dim] (ignored when shared) into
/// blocks. kI8: scale = amax / 127 of a row, q = round_half_even(x / scale); a row that is not finite has a
/// NaN for its scale.
struct KvWriteParams {
  KvLayer cache;
  const float* keys;    // [rows][key_stride]
  const float* values;  // [rows][value_stride]
  int64_t key_stride, value_stride;
  std::span<const SequenceSlice> sequences;
};
void KvWrite(const ExecContext& ctx, const KvWriteParams& params);

/// Causal attention of every new token over its sequence's cached keys, itself included (KvWrite comes
/// first). Query heads are shared out evenly over KV heads. One pass over each KV block serves all query
/// heads of a group.
struct AttentionParams {
  KvLayer cache;
  const float* q;  // [rows][q_stride], heads one after another, key_dim each
  int64_t q_stride;
  float* out;  // [rows][out_stride], heads one after another, value_dim each
  int64_t out_stride;
  int heads;    // query heads, a multiple of cache.heads
  float scale;  // multiplies q . k
  std::span<const SequenceSlice> sequences;
  float* lse = nullptr;  // [rows][heads]: the logarithm of the sum of exp(scale q . k), or null
};
void Attention(const ExecContext& ctx, const AttentionParams& params);

/// Selects routed experts and weights from router logits:
/// - Scores are the softmax or sigmoid of the logits; the bias is added for the choice only.
/// - Groups are ranked by their members' choice scores. Groups other than the best top_groups are excluded
///   completely, like in transformers' current DeepseekV3TopkRouter. (Older versions set their scores to 0,
///   which could win over negative ones.)
/// - The top_k best choices in the remaining groups are weighted by their scores without bias.
///
/// Requires top_k <= top_groups * (experts / groups), and two experts per group for kTopTwoSum. NaN logits
/// give valid, distinct ids; with softmax also NaN weights.
struct RouteParams {
  enum class Scoring { kSoftmax, kSigmoid };
  enum class GroupScore { kMax, kTopTwoSum };  // V2: best expert of a group; V3 noaux_tc: sum of its best two
  const float* logits;                         // [rows, experts]
  const float* bias = nullptr;  // [experts] added to scores for the choice only (noaux_tc), or null
  int rows, experts, top_k;
  Scoring scoring;
  int groups = 1,
      top_groups = 1;  // experts form `groups` equal ranges; only the best top_groups are eligible
  GroupScore group_score = GroupScore::kMax;
  bool normalize = false;  // divides weights by their sum (+1e-20 for sigmoid, like the releases)
  float scale = 1;         // routed_scaling_factor
  int32_t* ids;            // [rows, top_k], by descending choice score, ties to the lower id
  float* weights;          // [rows, top_k]
};
void Route(const ExecContext& ctx, const RouteParams& params);

/// All experts of a MoE layer: gate, up [intermediate, hidden] and down [hidden, intermediate] of expert e
/// are stored e * stride bytes after those of expert 0. All experts have the same formats.
struct ExpertWeights {
  tensor::PackedMatrix gate, up, down;  // matrices of expert 0
  int64_t stride = 0;                   // bytes from one expert to the next
  int count = 0;
  // [count * 2]: activation scales of gate/up and of down, or null
  const tensor::StaticScale* input_scales = nullptr;

  tensor::PackedMatrix Of(const tensor::PackedMatrix& first, int expert) const {
    tensor::PackedMatrix matrix = first;
    matrix.data += expert * stride;
    return matrix;
  }
};

/// out[t] = sum over j of weights[t, j] * FFN_{ids[t, j]}(x[t]) (+ FFN_shared(x[t])). Runs as one job: every
/// (expert, row tile, panel group) of the layer, including the shared expert's, goes into one work queue.
struct MoeParams {
  const float* x;  // [rows, hidden]
  int64_t x_stride;
  int rows, hidden, intermediate;
  ExpertWeights experts;
  const int32_t* ids;    // [rows, top_k]; -1 skips the slot (an expert on another rank)
  const float* weights;  // [rows, top_k]
  int top_k;
  // Matrices of a shared expert with its own width, or empty.
  tensor::PackedMatrix shared_gate, shared_up, shared_down;
  int shared_intermediate = 0;
  float* out;  // [rows, out_stride], overwritten
  int64_t out_stride;
};
void Moe(const ExecContext& ctx, const MoeParams& params);

}  // namespace moesaic::kernels
