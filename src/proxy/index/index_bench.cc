// Benchmarks the prefix index at the size of a large cluster: time of a match, block operations of one writer
// and memory per block. An index per instance is measured in the same run: a hash set and a radix tree.
//   proxy_index_bench [--instances 1000] [--blocks 1000000] [--sharing 50] [--writers 1]
// With several numbers, such as --instances 10,100,1000, a table at the end has the results of all of them.
#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "proxy/events/kv_decode.h"
#include "proxy/events/kv_encode.h"
#include "proxy/index/block_index.h"
#include "proxy/index/index_writer.h"
#include "proxy/index/keys.h"

namespace {

using namespace moesaic::proxy;
using Clock = std::chrono::steady_clock;
using Keys = std::vector<uint64_t>;

constexpr uint64_t kBlock = 16;
constexpr uint64_t kPromptBlocks = 6250;  // 100,000 tokens
constexpr size_t kEventBlocks = 512;      // of a prefill step of 8,192 tokens

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

// Processor time of this thread: other load of the machine does not change the rate of a writer.
double ThreadSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

uint64_t KeyOf(uint64_t prompt, uint64_t block) {
  uint64_t x = prompt * 0x9e3779b97f4a7c15ULL + block + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return (x ^ x >> 31) | 1;
}

void KeysOf(uint64_t prompt, Keys& keys) {
  keys.resize(kPromptBlocks);
  for (uint64_t b = 0; b < kPromptBlocks; ++b) keys[b] = KeyOf(prompt, b);
}

struct Options {
  std::vector<uint64_t> instances = {1000};  // one run for each
  uint64_t blocks = 1'000'000;               // per instance
  uint64_t sharing = 50;                     // instances that hold the same block
  uint64_t writers = 1;                      // threads that fill the index, each for instances of its own
};

// Instances form groups; the instances of a group hold the same prompts.
struct Cluster {
  Cluster(const Options& o, uint64_t num_instances)
      : instances(num_instances),
        groups(std::max<uint64_t>(instances / o.sharing, 1)),
        holders((instances + groups - 1) / groups),
        prompts_per_group(std::max<uint64_t>(o.blocks / kPromptBlocks, 1)),
        prompts(groups * prompts_per_group) {}
  uint64_t PromptOf(uint64_t instance, uint64_t i) const { return instance % groups * prompts_per_group + i; }
  uint64_t instances, groups;
  uint64_t holders;  // most instances that hold one block
  uint64_t prompts_per_group, prompts;
};

// Results of one number of instances, for the table.
struct Summary {
  uint64_t instances, holders;
  double bytes_per_block, known_us, depths_us;
};

// Median and 99th percentile of the times of matching random prompts.
template <typename Match>
double MeasureMatch(const char* name, uint64_t prompts, Match match) {
  std::mt19937_64 random(5);
  std::vector<double> micros;
  Keys keys;
  for (int i = 0; i < 200; ++i) {
    KeysOf(random() % prompts, keys);
    const auto start = Clock::now();
    match(keys);
    micros.push_back(Seconds(start) * 1e6);
  }
  std::sort(micros.begin(), micros.end());
  std::printf("%-58s median %8.1f us   p99 %8.1f us\n", name, micros[100], micros[198]);
  return micros[100];
}

void Rate(const char* name, uint64_t operations, double seconds) {
  std::printf("%-58s %6.2f M block operations/s\n", name, static_cast<double>(operations) / seconds * 1e-6);
}

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    memory_ =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MOESAIC_CHECK(memory_ != MAP_FAILED);
    madvise(memory_, bytes, MADV_HUGEPAGE);
  }
  ~Memory() { munmap(memory_, bytes_); }
  void* get() const { return memory_; }

 private:
  void* memory_;
  size_t bytes_;
};

