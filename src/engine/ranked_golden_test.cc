// Engines over several ranks, which are threads here. Outputs are those of the oracle in every layout, with
// small chunks, preemption, swapping, tiers, drafts and aborts.
#include <algorithm>
#include <chrono>
#include <map>

#include "base/test_patience.h"
#include "engine/ranked_engine.h"
#include "engine/sampling.h"

namespace moesaic::engine {
namespace {

using models::GoldenPrompt;
using models::SourcePath;
using parallel::Degrees;
using parallel::Layout;

class RankedGoldenTest : public testing::TestWithParam<Case> {
 protected:
  std::string checkpoint() const { return GetParam().checkpoint; }

  // Starts the engine of `ranks` with one request.
  static void StartWithRequest(RankedEngine& ranks, int max_tokens, bool ignore_eos) {
    EngineOptions options;
    options.max_sequences = 4;
    options.max_batch_tokens = 64;
    ASSERT_TRUE(ranks.Start(options, 32).ok());
    Request request;
    request.prompt = {5, 6, 7};
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = ignore_eos;
    ASSERT_TRUE(ranks.engine().Add(request).ok());
  }

  // `failed` names the dead rank, and so does the error of every later step.
  static void ExpectNamed(const Status& failed, RankedEngine& ranks) {
    std::vector<TokenEvent> events;
    ASSERT_FALSE(failed.ok());
    EXPECT_NE(Message(failed).find("rank 1"), std::string::npos) << Message(failed);
    EXPECT_EQ(Message(ranks.engine().Step(&events)), Message(failed));
  }
};

TEST_P(RankedGoldenTest, OutputsEqualThoseOfTheOracleUnderEveryLoad) {
  for (const Load& load : {Load{64, 512}, {64, 13}, {14, 50}, {14, 50, 14}, {20, 512, 0, 20}}) {
    ExpectOracleUnder(load, GetParam());
  }
}

TEST_P(RankedGoldenTest, DraftsKeepOutputs) { ExpectOracleWithDrafts(GetParam()); }

TEST_P(RankedGoldenTest, OutputsFollowTheirGrammars) { ExpectGrammars(GetParam()); }

TEST_P(RankedGoldenTest, AbortsFreeBlocksOnAllRanks) { ExpectAbortsFreeBlocks(GetParam()); }

TEST_P(RankedGoldenTest, ADeadRankIsNamed) {
  RankedEngine ranks(checkpoint(), GetParam().degrees);
  ASSERT_NO_FATAL_FAILURE(StartWithRequest(ranks, 50, /*ignore_eos=*/false));
  std::vector<TokenEvent> events;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ranks.engine().Step(&events).ok());
  ranks.job().Kill(1);
  ExpectNamed(ranks.engine().Step(&events), ranks);
}

// A rank dies between two messages of a step.
TEST_P(RankedGoldenTest, ARankThatDiesInAStepIsNamedSoon) {
  for (const int64_t sends : {2, 5, 9, 30}) {
    SCOPED_TRACE(sends);
    RankedEngine ranks(checkpoint(), GetParam().degrees, {.dies_at_send = sends});
    ASSERT_NO_FATAL_FAILURE(StartWithRequest(ranks, 100, /*ignore_eos=*/true));
    std::vector<TokenEvent> events;
    Status failed;
    std::chrono::steady_clock::time_point begin;
    for (int step = 0; step < 100 && failed.ok(); ++step) {
      begin = std::chrono::steady_clock::now();
      failed = ranks.engine().Step(&events);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(seconds.count(), base::Patient(2));
    ExpectNamed(failed, ranks);
    for (int rank = 2; rank < GetParam().degrees.ranks(); ++rank) ranks.job().Kill(rank);
  }
}

SamplingParams Params(float temperature, int top_k = 0, float top_p = 1, int logprobs = -1) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.logprobs = logprobs;
  return params;
}

// A stage numbers the layers of its blocks from 0.
TEST_P(RankedGoldenTest, ClearingALayerOfABlockKeepsOtherBlocks) {
  RankedEngine ranks(checkpoint(), GetParam().degrees);
  auto executor = ranks.MakeExecutor();
  ASSERT_TRUE(executor.ok()) << Message(executor.status());
  constexpr int kBlock = 3, kOtherBlock = 1;
  const std::vector<int32_t> table = {kBlock}, prompt = {5, 6, 7, 8, 9}, next = {10};
  // Candidates after the prompt and a token; a layer of `block` is cleared between them.
  const auto candidates = [&](int block, int layer) {
    StepBatch read, decode;
    const auto count = static_cast<int32_t>(prompt.size());
    read.AddRows({.sequence = 1, .first_logits = count}, prompt, {}, table);
    EXPECT_TRUE((*executor)->Run(read).ok());
    if (layer >= 0) {
      decode.ops_before = {{.kind = cache::KvOpKind::kClear, .block = block, .layer = layer}};
    }
    decode.AddRows({.sequence = 1, .start = count, .first_logits = 0}, next, {}, table);
    const StatusOr<StepResult> result = (*executor)->Run(decode);
    EXPECT_TRUE(result.ok()) << "layer " << layer << ": " << Message(result.status());
    std::vector<std::pair<int32_t, float>> best;
    if (!result.ok()) return best;
    for (const TokenLogit& entry : result->summaries.front().best)
      best.emplace_back(entry.token, entry.logit);
    return best;
  };
  const auto whole = candidates(0, -1);
  const models::ModelInfo& info = ranks.info();
  for (int layer = 0; layer < info.layers + info.mtp_layers; ++layer) {
    ASSERT_EQ(candidates(kOtherBlock, layer), whole) << "layer " << layer;
    const auto cleared = candidates(kBlock, layer);
    ASSERT_EQ(cleared != whole, layer < info.layers) << "layer " << layer;
  }
}

// Draws from candidates equal those from all logits, whose rows can be fetched afterwards.
TEST_P(RankedGoldenTest, CandidatesDecideLikeAllLogits) {
  const std::vector<GoldenPrompt> golden =
      models::ReadGolden(SourcePath("tests/golden/" + checkpoint() + "/golden.safetensors"));
  RankedEngine ranks(checkpoint(), GetParam().degrees);
  auto executor = ranks.MakeExecutor();
  ASSERT_TRUE(executor.ok()) << Message(executor.status());
  const std::vector<int32_t> table = {0, 1, 2, 3, 4, 5, 6, 7};
  const size_t vocab = ranks.info().vocab_size;
  int decided = 0, drawn_rows = 0;
  for (const GoldenPrompt& prompt : golden) {
    for (const SamplingParams& sampling :
         {Params(0, 0, 1, 3), Params(0.5F, 0, 0.8F), Params(0.8F, 10, 1, 0), Params(1)}) {
      StepBatch batch = {.candidates = 0};
      batch.AddRows({.sequence = 1, .first_logits = 0, .needs = NeedsOf(sampling)}, prompt.ids, {}, table);
      const StatusOr<StepResult> whole = (*executor)->Run(batch);
      ASSERT_TRUE(whole.ok()) << Message(whole.status());
      const std::vector<float> logits(whole->logits.begin(), whole->logits.end());
      ASSERT_EQ(logits.size(), prompt.ids.size() * vocab);
      batch.candidates = kRowCandidates;
      const StatusOr<StepResult> reduced = (*executor)->Run(batch);
      ASSERT_TRUE(reduced.ok()) << Message(reduced.status());
      ASSERT_TRUE(reduced->logits.empty());
      ASSERT_EQ(reduced->summaries.size(), prompt.ids.size());
      std::vector<int32_t> undecided;
      for (size_t row = 0; row < prompt.ids.size(); ++row) {
        const auto draw = [&](std::span<const float> values) {
          DrawScratch scratch;
          const TokenHistory history;
          return *Draw({.logits = values,
                        .sampling = &sampling,
                        .history = &history,
                        .banned = {},
                        .seed = 3,
                        .position = row,
                        .summary = &reduced->summaries[row]},
                       scratch);
        };
        const Drawn all = draw(std::span(logits).subspan(row * vocab, vocab)), part = draw({});
        ++drawn_rows;
        if (part.needs_logits) {
          undecided.push_back(static_cast<int32_t>(row));
          continue;
        }
        ++decided;
        ASSERT_EQ(part.token, all.token);
        ASSERT_EQ(part.logprobs.logprob, all.logprobs.logprob);
        ASSERT_EQ(part.logprobs.top.size(), all.logprobs.top.size());
      }
      undecided.push_back(0);  // rows in any order
      const auto fetched = (*executor)->FetchLogits(undecided);
      ASSERT_TRUE(fetched.ok()) << Message(fetched.status());
      for (size_t i = 0; i < undecided.size(); ++i) {
        const auto begin = logits.begin() + static_cast<ptrdiff_t>(undecided[i] * vocab);
        ASSERT_TRUE(std::equal(begin, begin + static_cast<ptrdiff_t>(vocab), fetched->begin() + i * vocab));
      }
    }
  }
  EXPECT_GT(decided, drawn_rows / 4);
}

// Reported log-probabilities are those of the tokens' own rows, whether a row was fetched or not.
TEST_P(RankedGoldenTest, LogprobsAreThoseOfScoredRows) {
  const std::vector<GoldenPrompt> golden =
      models::ReadGolden(SourcePath("tests/golden/" + checkpoint() + "/golden.safetensors"));
  RankedEngine ranks(checkpoint(), GetParam().degrees);
  EngineOptions options;
  options.max_sequences = 8;
  options.max_batch_tokens = 100;
  options.speculative.method = "ngram";
  ASSERT_TRUE(ranks.Start(options, 64).ok());
  Engine& engine = ranks.engine();
  struct Answer {
    std::vector<int32_t> tokens;  // of the prompt, then of the output
    std::vector<float> logprobs;  // of all but the first
  };
  std::map<RequestId, Answer> answers;
  for (const float temperature : {0.7F, 2.0F}) {
    for (const GoldenPrompt& prompt : golden) {
      Request request;
      request.prompt = prompt.ids;
      request.prompt_logprobs = true;
      request.sampling = Params(temperature, 0, 1, 2);
      request.sampling.seed = 5;
      request.sampling.max_tokens = 20;
      request.sampling.ignore_eos = true;
      answers[*engine.Add(request)].tokens = prompt.ids;
    }
  }
  while (!engine.idle()) {
    std::vector<TokenEvent> events;
    ASSERT_TRUE(engine.Step(&events).ok());
    for (const TokenEvent& event : events) {
      Answer& answer = answers[event.request];
      for (const LogprobEntry& entry : event.prompt_logprobs) answer.logprobs.push_back(entry.logprob);
      answer.tokens.push_back(*event.token);
      answer.logprobs.push_back(event.logprobs.logprob);
    }
  }
  const size_t vocab = ranks.info().vocab_size;
  for (const auto& [id, answer] : answers) {
    ASSERT_EQ(answer.logprobs.size() + 1, answer.tokens.size());
    const Status scored = engine.Score(answer.tokens, [&](int64_t first, std::span<const float> rows) {
      for (size_t i = 0; i < rows.size() / vocab && first + i < answer.logprobs.size(); ++i) {
        const float expected =
            LogprobsOf(rows.subspan(i * vocab, vocab), answer.tokens[first + i + 1], 0).logprob;
        EXPECT_NEAR(answer.logprobs[first + i], expected, 1e-3) << "request " << id << ", row " << first + i;
      }
      return OkStatus();
    });
    ASSERT_TRUE(scored.ok()) << Message(scored);
  }
}

// Routes of all rows, part by part and stage by stage, are those of one rank.
TEST_P(RankedGoldenTest, RoutesAreThoseOfOneRank) {
  const std::vector<GoldenPrompt> golden =
      models::ReadGolden(SourcePath("tests/golden/" + checkpoint() + "/golden.safetensors"));
  const auto routes_of = [&](const Degrees& degrees) {
    RankedEngine ranks(checkpoint(), degrees);
    EngineOptions options;
    options.max_sequences = 1;
    EXPECT_TRUE(ranks.Start(options, 32).ok());
    models::RouteTap routes;
    const auto ignore = [](int64_t, std::span<const float>) { return OkStatus(); };
    EXPECT_TRUE(ranks.engine().Score(golden.back().ids, ignore, &routes).ok());
    return routes;
  };
  const models::RouteTap one = routes_of({}), many = routes_of(GetParam().degrees);
  ASSERT_EQ(one.layers.size(), many.layers.size());
  ASSERT_EQ(one.layers.empty(), RankedEngine(checkpoint(), {}).info().experts == 0)
      << "a dense model has none";
  for (size_t i = 0; i < one.layers.size(); ++i) {
    EXPECT_EQ(one.layers[i].layer, many.layers[i].layer);
    EXPECT_EQ(one.layers[i].ids, many.layers[i].ids);
  }
}

// X15: a decoded token costs each rank its sums or its hidden state, and two small messages of the driver.
TEST_P(RankedGoldenTest, DecodingATokenSendsNoLogits) {
  const Degrees& degrees = GetParam().degrees;
  RankedEngine ranks(checkpoint(), degrees);
  EngineOptions options;
  options.max_sequences = 1;
  options.max_batch_tokens = 64;
  ASSERT_TRUE(ranks.Start(options, 32).ok());
  Request request;
  request.prompt = {5, 6, 7};
  request.sampling.temperature = 0;
  request.sampling.logprobs = 5;
  request.sampling.max_tokens = 61;
  request.sampling.ignore_eos = true;
  ASSERT_TRUE(ranks.engine().Add(request).ok());
  std::vector<TokenEvent> events;
  ASSERT_TRUE(ranks.engine().Step(&events).ok());  // the prompt
  const std::vector<RankStats> before = ranks.engine().stats().ranks;
  while (!ranks.engine().idle()) ASSERT_TRUE(ranks.engine().Step(&events).ok());
  const std::vector<RankStats> after = ranks.engine().stats().ranks;
  const Layout layout = *Layout::Create(degrees);
  ASSERT_EQ(std::ssize(after), layout.ranks());
  const int64_t vector = int64_t{4} * ranks.info().hidden_size;
  const int64_t sums = degrees.tensor > 1 ? (2 * ranks.info().layers + 1) * vector : 0;
  const int64_t sends_of_sum = degrees.tensor == 2 ? 1 : 2 * (degrees.tensor - 1);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const int64_t hidden = degrees.pipeline > 1 && layout.At(rank).stage == 0 ? vector : 0;
    // Messages have kFirstPartBytes: one to each other rank, or the reply, which has the candidates. A group
    // of two ranks sends the vector of a sum once; one of more reduces and broadcasts it to each other rank
    // at most. A stage of several has fewer sums.
    const int64_t most =
        sends_of_sum * sums + hidden + static_cast<int64_t>(layout.ranks() * kFirstPartBytes);
    const int64_t sent = (after[rank].bytes_sent - before[rank].bytes_sent) / 60;
    EXPECT_LE(sent, most) << "rank " << rank;
    EXPECT_GE(sent, (degrees.pipeline > 1 ? 0 : sums) + hidden) << "rank " << rank;
    EXPECT_EQ(after[rank].rank, rank);
    EXPECT_GT(after[rank].step_seconds, after[rank].exchange_seconds);
    EXPECT_GT(after[rank].imbalance, 0);
  }
}

