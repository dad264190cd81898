// Stages of a pipeline work on different steps at the same time. Each stage of these tests waits for another
// one, so that an engine whose steps follow each other would not advance.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "comm/transport/local_transport.h"
#include "engine/fake_engine.h"
#include "engine/ranked_executor.h"

namespace moesaic::engine {
namespace {

constexpr double kLimit = 60;

/// Counts the steps that stage 0 has begun.
class StepLog {
 public:
  void Begin() {
    const std::lock_guard lock(mutex_);
    ++begun_;
    changed_.notify_all();
  }
  /// Waits until stage 0 has begun `steps` steps; false: it has not within the limit.
  bool Await(int steps) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(kLimit / 2),
                             [&] { return begun_ >= steps; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int begun_ = 0;
};

/// Every stage computes the whole fake model, but only the last one has the head.
class StageModel : public FakeModel {
 public:
  StageModel(bool has_head, std::function<bool(int step)> on_forward)
      : FakeModel(512), info_(FakeModel::info()), on_forward_(std::move(on_forward)) {
    if (!has_head) info_.own_vocab = {};
  }
  const models::ModelInfo& info() const override { return info_; }
  Status Forward(const kernels::ExecContext& ctx, const models::ForwardBatch& batch,
                 std::span<const kernels::KvLayer> kv, const models::ForwardOutput& out) override {
    if (!on_forward_(step_++)) return absl::InternalError(fmt::format("step {} is not overlapped", step_));
    std::vector<float> logits(batch.logit_rows.size() * kVocab);
    models::ForwardOutput own = out;
    if (info_.own_vocab.count == 0) own.logits = logits;
    return FakeModel::Forward(ctx, batch, kv, own);
  }

 private:
  models::ModelInfo info_;
  std::function<bool(int)> on_forward_;
  int step_ = 0;
};

class PipelineOverlapTest : public testing::Test {
 protected:
  ~PipelineOverlapTest() override {
    if (engine_ == nullptr) job_.Kill(0);
    engine_ = nullptr;
    if (stage1_.joinable()) stage1_.join();
  }

  // Stage 1 waits in the steps [first, last] until stage 0 has begun the next step.
  Engine& Start(int first, int last, int max_batch_tokens) {
    stage1_ = std::thread([this, first, last] {
      const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
      StageModel model(/*has_head=*/true,
                       [&](int step) { return step < first || step > last || log_.Await(step + 2); });
      RunRank(model, kernels_, *threads, job_.end(1), layout_, kLimit).IgnoreError();
      job_.Leave(1);
    });
    EngineOptions options = {.kv_bytes = 64 * kBlockBytes, .max_sequences = 4};
    options.max_batch_tokens = max_batch_tokens;
    options.job = &job_.end(0);
    options.layout = layout_;
    options.rank_time_limit_s = kLimit;
    engine_ = *Engine::Create(stage0_, kernels_, *threads_, options);
    return *engine_;
  }

  std::map<RequestId, std::vector<int32_t>> Run() {
    std::map<RequestId, std::vector<int32_t>> outputs;
    while (!engine_->idle()) {
      std::vector<TokenEvent> events;
      const Status status = engine_->Step(&events);
      EXPECT_TRUE(status.ok()) << Message(status);
      if (!status.ok()) break;
      for (const TokenEvent& event : events) {
        if (event.token) outputs[event.request].push_back(*event.token);
        finishes_[event.request] = event.finish;
      }
    }
    return outputs;
  }

  StepLog log_;
  const parallel::Layout layout_ = *parallel::Layout::Create({.pipeline = 2});
  comm::LocalJob job_{2};
  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> threads_ = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  StageModel stage0_{/*has_head=*/false, [this](int) {
                       log_.Begin();
                       return true;
                     }};
  std::thread stage1_;
  std::unique_ptr<Engine> engine_;
  std::map<RequestId, FinishReason> finishes_;
};

// Step 0 reads both prompts. Then each sequence has a step of its own, which begins before the last stage
// ends that of the other one.
TEST_F(PipelineOverlapTest, DecodesOfSequencesOverlap) {
  constexpr int kTokens = 10;
  Engine& engine = Start(/*first=*/1, /*last=*/2 * (kTokens - 1) - 1, /*max_batch_tokens=*/64);
  std::map<RequestId, Request> requests;
  for (int i = 0; i < 2; ++i) {
    const Request request = Greedy(RandomPrompt(20 + i, i), kTokens);
    requests[*engine.Add(request)] = request;
  }
  auto outputs = Run();
  for (const auto& [id, request] : requests) EXPECT_EQ(outputs[id], Alone(request)) << id;
  EXPECT_EQ(stage0_.steps, 1 + 2 * (kTokens - 1));
}

TEST_F(PipelineOverlapTest, ChunksOfAPromptOverlap) {
  Engine& engine = Start(/*first=*/0, /*last=*/2, /*max_batch_tokens=*/64);
  const Request request = Greedy(RandomPrompt(250, 1), 3);
  const RequestId id = *engine.Add(request);
  EXPECT_EQ(Run()[id], Alone(request));
}

// Step 1 needs logits that its summaries lack, while step 2, whose hidden states the driver wants, is in
// flight: the last stage must not wait for the driver with either.
TEST_F(PipelineOverlapTest, LogitsAreFetchedWhileHiddenStatesAreOnTheirWay) {
  Engine& engine = Start(/*first=*/1000, /*last=*/1000, /*max_batch_tokens=*/40);
  Request scored = Greedy(RandomPrompt(40, 1), 3);
  scored.prompt_logprobs = true;
  Request embedded = Greedy(RandomPrompt(30, 2), 0);
  embedded.want_embedding = true;
  const RequestId first = *engine.Add(scored), second = *engine.Add(embedded);
  EXPECT_EQ(Run()[first], Alone(scored));
  EXPECT_EQ(finishes_[second], FinishReason::kLength);
}

// A request that ends while its rows are in flight reports nothing after its end, and frees its blocks.
TEST_F(PipelineOverlapTest, ARequestEndsWhileItIsInFlight) {
  Engine& engine = Start(/*first=*/1000, /*last=*/1000, /*max_batch_tokens=*/64);
  const Request kept = Greedy(RandomPrompt(30, 1), 12);
  const RequestId first = *engine.Add(kept), second = *engine.Add(Greedy(RandomPrompt(40, 2), 12));
  std::vector<TokenEvent> events;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(engine.Step(&events).ok());
  engine.Cancel(second);
  std::vector<int32_t> tokens;
  for (const TokenEvent& event : events) {
    if (event.request == first) tokens.push_back(*event.token);
  }
  auto outputs = Run();
  tokens.insert(tokens.end(), outputs[first].begin(), outputs[first].end());
  EXPECT_EQ(tokens, Alone(kept));
  EXPECT_EQ(outputs[second].size(), 0U);
  EXPECT_EQ(finishes_[second], FinishReason::kCancelled);
  EXPECT_EQ(engine.stats().free_blocks + engine.stats().cached_blocks, engine.stats().total_blocks);
}

}  // namespace
}  // namespace moesaic::engine
