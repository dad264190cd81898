// What every verb that runs a model shares: its flags, and the model brought into memory.
#pragma once

#include <memory>
#include <string>

#include "app/flags.h"
#include "app/tuning_file.h"
#include "base/status.h"
#include "engine/engine.h"
#include "kernels/kernel_table.h"
#include "models/model.h"
#include "runtime/thread_pool.h"

namespace moesaic::app {

/// What AddSparsityFlags declares; off for verbs without it.
struct SparsityFlags {
  std::string mode;                 // "": unsaid
  std::string with_budget = "off";  // what a budget without a mode means
  int budget = 0;                   // 0: the default where rows choose
  std::string digest = "box";       // or sketch
  engine::SparsityOptions options;

  /// With mode and budget put in.
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
  engine::SpeculativeOptions speculative;  // off for verbs without AddSpeculativeFlags; method "": unsaid
  std::string draft_model;
  SparsityFlags sparsity;
};

/// The method that was said, "off" among them; unsaid, a draft model turns "draft" on.
std::string SpeculativeMethod(const ModelFlags& flags);

/// Accepts a path that exists, or a Hugging Face id whose model is in the local cache (hub_cache.h), and
/// makes a path of it.
std::string ResolveModelPath(std::string& model);
/// Declares MODEL, which ResolveModelPath checks.
void AddModelPath(Verb& verb, std::string& model,
                  const char* help = "Hugging Face folder or id, .gguf file or packed file");
/// Declares --dtype.
void AddDtypeFlag(Verb& verb, std::string& dtype);
/// Declares --kv-dtype.
void AddKvDtypeFlag(Verb& verb, std::string& kv_dtype);
/// Declares MODEL, --dtype, --threads, --experts-per-token, --mmap, --numa and --no-tuning.
void AddModelFlags(Verb& verb, ModelFlags& flags);
/// Declares --ctx-size and --kv-dtype.
void AddCacheFlags(Verb& verb, ModelFlags& flags);

/// Members are destroyed in reverse: the engine goes before what it borrows.
struct Session {
  std::unique_ptr<runtime::ThreadPool> threads;
  kernels::KernelTable kernels;
  std::string tuning;  // TunedKernels'
  std::unique_ptr<models::Model> model;
  std::unique_ptr<models::Model> draft_model;  // or null
  double load_seconds = 0;
  std::unique_ptr<engine::Engine> engine;  // none until StartEngine
};

/// "int8 weights, copied to huge pages, interleaved over 2 NUMA nodes"
std::string DescribeWeights(const models::ModelInfo& info);

/// Declares --threads.
void AddThreadsFlag(Verb& verb, int& threads);

/// The pool that --threads asks for; tells when that is more than the machine has.
StatusOr<std::unique_ptr<runtime::ThreadPool>> MakeThreads(int threads);

/// What the choices of `moesaic tune` must have been made for, to be used with so many threads.
StatusOr<nlohmann::json> MachineOfKernels(int threads);

/// The kernels of this machine, limited by MOESAIC_ISA, with what is built in where there is a choice.
StatusOr<kernels::KernelTable> KernelsOfHost();

/// Those kernels with the choices of `moesaic tune` for so many threads, if `wanted` and if there are; tells
/// of a file that is ignored.
struct TunedKernels {
  kernels::KernelTable table;
  std::string tuning;  // "tuned by FILE", or why not
};
StatusOr<TunedKernels> KernelsFor(int threads, bool wanted);

/// Loads the model, with a progress line when stderr is a terminal. Cancelled when a signal comes meanwhile.
StatusOr<std::unique_ptr<Session>> OpenSession(const ModelFlags& flags);

/// Makes session.engine. kv_dtype, max_context, speculative and sparsity come from `flags`; tells when memory
/// does not hold that context.
Status StartEngine(Session& session, const ModelFlags& flags, engine::EngineOptions options);

}  // namespace moesaic::app