// Rank 0 runs the draft model alone. It is the model itself, so that most drafts are accepted.
TEST(RankedDraftTest, DraftsOfAModelKeepOutputs) {
  const std::string checkpoint = "qwen3-moe-norm-tied";
  const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  const auto draft = models::Model::Load(SourcePath("tests/golden/" + checkpoint),
                                         {.dtype = "f32", .progress = nullptr}, *threads);
  ASSERT_TRUE(draft.ok()) << Message(draft.status());
  for (const Degrees& degrees :
       {Degrees{.tensor = 2}, Degrees{.pipeline = 2}, Degrees{.data = 2, .expert = 2}}) {
    SCOPED_TRACE(Name(degrees));
    RankedEngine ranks(checkpoint, degrees);
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = 64;
    options.speculative.method = "draft";
    options.speculative.adaptive = false;
    options.speculative.draft_model = draft->get();
    const Status started = ranks.Start(options, 64);
    ASSERT_TRUE(started.ok()) << Message(started);
    ExpectOracle(ranks.engine(), checkpoint);
    const SpeculationStats stats = ranks.engine().stats().speculation;
    EXPECT_GT(stats.draft_tokens, 0);
    EXPECT_GT(stats.accepted_tokens, stats.draft_tokens / 2);
  }
}

// Greedy tokens of a request, and by how much each exceeds the second best in log-probability.
struct LeadingTokens {
  std::vector<int32_t> tokens;
  std::vector<float> leads;
};

