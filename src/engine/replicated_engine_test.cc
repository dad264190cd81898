#include "engine/replicated_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "comm/transport/local_transport.h"
#include "engine/fake_engine.h"
#include "engine/ranked_executor.h"

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

constexpr double kLimitSeconds = 20;

/// Replicas of one rank each; the ranks are threads. With `small_caches`, other replicas than 0 have two
/// thirds of its blocks.
class ReplicatedEngineTest : public FakeEngineTest {
 protected:
  explicit ReplicatedEngineTest(bool small_caches = false) : FakeEngineTest(512) {
    for (int rank = 1; rank < kReplicas; ++rank) {
      ranks_.emplace_back([this, rank, small_caches] {
        const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
        FakeModel model(512, FakeModel::kVocab, /*mtp=*/small_caches);  // the module has a layer of the cache
        ended_[rank] = RunRank(model, kernels_, *threads, job_.end(rank), layout_, kLimitSeconds);
        job_.Leave(rank);
      });
    }
  }
  ~ReplicatedEngineTest() override {
    if (engine_ == nullptr) job_.Kill(0);
    engine_ = nullptr;
    for (std::thread& rank : ranks_) rank.join();
  }

  EngineOptions Options() {
    return {.kv_bytes = 64 * kBlockBytes,
            .max_sequences = 4,
            .max_batch_tokens = 64,
            .seed = 3,
            .job = &job_.end(0),
            .layout = layout_,
            .rank_time_limit_s = kLimitSeconds};
  }
  Engine& Start() {
    engine_ = Make(Options());
    return *engine_;
  }
  std::vector<int64_t> Outputs() const {
    std::vector<int64_t> outputs;
    for (const ReplicaStats& replica : engine_->stats().replicas) outputs.push_back(replica.output_tokens);
    return outputs;
  }

