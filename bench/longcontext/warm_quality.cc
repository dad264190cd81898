// Measures the quality loss of prefixes that are restored from int8. Reads windows of a text once with the
// prefix as computed and once as the warm tier restores it, and compares the rows after the prefix: the
// perplexity of both, and the divergence of the second's distributions. Prints a markdown table, with the
// time of saving and restoring.
//   moesaic tokenize MODEL --file TEXT --ids > ids
//   longcontext_warm_quality MODEL ids --window 2048 --windows 8
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <memory>
#include <numeric>
#include <vector>

#include "cache/warm_codec.h"
#include "engine/kv_budget.h"
#include "engine/local_executor.h"
#include "kernels/kernel_table.h"
#include "models/model.h"

namespace moesaic::bench {
namespace {

constexpr int kChunk = 256;  // rows per step

struct Options {
  std::string model, ids;
  int window = 2048, windows = 8, threads = 0;
  std::vector<std::string> dtypes = {"bf16", "f32"};
};

// Returns the log-probabilities of a row.
std::vector<double> LogSoftmax(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - most);
  std::vector<double> logs(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) logs[i] = logits[i] - most - std::log(sum);
  return logs;
}

struct Totals {
  double exact = 0, warm = 0;  // nats
  std::vector<double> divergence;
  int64_t same = 0;  // rows with the same likeliest token
  double encode_seconds = 0, decode_seconds = 0, bytes = 0;
};

class Reader {
 public:
  Reader(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
         const std::string& dtype, int window)
      : model_(model),
        threads_(threads),
        layout_(engine::LayoutFor(model.info().kv, *engine::KvDType(dtype, model.info()), false)),
        store_(*cache::KvStore::Create({.layout = layout_, .blocks = tensor::KvBlocksFor(window)}, threads)),
        codec_(layout_, /*exact=*/false),
        executor_(model, kernels, threads, *store_, 0),
        table_(tensor::KvBlocksFor(window)) {
    std::iota(table_.begin(), table_.end(), 0);
  }

  // Returns the logits of rows [from, to), whose predecessors are cached.
  std::vector<float> Read(std::span<const int32_t> ids, int from, int to, bool want) {
    std::vector<float> logits;
    for (int start = from; start < to; start += kChunk) {
      const int count = std::min(kChunk, to - start);
      engine::StepBatch batch;
      batch.AddRows({.start = start, .first_logits = want ? 0 : count}, ids.subspan(start, count), {},
                    table_);
      const auto got = executor_.Run(batch);
      if (!got.ok()) throw std::runtime_error(Message(got.status()));
      logits.insert(logits.end(), got->logits.begin(), got->logits.end());
    }
    return logits;
  }

  void Window(std::span<const int32_t> ids, Totals& totals) {
    const int prefix = static_cast<int>(ids.size()) / 2 / tensor::kKvBlockTokens * tensor::kKvBlockTokens;
    const auto end = static_cast<int>(ids.size()) - 1;
    Read(ids, 0, prefix, false);
    const std::vector<float> exact = Read(ids, prefix, end, true);
    RoundTrip(prefix / tensor::kKvBlockTokens, totals);
    const std::vector<float> warm = Read(ids, prefix, end, true);
    const size_t vocabulary = model_.info().vocab_size;
    for (int row = prefix; row < end; ++row) {
      const size_t at = (row - prefix) * vocabulary;
      const std::vector<double> a = LogSoftmax(std::span(exact).subspan(at, vocabulary));
      const std::vector<double> b = LogSoftmax(std::span(warm).subspan(at, vocabulary));
      totals.exact -= a[ids[row + 1]];
      totals.warm -= b[ids[row + 1]];
      double divergence = 0;
      for (size_t i = 0; i < vocabulary; ++i) divergence += std::exp(a[i]) * (a[i] - b[i]);
      totals.divergence.push_back(divergence);
      totals.same += std::max_element(a.begin(), a.end()) - a.begin() ==
                     std::max_element(b.begin(), b.end()) - b.begin();
    }
  }