// Outputs of moesaic-tiny, whose decoder has four layers. The checkpoints of the oracle that have an MTP
// module have two.
std::vector<LeadingTokens> LeadingTokensOf(const Degrees& degrees, const std::string& method,
                                           int64_t* drafted) {
  RankedEngine ranks(models::SourcePath("models/moesaic-tiny"), degrees);
  EngineOptions options;
  options.max_sequences = 4;
  options.max_batch_tokens = 64;
  options.speculative.method = method;
  options.speculative.adaptive = false;
  const Status started = ranks.Start(options, 64);
  EXPECT_TRUE(started.ok()) << Message(started);
  if (!started.ok()) return {};
  std::map<RequestId, LeadingTokens> said;
  for (int i = 0; i < 4; ++i) {
    Request request;
    for (int t = 0; t < 5 + 20 * i; ++t) request.prompt.push_back(3 + (i * 131 + t * 7) % 1500);
    request.sampling = Params(0, 0, 1, 2);
    request.sampling.max_tokens = kTokens;
    request.sampling.ignore_eos = true;
    said[*ranks.engine().Add(request)] = {};
  }
  while (!ranks.engine().idle()) {
    std::vector<TokenEvent> events;
    const Status status = ranks.engine().Step(&events);
    EXPECT_TRUE(status.ok()) << Message(status);
    if (!status.ok()) return {};
    for (const TokenEvent& event : events) {
      LeadingTokens& own = said[event.request];
      own.tokens.push_back(*event.token);
      own.leads.push_back(event.logprobs.top[0].logprob - event.logprobs.top[1].logprob);
    }
  }
  *drafted = ranks.engine().stats().speculation.draft_tokens;
  std::vector<LeadingTokens> all;
  for (auto& [id, own] : said) all.push_back(std::move(own));
  return all;
}

