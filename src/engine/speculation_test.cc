// Speculative decoding with the fake model: outputs are those without speculation for all drafts, and
// accepted drafts save steps.
#include "engine/speculation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "engine/byte_tokenizer.h"
#include "engine/engine.h"
#include "engine/fake_model.h"
#include "engine/ngram_drafter.h"
#include "kernels/kernel_table.h"
#include "text/grammar.h"

namespace moesaic::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// With the MTP module's layer.
constexpr int64_t kDraftedBlockBytes = 3 * 3 * 64 * (2 + 1) * 4;

struct Said {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stopped_by;
  bool operator==(const Said&) const = default;
};
using AllSaid = std::map<RequestId, Said>;

class SpeculationTest : public testing::Test {
 protected:
  SpeculationTest() : threads_(*runtime::ThreadPool::Create({.threads = 2, .pin = false})) {}

  std::unique_ptr<Engine> Make(FakeModel& model, const std::string& method, EngineOptions options = {},
                               bool adaptive = false) {
    if (options.kv_bytes == 0) options.kv_bytes = 64 * kDraftedBlockBytes;
    options.speculative.method = method;
    options.speculative.adaptive = adaptive;
    auto engine = Engine::Create(model, kernels_, *threads_, options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  static AllSaid Drain(Engine& engine) {
    AllSaid all;
    std::vector<TokenEvent> events;
    for (int step = 0; step < 100000 && !engine.idle(); ++step) {
      events.clear();
      const Status status = engine.Step(&events);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) break;
      for (const TokenEvent& event : events) {
        Said& said = all[event.request];
        EXPECT_EQ(said.finish, FinishReason::kNone) << "an event follows the end";
        if (event.token) said.tokens.push_back(*event.token);
        if (event.token) said.logprobs.push_back(event.logprobs.logprob);
        said.finish = event.finish;
        if (event.stopped_by) said.stopped_by = event.stopped_by;
      }
    }
    EXPECT_TRUE(engine.idle());
    const EngineStats stats = engine.stats();
    EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
    return all;
  }

  static AllSaid RunAll(Engine& engine, const std::vector<Request>& requests) {
    for (const Request& request : requests) EXPECT_TRUE(engine.Add(request).ok());
    return Drain(engine);
  }

  static Request MakeRequest(int prompt, uint32_t seed, int max_tokens, float temperature) {
    std::mt19937 random(seed);
    Request request;
    for (int i = 0; i < prompt; ++i) request.prompt.push_back(static_cast<int32_t>(random() % 97));
    request.sampling.max_tokens = max_tokens;
    request.sampling.temperature = temperature;
    request.sampling.seed = 1000 + seed;
    request.sampling.logprobs = 0;
    return request;
  }

  // Returns twelve requests with different sampling parameters.
  static std::vector<Request> Mixed() {
    std::vector<Request> requests;
    for (uint32_t i = 0; i < 12; ++i) {
      requests.push_back(MakeRequest(1 + static_cast<int>(i * 37 % 100), i,
                                     20 + static_cast<int>(i * 53 % 240), i % 2 == 0 ? 0.0F : 0.3F));
      SamplingParams& sampling = requests.back().sampling;
      if (i % 3 == 0) sampling.repetition_penalty = 1.1F;
      if (i % 4 == 1) sampling.top_p = 0.7F;
      if (i % 5 == 2) sampling.frequency_penalty = 0.4F;
      if (i % 4 == 3) sampling.min_tokens = 9;
      if (i % 6 == 4) sampling.logit_bias = {{5, 2.0F}, {9, -3.0F}};
    }
    return requests;
  }

  kernels::KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> threads_;
};

TEST(LookUpTest, FindsTheLongestEarlierMatch) {
  const std::vector<int32_t> tokens = {7, 1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3};
  EXPECT_THAT(LookUp(tokens, 2, 5, 3), ElementsAre(4, 9, 2)) << "the match is 1 2 3, not 2 3";
  EXPECT_THAT(LookUp(tokens, 2, 2, 3), ElementsAre(4, 9, 2)) << "the earliest match of equal length is used";
  EXPECT_THAT(LookUp(tokens, 4, 5, 3), IsEmpty());
  EXPECT_THAT(LookUp(tokens, 1, 1, 20), ElementsAre(4, 9, 2, 3, 5, 1, 2, 3))
      << "the draft ends with the tokens";
}

TEST(LookUpTest, AMatchMayOverlapTheEnd) {
  EXPECT_THAT(LookUp(std::vector<int32_t>{4, 4, 4, 4}, 1, 2, 5), ElementsAre(4, 4));
  EXPECT_THAT(LookUp(std::vector<int32_t>{4}, 1, 2, 5), IsEmpty());
  EXPECT_THAT(LookUp(std::vector<int32_t>{1, 2, 3}, 1, 2, 5), IsEmpty());
}

TEST_F(SpeculationTest, MtpKeepsOutputsInFewerSteps) {
  for (const uint64_t misses_every : {0, 3, 1}) {
    FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
    const std::vector<Request> requests = Mixed();
    const AllSaid without = RunAll(*Make(model, "off"), requests);
    const int steps = std::exchange(model.steps, 0);
    model.misses_every = misses_every;
    auto engine = Make(model, "mtp");
    EXPECT_EQ(RunAll(*engine, requests), without) << "one draft in " << misses_every << " is wrong";
    const SpeculationStats stats = engine->stats().speculation;
    EXPECT_GT(stats.drafts, 100);
    if (misses_every == 0) {
      EXPECT_LT(model.steps, steps * 4 / 5);
    }
    if (misses_every == 1) {
      EXPECT_LT(stats.accepted_tokens, stats.draft_tokens / 20);
    }
    EXPECT_EQ(engine->stats().output_tokens, [&] {
      int64_t tokens = 0;
      for (const auto& [id, said] : without) tokens += static_cast<int64_t>(said.tokens.size());
      return tokens;
    }());
  }
}

// A greedy request that runs alone accepts every draft of a module that is always right.
TEST_F(SpeculationTest, MtpDraftsOfASingleRequestAreAccepted) {
  FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
  auto engine = Make(model, "mtp", {.speculative = {.most_tokens = 3}});
  RunAll(*engine, {MakeRequest(100, 1, 201, 0)});
  const SpeculationStats stats = engine->stats().speculation;
  EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
  EXPECT_EQ(stats.accepted_at[0], stats.drafts);
  // The prompt gives one token. The other 200 take one step per four tokens, with shorter drafts at block
  // ends.
  EXPECT_LE(model.steps, 1 + 50 + 6);
}

TEST_F(SpeculationTest, LookUpKeepsOutputsInFewerSteps) {
  FakeModel model(512);
  model.memory = 1;  // the next token depends on one token, so that the output soon repeats
  std::vector<Request> requests = Mixed();
  const AllSaid without = RunAll(*Make(model, "off"), requests);
  const int steps = std::exchange(model.steps, 0);
  auto engine = Make(model, "ngram");
  EXPECT_EQ(RunAll(*engine, requests), without);
  EXPECT_LT(model.steps, steps);
  EXPECT_GT(engine->stats().speculation.accepted_tokens, 100);
}

// A step of this model takes much longer than its module, and hardly longer with more rows. Accepted drafts
// save time.
class SlowModel : public FakeModel {
 public:
  using FakeModel::FakeModel;
  Status Forward(const kernels::ExecContext& context, const models::ForwardBatch& batch,
                 std::span<const kernels::KvLayer> kv, const models::ForwardOutput& out) override {
    std::this_thread::sleep_for(step_time);
    return FakeModel::Forward(context, batch, kv, out);
  }
  std::chrono::microseconds step_time{0};
};

// The module drafts where the lookup finds no match. It first computes the rows of the tokens since its last
// draft.
TEST_F(SpeculationTest, MtpWithLookUpKeepsOutputs) {
  for (const size_t memory : {0, 1}) {  // the next token depends on all tokens; on one token
    SlowModel model(512, FakeModel::kVocab, /*mtp=*/true);
    model.memory = memory;
    const AllSaid expected = RunAll(*Make(model, "off"), Mixed());
    for (const bool adaptive : {true, false}) {
      model.step_time = std::chrono::milliseconds(adaptive ? 2 : 0);
      model.mtp_rows = 0;
      auto engine = Make(model, "mtp+ngram", {}, adaptive);
      EXPECT_EQ(RunAll(*engine, Mixed()), expected);
      // With all tokens the fake module is right and lookups rarely are. With one token it is the reverse.
      const SpeculationStats stats = engine->stats().speculation;
      EXPECT_GT(stats.accepted_tokens, 100) << memory << adaptive;
      EXPECT_GT(model.mtp_rows, 0) << memory << adaptive;
      if (memory == 1) {
        EXPECT_GT(stats.accepted_at[kMtpTokens], 0) << "lookups draft more tokens than the module";
      }
      EXPECT_EQ(model.mtp_gaps, 0);
    }
  }
}

// A drafter that is always right, drafts one token and costs no time.
class Oracle : public Drafter {
 public:
  explicit Oracle(const std::vector<int32_t>& text) : text_(text) {}
  int Limit(const Sequence&, int most) override { return std::min(1, most); }
  int PendingRows(const Sequence&) const override { return 0; }
  Status Draft(std::span<const DraftJob> jobs) override {
    for (const DraftJob& job : jobs) job.sequence->draft.tokens = {text_[job.sequence->size()]};
    return OkStatus();
  }

