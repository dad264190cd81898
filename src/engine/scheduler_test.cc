#include "engine/scheduler.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

#include "cache/kv_store.h"
#include "cache/swap_tier.h"

namespace moesaic::engine {
namespace {

struct RequestSpec {
  int prompt, output;
  bool prompt_logprobs = false;
  int shared = 0;   // number of leading tokens that the prompt shares with `with`
  char with = 'a';  // an earlier request
  int priority = 0;
  const char* client = "";
  int deadline = 0;  // seconds from now; 0: none
};

// Requests are named a, b, c, ... in order of arrival. Run() runs a step and describes it:
//   "-c +d a1 d64"   c is preempted, d is admitted, one token of a and 64 tokens of d are computed
//   "+d(70) d5"      70 tokens of d were in the cache
//   "+d(64+6) d5"    64 tokens of d were in the cache, and the next six in the swap space
// A sequence whose tokens are all computed then gets its next token. It is removed at its limit.
class Story {
 public:
  // copy_tokens: number of tokens that are computed in the time of copying a block to the swap space and
  // back.
  Story(int blocks, const SchedulerOptions& options, int swap_blocks = 0, double copy_tokens = 1)
      : pool_(blocks),
        store_(*cache::KvStore::Create({.layout = kLayout, .blocks = blocks, .swap_slots = swap_blocks},
                                       *threads_)),
        tree_(pool_, cache::MakeLruPolicy(), nullptr),
        scheduler_(pool_, tree_, tiers_, options) {
    if (swap_blocks == 0) return;
    swap_ = std::make_unique<cache::SwapTier>(pool_, kLayout, swap_blocks, /*attention_tokens=*/1000);
    swap_->SetCopyTokens(copy_tokens);
    tiers_.push_back(swap_.get());
  }

  void Add(const RequestSpec& spec) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = ++last_id_;
    std::vector<int32_t>& prompt = sequence->request.prompt;
    prompt.assign(spec.prompt, static_cast<int32_t>(sequence->id));
    if (spec.shared > 0) {
      const std::vector<int32_t>& other = prompts_.at(spec.with - 'a');
      std::copy(other.begin(), other.begin() + spec.shared, prompt.begin());
    }
    prompts_.push_back(prompt);
    sequence->request.prompt_logprobs = spec.prompt_logprobs;
    sequence->request.priority = spec.priority;
    sequence->request.client = spec.client;
    if (spec.deadline > 0) sequence->request.deadline = start_ + std::chrono::seconds(spec.deadline);
    sequence->tokens = prompt;
    sequence->limit = spec.prompt + spec.output;
    scheduler_.Add(std::move(sequence));
  }

  std::string Run() {
    StepPlan plan = scheduler_.Plan();
    std::string description;
    for (const Sequence* victim : plan.preempt) description += fmt::format("-{} ", Name(*victim));
    for (const StepPlan::Admission& next : plan.admit) {
      description += fmt::format("+{}", Name(*next.sequence));
      const auto cached = static_cast<int>(next.prefix.tokens());
      if (next.tokens > cached) {
        description += fmt::format("({}+{})", cached, next.tokens - cached);
      } else if (cached > 0) {
        description += fmt::format("({})", cached);
      }
      description += " ";
    }
    for (const StepPlan::ScheduledChunk& chunk : plan.chunks)
      description += fmt::format("{}{} ", Name(*chunk.sequence), chunk.count);
    const StepBatch batch = scheduler_.Commit(plan);
    CheckBatch(plan, batch);
    cache::KvResult result;
    store_->Apply(batch.ops_before, &result);
    scheduler_.Advance(plan);
    std::vector<RequestId> done;
    for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
      Sequence& sequence = *chunk.sequence;
      CheckContents(sequence, sequence.computed - chunk.count);
      WriteContents(sequence, sequence.computed - chunk.count);
      EXPECT_LE(sequence.computed, sequence.size());
      EXPECT_LE(sequence.computed, static_cast<int>(sequence.blocks.size()) * tensor::kKvBlockTokens);
      // Output tokens differ among requests.
      if (sequence.remaining() == 0) sequence.tokens.push_back(static_cast<int32_t>(1000 + sequence.id));
      if (sequence.size() == sequence.limit) done.push_back(sequence.id);
    }
    for (const RequestId id : done) EXPECT_TRUE(Remove(id));
    tree_.CheckStructure();
    if (!description.empty()) description.pop_back();
    return description;
  }