TEST(RankedMtpTest, DraftsKeepOutputsInManyStages) {
  int64_t drafted = 0;
  const std::vector<LeadingTokens> one = LeadingTokensOf({}, "off", &drafted);
  EXPECT_EQ(drafted, 0);
  for (const Degrees& degrees : {Degrees{.pipeline = 3}, Degrees{.pipeline = 4},
                                 Degrees{.tensor = 2, .pipeline = 3}, Degrees{.tensor = 3, .pipeline = 2}}) {
    SCOPED_TRACE(Name(degrees));
    const std::vector<LeadingTokens> many = LeadingTokensOf(degrees, "mtp", &drafted);
    EXPECT_GT(drafted, 0);
    ASSERT_EQ(many.size(), one.size());
    int compared = 0;
    for (size_t i = 0; i < one.size(); ++i) {
      ASSERT_EQ(many[i].tokens.size(), one[i].tokens.size());
      for (size_t t = 0; t < one[i].tokens.size() && one[i].leads[t] >= 1e-3F; ++t) {
        ASSERT_EQ(many[i].tokens[t], one[i].tokens[t]) << "request " << i << ", token " << t;
        ++compared;
      }
    }
    EXPECT_GT(compared, 2 * kTokens) << "of 4 requests";
  }
}

TEST(RankedMtpTest, DraftsKeepOutputsOfThreeAndFourShards) {
  for (const Degrees& degrees : {Degrees{.tensor = 3}, Degrees{.tensor = 4, .expert = 2}}) {
    SCOPED_TRACE(Name(degrees));
    ExpectOracleWithDrafts({"deepseek-v3-mtp", degrees});
  }
}

