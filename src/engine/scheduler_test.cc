#include "engine/scheduler.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

namespace moesaic::engine {
namespace {

// Requests are called a, b, c, ... in the order in which they arrive. Run() plays a step and tells it:
//   "-c +d a1 d64"   c is preempted, d admitted, one token of a and 64 of d are computed
// A sequence whose tokens are all computed then gets its next token, and leaves when it has enough.
class Story {
 public:
  Story(int blocks, const SchedulerOptions& options)
      : pool_(*cache::KvPool::Create(kLayout, blocks * kLayout.block_bytes())), scheduler_(*pool_, options) {}

  void Add(int prompt, int output, bool prompt_logprobs = false) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = ++last_id_;
    sequence->request.prompt.assign(prompt, 1);
    sequence->request.prompt_logprobs = prompt_logprobs;
    sequence->tokens = sequence->request.prompt;
    sequence->limit = prompt + output;
    scheduler_.Add(std::move(sequence));
  }

  std::string Run() {
    const StepPlan plan = scheduler_.Plan();
    std::string told;
    for (const Sequence* victim : plan.preempt) told += fmt::format("-{} ", Name(*victim));
    for (const Sequence* next : plan.admit) told += fmt::format("+{} ", Name(*next));
    for (const StepPlan::Part& part : plan.parts)
      told += fmt::format("{}{} ", Name(*part.sequence), part.count);
    scheduler_.Commit(plan);
    std::vector<RequestId> done;
    for (const StepPlan::Part& part : plan.parts) {
      Sequence& sequence = *part.sequence;
      sequence.computed += part.count;
      EXPECT_LE(sequence.computed, sequence.size());
      EXPECT_LE(sequence.computed, static_cast<int>(sequence.blocks.size()) * cache::kBlockTokens);
      if (sequence.remaining() == 0) sequence.tokens.push_back(1);
      if (sequence.size() == sequence.limit) done.push_back(sequence.id);
    }
    for (const RequestId id : done) EXPECT_TRUE(scheduler_.Remove(id));
    if (!told.empty()) told.pop_back();
    return told;
  }

  static std::string Name(const Sequence& sequence) {
    return std::string(1, static_cast<char>('a' + (sequence.id - 1) % 26));
  }

  Scheduler& scheduler() { return scheduler_; }
  cache::KvPool& pool() { return *pool_; }
  RequestId last_id() const { return last_id_; }

