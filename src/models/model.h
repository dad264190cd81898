// A loaded model: tokens and cache blocks in, logits out. One class serves every architecture; what differs
// is a DecoderSpec (decoder_spec.h), which each architecture's file makes from its config.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
#include "layers/attention_mla.h"
#include "layers/step.h"
#include "tensor/packed.h"

namespace moesaic::models {

/// What the cache has to hold a token: `layers` times one row of keys (and of values, unless shared) per KV
/// head. MTP layers come last and are counted.
struct KvSpec {
  int layers = 0;
  int heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  bool shared = false;  ///< MLA: values are the first value_dim elements of the keys
};

/// How a model's weights came into memory.
enum class WeightSource {
  kMapped,  ///< a packed file's own pages, read when first touched
  kCopied,  ///< a packed file's bytes, copied to huge pages
  kPacked   ///< packed from a checkpoint
};
const char* ToString(WeightSource source);  ///< "mapped", "copied to huge pages", "packed at load"

/// Which memory of a machine with several NUMA nodes weights lie in, where they are not mapped. The last two
/// go by the nodes on which the pool's threads are bound; they are kLocal where there is one.
enum class NumaPolicy {
  kAuto,        ///< interleaved where the process may run on several nodes and the system lets it
  kInterleave,  ///< pages in turn on all nodes that the process may run on
  kLocal,       ///< where the thread runs that first writes them
  kMirror,      ///< all of them on each node, whose threads read that copy
  kSlice        ///< an equal part of each matrix on each node, whose threads compute with it first
};

struct ModelInfo {
  std::string architecture;  ///< config.json "architectures"[0], e.g. "DeepseekV3ForCausalLM"
  std::string model_type;
  int vocab_size = 0;
  int hidden_size = 0;
  int layers = 0;  ///< decoder layers, MTP not counted
  int mtp_layers = 0;
  int context_length = 0;  ///< max_position_embeddings
  int experts = 0, experts_per_token = 0;
  int64_t parameters = 0;           ///< MTP not counted
  int64_t active_parameters = 0;    ///< touched by one token
  int64_t weight_bytes = 0;         ///< packed, in memory; MTP not counted
  int64_t active_weight_bytes = 0;  ///< read for one token's decode at batch 1 (embedding row, not table)
  int64_t mtp_parameters = 0;       ///< of the MTP layers
  int64_t mtp_weight_bytes = 0;     ///< likewise
  std::string weight_format;        ///< "bf16", "int8", ...
  WeightSource weights_from = WeightSource::kPacked;
  NumaPolicy numa = NumaPolicy::kLocal;  ///< what became of LoadOptions::numa; never kAuto
  int numa_nodes = 1;                    ///< that the weights lie on, if it isn't kLocal
  int moe_layers = 0;                    ///< decoder layers with routed experts
  int64_t expert_bytes = 0;              ///< packed, of a routed expert of one layer, in the mean
  KvSpec kv;
};

using layers::RouteTap;

/// One step's ragged batch. Rows of all sequences follow one another.
struct ForwardBatch {
  std::span<const int32_t> tokens;  // [rows], each in [0, vocab_size)
  std::span<const kernels::SequenceSlice>
      sequences;                         // cover the rows; block tables hold start + count tokens
  std::span<const int32_t> logit_rows;   // rows whose logits are wanted, ascending
  layers::KvFetcher* fetcher = nullptr;  // Forward: fetches blocks that are not in memory; null: all are
};

struct ForwardOutput {
  std::span<float> logits;  // [logit_rows, vocab_size]
  std::span<float>
      hidden;  // [rows, hidden_size] after the final norm, or empty when not wanted (MTP's input)
  int64_t* experts_read = nullptr;  // += routed experts of all layers that any row goes to; or null
  RouteTap* routes = nullptr;       // Forward: set to what each decoder layer's router chose; or null
};

/// Where the weights of a packed file are to lie. In huge pages a step reads them a quarter to a half faster
/// than in the file's own 4 KiB pages, but they take memory of this process alone and are read in full first.
enum class Placement {
  kAuto,  ///< copied if they take at most half of the memory that is free, else mapped
  kMap,
  kCopy
};

/// How to bring weights into memory.
struct LoadOptions {
  /// "auto" or one of tensor::QuantizableFormatNames. Auto keeps f32, int8, Q8_0, Q4_0, Q4_K, Q6_K, int4
  /// groups, NVFP4 and FP8 as they are stored, code by code, and makes bf16 of all else.
  std::string dtype = "auto";
  /// Called now and then with bytes done and in all; return false to stop with Cancelled.
  std::function<bool(int64_t done, int64_t total)> progress = nullptr;
  /// Overrides num_experts_per_tok when > 0 (a carved model's K is adjustable).
  int experts_per_token = 0;
  /// Only a packed file can be mapped; all else is packed into huge pages whatever this says, but for kMap,
  /// which is refused.
  Placement placement = Placement::kAuto;
  NumaPolicy numa = NumaPolicy::kAuto;
  bool load_mtp = true;
  /// How MLA attends; anything but kAuto is for tests and measurements.
  layers::MlaPath mla_path = layers::MlaPath::kAuto;
};

class Model {
 public:
  /// Opens a Hugging Face folder, a GGUF file or a packed file by `path`.
  /// Fails before any allocation when the config or the tensors do not fit.
  static StatusOr<std::unique_ptr<Model>> Load(const std::string& path, const LoadOptions& options,
                                               runtime::ThreadPool& pool);
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;

  /// Runs all layers over the batch, writing keys and values of the new tokens into `kv` [info().kv.layers].
  /// Deterministic; a sequence's results do not depend on the others. Nor do they depend on how its prompt is
  /// cut into chunks, bit for bit with grouped-query attention; MLA chooses for each chunk between two
  /// computations of the same values (MlaPath), which round differently.
  virtual Status Forward(const kernels::ExecContext& ctx, const ForwardBatch& batch,
                         std::span<const kernels::KvLayer> kv, const ForwardOutput& out) = 0;

  /// MTP module `depth` (0-based): row i takes `hidden` [rows, hidden_size] of position p, as Forward or the
  /// module before gave it out, and the token that follows (batch.tokens[i], the token at p + 1), and gives
  /// logits for the token at p + 2 (one further for each module before). Its keys and values go to layer
  /// info().layers + depth of `kv`; the sequences' positions are those of p.
  virtual Status ForwardMtp(const kernels::ExecContext& ctx, int depth, const ForwardBatch& batch,
                            std::span<const float> hidden, std::span<const kernels::KvLayer> kv,
                            const ForwardOutput& out) = 0;
};

/// Packs the checkpoint at `path` into one packed file at `out`, region by region: what Load then maps in at
/// once. Tokenizer, template and generation texts travel in the metadata, and so do `texts`, pairs of file
/// name and content, for a checkpoint that has no such files (a GGUF file's tokenizer as tokenizer.json).
Status Convert(const std::string& path, const std::string& out, const LoadOptions& options,
               runtime::ThreadPool& pool, const std::vector<std::pair<std::string, std::string>>& texts = {});

}  // namespace moesaic::models
