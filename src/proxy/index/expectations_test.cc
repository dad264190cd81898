// Blocks that are expected after a dispatch are never marked longer than until their deadline.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

#include "proxy/index/block_index.h"
#include "proxy/index/index_writer.h"
#include "proxy/index/instance_set.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

constexpr uint32_t kTestBlock = 4;
constexpr int kEngines = 3;
constexpr Nanos kTtl = 50;

ZoneOptions SmallRing() {
  ZoneOptions options = {.max_instances = 8, .max_requests = 8, .max_workers = 4};
  options.index_blocks = 1 << 12;
  options.engine_blocks = 1 << 12;
  options.shared_blocks = 1 << 10;
  options.speculative_blocks = 256;
  return options;
}

// One engine's event stream.
struct Publisher {
  uint64_t sequence = 0;
  double time = 1;
};

KvEvent EventOf(KvEvent::Type type) {
  KvEvent event;
  event.type = type;
  event.block_size = kTestBlock;
  return event;
}

class RandomHistory {
 public:
  explicit RandomHistory(unsigned seed) : random_(seed) {
    std::vector<InstanceConfig> configs;
    for (int i = 0; i < kEngines; ++i) configs.push_back({.url = fmt::format("http://e{}", i)});
    EXPECT_TRUE(state_.Configure(configs, 1).ok());
    for (int i = 0; i < kEngines; ++i) writers_.emplace_back(state_, index_, i);
    const KeyMaker maker(zone_.zone());
    for (int32_t p = 0; p < 6; ++p) {  // three pairs of prompts with a common beginning
      std::vector<int32_t> tokens(kTestBlock * (1 + random_() % 40), p / 2);
      std::fill(tokens.begin() + static_cast<ptrdiff_t>(tokens.size() / 2), tokens.end(), 100 + p);
      maker.Append(tokens, {}, kTestBlock, keys_.emplace_back());
      prompts_.push_back(std::move(tokens));
    }
  }

