// The hidden states of all calibration tokens, which move through a model layer by layer.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/exec_context.h"
#include "layers/rope_table.h"
#include "layers/step.h"
#include "models/decoder_spec.h"
#include "quantizer/calibrate/dense_layer.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {

/// Reads rows `tokens` of the table `module` [rows, width] into x [tokens.size(), width]. Each row is read
/// once.
Status ReadEmbeddings(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                      const std::string& module, int rows, int width, std::span<const int32_t> tokens,
                      float* x);

/// Returns the status of an interrupted walk.
inline Status Stopped() {
  return Cancelled("stopped; repeat the command to resume from the last saved layer");
}

class CalibrationStream {
 public:
  /// Starts with the embeddings of all tokens of `sequences`. Token ids must be in the vocabulary.
  static StatusOr<CalibrationStream> Create(const checkpoint::Checkpoint& source,
                                            const models::DecoderSpec& spec,
                                            const std::vector<std::vector<int32_t>>& sequences,
                                            const kernels::ExecContext& ctx);
  /// Returns the memory in bytes of a stream of `tokens` tokens in sequences of at most `longest`, without
  /// scratch memory.
  static int64_t Bytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest);

  /// Maximum number of tokens in a batch of whole sequences. A longer sequence is a batch of its own.
  static constexpr int kBatchTokens = 2048;

  /// Calls `body` for all tokens, some sequences at a time, with their hidden states `hidden` [step.rows(),
  /// spec.hidden]. Each sequence has its blocks in `kv`, which the next batch overwrites. Results do not
  /// depend on the batching.
  using Body = std::function<void(const layers::Step& step, const kernels::KvLayer& kv, float* hidden)>;
  void ForBatches(const kernels::ExecContext& ctx, const Body& body) { ForVariants(ctx, variants_, body); }
  /// The same for the tokens of the first variant.
  void ForFirstVariant(const kernels::ExecContext& ctx, const Body& body) { ForVariants(ctx, 1, body); }
  /// The same for functions of single tokens: step.sequences and kv are empty, and a batch is split into
  /// parts of at most part_rows().
  using PartBody = std::function<void(const layers::Step& step, float* hidden)>;
  void ForParts(const kernels::ExecContext& ctx, const PartBody& body) { ForPartsOf(ctx, variants_, body); }
  void ForFirstParts(const kernels::ExecContext& ctx, const PartBody& body) { ForPartsOf(ctx, 1, body); }
  /// Calls `watch` before each batch or part, at most four times a second. Once it fails, no further batch is
  /// processed, and the hidden states and all results derived from them are invalid.
  void set_watch(std::function<Status()> watch) { watch_ = std::move(watch); }
  const Status& watched() const { return watched_; }
  bool Continues();
  /// The same for long work without tokens.
  const Status& CheckWatch() {
    Continues();
    return watched_;
  }
  /// Must be a multiple of kProductTokens, so that Hessians do not depend on it.
  void set_part_rows(int rows) { part_rows_ = rows; }
  int part_rows() const { return part_rows_; }

  /// A variant is a copy of all tokens with hidden states of its own, used to evaluate a variant of the
  /// model. Each batch belongs to one variant. There is one variant at first; `most` is the maximum number.
  Status ReserveVariants(int most);
  /// Adds a variant with the current hidden states of the first one and returns its number.
  int AddVariant();
  int variants() const { return variants_; }
  int variant_tokens() const { return static_cast<int>(positions_.size()); }
  /// Returns the variant of a row of hidden().
  int VariantOf(const float* row) const {
    return static_cast<int>((row - hidden_.as<float>()) / (int64_t{variant_tokens()} * spec_.hidden));
  }

  /// Computes hidden += attention(norm(hidden)) of this layer.
  void AddAttention(const kernels::ExecContext& ctx, const DenseLayer& layer);

  /// Enters multi-token-prediction module `depth`: hidden = project(norm(embedding of the next token),
  /// norm(hidden after the final norm)). The last token of a sequence uses itself as the next one.
  Status EnterMtp(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source, int depth);

  int longest() const { return longest_; }  // length of the longest sequence
  const layers::RopeTable& rope() const { return rope_.front(); }
  int tokens() const { return variants_ * variant_tokens(); }
  float* hidden() { return hidden_.as<float>(); }  // [variants, variant_tokens, spec.hidden]
  std::span<float> values() {                      // the same as a span
    return {hidden(), static_cast<size_t>(tokens()) * static_cast<size_t>(spec_.hidden)};
  }

 private:
  CalibrationStream() = default;
  void ForVariants(const kernels::ExecContext& ctx, int variants, const Body& body);
  void ForPartsOf(const kernels::ExecContext& ctx, int variants, const PartBody& body);

  models::DecoderSpec spec_;
  std::function<Status()> watch_;
  Status watched_;
  Clock::time_point asked_ = Clock::now();
  int variants_ = 1, most_variants_ = 1, part_rows_ = kBatchTokens, longest_ = 0;
  std::vector<int32_t> ids_, positions_;        // [variant_tokens]
  std::vector<int32_t> blocks_;                 // block numbers of a batch's sequences
  std::vector<kernels::SequenceSlice> slices_;  // point into blocks_; rows count in the whole stream
  std::vector<size_t> batches_;                 // first sequence of each batch, then the total
  runtime::Buffer hidden_, kv_memory_;
  kernels::KvLayer kv_;                  // KV cache of one layer and one batch
  std::vector<layers::RopeTable> rope_;  // always one; a vector because it has no empty state
};

}  // namespace moesaic::quantizer
