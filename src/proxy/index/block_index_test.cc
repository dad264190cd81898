#include "proxy/index/block_index.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "proxy/index/key_table.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

// The plainest index: tiers by instance and key. Keys are small numbers.
class PlainIndex {
 public:
  PlainIndex(int instances, size_t keys)
      : tiers_(static_cast<size_t>(instances), std::vector<uint32_t>(keys)) {}
  void Add(int instance, Tier tier, uint64_t key) {
    uint32_t& tiers = tiers_[instance][key];
    if (tier == Tier::kSpeculative && (tiers & TierBit(Tier::kDevice)) != 0) return;
    if (tier == Tier::kDevice) tiers &= ~TierBit(Tier::kSpeculative);
    tiers |= TierBit(tier);
  }
  void Remove(int instance, Tier tier, uint64_t key) { tiers_[instance][key] &= ~TierBit(tier); }
  void Clear(int instance) { std::fill(tiers_[instance].begin(), tiers_[instance].end(), 0); }
  uint32_t Match(const std::vector<uint64_t>& keys, int instance, uint32_t wanted) const {
    uint32_t depth = 0;
    while (depth < keys.size() && (tiers_[instance][keys[depth]] & wanted) != 0) ++depth;
    return depth;
  }

 private:
  std::vector<std::vector<uint32_t>> tiers_;
};

void SweepAll(BlockIndex& index) {
  while (index.Sweep(1000)) {
  }
}

// All instances have been cleared.
void ExpectEmptyAfterSweep(BlockIndex& index) {
  SweepAll(index);
  const IndexStats stats = index.Stats();
  EXPECT_EQ(stats.blocks, 0U);
  EXPECT_EQ(stats.memberships, 0U);
  EXPECT_EQ(stats.shared_blocks, 0U);
}

class BlockIndexTest : public testing::TestWithParam<int> {};

// Blocks come with their parents and leave with their children, in each tier, as in the caches of engines.
TEST_P(BlockIndexTest, AgreesWithAPlainIndex) {
  const int instances = GetParam();
  ZoneOptions options = {
      .max_instances = static_cast<uint32_t>(instances), .max_requests = 8, .max_workers = 2};
  options.index_blocks = 1 << 13;
  options.engine_blocks = 64;
  options.shared_blocks = 1 << 13;
  options.speculative_blocks = 64;
  TestZone zone(options);
  BlockIndex index(zone.zone());
  std::mt19937 random(instances);
  // Prompts of up to 400 blocks, each sharing a prefix with the one before.
  std::vector<std::vector<uint64_t>> prompts;
  uint64_t next_key = 1;
  for (int p = 0; p < 8; ++p) {
    std::vector<uint64_t> prompt(prompts.empty() ? std::vector<uint64_t>{} : prompts.back());
    prompt.resize(prompt.empty() ? 0 : random() % prompt.size());
    const size_t size = p == 0 ? 400 : 1 + random() % 400;
    while (prompt.size() < size) prompt.push_back(next_key++);
    prompts.push_back(prompt);
  }
  PlainIndex plain(instances, next_key);
  const auto remove = [&](int instance, Tier tier, const std::vector<uint64_t>& prompt, size_t from) {
    if (from >= prompt.size()) return;
    for (const auto& other : prompts) {  // all prompts that continue prompt[from]
      if (from >= other.size() || other[from] != prompt[from]) continue;
      const auto end = std::span(other).subspan(from);
      index.Remove(instance, tier, end);
      for (const uint64_t key : end) plain.Remove(instance, tier, key);
    }
  };
  MatchResult result;
  const int rounds = instances < 64 ? 2000 : 600;
  for (int round = 0; round < rounds; ++round) {
    const auto& prompt = prompts[random() % prompts.size()];
    const int instance = static_cast<int>(random() % static_cast<unsigned>(instances));
    const auto tier = static_cast<Tier>(random() % 8 == 0 ? random() % kNumTiers : 0);
    const size_t count = random() % 3 == 0 ? prompt.size() : random() % (prompt.size() + 1);
    const unsigned action = random() % 16;
    if (action < 4) {
      // Expected blocks are in device memory for a match.
      if ((TierBit(tier) & kDeviceTiers) != 0) {
        remove(instance, Tier::kDevice, prompt, count);
        remove(instance, Tier::kSpeculative, prompt, count);
      } else {
        remove(instance, tier, prompt, count);
      }
    } else if (action == 4) {
      index.Clear(instance);
      plain.Clear(instance);
    } else {
      const auto part = std::span(prompt).first(count);
      ASSERT_EQ(index.Add(instance, tier, part), count);
      for (const uint64_t key : part) plain.Add(instance, tier, key);
    }
    if (random() % 4 == 0) index.Sweep(random() % 400);  // while instances change
    const auto& query = prompts[random() % prompts.size()];
    index.Match(query, result);
    std::map<int, InstanceMatch> found;
    for (const InstanceMatch& match : result.matches) {
      EXPECT_TRUE(found.emplace(match.instance, match).second) << "instance " << match.instance << " twice";
    }
    for (int i = 0; i < instances; ++i) {
      ASSERT_EQ(found[i].blocks, plain.Match(query, i, ~0U)) << "round " << round << " instance " << i;
      ASSERT_EQ(found[i].device_blocks, plain.Match(query, i, kDeviceTiers))
          << "round " << round << " instance " << i;
    }
  }
  for (int i = 0; i < instances; ++i) index.Clear(i);
  ExpectEmptyAfterSweep(index);
  EXPECT_EQ(index.Stats().dropped, 0U);
}
INSTANTIATE_TEST_SUITE_P(Instances, BlockIndexTest, testing::Values(1, 3, 4, 5, 9, 64, 65, 200));

