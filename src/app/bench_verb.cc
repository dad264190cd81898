// `moesaic bench MODEL` measures tokens per second of prefill and decode, and the share of memory bandwidth
// that decode uses.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "app/bench_run.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/sparsity_flags.h"
#include "app/table.h"
#include "app/verb.h"
#include "runtime/probe.h"

namespace moesaic::app {
namespace {

struct BenchFlags {
  ModelFlags model;
  std::vector<int> prompts = {512};
  std::vector<int> generates = {128};
  std::vector<int> depths = {0};
  std::vector<int> sequences = {1};
  std::vector<int> batches = {512};
  std::vector<int> threads = {0};
  int repetitions = 5;
  std::string output = "md";
};

struct Line {
  BenchCase test;
  int threads = 0;
  BenchResult result;
  double bytes_per_token = 0;  // bytes per decoded token of all sequences; 0: prefill
  double bandwidth_share = 0;  // share of the read bandwidth of all threads
};

std::vector<BenchCase> CasesOf(const BenchFlags& options) {
  std::vector<BenchCase> cases;
  for (const int depth : options.depths) {
    for (const int sequences : options.sequences) {
      for (const int prompt : options.prompts) {
        for (const int batch : options.batches) {
          if (prompt > 0) {
            cases.push_back(
                {.prompt = prompt, .generate = 0, .depth = depth, .sequences = sequences, .batch = batch});
          }
        }
      }
      for (const int generate : options.generates) {
        if (generate > 0) {
          cases.push_back({.prompt = 0,
                           .generate = generate,
                           .depth = depth,
                           .sequences = sequences,
                           .batch = options.batches[0]});
        }
      }
    }
  }
  return cases;
}

std::string TestName(const BenchCase& test) {
  std::string name = test.prompt > 0 ? fmt::format("pp{}", test.prompt) : fmt::format("tg{}", test.generate);
  if (test.depth > 0) name += fmt::format(" @ d{}", test.depth);
  return name;
}

std::vector<std::string> Header(bool for_people) {
  if (for_people) {
    return {"model", "weights", "size", "params", "active",    "threads",
            "seqs",  "batch",   "test", "t/s",    "MiB/token", "of read BW"};
  }
  return {"model",     "weights",         "weight_bytes",   "parameters", "active_parameters",
          "threads",   "sequences",       "batch",          "test",       "tokens_per_s",
          "deviation", "bytes_per_token", "bandwidth_share"};
}

std::vector<std::string> ForPeople(const models::ModelInfo& info, const Line& line) {
  const bool known = line.bytes_per_token > 0;
  return {info.model_type,
          info.weight_format,
          FormatBytes(static_cast<double>(info.weight_bytes)),
          FormatCount(static_cast<double>(info.parameters)),
          FormatCount(static_cast<double>(info.active_parameters)),
          std::to_string(line.threads),
          std::to_string(line.test.sequences),
          line.test.prompt > 0 ? std::to_string(line.test.batch) : "-",
          TestName(line.test),
          fmt::format("{:.2f} ± {:.2f}", line.result.median(), line.result.deviation()),
          known ? fmt::format("{:.1f}", line.bytes_per_token / (1 << 20)) : "-",
          known ? fmt::format("{:.0f}%", 100 * line.bandwidth_share) : "-"};
}

std::vector<std::string> ForMachines(const models::ModelInfo& info, const Line& line) {
  return {info.model_type,
          info.weight_format,
          std::to_string(info.weight_bytes),
          std::to_string(info.parameters),
          std::to_string(info.active_parameters),
          std::to_string(line.threads),
          std::to_string(line.test.sequences),
          std::to_string(line.test.batch),
          TestName(line.test),
          fmt::format("{:.4f}", line.result.median()),
          fmt::format("{:.4f}", line.result.deviation()),
          fmt::format("{:.0f}", line.bytes_per_token),
          fmt::format("{:.4f}", line.bandwidth_share)};
}

nlohmann::json AsJson(const BenchFlags& options, const models::ModelInfo& info, const Line& line) {
  const parallel::Layout layout =
      options.model.job == nullptr ? parallel::Layout() : options.model.job->layout();
  return {{"layout", Name(layout.degrees())},
          {"ranks", layout.ranks()},
          {"model", info.model_type},
          {"architecture", info.architecture},
          {"weights", info.weight_format},
          {"weight_bytes", info.weight_bytes},
          {"parameters", info.parameters},
          {"active_parameters", info.active_parameters},
          {"threads", line.threads},
          {"sequences", line.test.sequences},
          {"batch", line.test.batch},
          {"prompt", line.test.prompt},
          {"generate", line.test.generate},
          {"depth", line.test.depth},
          {"test", TestName(line.test)},
          {"tokens_per_s", line.result.median()},
          {"deviation", line.result.deviation()},
          {"samples", line.result.tokens_per_second},
          {"bytes_per_token", line.bytes_per_token},
          {"bandwidth_share", line.bandwidth_share}};
}

void PrintAll(const BenchFlags& options, const models::ModelInfo& info, const std::vector<Line>& lines) {
  if (options.output == "json") {
    nlohmann::json all = nlohmann::json::array();
    for (const Line& line : lines) all.push_back(AsJson(options, info, line));
    Print("{}\n", all.dump(1));
  } else if (options.output == "csv") {
    Print("{}\n", fmt::join(Header(false), ","));
    for (const Line& line : lines) Print("{}\n", fmt::join(ForMachines(info, line), ","));
  } else {
    std::vector<std::vector<std::string>> rows = {Header(true)};
    for (const Line& line : lines) rows.push_back(ForPeople(info, line));
    WriteOutput(FormatTable(rows, /*markdown=*/true));
  }
}

// One thread count of --threads.
struct Threads {
  std::unique_ptr<runtime::ThreadPool> pool;
  TunedKernels kernels;
};

StatusOr<std::vector<Threads>> MakeAllThreads(const BenchFlags& options) {
  std::vector<Threads> all;
  for (const int count : options.threads) {
    Threads threads;
    ASSIGN_OR_RETURN(threads.pool, MakeThreads(count));
    ASSIGN_OR_RETURN(threads.kernels, KernelsFor(threads.pool->size(), options.model.tuning));
    all.push_back(std::move(threads));
  }
  return all;
}

Status RunWithThreads(const BenchFlags& options, Session& session, const Threads& run, int done,
                      std::vector<Line>* lines) {
  const std::vector<BenchCase> cases = CasesOf(options);
  runtime::ThreadPool& threads = *run.pool;
  ASSIGN_OR_RETURN(const runtime::ReadBandwidth bandwidth,
                   runtime::MeasureReadBandwidth(&threads, runtime::ProbeBytes(threads.size())));
  Tell("{} threads read {:.1f} GB/s; kernels {}\n", threads.size(), bandwidth.all_threads / 1e9,
       run.kernels.tuning);
  ASSIGN_OR_RETURN(const engine::SparsityOptions sparsity, options.model.sparsity.Resolve());
  engine::EngineOptions executor = {.kv_dtype = options.model.kv_dtype, .sparsity = sparsity};
  UseRanks(options.model, &executor);
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchRunner> runner,
                   BenchRunner::Create(*session.model, run.kernels.table, threads, executor, cases));
  Progress progress("measuring");
  const auto total = static_cast<int64_t>(cases.size() * options.threads.size());
  for (const BenchCase& test : cases) {
    progress.Show(done++, total, TestName(test));
    Line line = {.test = test, .threads = threads.size(), .result = {}};
    ASSIGN_OR_RETURN(line.result, runner->Run(test, options.repetitions));
    if (test.generate > 0) {
      const int depth = test.depth + test.generate / 2;
      line.bytes_per_token = runner->StepBytes(line.result, test.sequences, depth) / test.sequences;
      line.bandwidth_share = line.bytes_per_token * line.result.median() / bandwidth.all_threads;
    }
    lines->push_back(std::move(line));
  }
  return OkStatus();
}

Status RunBench(const BenchFlags& options) {
  InterruptGuard guard;
  ASSIGN_OR_RETURN(const std::vector<Threads> runs, MakeAllThreads(options));
  ModelFlags model = options.model;
  model.tuning = false;  // each thread count has its own tuning
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(model));
  const models::ModelInfo& info = session->model->info();
  RETURN_IF_ERROR(BenchRunner::Check(CasesOf(options), info));
  Tell("{}: {}, loaded in {:.2f} s\n", options.model.model, DescribeWeights(info), session->load_seconds);
  if (options.model.job != nullptr) {
    Tell("{}; weights and threads are those of rank 0\n", options.model.job->Describe());
  }
  std::vector<Line> lines;
  for (const Threads& run : runs) {
    RETURN_IF_ERROR(RunWithThreads(options, *session, run, static_cast<int>(lines.size()), &lines));
  }
  PrintAll(options, info, lines);
  return OkStatus();
}

}  // namespace

