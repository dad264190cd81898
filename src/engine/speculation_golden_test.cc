// Speculative decoding with real models: greedy and sampled outputs are bit-identical to those without
// speculation, for every drafter and on every instruction set.
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "engine/engine.h"
#include "models/test_session.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace moesaic::engine {
namespace {

using models::SourcePath;

struct SpeculatedTokens {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  bool operator==(const SpeculatedTokens&) const = default;
};

// Returns each `every`-th evaluation prompt of the shipped model, and some random tokens.
std::vector<std::vector<int32_t>> Prompts(const std::string& model, int every) {
  const auto tokenizer = *text::Tokenizer::FromFolder(model);
  const auto chat = *text::ChatTemplate::FromFolder(model);
  std::ifstream file(model + "/heldout.jsonl");
  std::vector<std::vector<int32_t>> prompts;
  std::string line;
  for (int i = 0; std::getline(file, line); ++i) {
    if (i % every != 0) continue;
    nlohmann::json variables = nlohmann::json::parse(line);
    variables["add_generation_prompt"] = true;
    const auto text = chat.RenderVariables(variables.dump());
    EXPECT_TRUE(text.ok()) << Message(text.status());
    std::vector<int32_t> ids = *tokenizer.Encode(*text, /*add_special=*/false);
    if (ids.size() < 300) prompts.push_back(std::move(ids));
  }
  std::mt19937 random(7);
  for (const int size : {1, 5, 64, 200}) {
    std::vector<int32_t>& prompt = prompts.emplace_back();
    for (int i = 0; i < size; ++i) prompt.push_back(static_cast<int32_t>(random() % 1536));
  }
  return prompts;
}

struct Outcome {
  std::map<RequestId, SpeculatedTokens> said;
  SpeculationStats stats;
};

Outcome RunAll(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
               const std::vector<std::vector<int32_t>>& prompts, const SpeculativeOptions& speculative) {
  // All prompts run in one step without the cache, because the rounding of MLA depends on the chunks (S12).
  auto engine = Engine::Create(model, kernels, threads,
                               {.max_sequences = 4,
                                .max_batch_tokens = 10000,
                                .eos_ids = {2},
                                .prefix_cache = false,
                                .speculative = speculative});
  EXPECT_TRUE(engine.ok()) << Message(engine.status());
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request;
    request.prompt = prompts[i];
    request.sampling.max_tokens = 40;
    request.sampling.temperature = i % 3 == 2 ? 1.0F : 0.0F;
    request.sampling.top_p = 0.95F;
    request.sampling.seed = i;
    request.sampling.logprobs = 0;
    EXPECT_TRUE((*engine)->Add(request).ok());
  }
  Outcome outcome;
  std::vector<TokenEvent> events;
  while (!(*engine)->idle()) {
    events.clear();
    const Status status = (*engine)->Step(&events);
    EXPECT_TRUE(status.ok()) << Message(status);
    if (!status.ok()) break;
    for (const TokenEvent& event : events) {
      if (!event.token) continue;
      outcome.said[event.request].tokens.push_back(*event.token);
      outcome.said[event.request].logprobs.push_back(event.logprobs.logprob);
    }
  }
  outcome.stats = (*engine)->stats().speculation;
  return outcome;
}

class SpeculationGoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(SpeculationGoldenTest, SpeculationKeepsTheOutputOfTheShippedModel) {
  const std::string path = SourcePath("models/moesaic-tiny");
  const std::string dtype = GetParam();
  const auto threads = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const auto model = models::Model::Load(path, {.dtype = dtype, .progress = nullptr}, *threads);
  ASSERT_TRUE(model.ok()) << Message(model.status());
  const auto prompts = Prompts(path, 24);
  ASSERT_GT(prompts.size(), 12U);
  for (const runtime::Isa isa : models::TestIsas(dtype)) {
    const kernels::KernelTable kernels = kernels::SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isa));
    const auto run = [&](const SpeculativeOptions& options) {
      return RunAll(**model, kernels, *threads, prompts, options);
    };
    const Outcome without = run({});
    for (const char* method : {"ngram", "mtp", "mtp+ngram"}) {
      for (const bool adaptive : {true, false}) {
        for (const int most : {3, kMaxDrafts}) {
          if (adaptive && most == kMaxDrafts) continue;
          const Outcome with = run({.method = method, .most_tokens = most, .adaptive = adaptive});
          EXPECT_EQ(with.said, without.said)
              << runtime::IsaName(isa) << ", " << method << ", " << most << (adaptive ? " at most" : "");
          if (adaptive) continue;
          EXPECT_GT(with.stats.accepted_tokens, 50);
          // The model card reports an acceptance rate of 99.6 % for first drafts. A third of these requests
          // samples, and some prompts are random.
          if (std::string(method) == "mtp") {
            EXPECT_GT(with.stats.accepted_at[0], with.stats.drafts / 2);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Weights, SpeculationGoldenTest, testing::Values("f32", "bf16", "int8"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace moesaic::engine