// A hole is found where a match probes, and overlooked elsewhere; blocks beyond the end of the prefix never
// are.
TEST(BlockIndex, AHoleNeverLengthensAMatchBeyondTheLastBlock) {
  TestZone zone;
  BlockIndex index(zone.zone());
  std::vector<uint64_t> keys(300);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i + 1;
  MatchResult result;
  for (size_t hole = 0; hole < 200; ++hole) {
    index.Clear(3);
    index.Add(3, Tier::kDevice, std::span(keys).first(200));
    index.Remove(3, Tier::kDevice, keys[hole]);
    index.Match(keys, result);
    EXPECT_TRUE(result.BlocksOf(3) == hole || result.BlocksOf(3) == 200) << hole << ' ' << result.BlocksOf(3);
  }
  EXPECT_EQ(result.BlocksOf(3), 199U);  // the last block of the prefix
}

TEST(BlockIndex, HoldsItsCapacity) {
  ZoneOptions options = {.max_instances = 8, .max_requests = 8, .max_workers = 2};
  options.index_blocks = 100'000;
  options.engine_blocks = 100'000;
  options.shared_blocks = 16;
  TestZone zone(options);
  BlockIndex index(zone.zone());
  for (uint64_t key = 1; key <= options.index_blocks; ++key) {
    index.Add(1, Tier::kDevice, key);
    index.MapEngineHash(1, key * 77, key);
  }
  // At the announced capacity fewer than one block in 1,000 finds no room.
  EXPECT_LE(index.Stats().dropped, 2 * options.index_blocks / 1000);
  EXPECT_GE(index.Stats().blocks, options.index_blocks - options.index_blocks / 1000);
}

TEST(BlockIndex, RefusesMoreThanItsMemoryHolds) {
  ZoneOptions options = {.max_instances = 8, .max_requests = 8, .max_workers = 2};
  options.index_blocks = 64;
  options.shared_blocks = 1;
  TestZone zone(options);
  BlockIndex index(zone.zone());
  bool refused = false;
  for (uint64_t key = 1; key <= 1000; ++key) refused |= !index.Add(0, Tier::kDevice, key);
  EXPECT_TRUE(refused);
  EXPECT_GT(index.Stats().dropped, 0U);
  index.Clear(0);
  // One bit set: the second block with more than four instances cannot take a fifth.
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(index.Add(i, Tier::kDevice, 1));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(index.Add(i, Tier::kDevice, 2));
  EXPECT_FALSE(index.Add(4, Tier::kDevice, 2));
  MatchResult result;
  index.Match(std::vector<uint64_t>{2}, result);
  EXPECT_EQ(result.matches.size(), 4U);
}

