#include "models/pipeline_parts.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace moesaic::models {
namespace {

using kernels::SequenceSlice;

// Sequences of the given numbers of rows; the last row of each needs logits.
struct Rows {
  explicit Rows(const std::vector<int>& counts) {
    int row = 0;
    for (const int count : counts) {
      sequences.push_back({.block_table = &table, .start = 100 + row, .count = count, .row = row});
      row += count;
      logit_rows.push_back(row - 1);
    }
    tokens.resize(row);
    std::iota(tokens.begin(), tokens.end(), 0);
  }
  ForwardBatch batch() const { return {.tokens = tokens, .sequences = sequences, .logit_rows = logit_rows}; }

  int32_t table = 0;
  std::vector<int32_t> tokens, logit_rows;
  std::vector<SequenceSlice> sequences;
};

std::vector<int> RowCounts(const std::vector<int>& counts, int stages, double read_rows = ReadRows(0, 0)) {
  const Rows rows(counts);
  std::vector<int> parts;
  for (const PipelinePart& part : SplitForPipeline(rows.batch(), stages, read_rows)) {
    parts.push_back(part.rows.count);
  }
  return parts;
}

using Counts = std::vector<int>;

TEST(SplitForPipelineTest, OneStageHasOnePart) {
  EXPECT_EQ(RowCounts({512}, 1), Counts({512}));
  EXPECT_EQ(RowCounts({1, 1, 1}, 1), Counts({3}));
}

TEST(SplitForPipelineTest, PrefillPartsHaveAtLeast32Rows) {
  EXPECT_EQ(RowCounts({63}, 2), Counts({63}));
  EXPECT_EQ(RowCounts({64}, 2), Counts({32, 32}));
  EXPECT_EQ(RowCounts({130}, 2), Counts({33, 33, 32, 32}));
  EXPECT_EQ(RowCounts({512}, 2), Counts(8, 64));
  EXPECT_EQ(RowCounts({1, 1, 94}, 3), Counts(3, 32)) << "decodes are in the first part";
}

// Each part reads the experts of its rows, which are nearly all of them.
TEST(SplitForPipelineTest, PartsOfSparseModelsAreLarger) {
  const double read_rows = ReadRows(128, 8);
  EXPECT_EQ(RowCounts({128}, 2, read_rows), Counts({128}));
  EXPECT_EQ(RowCounts({512}, 2, read_rows), Counts({256, 256}));
  EXPECT_EQ(RowCounts({4096}, 2, read_rows).size(), 6U);
}

TEST(SplitForPipelineTest, BatchesAmongOthersHaveOnePart) {
  const Rows rows({1, 1, 100});
  ForwardBatch batch = rows.batch();
  batch.divides = false;
  EXPECT_EQ(SplitForPipeline(batch, 2, ReadRows(0, 0)).size(), 1U);
}

TEST(SplitForPipelineTest, DecodesAreDividedAmongStagesBetweenSequences) {
  EXPECT_EQ(RowCounts({1}, 4), Counts({1}));
  EXPECT_EQ(RowCounts(Counts(8, 1), 2), Counts({4, 4}));
  EXPECT_EQ(RowCounts(Counts(8, 1), 4), Counts({2, 2, 2, 2}));
  EXPECT_EQ(RowCounts({1, 1, 1}, 2), Counts({2, 1}));
  EXPECT_EQ(RowCounts({5, 5}, 3), Counts({5, 5})) << "drafts of a sequence stay together";
  EXPECT_EQ(RowCounts({40, 1}, 2), Counts({40, 1}));
}

TEST(SplitForPipelineTest, PartsCoverTheBatchInOrder) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    Counts counts(1 + random() % 12);
    for (int& count : counts) count = 1 + static_cast<int>(random() % (random() % 4 == 0 ? 200 : 3));
    const Rows rows(counts);
    const ForwardBatch batch = rows.batch();
    int next = 0, logits = 0;
    for (const PipelinePart& part :
         SplitForPipeline(batch, 1 + static_cast<int>(random() % 4), ReadRows(0, 0))) {
      ASSERT_EQ(part.rows.first, next);
      ASSERT_GT(part.rows.count, 0);
      ASSERT_EQ(part.logits.first, logits);
      int row = 0;
      for (const SequenceSlice& slice : part.sequences) {
        ASSERT_EQ(slice.row, row);
        ASSERT_EQ(slice.start, 100 + part.rows.first + row);  // positions of Rows rise with the rows
        row += slice.count;
      }
      ASSERT_EQ(row, part.rows.count);
      for (const int32_t wanted : part.logit_rows) {
        ASSERT_EQ(part.rows.first + wanted, batch.logit_rows[logits++]);
      }
      next = part.rows.end();
    }
    ASSERT_EQ(next, std::ssize(batch.tokens));
    ASSERT_EQ(logits, std::ssize(batch.logit_rows));
  }
}

}  // namespace
}  // namespace moesaic::models
