// Runs one step of the model: turns sequences and their blocks into a ragged batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "cache/kv_pool.h"
#include "kernels/block_sparsity.h"
#include "kernels/kernel_table.h"
#include "models/model.h"

namespace moesaic::engine {

/// One sequence's rows of a step.
struct ExecutorRows {
  std::span<const int32_t> tokens;                   // [count]
  std::span<const int32_t> drafts = {};              // rows more, behind them
  std::span<const int32_t> block_table;              // holds start tokens and all rows
  int start = 0;                                     // position of tokens[0]
  int first_logits = 0;                              // rows from this one on want logits; that of all: none
  const kernels::BlockSparsity* sparsity = nullptr;  // how rows choose blocks; null: they read all
};

/// One sequence's rows of an MTP pass: `tokens[i]` stands behind the position whose hidden state is
/// hidden[i].
struct MtpRows {
  std::span<const int32_t> tokens;       // [count]
  std::span<const float> hidden;         // [count, hidden_size]
  std::span<const int32_t> block_table;  // holds start + count tokens
  int start = 0;                         // position of hidden[0] in the block table
  bool want_logits = false;              // of the last row
};

/// Engine thread only. Memory grows to what the largest step needs and stays.
class Executor {
 public:
  /// All are borrowed and must outlive the executor. Where the blocks have digests, the decoder's layers from
  /// `first_sparse_layer` on use them; MTP layers don't.
  Executor(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
           const cache::KvPool& blocks, int first_sparse_layer);

  /// Logits of the wanted rows, in order: [wanted, vocab_size], valid until the next Run. `want_hidden`:
  /// hidden() holds the final hidden states of all rows, [rows, hidden_size], until then. `experts_read`, if
  /// any, rises by the routed experts of all layers that rows go to; `routes`, if any, is set to them.
  StatusOr<std::span<const float>> Run(std::span<const ExecutorRows> batch, bool want_hidden,
                                       int64_t* experts_read = nullptr, models::RouteTap* routes = nullptr);
  std::span<const float> hidden() const { return hidden_; }
  /// Runs MTP module 0 over the batch: logits of the last rows that are wanted, [wanted, vocab_size], and the
  /// module's hidden states of all rows in mtp_hidden() [rows, hidden_size]. Leaves hidden() as it is.
  StatusOr<std::span<const float>> RunMtp(std::span<const MtpRows> batch);
  std::span<const float> mtp_hidden() const { return mtp_hidden_; }
  /// Makes the digests of whole blocks again, in all layers that use them, from the keys that stand there.
  void MakeDigests(std::span<const int32_t> blocks);
  /// Binds the calling thread to the core of worker 0, which it is in each Run.
  void BindCaller() { threads_.PinCaller(); }

 private:
  models::Model& model_;
  const kernels::KernelTable& kernels_;
  runtime::ThreadPool& threads_;
  runtime::Arena scratch_;
  std::vector<kernels::KvLayer> layers_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> logit_rows_;
  std::vector<kernels::SequenceSlice> slices_;
  std::vector<float> logits_;
  std::vector<float> hidden_;
  std::vector<float> mtp_in_, mtp_hidden_;
};

}  // namespace moesaic::engine