 private:
  const std::vector<int32_t>& text_;
};

// Drafts one token that the grammar refuses. Not free.
class Refused : public Drafter {
 public:
  int Limit(const Sequence&, int most) override { return std::min(1, most); }
  int PendingRows(const Sequence&) const override { return 0; }
  Status Draft(std::span<const DraftJob> jobs) override {
    calls += static_cast<int>(jobs.size());
    for (const DraftJob& job : jobs) job.sequence->draft.tokens = {'z' - '!'};
    return OkStatus();
  }
  int calls = 0;
};

TEST(SpeculationSourcesTest, DraftsThatTheGrammarRefusesCountAsWrong) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  auto owned = std::make_unique<Refused>();
  const Refused& drafter = *owned;
  Speculation speculation({std::move(owned), 1}, {}, /*adaptive=*/true);
  std::vector<std::unique_ptr<Sequence>> running;
  Sequence& sequence = *running.emplace_back(std::make_unique<Sequence>());
  sequence.request.prompt = {1};
  sequence.request.grammar =
      std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, "[ab]{500}"));
  sequence.tokens = {1, 'a' - '!'};
  sequence.computed = 1;
  sequence.limit = 1000;
  constexpr int kSteps = 200;
  for (int step = 0; step < kSteps; ++step) {
    speculation.Draft(running, 100);
    EXPECT_THAT(sequence.draft.tokens, IsEmpty());
    StepPlan plan;
    plan.chunks.push_back({.sequence = &sequence, .count = 1, .new_blocks = 0});
    speculation.Computed(plan, {}, 1);
    sequence.tokens.push_back('a' - '!');
    sequence.computed = sequence.size() - 1;
  }
  EXPECT_LT(drafter.calls, kSteps / 2);
}

