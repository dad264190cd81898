#include "parallel/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::parallel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ModelShape Shape() {
  return {.layers = 7,
          .heads = 12,
          .kv_heads = 3,
          .head_columns = 16,
          .vocab = 1000,
          .intermediate = 200,
          .shared_intermediate = 48,
          .expert_intermediate = 96,
          .experts = 10};
}

// The ranges of all shards follow one another and cover [0, total).
void ExpectCover(const std::vector<Range>& ranges, int total) {
  int next = 0;
  for (const Range& range : ranges) {
    EXPECT_EQ(range.first, next);
    EXPECT_GE(range.count, 0);
    next = range.end();
  }
  EXPECT_EQ(next, total);
}

TEST(Divide, CoversTheTotalAtMultiplesOfTheUnit) {
  for (const int total : {0, 1, 7, 64, 100, 1000}) {
    for (const int unit : {1, 3, 32}) {
      for (const int parts : {1, 2, 3, 5}) {
        const std::vector<Range> ranges = Divide(total, unit, parts);
        ExpectCover(ranges, total);
        for (const Range& range : ranges) EXPECT_TRUE(range.first % unit == 0 || range.first == total);
      }
    }
  }
}

TEST(MakeShard, OneRankHasTheWholeModel) {
  const Shard shard = *MakeShard(Layout(), 0, Shape());
  EXPECT_EQ(shard, WholeModel(Shape()));
  EXPECT_TRUE(shard.is_whole);
}

TEST(MakeShard, RanksOfALayoutCoverTheModel) {
  const ModelShape shape = Shape();
  for (const Degrees& degrees :
       {Degrees{.tensor = 2}, {.tensor = 3, .pipeline = 2}, {.pipeline = 7}, {.tensor = 2, .expert = 2}}) {
    const Layout layout = *Layout::Create(degrees);
    std::vector<Range> layers, heads, kv_heads, vocab, columns;
    for (int stage = 0; stage < degrees.pipeline; ++stage) {
      layers.push_back(MakeShard(layout, layout.RankAt({.stage = stage}), shape)->layers);
    }
    for (int s = 0; s < degrees.tensor; ++s) {
      const Shard shard = *MakeShard(layout, layout.RankAt({.shard = s}), shape);
      EXPECT_EQ(shard.has_embedding, true);
      EXPECT_EQ(shard.has_head, degrees.pipeline == 1);
      EXPECT_EQ(shard.adds_bias, s == 0);
      heads.push_back(shard.heads);
      kv_heads.push_back(shard.kv_heads);
      vocab.push_back(shard.vocab);
      columns.push_back(shard.intermediate);
    }
    ExpectCover(layers, shape.layers);
    ExpectCover(heads, shape.heads);
    ExpectCover(kv_heads, shape.kv_heads);
    ExpectCover(vocab, shape.vocab);
    ExpectCover(columns, shape.intermediate);
  }
}

TEST(MakeShard, ExpertPartsHaveWholeExperts) {
  const Layout layout = *Layout::Create({.tensor = 3, .expert = 3});
  EXPECT_THAT(MakeShard(layout, 0, Shape())->experts, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(MakeShard(layout, 2, Shape())->experts, ElementsAre(7, 8, 9));
  EXPECT_EQ(MakeShard(layout, 2, Shape())->expert_intermediate, (Range{0, 96}));
}

TEST(MakeShard, MoreShardsThanKvHeadsShareThem) {
  ModelShape shape = Shape();
  const Layout layout = *Layout::Create({.tensor = 4});
  std::vector<Range> heads;
  for (int s = 0; s < 4; ++s) {
    const Shard shard = *MakeShard(layout, s, shape);
    EXPECT_EQ(shard.kv_heads.count, 1);
    // All query heads of a shard read its KV head.
    EXPECT_EQ(shard.heads.first / 4, shard.kv_heads.first);
    EXPECT_EQ((shard.heads.end() - 1) / 4, shard.kv_heads.first);
    heads.push_back(shard.heads);
  }
  ExpectCover(heads, 12);
}

TEST(MakeShard, SlicesBeginWhereScalesDo) {
  ModelShape shape = Shape();
  shape.attention_unit = shape.ffn_unit = 32;  // two heads
  const Layout layout = *Layout::Create({.tensor = 2});
  EXPECT_EQ(MakeShard(layout, 0, shape)->intermediate, (Range{0, 128}));
  EXPECT_EQ(MakeShard(layout, 0, shape)->expert_intermediate, (Range{0, 64}));
  EXPECT_EQ(MakeShard(layout, 0, shape)->heads.count * 16 % 32, 0);
}

TEST(MakeShard, RefusesMoreRanksThanParts) {
  const auto error = [](const Degrees& degrees, ModelShape shape = Shape()) {
    return Message(MakeShard(*Layout::Create(degrees), 0, shape).status());
  };
  EXPECT_THAT(error({.pipeline = 8}), HasSubstr("7 layers can't be divided among 8 pipeline stages"));
  EXPECT_THAT(error({.tensor = 16}), HasSubstr("12 attention heads can't be divided among 16"));
  EXPECT_THAT(error({.tensor = 11, .expert = 11}), HasSubstr("10 routed experts"));
  ModelShape wide = Shape();
  wide.attention_unit = 256;
  EXPECT_THAT(error({.tensor = 2}, wide), HasSubstr("stay together"));
}

}  // namespace
}  // namespace moesaic::parallel
