// Measures attention of one layer's decode step with a long context, all with the same kernels:
// - dense;
// - over gathered rows of given tokens (the usual method), without the cost of choosing them;
// - over gathered rows of tokens that are scored by their own keys first, which is needed without a trained
//   indexer ("-" if there is no kernel: it needs bf16 products and keys);
// - over chosen blocks, including the choice;
// - over blocks that an earlier step chose.
// Each round also measures the machine's bandwidth and peak, because other load may vary; ratios and shares
// are within a round. Prints a markdown table.
//   longcontext_attention_bench --context 16384 --budget 2048
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/block_sparsity.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_layer.h"
#include "kernels/probe.h"
#include "kernels/sketch.h"
#include "runtime/probe.h"
#include "token_scores.h"

namespace moesaic::bench {
namespace {

using kernels::AttentionParams;
using kernels::kScoreGroup;
using kernels::KvLayer;
using kernels::SequenceSlice;
using tensor::DType;
using tensor::kKvBlockTokens;

struct Shape {
  const char* flag;
  const char* name;
  int heads, kv_heads, key_dim, value_dim;
  bool shared;
};
constexpr Shape kShapes[] = {{"gqa", "Qwen3-30B-A3B (GQA, 32 heads, 4 KV, 128)", 32, 4, 128, 128, false},
                             {"mla", "DeepSeek-V3 (MLA, 128 heads, 512 + 64)", 128, 1, 576, 512, true}};

constexpr float kScale = 0.1F;
constexpr int kStepsOfRound = 16;  // for one sequence; fewer steps would be dominated by noise
constexpr int kShift = 8;          // maximum shift of the given tokens per step

struct Options {
  int context = 16384, budget = 2048, threads = 0, rounds = 15, reuse = 4;
  std::vector<int> batches = {1, 4, 16};
  std::vector<std::string> shapes = {"gqa", "mla"};
  std::string dtype = "bf16", summary_kind = "box";
  int64_t bytes = int64_t{2} << 30;  // of keys and values; a layer leaves the CPU caches before its next use
};

class Setting {
 public:
  Setting(const kernels::ExecContext& ctx, const Shape& shape, const Options& options, int batch)
      : ctx_(ctx), shape_(shape), options_(options), batch_(batch) {
    const DType dtype = options.dtype == "int8" ? DType::kI8 : DType::kBF16;
    blocks_ = (options.context + kKvBlockTokens - 1) / kKvBlockTokens;
    layer_ = kernels::LayOutKv(dtype, shape.kv_heads, shape.key_dim, shape.value_dim, shape.shared,
                               options.summary_kind == "sketch");
    summary_bytes_ = shape.kv_heads * kernels::KeySummaryBytes(layer_);
    token_bytes_ = static_cast<double>(layer_.block_stride) / kKvBlockTokens;
    layer_bytes_ = (layer_.block_stride + layer_.key_summary_stride) * blocks_ * batch;
    layers_ = static_cast<int>(std::max<int64_t>(2, options.bytes / layer_bytes_));
    memory_ = *runtime::Buffer::Allocate(layer_bytes_ * layers_, /*huge=*/true);
    Fill();
    gathered_ = *runtime::Buffer::Allocate(layer_.block_stride * GatheredBlocks() * batch, /*huge=*/true);
    std::memset(gathered_.data(), 0, gathered_.size());
    lists_.resize(size_t(batch) * shape.kv_heads * GatheredBlocks() * kKvBlockTokens);
    if (FindsTokens()) MakeRoomForScores();
    q_.resize(size_t(batch) * shape.heads * shape.key_dim);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& x : q_) x = uniform(random_);
    out_.resize(size_t(batch) * shape.heads * shape.value_dim);
    kept_.assign(batch, kernels::KeptChoices(layers_, shape.kv_heads, 2));
    each_.assign(batch, {.settings = {.budget_blocks = GatheredBlocks()}});
    for (kernels::KeptChoices& kept : kept_) {
      taken_over_.push_back(
          {.settings = {.budget_blocks = GatheredBlocks(), .reuse = options.reuse}, .kept = &kept});
    }
    chooser_ = taken_over_.front().settings.ChooserOf(options.context - 1);
    for (int i = 0; i < layers_; ++i) Attend(table_, blocks_, chooser_ + 1, NextLayer(), taken_over_);
  }

