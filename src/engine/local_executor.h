// The executor of one rank in this process: a model and its KV store.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "cache/kv_store.h"
#include "engine/executor.h"
#include "kernels/block_sparsity.h"
#include "models/model.h"

namespace moesaic::engine {

/// Its memory grows to the needs of the largest step and stays.
class LocalExecutor : public Executor {
 public:
  /// All are borrowed. If blocks have key summaries, the decoder's layers from `first_sparse_layer` on use
  /// them; MTP layers do not.
  LocalExecutor(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
                cache::KvStore& store, int first_sparse_layer);
  ~LocalExecutor() override;

  void Start(const StepBatch& batch) override { started_ = &batch; }
  StatusOr<StepResult> Finish() override;
  Status ExcludeRanks(std::span<const int> ranks) override { return model_.ExcludeRanks(ranks); }
  StatusOr<models::ExpertLoad> FetchExpertLoad() override { return model_.expert_load(); }
  Status BeginExpertMove(const models::ExpertMoveOrder& order) override {
    return model_.BeginExpertMove(order);
  }
  Status DropExpertMove() override {
    model_.DropExpertMove();
    return OkStatus();
  }
  /// Rows of this rank's columns, [rows.size(), own_vocab.count], whether there are summaries or not.
  StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t> rows) override {
    return FetchLogitsOf(0, rows);
  }
  /// The same of the batch that ran before the last `later` ones. Only the logits of the number of batches
  /// given to KeepLogits are kept.
  StatusOr<std::span<const float>> FetchLogitsOf(int later, std::span<const int32_t> rows);
  /// `batches` is at least 1.
  void KeepLogits(int batches) { outputs_.resize(batches); }
  void BindCaller() override { threads_.PinCaller(); }

  /// Limits of the batches that it runs.
  StepLimits limits() const;

 private:
  class Pager;

  int StoredLayer(int layer) const;
  void ApplyOps(const cache::KvOps& ops);
  void BuildSummaries(std::span<const int32_t> blocks);
  void LayOutRows(const StepBatch& batch);
  Status Compute(const StepBatch& batch, StepResult* result);

  models::Model& model_;
  const kernels::KernelTable& kernels_;
  runtime::ThreadPool& threads_;
  cache::KvStore& store_;
  runtime::Arena scratch_;
  std::vector<kernels::KvLayer> layers_;
  const StepBatch* started_ = nullptr;
  std::vector<kernels::SequenceSlice> slices_;
  std::vector<kernels::RowSparsity> sparsity_;  // [rows of the batch]
  // Logits of a batch; their memory stays.
  struct Logits {
    std::vector<int32_t> rows;  // of the batch
    std::vector<float> values;
  };
  std::deque<Logits> outputs_ = std::deque<Logits>(1);  // of the last batches, the last one in front
  std::vector<float> hidden_;
  std::vector<float> fetched_;  // of the last FetchLogits
  std::unique_ptr<Pager> pager_;
  // By sequence: choices that later rows read again.
  absl::flat_hash_map<uint64_t, std::unique_ptr<kernels::KeptChoices>> kept_;
  kernels::SparsityCounters counters_;
  cache::KvResult kv_;  // of operations since the last result
  uint64_t joint_ = 0;  // number of the last joint step
  uint64_t move_ = 0;   // last move of experts that was applied
};

}  // namespace moesaic::engine