TEST(RankedExecutorTest, ASilentRankEndsTheTimeLimit) {
  comm::LocalJob job(2);
  const Layout layout = *Layout::Create({.pipeline = 2});
  const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  const auto executor = RankedExecutor::Create(nullptr, *threads, models::ModelInfo(), job.end(0), layout,
                                               RankSetup(), /*time_limit_s=*/0.2);
  EXPECT_NE(Message(executor.status()).find("longer than 0.2 s"), std::string::npos)
      << Message(executor.status());
}

TEST(RankedExecutorTest, TheWaitForARankThatLoadsCanBeEnded) {
  comm::LocalJob job(2);
  std::thread rank(
      [&] { EXPECT_TRUE(ReceiveMessage(job.end(1), kDriverRank, RankTag::kCommand, kTimeLimit).ok()); });
  const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  const auto executor = RankedExecutor::Create(nullptr, *threads, models::ModelInfo(), job.end(0),
                                               *Layout::Create({.pipeline = 2}), RankSetup(), kTimeLimit,
                                               /*replica=*/0, [] { return Cancelled("interrupted"); });
  rank.join();
  EXPECT_EQ(executor.status(), Cancelled("interrupted"));
}

INSTANTIATE_TEST_SUITE_P(
    All, RankedGoldenTest,
    testing::Values(Case{"deepseek-v3-mtp", {.tensor = 2}}, Case{"deepseek-v3-mtp", {.pipeline = 2}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 2, .pipeline = 3, .expert = 2}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 3}},
                    Case{"deepseek-v3-mtp", {.tensor = 2, .pipeline = 2, .expert = 2}},
                    Case{"qwen3-moe-norm-tied", {.pipeline = 4}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 2, .expert = 2}},
                    Case{"qwen3-moe-norm-tied", {.pipeline = 2}}, Case{"kimi-k2", {.tensor = 4, .expert = 4}},
                    Case{"glm4-moe", {.tensor = 3, .expert = 3}},
                    Case{"pangu-ultra-moe-v11", {.tensor = 2, .pipeline = 2}},
                    Case{"llama3-rope-bias", {.tensor = 2, .pipeline = 2}},
                    Case{"llama3-rope-bias", {.tensor = 4}}),
    NameOf);

}  // namespace
}  // namespace moesaic::engine
