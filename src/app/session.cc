#include "app/session.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "app/host_features.h"
#include "app/hub_cache.h"
#include "app/interrupt.h"
#include "app/layout_table.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/table.h"
#include "app/verb.h"
#include "base/checksum.h"
#include "cache/block_pool.h"
#include "checkpoint/checkpoint.h"
#include "comm/transport/open_transport.h"
#include "engine/ranked_executor.h"
#include "engine/speculative.h"
#include "models/rank_work.h"
#include "parallel/placement/placement_file.h"
#include "runtime/cpu_features.h"
#include "runtime/topology.h"
#include "tensor/packed.h"

namespace moesaic::app {
namespace {

// Size from which packing takes long enough to suggest `moesaic convert`.
constexpr int64_t kWorthConverting = int64_t{256} << 20;

models::MmapPolicy MmapPolicyOf(const std::string& mmap) {
  if (mmap == "on") return models::MmapPolicy::kMap;
  return mmap == "off" ? models::MmapPolicy::kCopy : models::MmapPolicy::kAuto;
}

models::NumaPolicy NumaOf(const std::string& numa) {
  if (numa == "interleave") return models::NumaPolicy::kInterleave;
  if (numa == "mirror") return models::NumaPolicy::kMirror;
  if (numa == "slice") return models::NumaPolicy::kSlice;
  return numa == "local" ? models::NumaPolicy::kLocal : models::NumaPolicy::kAuto;
}

// Checks that ids have the same meaning in both models; reports the first that does not.
Status CheckSameVocabulary(const std::string& model, const std::string& draft) {
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(model));
  ASSIGN_OR_RETURN(const ModelText draft_text, OpenModelText(draft));
  if (!text.tokenizer.ok() || !draft_text.tokenizer.ok()) return OkStatus();  // only ids are used
  const text::Tokenizer &a = *text.tokenizer, &b = *draft_text.tokenizer;
  for (int32_t id = 0; id < std::max(a.vocab_size(), b.vocab_size()); ++id) {
    if (a.IdToToken(id) != b.IdToToken(id)) {
      return InvalidArgument("{}: a draft model needs the vocabulary of {}; token {} is \"{}\", not \"{}\"",
                             draft, model, id, b.IdToToken(id), a.IdToToken(id));
    }
  }
  return OkStatus();
}

// Checks the draft model before the model is loaded.
Status CheckDraftModel(const ModelFlags& flags) {
  const std::string method = SpeculativeMethod(flags);
  if (method == "off") return OkStatus();
  if (flags.draft_model.empty()) {
    return method == "draft" ? InvalidArgument("--speculative draft needs --speculative-model") : OkStatus();
  }
  if (method != "draft" && method != "auto") {
    return InvalidArgument("--speculative-model needs --speculative draft or auto, found {}", method);
  }
  return CheckSameVocabulary(flags.model, flags.draft_model);
}

// Drafts are computed by rank 0 alone.
Status LoadDraftModel(const ModelFlags& flags, models::LoadOptions options, Session& session) {
  if (flags.draft_model.empty() || SpeculativeMethod(flags) == "off") return OkStatus();
  if (flags.job != nullptr && flags.job->rank() != 0) return OkStatus();
  options.dtype = "auto";
  options.groups = nullptr;
  options.experts_per_token = 0;
  options.load_mtp = false;
  ASSIGN_OR_RETURN(session.draft_model, models::Model::Load(flags.draft_model, options, *session.threads));
  return OkStatus();
}

}  // namespace

std::string SpeculativeMethod(const ModelFlags& flags) {
  if (!flags.speculative.method.empty()) return flags.speculative.method;
  return flags.draft_model.empty() ? "off" : "draft";
}

namespace {

bool LoadsMtp(const ModelFlags& flags) {
  const std::string method = SpeculativeMethod(flags);
  return engine::UsesMtp(method) || (method == "auto" && flags.draft_model.empty());
}

}  // namespace