 private:
  static constexpr cache::BlockLayout kLayout = {.layers = 1, .heads = 1, .key_dim = 1, .value_dim = 1};
  std::unique_ptr<cache::KvPool> pool_;
  Scheduler scheduler_;
  RequestId last_id_ = 0;
};

constexpr SchedulerOptions kRoomy = {.max_sequences = 4, .max_batch_tokens = 100, .max_scored_rows = 100};

TEST(SchedulerTest, PrefillsInChunksAndMixesThemWithDecodes) {
  Story story(20, kRoomy);
  story.Add(30, 4);
  story.Add(150, 2);
  EXPECT_EQ(story.Run(), "+a +b a30 b70");
  EXPECT_EQ(story.Run(), "a1 b80");
  EXPECT_EQ(story.Run(), "a1 b1");
  EXPECT_EQ(story.Run(), "a1");
  EXPECT_EQ(story.Run(), "");
  EXPECT_EQ(story.pool().free_blocks(), 20);
}

TEST(SchedulerTest, DecodesComeBeforePrefills) {
  Story story(20, {.max_sequences = 3, .max_batch_tokens = 3, .max_scored_rows = 3});
  story.Add(3, 9);
  EXPECT_EQ(story.Run(), "+a a3");
  story.Add(5, 9);
  EXPECT_EQ(story.Run(), "+b a1 b2");
  EXPECT_EQ(story.Run(), "a1 b2");
  EXPECT_EQ(story.Run(), "a1 b1");
}

TEST(SchedulerTest, RunsNoMoreSequencesThanAllowed) {
  Story story(20, {.max_sequences = 2, .max_batch_tokens = 100, .max_scored_rows = 100});
  for (int i = 0; i < 3; ++i) story.Add(4, 2);
  EXPECT_EQ(story.Run(), "+a +b a4 b4");
  EXPECT_EQ(story.Run(), "a1 b1");
  EXPECT_EQ(story.Run(), "+c c4");
}

TEST(SchedulerTest, FirstComeFirstServedEvenWhenALaterOneWouldFit) {
  Story story(6, kRoomy);
  story.Add(64, 30);
  EXPECT_EQ(story.Run(), "+a a64");
  story.Add(5 * 64, 2);  // five blocks now and two to spare, of five that are free
  story.Add(4, 2);
  EXPECT_EQ(story.Run(), "a1");
}

TEST(SchedulerTest, AdmissionLeavesABlockToSpareForEachRunningSequence) {
  Story story(3, kRoomy);
  story.Add(50, 20);
  story.Add(10, 60);
  EXPECT_EQ(story.Run(), "+a a50");  // with b one block would be free for two
  for (int i = 1; i < 20; ++i) EXPECT_EQ(story.Run(), "a1");
  EXPECT_EQ(story.Run(), "+b b10");
}

TEST(SchedulerTest, TheYoungestGivesItsBlocksAndComesBackWithAllItHad) {
  Story story(4, kRoomy);
  story.Add(50, 130);
  story.Add(10, 120);
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  std::string told;
  int steps = 0;
  while ((told = story.Run()) == "a1 b1") ++steps;
  EXPECT_EQ(told, "-b a1");  // a needs its third block
  EXPECT_EQ(steps, 78);      // a's tokens 50 .. 127
  while ((told = story.Run()) == "a1") ++steps;
  EXPECT_EQ(told, "+b b89");  // a has ended; b recomputes its prompt and the 79 tokens that it had said
  EXPECT_EQ(steps, 78 + 50);
}

TEST(SchedulerTest, RemoveFreesBlocksAtOnce) {
  Story story(8, kRoomy);
  story.Add(64, 9);
  story.Add(64, 9);
  story.Run();
  EXPECT_EQ(story.pool().free_blocks(), 6);
  EXPECT_TRUE(story.scheduler().Remove(1));
  EXPECT_EQ(story.pool().free_blocks(), 7);
  EXPECT_FALSE(story.scheduler().Remove(1));
}

TEST(SchedulerTest, APlanChangesNothing) {
  Story story(8, kRoomy);
  story.Add(64, 9);
  story.scheduler().Plan();
  EXPECT_EQ(story.pool().free_blocks(), 8);
  EXPECT_TRUE(story.scheduler().running().empty());
  EXPECT_EQ(story.Run(), "+a a64");
}

TEST(SchedulerTest, ScoredPromptsAreCutToTheirOwnLimit) {
  Story story(20, {.max_sequences = 4, .max_batch_tokens = 100, .max_scored_rows = 10});
  story.Add(25, 2, /*prompt_logprobs=*/true);
  story.Add(15, 2);
  EXPECT_EQ(story.Run(), "+a +b a10 b15");
}

// Random requests, cancellations and pools. The rules of docs/contracts/scheduler.md hold after every step.
TEST(SchedulerTest, RandomLoadKeepsTheRules) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const int blocks = 2 + static_cast<int>(random() % 12);
    const int sequences = 1 + static_cast<int>(random() % 6);
    const SchedulerOptions options = {.max_sequences = sequences,
                                      .max_batch_tokens = sequences + static_cast<int>(random() % 80),
                                      .max_scored_rows = 1 + static_cast<int>(random() % 20)};
    Story story(blocks, options);
    Scheduler& scheduler = story.scheduler();
    int64_t allowed_steps = 0;  // rule S9: the sum of all tokens
    int64_t steps = 0;
    for (int arrived = 0; arrived < 25 || !scheduler.empty();) {
      if (arrived < 25 && (scheduler.empty() || random() % 4 == 0)) {
        const int limit = 2 + static_cast<int>(random() % (blocks * cache::kBlockTokens - 1));
        const int prompt = 1 + static_cast<int>(random() % (limit - 1));
        story.Add(prompt, limit - prompt, random() % 3 == 0);
        allowed_steps += limit;
        ++arrived;
      }
      if (random() % 40 == 0) scheduler.Remove(1 + random() % story.last_id());

      const StepPlan plan = scheduler.Plan();
      int rows = 0;
      std::map<RequestId, int> parts;
      for (const StepPlan::Part& part : plan.parts) {
        rows += part.count;
        ASSERT_GT(part.count, 0);
        ASSERT_EQ(++parts[part.sequence->id], 1);
      }
      ASSERT_LE(rows, options.max_batch_tokens);
      if (!scheduler.empty()) {
        const RequestId oldest =
            scheduler.running().empty() ? scheduler.waiting().front()->id : scheduler.running().front()->id;
        ASSERT_EQ(parts.count(oldest), 1U) << "the oldest stands still";
        ++steps;
      }
      story.Run();
      ASSERT_LE(static_cast<int>(scheduler.running().size()), options.max_sequences);
      RequestId last = 0;
      int held = 0;
      for (const auto& sequence : scheduler.running()) {
        ASSERT_LT(last, sequence->id);
        last = sequence->id;
        held += static_cast<int>(sequence->blocks.size());
      }
      for (const auto& sequence : scheduler.waiting()) {
        ASSERT_LT(last, sequence->id);
        last = sequence->id;
        ASSERT_TRUE(sequence->blocks.empty());
      }
      ASSERT_EQ(story.pool().free_blocks(), blocks - held);
      ASSERT_LE(steps, allowed_steps);
    }
    EXPECT_EQ(story.pool().free_blocks(), blocks);
  }
}

}  // namespace
}  // namespace moesaic::engine
