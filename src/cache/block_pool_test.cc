#include "cache/block_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace moesaic::cache {
namespace {

std::unique_ptr<BlockPool> PoolOf(int blocks) { return std::make_unique<BlockPool>(blocks); }

TEST(BlockPoolTest, FreesABlockWithItsLastHandle) {
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

TEST(BlockPoolTest, SelfAssignmentKeepsTheBlock) {
  const auto pool = PoolOf(1);
  BlockRef block = *pool->Allocate();
  BlockRef& alias = block;
  block = alias;
  EXPECT_TRUE(block.unique());
  block = std::move(alias);
  EXPECT_TRUE(block.unique());
}

TEST(BlockPoolTest, MarksLastUntilTheBlockIsAllocatedAgain) {
  const auto pool = PoolOf(1);
  BlockRef block = *pool->Allocate();
  pool->SetInexact(block);
  pool->SetAbsent(block.index(), true);
  EXPECT_TRUE(pool->inexact(0) && pool->absent(0));
  block = BlockRef();
  block = *pool->Allocate();
  EXPECT_FALSE(pool->inexact(0) || pool->absent(0));
}

// Compares random allocations, copies, moves and drops of handles with a count of handles per block. The pool
// never allocates a block twice, and all blocks are free at the end.
TEST(BlockPoolTest, RandomOperationsNeverOvercommitOrLeakBlocks) {
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