  // Runs steps until the description differs from `description`, and returns it. Counts the equal steps in
  // `steps`.
  std::string RunPast(const std::string& description, int* steps = nullptr) {
    std::string next;
    while ((next = Run()) == description) {
      if (steps != nullptr) ++*steps;
    }
    return next;
  }

  // Marks block `index` of a request's prompt, which is in the tree, as inexact.
  void MarkInexact(char request, int index) {
    pool_.SetInexact(tree_.Find("", prompts_.at(request - 'a')).blocks.at(index));
  }
  // Returns 'x' for each inexact block of a request's prompt, and '-' for the others.
  std::string Marks(char request) {
    std::string marks;
    for (const cache::BlockRef& block : tree_.Find("", prompts_.at(request - 'a')).blocks) {
      marks += pool_.inexact(block.index()) ? 'x' : '-';
    }
    return marks;
  }

  bool Remove(RequestId id) { return scheduler_.Remove(id); }
  static std::string Name(const Sequence& sequence) {
    return std::string(1, static_cast<char>('a' + (sequence.id - 1) % 26));
  }

  Scheduler& scheduler() { return scheduler_; }
  cache::BlockPool& pool() { return pool_; }
  int swapped() const {
    cache::TierStats stats;
    if (swap_ != nullptr) swap_->AddStats(&stats);
    return stats.swap.blocks;
  }
  int unheld() const { return pool_.free_blocks() + pool_.idle_blocks(); }
  RequestId last_id() const { return last_id_; }
  Clock::time_point start() const { return start_; }

 private:
  static constexpr tensor::KvLayout kLayout = {.layers = 1, .heads = 1, .key_dim = 1, .value_dim = 1};

  // The key of a position is its token.
  float& Key(const Sequence& sequence, int position) {
    const int32_t block = sequence.block_table[position / tensor::kKvBlockTokens];
    auto* keys = reinterpret_cast<float*>(store_->At(block));
    return keys[position % tensor::kKvBlockTokens];
  }
  void CheckContents(const Sequence& sequence, int tokens) {
    for (int i = 0; i < tokens; ++i) {
      ASSERT_EQ(Key(sequence, i), static_cast<float>(sequence.tokens[i])) << Name(sequence) << " at " << i;
    }
  }
  void WriteContents(const Sequence& sequence, int from) {
    for (int i = from; i < sequence.computed; ++i) Key(sequence, i) = static_cast<float>(sequence.tokens[i]);
  }

  // Expects that rows, tokens and blocks of the batch match the plan.
  static void CheckBatch(const StepPlan& plan, const StepBatch& batch) {
    ASSERT_EQ(batch.rows.size(), plan.chunks.size());
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      const BatchRows& rows = batch.rows[i];
      const Sequence& sequence = *plan.chunks[i].sequence;
      EXPECT_EQ(rows.sequence, sequence.id);
      EXPECT_EQ(rows.start, sequence.computed);
      ASSERT_EQ(rows.count, plan.chunks[i].rows());
      for (int row = 0; row < rows.count; ++row) {
        EXPECT_EQ(batch.tokens[rows.first_token + row], sequence.tokens[rows.start + row]);
      }
      for (int b = 0; b < rows.blocks; ++b) {
        EXPECT_EQ(batch.block_tables[rows.first_block + b], sequence.block_table[b]);
      }
    }
  }

  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  cache::BlockPool pool_;
  const std::unique_ptr<cache::KvStore> store_;
  std::unique_ptr<cache::SwapTier> swap_;
  std::vector<cache::KvTier*> tiers_;
  cache::RadixTree tree_;
  Scheduler scheduler_;
  std::vector<std::vector<int32_t>> prompts_;
  RequestId last_id_ = 0;
  Clock::time_point start_ = Clock::now();
};

constexpr SchedulerOptions kRoomy = {.max_sequences = 4, .max_batch_tokens = 100, .max_scored_rows = 100};
constexpr SchedulerOptions kOneAtATime = {
    .max_sequences = 1, .max_batch_tokens = 100, .max_scored_rows = 100, .max_overtakes = 3};

TEST(SchedulerTest, PrefillsInChunksAndMixesThemWithDecodes) {
  Story story(20, kRoomy);
  story.Add({30, 4});
  story.Add({150, 2});
  EXPECT_EQ(story.Run(), "+a +b a30 b70");
  EXPECT_EQ(story.Run(), "a1 b80");
  EXPECT_EQ(story.Run(), "a1 b1");
  EXPECT_EQ(story.Run(), "a1");
  EXPECT_EQ(story.Run(), "");
  EXPECT_EQ(story.unheld(), 20);
}

