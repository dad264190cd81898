// Flags and set-up that all verbs with a model share.
#pragma once

#include <memory>
#include <string>

#include "app/expert_load_file.h"
#include "app/flags.h"
#include "app/rank_job.h"
#include "app/tuning_file.h"
#include "app/verb.h"
#include "base/status.h"
#include "engine/engine.h"
#include "kernels/kernel_table.h"
#include "models/model.h"
#include "runtime/thread_pool.h"

namespace moesaic::app {

/// Flags of AddSparsityFlags; off for verbs without them.
struct SparsityFlags {
  std::string mode;                 // "": not given
  std::string with_budget = "off";  // mode that a budget without a mode selects
  int budget = 0;                   // 0: default
  std::string summary = "box";      // box or sketch
  engine::SparsityOptions options;

  /// Returns options with mode and budget resolved.
  StatusOr<engine::SparsityOptions> Resolve() const;
};

struct ModelFlags {
  std::string model;
  std::string dtype = "auto";
  std::string kv_dtype = "auto";
  int threads = 0;
  int context = 0;
  int experts_per_token = 0;
  std::string mmap = "auto";
  std::string numa = "auto";
  bool tuning = true;                      // --no-tuning
  engine::SpeculativeOptions speculative;  // off for verbs without AddSpeculativeFlags; method "": not given
  std::string draft_model;
  SparsityFlags sparsity;
  std::string expert_load_file;  // --record-expert-load; "": none
  double expert_load_window = 10;
  RankFlags ranks;
  std::shared_ptr<RankJob> job;  // set by RunOnRanks; null: one rank
};

/// Returns the given method, possibly "off". If none is given, a draft model selects "draft".
std::string SpeculativeMethod(const ModelFlags& flags);

/// Accepts an existing path, or a Hugging Face id whose model is in the local cache (hub_cache.h), which is
/// replaced by its path.
std::string ResolveModelPath(std::string& model);
/// Declares MODEL, which ResolveModelPath checks.
void AddModelPath(Verb& verb, std::string& model,
                  const char* help = "Hugging Face folder or id, .gguf file or packed file");
/// Declares --dtype.
void AddDtypeFlag(Verb& verb, std::string& dtype);
/// Declares --kv-dtype.
void AddKvDtypeFlag(Verb& verb, std::string& kv_dtype);
/// Declares MODEL, --dtype, --threads, --experts-per-token, --mmap, --numa, --no-tuning,
/// --record-expert-load,
/// --expert-load-window and the flags of ranks.
/// `answers`: the verb answers requests (AddRankFlags).
void AddModelFlags(Verb& verb, ModelFlags& flags, bool answers);
/// Declares --ctx-size and --kv-dtype.
void AddCacheFlags(Verb& verb, ModelFlags& flags);

/// Starts the job of flags.ranks, if it has several ranks, and runs the verb on rank 0. The other ranks load
/// their parts of the model and compute until rank 0 ends.
Status RunOnRanks(ModelFlags& flags, const VerbRun& verb);

/// Members are destroyed in reverse order: the engine before its borrowed parts.
struct Session {
  std::unique_ptr<runtime::ThreadPool> threads;
  kernels::KernelTable kernels;
  std::string tuning;  // TunedKernels::tuning
  std::unique_ptr<models::Model> model;
  std::unique_ptr<models::Model> draft_model;  // may be null
  double load_seconds = 0;
  std::unique_ptr<ExpertLoadFile> expert_load;  // null: not recorded
  std::unique_ptr<engine::Engine> engine;       // null until StartEngine
};

/// Returns "int8 weights, copied to huge pages, interleaved over 2 NUMA nodes".
std::string DescribeWeights(const models::ModelInfo& info);

/// Declares --threads.
void AddThreadsFlag(Verb& verb, int& threads);

/// Creates the pool for --threads. Prints a notice if that is more than the machine has.
/// `local_ranks` processes share the machine's CPU quota.
StatusOr<std::unique_ptr<runtime::ThreadPool>> MakeThreads(int threads, int local_ranks = 1);

/// Returns the machine description that the choices of `moesaic tune` must match for this number of threads.
StatusOr<nlohmann::json> MachineOfKernels(int threads);

/// Returns the kernels of this machine, limited by MOESAIC_ISA, with built-in choices.
StatusOr<kernels::KernelTable> KernelsOfHost();

/// Kernels with the choices of `moesaic tune` for this number of threads, if `wanted` and available. Prints a
/// notice if a file is ignored.
struct TunedKernels {
  kernels::KernelTable table;
  std::string tuning;  // "tuned by FILE", or the reason why not
};
StatusOr<TunedKernels> KernelsFor(int threads, bool wanted);

/// Loads the model, or this rank's part of it, with a progress line if stderr is a terminal. Returns
/// Cancelled if a signal arrives meanwhile.
StatusOr<std::unique_ptr<Session>> OpenSession(const ModelFlags& flags);

/// Sets the job of `flags` in the options of an engine.
void UseRanks(const ModelFlags& flags, engine::EngineOptions* options);

/// Creates session.engine. kv_dtype, max_context, speculative and sparsity come from `flags`. Prints a notice
/// if memory does not hold that context.
Status StartEngine(Session& session, const ModelFlags& flags, engine::EngineOptions options);

}  // namespace moesaic::app
