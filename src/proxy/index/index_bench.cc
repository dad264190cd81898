// Benchmarks the prefix index at the size of a large cluster: time of a match, block operations of one
// writer, and memory per block. A radix tree per instance (hash map per instance) is measured in the same
// run.
//   proxy_index_bench [--instances 1000] [--blocks 1000000] [--sharing 50]
#include <absl/container/flat_hash_set.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "base/check.h"
#include "proxy/index/block_index.h"
#include "proxy/index/keys.h"

namespace {

using namespace moesaic::proxy;
using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

uint64_t KeyOf(uint64_t prompt, uint64_t block) {
  uint64_t x = prompt * 0x9e3779b97f4a7c15ULL + block + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return (x ^ x >> 31) | 1;
}

struct Options {
  uint64_t instances = 1000;
  uint64_t blocks = 1'000'000;  // per instance
  uint64_t sharing = 50;        // instances that hold the same block
};

constexpr uint64_t kPromptBlocks = 6250;  // 100,000 tokens in blocks of 16

// Median and 99th percentile of the times of matching random prompts.
template <typename Match>
void MeasureMatch(const char* name, uint64_t prompts, Match match) {
  std::mt19937_64 random(5);
  std::vector<double> micros;
  std::vector<uint64_t> keys(kPromptBlocks);
  for (int i = 0; i < 200; ++i) {
    const uint64_t prompt = random() % prompts;
    for (uint64_t b = 0; b < kPromptBlocks; ++b) keys[b] = KeyOf(prompt, b);
    const auto start = Clock::now();
    match(keys);
    micros.push_back(Seconds(start) * 1e6);
  }
  std::sort(micros.begin(), micros.end());
  std::printf("%-44s median %7.1f us   p99 %7.1f us\n", name, micros[100], micros[198]);
}

void Run(const Options& o) {
  // Instances form groups; the instances of a group hold the same prompts.
  const uint64_t groups = std::max<uint64_t>(o.instances / o.sharing, 1);
  const uint64_t prompts_per_group = std::max<uint64_t>(o.blocks / kPromptBlocks, 1);
  const uint64_t prompts = groups * prompts_per_group, distinct = prompts * kPromptBlocks;
  ZoneOptions options;
  options.max_instances = static_cast<uint32_t>(o.instances);
  options.max_requests = 64;
  options.max_workers = 4;
  options.index_blocks = distinct + distinct / 16;
  options.engine_blocks = o.blocks;
  options.shared_blocks = o.sharing > 4 ? distinct + 16 : 16;
  const size_t bytes = Zone::Bytes(options);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MOESAIC_CHECK(memory != MAP_FAILED);
  madvise(memory, bytes, MADV_HUGEPAGE);
  const auto zone = Zone::Create(memory, bytes, options);
  MOESAIC_CHECK(zone.ok());
  BlockIndex index(*zone);
  std::printf("%lu instances x %lu blocks of 16 tokens, %lu distinct blocks, each on %lu instances\n",
              o.instances, prompts_per_group * kPromptBlocks, distinct, std::min(o.sharing, o.instances));
  uint64_t operations = 0;
  auto start = Clock::now();
  for (uint64_t instance = 0; instance < o.instances; ++instance) {
    for (uint64_t p = 0; p < prompts_per_group; ++p) {
      const uint64_t prompt = instance % groups * prompts_per_group + p;
      for (uint64_t b = 0; b < kPromptBlocks; ++b)
        index.Add(static_cast<int>(instance), Tier::kDevice, KeyOf(prompt, b));
      operations += kPromptBlocks;
    }
  }
  const double filling = Seconds(start);
  const IndexStats stats = index.Stats();
  const double table = static_cast<double>(stats.bytes) - static_cast<double>(o.blocks) * 29.1;
  std::printf(
      "fill: %.2f M block operations/s (one writer); memory %.1f bytes per distinct block, %.2f bytes per "
      "block "
      "and instance; %lu dropped\n",
      static_cast<double>(operations) / filling * 1e-6, table / static_cast<double>(stats.blocks),
      table / static_cast<double>(stats.memberships), stats.dropped);
  start = Clock::now();
  uint64_t churn = 0;
  for (uint64_t b = 0; b < 1'000'000; ++b, churn += 2) {  // one instance: evict and store
    const uint64_t key = KeyOf(b / kPromptBlocks % prompts_per_group, b % kPromptBlocks);
    index.Remove(0, Tier::kDevice, key);
    index.Add(0, Tier::kDevice, key);
  }
  std::printf("churn: %.2f M block operations/s (one writer)\n",
              static_cast<double>(churn) / Seconds(start) * 1e-6);
  MatchResult result;
  MeasureMatch("match of 100,000 tokens, all blocks known", prompts, [&](const std::vector<uint64_t>& keys) {
    index.Match(keys, result);
    MOESAIC_CHECK_EQ(result.longest, kPromptBlocks);
  });
  MeasureMatch("match of 100,000 tokens, nothing known", prompts, [&](std::vector<uint64_t>& keys) {
    keys[0] ^= 2;
    index.Match(keys, result);
  });
  const KeyMaker maker(*zone);
  std::vector<int32_t> tokens(kPromptBlocks * 16, 7);
  std::vector<uint64_t> made;
  MeasureMatch("keys of 100,000 tokens (once per request)", prompts, [&](const std::vector<uint64_t>&) {
    made.clear();
    maker.Append(tokens, {}, 16, made);
  });
  // The same for hash sets of one group's instances alone: what an index per instance has to do for each of
  // them.
  std::vector<absl::flat_hash_set<uint64_t>> sets(std::min<uint64_t>(o.sharing, 8));
  for (auto& set : sets) {
    set.reserve(prompts_per_group * kPromptBlocks);
    for (uint64_t p = 0; p < prompts_per_group; ++p) {
      for (uint64_t b = 0; b < kPromptBlocks; ++b) set.insert(KeyOf(p, b));
    }
  }
  char name[64];
  std::snprintf(name, sizeof name, "the same, a hash set per instance, %zu of %lu", sets.size(), o.instances);
  MeasureMatch(name, prompts_per_group, [&](const std::vector<uint64_t>& keys) {
    size_t sum = 0;
    for (const auto& set : sets) {
      size_t depth = 0;
      while (depth < keys.size() && set.contains(keys[depth])) ++depth;
      sum += depth;
    }
    MOESAIC_CHECK_EQ(sum, sets.size() * kPromptBlocks);
  });
  munmap(memory, bytes);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--instances") == 0) options.instances = value;
    if (std::strcmp(argv[i], "--blocks") == 0) options.blocks = value;
    if (std::strcmp(argv[i], "--sharing") == 0) options.sharing = value;
  }
  Run(options);
  return 0;
}