  static constexpr int kReplicas = 3;
  const parallel::Layout layout_ = *parallel::Layout::Create({.data = kReplicas});
  comm::LocalJob job_{kReplicas};
  std::vector<Status> ended_ = std::vector<Status>(kReplicas);
  std::vector<std::thread> ranks_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(ReplicatedEngineTest, RequestsSpreadOverReplicasAndKeepTheirOutputs) {
  Engine& engine = Start();
  std::map<RequestId, Request> requests;
  for (int i = 0; i < 12; ++i) {
    const Request request = Greedy(RandomPrompt(20 + i, i), 30);
    requests[*engine.Add(request)] = request;
  }
  EXPECT_EQ(requests.size(), 12U);
  std::map<RequestId, Result> results;
  Step(engine, &results);
  for (const ReplicaStats& replica : engine.stats().replicas) {
    EXPECT_EQ(replica.running + replica.waiting, 4);
  }
  for (const auto& [id, result] : Drain(engine)) {
    auto& tokens = results[id].tokens;
    tokens.insert(tokens.end(), result.tokens.begin(), result.tokens.end());
  }
  for (const auto& [id, request] : requests) EXPECT_EQ(results[id].tokens, Alone(request)) << id;
  EXPECT_THAT(Outputs(), testing::ElementsAre(120, 120, 120));
  EXPECT_EQ(engine.stats().output_tokens, 360);
}

// Seeds that requests lack are derived from their number, so the replica has no influence.
TEST_F(ReplicatedEngineTest, UnseededOutputsAreThoseOfOneReplica) {
  const auto outputs_of = [](Engine& engine) {
    for (int i = 0; i < 9; ++i) *engine.Add(MakeRequest(RandomPrompt(10 + i, i), 20, 1.0F));
    std::map<RequestId, std::vector<int32_t>> outputs;
    for (const auto& [id, result] : Drain(engine)) outputs[id] = result.tokens;
    return outputs;
  };
  EngineOptions one = Options();
  one.job = nullptr;
  one.layout = {};
  EXPECT_EQ(outputs_of(Start()), outputs_of(*Make(one)));
}

TEST_F(ReplicatedEngineTest, ARequestGoesToTheReplicaThatHasItsPrefix) {
  Engine& engine = Start();
  // The second prompt is computed by replica 1, because replica 0 is busy with the first.
  const Request other = Greedy(RandomPrompt(100, 1), 4), first = Greedy(RandomPrompt(200, 2), 4);
  ASSERT_TRUE(engine.Add(other).ok());
  ASSERT_TRUE(engine.Add(first).ok());
  Drain(engine);
  ASSERT_THAT(Outputs(), testing::ElementsAre(4, 4, 0));
  const Request again = Greedy(Joined(first.prompt, RandomPrompt(10, 3)), 4);
  EXPECT_GE(RunOne(engine, again), 192);
  EXPECT_THAT(Outputs(), testing::ElementsAre(4, 8, 0));
}

// A common prefix does not keep requests on one replica while others are idle.
TEST_F(ReplicatedEngineTest, ACommonPrefixDoesNotOverloadAReplica) {
  Engine& engine = Start();
  const std::vector<int32_t> prefix = RandomPrompt(100, 1);
  RunOne(engine, Greedy(prefix, 4));
  for (int i = 0; i < 12; ++i) {
    ASSERT_TRUE(engine.Add(Greedy(Joined(prefix, RandomPrompt(5, i)), 50)).ok());
  }
  Drain(engine);
  for (const int64_t outputs : Outputs()) EXPECT_GE(outputs, 150);
}

// Replica 0 has less to compute than others, but its cache is nearly full.
TEST_F(ReplicatedEngineTest, ARequestGoesToAReplicaWhoseCacheHasRoomForIt) {
  EngineOptions options = Options();
  options.kv_bytes = 20 * kBlockBytes;
  engine_ = Make(options);
  Engine& engine = *engine_;
  std::map<RequestId, Result> results;
  const auto on = [&](int replica) {
    const ReplicaStats stats = engine.stats().replicas[replica];
    return stats.running + stats.waiting;
  };
  const auto read = [&](RequestId id) {
    while (results[id].tokens.empty()) Step(engine, &results);
  };
  const RequestId first = *engine.Add(Greedy(RandomPrompt(450, 1), 30));
  for (const int seed : {2, 3}) ASSERT_TRUE(engine.Add(Greedy(RandomPrompt(20, seed), 200)).ok());
  read(first);
  const RequestId second = *engine.Add(Greedy(RandomPrompt(450, 4), 30));
  ASSERT_EQ(on(0), 2);
  read(second);
  ASSERT_TRUE(engine.Add(Greedy(RandomPrompt(400, 5), 10)).ok());
  EXPECT_EQ(on(0), 2);
  EXPECT_EQ(on(1), 2);
  Drain(engine);
}

class UnequalReplicasTest : public ReplicatedEngineTest {
 protected:
  UnequalReplicasTest() : ReplicatedEngineTest(/*small_caches=*/true) {}
};

TEST_F(UnequalReplicasTest, ARequestGoesToAReplicaWithRoomForItsPrompt) {
  EngineOptions options = Options();
  options.kv_bytes = 6 * kBlockBytes;  // 384 tokens, and 256 of other replicas
  engine_ = Make(options);
  ASSERT_TRUE(engine_->Add(Greedy(RandomPrompt(100, 1), 50)).ok());  // of replica 0
  const Request large = Greedy(RandomPrompt(300, 2), 10);
  EXPECT_TRUE(engine_->Check(large).ok());
  const auto id = engine_->Add(large);
  ASSERT_TRUE(id.ok()) << Message(id.status());
  EXPECT_EQ(Drain(*engine_)[*id].tokens, Alone(large));
  EXPECT_THAT(Message(engine_->Check(Greedy(RandomPrompt(400, 3), 10))), HasSubstr("cache of 384 tokens"));
}

TEST_F(UnequalReplicasTest, ARequestGoesToAReplicaWithRoomForItsAnswer) {
  EngineOptions options = Options();
  options.kv_bytes = 6 * kBlockBytes;
  engine_ = Make(options);
  ASSERT_TRUE(engine_->Add(Greedy(RandomPrompt(100, 1), 50)).ok());  // of replica 0
  const Request request = Greedy(RandomPrompt(250, 2), 100);         // other replicas have room for 6 tokens
  const auto id = engine_->Add(request);
  ASSERT_TRUE(id.ok()) << Message(id.status());
  EXPECT_EQ(Drain(*engine_)[*id].tokens, Alone(request));
}

// Blocks of other ranks are larger than those of the driver's.
TEST_F(UnequalReplicasTest, TiersKeepTheirMemoryLimitOnEveryRank) {
  EngineOptions options = Options();
  options.swap_bytes = 6 * kBlockBytes;
  options.warm_bytes = 6 * (kBlockBytes + 1024);
  options.warm_exact = true;
  engine_ = Make(options);
  const EngineStats stats = engine_->stats();
  EXPECT_EQ(stats.swap_blocks, 6 + 4 + 4);
  const int64_t large = (stats.warm.capacity_blocks - 6) / 2;  // of each other rank
  EXPECT_LE(large * kBlockBytes * 3 / 2, options.warm_bytes);
  EXPECT_GE(large, 4);
}

TEST_F(ReplicatedEngineTest, CancelledRequestsFreeTheirBlocks) {
  Engine& engine = Start();
  std::map<RequestId, Result> results;
  std::set<RequestId> cancelled;
  int added = 0;
  for (int i = 0; i < 300; ++i) {
    const RequestId id = *engine.Add(Greedy(RandomPrompt(1 + i * 7 % 90, i % 11), 20));
    ++added;
    for (int steps = i % 3; steps > 0; --steps) Step(engine, &results);
    if (i % 4 == 0) continue;
    engine.Cancel(id);
    cancelled.insert(id);
  }
  while (!engine.idle()) Step(engine, &results);
  ExpectNothingHeld(engine);
  EXPECT_EQ(std::ssize(results), added);
  for (const auto& [id, result] : results) {
    EXPECT_EQ(result.ends, 1) << id;
    if (cancelled.contains(id)) continue;
    EXPECT_EQ(result.finish, FinishReason::kLength) << id;
  }
  engine.ClearCache();
  Step(engine, &results);
  EXPECT_EQ(engine.stats().free_blocks, engine.stats().total_blocks);
}

TEST_F(ReplicatedEngineTest, ADeadRankOfAnyReplicaEndsTheEngine) {
  Engine& engine = Start();
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(engine.Add(Greedy(RandomPrompt(30, i), 100)).ok());
  std::map<RequestId, Result> results;
  Step(engine, &results);
  job_.Kill(1);
  std::vector<TokenEvent> events;
  const Status failed = engine.Step(&events);
  EXPECT_THAT(Message(failed), HasSubstr("rank 1"));
  EXPECT_EQ(Message(engine.Step(&events)), Message(failed));
  EXPECT_TRUE(events.empty());
  for (RequestId id = 1; id <= 6; ++id) engine.Cancel(id);
  engine.Step(&events).IgnoreError();
  EXPECT_EQ(events.size(), 6U);  // the requests of all replicas
  EXPECT_TRUE(engine.idle());
}

TEST_F(ReplicatedEngineTest, ReplicasThatDivideExpertsAllTakePartInEachStep) {
  EngineOptions options = Options();
  options.layout = *parallel::Layout::Create({.data = kReplicas, .expert = kReplicas});
  engine_ = Make(options);
  ASSERT_TRUE(engine_->Add(Greedy(RandomPrompt(30, 1), 10)).ok());
  std::map<RequestId, Result> results;
  while (!engine_->idle()) Step(*engine_, &results);
  EXPECT_EQ(results[1].tokens.size(), 10U);
  EXPECT_THAT(Outputs(), testing::ElementsAre(10, 0, 0));
  const EngineStats stats = engine_->stats();
  ASSERT_EQ(stats.ranks.size(), kReplicas);
  for (const RankStats& rank : stats.ranks) EXPECT_GT(rank.step_seconds, 0) << "rank " << rank.rank;
}

// While one replica reads a long prompt, the decodes of others wait for smaller steps.
TEST_F(ReplicatedEngineTest, APromptAmongDecodesIsReadInSmallerChunks) {
  EngineOptions options = Options();
  options.max_batch_tokens = 400;
  engine_ = Make(options);
  for (const int outputs : {1, 40, 40}) ASSERT_TRUE(engine_->Add(Greedy(RandomPrompt(5, 1), outputs)).ok());
  std::map<RequestId, Result> results;
  while (results[1].ends == 0) Step(*engine_, &results);
  model_.largest_step = 0;
  ASSERT_TRUE(engine_->Add(Greedy(RandomPrompt(450, 3), 1)).ok());  // of replica 0, which is idle
  while (!engine_->idle()) Step(*engine_, &results);
  for (const RequestId id : {2, 3}) EXPECT_EQ(results[id].tokens.size(), 40U);
  EXPECT_EQ(model_.largest_step, 134U) << "the mean of 400 rows and two decodes";
}

}  // namespace
}  // namespace moesaic::engine