// Sequences, including new ones, use no lookups while the module is right and lookups are wrong. They use
// lookups again once these would have been right, even if no step has verified them.
TEST(SpeculationSourcesTest, ResumesLookUpsThatWouldBeAccepted) {
  std::vector<int32_t> text;
  Speculation speculation({std::make_unique<Oracle>(text), 1}, {std::make_unique<NgramDrafter>(2, 5), 8},
                          /*adaptive=*/true);
  std::vector<std::unique_ptr<Sequence>> running(1);
  const auto begin = [&] {
    running[0] = std::make_unique<Sequence>();
    running[0]->request.prompt = {text[0]};
    running[0]->tokens = {text[0], text[1]};
    running[0]->computed = 1;
    running[0]->limit = 1000;
  };
  // Runs `steps` steps and returns the number of steps that verified looked-up drafts.
  const auto run = [&](int steps) {
    int looked_up = 0;
    Sequence& sequence = *running[0];
    for (int step = 0; step < steps; ++step) {
      speculation.Draft(running, 100);
      const std::vector<int32_t>& drafts = sequence.draft.tokens;
      const auto next = text.begin() + sequence.size();
      StepPlan plan;
      plan.chunks.push_back({.sequence = &sequence, .count = 1, .new_blocks = 0});
      plan.chunks[0].drafts = static_cast<int>(drafts.size());
      const auto right = std::mismatch(drafts.begin(), drafts.end(), next).first - drafts.begin();
      plan.chunks[0].accepted = static_cast<int>(right);
      sequence.tokens.insert(sequence.tokens.end(), next, next + right + 1);
      if (!drafts.empty() && sequence.draft.looked_up) ++looked_up;
      sequence.tokens.pop_back();  // the drawn token is added after Computed
      speculation.Computed(plan, {}, 1 + 0.05 * plan.chunks[0].drafts);
      sequence.tokens.push_back(text[sequence.size()]);
      sequence.computed = sequence.size() - 1;
    }
    return looked_up;
  };

  for (int i = 0; i < 300; ++i) text.insert(text.end(), {1, 2, 100 + i});  // 1 2 has many successors
  begin();
  run(50);
  EXPECT_EQ(run(50), 0);
  begin();
  EXPECT_EQ(run(30), 0) << "the record of all lookups counts";

  text.clear();
  for (int i = 0; i < 1000; ++i) text.push_back(i % 7);
  begin();
  run(40);
  EXPECT_GT(run(40), 30);
}

