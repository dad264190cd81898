// The engine: admits requests, plans a step, runs the model over it, samples, and says what came out.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/kv_events.h"
#include "cache/tier_stats.h"
#include "engine/request.h"
#include "engine/speculative.h"
#include "kernels/kernel_table.h"
#include "models/model.h"
#include "runtime/thread_pool.h"

namespace moesaic::engine {

/// Where KV blocks are kept on disk.
struct DiskOptions {
  std::string folder;
  int64_t bytes = int64_t{32} << 30;  ///< that its files may take
  /// Names the model's files, and how they are loaded: blocks of another model are refused. What the model
  /// computes for a few tokens is compared as well.
  std::string model;
  int64_t step_bytes = 16 << 20;  ///< copied by one step at most: some milliseconds beside steps of tens
};

struct EngineOptions {
  int64_t kv_bytes =
      0;  ///< KV cache budget; 0: what max_sequences x context needs, at most a quarter of free RAM
  std::string kv_dtype = "auto";  ///< "auto" (f32 for f32 weights, else bf16), "f32", "bf16", "int8"
  int64_t swap_bytes = 0;         ///< memory for blocks of preempted requests; 0: they are computed again
  /// Memory beside the KV cache in which blocks that it gives up are kept in int8; 0: none. Needs
  /// prefix_cache. What requests say may then depend on what was kept (docs/contracts/kv-tiers.md, W4),
  /// unless kv_dtype is int8, or blocks are kept as they are (warm_exact), in as many bytes as in the cache.
  int64_t warm_bytes = 0;
  bool warm_exact = false;
  /// Bytes of the KV cache that one step keeps there, and that one step restores: about a tenth of a second
  /// of reads and writes, next to steps of tens of milliseconds to seconds.
  int64_t warm_step_bytes = int64_t{256} << 20;
  int max_sequences = 16;       ///< sequences that run at once
  int max_batch_tokens = 512;   ///< rows of one step: prefill chunks and decodes together; >= max_sequences
  double max_mask_seconds = 2;  ///< CPU time that one mask of a grammar may take; the request then fails
  int max_context = 0;          ///< 0: the model's
  std::vector<int32_t> eos_ids = {};  ///< end every request that does not ignore_eos
  uint64_t seed = 0;                  ///< seeds requests that bring none; 0: another one each run
  bool prefix_cache = true;           ///< keep computed blocks and share them between requests
  std::optional<DiskOptions> disk = std::nullopt;  ///< needs prefix_cache; absent: blocks are in memory only
  std::string eviction = "cost";                   ///< which cached blocks go first: "cost" or "lru"
  int max_overtakes = 64;  ///< younger requests that may be admitted before one that waits
  SpeculativeOptions speculative = {};
  SparsityOptions sparsity = {};
  std::shared_ptr<cache::KvObserver> kv_observer = nullptr;  ///< is told what the cache holds; may be null
};

/// Counters rise over the engine's life; the others are of this moment.
struct EngineStats {
  int running = 0, waiting = 0;
  /// Blocks that no request holds are free, or cached: kept for their contents, given up when one is needed.
  int free_blocks = 0, cached_blocks = 0, total_blocks = 0;
  int cached_runs = 0;  ///< nodes of the radix tree: runs of blocks, whether requests hold them or not
  int64_t prompt_tokens = 0, output_tokens = 0, preemptions = 0, steps = 0;
  /// Prompt tokens looked up in the cache at admission, those found there, and blocks given up.
  int64_t cache_queries = 0, cache_hits = 0, cache_evictions = 0;
  /// Blocks of preempted requests that were copied to the swap space and back, and what it holds now.
  int64_t swapped_out = 0, swapped_in = 0;
  int swapped_blocks = 0, swap_blocks = 0;         ///< used, and in all
  cache::WarmTierStats warm;                       ///< all zero without one
  cache::DiskTierStats disk;                       ///< likewise
  int64_t disk_lost_blocks = 0;                    ///< that the cache gave up before they were on disk
  double prefill_seconds = 0, decode_seconds = 0;  ///< of pure steps; mixed steps are split by rows
  SpeculationStats speculation;
  kernels::SparsityCounters sparsity;
};

/// Not thread-safe: one thread adds, steps and cancels (docs/contracts/threads.md).
class Engine {
 public:
  /// `model`, `kernels` and `pool` are borrowed and must outlive the engine.
  static StatusOr<std::unique_ptr<Engine>> Create(models::Model& model, const kernels::KernelTable& kernels,
                                                  runtime::ThreadPool& pool, const EngineOptions& options);
  virtual ~Engine() = default;

  /// Binds the calling thread, which is to step this engine and do little else, to its core.
  virtual void BindCaller() = 0;
  /// What Add would refuse, by name. Any thread.
  virtual Status Check(const Request& request) const = 0;
  /// Queues a request. Refuses an empty prompt, an id outside the vocabulary, a prompt that leaves no room in
  /// the context or in the whole KV cache, and parameters out of range, each by name.
  virtual StatusOr<RequestId> Add(Request request) = 0;
  /// Ends a request now; its blocks are free when this returns, and the next Step tells its end. Unknown or
  /// finished ids are ignored.
  virtual void Cancel(RequestId id) = 0;
  /// Plans and runs one step and appends what came out. No work: returns OK and appends nothing. After an
  /// error of the model nothing has advanced: the same step can be tried again.
  virtual Status Step(std::vector<TokenEvent>* events) = 0;
  /// Forgets all cached blocks that no request holds, and all on disk.
  virtual void ClearCache() = 0;
  /// Whether blocks are still to be stored on disk: Step goes on with that, idle or not.
  virtual bool saving() const = 0;
  /// Returns when all blocks that are to be stored on disk are there, or soon after `stop`, asked now and
  /// then, says true: the others are not.
  virtual void SaveCache(const std::function<bool()>& stop = {}) = 0;
  virtual bool idle() const = 0;  ///< nothing waiting, nothing running, nothing to tell
  virtual EngineStats stats() const = 0;
  virtual const models::ModelInfo& model() const = 0;
  virtual int max_context() const = 0;  ///< tokens of prompt and output together that one request may have
  virtual const SpeculativeOptions& speculative() const = 0;  ///< resolved: never "auto"
  virtual const SparsityOptions& sparsity() const = 0;

  /// Logits of every position of `ids`, [ids.size(), vocab_size], appended chunk by chunk to `sink` in order:
  /// for `logits`, `perplexity` and tests. Rows choose blocks where the default of requests is kAll. Runs at
  /// once; refused while requests are there. `routes`, if any, holds for each call of `sink` what the routers
  /// chose for its rows.
  virtual Status Score(std::span<const int32_t> ids,
                       const std::function<Status(int64_t first_row, std::span<const float> rows)>& sink,
                       models::RouteTap* routes = nullptr) = 0;
};

}  // namespace moesaic::engine