std::string DescribeWeights(const models::ModelInfo& info) {
  std::string text = fmt::format("{} weights, {}", info.weight_format, models::ToString(info.weights_from));
  if (info.numa_nodes > 1) {
    const char* how = info.numa == models::NumaPolicy::kMirror  ? "mirrored on"
                      : info.numa == models::NumaPolicy::kSlice ? "sliced over"
                                                                : "interleaved over";
    text += fmt::format(", {} {} NUMA nodes", how, info.numa_nodes);
  }
  return text;
}

StatusOr<engine::SparsityOptions> SparsityFlags::Resolve() const {
  engine::SparsityOptions resolved = options;
  const std::string said = !mode.empty() ? mode : budget > 0 ? with_budget : "off";
  const engine::SparsityOptions unsaid;
  const bool audits = options.audit_every != 0 && options.audit_every != unsaid.audit_every;
  if (mode.empty() && said == "off" &&
      (options.defaults.reuse != unsaid.defaults.reuse || options.dense_layers != unsaid.dense_layers ||
       summary != SparsityFlags().summary || audits)) {
    return InvalidArgument(
        "--kv-sparsity-reuse, --kv-sparsity-summary, --kv-sparsity-dense-layers and --kv-sparsity-audit need "
        "--kv-sparsity or --kv-sparsity-budget");
  }
  if (said == "off") return unsaid;
  resolved.key_summaries = true;
  ASSIGN_OR_RETURN(resolved.summary_kind, engine::ParseKeySummaryKind(summary));
  if (budget > 0) resolved.defaults.budget = budget;
  ASSIGN_OR_RETURN(resolved.defaults.mode, engine::ParseSparsityMode(said));
  RETURN_IF_ERROR(engine::CheckSparsity(resolved.defaults, resolved));
  return resolved;
}

std::string ResolveModelPath(std::string& model) {
  StatusOr<std::string> path = FindModel(model);
  if (!path.ok()) return Message(path.status());
  if (*path != model) Tell("{}: {}\n", model, *path);
  model = *std::move(path);
  return "";
}

void AddModelPath(Verb& verb, std::string& model, const char* help) {
  verb.AddOption("MODEL", model, help).Required().Transform(ResolveModelPath);
}

void AddDtypeFlag(Verb& verb, std::string& dtype) {
  std::vector<std::string> names = tensor::QuantizableFormatNames();
  names.insert(names.begin(), "auto");
  verb.AddOption("--dtype", dtype,
                 "Weight format in memory; auto keeps f32, and the codes of Q8_0, Q4_0, Q4_K, Q6_K, "
                 "MXFP4, NVFP4, FP8, and of int4 and int8 without zero points; all other formats, f16 "
                 "included, become bf16")
      .OneOf(names)
      .ShowDefault();
}

void AddKvDtypeFlag(Verb& verb, std::string& kv_dtype) {
  verb.AddOption("--kv-dtype", kv_dtype,
                 "KV cache format: auto (f32 for f32 weights, else bf16), f32, bf16 or int8")
      .OneOf({"auto", "f32", "bf16", "int8"})
      .ShowDefault();
}

void AddThreadsFlag(Verb& verb, int& threads) {
  verb.AddOption("-t,--threads", threads, "Number of threads; 0: one per core").Range(0, 1024).ShowDefault();
}

