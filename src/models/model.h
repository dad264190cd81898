// A loaded model: maps tokens and cache blocks to logits. One class runs every architecture; the differences
// are in DecoderSpec (decoder_spec.h), which each architecture's file builds from its config.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/attention.h"
#include "layers/attention_mla.h"
#include "layers/step.h"
#include "parallel/rank_groups.h"
#include "parallel/shard.h"
#include "tensor/packed.h"

namespace moesaic::models {

/// Cache space of a rank per token: `layers` times one row of keys (and of values, unless shared) per KV
/// head. MTP layers are included, after the decoder layers.
struct KvSpec {
  int layers = 0;
  int heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  bool shared = false;  ///< MLA: values are the first value_dim elements of the keys
};

/// Origin of a model's weights in memory.
enum class WeightSource {
  kMapped,  ///< pages of a packed file, read on first access
  kCopied,  ///< a packed file's bytes, copied to huge pages
  kPacked   ///< packed from a checkpoint
};
const char* ToString(WeightSource source);  ///< "mapped", "copied to huge pages", "packed at load"

/// Distribution of unmapped weights over the NUMA nodes of a machine. kMirror and kSlice use the nodes to
/// which the pool's threads are bound; with one such node they become kLocal.
enum class NumaPolicy {
  kAuto,        ///< interleaved if the process may run on several nodes and the system permits it
  kInterleave,  ///< pages interleaved over all nodes on which the process may run
  kLocal,       ///< on the node of the thread that first writes a page
  kMirror,      ///< a full copy on each node, read by that node's threads
  kSlice        ///< an equal part of each matrix on each node, computed first by that node's threads
};

struct ModelInfo {
  std::string architecture;  ///< config.json "architectures"[0], e.g. "DeepseekV3ForCausalLM"
  std::string model_type;
  int vocab_size = 0;
  int hidden_size = 0;
  int layers = 0;  ///< decoder layers, without MTP
  int mtp_layers = 0;
  int context_length = 0;  ///< max_position_embeddings
  int experts = 0, experts_per_token = 0;
  int expert_groups = 1, top_expert_groups = 1;  ///< groups of experts, and those that a token's come from
  int64_t parameters = 0;                        ///< without MTP
  int64_t active_parameters = 0;                 ///< parameters read for one token
  int64_t weight_bytes = 0;                      ///< packed bytes in memory, without MTP
  /// bytes read to decode one token at batch size 1 (one embedding row, not the table)
  int64_t active_weight_bytes = 0;
  int64_t mtp_parameters = 0;    ///< parameters of the MTP layers
  int64_t mtp_weight_bytes = 0;  ///< packed bytes of the MTP layers
  std::string weight_format;     ///< "bf16", "int8", ...
  WeightSource weights_from = WeightSource::kPacked;
  NumaPolicy numa = NumaPolicy::kLocal;  ///< the policy applied for LoadOptions::numa; never kAuto
  int numa_nodes = 1;                    ///< number of nodes that hold the weights, unless kLocal
  int moe_layers = 0;                    ///< decoder layers with routed experts
  int64_t expert_bytes = 0;              ///< mean packed bytes of one routed expert of one layer
  /// This rank's share: decoder layers, and the vocabulary range whose logits it computes (empty before the
  /// last pipeline stage). Sizes of weights and `kv` are this rank's, too. Other members describe the model.
  parallel::Range own_layers, own_vocab;
  int own_mtp_layers = 0;
  KvSpec kv;
};

using layers::RouteTap;

/// Choices of the routers: tokens of each routed expert, since the model was loaded.
struct ExpertLoad {
  std::vector<int> layers = {};      // decoder layers with routed experts, ascending
  int experts = 0;                   // of a layer
  std::vector<int64_t> tokens = {};  // [layers, experts]
};

/// Sizes of a step in which replicas exchange tokens of experts, equal on all replicas. Each layer with
/// experts has one exchange for each part of the batch, in which every replica takes part.
struct JointStep {
  uint64_t number = 0;    // of the step, from 1; 0: not agreed on, and replicas have equally many parts
  int32_t parts = 0;      // maximum number of parts of a replica
  int32_t most_rows = 0;  // maximum rows of a part
  uint64_t move = 0;      // number of the last move of experts that is applied before the step
  bool operator==(const JointStep&) const = default;
};

/// A new placement of one layer's experts on the ranks of its stage.
struct ExpertMoveOrder {
  uint64_t number = 0;              // of the move, from 1, rising
  int layer = 0;                    // decoder layer
  parallel::LayerPlacement next;    // [ranks of the stage]: experts, ascending
  std::vector<double> loads = {};   // [experts] loads that divide tokens over replicas; empty: equal
  std::vector<double> speeds = {};  // [ranks of the stage] relative speeds for it; empty: equal
};

/// Experts of a layer that routers do not choose.
struct LeftOutExperts {
  int layer = 0;  // decoder layer; those of MTP modules follow
  std::vector<int> experts;
  bool operator==(const LeftOutExperts&) const = default;
};

enum class MoveState : uint8_t { kNone, kMoving, kReady, kFailed };

/// State of a rank's part of a move.
struct ExpertMoveReport {
  uint64_t number = 0;  // 0: none
  MoveState state = MoveState::kNone;
  int64_t sent_bytes = 0;    // of weights, by this rank
  double step_seconds = 0;   // of processor time in steps that this rank spent on the move
  int rank = 0;              // of the job; set by the driver
  std::string failure = {};  // reason of kFailed
};

/// Ragged batch of one step. Rows of the sequences are consecutive.
struct ForwardBatch {
  std::span<const int32_t> tokens;  // [rows], each in [0, vocab_size)
  std::span<const kernels::SequenceSlice>
      sequences;                         // cover the rows; block tables hold start + count tokens
  std::span<const int32_t> logit_rows;   // rows whose logits are wanted, ascending
  layers::KvFetcher* fetcher = nullptr;  // Forward: fetches blocks that are not in memory; null: all are
  JointStep joint = {};                  // in a layout that exchanges tokens
  bool divides = true;                   // Forward: pipeline stages divide the rows into parts
};

struct ForwardOutput {
  std::span<float> logits;  // [logit_rows, own_vocab.count]
  // [rows, hidden_size] after the final norm, the input of MTP; empty: not computed. Last pipeline stage
  // only.
  std::span<float> hidden;
  // incremented by the number of distinct routed experts used in all layers; or null
  int64_t* experts_read = nullptr;
  RouteTap* routes = nullptr;  // Forward: set to the choices of each decoder layer's router; or null
};

/// Choice between a packed file's mapped pages and a copy in huge pages. With huge pages a step reads them 25
/// to 50% faster than with the file's own 4 KiB pages. But they occupy memory of this process alone and must
/// be read completely first.
enum class MmapPolicy {
  kAuto,  ///< copies if they take at most half of the free memory, otherwise maps
  kMap,
  kCopy
};

/// Options for loading weights.
struct LoadOptions {
  /// "auto" or one of tensor::QuantizableFormatNames. Auto keeps f32, int8, Q8_0, Q4_0, Q4_K, Q6_K, int4
  /// groups, NVFP4 and FP8 as stored, code by code, and converts all others to bf16.
  std::string dtype = "auto";
  /// Called periodically with the bytes completed and the total; returning false cancels with Cancelled.
  std::function<bool(int64_t done, int64_t total)> progress = nullptr;
  /// Overrides num_experts_per_tok if > 0 (the K of a carved model is adjustable).
  int experts_per_token = 0;
  /// Only a packed file can be mapped. Other checkpoints are packed into huge pages for kAuto and kCopy, and
  /// kMap is an error.
  MmapPolicy mmap = MmapPolicy::kAuto;
  NumaPolicy numa = NumaPolicy::kAuto;
  bool load_mtp = true;
  /// Algorithm of MLA attention; values other than kAuto are for tests and measurements.
  layers::MlaPath mla_path = layers::MlaPath::kAuto;
  /// The groups of this rank: it loads its shard of the layout. Null: the model runs on one rank.
  std::shared_ptr<parallel::RankGroups> groups = nullptr;
  int local_ranks = 1;  ///< processes of this machine that load a part, and share its free memory
};

class Model {
 public:
  /// Opens a Hugging Face folder, a GGUF file or a packed file at `path`. Fails before any allocation if the
  /// config or the tensors are invalid.
  static StatusOr<std::unique_ptr<Model>> Load(const std::string& path, const LoadOptions& options,
                                               runtime::ThreadPool& pool);
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;
  /// Returns the traffic of this rank's groups; zero on one rank.
  virtual parallel::GroupTraffic traffic() const { return {}; }
  /// Returns the loads of the rows that this rank routed. The shards of a replica route the same rows.
  virtual ExpertLoad expert_load() const { return {}; }
  /// Begins to gather the experts of a layer's next placement, while the current one is used. All ranks of
  /// the stage begin the same move. An error fails the whole move, which is reported as failed until it is
  /// dropped. Supported only in a layout that exchanges tokens and lets experts move.
  virtual Status BeginExpertMove(const ExpertMoveOrder&) { return Unimplemented("experts can't move"); }
  /// Does a small part of the move, if there is one; does not wait. The report counts the time of calls in
  /// steps.
  virtual ExpertMoveReport AdvanceExpertMove(bool /*in_step*/) { return {}; }
  /// Uses the gathered experts from the next Forward on. All ranks call it before the same Forward.
  virtual Status ApplyExpertMove(uint64_t) { return Unimplemented("experts can't move"); }
  virtual void DropExpertMove() {}
  /// Continues without exactly these dead ranks of the job. All other ranks call it between the same steps.
  /// Experts that no other rank has are left out of routing. Supported only in a layout that tolerates
  /// failures.
  virtual Status ExcludeRanks(std::span<const int>) { return Unimplemented("all ranks are needed"); }
  /// Leaves exactly these experts of a layer out of routing. InvalidArgument: this rank has no routed experts
  /// in the layer, or an expert does not exist.
  virtual Status LeaveOutExperts(const LeftOutExperts&) { return Unimplemented("no experts"); }
  /// Returns left-out experts by layer, ascending. Layers without any are omitted.
  virtual std::vector<LeftOutExperts> left_out_experts() const { return {}; }

