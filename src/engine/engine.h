// The engine: admits requests, plans steps, runs them on an executor, samples, and reports tokens.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/kv_events.h"
#include "cache/tier_stats.h"
#include "engine/expert_balancer.h"
#include "engine/expert_load.h"
#include "engine/rank_loads.h"
#include "engine/rank_stats.h"
#include "engine/request.h"
#include "engine/speculative.h"
#include "kernels/kernel_table.h"
#include "models/model.h"
#include "parallel/layout.h"
#include "runtime/thread_pool.h"

namespace moesaic::engine {

/// Options of the disk tier.
struct DiskOptions {
  std::string folder;
  int64_t bytes = int64_t{32} << 30;  ///< Maximum bytes of its files.
  /// Identifies the model's files and the way they are loaded. Blocks of another model are refused, and also
  /// those of a model that computes other values for a few test tokens.
  std::string model;
  /// Maximum bytes copied per step. The copy takes some milliseconds, and a step tens of milliseconds.
  int64_t step_bytes = 16 << 20;
};

struct EngineOptions {
  int64_t kv_bytes =
      0;  ///< KV cache budget; 0: enough for max_sequences x context, at most a quarter of free RAM.
  std::string kv_dtype = "auto";  ///< "auto" (f32 for f32 weights, else bf16), "f32", "bf16", "int8"
  int64_t swap_bytes = 0;         ///< Memory for blocks of preempted requests; 0: they are computed again.
  /// Bytes of the warm tier, which keeps evicted blocks in int8 outside the KV cache; 0: no tier. Needs
  /// prefix_cache. Results may then depend on the blocks that were kept (docs/contracts/kv-tiers.md, W4),
  /// unless kv_dtype is int8 or warm_exact is set. With warm_exact, blocks are kept unchanged and take as
  /// many bytes as in the cache.
  int64_t warm_bytes = 0;
  bool warm_exact = false;
  /// Maximum bytes of KV cache that one step saves to the warm tier, and that one step restores. They take
  /// about a tenth of a second.
  int64_t warm_step_bytes = int64_t{256} << 20;
  int max_sequences = 16;       ///< Maximum number of running sequences of a replica.
  int max_batch_tokens = 512;   ///< Maximum rows of a step: prefill chunks and decodes; >= max_sequences.
  double max_mask_seconds = 2;  ///< Maximum CPU time of one grammar mask; its request fails after it.
  int max_context = 0;          ///< Maximum tokens of a request; 0: the model's limit.
  std::vector<int32_t> eos_ids = {};  ///< Tokens that end every request without ignore_eos.
  uint64_t seed = 0;                  ///< Seed for requests without one; 0: random.
  /// Steps that take longer are logged; infinity: none.
  double slow_step_seconds = std::numeric_limits<double>::infinity();
  bool prefix_cache = true;  ///< Keeps computed blocks and shares them between requests.
  std::optional<DiskOptions> disk = std::nullopt;  ///< Needs prefix_cache; absent: no disk tier.
  std::string eviction = "cost";                   ///< Eviction policy: "cost" or "lru".
  int max_overtakes = 64;  ///< Younger requests that may be admitted before a waiting one.
  SpeculativeOptions speculative = {};
  SparsityOptions sparsity = {};
  std::shared_ptr<cache::KvObserver> kv_observer = nullptr;  ///< Observes the radix tree; may be null.
  /// Job whose rank 0 is this engine; borrowed. Null: one rank. The model is loaded with the groups of
  /// `layout`, and the other ranks run RunRank(). The KV cache budget is that of one rank. Data parallel
  /// replicas have schedulers and caches of their own.
  comm::Transport* job = nullptr;
  parallel::Layout layout = {};
  double rank_time_limit_s = 60;  ///< A rank that takes longer for one step has failed.
  int local_ranks = 1;            ///< Ranks that share this machine's memory.
  /// Polled while Create waits for ranks that load their weights; an error ends the wait. May be empty.
  std::function<Status()> check_ranks = {};
  ExpertLoadOptions expert_load = {};
  /// Settings for moving experts between ranks. Requires expert_load and replicas that divide the experts.
  ExpertBalanceOptions balance = {};
  /// Called on the engine's thread for each rank that a layout which tolerates failures excludes. The rank's
  /// process may still exist.
  std::function<void(int rank)> on_excluded_rank = {};
};

/// Statistics of a job that tolerates failed ranks.
struct SurvivalStats {
  int ranks = 0, alive = 0;
  std::vector<std::string> failures;             ///< "rank 2 died", in the order of events
  std::vector<models::LeftOutExperts> left_out;  ///< Experts that no living rank has, by layer.
  int64_t left_out_experts = 0;                  ///< Number of these experts over all layers.
  int64_t failed_requests = 0;                   ///< Requests that ran on a rank which failed.
  int64_t reduced_requests = 0;                  ///< Requests that ended while experts were left out.
};

/// Statistics of one of several data parallel replicas.
struct ReplicaStats {
  int running = 0, waiting = 0;
  int free_blocks = 0, cached_blocks = 0, total_blocks = 0;
  int64_t prompt_tokens = 0, output_tokens = 0;
};

/// Counters rise over the engine's life; other members are current values.
struct EngineStats {
  int running = 0, waiting = 0;
  std::map<std::string, int> waiting_of;  ///< The waiting requests by Request::client; no count is 0.
  /// Blocks that no request holds are either free, or cached: their contents are kept until they are evicted.
  int free_blocks = 0, cached_blocks = 0, total_blocks = 0;
  int tree_nodes = 0;  ///< Nodes of the radix tree.
  int64_t prompt_tokens = 0, output_tokens = 0, preemptions = 0, steps = 0;
  /// Prompt tokens looked up at admission, those found in the cache, and evicted blocks.
  int64_t cache_queries = 0, cache_hits = 0, cache_evictions = 0;
  /// Blocks of preempted requests copied to the swap area and back.
  int64_t swapped_out = 0, swapped_in = 0;
  int swapped_blocks = 0, swap_blocks = 0;         ///< Used slots, and all slots of the swap area.
  cache::WarmTierStats warm;                       ///< All zero without the tier.
  cache::DiskTierStats disk;                       ///< Likewise.
  double prefill_seconds = 0, decode_seconds = 0;  ///< Time of steps; mixed ones are divided by rows.
  SpeculationStats speculation;
  kernels::SparsityCounters sparsity;
  std::vector<RankStats> ranks;        ///< [ranks] of the layout; empty on one rank.
  std::vector<ReplicaStats> replicas;  ///< [replicas] whose sums are above; empty: one replica.
  /// Names of the links that RankStats::level_bytes counts, outermost first.
  std::vector<std::string> link_levels;
  std::shared_ptr<const ExpertLoadStats> expert_load;  ///< Null: not recorded, or no window has ended.
  int64_t expert_load_write_errors = 0;                ///< Failed writes of the file of expert loads.
  std::shared_ptr<const ExpertBalanceStats> balance;   ///< Null: experts stay.
  /// Null: replicas do not divide the experts, or no window has ended.
  std::shared_ptr<const RankLoads> rank_loads;
  std::shared_ptr<const SurvivalStats> survival;  ///< Null: a failed rank ends the job.
};

/// Not thread-safe: one thread calls Add, Step and Cancel (docs/contracts/threads.md).
class Engine {
 public:
  /// `model`, `kernels` and `pool` are borrowed and must outlive the engine.
  /// Unimplemented: replicas with kv_observer.
  static StatusOr<std::unique_ptr<Engine>> Create(models::Model& model, const kernels::KernelTable& kernels,
                                                  runtime::ThreadPool& pool, const EngineOptions& options);
  virtual ~Engine() = default;