  void Step() {
    now_ += static_cast<Nanos>(random_() % 8);
    ExpireWhenDue();
    const size_t p = random_() % prompts_.size();
    const auto engine = static_cast<int>(random_() % kEngines);
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2:
        Dispatch(engine, p);
        break;
      case 3:
      case 4:
        Store(engine, p);
        break;
      case 5:
        Evict(engine, p);
        break;
      case 6:
        if (random_() % 8 == 0) Send(engine, EventOf(KvEvent::Type::kCleared));
        ++publishers_[engine].sequence;  // a message is lost
        break;
      default:
        if (random_() % 8 == 0) {  // the engine is restarted; its next message begins with 0
          publishers_[engine].sequence = 0;
          publishers_[engine].time += 10;
        }
    }
    Check();
  }

  void Finish() {
    // Only the calls at the times of NextExpiry.
    for (Nanos next; (next = index_.NextExpiry()) != 0;) {
      ASSERT_LE(next, now_ + kTtl);
      now_ = std::max(now_, next);
      index_.Expire(now_, 16);
    }
    Check();
    EXPECT_EQ(index_.Stats().speculative, 0U);
    for (int i = 0; i < kEngines; ++i) {
      for (const auto& keys : keys_) {
        for (const uint64_t key : keys) ASSERT_FALSE(Marked(i, key));
      }
    }
  }

 private:
  // A second master may act too: both work on the same memory.
  BlockIndex& Master() { return random_() % 4 == 0 ? other_ : index_; }

  void Dispatch(int engine, size_t p) {
    const size_t skip = random_() % 2 == 0 ? 0 : random_() % keys_[p].size();
    for (const uint64_t key : std::span(keys_[p]).subspan(skip)) deadlines_[{engine, key}] = now_ + kTtl;
    Master().AddSpeculative(engine, std::span(keys_[p]).subspan(skip), now_ + kTtl);
  }
  void ExpireWhenDue() {
    for (Nanos next; (next = index_.NextExpiry()) != 0 && next <= now_;) Master().Expire(now_, 16);
  }
  uint64_t HashOf(size_t p, size_t block) const { return keys_[p][block] ^ 0x5555; }
  void Store(int engine, size_t p) {
    const size_t blocks = 1 + random_() % keys_[p].size();  // an aborted request stores a part
    KvEvent event = EventOf(KvEvent::Type::kStored);
    for (size_t b = 0; b < blocks; ++b) event.block_hashes.push_back(HashOf(p, b));
    event.tokens.assign(prompts_[p].begin(),
                        prompts_[p].begin() + static_cast<ptrdiff_t>(blocks * kTestBlock));
    Send(engine, std::move(event));
  }
  void Evict(int engine, size_t p) {
    KvEvent event = EventOf(KvEvent::Type::kRemoved);
    for (size_t b = random_() % keys_[p].size(); b < keys_[p].size(); ++b)
      event.block_hashes.push_back(HashOf(p, b));
    Send(engine, std::move(event));
  }
  void Send(int engine, KvEvent event) {
    Publisher& publisher = publishers_[engine];
    KvBatch batch;
    batch.time = publisher.time += 1e-3;
    batch.events.push_back(std::move(event));
    const auto result = writers_[engine].Apply(publisher.sequence++, batch);
    if (!result.replay_from) return;
    if (random_() % 2 == 0) return writers_[engine].OnReplayFailed();
    writers_[engine].ApplyReplay(kReplayEnd, nullptr);
  }
  bool Marked(int engine, uint64_t key) const {
    return (index_.Tiers(engine, key) & TierBit(Tier::kSpeculative)) != 0;
  }
  void Check() {
    for (const auto& [where, deadline] : deadlines_) {
      ASSERT_TRUE(deadline > now_ || !Marked(where.first, where.second))
          << "engine " << where.first << ", deadline " << deadline << ", now " << now_;
    }
  }

  std::mt19937 random_;
  TestZone zone_{SmallRing()};
  State state_{zone_.zone()};
  BlockIndex index_{zone_.zone()}, other_{zone_.zone()};
  std::vector<IndexWriter> writers_;
  std::array<Publisher, kEngines> publishers_;
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<std::vector<uint64_t>> keys_;
  std::map<std::pair<int, uint64_t>, Nanos> deadlines_;
  Nanos now_ = 1;
};

TEST(Expectations, EndAtTheirDeadlineInRandomHistories) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    RandomHistory history(seed);
    for (int step = 0; step < 300 && !testing::Test::HasFatalFailure(); ++step) history.Step();
    history.Finish();
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Two masters, of which one believes wrongly that it holds the lease.
[[noreturn]] void Dispatch(const Zone& zone, unsigned seed) {
  BlockIndex index(zone);
  std::mt19937 random(seed);
  for (Nanos now = 1;; ++now) {
    std::vector<uint64_t> keys(1 + random() % 200);
    uint64_t key = 1 + random() % 8 * 1000;
    for (uint64_t& k : keys) k = key++;
    index.AddSpeculative(static_cast<int>(random() % kEngines), keys, now + kTtl);
    index.Expire(now, 64);
  }
}

TEST(Expectations, EndAfterTheDeathOfMasters) {
  TestZone zone(SmallRing());
  BlockIndex index(zone.zone());
  std::mt19937 random(5);
  for (int round = 0; round < 40; ++round) {
    std::array<pid_t, 2> pids;
    for (pid_t& pid : pids) {
      const unsigned seed = random();
      pid = fork();
      ASSERT_GE(pid, 0);
      if (pid == 0) Dispatch(zone.zone(), seed);
    }
    const timespec wait = {0, static_cast<long>(1'000'000 + random() % 3'000'000)};
    nanosleep(&wait, nullptr);
    for (const pid_t pid : pids) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    index.Expire(std::numeric_limits<Nanos>::max(), SIZE_MAX);
    EXPECT_EQ(index.NextExpiry(), 0);
    for (int engine = 0; engine < kEngines; ++engine) {
      for (uint64_t key = 1; key < 8300; ++key)
        ASSERT_EQ(index.Tiers(engine, key), 0U)
            << "round " << round << ", engine " << engine << ", key " << key;
    }
  }
}

}  // namespace
}  // namespace moesaic::proxy