TEST_F(SpeculationTest, ADraftModelKeepsOutputsInFewerSteps) {
  FakeModel model(512), twin(512), stranger(512);
  stranger.memory = 2;
  const AllSaid without = RunAll(*Make(model, "off"), Mixed());
  for (FakeModel* draft : {&twin, &stranger}) {
    for (const int64_t blocks : {64, 6}) {
      auto engine = Make(model, "draft",
                         {.kv_bytes = blocks * kDraftedBlockBytes,
                          .max_sequences = 4,
                          .max_batch_tokens = 40,
                          .speculative = {.draft_model = draft}});
      EXPECT_EQ(RunAll(*engine, Mixed()), without);
      EXPECT_EQ(engine->stats().preemptions > 0, blocks == 6);
      EXPECT_GT(engine->stats().speculation.draft_tokens, 100);
    }
  }
  auto engine = Make(model, "draft", {.speculative = {.most_tokens = 3, .draft_model = &twin}});
  twin.computed = model.steps = 0;
  RunAll(*engine, {MakeRequest(100, 1, 201, 0)});
  const SpeculationStats stats = engine->stats().speculation;
  EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
  EXPECT_LE(model.steps, 1 + 50 + 1);
  EXPECT_LE(twin.computed, 301) << "no token is computed twice";
}

TEST_F(SpeculationTest, ADraftModelReadsACachedPrefixInSeveralSteps) {
  constexpr int kRows = 40;
  FakeModel model(1024), twin(1024);
  auto engine = Make(model, "draft",
                     {.max_batch_tokens = kRows, .speculative = {.most_tokens = 3, .draft_model = &twin}});
  Request request = MakeRequest(700, 1, 1, 0);
  RunAll(*engine, {request});
  request.prompt.push_back(5);  // follows cached blocks
  request.sampling.max_tokens = 150;
  ASSERT_TRUE(engine->Add(request).ok());
  std::vector<TokenEvent> events;
  while (!engine->idle()) {
    const int64_t before = twin.computed;
    ASSERT_TRUE(engine->Step(&events).ok());
    EXPECT_LE(twin.computed - before, kRows + 3 * (kMaxDrafts + 1));
  }
  EXPECT_GT(engine->stats().speculation.accepted_tokens, 20);
}

TEST_F(SpeculationTest, DraftsUseOnlyTheRemainingRows) {
  FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
  const AllSaid without = RunAll(*Make(model, "off"), Mixed());
  model.largest_step = 0;
  auto engine = Make(model, "mtp", {.max_sequences = 6, .max_batch_tokens = 8});
  EXPECT_EQ(RunAll(*engine, Mixed()), without);
  EXPECT_EQ(model.largest_step, 8U);
  EXPECT_GT(engine->stats().speculation.accepted_tokens, 0);
}