  /// Binds the calling thread, which calls Step, to its core.
  virtual void BindCaller() = 0;
  /// The error that Add would return. Any thread.
  virtual Status Check(const Request& request) const = 0;
  /// Queues a request. InvalidArgument names the fault: an empty prompt, an id outside the vocabulary, a
  /// prompt that leaves no room in the context or in the whole KV cache, or a parameter out of range.
  virtual StatusOr<RequestId> Add(Request request) = 0;
  /// Ends a request and releases its blocks; the next Step reports the end. Unknown or finished ids are
  /// ignored.
  virtual void Cancel(RequestId id) = 0;
  /// Plans and runs one step and appends its events; without work it appends none. After an error of the
  /// model no request has advanced, and the step can be retried.
  virtual Status Step(std::vector<TokenEvent>* events) = 0;
  /// Returns an error if a rank has died. Called between steps. After an error each step fails.
  virtual Status CheckRanks() { return OkStatus(); }
  /// Evicts all cached blocks that no request holds, and forgets those of all tiers.
  virtual void ClearCache() = 0;
  /// Returns whether blocks are still to be stored on disk. Step continues to store them, idle or not.
  virtual bool saving() const = 0;
  /// Waits until all blocks that are to be stored are on disk, or until `stop`, which is polled, becomes
  /// true.
  virtual void SaveCache(const std::function<bool()>& stop = {}) = 0;
  virtual bool idle() const = 0;  ///< No request waits or runs, and no event is pending.
  virtual EngineStats stats() const = 0;
  /// EngineStats::survival, without the other statistics.
  virtual std::shared_ptr<const SurvivalStats> survival() const { return nullptr; }
  virtual const models::ModelInfo& model() const = 0;
  /// Maximum tokens of prompt and output of one request: those of the context, or of the KV cache if it is
  /// smaller.
  virtual int max_context() const = 0;
  virtual const SpeculativeOptions& speculative() const = 0;  ///< Resolved: never "auto".
  virtual const SparsityOptions& sparsity() const = 0;

  /// Computes the logits of every position of `ids`, [ids.size(), vocab_size], and passes them to `sink`
  /// chunk by chunk, for `logits`, `perplexity` and tests. Rows choose blocks if the default of requests is
  /// kAll. Refused while requests exist. `routes`, if not null, contains the experts of the rows of each call
  /// of `sink`.
  virtual Status Score(std::span<const int32_t> ids,
                       const std::function<Status(int64_t first_row, std::span<const float> rows)>& sink,
                       models::RouteTap* routes = nullptr) = 0;
};

}  // namespace moesaic::engine
