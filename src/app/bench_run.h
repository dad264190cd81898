// Measures prefill and decode of a model for `moesaic bench`.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "base/status.h"
#include "cache/block_pool.h"
#include "cache/kv_store.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/sparsity.h"
#include "kernels/kernel_table.h"

namespace moesaic::app {

/// One line of the table.
struct BenchCase {
  int prompt = 0;     // > 0: number of tokens to prefill
  int generate = 0;   // > 0: number of tokens to decode per sequence
  int depth = 0;      // number of cached tokens before the test
  int sequences = 1;  // number of concurrent sequences
  int batch = 512;    // rows of one prefill step
};

struct BenchResult {
  std::vector<double> tokens_per_second;  // [repetitions], sum over all sequences
  // Mean number of experts, over all layers, that a decode step of the timed repetitions read.
  double experts_per_step = 0;
  double blocks_per_step = 0;  // the same for blocks of one KV head, for rows that chose blocks; 0: none did
  double median() const;
  double deviation() const;  // sample standard deviation; 0 for one repetition
};

/// Runs cases on random tokens. All arguments are borrowed and must outlive the object.
class BenchRunner {
 public:
  /// Fails for cases that do not fit the model's context.
  static Status Check(const std::vector<BenchCase>& cases, const models::ModelInfo& info);
  /// Uses kv_dtype, sparsity and the ranks of `options`. The cases must have been checked.
  static StatusOr<std::unique_ptr<BenchRunner>> Create(models::Model& model,
                                                       const kernels::KernelTable& kernels,
                                                       runtime::ThreadPool& threads,
                                                       const engine::EngineOptions& options,
                                                       const std::vector<BenchCase>& cases);

  /// Runs one untimed and `repetitions` timed repetitions over the same cached depth. Returns Cancelled after
  /// a signal.
  StatusOr<BenchResult> Run(const BenchCase& test, int repetitions);

  /// Returns the bytes that a decode step of `sequences` sequences reads at depth `depth`: weights once,
  /// counted experts and blocks of `result`, all other keys and values, and key summaries.
  double StepBytes(const BenchResult& result, int sequences, int depth) const;

 private:
  BenchRunner(models::Model& model, const engine::SparsityOptions& sparsity,
              std::unique_ptr<cache::KvStore> store);
  const kernels::SparsitySettings* SparsityOf(engine::SparsityMode least) const;
  int max_in_flight() const;
  Status Start(engine::StepBatch step);
  Status FinishOldest();
  Status FinishAll();
  Status Prefill(int sequence, int start, int count, int batch);
  Status Decode(int sequences, int start, int count);
  Status RunOnce(const BenchCase& test);
  std::vector<int32_t> RandomTokens(int count);

  models::Model& model_;
  const std::unique_ptr<cache::KvStore> store_;
  cache::BlockPool pool_;
  const engine::SparsityOptions options_;
  const kernels::SparsitySettings sparsity_;                  // of `options_`
  std::vector<std::unique_ptr<engine::Executor>> executors_;  // [replicas]
  std::deque<engine::StepBatch> steps_;                       // in flight, the oldest first
  uint64_t first_sequence_ = 1;                               // number of the first sequence of this case
  int64_t experts_read_ = 0;                                  // by decode steps
  int64_t blocks_read_ = 0;                         // of one KV head, by rows that chose: all steps so far
  std::mt19937 random_{1};                          // the same tokens in every run
  std::vector<std::vector<cache::BlockRef>> held_;  // [sequences]
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace moesaic::app