  /// Runs all layers over the batch, together with the other ranks of its layout, and writes keys and values
  /// of the new tokens into `kv` [info().kv.layers]. Results are deterministic, and those of a sequence do
  /// not depend on other sequences. Where replicas exchange tokens, one without rows takes part with an empty
  /// batch. With grouped-query attention they do not depend on how the prompt is
  /// split into chunks, bit for bit. MLA chooses between two algorithms per chunk (MlaPath), which round
  /// differently.
  virtual Status Forward(const kernels::ExecContext& ctx, const ForwardBatch& batch,
                         std::span<const kernels::KvLayer> kv, const ForwardOutput& out) = 0;

  /// Runs MTP module `depth` (0-based). Row i receives the `hidden` state [rows, hidden_size] of position p,
  /// written by Forward or the previous module, and the token at p + 1, batch.tokens[i]. It computes logits
  /// for the token at p + 2 (one later per previous module). Keys and values are written to layer
  /// info().layers + depth of `kv`; the sequences' positions are those of p.
  virtual Status ForwardMtp(const kernels::ExecContext& ctx, int depth, const ForwardBatch& batch,
                            std::span<const float> hidden, std::span<const kernels::KvLayer> kv,
                            const ForwardOutput& out) = 0;
};

/// Packs the checkpoint at `path` into one packed file at `out`, region by region, which Load can then map.
/// Tokenizer, template and generation texts are stored in the metadata. `texts`, pairs of file name and
/// content, are stored too, for a checkpoint without such files (a GGUF file's tokenizer as tokenizer.json).
/// With several ranks in `layout`, the file has the part of each rank, one after the other. InvalidArgument:
/// the layout has replicas, whose parts are equal, or does not divide the model.
Status Convert(const std::string& path, const std::string& out, const LoadOptions& options,
               runtime::ThreadPool& pool, const std::vector<std::pair<std::string, std::string>>& texts = {},
               const parallel::Layout& layout = {});

}  // namespace moesaic::models