void AddModelFlags(Verb& verb, ModelFlags& flags, bool answers) {
  AddModelPath(verb, flags.model);
  AddDtypeFlag(verb, flags.dtype);
  AddThreadsFlag(verb, flags.threads);
  verb.AddOption("--experts-per-token", flags.experts_per_token, "Routed experts per token; 0: as trained")
      .Range(0, 1024)
      .ShowDefault();
  verb.AddOption("--mmap", flags.mmap,
                 "Map a packed file and read pages on first use (on), or copy it to huge pages first "
                 "(off); auto: copy if it takes at most half of the free memory")
      .OneOf({"auto", "on", "off"})
      .ShowDefault();
  verb.AddOption("--numa", flags.numa,
                 "NUMA placement of weights that are not mapped: on all nodes in turn (interleave; auto, if "
                 "the process may run on several), on the node of the loading thread (local), a full copy on "
                 "the node of every thread (mirror), or in equal parts on these nodes (slice)")
      .OneOf({"auto", "interleave", "local", "mirror", "slice"})
      .ShowDefault();
  verb.AddFlagCallback(
          "--no-tuning", [&flags] { flags.tuning = false; },
          "Use the built-in kernel choices instead of those that moesaic tune made for this machine")
      .NotInConfig();
  verb.AddFlagCallback(
          "--no-mmap", [&flags] { flags.mmap = "off"; }, "The same as --mmap off")
      .NotInConfig()
      .Excludes("--mmap");
  AddRankFlags(verb, flags.ranks, answers);
  verb.AddOption(
          "--record-expert-load", flags.expert_load_file,
          "Record the tokens that go to each routed expert in this file, which moesaic placement reads")
      .Group("Several ranks");
  verb.AddOption("--expert-load-window", flags.expert_load_window, "Seconds of one window of that record")
      .Range(0.01, 86400.0)
      .ShowDefault()
      .Group("Several ranks");
}

void AddCacheFlags(Verb& verb, ModelFlags& flags) {
  verb.AddOption("-c,--ctx-size", flags.context, "Context length in tokens; 0: the model's")
      .Range(0, 1 << 24)
      .ShowDefault();
  AddKvDtypeFlag(verb, flags.kv_dtype);
}

StatusOr<std::unique_ptr<runtime::ThreadPool>> MakeThreads(int threads, int local_ranks) {
  runtime::Topology topology = runtime::DetectTopology();
  topology.cpu_quota /= local_ranks;  // cores are divided already
  const auto cpus = static_cast<int>(topology.cpus.size());
  if (threads > cpus) Tell("{} threads share the {} hardware threads of this machine\n", threads, cpus);
  return runtime::ThreadPool::Create({.threads = threads, .pin = true, .topology = &topology});
}

StatusOr<nlohmann::json> MachineOfKernels(int threads) {
  ASSIGN_OR_RETURN(const runtime::CpuFeatures cpu, FeaturesOfHost());
  return TuningMachine(runtime::DetectTopology(), cpu, threads);
}

StatusOr<kernels::KernelTable> KernelsOfHost() {
  ASSIGN_OR_RETURN(const runtime::CpuFeatures cpu, FeaturesOfHost());
  return kernels::SelectKernels(cpu);
}

StatusOr<TunedKernels> KernelsFor(int threads, bool wanted) {
  TunedKernels kernels;
  ASSIGN_OR_RETURN(kernels.table, KernelsOfHost());
  if (!runtime::DetectCpu().Has(runtime::Isa::kAvx2))
    Tell("this processor has no AVX2: the reference kernels run, which are many times slower\n");
  nlohmann::json machine;
  if (wanted) {
    ASSIGN_OR_RETURN(machine, MachineOfKernels(threads));
  }
  ASSIGN_OR_RETURN(TuningState tuning, TuneKernels(wanted, machine, kernels.table));
  if (tuning.ignored) Tell("kernels are {}\n", tuning.text);
  kernels.tuning = std::move(tuning.text);
  return kernels;
}

