#include "app/text_score.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "app/reference_rows.h"
#include "engine/fake_model.h"

namespace moesaic::app {
namespace {

using engine::FakeModel;

std::string DescribeWindows(const std::vector<Window>& windows) {
  std::string text;
  for (const Window& w : windows) text += fmt::format("[{},{}) from {}; ", w.begin, w.end, w.first_scored);
  return text;
}

TEST(WindowsTest, ScoreEachTokenOnceAfterAnotherToken) {
  EXPECT_EQ(DescribeWindows(WindowsOf(10, 4, 4)), "[0,4) from 1; [4,8) from 5; [8,10) from 9; ");
  EXPECT_EQ(DescribeWindows(WindowsOf(10, 4, 2)),
            "[0,4) from 1; [2,6) from 4; [4,8) from 6; [6,10) from 8; ");
  EXPECT_EQ(DescribeWindows(WindowsOf(3, 100, 100)), "[0,3) from 1; ");
  EXPECT_EQ(DescribeWindows(WindowsOf(9, 4, 4)),
            "[0,4) from 1; [4,8) from 5; ");  // a single token has no predecessor
  EXPECT_EQ(DescribeWindows(WindowsOf(2, 2, 1)), "[0,2) from 1; ");
}

TEST(AverageTest, ReturnsMeanAndStandardError) {
  const Average average = Average::Of({1, 2, 3, 4});
  EXPECT_DOUBLE_EQ(average.mean, 2.5);
  EXPECT_DOUBLE_EQ(average.error, std::sqrt(5.0 / 3 / 4));
}

TEST(AverageTest, TreatsRunsAsIndependent) {
  const std::vector<double> values = {1, 2, 4, 3, 5, 3};  // mean 3; off by -2, 0, 2
  const Average average = Average::OfRuns(values, {1, 3, 2});
  EXPECT_DOUBLE_EQ(average.mean, 3);
  EXPECT_DOUBLE_EQ(average.error, std::sqrt(8.0 * 3 / 2) / 6);
  EXPECT_TRUE(std::isnan(Average::OfRuns(values, {6}).error));
  // Runs of one value are independent values.
  EXPECT_DOUBLE_EQ(Average::OfRuns(values, std::vector<int64_t>(6, 1)).error, Average::Of(values).error);
}

// Compares with tables of Student's distribution.
TEST(StudentTest, MatchesTables) {
  for (const auto& [freedom, expected] :
       {std::pair(1, 12.706), std::pair(8, 2.306), std::pair(9, 2.262), std::pair(10, 2.228),
        std::pair(20, 2.086), std::pair(60, 2.000), std::pair(100000, 1.960)}) {
    EXPECT_NEAR(StudentT975(freedom), expected, 0.002 * expected) << freedom;
  }
}

class TextScoreTest : public testing::Test {
 protected:
  TextScoreTest() : threads_(*runtime::ThreadPool::Create({.threads = 2, .pin = false})) {
    engine_ =
        *engine::Engine::Create(model_, kernels_, *threads_, {.kv_bytes = 1 << 20, .max_batch_tokens = 16});
    text_.window = 40;
    text_.stride = 15;
    text_.vocab = FakeModel::kVocab;
    for (int i = 0; i < 130; ++i) text_.tokens.push_back(i * i % FakeModel::kVocab);
    for (const Window& window : WindowsOf(130, text_.window, text_.stride)) {
      text_.rows += window.end - window.first_scored;
    }
  }

  TextScore Score(const ScoreSinks& sinks) {
    auto score = ScoreText(*engine_, *threads_, text_, sinks, [](const TextScore&) { return OkStatus(); });
    EXPECT_TRUE(score.ok()) << score.status();
    return *score;
  }