TEST_F(SpeculationTest, OutputsDoNotDependOnPreemption) {
  FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
  const AllSaid without = RunAll(*Make(model, "off"), Mixed());
  model.misses_every = 4;
  for (const bool prefix_cache : {true, false}) {
    for (const int64_t swap_blocks : {0, 6}) {
      auto engine = Make(model, "mtp",
                         {.kv_bytes = 9 * kDraftedBlockBytes,
                          .swap_bytes = swap_blocks * kDraftedBlockBytes,
                          .max_sequences = 4,
                          .max_batch_tokens = 40,
                          .prefix_cache = prefix_cache});
      EXPECT_EQ(RunAll(*engine, Mixed()), without);
      EXPECT_GT(engine->stats().preemptions, 0);
      EXPECT_GT(engine->stats().speculation.accepted_tokens, 0);
    }
  }
}

// Blocks in the tree contain output tokens, never rejected drafts.
TEST_F(SpeculationTest, ASecondTurnFindsTheBlocksOfTheOutput) {
  FakeModel model(2048, FakeModel::kVocab, /*mtp=*/true);
  model.misses_every = 3;
  Request request = MakeRequest(70, 5, 150, 0);
  Request second = request;
  const AllSaid first = RunAll(*Make(model, "off"), {request});
  second.prompt.insert(second.prompt.end(), first.at(1).tokens.begin(), first.at(1).tokens.end());
  const AllSaid expected = RunAll(*Make(model, "off"), {second});
  auto engine = Make(model, "mtp");
  RunAll(*engine, {request});
  const int64_t accepted = engine->stats().speculation.accepted_tokens;
  model.mtp_rows = 0;
  EXPECT_EQ(RunAll(*engine, {second}).at(2), expected.at(1));
  EXPECT_GE(engine->stats().cache_hits, 192);
  EXPECT_GT(engine->stats().speculation.accepted_tokens, accepted + 60);
  EXPECT_LT(model.mtp_rows, 500) << "the module's rows of cached blocks are not computed again";
}

// Requests without drafts leave blocks that lack the module's rows. The module restarts after these blocks in
// the next turn.
TEST_F(SpeculationTest, MtpRestartsAfterBlocksThatLackItsRows) {
  FakeModel model(2048, FakeModel::kVocab, /*mtp=*/true);
  auto engine = Make(model, "mtp");
  Request reader = MakeRequest(200, 5, 0, 0);
  RunAll(*engine, {reader});
  EXPECT_EQ(model.mtp_rows, 0);
  Request request = MakeRequest(200, 5, 150, 0);
  const AllSaid expected = RunAll(*Make(model, "off"), {request});
  EXPECT_EQ(RunAll(*engine, {request}).at(2), expected.at(1));
  const SpeculationStats stats = engine->stats().speculation;
  EXPECT_GT(stats.accepted_tokens, 50);
  EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
}

TEST_F(SpeculationTest, EndsAtTheSameTokenAsWithoutSpeculation) {
  FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
  Request request = MakeRequest(20, 3, 100, 0);
  const AllSaid free = RunAll(*Make(model, "off"), {request});
  for (const int at : {3, 4, 5, 6, 7, 8, 9, 30}) {
    const int32_t end = free.at(1).tokens[at];
    request.sampling.stop_ids = {end};
    const AllSaid expected = RunAll(*Make(model, "off"), {request});
    EXPECT_EQ(RunAll(*Make(model, "mtp"), {request}), expected) << at;
    EXPECT_EQ(expected.at(1).stopped_by, end);
    Request held = request;
    held.sampling.min_tokens = at + 3;
    EXPECT_EQ(RunAll(*Make(model, "mtp"), {held}), RunAll(*Make(model, "off"), {held})) << at;
    Request shorter = MakeRequest(20, 3, at, 0);
    const AllSaid cut = RunAll(*Make(model, "mtp"), {shorter});
    EXPECT_EQ(cut.at(1).tokens.size(), static_cast<size_t>(at));
    EXPECT_EQ(cut.at(1).finish, FinishReason::kLength);
  }
}