TEST(SchedulerTest, SchedulesDecodesBeforePrefills) {
  Story story(20, {.max_sequences = 3, .max_batch_tokens = 3, .max_scored_rows = 3});
  story.Add({3, 9});
  EXPECT_EQ(story.Run(), "+a a3");
  story.Add({5, 9});
  EXPECT_EQ(story.Run(), "+b a1 b2");
  EXPECT_EQ(story.Run(), "a1 b2");
  EXPECT_EQ(story.Run(), "a1 b1");
}

TEST(SchedulerTest, LimitsTheRunningSequences) {
  Story story(20, {.max_sequences = 2, .max_batch_tokens = 100, .max_scored_rows = 100});
  for (int i = 0; i < 3; ++i) story.Add({4, 2});
  EXPECT_EQ(story.Run(), "+a +b a4 b4");
  EXPECT_EQ(story.Run(), "a1 b1");
  EXPECT_EQ(story.Run(), "+c c4");
}

TEST(SchedulerTest, DoesNotSkipTheFirstRequestWhenBlocksAreMissing) {
  Story story(6, kRoomy);
  story.Add({64, 30});
  EXPECT_EQ(story.Run(), "+a a64");
  story.Add({5 * 64, 2});  // needs five blocks and two reserved ones; five are free
  story.Add({4, 2});
  EXPECT_EQ(story.Run(), "a1");
}

TEST(SchedulerTest, AdmissionReservesABlockForEachRunningSequence) {
  Story story(3, kRoomy);
  story.Add({50, 20});
  story.Add({10, 60});
  EXPECT_EQ(story.Run(), "+a a50");  // with b, one free block would remain for two sequences
  for (int i = 1; i < 20; ++i) EXPECT_EQ(story.Run(), "a1");
  EXPECT_EQ(story.Run(), "+b b10");
}

TEST(SchedulerTest, PreemptsTheYoungestAndReadmitsItWithCachedBlocks) {
  Story story(4, kRoomy);
  story.Add({50, 130});
  story.Add({10, 120});
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  int steps = 0;
  EXPECT_EQ(story.RunPast("a1 b1", &steps), "-b a1");    // a needs its third block
  EXPECT_EQ(steps, 78);                                  // tokens 50 .. 127 of a
  EXPECT_EQ(story.RunPast("a1", &steps), "+b(64) b25");  // b has 10 prompt tokens and 79 output tokens
  EXPECT_EQ(steps, 78 + 50);
}

TEST(SchedulerTest, WithoutACachePreemptedRequestsAreRecomputed) {
  SchedulerOptions options = kRoomy;
  options.prefix_cache = false;
  Story story(4, options);
  story.Add({50, 130});
  story.Add({10, 120});
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
  EXPECT_EQ(story.RunPast("a1"), "+b b89");
}

// Like the two tests above, but blocks outside the tree are swapped out and in.
TEST(SchedulerTest, SwapsThePartialBlockOfAPreemptedRequest) {
  Story story(4, kRoomy, /*swap_blocks=*/1);
  story.Add({50, 130});
  story.Add({10, 120});
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
  EXPECT_EQ(story.swapped(), 1);
  EXPECT_EQ(story.RunPast("a1"), "+b(64+24) b1");
  EXPECT_EQ(story.swapped(), 0);
}

TEST(SchedulerTest, WithoutACacheAllBlocksAreSwapped) {
  SchedulerOptions options = kRoomy;
  options.prefix_cache = false;
  Story story(4, options, /*swap_blocks=*/2);
  story.Add({50, 130});
  story.Add({10, 120});
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
  EXPECT_EQ(story.swapped(), 2);
  EXPECT_EQ(story.RunPast("a1"), "+b(0+88) b1");
}

TEST(SchedulerTest, SwapsBlocksThatTheTreeEvicts) {
  Story story(6, kRoomy, /*swap_blocks=*/6);
  story.Add({100, 284});  // six blocks at its limit
  story.Add({90, 100});
  EXPECT_EQ(story.Run(), "+a a100");
  EXPECT_EQ(story.Run(), "+b a1 b90");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1") << "a needs its fourth block";
  EXPECT_EQ(story.swapped(), 1) << "two of b's three blocks are in the tree";
  EXPECT_EQ(story.RunPast("a1"), "+b(0+181) b1") << "a has ended and evicted b's blocks from the tree";
}