StatusOr<std::unique_ptr<Session>> OpenSession(const ModelFlags& flags) {
  auto session = std::make_unique<Session>();
  ASSIGN_OR_RETURN(session->threads,
                   MakeThreads(flags.threads, flags.job == nullptr ? 1 : flags.job->local_ranks()));
  ASSIGN_OR_RETURN(TunedKernels kernels, KernelsFor(session->threads->size(), flags.tuning));
  session->kernels = std::move(kernels.table);
  session->tuning = std::move(kernels.tuning);
  const auto start = std::chrono::steady_clock::now();
  Progress progress("loading");
  models::LoadOptions options;
  options.dtype = flags.dtype;
  options.experts_per_token = flags.experts_per_token;
  options.mmap = MmapPolicyOf(flags.mmap);
  options.numa = NumaOf(flags.numa);
  options.load_mtp = LoadsMtp(flags);
  options.progress = [&progress, &flags](int64_t done, int64_t total) {
    progress.Show(done, total, FormatBytes(static_cast<double>(total)));
    return !Interrupted() && (flags.job == nullptr || flags.job->Failure().ok());
  };
  RETURN_IF_ERROR(CheckDraftModel(flags));
  if (flags.job != nullptr) {
    ASSIGN_OR_RETURN(options.groups, flags.job->MakeGroups());
    options.local_ranks = flags.job->local_ranks();
  }
  ASSIGN_OR_RETURN(session->model, models::Model::Load(flags.model, options, *session->threads));
  RETURN_IF_ERROR(LoadDraftModel(flags, options, *session));
  session->load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const models::ModelInfo& info = session->model->info();
  if (info.weights_from == models::WeightSource::kPacked && info.weight_bytes >= kWorthConverting) {
    Tell("packed {} of weights in {:.1f} s; run moesaic convert {} --out FILE to avoid this at every start\n",
         FormatBytes(static_cast<double>(info.weight_bytes)), session->load_seconds, flags.model);
  }
  return session;
}

