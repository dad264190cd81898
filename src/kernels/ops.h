// The operators: each takes one parameter struct and runs on the whole thread pool. Results do not depend on
// the number of threads, and a row's result does not depend on which other rows are in the batch.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"
#include "tensor/kv_layout.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// What every operator runs on. Borrowed by all; must outlive them. `scratch` is rewound by each operator.
struct ExecContext {
  const KernelTable* kernels;
  runtime::ThreadPool* pool;
  runtime::Arena* scratch;
};

/// Activations prepared once and shared by all matrices of the same format and k (q/k/v, gate/up).
struct PreparedRows {
  tensor::PackedFormat format;
  int rows = 0;
  int k = 0;
  int k_padded = 0;
  int64_t stride = 0;         // bytes between rows
  std::span<std::byte> data;  // [rows][stride]
  std::span<float> scales;    // [rows], kI8 only
};

/// Rounds x [rows, k] (row stride x_stride floats) for `format`. The memory comes from ctx.scratch and lives
/// until the caller rewinds it. static_scale as in PrepareRowFn.
PreparedRows PrepareRows(const ExecContext& ctx, tensor::PackedFormat format, const float* x,
                         int64_t x_stride, int rows, int k, tensor::StaticScale static_scale = {});

/// C [rows, n] = A W^T (+ bias) or +=.
struct LinearParams {
  const PreparedRows* a;          // [rows, k], format of w
  const tensor::PackedMatrix* w;  // [n, k]
  const float* bias = nullptr;    // [n] or null
  float* c;                       // [rows, c_stride]
  int64_t c_stride;               // floats
  bool accumulate = false;
};
void Linear(const ExecContext& ctx, const LinearParams& params);

/// Several independent linears in one pass over the pool (q/k/v; per-head MLA absorption).
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

/// h[i] = silu(gate_up[i, :n]) * gate_up[i, n:] for every row.
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
/// of positions[row]: cos/sin tables are [max_position, dim/2].
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

using tensor::kKvBlockTokens;

/// One layer of a KV cache in memory: the layout of a block, and where this layer of each block is. Digests
/// of a layer's keys are stored outside the blocks, those of all blocks together, so that scoring them reads
/// few pages: [heads][DigestBytes] of a block's 64 keys, of two parts when shared: values, and the rest of
/// the keys.
struct KvLayer : tensor::KvLayout {
  std::byte* base = nullptr;     // this layer's part of block 0
  int64_t block_stride = 0;      // bytes from one block to the next
  std::byte* digests = nullptr;  // of block 0; null: there are none
  int64_t digest_stride = 0;     // bytes from one block's digests to the next one's
  int index = 0;                 // of the layer in its blocks
};

/// Where the second part of a key begins, of those that digests and scales have apart; key_dim: it has one.
inline int KeySplit(const tensor::KvLayout& cache) { return cache.shared ? cache.value_dim : cache.key_dim; }

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

/// How router logits become routed experts and weights: scores by softmax or sigmoid; bias added for the
/// choice; groups ranked by their members' choice scores, and those not among the best top_groups closed for
/// good (as transformers' DeepseekV3TopkRouter does now; older ones wrote 0 over them, which could beat
/// negative scores); the top_k best choices in open groups, weighted by their scores without bias. Needs
/// top_k <= top_groups * (experts / groups), and two experts a group for kTopTwoSum. NaN logits give valid,
/// different ids, and by softmax NaN weights.
struct RouteParams {
  enum class Scoring { kSoftmax, kSigmoid };
  enum class GroupScore { kMax, kTopTwoSum };  // V2: best expert of a group; V3 noaux_tc: sum of its best two
  const float* logits;                         // [rows, experts]
  const float* bias = nullptr;  // [experts] added to scores for the choice only (noaux_tc), or null
  int rows, experts, top_k;
  Scoring scoring;
  int groups = 1,
      top_groups = 1;  // experts are `groups` equal runs; only the best top_groups may be chosen from
  GroupScore group_score = GroupScore::kMax;
  bool normalize = false;  // weights divided by their sum (+1e-20 for sigmoid, as the releases do)
  float scale = 1;         // routed_scaling_factor
  int32_t* ids;            // [rows, top_k], by falling choice score, ties to the lower id
  float* weights;          // [rows, top_k]
};
void Route(const ExecContext& ctx, const RouteParams& params);

/// All experts of a MoE layer: gate, up [intermediate, hidden] and down [hidden, intermediate] of expert e
/// lie at e * stride from expert 0's. Formats are equal across experts.
struct ExpertWeights {
  tensor::PackedMatrix gate, up, down;  // of expert 0
  int64_t stride = 0;                   // bytes from one expert to the next
  int count = 0;
  // [count * 2]: of the activations of gate/up and of down, or null
  const tensor::StaticScale* input_scales = nullptr;

  tensor::PackedMatrix Of(const tensor::PackedMatrix& first, int expert) const {
    tensor::PackedMatrix matrix = first;
    matrix.data += expert * stride;
    return matrix;
  }
};

/// out[t] (+)= sum over j of weights[t, j] * FFN_{ids[t, j]}(x[t]) (+ FFN_shared(x[t])). One job: every
/// (expert, row tile, panel) of the layer goes into one work queue, the shared expert's among them.
struct MoeParams {
  const float* x;  // [rows, hidden]
  int64_t x_stride;
  int rows, hidden, intermediate;
  ExpertWeights experts;
  const int32_t* ids;    // [rows, top_k]; -1 skips the slot (an expert on another rank)
  const float* weights;  // [rows, top_k]
  int top_k;
  // A shared expert: matrices of its own width, or empty.
  tensor::PackedMatrix shared_gate, shared_up, shared_down;
  int shared_intermediate = 0;
  float* out;  // [rows, out_stride], written (not accumulated)
  int64_t out_stride;
};
void Moe(const ExecContext& ctx, const MoeParams& params);

}  // namespace moesaic::kernels
