#include "cache/kv_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace moesaic::cache {
namespace {

KvLayout Gqa() {
  return {
      .layers = 3, .heads = 2, .key_dim = 5, .value_dim = 3, .shared = false, .dtype = tensor::DType::kBF16};
}

std::unique_ptr<KvPool> PoolOf(int blocks) {
  auto pool = KvPool::Create(Gqa(), blocks * Gqa().total_bytes());
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

// The first tokens of a block, of every layer and head, with their scales; what is behind them stays.
TEST(KvPoolTest, CopiesTokensWithTheirScales) {
  KvLayout layout = Gqa();
  layout.dtype = tensor::DType::kI8;
  const auto pool = *KvPool::Create(layout, 2 * layout.total_bytes());
  const BlockRef from = *pool->Allocate(), to = *pool->Allocate();
  const auto block = [&](const BlockRef& ref) { return pool->At(ref.index()); };
  std::memset(block(from), 1, layout.block_bytes());
  std::memset(block(to), 2, layout.block_bytes());
  pool->CopyTokens(from, to, 40);
  const int64_t copied = std::count(block(to), block(to) + layout.block_bytes(), std::byte{1});
  EXPECT_EQ(copied, 40 * layout.layers * layout.heads * (layout.key_dim + layout.value_dim + 8));
  const auto* scales = block(to) + layout.scale_offset();
  EXPECT_EQ(scales[40 * 4 - 1], std::byte{1});
  EXPECT_EQ(scales[40 * 4], std::byte{2});
}

// Those of one layer lie together, and those of another block or layer are others.
TEST(KvPoolTest, SummariesOfALayerLieTogether) {
  KvLayout layout = Gqa();
  layout.summary_bytes = 84;
  const auto pool = *KvPool::Create(layout, 4 * layout.total_bytes());
  EXPECT_EQ(pool->total_blocks(), 4);
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(*pool->Allocate());
    const KvBlockView view = pool->ViewOf(blocks[i].index());
    EXPECT_EQ(view.data, pool->At(blocks[i].index()));
    std::memset(view.data, 100 + i, layout.block_bytes());
    for (int layer = 0; layer < layout.layers; ++layer) {
      std::byte* const summaries = view.summaries + layer * view.summary_step;
      EXPECT_EQ(summaries, pool->summaries(layer) + blocks[i].index() * layout.summary_stride());
      std::memset(summaries, 10 * layer + i, layout.summary_stride());
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int layer = 0; layer < layout.layers; ++layer) {
      const std::byte* summaries = pool->summaries(layer) + blocks[i].index() * layout.summary_stride();
      EXPECT_EQ(std::count(summaries, summaries + layout.summary_stride(), std::byte(10 * layer + i)),
                layout.summary_stride());
    }
    const std::byte* block = pool->At(blocks[i].index());
    EXPECT_EQ(std::count(block, block + layout.block_bytes(), std::byte(100 + i)), layout.block_bytes());
  }
  EXPECT_EQ(PoolOf(1)->summaries(0), nullptr);
  EXPECT_EQ(PoolOf(1)->ViewOf(0).summaries, nullptr);
}

TEST(KvPoolTest, TakesAsManyWholeBlocksAsFit) {
  auto pool = KvPool::Create(Gqa(), 5 * Gqa().total_bytes() - 1);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ((*pool)->total_blocks(), 4);
  EXPECT_EQ((*pool)->free_blocks(), 4);
}

TEST(KvPoolTest, RefusesABudgetBelowOneBlock) {
  const auto pool = KvPool::Create(Gqa(), Gqa().total_bytes() - 1);
  EXPECT_EQ(pool.status().code(), StatusCode::kResourceExhausted);
}

TEST(KvPoolTest, ABlockComesBackWithItsLastHandle) {
  const auto pool = PoolOf(1);
  BlockRef first = *pool->Allocate();
  EXPECT_TRUE(first.unique());
  BlockRef second = first;
  EXPECT_FALSE(first.unique());
  EXPECT_EQ(second.index(), first.index());
  first = BlockRef();
  EXPECT_EQ(pool->free_blocks(), 0);
  EXPECT_EQ(pool->Allocate().status().code(), StatusCode::kResourceExhausted);
  second = BlockRef();
  EXPECT_EQ(pool->free_blocks(), 1);
}

TEST(KvPoolTest, SelfAssignmentKeepsTheBlock) {
  const auto pool = PoolOf(1);
  BlockRef block = *pool->Allocate();
  BlockRef& alias = block;
  block = alias;
  EXPECT_TRUE(block.unique());
  block = std::move(alias);
  EXPECT_TRUE(block.unique());
}

TEST(KvPoolTest, BlocksDoNotOverlap) {
  const auto pool = PoolOf(4);
  std::vector<BlockRef> blocks;
  const int64_t bytes = pool->layout().block_bytes();
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(*pool->Allocate());
    std::memset(pool->At(blocks.back().index()), i + 1, bytes);
  }
  for (int i = 0; i < 4; ++i) {
    const std::byte* block = pool->At(blocks[i].index());
    EXPECT_TRUE(std::all_of(block, block + bytes, [&](std::byte b) { return b == std::byte(i + 1); }));
  }
}

// A random walk of allocate, copy, move and drop against a plain count per block: never more blocks than
// there are, never one block twice, and at the end all are back.
TEST(KvPoolTest, RandomHoldersNeverOvercommitNorLeak) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const int total = 1 + static_cast<int>(random() % 40);
    const auto pool = PoolOf(total);
    std::vector<BlockRef> held;
    std::map<int32_t, int> count;
    for (int step = 0; step < 3000; ++step) {
      const uint32_t action = random() % 4;
      if (action <= 1) {
        auto block = pool->Allocate();
        ASSERT_EQ(block.ok(), static_cast<int>(count.size()) < total);
        if (block.ok()) {
          ASSERT_EQ(count.count(block->index()), 0U);
          count[block->index()] = 1;
          held.push_back(*std::move(block));
        }
      } else if (!held.empty()) {
        const size_t i = random() % held.size();
        if (action == 2) {
          ++count[held[i].index()];
          held.push_back(held[i]);
        } else {
          if (--count[held[i].index()] == 0) count.erase(held[i].index());
          std::swap(held[i], held.back());
          held.pop_back();
        }
      }
      ASSERT_EQ(pool->free_blocks(), total - static_cast<int>(count.size()));
      for (const BlockRef& block : held) ASSERT_EQ(block.unique(), count[block.index()] == 1);
    }
    held.clear();
    EXPECT_EQ(pool->free_blocks(), total);
  }
}

}  // namespace
}  // namespace moesaic::cache