namespace {

// ": 5.31 ms, 24% of them between ranks; the best layout without replicas, TP2, takes 7.02 ms"
std::string Reason(const std::vector<planner::LayoutPlanner::Prediction>& predictions) {
  const auto replicates = [](const planner::LayoutPlanner::Prediction& prediction) {
    return prediction.layout.degrees().data > 1;
  };
  const planner::LayoutPlanner::Prediction& best = predictions.front();
  const planner::StepTime& step = best.steps.front();
  std::string text = fmt::format(": {:.2f} ms, {:.0f}% of them between ranks", step.seconds * 1e3,
                                 100 * step.communication / step.seconds);
  const auto other = std::ranges::find_if(predictions, [&](const auto& prediction) {
    return prediction.fits && replicates(prediction) != replicates(best);
  });
  if (other == predictions.end()) return text;
  return text + fmt::format("; the best layout {} replicas, {}, takes {:.2f} ms",
                            replicates(best) ? "without" : "with", other->layout.Name(),
                            other->steps.front().seconds * 1e3);
}

// Sets the degrees of the best layout for --topology. Returns a text that gives the reason.
StatusOr<std::string> ChooseLayout(const checkpoint::Checkpoint& source, ModelFlags& flags) {
  constexpr size_t kLines = 4;
  if (flags.ranks.topology.empty()) {
    return InvalidArgument("--layout auto needs --topology, a file with the ranks' devices and links");
  }
  RETURN_IF_ERROR(flags.ranks.CheckLayoutHasNoSizes());
  ASSIGN_OR_RETURN(const auto predictions, PredictLayouts({.model = source,
                                                           .dtype = flags.dtype,
                                                           .kv_dtype = flags.kv_dtype,
                                                           .topology = flags.ranks.topology,
                                                           .load_mtp = LoadsMtp(flags)}));
  const planner::LayoutPlanner::Prediction& best = predictions.front();
  if (!best.fits) {
    return ResourceExhausted("{}: no layout fits the devices' memory; the smallest part of a rank has {}",
                             flags.ranks.topology, FormatBytes(best.weight_bytes));
  }
  flags.ranks.degrees = best.layout.degrees();
  flags.ranks.split = best.layout.split();
  return fmt::format("--layout auto: {} has the shortest predicted step for 8 sequences on {}{}\n{}",
                     best.layout.Name(), flags.ranks.topology, Reason(predictions),
                     LayoutTable(predictions, kLines));
}

// Sets the layers of the stages for the devices of --topology. Returns a text that names them.
StatusOr<std::string> ChooseLayers(const checkpoint::Checkpoint& source, ModelFlags& flags) {
  if (flags.ranks.topology.empty()) {
    return InvalidArgument("--layer-split auto needs --topology, a file with the ranks' devices and links");
  }
  ASSIGN_OR_RETURN(const parallel::Layout layout, LayoutOf(flags.ranks));
  ASSIGN_OR_RETURN(flags.ranks.split, PredictSplit({.model = source,
                                                    .dtype = flags.dtype,
                                                    .kv_dtype = flags.kv_dtype,
                                                    .topology = flags.ranks.topology,
                                                    .load_mtp = LoadsMtp(flags)},
                                                   layout));
  ASSIGN_OR_RETURN(const parallel::Layout chosen, LayoutOf(flags.ranks));
  return fmt::format("--layer-split auto: {} for {}\n", chosen.Name(), flags.ranks.topology);
}

// Identifies the weights by the sizes of their files and some of their bytes: another training has the same
// config.
std::string DigestOfWeights(const checkpoint::Checkpoint& source) {
  constexpr size_t kSamples = 8, kSampleBytes = 64;  // of a file
  base::Xxh3 digest;
  for (const auto& file : source.files()) {
    const std::span<const std::byte> bytes = file->bytes();
    digest.AddText(std::to_string(bytes.size()));
    for (size_t i = 1; i <= kSamples; ++i) {
      const std::span<const std::byte> rest = bytes.subspan(bytes.size() * i / (kSamples + 1));
      const auto sample = rest.first(std::min(kSampleBytes, rest.size()));
      digest.Add(sample.data(), sample.size());
    }
  }
  return digest.Hex();
}

// Names the kernels of this machine: those of other instruction sets round differently.
StatusOr<std::string> DescribeKernels() {
  ASSIGN_OR_RETURN(const runtime::CpuFeatures cpu, FeaturesOfHost());
  std::string names;
  for (const kernels::KernelChoice& choice : kernels::SelectKernels(cpu).choices) names += choice.name + " ";
  return fmt::format("{} (choices {})", runtime::IsaName(runtime::HostIsas(cpu).back()),
                     base::HexDigest(names));
}

// Checks that the layout divides the model. Returns the model and the settings that ranks must have in
// common.
StatusOr<std::string> CheckLayout(const checkpoint::Checkpoint& source, const ModelFlags& flags) {
  ASSIGN_OR_RETURN(const parallel::Layout layout, LayoutOf(flags.ranks));
  RETURN_IF_ERROR(models::CheckDivisible(source, flags.dtype, layout));
  std::string placement;
  if (layout.placement() != nullptr) {
    ASSIGN_OR_RETURN(placement,
                     parallel::PlacementBytes(*layout.placement(), parallel::PlacementFormat::kMoesaic));
  }
  const parallel::BatchSplitOptions& split = layout.batch_split();
  return fmt::format(
             "moesaic {}, dtype {}, KV {}, experts per token {}, speculative {}, config {}, weights {}, "
             "experts {}{}, replicas {} {} {} {}",
             MOESAIC_VERSION, flags.dtype, flags.kv_dtype, flags.experts_per_token, SpeculativeMethod(flags),
             base::HexDigest(source.config().dump()), DigestOfWeights(source), base::HexDigest(placement),
             layout.experts_move() ? ", moving" : "", split.exact ? "exact" : "shares", split.spill_bytes,
             split.spill_tolerance, fmt::join(layout.speeds(), ",")) +
         (layout.tolerates_failures() ? ", tolerating failures" : "");
}

// Returns a notice where a flag has no effect on the model; otherwise "".
StatusOr<std::string> NoticeOfExperts(const checkpoint::Checkpoint& source, const RankFlags& flags) {
  if (!flags.expert_parallel && flags.degrees.expert == 1) return "";
  ASSIGN_OR_RETURN(const models::DecoderSpec spec, models::SpecFromConfig(source.config(), source.path()));
  return spec.moe.experts > 0 ? "" : "expert parallelism has no effect on a model without routed experts\n";
}

// A rank other than 0: it computes until rank 0 ends the job. Signals concern rank 0, which ends it in good
// order.
Status ComputeForRank0(const ModelFlags& flags) {
  const InterruptGuard guard;
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(flags));
  return engine::RunRank(*session->model, session->kernels, *session->threads, flags.job->transport(),
                         flags.job->layout(), flags.job->time_limit_s(), flags.job->local_ranks());
}

}  // namespace