 private:
  void RoundTrip(int count, Totals& totals) {
    const int layers = layout_.layers;
    std::vector<std::byte> coded(codec_.block_bytes() * count);
    const auto timed = [&](const auto& work) {
      const auto start = std::chrono::steady_clock::now();
      threads_.Run(int64_t{count} * layers, [&](int64_t task, int) {
        work(store_->ViewOf(table_[task / layers]), static_cast<int>(task % layers),
             coded.data() + task / layers * codec_.block_bytes());
      });
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    totals.encode_seconds += timed([&](const tensor::KvBlockView& block, int layer, std::byte* to) {
      if (!codec_.IsFinite(block, layer)) throw std::runtime_error("not finite");
      codec_.Encode(block, layer, to);
    });
    totals.decode_seconds += timed([&](const tensor::KvBlockView& block, int layer, std::byte* from) {
      codec_.Decode(from, layer, block);
    });
    totals.bytes += static_cast<double>(layout_.block_bytes()) * count;
  }

  models::Model& model_;
  runtime::ThreadPool& threads_;
  const tensor::KvLayout layout_;
  std::unique_ptr<cache::KvStore> store_;
  const cache::WarmCodec codec_;
  engine::LocalExecutor executor_;
  std::vector<int32_t> table_;
};

int Run(const Options& options) {
  const kernels::KernelTable table = kernels::SelectKernels(runtime::DetectCpu());
  const auto threads = *runtime::ThreadPool::Create({.threads = options.threads, .pin = true});
  auto model = models::Model::Load(options.model, {}, *threads);
  if (!model.ok()) throw std::runtime_error(Message(model.status()));
  std::ifstream file(options.ids);
  std::vector<int32_t> ids;
  for (int32_t id; file >> id;) ids.push_back(id);
  fmt::print(
      "| cache | bytes of it | rows | perplexity | warm | ratio | KL mean (p99), nats | same likeliest | "
      "kept | "
      "brought back |\n|---|---|---|---|---|---|---|---|---|---|\n");
  for (const std::string& dtype : options.dtypes) {
    Reader reader(**model, table, *threads, dtype, options.window);
    Totals totals;
    for (int i = 0; i < options.windows && (i + 1) * options.window <= std::ssize(ids); ++i) {
      reader.Window(std::span(ids).subspan(i * options.window, options.window), totals);
    }
    auto rows = static_cast<double>(totals.divergence.size());
    if (rows == 0) throw std::runtime_error(options.ids + ": fewer ids than one window");
    std::sort(totals.divergence.begin(), totals.divergence.end());
    double mean = 0;
    for (const double divergence : totals.divergence) mean += divergence / rows;
    const tensor::KvLayout layout =
        engine::LayoutFor((*model)->info().kv, *engine::KvDType(dtype, (*model)->info()), false);
    fmt::print(
        "| {} | {:.2f} | {:.0f} | {:.4f} | {:.4f} | {:.5f} | {:.2e} ({:.2e}) | {:.2f}% | {:.2f} GB/s | "
        "{:.2f} GB/s |\n",
        dtype,
        static_cast<double>(cache::WarmCodec(layout, false).block_bytes()) /
            static_cast<double>(layout.block_bytes()),
        rows, std::exp(totals.exact / rows), std::exp(totals.warm / rows),
        std::exp((totals.warm - totals.exact) / rows), mean,
        totals.divergence[static_cast<size_t>(0.99 * (rows - 1))],
        100.0 * static_cast<double>(totals.same) / rows, totals.bytes / totals.encode_seconds / 1e9,
        totals.bytes / totals.decode_seconds / 1e9);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) {
  CLI::App app("Measures the loss of a prefix that came back from int8");
  moesaic::bench::Options options;
  app.add_option("MODEL", options.model)->required()->check(CLI::ExistingPath);
  app.add_option("IDS", options.ids, "Token ids, separated by white space")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--window", options.window, "Tokens, of which the first half is the prefix")
      ->check(CLI::Range(128, 1 << 20))
      ->capture_default_str();
  app.add_option("--windows", options.windows)->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--threads", options.threads)->capture_default_str();
  app.add_option("--kv-dtype", options.dtypes, "Types of the cache")->delimiter(',')->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    return moesaic::bench::Run(options);
  } catch (const std::runtime_error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
