// Measures a model's prefill and decode: what `moesaic bench` prints.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "base/status.h"
#include "cache/block_pool.h"
#include "cache/kv_store.h"
#include "engine/local_executor.h"
#include "engine/sparsity.h"

namespace moesaic::app {

/// One line of the table.
struct BenchCase {
  int prompt = 0;     // > 0: prefill of so many tokens
  int generate = 0;   // > 0: decode of so many tokens for each sequence
  int depth = 0;      // tokens that stand in the cache before
  int sequences = 1;  // that run at once
  int batch = 512;    // rows of one prefill step
};

struct BenchResult {
  std::vector<double> tokens_per_second;  // [repetitions], of all sequences together
  double experts_per_step = 0;  // of all layers, that a decode step of the timed repetitions read in the mean
  double blocks_per_step = 0;   // of one KV head, of all layers: likewise, by rows that chose; 0: none did
  double median() const;
  double deviation() const;  // standard deviation of the sample; 0 for one repetition
};

/// Runs cases on random tokens. Everything is borrowed and must outlive it.
class BenchRunner {
 public:
  /// Refuses cases that do not fit into the model's context.
  static Status Check(const std::vector<BenchCase>& cases, const models::ModelInfo& info);
  /// `kv_dtype` as in EngineOptions; the cases have been checked.
  static StatusOr<std::unique_ptr<BenchRunner>> Create(models::Model& model,
                                                       const kernels::KernelTable& kernels,
                                                       runtime::ThreadPool& threads,
                                                       const std::string& kv_dtype,
                                                       const engine::SparsityOptions& sparsity,
                                                       const std::vector<BenchCase>& cases);

  /// One untimed repetition, then `repetitions` timed ones over the same cached depth. Cancelled by a signal.
  StatusOr<BenchResult> Run(const BenchCase& test, int repetitions);

  /// Bytes that a decode step of `sequences` behind `depth` tokens read: weights once, of routed experts and
  /// of chosen blocks what `result` counted, other keys and values, and digests.
  double StepBytes(const BenchResult& result, int sequences, int depth) const;

 private:
  BenchRunner(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
              const engine::SparsityOptions& sparsity, std::unique_ptr<cache::KvStore> store);
  const kernels::BlockSparsity* SparsityOf(engine::SparsityMode least) const;
  Status Prefill(int sequence, int start, int count, int batch);
  Status Decode(int sequences, int start, int count);
  Status RunOnce(const BenchCase& test);
  std::vector<int32_t> RandomTokens(int count);

  models::Model& model_;
  const std::unique_ptr<cache::KvStore> store_;
  cache::BlockPool pool_;
  const engine::SparsityOptions options_;
  const kernels::BlockSparsity sparsity_;  // of `options_`
  engine::LocalExecutor executor_;
  uint64_t first_sequence_ = 1;                     // number of the first sequence of this case
  int64_t experts_read_ = 0;                        // by decode steps
  int64_t blocks_read_ = 0;                         // of one KV head, by rows that chose: all steps so far
  std::mt19937 random_{1};                          // the same tokens in every run
  std::vector<std::vector<cache::BlockRef>> held_;  // [sequences]
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace moesaic::app