Status RunOnRanks(ModelFlags& flags, const VerbRun& verb) {
  std::string choice, fingerprint, kernels;
  if (flags.ranks.several() || comm::IsRankOfJob()) {
    ASSIGN_OR_RETURN(const std::unique_ptr<checkpoint::Checkpoint> source,
                     checkpoint::Checkpoint::Open(flags.model));
    if (flags.ranks.layout == "auto") {
      ASSIGN_OR_RETURN(choice, ChooseLayout(*source, flags));
    }
    if (flags.ranks.layers == "auto") {
      ASSIGN_OR_RETURN(choice, ChooseLayers(*source, flags));
    }
    ASSIGN_OR_RETURN(fingerprint, CheckLayout(*source, flags));
    ASSIGN_OR_RETURN(const std::string notice, NoticeOfExperts(*source, flags.ranks));
    choice += notice;
    ASSIGN_OR_RETURN(kernels, DescribeKernels());
  }
  ASSIGN_OR_RETURN(flags.job, RankJob::Start(flags.ranks, fingerprint, kernels));
  if (flags.job == nullptr || flags.job->rank() == 0) WriteNotice(choice);
  if (flags.job == nullptr) return verb();
  const int rank = flags.job->rank();
  const Status status =
      rank == 0 ? flags.job->End(Guarded(verb)) : Guarded([&flags] { return ComputeForRank0(flags); });
  if (!status.ok()) flags.job->Abandon(status);
  flags.job.reset();
  return status;
}

void UseRanks(const ModelFlags& flags, engine::EngineOptions* options) {
  if (flags.job == nullptr) return;
  options->job = &flags.job->transport();
  options->layout = flags.job->layout();
  options->rank_time_limit_s = flags.job->time_limit_s();
  options->local_ranks = flags.job->local_ranks();
  options->check_ranks = [job = flags.job.get()] {
    return Interrupted() ? Cancelled("interrupted") : job->Failure();
  };
  options->balance.interval_s = flags.ranks.rebalance_s;
  options->balance.least_gain = flags.ranks.rebalance_min_gain;
  options->balance.redundant = flags.ranks.redundant_experts;
  options->balance.workloads = flags.ranks.rebalance_workloads;
  options->balance.measured_speeds = flags.ranks.rank_speeds == "measured";
  options->balance.levels = flags.job->link_levels();
}

namespace {

void RecordExpertLoad(Session& session, const ModelFlags& flags, engine::EngineOptions* options) {
  if (session.model->info().experts == 0) return;
  options->expert_load.window_s = flags.expert_load_window;
  if (flags.expert_load_file.empty()) return;
  session.expert_load = std::make_unique<ExpertLoadFile>(flags.expert_load_file);
  options->expert_load.sink = [file = session.expert_load.get()](auto stats) {
    file->Write(std::move(stats));
  };
  options->expert_load.write_errors = [file = session.expert_load.get()] { return file->write_errors(); };
}

}  // namespace

Status StartEngine(Session& session, const ModelFlags& flags, engine::EngineOptions options) {
  options.kv_dtype = flags.kv_dtype;
  options.max_context = flags.context;
  options.speculative = flags.speculative;
  options.speculative.draft_model = session.draft_model.get();
  options.speculative.method = SpeculativeMethod(flags);
  ASSIGN_OR_RETURN(options.sparsity, flags.sparsity.Resolve());
  UseRanks(flags, &options);
  RecordExpertLoad(session, flags, &options);
  if (options.layout.tolerates_failures()) {
    options.on_excluded_rank = [job = flags.job.get()](int rank) { job->KillRank(rank); };
  }
  ASSIGN_OR_RETURN(session.engine,
                   engine::Engine::Create(*session.model, session.kernels, *session.threads, options));
  if (options.layout.tolerates_failures()) flags.job->TolerateFailures();
  const int context = flags.context > 0 ? flags.context : session.model->info().context_length;
  if (const int most = session.engine->max_context(); most < context) {
    Tell("requests have at most {} tokens: the KV cache does not hold the context of {}\n", most, context);
  }
  return OkStatus();
}

}  // namespace moesaic::app