TEST(SchedulerTest, RecomputesBlocksThatTheSwapSpaceCannotHold) {
  Story story(6, kRoomy, /*swap_blocks=*/2);
  story.Add({100, 284});
  story.Add({90, 100});
  EXPECT_EQ(story.Run(), "+a a100");
  EXPECT_EQ(story.Run(), "+b a1 b90");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
  EXPECT_EQ(story.RunPast("a1"), "+b b100")
      << "the swap space was full when the first block of b was evicted";
  EXPECT_EQ(story.swapped(), 0);
}

TEST(SchedulerTest, BlocksCheaperToRecomputeAreNotSwapped) {
  Story story(4, kRoomy, /*swap_blocks=*/4, /*copy_tokens=*/50);  // 88 tokens in two blocks
  story.Add({50, 130});
  story.Add({10, 120});
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
  EXPECT_EQ(story.swapped(), 0);
  EXPECT_EQ(story.RunPast("a1"), "+b(64) b25");
}

TEST(SchedulerTest, CancellationFreesSwapSlots) {
  Story story(4, kRoomy, /*swap_blocks=*/4);
  story.Add({50, 130});
  story.Add({10, 120});
  EXPECT_EQ(story.Run(), "+a +b a50 b10");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
  EXPECT_TRUE(story.Remove(2));
  EXPECT_EQ(story.swapped(), 0);
  EXPECT_EQ(story.RunPast("a1"), "");
}

TEST(SchedulerTest, RemoveFreesBlocksAtOnce) {
  Story story(8, kRoomy);
  story.Add({64, 9});
  story.Add({64, 9});
  story.Run();
  EXPECT_EQ(story.unheld(), 6);
  EXPECT_TRUE(story.Remove(1));
  EXPECT_EQ(story.unheld(), 7);
  EXPECT_FALSE(story.Remove(1));
}

TEST(SchedulerTest, PlanHasNoSideEffects) {
  Story story(8, kRoomy);
  story.Add({64, 9});
  story.scheduler().Plan();
  EXPECT_EQ(story.pool().free_blocks(), 8);
  EXPECT_TRUE(story.scheduler().running().empty());
  EXPECT_EQ(story.Run(), "+a a64");
}

TEST(SchedulerTest, ScoredPromptsHaveTheirOwnRowLimit) {
  Story story(20, {.max_sequences = 4, .max_batch_tokens = 100, .max_scored_rows = 10});
  story.Add({25, 2, /*prompt_logprobs=*/true});
  story.Add({15, 2});
  EXPECT_EQ(story.Run(), "+a +b a10 b15");
}

TEST(SchedulerTest, CachedPrefixesAreNotRecomputed) {
  Story story(20, kRoomy);
  story.Add({80, 1});
  EXPECT_EQ(story.Run(), "+a a80");
  story.Add({.prompt = 90, .output = 1, .shared = 80});
  EXPECT_EQ(story.Run(), "+b(64) b26");
  story.Add({.prompt = 90, .output = 1, .shared = 90, .with = 'b'});
  EXPECT_EQ(story.Run(), "+c(64) c26") << "only whole blocks are cached";
  story.Add({150, 1});
  EXPECT_EQ(story.Run(), "+d d100");
  EXPECT_EQ(story.Run(), "d50");
  story.Add({.prompt = 128, .output = 1, .shared = 128, .with = 'd'});
  EXPECT_EQ(story.Run(), "+e(127) e1") << "the last token is computed for its logits";
  story.Add({.prompt = 128, .output = 1, .shared = 100, .with = 'd'});
  EXPECT_EQ(story.Run(), "+f(100) f28") << "36 tokens of the second block are copied";
}

TEST(SchedulerTest, BlocksComputedAfterAnInexactBlockAreInexact) {
  Story story(30, kRoomy);
  story.Add({192, 2});
  while (!story.Run().empty()) continue;
  EXPECT_EQ(story.Marks('a'), "---");
  story.MarkInexact('a', 1);
  story.Add({.prompt = 320, .output = 2, .shared = 192, .with = 'a'});
  while (!story.Run().empty()) continue;
  EXPECT_EQ(story.Marks('b'), "-x-xx") << "the third block was computed before the mark";
  story.Add({.prompt = 192, .output = 2});
  while (!story.Run().empty()) continue;
  EXPECT_EQ(story.Marks('c'), "---");
}