  FakeModel model_{256};
  kernels::KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> threads_;
  std::unique_ptr<engine::Engine> engine_;
  ScoredText text_;
};

TEST_F(TextScoreTest, SumsTheLogProbabilityOfEachTokenInItsWindow) {
  const TextScore score = Score({});
  ASSERT_EQ(score.nll.size(), static_cast<size_t>(text_.rows));
  EXPECT_EQ(text_.rows, 129);
  size_t row = 0;
  for (const Window& window : WindowsOf(130, 40, 15)) {
    for (int64_t token = window.first_scored; token < window.end; ++token, ++row) {
      const auto logits =
          FakeModel::LogitsAfter(std::span(text_.tokens).subspan(window.begin, token - window.begin));
      double sum = 0;
      for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
      EXPECT_NEAR(score.nll[row], std::log(sum) - logits[text_.tokens[token]], 1e-5);
    }
  }
}

TEST_F(TextScoreTest, DivergenceFromOwnSavedPredictionsIsZero) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "own.safetensors";
  for (const tensor::DType dtype : {tensor::DType::kF16, tensor::DType::kF32}) {
    auto writer = LogprobWriter::Create(path, text_, dtype);
    ASSERT_TRUE(writer.ok()) << writer.status();
    EXPECT_FALSE(std::filesystem::exists(path));
    const TextScore saved = Score({.save = &*writer});
    ASSERT_TRUE(writer->Commit().ok());
    const auto base = LogprobFile::Open(path);
    ASSERT_TRUE(base.ok()) << base.status();
    EXPECT_EQ(base->text().tokens, text_.tokens);
    EXPECT_EQ(base->text().window, 40);
    SavedRows rows(*base, RouteRecord());
    const TextScore again = Score({.base = &rows});
    // f16 rounds a log-probability l by at most |l| 2^-11. Here |l| < 16, so the error is below 1/128, and
    // the divergence is of second order in it. f32 has only its own rounding error.
    const bool half = dtype == tensor::DType::kF16;
    EXPECT_LT(Average::Of(again.kl).mean, half ? 1.0 / 128 / 128 : 1e-6);
    for (size_t i = 0; i < saved.nll.size(); ++i) {
      EXPECT_NEAR(again.base_nll[i], saved.nll[i], half ? 2.0 / 128 : 1e-5);
    }
    EXPECT_GE(Average::Of(again.same_top).mean, half ? 0.95 : 1);
    std::filesystem::remove(path);
  }
}

TEST_F(TextScoreTest, DivergenceFromItselfIsZero) {
  const auto own = *engine::Engine::Create(model_, kernels_, *threads_,
                                           {.kv_bytes = 1 << 20, .max_sequences = 1, .max_batch_tokens = 7});
  LockstepRows reference(*own, *threads_, text_);
  const TextScore score = Score({.base = &reference});
  EXPECT_EQ(score.base_nll, score.nll);
  EXPECT_EQ(score.kl, std::vector<double>(score.nll.size(), 0));
  EXPECT_EQ(score.same_top, std::vector<double>(score.nll.size(), 1));
  EXPECT_TRUE(score.flips.layers().empty());  // it has no routers
  EXPECT_EQ(score.windows, (std::vector<int64_t>{39, 15, 15, 15, 15, 15, 15}));
}

TEST_F(TextScoreTest, RejectsDamagedFiles) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "damaged.safetensors";
  auto writer = LogprobWriter::Create(path, text_, tensor::DType::kF16);
  ASSERT_TRUE(writer.ok());
  Score({.save = &*writer});
  ASSERT_TRUE(writer->Commit().ok());
  const auto size = std::filesystem::file_size(path);
  for (const auto kept : {size - 1, size / 2, uintmax_t{20}, uintmax_t{3}, uintmax_t{0}}) {
    std::filesystem::resize_file(path, kept);
    EXPECT_FALSE(LogprobFile::Open(path).ok()) << kept;
  }
  std::filesystem::remove(path);
}

TEST_F(TextScoreTest, UnfinishedFileIsRemoved) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "unfinished";
  std::filesystem::create_directory(folder);
  {
    auto writer = LogprobWriter::Create(folder / "x", text_, tensor::DType::kF16);
    ASSERT_TRUE(writer.ok());
    const auto stopped = ScoreText(*engine_, *threads_, text_, {.save = &*writer},
                                   [](const TextScore&) { return Cancelled("enough"); });
    EXPECT_EQ(stopped.status().code(), StatusCode::kCancelled);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
}

}  // namespace
}  // namespace moesaic::app