void AddBench(Verb& root, VerbRun& run) {
  auto options = std::make_shared<BenchFlags>();
  Verb verb = root.AddVerb("bench", "Measure prefill and decode speed");
  AddModelFlags(verb, options->model, /*answers=*/false);
  verb.Remove("--threads");
  verb.Remove("--record-expert-load");  // its tokens are random
  verb.Remove("--expert-load-window");
  const auto list = [verb](const std::string& name, std::vector<int>& values, int low, int high,
                           const std::string& help) {
    verb.AddOption(name, values, help).Delimiter(',').OneValue().Range(low, high).ShowDefault();
  };
  list("-p,--prompt-tokens", options->prompts, 0, 1 << 24,
       "Comma-separated prompt lengths to prefill, in tokens; 0: none");
  list("-n,--gen-tokens", options->generates, 0, 1 << 24,
       "Comma-separated numbers of tokens to decode; 0: none");
  list("-d,--depth", options->depths, 0, 1 << 24, "Comma-separated numbers of cached tokens before the test");
  list("-s,--sequences", options->sequences, 1, 1 << 16,
       "Comma-separated numbers of concurrently decoded sequences, of each data parallel replica");
  list("-b,--batch", options->batches, 1, 1 << 20, "Comma-separated token counts of one prefill step");
  list("-t,--threads", options->threads, 0, 1024, "Comma-separated thread counts; 0: one thread per core");
  AddKvDtypeFlag(verb, options->model.kv_dtype);
  AddSparsityFlags(verb, options->model.sparsity, {"off", "decode", "all"}, /*audits=*/false);
  verb.AddOption("-r,--repetitions", options->repetitions,
                 "Number of timed repetitions of each test, after an untimed one")
      .Range(1, 10000)
      .ShowDefault();
  verb.AddOption("-o,--output", options->output, "Output format: md, json or csv")
      .OneOf({"md", "json", "csv"})
      .ShowDefault();
  verb.Footer(
      "Every combination of the lists is run, on random tokens. t/s is the median of the repetitions and\n"
      "their standard deviation. MiB/token is the memory that a decode step reads (weights and cached\n"
      "keys and values), divided by its sequences. A routed expert counts once if several sequences use\n"
      "it. The last column is the resulting rate as a share of the read bandwidth,\n"
      "which is measured first.\n\n"
      "Examples:\n"
      "  moesaic bench model.moesaic -p 128,512 -n 64 -t 8,16\n"
      "  moesaic bench model.gguf -p 0 -n 32 -d 0,4096 -s 1,8 -o json");
  verb.OnParsed([options, &run] {
    if (CasesOf(*options).empty()) FailUsage("-p 0 and -n 0 measure nothing");
    if (options->model.ranks.several()) {
      if (options->threads.size() > 1) FailUsage("--threads", "takes one number with several ranks");
      options->model.threads = options->threads.front();  // of each rank
    }
    run = [options] { return RunOnRanks(options->model, [options] { return RunBench(*options); }); };
  });
}

}  // namespace moesaic::app