TEST(SchedulerTest, BlocksThatBeginWithRowsOfAnInexactBlockAreInexact) {
  Story story(30, kRoomy);
  story.Add({128, 2});
  while (!story.Run().empty()) continue;
  story.MarkInexact('a', 1);
  story.Add({.prompt = 256, .output = 2, .shared = 100, .with = 'a'});
  EXPECT_EQ(story.Run(), "+b(100) b100");
  while (!story.Run().empty()) continue;
  EXPECT_EQ(story.Marks('b'), "-xxx");
}

TEST(SchedulerTest, ScoredPromptsIgnoreTheCache) {
  Story story(20, kRoomy);
  story.Add({80, 1});
  story.Run();
  story.Add({.prompt = 80, .output = 2, .prompt_logprobs = true, .shared = 80});
  EXPECT_EQ(story.Run(), "+b b80");
}

TEST(SchedulerTest, WaitsForASharedPrefixThatIsBeingComputed) {
  Story story(20, kRoomy);
  story.Add({250, 3});
  story.Add({.prompt = 260, .output = 3, .shared = 250});  // three blocks of its prefix are computed for a
  story.Add({20, 3});                                      // shares no prefix
  EXPECT_EQ(story.Run(), "+a a100");
  EXPECT_EQ(story.Run(), "a100");
  EXPECT_EQ(story.Run(), "+b(192) a50 b50") << "the last whole block of a is computed";
  EXPECT_EQ(story.Run(), "+c a1 b18 c20");
}

TEST(SchedulerTest, CopiesOfThePromptBeingComputedDoNotDelayOthers) {
  Story story(40, {.max_sequences = 4, .max_batch_tokens = 100, .max_scored_rows = 10});
  story.Add({.prompt = 640, .output = 3, .prompt_logprobs = true});  // leaves rows to others
  for (int i = 0; i < 20; ++i) story.Add({.prompt = 650, .output = 3, .shared = 640});
  story.Add({20, 3});
  EXPECT_EQ(story.Run(), "+a +v a10 v20");
}

TEST(SchedulerTest, DoesNotWaitForARemovedRequest) {
  Story story(20, kRoomy);
  story.Add({250, 3});
  story.Add({.prompt = 250, .output = 3, .shared = 250});
  EXPECT_EQ(story.Run(), "+a a100");
  story.Remove(1);
  EXPECT_EQ(story.Run(), "+b(64) b100");
}

TEST(SchedulerTest, EvictsCachedBlocksForNewRequests) {
  Story story(4, kRoomy);
  story.Add({200, 2});
  EXPECT_EQ(story.Run(), "+a a100");
  EXPECT_EQ(story.Run(), "a100");
  EXPECT_EQ(story.Run(), "a1");
  EXPECT_EQ(story.pool().idle_blocks(), 3);
  story.Add({250, 2});
  EXPECT_EQ(story.Run(), "+b b100");
  EXPECT_EQ(story.pool().idle_blocks(), 0);
}

TEST(SchedulerTest, EvictsTheBlockToCopyFromIfNeededForAdmission) {
  Story story(3, kRoomy);
  story.Add({128, 1});
  EXPECT_EQ(story.Run(), "+a a100");
  EXPECT_EQ(story.Run(), "a28");
  story.Add({.prompt = 180, .output = 1, .shared = 100});
  EXPECT_EQ(story.Run(), "+b(64) b100") << "all blocks are needed, so the block to copy from is evicted";
}

TEST(SchedulerTest, AdmitsLowerPriorityNumbersFirst) {
  Story story(20, kOneAtATime);
  story.Add({.prompt = 4, .output = 1, .priority = 5});
  story.Add({.prompt = 4, .output = 1, .priority = -1});
  story.Add({.prompt = 4, .output = 1, .priority = 0});
  EXPECT_EQ(story.Run(), "+b b4");
  EXPECT_EQ(story.Run(), "+c c4");
  EXPECT_EQ(story.Run(), "+a a4");
}

TEST(SchedulerTest, NoRequestIsOvertakenForever) {
  Story story(20, kOneAtATime);  // at most three overtakes
  story.Add({.prompt = 4, .output = 1, .priority = 9});
  std::string description;
  for (int i = 0; i < 5; ++i) {
    story.Add({.prompt = 4, .output = 1, .priority = 0});
    description += story.Run() + ", ";
  }
  EXPECT_EQ(description, "+b b4, +c c4, +d d4, +a a4, +e e4, ");
}