TEST(BlockIndex, SpeculativeBlocksExpireUnlessConfirmed) {
  TestZone zone;
  BlockIndex index(zone.zone());
  const std::vector<uint64_t> keys = {11, 12, 13};
  index.AddSpeculative(2, keys, 100);
  MatchResult result;
  index.Match(keys, result);
  EXPECT_EQ(result.DeviceBlocksOf(2), 3U);
  index.Add(2, Tier::kDevice, 11);
  index.Expire(99);
  index.Match(keys, result);
  EXPECT_EQ(result.BlocksOf(2), 3U);
  index.Expire(100);
  index.Match(keys, result);
  EXPECT_EQ(result.BlocksOf(2), 1U);
  EXPECT_EQ(index.Stats().speculative, 0U);
}

TEST(BlockIndex, EngineHashesAreKeptPerInstance) {
  TestZone zone;
  BlockIndex index(zone.zone());
  EXPECT_TRUE(index.MapEngineHash(0, 5, 50));
  EXPECT_TRUE(index.MapEngineHash(1, 5, 51));
  EXPECT_EQ(index.FindEngineHash(0, 5), 50U);
  EXPECT_EQ(index.UnmapEngineHash(1, 5), 51U);
  EXPECT_FALSE(index.FindEngineHash(1, 5).has_value());
  index.Clear(0);
  EXPECT_FALSE(index.FindEngineHash(0, 5).has_value());
}