  void Dense() { Attend(table_, blocks_, options_.context, NextLayer(), {}); }
  void BlockSparse() { Attend(table_, blocks_, options_.context, NextLayer(), each_); }
  // Row after the one that chose the blocks.
  void BlocksTakenOver() { Attend(table_, blocks_, chooser_ + 2, NextLayer(), taken_over_); }

  void ReadLayer() { runtime::ReadOnce(ctx_.pool, {NextLayer().base, static_cast<size_t>(layer_bytes_)}); }
  int64_t layer_bytes() const { return layer_bytes_; }

  // Changes the given tokens in each step.
  void GiveTokens() {
    const int shift = step_ % 7;
    for (size_t i = 0; i < lists_.size(); ++i) lists_[i] = tokens_[i % tokens_.size()] + shift;
  }
  void TokenSparse() { AttendGathered(NextLayer()); }

  // True if tokens can be scored at a competitive speed.
  bool FindsTokens() const { return CanScoreTokens(layer_.dtype, layer_.key_dim); }
  // Scores each token by the group's mean share of the softmax, as blocks are scored, and takes the best
  // ones.
  void TokenSparseChosen() {
    const KvLayer layer = NextLayer();
    ScoreAllTokens(layer);
    ChooseTokens();
    AttendGathered(layer);
  }

  double dense_bytes() const { return token_bytes_ * options_.context * batch_; }
  double sparse_bytes() const {
    return (token_bytes_ * GatheredBlocks() * kKvBlockTokens +
            static_cast<double>(summary_bytes_) * (blocks_ - 1)) *
           batch_;
  }
  double dense_operations() const { return Operations(options_.context); }
  double sparse_operations() const {
    return Operations(GatheredBlocks() * kKvBlockTokens) +
           4.0 * batch_ * blocks_ * shape_.heads * shape_.key_dim;
  }

 private:
  int GatheredBlocks() const { return options_.budget / kKvBlockTokens; }

  // Copies the rows of the chosen tokens into blocks and attends to these.
  void AttendGathered(const KvLayer& from) {
    const int count = GatheredBlocks() * kKvBlockTokens;
    const int64_t key = tensor::BytesOf(from.dtype, from.key_dim),
                  value = tensor::BytesOf(from.dtype, from.value_dim);
    ctx_.pool->Run(int64_t{batch_} * GatheredBlocks() * from.heads, [&](int64_t task, int) {
      const int64_t b = task / (GatheredBlocks() * from.heads), block = task / from.heads % GatheredBlocks();
      const int64_t head = task % from.heads;
      const int32_t* list = &lists_[(b * from.heads + head) * count];
      std::byte* to = gathered_.data() + (b * GatheredBlocks() + block) * from.block_stride;
      for (int slot = 0; slot < kKvBlockTokens; ++slot) {
        const int token = list[block * kKvBlockTokens + slot];
        const std::byte* at = from.base + table_[b * blocks_ + token / kKvBlockTokens] * from.block_stride;
        const int from_slot = token % kKvBlockTokens;
        const std::byte* keys = at + head * from.head_stride();
        std::byte* to_keys = to + head * from.head_stride();
        std::memcpy(to_keys + slot * key, keys + from_slot * key, key);
        if (!from.shared) {
          std::memcpy(to_keys + from.value_offset() + slot * value,
                      keys + from.value_offset() + from_slot * value, value);
        }
        if (from.dtype != DType::kI8) continue;
        const int64_t row = head * kKvBlockTokens + from_slot, to_row = head * kKvBlockTokens + slot;
        for (const int64_t scales : {int64_t{0}, int64_t{from.heads} * kKvBlockTokens}) {
          std::memcpy(to + from.scale_offset() + (scales + to_row) * 4,
                      at + from.scale_offset() + (scales + row) * 4, 4);
        }
      }
    });
    KvLayer packed = from;
    packed.base = gathered_.data();
    std::vector<int32_t> order(size_t(batch_) * GatheredBlocks());
    std::iota(order.begin(), order.end(), 0);
    Attend(order, GatheredBlocks(), count, packed, {});
  }

