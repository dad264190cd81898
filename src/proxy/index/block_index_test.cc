#include "proxy/index/block_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <thread>

#include "proxy/index/key_table.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

// The plainest index: a set of (instance, tier) per key.
class PlainIndex {
 public:
  void Add(int instance, Tier tier, uint64_t key) {
    if (tier == Tier::kSpeculative && holders_[key].contains({instance, Tier::kDevice})) return;
    if (tier != Tier::kSpeculative) holders_[key].erase({instance, Tier::kSpeculative});
    holders_[key].insert({instance, tier});
  }
  void Remove(int instance, Tier tier, uint64_t key) { holders_[key].erase({instance, tier}); }
  void Clear(int instance) {
    for (auto& [key, holders] : holders_)
      std::erase_if(holders, [&](const auto& h) { return h.first == instance; });
  }
  uint32_t Match(const std::vector<uint64_t>& keys, int instance, bool device_only) const {
    uint32_t depth = 0;
    for (; depth < keys.size(); ++depth) {
      const auto it = holders_.find(keys[depth]);
      if (it == holders_.end()) break;
      bool held = false;
      for (const auto& [holder, tier] : it->second) {
        held |= holder == instance && (!device_only || tier == Tier::kDevice || tier == Tier::kSpeculative);
      }
      if (!held) break;
    }
    return depth;
  }

 private:
  std::map<uint64_t, std::set<std::pair<int, Tier>>> holders_;
};

class BlockIndexTest : public testing::TestWithParam<int> {};

TEST_P(BlockIndexTest, AgreesWithAPlainIndex) {
  const int instances = GetParam();
  ZoneOptions options = {
      .max_instances = static_cast<uint32_t>(instances), .max_requests = 8, .max_workers = 2};
  options.index_blocks = 1 << 12;
  options.engine_blocks = 64;
  options.shared_blocks = 1 << 12;
  options.speculative_blocks = 64;
  TestZone zone(options);
  BlockIndex index(zone.zone());
  PlainIndex plain;
  std::mt19937 random(instances);
  // 8 prompts of 24 blocks, each sharing a prefix with the one before.
  std::vector<std::vector<uint64_t>> prompts;
  uint64_t next_key = 1;
  for (int p = 0; p < 8; ++p) {
    std::vector<uint64_t> prompt(prompts.empty() ? std::vector<uint64_t>{} : prompts.back());
    prompt.resize(p == 0 ? 0 : random() % 24);
    while (prompt.size() < 24) prompt.push_back(next_key++);
    prompts.push_back(prompt);
  }
  MatchResult result;
  const int rounds = instances < 64 ? 2000 : 300;
  for (int round = 0; round < rounds; ++round) {
    const auto& prompt = prompts[random() % prompts.size()];
    const int instance = static_cast<int>(random() % static_cast<unsigned>(instances));
    const auto tier = static_cast<Tier>(random() % 8 == 0 ? random() % kNumTiers : 0);
    const size_t count = random() % (prompt.size() + 1);
    switch (random() % 8) {
      case 0:
        for (size_t i = count; i < prompt.size(); ++i) {  // leaves first, as engines evict
          index.Remove(instance, tier, prompt[i]);
          plain.Remove(instance, tier, prompt[i]);
        }
        break;
      case 1: {
        const uint64_t key = prompt[random() % prompt.size()];  // a hole
        index.Remove(instance, tier, key);
        plain.Remove(instance, tier, key);
        break;
      }
      case 2:
        if (random() % 16 == 0) {
          index.Clear(instance);
          plain.Clear(instance);
        }
        break;
      default:
        for (size_t i = 0; i < count; ++i) {
          ASSERT_TRUE(index.Add(instance, tier, prompt[i]));
          plain.Add(instance, tier, prompt[i]);
        }
    }
    const auto& query = prompts[random() % prompts.size()];
    index.Match(query, result);
    std::map<int, InstanceMatch> found;
    for (const InstanceMatch& match : result.matches) {
      EXPECT_TRUE(found.emplace(match.instance, match).second) << "instance " << match.instance << " twice";
    }
    for (int i = 0; i < instances; ++i) {
      ASSERT_EQ(found[i].blocks, plain.Match(query, i, false)) << "round " << round << " instance " << i;
      ASSERT_EQ(found[i].device_blocks, plain.Match(query, i, true))
          << "round " << round << " instance " << i;
    }
  }
  for (int i = 0; i < instances; ++i) index.Clear(i);
  const IndexStats stats = index.Stats();
  EXPECT_EQ(stats.blocks, 0U);
  EXPECT_EQ(stats.memberships, 0U);
  EXPECT_EQ(stats.shared_blocks, 0U);
  EXPECT_EQ(stats.dropped, 0U);
}
INSTANTIATE_TEST_SUITE_P(Instances, BlockIndexTest, testing::Values(1, 3, 4, 5, 9, 64, 65, 200));

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

}  // namespace
}  // namespace moesaic::proxy
