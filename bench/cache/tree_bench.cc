// Compares the radix tree's operations with a chain of hashes over the same prompts. Argument `runs`: number
// of runs into which other prompts split the prompt. sglang_radix.py runs the same on SGLang's tree.
#include <benchmark/benchmark.h>

#include <chrono>
#include <functional>
#include <random>

#include "cache/radix_tree.h"
#include "hash_chain.h"

namespace moesaic::bench {
namespace {

using tensor::kKvBlockTokens;

constexpr int kPromptTokens = 100'000;
constexpr int kPromptBlocks = kPromptTokens / kKvBlockTokens;

std::vector<int32_t> RandomTokens(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 150'000);
  return tokens;
}

struct Tree {
  explicit Tree(int blocks) : pool(blocks), tree(pool, cache::MakeCostAwarePolicy(8000, blocks), nullptr) {}

  void Serve(std::span<const int32_t> tokens) {
    cache::PrefixMatch match = tree.Find("", tokens);
    tree.Use(match.blocks);
    std::vector<cache::BlockRef> blocks = std::move(match.blocks);
    match = {};
    const int known = static_cast<int>(blocks.size());
    const int wanted = static_cast<int>(tokens.size()) / kKvBlockTokens;
    if (const int missing = wanted - known - pool.free_blocks(); missing > 0) tree.Evict(missing);
    while (static_cast<int>(blocks.size()) < wanted) blocks.push_back(*pool.Allocate());
    tree.Insert("", tokens.first(static_cast<size_t>(wanted) * kKvBlockTokens), blocks, known);
  }

  cache::BlockPool pool;
  cache::RadixTree tree;
};

// Returns a prompt that diverges from `prompt` after `cut` of its `runs` parts.
std::vector<int32_t> Parting(const std::vector<int32_t>& prompt, int cut, int runs) {
  std::vector<int32_t> other(prompt.begin(),
                             prompt.begin() + int64_t{kPromptBlocks} * cut / runs * kKvBlockTokens);
  other.resize(other.size() + kKvBlockTokens, 1);
  return other;
}

// Inserts 32 other prompts of the same length, and prompts that diverge from `prompt` so that it is split
// into `runs`.
void Fill(const std::vector<int32_t>& prompt, int runs,
          const std::function<void(std::span<const int32_t>)>& serve) {
  for (uint32_t seed = 1; seed <= 32; ++seed) serve(RandomTokens(kPromptTokens, seed));
  serve(prompt);
  for (int cut = 1; cut < runs; ++cut) serve(Parting(prompt, cut, runs));
}

void BM_TreeMatch(benchmark::State& state) {
  Tree tree(40 * kPromptBlocks);
  const std::vector<int32_t> prompt = RandomTokens(kPromptTokens, 0);
  Fill(prompt, static_cast<int>(state.range(0)), [&](auto tokens) { tree.Serve(tokens); });
  size_t found = 0;
  for (auto _ : state) found += tree.tree.Find("", prompt).blocks.size();
  if (found != static_cast<size_t>(state.iterations()) * kPromptBlocks)
    state.SkipWithError("the prompt was not found");
  state.counters["blocks/s"] = benchmark::Counter(static_cast<double>(found), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_TreeMatch)->ArgName("runs")->Arg(1)->Arg(16)->Arg(195)->Arg(1562)->Unit(benchmark::kMicrosecond);

// The same if at every split the other branch was used last, which is the most expensive case.
void BM_TreeMatchOtherLast(benchmark::State& state) {
  Tree tree(40 * kPromptBlocks);
  const std::vector<int32_t> prompt = RandomTokens(kPromptTokens, 0);
  const auto runs = static_cast<int>(state.range(0));
  Fill(prompt, runs, [&](auto tokens) { tree.Serve(tokens); });
  for (int cut = runs - 1; cut > 0; --cut) tree.Serve(Parting(prompt, cut, runs));
  size_t found = 0;
  for (auto _ : state) found += tree.tree.Find("", prompt).blocks.size();
  if (found != static_cast<size_t>(state.iterations()) * kPromptBlocks)
    state.SkipWithError("the prompt was not found");
  state.counters["blocks/s"] = benchmark::Counter(static_cast<double>(found), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_TreeMatchOtherLast)->ArgName("runs")->Arg(195)->Arg(1562)->Unit(benchmark::kMicrosecond);

void BM_ChainMatch(benchmark::State& state) {
  HashChain chain;
  const std::vector<int32_t> prompt = RandomTokens(kPromptTokens, 0);
  Fill(prompt, 1, [&](auto tokens) { chain.Insert(tokens); });
  int64_t found = 0;
  for (auto _ : state) found += chain.Match(prompt);
  state.counters["blocks/s"] = benchmark::Counter(static_cast<double>(found), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_ChainMatch)->Unit(benchmark::kMicrosecond);

// Each round inserts a new prompt of 4,096 tokens into a full cache.
constexpr int kTurnTokens = 4096;
constexpr int kTurns = 400;  // number of prompts in the cycle; the cache holds a quarter of them

void BM_TreeInsertEvict(benchmark::State& state) {
  Tree tree(kTurns / 4 * kTurnTokens / kKvBlockTokens);
  std::vector<std::vector<int32_t>> turns;
  for (uint32_t seed = 0; seed < kTurns; ++seed) turns.push_back(RandomTokens(kTurnTokens, seed));
  size_t next = 0;
  double longest = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    tree.Serve(turns[next++ % kTurns]);
    longest =
        std::max(longest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  state.counters["blocks/s"] = benchmark::Counter(
      static_cast<double>(state.iterations() * kTurnTokens / kKvBlockTokens), benchmark::Counter::kIsRate);
  state.counters["longest_us"] = longest * 1e6;
}
BENCHMARK(BM_TreeInsertEvict)->Unit(benchmark::kMicrosecond);

void BM_ChainInsertEvict(benchmark::State& state) {
  HashChain chain;
  std::vector<std::vector<int32_t>> turns;
  for (uint32_t seed = 0; seed < kTurns; ++seed) turns.push_back(RandomTokens(kTurnTokens, seed));
  size_t next = 0;
  for (; next < kTurns / 4; ++next) chain.Insert(turns[next]);
  for (auto _ : state) {
    const std::vector<int32_t>& turn = turns[next++ % kTurns];
    chain.Evict(kTurnTokens / kKvBlockTokens - chain.Match(turn));
    chain.Insert(turn);
  }
  state.counters["blocks/s"] = benchmark::Counter(
      static_cast<double>(state.iterations() * kTurnTokens / kKvBlockTokens), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_ChainInsertEvict)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace moesaic::bench