  void MakeRoomForScores() {
    const int64_t pairs = int64_t{batch_} * shape_.kv_heads;
    scores_ = *runtime::Buffer::Allocate(
        pairs * Groups() * blocks_ * kKvBlockTokens * kScoreGroup * int64_t{sizeof(float)}, /*huge=*/true);
    std::memset(scores_.data(), 0, scores_.size());
    packed_ = *runtime::Buffer::Allocate(PackedBytes() * pairs, /*huge=*/true);
    shares_.resize(size_t(pairs) * Groups() * options_.context);
    ranks_.resize(size_t(pairs) * options_.context);
    best_.resize(ranks_.size());
  }

  int Groups() const { return (shape_.heads / shape_.kv_heads + kScoreGroup - 1) / kScoreGroup; }
  float* ScoresOf(int64_t pair, int group) {
    return scores_.as<float>() + (pair * Groups() + group) * blocks_ * kKvBlockTokens * kScoreGroup;
  }

  // Arguments for a group of a KV head's queries.
  TokenScores ScoreCall(const KvLayer& layer, int64_t pair, int g) {
    const int group = shape_.heads / shape_.kv_heads;
    return {.keys = nullptr,
            .stride = tensor::BytesOf(layer.dtype, layer.key_dim),
            .key_dim = layer.key_dim,
            .q = &q_[(pair * group + g * kScoreGroup) * layer.key_dim],
            .scale = kScale,
            .rows = std::min(group - g * kScoreGroup, kScoreGroup),
            .packed = packed_.data() + pair * PackedBytes() + int64_t{g} * layer.key_dim * 2 * kScoreGroup,
            .scores = nullptr};
  }

  void ScoreAllTokens(const KvLayer& layer) {
    constexpr int kTaskBlocks = 16;
    const int parts = (blocks_ + kTaskBlocks - 1) / kTaskBlocks;
    ctx_.pool->Run(int64_t{batch_} * layer.heads * Groups(), [&](int64_t task, int) {
      PackTokenQueries(ScoreCall(layer, task / Groups(), static_cast<int>(task % Groups())));
    });
    ctx_.pool->Run(int64_t{batch_} * layer.heads * parts, [&](int64_t task, int) {
      const int64_t pair = task / parts, b = pair / layer.heads, head = pair % layer.heads;
      const auto first = static_cast<int>(task % parts) * kTaskBlocks;
      for (int block = first; block < std::min(blocks_, first + kTaskBlocks); ++block) {
        const std::byte* at = layer.base + table_[b * blocks_ + block] * layer.block_stride;
        for (int g = 0; g < Groups(); ++g) {
          TokenScores call = ScoreCall(layer, pair, g);
          call.keys = at + head * layer.head_stride();
          call.scores = ScoresOf(pair, g) + int64_t{block} * kKvBlockTokens * kScoreGroup;
          ScoreTokens(call);
        }
      }
    });
  }

  // Returns the first token of a part of a pair. Parts keep all workers busy if there are few pairs. Parts of
  // less than twice the budget would hardly exclude any tokens.
  int FirstOf(int part) const { return static_cast<int>(int64_t{options_.context} * part / Parts()); }
  int Parts() const {
    const int pairs = batch_ * shape_.kv_heads;
    const int most = options_.context / (2 * GatheredBlocks() * kKvBlockTokens);
    return std::clamp((ctx_.pool->size() + pairs - 1) / pairs, 1, std::max(most, 1));
  }
  float* SharesOf(int64_t pair, int group) {
    return &shares_[(pair * Groups() + group) * int64_t{options_.context}];
  }

  // Takes the tokens of all pairs with the largest sums of shares, in their order: the best of each part,
  // then the best of these.
  void ChooseTokens() {
    const int64_t pairs = int64_t{batch_} * shape_.kv_heads;
    const int group = shape_.heads / shape_.kv_heads;
    ctx_.pool->Run(pairs * Groups(), [&](int64_t task, int) {
      const int64_t pair = task / Groups();
      const auto g = static_cast<int>(task % Groups());
      ctx_.kernels->block_shares(ScoresOf(pair, g), std::min(group - g * kScoreGroup, kScoreGroup),
                                 options_.context, SharesOf(pair, g));
    });
    ctx_.pool->Run(pairs * Parts(),
                   [&](int64_t task, int) { RankTokens(task / Parts(), static_cast<int>(task % Parts())); });
    ctx_.pool->Run(pairs, [&](int64_t pair, int) { TakeBest(pair); });
  }

