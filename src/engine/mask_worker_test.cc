#include "engine/mask_worker.h"

#include <gtest/gtest.h>

#include "engine/byte_tokenizer.h"

namespace moesaic::engine {
namespace {

constexpr std::chrono::minutes kLong{10};

class MaskWorkerTest : public testing::Test {
 protected:
  std::shared_ptr<MaskJob> MakeJob(const std::string& pattern) {
    auto job = std::make_shared<MaskJob>();
    job->grammar = std::make_shared<text::Grammar>(*compiler_.Compile(text::GrammarKind::kRegex, pattern));
    job->words = 3;
    return job;
  }

  static bool Wait(MaskWorker& worker, const std::shared_ptr<MaskJob>& job) {
    worker.WaitForAll({&job, 1}, std::chrono::steady_clock::now() + kLong);
    return job->done();
  }

  const text::Tokenizer tokenizer_ = ByteTokenizer();
  const text::GrammarCompiler compiler_ =
      *text::GrammarCompiler::Create(tokenizer_, std::vector<int32_t>{94});
};

TEST_F(MaskWorkerTest, ComputesMasksAfterAllowedDrafts) {
  MaskWorker worker(60);
  const auto job = MakeJob("ab[cd]");
  job->drafts = {'a' - '!', 'b' - '!', 'x' - '!'};
  worker.Start(job);
  ASSERT_TRUE(Wait(worker, job));
  EXPECT_TRUE(job->status.ok()) << Message(job->status);
  EXPECT_EQ(job->made, 3);
  const auto allows = [&](int place, char c) {
    const int token = c - '!';
    return (job->masks[place * job->words + token / 32] >> (token % 32) & 1) != 0;
  };
  EXPECT_TRUE(allows(0, 'a'));
  EXPECT_FALSE(allows(0, 'b'));
  EXPECT_TRUE(allows(2, 'd'));
  EXPECT_FALSE(allows(2, 'x'));
}

TEST_F(MaskWorkerTest, DropsTheJobOfADestroyedTicket) {
  MaskWorker worker(60);
  const auto job = MakeJob("[a-z]+");
  { const MaskTicket ticket(job); }
  worker.Start(job);
  ASSERT_TRUE(Wait(worker, job));
  EXPECT_EQ(job->made, 0);
}

TEST_F(MaskWorkerTest, RunsSlowAndQuickJobsConcurrently) {
  MaskWorker worker(60);
  std::vector<std::shared_ptr<MaskJob>> jobs;
  for (int i = 0; i < 16; ++i) {
    jobs.push_back(MakeJob("[a-z]{" + std::to_string(i + 1) + "}"));
    jobs.back()->slow = i % 2 == 0;
    worker.Start(jobs.back());
  }
  worker.WaitForAll(jobs, std::chrono::steady_clock::now() + kLong);
  for (const auto& job : jobs) {
    EXPECT_TRUE(job->done());
    EXPECT_EQ(job->made, 1);
  }
}

}  // namespace
}  // namespace moesaic::engine