TEST_F(SpeculationTest, AFailedStepCanBeRetried) {
  FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
  const AllSaid without = RunAll(*Make(model, "off"), Mixed());
  auto engine = Make(model, "mtp");
  for (const Request& request : Mixed()) ASSERT_TRUE(engine->Add(request).ok());
  std::vector<TokenEvent> events;
  std::map<RequestId, size_t> counts;
  for (int step = 0; !engine->idle(); ++step) {
    events.clear();
    model.fail_next = step % 7 == 3;
    model.fail_next_mtp = step % 7 == 5;
    const bool stepped = engine->Step(&events).ok();
    if (step == 3) {
      EXPECT_FALSE(stepped);
    }
    if (step == 5) {
      EXPECT_TRUE(stepped) << "drafts are optional";
      EXPECT_FALSE(model.fail_next_mtp);
    }
    for (const TokenEvent& event : events) {
      if (event.token) {
        EXPECT_EQ(*event.token, without.at(event.request).tokens[counts[event.request]++]);
      }
    }
  }
  for (const auto& [id, said] : without) EXPECT_EQ(counts[id], said.tokens.size());
}

// Requests are added and cancelled between drawing and drafting.
TEST_F(SpeculationTest, CancellingDropsDrafts) {
  FakeModel model(512, FakeModel::kVocab, /*mtp=*/true);
  const AllSaid without = RunAll(*Make(model, "off"), Mixed());
  auto engine = Make(model, "mtp");
  for (const Request& request : Mixed()) ASSERT_TRUE(engine->Add(request).ok());
  std::vector<TokenEvent> events;
  for (int step = 0; step < 9; ++step) ASSERT_TRUE(engine->Step(&events).ok());
  for (const RequestId id : {2, 3, 7, 11}) engine->Cancel(id);
  const AllSaid rest = Drain(*engine);
  for (const RequestId id : {1, 4, 5, 12}) {
    std::vector<int32_t> tokens;
    for (const TokenEvent& event : events) {
      if (event.request == id && event.token) tokens.push_back(*event.token);
    }
    if (rest.contains(id)) tokens.insert(tokens.end(), rest.at(id).tokens.begin(), rest.at(id).tokens.end());
    EXPECT_EQ(tokens, without.at(id).tokens);
  }
}

TEST_F(SpeculationTest, DraftsFollowTheGrammar) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  // The text repeats within the grammar, so that lookup drafts right and wrong tokens.
  for (const char* pattern : {"(abc){20}x", "[a-d]{70}x", "((ab|cd)(no|yes)){9}"}) {
    std::map<std::string, AllSaid> said;
    for (const std::string method : {"off", "ngram"}) {
      FakeModel model(512, 95);
      model.memory = 1;
      auto engine = Make(model, method, {.eos_ids = {94}, .speculative = {.prompt_lookup_min = 1}});
      std::vector<Request> requests;
      for (uint32_t i = 0; i < 4; ++i) {
        requests.push_back(MakeRequest(30, i, 120, i % 2 == 0 ? 0.0F : 0.8F));
        for (int32_t& token : requests.back().prompt) token %= 94;
        requests.back().grammar =
            std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, pattern));
      }
      said[method] = RunAll(*engine, requests);
      if (method == "ngram") {
        EXPECT_GT(engine->stats().speculation.accepted_tokens, 0) << pattern;
      }
    }
    EXPECT_EQ(said["off"], said["ngram"]) << pattern;
  }
}

// A model may have more ids than its tokenizer, and a prompt may contain these ids.
TEST_F(SpeculationTest, DraftsOutsideTheTokenizerVocabularyKeepOutputs) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  std::map<std::string, AllSaid> said;
  for (const std::string method : {"off", "ngram"}) {
    FakeModel model(512);
    auto engine = Make(model, method, {.eos_ids = {94}, .speculative = {.prompt_lookup_min = 1}});
    Request request = MakeRequest(1, 1, 120, 0);
    request.prompt = {'a' - '!', 'b' - '!', 96, 'b' - '!', 96, 95};
    request.grammar =
        std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, "[ab]{40}x"));
    said[method] = RunAll(*engine, {request});
  }
  EXPECT_EQ(said["off"].at(1).finish, FinishReason::kStop);
  EXPECT_EQ(said["off"], said["ngram"]);
}