  // Moves the part's best to the front of its range of best_.
  void RankTokens(int64_t pair, int part) {
    const int first = FirstOf(part), end = FirstOf(part + 1), count = GatheredBlocks() * kKvBlockTokens;
    float* sum = SharesOf(pair, 0);
    for (int g = 1; g < Groups(); ++g) {
      const float* more = SharesOf(pair, g);
      for (int i = first; i < end; ++i) sum[i] += more[i];
    }
    // Positive floats are ordered like their bits, and integers compare without a branch.
    uint64_t* ranks = &ranks_[pair * options_.context];
    uint64_t* best = &best_[pair * options_.context];
    for (int i = first; i < end; ++i) {
      ranks[i] = best[i] = uint64_t{std::bit_cast<uint32_t>(sum[i])} << 32U | static_cast<uint32_t>(i);
    }
    if (end - first > count) {
      std::nth_element(best + first, best + first + count - 1, best + end, std::greater<>());
    }
  }

  void TakeBest(int64_t pair) {
    const int count = GatheredBlocks() * kKvBlockTokens;
    const uint64_t* ranks = &ranks_[pair * options_.context];
    uint64_t* best = &best_[pair * options_.context];
    int kept = std::min(FirstOf(1), count);
    for (int part = 1; part < Parts(); ++part) {
      const int some = std::min(FirstOf(part + 1) - FirstOf(part), count);
      std::memmove(best + kept, best + FirstOf(part), some * sizeof(*best));
      kept += some;
    }
    if (Parts() > 1) std::nth_element(best, best + count - 1, best + kept, std::greater<>());
    const uint64_t least = best[count - 1];
    int32_t* list = &lists_[pair * count];
    for (int i = 0; i < options_.context; ++i) {
      if (ranks[i] >= least) *list++ = i;
    }
  }

  int64_t PackedBytes() const { return int64_t{Groups()} * shape_.key_dim * 2 * kScoreGroup; }

  double Operations(int keys) const {
    return 2.0 * batch_ * keys * shape_.heads * (shape_.key_dim + shape_.value_dim);
  }
  KvLayer NextLayer() {
    KvLayer layer = layer_;
    layer.index = step_++ % layers_;
    layer.base = memory_.data() + layer.index * layer_bytes_;
    layer.key_summaries = layer.base + layer_.block_stride * blocks_ * batch_;
    return layer;
  }

  // Fills with small numbers of both signs in any type, including int8's scales: the bits 0x3c00 .. 0x3cff
  // and their negatives.
  void Fill() {
    for (size_t i = 0; i < memory_.size() / 2; ++i) {
      memory_.as<uint16_t>()[i] =
          static_cast<uint16_t>(0x3c00U | (static_cast<uint32_t>(random_()) & 0x80ffU));
    }
    table_.resize(size_t(blocks_) * batch_);
    std::iota(table_.begin(), table_.end(), 0);
    const SequenceSlice all = {table_.data(), 0, blocks_ * batch_ * kKvBlockTokens, 0};
    for (int i = 0; i < layers_; ++i) kernels::BuildKeySummaries(ctx_, {NextLayer(), {&all, 1}});
    std::shuffle(table_.begin(), table_.end(), random_);
    tokens_.resize(options_.context - kShift);
    std::iota(tokens_.begin(), tokens_.end(), 0);
    std::shuffle(tokens_.begin(), tokens_.end(), random_);
    tokens_.resize(GatheredBlocks() * kKvBlockTokens);
    std::sort(tokens_.begin(), tokens_.end());
  }

  void Attend(const std::vector<int32_t>& table, int blocks, int context, const KvLayer& layer,
              std::span<const kernels::RowSparsity> sparsity) {
    std::vector<SequenceSlice> slices;
    for (int b = 0; b < batch_; ++b) {
      slices.push_back(
          {&table[size_t(b) * blocks], context - 1, 1, b, sparsity.empty() ? nullptr : &sparsity[b]});
    }
    kernels::SparseAttention(ctx_, {.cache = layer,
                                    .q = q_.data(),
                                    .q_stride = int64_t{shape_.heads} * shape_.key_dim,
                                    .out = out_.data(),
                                    .out_stride = int64_t{shape_.heads} * shape_.value_dim,
                                    .heads = shape_.heads,
                                    .scale = kScale,
                                    .sequences = slices});
  }

