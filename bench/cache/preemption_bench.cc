// Measures the cost of preemption: requests that outgrow the KV cache, with their blocks recomputed and with
// swap space, compared with a cache that holds all blocks.
//   cache_preemption_bench models/moesaic-tiny --requests 8 --prompt 600 --output 300
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <random>

#include "base/check.h"
#include "engine/engine.h"
#include "engine/kv_budget.h"

namespace moesaic::bench {
namespace {

struct Load {
  std::string model;
  int requests = 8, prompt = 600, output = 300;
  double share = 0.6;  // share of the blocks that all requests need
  int rounds = 3;
};

struct Result {
  double seconds = 0;
  engine::EngineStats stats;
};

Result Run(models::Model& model, runtime::ThreadPool& threads, const Load& load, double share, bool swap) {
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  const auto dtype = *engine::KvDType("auto", model.info());
  const int64_t block = engine::LayoutFor(model.info().kv, dtype, /*key_summaries=*/false).total_bytes();
  const int64_t blocks = int64_t{tensor::KvBlocksFor(load.prompt + load.output)} * load.requests;
  auto engine = *engine::Engine::Create(model, kernels, threads,
                                        {.kv_bytes = static_cast<int64_t>(share * blocks) * block,
                                         .swap_bytes = swap ? blocks * block : 0,
                                         .max_sequences = load.requests});
  std::mt19937 random(7);
  for (int i = 0; i < load.requests; ++i) {
    engine::Request request;
    for (int t = 0; t < load.prompt; ++t) {
      request.prompt.push_back(static_cast<int32_t>(random() % model.info().vocab_size));
    }
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    // Output lengths vary, as in real traffic.
    request.sampling.max_tokens = load.output / 2 + load.output * i / (2 * load.requests);
    MOESAIC_CHECK(engine->Add(std::move(request)).ok());
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<engine::TokenEvent> events;
  while (!engine->idle()) MOESAIC_CHECK(engine->Step(&events).ok());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return {took.count(), engine->stats()};
}

void Compare(const Load& load) {
  auto threads = *runtime::ThreadPool::Create({.threads = 0, .pin = true});
  auto model = *models::Model::Load(load.model, {.progress = nullptr}, *threads);
  std::vector<Result> results[3];
  for (int round = 0; round < load.rounds; ++round) {
    results[0].push_back(Run(*model, *threads, load, 1.5, false));
    results[1].push_back(Run(*model, *threads, load, load.share, false));
    results[2].push_back(Run(*model, *threads, load, load.share, true));
  }
  const char* names[] = {"room for all", "computed again", "swapped"};
  for (int i = 0; i < 3; ++i) {
    std::sort(results[i].begin(), results[i].end(),
              [](const Result& a, const Result& b) { return a.seconds < b.seconds; });
    const Result& median = results[i][results[i].size() / 2];
    fmt::print("{:15} {:7.2f} s ({:.2f} - {:.2f})  {:3} preemptions, {:4} blocks out, {:4} in\n", names[i],
               median.seconds, results[i].front().seconds, results[i].back().seconds,
               median.stats.preemptions, median.stats.swapped_out, median.stats.swapped_in);
  }
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) {
  CLI::App app("Preemption by recomputation and by swap");
  moesaic::bench::Load load;
  app.add_option("model", load.model, "Folder, .gguf or packed file")->required();
  app.add_option("--requests", load.requests, "At once")->capture_default_str();
  app.add_option("--prompt", load.prompt, "Tokens of each")->capture_default_str();
  app.add_option("--output", load.output, "Tokens of the longest answer")->capture_default_str();
  app.add_option("--share", load.share, "Of the blocks they need, the cache has this")->capture_default_str();
  app.add_option("--rounds", load.rounds, "Median of so many")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::warn);  // the engine logs each preemption
  moesaic::bench::Compare(load);
}