// Compares the second and third token of many requests with the distribution of the model. Pearson's
// chi-square must be within five standard deviations. With a fixed draft, this also tests rejection sampling.
TEST_F(SpeculationTest, KeepsTheSamplingDistribution) {
  constexpr int kVocab = 6, kRequests = 6000;
  FakeModel model(64, kVocab, /*mtp=*/true);
  auto engine =
      Make(model, "mtp", {.max_sequences = 64, .prefix_cache = false, .speculative = {.most_tokens = 2}});
  const std::vector<int32_t> prompt = {1, 2};
  std::vector<Request> requests;
  for (uint32_t i = 0; i < kRequests; ++i) {
    requests.push_back(MakeRequest(1, i, 3, 2.0F));
    requests.back().prompt = prompt;
    requests.back().sampling.top_k = 5;
  }
  std::array<std::array<double, kVocab>, kVocab> counts = {};
  for (const auto& [id, said] : RunAll(*engine, requests)) ++counts[said.tokens[1]][said.tokens[2]];
  EXPECT_GT(engine->stats().speculation.accepted_tokens, kRequests / 4);

  const auto chances = [](const std::vector<int32_t>& tokens) {
    const std::vector<float> logits = FakeModel::LogitsAfter(tokens, kVocab);
    const float least = *std::min_element(logits.begin(), logits.end());
    std::vector<double> shares;
    double sum = 0;
    for (const float logit : logits) {
      shares.push_back(logit == least ? 0 : std::exp(logit / 2.0));
      sum += shares.back();
    }
    for (double& share : shares) share /= sum;
    return shares;
  };
  double chi = 0;
  int cells = 0;
  for (int32_t second = 0; second < kVocab; ++second) {
    for (int32_t third = 0; third < kVocab; ++third) {
      double share = 0;
      for (int32_t first = 0; first < kVocab; ++first) {
        share +=
            chances({1, 2})[first] * chances({1, 2, first})[second] * chances({1, 2, first, second})[third];
      }
      const double mean = share * kRequests, found = counts[second][third];
      ASSERT_GT(mean, 5);
      chi += (found - mean) * (found - mean) / mean;
      ++cells;
    }
  }
  const double freedom = cells - 1;
  EXPECT_LT(chi, freedom + 5 * std::sqrt(2 * freedom));
}

TEST_F(SpeculationTest, NamesTheMissingPartOfTheModel) {
  FakeModel model(512);
  const auto refuse = [&](const SpeculativeOptions& options) {
    return Message(Engine::Create(model, kernels_, *threads_, {.speculative = options}).status());
  };
  EXPECT_THAT(refuse({.method = "mtp"}), HasSubstr("needs a model with an MTP module"));
  EXPECT_THAT(refuse({.method = "eagle"}), HasSubstr("found \"eagle\""));
  EXPECT_THAT(refuse({.method = "ngram", .most_tokens = 16}), HasSubstr("in [1, 15]"));
  EXPECT_THAT(refuse({.method = "ngram", .prompt_lookup_min = 6}), HasSubstr("prompt_lookup_max = 5"));
  EXPECT_THAT(refuse({.method = "draft"}), HasSubstr("needs a draft model"));
  FakeModel other(512, 50);
  EXPECT_THAT(refuse({.method = "draft", .draft_model = &other}), HasSubstr("of 97 tokens, found 50"));
  EXPECT_EQ(Make(model, "auto")->speculative().method, "ngram");
  FakeModel with(512, FakeModel::kVocab, /*mtp=*/true);
  EXPECT_EQ(Make(with, "auto")->speculative().method, "mtp+ngram");
  EXPECT_THAT(refuse({.method = "mtp+ngram"}), HasSubstr("mtp+ngram needs a model with an MTP module"));
}

