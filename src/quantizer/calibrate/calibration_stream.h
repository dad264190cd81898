// The hidden states of all calibration tokens, taken through a model layer by layer.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "layers/rope_table.h"
#include "layers/step.h"
#include "models/decoder_spec.h"
#include "quantizer/calibrate/dense_layer.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {

/// x [tokens.size(), width] = rows `tokens` of the table `module` [rows, width], each of which is read once.
Status ReadEmbeddings(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                      const std::string& module, int rows, int width, std::span<const int32_t> tokens,
                      float* x);

/// What a walk ends with when it was told to stop.
inline Status Stopped() {
  return Cancelled("stopped; the same command goes on from the layers whose state was saved");
}

class CalibrationStream {
 public:
  /// Starts with the embeddings of all tokens of `sequences`, whose ids are in the vocabulary.
  static StatusOr<CalibrationStream> Create(const checkpoint::Checkpoint& source,
                                            const models::DecoderSpec& spec,
                                            const std::vector<std::vector<int32_t>>& sequences,
                                            const kernels::ExecContext& ctx);
  /// Memory of a stream of so many tokens in sequences of at most `longest`; that of scratch not counted.
  static int64_t Bytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest);

  /// Tokens that are worked on at once: those of a run of whole sequences, at most so many but for a longer
  /// sequence.
  static constexpr int kBatchTokens = 2048;

  /// Calls `body` for all tokens, some sequences at a time: `hidden` [step.rows(), spec.hidden] are theirs.
  /// In `kv`, which the next ones overwrite, each sequence has its blocks. Results do not depend on which
  /// sequences are together.
  using Body = std::function<void(const layers::Step& step, const kernels::KvLayer& kv, float* hidden)>;
  void ForBatches(const kernels::ExecContext& ctx, const Body& body) { ForLanes(ctx, lanes_, body); }
  /// The same for the tokens of the first lane.
  void ForFirstLane(const kernels::ExecContext& ctx, const Body& body) { ForLanes(ctx, 1, body); }
  /// The same for what looks at each token by itself: step.sequences and kv are empty, and a batch comes in
  /// parts of at most part_rows().
  using PartBody = std::function<void(const layers::Step& step, float* hidden)>;
  void ForParts(const kernels::ExecContext& ctx, const PartBody& body) { ForPartsOf(ctx, lanes_, body); }
  void ForFirstParts(const kernels::ExecContext& ctx, const PartBody& body) { ForPartsOf(ctx, 1, body); }
  /// Asks `watch` before a batch or part is worked on, at most four times a second. Once it fails nothing is
  /// worked on any more, and hidden states and what was made of them are of no use.
  void set_watch(std::function<Status()> watch) { watch_ = std::move(watch); }
  const Status& watched() const { return watched_; }
  bool GoesOn();
  /// Likewise, for what takes long without tokens.
  const Status& Ask() {
    GoesOn();
    return watched_;
  }
  /// A multiple of kProductTokens, so that Hessians do not depend on it.
  void set_part_rows(int rows) { part_rows_ = rows; }
  int part_rows() const { return part_rows_; }

  /// Lanes: copies of all tokens with hidden states of their own, which then go other ways. A batch is of one
  /// lane. There is one at first; `most` is how many there may be.
  Status ReserveLanes(int most);
  /// A further lane, with the hidden states of the first as they are now; returns its number.
  int AddLane();
  int lanes() const { return lanes_; }
  int lane_tokens() const { return static_cast<int>(positions_.size()); }
  /// The lane that a row of hidden() belongs to.
  int LaneOf(const float* row) const {
    return static_cast<int>((row - hidden_.as<float>()) / (int64_t{lane_tokens()} * spec_.hidden));
  }

  /// hidden += attention(norm(hidden)) of this layer.
  void AddAttention(const kernels::ExecContext& ctx, const DenseLayer& layer);

  /// Puts multi-token-prediction module `depth` at the start of its layer: hidden = project(norm(embedding of
  /// the next token), norm(hidden after the final norm)). The last token of a sequence has itself for the
  /// next.
  Status EnterMtp(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source, int depth);

  int longest() const { return longest_; }  // tokens of a sequence
  const layers::RopeTable& rope() const { return rope_.front(); }
  int tokens() const { return lanes_ * lane_tokens(); }
  float* hidden() { return hidden_.as<float>(); }  // [tokens, spec.hidden], lane after lane
  std::span<float> values() {                      // these
    return {hidden(), static_cast<size_t>(tokens()) * static_cast<size_t>(spec_.hidden)};
  }

 private:
  CalibrationStream() = default;
  void ForLanes(const kernels::ExecContext& ctx, int lanes, const Body& body);
  void ForPartsOf(const kernels::ExecContext& ctx, int lanes, const PartBody& body);

  models::DecoderSpec spec_;
  std::function<Status()> watch_;
  Status watched_;
  Clock::time_point asked_ = Clock::now();
  int lanes_ = 1, most_lanes_ = 1, part_rows_ = kBatchTokens, longest_ = 0;
  std::vector<int32_t> ids_, positions_;        // [tokens of a lane]
  std::vector<int32_t> blocks_;                 // block numbers of the sequences of a batch
  std::vector<kernels::SequenceSlice> slices_;  // point into blocks_; rows of the whole stream
  std::vector<size_t> batches_;                 // the first sequence of each batch, and their end
  runtime::Buffer hidden_, kv_memory_;
  kernels::KvLayer kv_;                  // of one layer and one batch
  std::vector<layers::RopeTable> rope_;  // one; a vector since it has no empty state
};

}  // namespace moesaic::quantizer