TEST(SchedulerTest, DividesTokensFairlyAmongClients) {
  Story story(20, {.max_sequences = 1, .max_batch_tokens = 100, .max_scored_rows = 100});
  for (int i = 0; i < 4; ++i) story.Add({.prompt = 40, .output = 1, .client = "greedy"});
  story.Add({.prompt = 40, .output = 1, .client = "modest"});  // e
  story.Add({.prompt = 10, .output = 1, .client = "modest"});  // f
  EXPECT_EQ(story.Run(), "+a a40");
  EXPECT_EQ(story.Run(), "+e e40");
  EXPECT_EQ(story.Run(), "+b b40") << "both clients got 40 tokens";
  EXPECT_EQ(story.Run(), "+f f10");
  EXPECT_EQ(story.Run(), "+c c40");
}

TEST(SchedulerTest, ANewClientStartsWithoutCredit) {
  Story story(20, {.max_sequences = 1, .max_batch_tokens = 100, .max_scored_rows = 100});
  for (int i = 0; i < 4; ++i) story.Add({.prompt = 40, .output = 1, .client = "old"});
  EXPECT_EQ(story.Run(), "+a a40");
  EXPECT_EQ(story.Run(), "+b b40");
  story.Add({.prompt = 30, .output = 1, .client = "new"});  // e
  story.Add({.prompt = 30, .output = 1, .client = "new"});
  EXPECT_EQ(story.Run(), "+e e30") << "both clients count 80 tokens, and \"new\" sorts first";
  EXPECT_EQ(story.Run(), "+c c40") << "the new client has no credit for f";
}

TEST(SchedulerTest, AdmitsTheEarliestDeadlineOfAClientFirst) {
  Story story(20, kOneAtATime);
  story.Add({4, 1});
  story.Add({.prompt = 4, .output = 1, .deadline = 50});
  story.Add({.prompt = 4, .output = 1, .deadline = 20});
  EXPECT_EQ(story.Run(), "+c c4");
  EXPECT_EQ(story.Run(), "+b b4");
  EXPECT_EQ(story.Run(), "+a a4");
}

TEST(SchedulerTest, ReportsRequestsPastTheirDeadline) {
  Story story(20, kOneAtATime);
  story.Add({.prompt = 4, .output = 9, .deadline = 50});
  story.Add({.prompt = 4, .output = 9, .deadline = 20});
  story.Add({4, 9});
  story.Run();
  const auto past = [&](int seconds) {
    return story.scheduler().PastDeadline(story.start() + std::chrono::seconds(seconds));
  };
  EXPECT_EQ(past(19), std::vector<RequestId>{});
  EXPECT_EQ(past(20), std::vector<RequestId>{2});
  EXPECT_EQ(past(60).size(), 2U);
}

TEST(SchedulerTest, PreemptsTheLowestPriorityFirst) {
  Story story(6, kRoomy);
  story.Add({.prompt = 10, .output = 150, .priority = 0});
  story.Add({.prompt = 10, .output = 150, .priority = 7});
  story.Add({.prompt = 10, .output = 150, .priority = 3});
  EXPECT_EQ(story.Run(), "+a +c +b a10 c10 b10");
  EXPECT_EQ(story.RunPast("a1 c1 b1"), "-b a1 c1") << "c is younger but has a better priority";
}

TEST(SchedulerTest, DoesNotPreemptTheFrontRequest) {
  Story story(4, kRoomy);
  story.Add({.prompt = 10, .output = 150, .priority = 7});
  EXPECT_EQ(story.Run(), "+a a10");
  story.Add({.prompt = 10, .output = 150, .priority = 0});
  EXPECT_EQ(story.Run(), "+b a1 b10");
  EXPECT_EQ(story.RunPast("a1 b1"), "-b a1");
}

// Runs random requests and cancellations in pools of random size. Checks the rules of
// docs/contracts/scheduler.md after every step.
class RandomLoad {
 public:
  explicit RandomLoad(uint32_t seed)
      : random_(seed),
        blocks_(2 + Below(12)),
        options_({.max_sequences = 1 + Below(6),
                  .max_batch_tokens = 6 + Below(80),
                  .max_scored_rows = 1 + Below(20),
                  .max_overtakes = 1 + Below(5),
                  .prefix_cache = Below(5) > 0}),
        story_(blocks_, options_, Below(3) * (1 + Below(8)), Below(3) * 40.0) {}