// Simulates the policy on a machine with these costs and a text with these acceptance rates. Returns the time
// with drafts over the time without, for equally many tokens.
double Slowdown(double row_cost, double pass_cost, const std::vector<double>& chances, int tokens) {
  DepthPolicy policy;
  DraftRecord record;
  std::mt19937 random(1);
  double seconds = 0;
  int said = 0;
  while (said < tokens) {
    const DepthPolicy::Candidate candidate = {
        .record = &record, .limit = static_cast<int>(chances.size()), .pending_rows = 0};
    const int depth = policy.Choose({&candidate, 1}, 1, 100)[0];
    if (depth > 0) {
      policy.CountDrafts(1, depth, 0, depth * pass_cost);
      seconds += depth * pass_cost;
    }
    const double step = 1 + depth * row_cost;
    policy.CountStep(1 + depth, step);
    seconds += step;
    int accepted = 0;
    while (accepted < depth && (random() % 10000) / 10000.0 < chances[accepted]) ++accepted;
    if (depth > 0) policy.CountOutcome(record, /*is_free=*/false, depth, accepted);
    said += accepted + 1;
  }
  return seconds / said;
}

TEST(DepthPolicyTest, DraftsWhereItSavesTime) {
  EXPECT_LT(Slowdown(0.1, 0.1, {1, 1, 1, 1}, 2000), 0.4) << "the optimum is 1.8 / 5";
  EXPECT_LT(Slowdown(0.1, 0.1, {0.8, 0.1, 0.1, 0.1}, 2000), 0.72) << "the optimum is 1.2 / 1.8";
}

TEST(DepthPolicyTest, NeverIsMuchSlowerThanWithoutDrafts) {
  for (const double chance : {0.0, 0.02, 0.1, 0.2, 0.5}) {
    for (const double row_cost : {0.05, 0.3, 0.9, 1.5}) {
      EXPECT_LT(Slowdown(row_cost, 0.2, {chance, chance, chance, chance}, 2000), 1.025)
          << chance << " right, " << row_cost << " a row";
    }
  }
}

TEST(DepthPolicyTest, RatesFreeDraftsByTheirOwnRecord) {
  DepthPolicy policy;
  for (int i = 0; i < 3; ++i) {
    for (int rows = 1; rows < 10; ++rows) policy.CountStep(rows, 1 + 0.05 * rows);
    policy.CountDrafts(1, 1, 0, 0.5);
  }
  DraftRecord computed, looked_up;
  for (int i = 0; i < 20; ++i) policy.CountOutcome(computed, /*is_free=*/false, 1, 1);
  const DepthPolicy::Candidate module = {.record = &computed, .limit = 1, .pending_rows = 1};
  const DepthPolicy::Candidate lookup = {
      .record = &looked_up, .limit = 8, .pending_rows = 0, .is_free = true};
  EXPECT_GT(policy.Rate(lookup), policy.Rate(module))
      << "new lookups are assumed to be right and cost no time";
  for (int i = 0; i < 20; ++i) policy.CountOutcome(looked_up, /*is_free=*/true, 2, 0);
  EXPECT_LT(policy.Rate(lookup), policy.Rate(module));
  DraftRecord other;  // record of another sequence; the record of all lookups counts
  const DepthPolicy::Candidate next = {.record = &other, .limit = 8, .pending_rows = 0, .is_free = true};
  EXPECT_LT(policy.Rate(next), policy.Rate(module));
  for (int i = 0; i < 40; ++i) policy.CountUnused(looked_up, 2, 2);
  EXPECT_GT(policy.Rate(lookup), policy.Rate(module))
      << "lookups would have been right, though no step verified them";
  EXPECT_GT(policy.Rate(next), policy.Rate(module));
}

TEST(DepthPolicyTest, AssignsRowsToTheLikeliestDrafts) {
  DepthPolicy policy;
  for (int i = 0; i < 3; ++i) {
    policy.CountStep(3, 1);
    policy.CountStep(5, 1.05);
  }
  DraftRecord good, bad, none;
  for (int i = 0; i < 20; ++i) {
    policy.CountOutcome(good, /*is_free=*/false, 2, 2);
    policy.CountOutcome(bad, /*is_free=*/false, 2, 0);
  }
  const std::vector<DepthPolicy::Candidate> candidates = {{&good, 2, 0}, {&bad, 2, 0}, {&none, 0, 0}};
  EXPECT_THAT(policy.Choose(candidates, 3, 2), ElementsAre(2, 0, 0));
  EXPECT_THAT(policy.Choose(candidates, 3, 0), ElementsAre(0, 0, 0));
}

}  // namespace
}  // namespace moesaic::engine