  const kernels::ExecContext& ctx_;
  const Shape shape_;
  const Options& options_;
  const int batch_;
  int blocks_ = 0;
  KvLayer layer_;
  double token_bytes_ = 0;
  int64_t summary_bytes_ = 0, layer_bytes_ = 0;
  int layers_ = 0, step_ = 0;
  runtime::Buffer memory_, gathered_;
  runtime::Buffer scores_;              // [batch][KV heads][groups][tokens][kScoreGroup]
  runtime::Buffer packed_;              // [batch][KV heads][groups]
  std::vector<float> shares_;           // [batch][KV heads][groups][context]
  std::vector<uint64_t> ranks_, best_;  // [batch][KV heads][context]: bits of a share, token
  std::vector<int32_t> table_, tokens_;
  std::vector<int32_t> lists_;  // [batch][KV heads][budget] tokens
  std::vector<float> q_, out_;
  std::vector<kernels::RowSparsity> each_, taken_over_;  // [batch]
  std::vector<kernels::KeptChoices> kept_;
  int chooser_ = 0;  // position
  std::mt19937 random_{1};
};

// Seconds of one round, and the machine's rates during it.
struct Round {
  double bandwidth, peak;  // bytes and operations per second
  double dense, tokens, gathered, blocks, taken_over;
};

// Returns the mean time of these steps.
double Time(int steps, const std::function<void()>& step) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / steps;
}

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

// Formats the median over rounds with its spread.
template <typename F>
std::string Ratio(const std::vector<Round>& rounds, const F& ratio) {
  std::vector<double> all;
  for (const Round& round : rounds) all.push_back(ratio(round));
  return fmt::format("{:.2f} ({:.2f}-{:.2f})", Quantile(all, 0.5), Quantile(all, 0.1), Quantile(all, 0.9));
}
template <typename F>
std::string Milliseconds(const std::vector<Round>& rounds, const F& seconds) {
  return Ratio(rounds, [&](const Round& round) { return 1e3 * seconds(round); });
}

double PeakOf(const runtime::CpuFeatures& cpu, runtime::ThreadPool* pool) {
  for (const kernels::DotPeak& dot : kernels::MeasureDotPeaks(cpu, pool)) {
    if (dot.format == tensor::PackedFormat::kBF16) return dot.all_threads;
  }
  return 0;
}

Round Measure(const runtime::CpuFeatures& cpu, runtime::ThreadPool* pool, int batch, Setting* setting) {
  const int steps = std::max(1, kStepsOfRound / batch);
  Round round{};
  round.peak = PeakOf(cpu, pool);
  round.bandwidth = static_cast<double>(setting->layer_bytes()) / Time(steps, [&] { setting->ReadLayer(); });
  round.dense = Time(steps, [&] { setting->Dense(); });
  round.blocks = Time(steps, [&] { setting->BlockSparse(); });
  round.taken_over = Time(steps, [&] { setting->BlocksTakenOver(); });
  if (setting->FindsTokens()) round.tokens = Time(steps, [&] { setting->TokenSparseChosen(); });
  setting->GiveTokens();
  round.gathered = Time(steps, [&] { setting->TokenSparse(); });
  return round;
}