  void Run() {
    Scheduler& scheduler = story_.scheduler();
    for (int arrived = 0; arrived < 25 || !scheduler.empty(); ++step_) {
      if (arrived < 25 && (scheduler.empty() || Below(4) == 0)) {
        Arrive();
        ++arrived;
      }
      if (Below(40) == 0) story_.Remove(1 + Below(static_cast<int>(story_.last_id())));
      CheckPlan();
      story_.Run();
      ASSERT_NO_FATAL_FAILURE(CheckState());
    }
    EXPECT_EQ(story_.unheld(), blocks_);
    EXPECT_EQ(story_.swapped(), 0);
  }

 private:
  struct Arrival {
    int64_t step;
    int64_t bound;  // rule S9
  };

  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  void Arrive() {
    static constexpr const char* kClients[] = {"", "x", "y"};
    const int limit = 2 + Below(blocks_ * tensor::kKvBlockTokens - 1);
    const int prompt = 1 + Below(limit - 1);
    RequestSpec spec = {.prompt = prompt, .output = limit - prompt, .prompt_logprobs = Below(4) == 0};
    if (story_.last_id() > 0 && Below(2) == 0) {
      const int with = Below(static_cast<int>(story_.last_id()));
      spec.with = static_cast<char>('a' + with);
      spec.shared = std::min(prompt, 1 + Below(prompts_[with]));
    }
    spec.priority = Below(3);
    spec.client = kClients[Below(3)];
    story_.Add(spec);
    prompts_.push_back(prompt);
    int64_t older = limit;
    for (const auto* sequences : {&story_.scheduler().running(), &story_.scheduler().waiting()}) {
      for (const auto& sequence : *sequences) older += sequence->limit;
    }
    const int64_t younger = options_.max_overtakes + 2 * options_.max_sequences + 1;
    arrivals_[story_.last_id()] = {step_, older + younger * blocks_ * tensor::kKvBlockTokens};
  }

  void CheckPlan() {
    const Scheduler& scheduler = story_.scheduler();
    const StepPlan plan = scheduler.Plan();
    int rows = 0;
    std::set<RequestId> parts;
    for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
      rows += chunk.count;
      ASSERT_GT(chunk.count, 0);
      ASSERT_TRUE(parts.insert(chunk.sequence->id).second);
    }
    ASSERT_LE(rows, options_.max_batch_tokens);
    ASSERT_TRUE(scheduler.empty() || !parts.empty());
    ASSERT_TRUE(scheduler.front() == 0 || parts.contains(scheduler.front()))
        << "the front request makes no progress";
    for (const StepPlan::Admission& admission : plan.admit) {
      ASSERT_LE(admission.sequence->overtaken, options_.max_overtakes + options_.max_sequences);
    }
    ASSERT_TRUE(plan.preempt.empty() || plan.admit.empty());
  }

  void CheckState() {
    const Scheduler& scheduler = story_.scheduler();
    ASSERT_LE(static_cast<int>(scheduler.running().size()), options_.max_sequences);
    std::set<int32_t> held;
    for (const auto& sequence : scheduler.running()) {
      ASSERT_EQ(sequence->blocks.size(), sequence->block_table.size());
      for (size_t i = 0; i < sequence->blocks.size(); ++i) {
        ASSERT_EQ(sequence->blocks[i].index(), sequence->block_table[i]);
        held.insert(sequence->block_table[i]);
      }
      ASSERT_LE(step_ - arrivals_[sequence->id].step, arrivals_[sequence->id].bound);
    }
    for (const auto& sequence : scheduler.waiting()) {
      ASSERT_TRUE(sequence->blocks.empty());
      ASSERT_LE(step_ - arrivals_[sequence->id].step, arrivals_[sequence->id].bound);
    }
    ASSERT_EQ(story_.unheld(), blocks_ - static_cast<int>(held.size()));
  }

  std::mt19937 random_;
  const int blocks_;
  const SchedulerOptions options_;
  Story story_;
  std::vector<int> prompts_;
  std::map<RequestId, Arrival> arrivals_;
  int64_t step_ = 0;
};

TEST(SchedulerTest, RandomLoadKeepsTheRules) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    RandomLoad load(seed);
    load.Run();
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace moesaic::engine