std::vector<uint64_t> KeysFrom(uint64_t first, size_t count) {
  std::vector<uint64_t> keys(count);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TEST(BlockIndex, AClearedInstanceIsHiddenAtOnceAndItsBlocksAreRemovedInSlices) {
  TestZone zone;
  BlockIndex index(zone.zone());
  const std::vector<uint64_t> keys = KeysFrom(1, 10'000);
  ASSERT_EQ(index.Add(2, Tier::kDevice, keys), keys.size());
  ASSERT_EQ(index.Add(3, Tier::kDevice, keys), keys.size());
  ASSERT_EQ(index.MapEngineHashes(2, keys, keys), keys.size());
  MatchResult result;
  index.Clear(2);
  index.Match(keys, result);
  ASSERT_EQ(result.matches.size(), 1U);
  EXPECT_EQ(result.BlocksOf(3), keys.size());
  EXPECT_FALSE(index.FindEngineHash(2, 5).has_value());
  EXPECT_EQ(index.Tiers(2, 5), 0U);
  // The call has not searched the tables.
  EXPECT_EQ(index.Stats().memberships, 2 * keys.size());
  EXPECT_EQ(index.Stats().engine_blocks, keys.size());
  EXPECT_EQ(index.Stats().clearing, 1U);
  EXPECT_EQ(index.Add(2, Tier::kDevice, std::span(keys).first(10)), 10U);

  constexpr size_t kSlice = 100, kPerBucket = 4;
  const KeyTable table(zone.zone());
  const size_t buckets = table.index().num_key_buckets + table.index().num_hash_buckets;
  IndexStats before = index.Stats();
  size_t slices = 0;
  for (bool more = true; more; ++slices) {
    ASSERT_TRUE(index.SweepWanted());
    more = index.Sweep(kSlice);
    const IndexStats after = index.Stats();
    ASSERT_LE(before.memberships - after.memberships, kSlice * kPerBucket);
    ASSERT_LE(before.engine_blocks - after.engine_blocks, kSlice * kPerBucket);
    index.Match(keys, result);
    ASSERT_EQ(result.BlocksOf(2), 10U);
    ASSERT_EQ(result.BlocksOf(3), keys.size());
    before = after;
  }
  EXPECT_EQ(slices, (buckets + kSlice - 1) / kSlice);
  EXPECT_FALSE(index.SweepWanted());
  EXPECT_EQ(before.memberships, keys.size() + 10);
  EXPECT_EQ(before.engine_blocks, 0U);
  EXPECT_EQ(before.clearing, 0U);
}

TEST(BlockIndex, AnInstanceIsClearedMoreOftenThanThereAreSpareNumbers) {
  TestZone zone;
  BlockIndex index(zone.zone());
  const int spare = index.SpareNumbers();
  ASSERT_GE(spare, kSpareNumbers);
  MatchResult result;
  for (int round = 0; round < 3 * spare; ++round) {
    const std::vector<uint64_t> keys = KeysFrom(1 + 10 * static_cast<uint64_t>(round), 50);
    const int instance = round % 3;
    index.Clear(instance);
    ASSERT_EQ(index.Add(instance, Tier::kDevice, keys), keys.size());
    index.Match(keys, result);
    ASSERT_EQ(result.BlocksOf(instance), keys.size());
    index.Match(KeysFrom(1 + 10 * static_cast<uint64_t>(std::max(round - 3, 0)), 1), result);
    ASSERT_EQ(result.BlocksOf(instance), round == 0 ? 1U : 0U) << round;
  }
  // An instance without blocks needs no other number.
  index.Clear(7);
  for (int i = 0; i < 3; ++i) index.Clear(i);
  SweepAll(index);
  EXPECT_EQ(index.SpareNumbers(), spare);
  EXPECT_EQ(index.Stats().blocks, 0U);
}

// The blocks of a cleared instance take no room from those that are added before they were removed.
TEST(BlockIndex, BlocksThatWaitForTheirRemovalMakeRoom) {
  ZoneOptions options = {.max_instances = 8, .max_requests = 8, .max_workers = 2};
  options.index_blocks = 2000;
  options.engine_blocks = 2000;
  options.shared_blocks = 1;
  TestZone zone(options);
  BlockIndex index(zone.zone());
  const std::vector<uint64_t> common = KeysFrom(1, 100);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(index.Add(i, Tier::kDevice, common), common.size());
  for (int i = 0; i < 4; ++i) {
    index.Clear(i);
    EXPECT_EQ(index.Add(i, Tier::kDevice, common), common.size());
  }
  EXPECT_EQ(index.Stats().shared_blocks, 0U);
  for (uint64_t round = 0; round < 3; ++round) {  // each time other blocks that fill the tables
    const uint64_t dropped = index.Stats().dropped;
    index.Clear(5);
    const std::vector<uint64_t> keys = KeysFrom(1'000'000 * (round + 1), 1800);
    index.Add(5, Tier::kDevice, keys);
    index.MapEngineHashes(5, keys, keys);
    EXPECT_LE(index.Stats().dropped - dropped, keys.size() / 100) << round;
  }
}

// Clears instances and removes their blocks until it is killed.
[[noreturn]] void ClearForever(const Zone& zone, unsigned seed) {
  BlockIndex index(zone);
  std::mt19937 random(seed);
  for (;;) {
    const int instance = static_cast<int>(random() % 3);
    index.Add(instance, Tier::kDevice, KeysFrom(1 + random() % 100, random() % 50));
    if (random() % 2 == 0) index.Clear(instance);
    if (random() % 4 == 0) index.Sweep(random() % 500);
  }
}

TEST(BlockIndex, CountersStayCorrectWhenTheirProcessIsKilled) {
  ZoneOptions options = {.max_instances = 3, .max_requests = 8, .max_workers = 2};
  options.index_blocks = 1 << 8;
  options.engine_blocks = 64;
  options.shared_blocks = 64;
  options.speculative_blocks = 64;
  TestZone zone(options);
  BlockIndex index(zone.zone());
  std::mt19937 random(7);
  MatchResult result;
  for (int round = 0; round < 60; ++round) {
    const unsigned seed = random();
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) ClearForever(zone.zone(), seed);
    const timespec wait = {0, static_cast<long>(100'000 + random() % 2'000'000)};
    nanosleep(&wait, nullptr);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    for (int i = 0; i < 3; ++i) index.Clear(i);
    for (int i = 0; i < 3; ++i) {
      const std::vector<uint64_t> own = KeysFrom(1000 + 100 * static_cast<uint64_t>(i), 20);
      ASSERT_EQ(index.Add(i, Tier::kDevice, own), own.size()) << "round " << round;
      index.Match(own, result);
      ASSERT_EQ(result.matches.size(), 1U) << "round " << round;
      ASSERT_EQ(result.BlocksOf(i), own.size()) << "round " << round;
    }
    for (uint64_t key = 1; key < 200; ++key) {
      index.Match({&key, 1}, result);
      ASSERT_TRUE(result.matches.empty()) << "round " << round << ", key " << key;
    }
    for (int i = 0; i < 3; ++i) index.Clear(i);
    SweepAll(index);
    ASSERT_EQ(index.SpareNumbers(), 61) << "round " << round;
  }
}

// Writers of different instances change the same keys while a reader matches. Sets move between words and bit
// sets.
TEST(BlockIndex, ReadersSeeWholeSetsWhileWritersChangeThem) {
  TestZone zone;
  const std::vector<uint64_t> keys = {1, 2, 3, 4, 5, 6, 7, 8};
  BlockIndex index(zone.zone());
  // Instance 0 always holds everything.
  for (const uint64_t key : keys) index.Add(0, Tier::kDevice, key);
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int i = 1; i <= 6; ++i) {
    writers.emplace_back([&, i] {
      BlockIndex own(zone.zone());
      for (int round = 0; round < 200; ++round) {
        for (const uint64_t key : keys) own.Add(i, Tier::kDevice, key);
        for (auto it = keys.rbegin(); it != keys.rend(); ++it) own.Remove(i, Tier::kDevice, *it);
      }
    });
  }
  std::thread reader([&] {
    MatchResult result;
    while (!stop.load()) {
      std::this_thread::yield();
      index.Match(keys, result);
      EXPECT_EQ(result.BlocksOf(0), keys.size());
      for (const InstanceMatch& match : result.matches) EXPECT_LE(match.instance, 6);
    }
  });
  for (std::thread& writer : writers) writer.join();
  stop = true;
  reader.join();
  EXPECT_EQ(index.Stats().memberships, keys.size());
  EXPECT_EQ(index.Stats().shared_blocks, 0U);
}

// The sets of the keys change between words and bit sets, which are freed and reused, while a sweep reads
// them.
TEST(BlockIndex, SweepsRemoveAllBlocksWhileWritersOfOtherInstancesChangeTheSets) {
  ZoneOptions options = {.max_instances = 8, .max_requests = 8, .max_workers = 2};
  options.index_blocks = options.engine_blocks = 256;
  options.shared_blocks = 128;
  options.speculative_blocks = 64;
  TestZone zone(options);
  const std::vector<uint64_t> keys = KeysFrom(1, 64);
  constexpr int kCleared = 5;
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int i = 0; i < kCleared; ++i) {
    writers.emplace_back([&, i] {
      BlockIndex own(zone.zone());
      while (!stop.load()) {
        own.Add(i, Tier::kDevice, keys);
        own.Remove(i, Tier::kDevice, keys);
      }
    });
  }
  BlockIndex index(zone.zone());
  for (int round = 0; round < 100; ++round) {
    index.Add(kCleared, Tier::kDevice, keys);
    index.MapEngineHashes(kCleared, keys, keys);
    index.Clear(kCleared);
    while (index.Sweep(static_cast<size_t>(1 + round % 3))) {
    }
    // The instance has a number that was swept in an earlier round.
    for (const uint64_t key : keys) EXPECT_EQ(index.Tiers(kCleared, key), 0U) << round << " key " << key;
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
  ExpectEmptyAfterSweep(index);
  EXPECT_EQ(index.Stats().engine_blocks, 0U);
}

}  // namespace
}  // namespace moesaic::proxy