void Fill(BlockIndex& index, const Cluster& cluster, uint64_t writers) {
  std::vector<double> seconds(writers);
  std::vector<std::thread> threads;
  for (uint64_t w = 0; w < writers; ++w) {
    threads.emplace_back([&, w] {
      Keys keys;
      for (uint64_t instance = w; instance < cluster.instances; instance += writers) {
        for (uint64_t i = 0; i < cluster.prompts_per_group; ++i) {
          KeysOf(cluster.PromptOf(instance, i), keys);
          const double start = ThreadSeconds();
          for (size_t at = 0; at < keys.size(); at += kEventBlocks)
            index.Add(static_cast<int>(instance), Tier::kDevice,
                      std::span(keys).subspan(at, std::min(kEventBlocks, keys.size() - at)));
          seconds[w] += ThreadSeconds() - start;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  char name[80];
  std::snprintf(name, sizeof name, "add, 512 blocks an event, each of %lu writers", writers);
  Rate(name, cluster.instances * cluster.prompts_per_group * kPromptBlocks / writers,
       *std::max_element(seconds.begin(), seconds.end()));
}

// One instance evicts and stores prompts.
void Churn(BlockIndex& index, const Cluster& cluster, size_t event_blocks, const char* name) {
  Keys keys;
  uint64_t operations = 0;
  double seconds = 0;
  for (uint64_t i = 0; i < 80; ++i) {
    KeysOf(cluster.PromptOf(0, i % cluster.prompts_per_group), keys);
    const double start = ThreadSeconds();
    for (size_t at = 0; at < keys.size(); at += event_blocks) {
      const auto part = std::span(keys).subspan(at, std::min(event_blocks, keys.size() - at));
      index.Remove(0, Tier::kDevice, part);
      index.Add(0, Tier::kDevice, part);
    }
    seconds += ThreadSeconds() - start;
    operations += 2 * keys.size();
  }
  Rate(name, operations, seconds);
}

// All of a writer's work: MessagePack, block keys, engine hashes and the index. Stores, then removes.
void WriteEvents(const Zone& zone, BlockIndex& index, int instance, uint64_t blocks) {
  const size_t events = blocks / kEventBlocks;
  std::vector<std::string> stores, removes;
  for (size_t e = 0; e < events; ++e) {
    KvEvent event;
    event.type = KvEvent::Type::kStored;
    event.block_size = kBlock;
    event.medium = "GPU";
    for (size_t b = 0; b < kEventBlocks; ++b)
      event.block_hashes.push_back(KeyOf(1 << 30, e * kEventBlocks + b));
    for (size_t t = 0; t < kEventBlocks * kBlock; ++t)
      event.tokens.push_back(static_cast<int32_t>(KeyOf(e, t) % 150'000));
    if (e % 12 != 0) event.parent = KeyOf(1 << 30, e * kEventBlocks - 1);
    KvEvent removed;
    removed.type = KvEvent::Type::kRemoved;
    removed.medium = "GPU";
    removed.block_hashes = event.block_hashes;
    stores.push_back(EncodeKvBatch({.time = 1, .events = {event}, .dp_rank = 0}, KvEncoding::kMap));
    removes.push_back(EncodeKvBatch({.time = 1, .events = {removed}, .dp_rank = 0}, KvEncoding::kMap));
  }
  IndexWriter writer(State(zone), index, instance);
  uint64_t sequence = 0;
  for (const auto& [name, messages] : {std::pair("events: decode, hash and store", &stores),
                                       std::pair("events: decode and remove", &removes)}) {
    const double start = ThreadSeconds();
    for (const std::string& message : *messages) {
      const auto batch = DecodeKvBatch(message);
      MOESAIC_CHECK(batch.ok());
      MOESAIC_CHECK(writer.Apply(sequence++, *batch).applied);
    }
    Rate(name, events * kEventBlocks, ThreadSeconds() - start);
  }
  MOESAIC_CHECK_EQ(writer.stats().stored, events * kEventBlocks);
  MOESAIC_CHECK_EQ(writer.stats().removed, events * kEventBlocks);
}

// A radix tree of tokens with compressed edges, as SGLang's RadixCache is, for one instance.
class RadixTree {
 public:
  void Insert(std::span<const int32_t> tokens) {
    Node* node = &root_;
    while (!tokens.empty()) {
      auto& child = node->children[tokens[0]];
      if (child == nullptr) {
        child = std::make_unique<Node>();
        child->edge.assign(tokens.begin(), tokens.end());
        return;
      }
      const size_t common = Common(child->edge, tokens);
      if (common < child->edge.size()) {  // split
        auto upper = std::make_unique<Node>();
        upper->edge.assign(child->edge.begin(), child->edge.begin() + static_cast<ptrdiff_t>(common));
        child->edge.erase(child->edge.begin(), child->edge.begin() + static_cast<ptrdiff_t>(common));
        const int32_t first = child->edge[0];
        upper->children[first] = std::move(child);
        child = std::move(upper);
      }
      node = child.get();
      tokens = tokens.subspan(common);
    }
  }
  size_t Match(std::span<const int32_t> tokens) const {
    const Node* node = &root_;
    size_t depth = 0;
    for (;;) {
      const auto it = depth < tokens.size() ? node->children.find(tokens[depth]) : node->children.end();
      if (it == node->children.end()) return depth;
      const size_t common = Common(it->second->edge, tokens.subspan(depth));
      depth += common;
      if (common < it->second->edge.size()) return depth;
      node = it->second.get();
    }
  }

 private:
  struct Node {
    std::vector<int32_t> edge;
    absl::flat_hash_map<int32_t, std::unique_ptr<Node>> children;
  };
  static size_t Common(std::span<const int32_t> a, std::span<const int32_t> b) {
    const size_t size = std::min(a.size(), b.size());
    return static_cast<size_t>(
        std::mismatch(a.begin(), a.begin() + static_cast<ptrdiff_t>(size), b.begin()).first - a.begin());
  }
  Node root_;
};

// An index per instance answers for each instance of its own: `sample` of those that hold the prompt.
void MeasurePeers(const Cluster& cluster) {
  const size_t sample = std::min<uint64_t>(cluster.holders, 8);
  std::vector<absl::flat_hash_set<uint64_t>> sets(sample);
  std::vector<RadixTree> trees(sample);
  Keys keys;
  std::vector<int32_t> tokens(kPromptBlocks * kBlock);
  const auto tokens_of = [&] {
    for (size_t t = 0; t < tokens.size(); ++t)
      tokens[t] = static_cast<int32_t>((keys[t / kBlock] >> (t % kBlock)) & 0x7fffffff);
  };
  for (uint64_t i = 0; i < cluster.prompts_per_group; ++i) {
    KeysOf(i, keys);
    tokens_of();
    for (auto& set : sets) set.insert(keys.begin(), keys.end());
    for (auto& tree : trees) tree.Insert(tokens);
  }
  char name[80];
  std::snprintf(name, sizeof name, "a hash set per instance, %zu of %lu", sample, cluster.instances);
  MeasureMatch(name, cluster.prompts_per_group, [&](const Keys& prompt) {
    for (const auto& set : sets) {
      size_t depth = 0;
      while (depth < prompt.size() && set.contains(prompt[depth])) ++depth;
      MOESAIC_CHECK_EQ(depth, kPromptBlocks);
    }
  });
  std::mt19937_64 random(5);
  std::vector<double> micros;
  for (int i = 0; i < 100; ++i) {
    KeysOf(random() % cluster.prompts_per_group, keys);
    tokens_of();
    const auto start = Clock::now();
    for (const RadixTree& tree : trees) MOESAIC_CHECK_EQ(tree.Match(tokens), tokens.size());
    micros.push_back(Seconds(start) * 1e6);
  }
  std::sort(micros.begin(), micros.end());
  std::snprintf(name, sizeof name, "a radix tree per instance, %zu of %lu", sample, cluster.instances);
  std::printf("%-58s median %8.1f us   p99 %8.1f us\n", name, micros[50], micros[98]);
}

// The removal of an instance's blocks, in slices as the proxy does it.
void MeasureClear(BlockIndex& index, int instance) {
  constexpr size_t kSlice = 1 << 14;
  const auto begin = Clock::now();
  index.Clear(instance);
  const double hidden = Seconds(begin);
  std::vector<double> slices;
  for (bool more = true; more;) {
    const auto start = Clock::now();
    more = index.Sweep(kSlice);
    slices.push_back(Seconds(start));
  }
  std::sort(slices.begin(), slices.end());
  const double total = std::accumulate(slices.begin(), slices.end(), 0.0);
  std::printf(
      "clear an instance: hidden in %.1f us, removed in %zu slices of %.2f ms (median; p99 %.2f), %.0f ms\n",
      hidden * 1e6, slices.size(), slices[slices.size() / 2] * 1e3, slices[slices.size() * 99 / 100] * 1e3,
      total * 1e3);
}

Summary Run(const Options& o, uint64_t instances) {
  const Cluster cluster(o, instances);
  const uint64_t distinct = cluster.prompts * kPromptBlocks;
  constexpr uint64_t kEngineBlocks = 1'000'000;  // hashes of one instance are enough for one writer
  ZoneOptions options;
  options.max_instances = static_cast<uint32_t>(instances);
  options.max_requests = 64;
  options.max_workers = 4;
  options.index_blocks = distinct + distinct / 20 + kEngineBlocks;
  options.engine_blocks = kEngineBlocks;
  const bool shared = cluster.holders > 4;  // the blocks need bit sets
  options.shared_blocks = shared ? distinct + 16 : 16;
  const Memory memory(Zone::Bytes(options));
  const auto zone = Zone::Create(memory.get(), Zone::Bytes(options), options);
  MOESAIC_CHECK(zone.ok());
  BlockIndex index(*zone);
  State state(*zone);
  std::vector<InstanceConfig> configs(instances);
  for (uint64_t i = 0; i < instances; ++i) configs[i].url = "http://" + std::to_string(i);
  MOESAIC_CHECK(state.Configure(configs, 1).ok());
  std::printf("%lu instances x %lu blocks of 16 tokens, %lu distinct blocks, each on %lu instances\n",
              instances, cluster.prompts_per_group * kPromptBlocks, distinct, cluster.holders);
  Fill(index, cluster, o.writers);
  const IndexStats stats = index.Stats();
  // The key table at its load of 0.55, and the planes of the bit sets that are in use.
  const double words = static_cast<double>((instances + kSpareNumbers + 63) / 64);
  const double sets = shared ? words * 8 + 4 : 0, bytes = 16 / 0.55 + sets;
  std::printf(
      "memory: %.1f bytes per distinct block, %.2f per block and instance; %.1f for each engine hash; %lu "
      "dropped\n",
      bytes, bytes * static_cast<double>(stats.blocks) / static_cast<double>(stats.memberships), 16 / 0.55,
      stats.dropped);
  Churn(index, cluster, kEventBlocks, "evict and store, 512 blocks an event");
  Churn(index, cluster, 1, "evict and store, 1 block an event");
  WriteEvents(*zone, index, 0, 500'000);
  MatchResult result;
  uint32_t shortest = ~0U;  // blocks that found no room cut a match
  const double known_us =
      MeasureMatch("match of 100,000 tokens, all blocks known", cluster.prompts, [&](const Keys& keys) {
        index.Match(keys, result);
        shortest = std::min(shortest, result.longest);
      });
  std::printf("the shortest of these matches has %u of %lu blocks, on %zu instances\n", shortest,
              kPromptBlocks, result.matches.size());
  // The instances of a group evicted prompt 0 from its end on, each to another depth.
  Keys evicted;
  KeysOf(0, evicted);
  uint64_t holders = 0;
  for (uint64_t instance = 0; instance < instances; instance += cluster.groups, ++holders)
    index.Remove(static_cast<int>(instance), Tier::kDevice,
                 std::span(evicted).subspan((holders * 7919 + 1) % kPromptBlocks));
  char name[80];
  std::snprintf(name, sizeof name, "match of 100,000 tokens, %lu instances to %lu depths", holders, holders);
  const double depths_us = MeasureMatch(name, 1, [&](const Keys& keys) { index.Match(keys, result); });
  MeasureMatch("match of 100,000 tokens, nothing known", cluster.prompts, [&](Keys& keys) {
    keys[0] ^= 2;
    index.Match(keys, result);
  });
  const KeyMaker maker(*zone);
  std::vector<int32_t> tokens(kPromptBlocks * kBlock, 7);
  Keys made;
  MeasureMatch("keys of 100,000 tokens (once per request)", cluster.prompts, [&](const Keys&) {
    made.clear();
    maker.Append(tokens, {}, kBlock, made);
  });
  MeasureClear(index, 0);
  MeasurePeers(cluster);
  return {instances, cluster.holders, bytes, known_us, depths_us};
}

void PrintTable(const std::vector<Summary>& rows) {
  std::printf(
      "\n| instances | that hold a block | bytes per distinct block | match, us | match, a depth each, us |\n"
      "|---:|---:|---:|---:|---:|\n");
  for (const Summary& row : rows)
    std::printf("| %lu | %lu | %.1f | %.1f | %.1f |\n", row.instances, row.holders, row.bytes_per_block,
                row.known_us, row.depths_us);
}

// Reads a list such as "10,100,1000".
std::vector<uint64_t> Numbers(const char* text) {
  std::vector<uint64_t> numbers;
  for (const char* at = text;; ++at) {
    char* end = nullptr;
    numbers.push_back(std::strtoull(at, &end, 10));
    MOESAIC_CHECK(end != at && numbers.back() >= 1 && numbers.back() <= uint64_t{kMaxInstances});
    if (*end != ',') return numbers;
    at = end;
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--instances") == 0) options.instances = Numbers(argv[i + 1]);
    if (std::strcmp(argv[i], "--blocks") == 0) options.blocks = value;
    if (std::strcmp(argv[i], "--sharing") == 0) options.sharing = value;
    if (std::strcmp(argv[i], "--writers") == 0) options.writers = std::max<uint64_t>(value, 1);
  }
  std::vector<Summary> rows;
  for (const uint64_t instances : options.instances) rows.push_back(Run(options, instances));
  if (rows.size() > 1) PrintTable(rows);
  return 0;
}