int Run(const Options& options) {
  if (options.budget > options.context - kShift) {
    fmt::print(stderr, "--budget {} is more than --context {} less {}: there is nothing to choose\n",
               options.budget, options.context, kShift);
    return 1;
  }
  const runtime::CpuFeatures cpu = runtime::DetectCpu();
  const kernels::KernelTable table = kernels::SelectKernels(cpu);
  const auto pool = *runtime::ThreadPool::Create({.threads = options.threads, .pin = true});
  runtime::Arena scratch;
  const kernels::ExecContext ctx = {.kernels = &table, .pool = pool.get(), .scratch = &scratch};
  const double bandwidth = runtime::MeasureReadBandwidth(pool.get(), int64_t{512} << 20)->all_threads;
  const double peak = PeakOf(cpu, pool.get());
  fmt::print(
      "{} threads, {:.1f} GB/s read, {:.0f} GFLOP/s bf16; context {}, budget {} chosen by {}, {} keys and "
      "values, {:.1f} GB of them in turn; medians of {} rounds (p10-p90), ms\n\n",
      pool->size(), bandwidth / 1e9, peak / 1e9, options.context, options.budget, options.summary_kind,
      options.dtype, static_cast<double>(options.bytes) / 1e9, options.rounds);
  fmt::print(
      "| shape | batch | dense | of bound | chosen tokens | gathering alone | chosen blocks | of bound | "
      "dense / blocks | bound of that | chosen tokens / blocks | gathering / blocks | taken over | "
      "dense / blocks, chosen for {} |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
      options.reuse);
  for (const Shape& shape : kShapes) {
    if (std::ranges::find(options.shapes, shape.flag) == options.shapes.end()) continue;
    for (const int batch : options.batches) {
      Setting setting(ctx, shape, options, batch);
      std::vector<Round> rounds;
      for (int i = -1; i < options.rounds; ++i) {
        const Round round = Measure(cpu, pool.get(), batch, &setting);
        if (i >= 0) rounds.push_back(round);
      }
      // The bound is the longer of memory and products.
      const auto dense_bound = [&](const Round& r) {
        return std::max(setting.dense_bytes() / r.bandwidth, setting.dense_operations() / r.peak);
      };
      const auto sparse_bound = [&](const Round& r) {
        return std::max(setting.sparse_bytes() / r.bandwidth, setting.sparse_operations() / r.peak);
      };
      const bool finds = setting.FindsTokens();
      fmt::print("| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", shape.name,
                 batch, Milliseconds(rounds, [](const Round& r) { return r.dense; }),
                 Ratio(rounds, [&](const Round& r) { return dense_bound(r) / r.dense; }),
                 finds ? Milliseconds(rounds, [](const Round& r) { return r.tokens; }) : "-",
                 Milliseconds(rounds, [](const Round& r) { return r.gathered; }),
                 Milliseconds(rounds, [](const Round& r) { return r.blocks; }),
                 Ratio(rounds, [&](const Round& r) { return sparse_bound(r) / r.blocks; }),
                 Ratio(rounds, [](const Round& r) { return r.dense / r.blocks; }),
                 Ratio(rounds, [&](const Round& r) { return dense_bound(r) / sparse_bound(r); }),
                 finds ? Ratio(rounds, [](const Round& r) { return r.tokens / r.blocks; }) : "-",
                 Ratio(rounds, [](const Round& r) { return r.gathered / r.blocks; }),
                 Milliseconds(rounds, [](const Round& r) { return r.taken_over; }),
                 Ratio(rounds, [&](const Round& r) {
                   return r.dense * options.reuse / (r.blocks + r.taken_over * (options.reuse - 1));
                 }));
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) {
  CLI::App app(
      "Attention of one layer's decode step: dense, over tokens that are found and gathered, over given "
      "tokens, over chosen blocks, over those of an earlier step");
  moesaic::bench::Options options;
  app.add_option("--context", options.context)->check(CLI::Range(1024, 1 << 20))->capture_default_str();
  app.add_option("--budget", options.budget)->check(CLI::Range(256, 1 << 20))->capture_default_str();
  app.add_option("--batch", options.batches)->delimiter(',')->capture_default_str();
  app.add_option("--shape", options.shapes)
      ->delimiter(',')
      ->check(CLI::IsMember({"gqa", "mla"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads)->capture_default_str();
  app.add_option("--reuse", options.reuse, "Steps that read what the first of them chose")
      ->check(CLI::IsMember({2, 4, 8, 16, 32, 64}))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--summary", options.summary_kind, "Kind of key summary: box or sketch")
      ->check(CLI::IsMember({"box", "sketch"}))
      ->capture_default_str();
  app.add_option("--kv-dtype", options.dtype)->check(CLI::IsMember({"bf16", "int8"}))->capture_default_str();
  app.add_option("--bytes", options.bytes, "Keys and values, gone through in turn")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return moesaic::bench::Run(options);
}
