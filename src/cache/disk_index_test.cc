#include "cache/disk_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace moesaic::cache {
namespace {

using Path = std::pair<std::string, std::vector<int32_t>>;  // namespace, and one number for each block

std::vector<int32_t> TokensOf(std::span<const int32_t> path) {
  std::vector<int32_t> tokens;
  for (const int32_t number : path) tokens.insert(tokens.end(), kKvBlockTokens, number);
  return tokens;
}

class DiskIndexTest : public testing::Test {
 protected:
  // Adds the missing blocks of a path until no slot is free. Returns the number of leading blocks in
  // the index.
  int Store(const std::string& name, const std::vector<int32_t>& path, bool stored = true) {
    const std::vector<int32_t> tokens = TokensOf(path);
    const std::vector<DiskBlock*> chain = index_.Find(name, tokens);
    index_.Touch(chain);
    DiskBlock* last = chain.empty() ? nullptr : chain.back();
    size_t next = chain.size();
    for (; next < path.size() && index_.has_free(); ++next) {
      const SlotPlace place = index_.TakeFree(last == nullptr ? SlotPlace{} : last->place);
      const auto block = std::span(tokens).subspan(next * kKvBlockTokens, kKvBlockTokens);
      last = &index_.Add(last, name, block, place, ++ids_);
      if (stored) index_.SetStored(*last, {}, {});
    }
    return static_cast<int>(next);
  }

  DiskBlock& Last(const std::string& name, const std::vector<int32_t>& path) {
    const std::vector<DiskBlock*> chain = index_.Find(name, TokensOf(path));
    EXPECT_EQ(chain.size(), path.size());
    return *chain.back();
  }

  int Count(const std::string& name, const std::vector<int32_t>& path) {
    return index_.CountStored(name, TokensOf(path));
  }

  void AddFree(int count) {
    for (int i = 0; i < count; ++i) index_.AddFree({1, i});
  }

  // With few bits nearly all hashes collide, and only tokens distinguish blocks.
  DiskIndex index_{prefix::KeyedHasher(/*bits=*/2)};
  uint64_t ids_ = 0;
};

TEST_F(DiskIndexTest, FindsStoredBlocks) {
  AddFree(8);
  EXPECT_EQ(Store("a", {1, 2, 3}), 3);
  EXPECT_EQ(Store("a", {1, 2, 4}), 3);
  EXPECT_EQ(Store("b", {1}), 1);
  EXPECT_EQ(index_.blocks(), 5);
  EXPECT_EQ(Count("a", {1, 2, 3, 4}), 3);
  EXPECT_EQ(Count("a", {1, 2, 4}), 3);
  EXPECT_EQ(Count("a", {2, 3}), 0) << "a block is identified by its predecessors too";
  EXPECT_EQ(Count("b", {1, 2}), 1);
  EXPECT_EQ(Count("c", {1}), 0);
  index_.CheckStructure();
}

TEST_F(DiskIndexTest, BlocksBeingWrittenAreNotLoaded) {
  AddFree(4);
  Store("a", {1}, true);
  Store("a", {1, 2}, false);
  EXPECT_EQ(Count("a", {1, 2}), 1);
  EXPECT_FALSE(index_.EvictOne()) << "one block is being written, and the other one precedes it";
  index_.SetStored(Last("a", {1, 2}), {}, {});
  EXPECT_EQ(Count("a", {1, 2}), 2);
}

TEST_F(DiskIndexTest, EvictsTheLeastRecentlyUsedEndFirst) {
  AddFree(5);
  Store("a", {1, 2});
  Store("a", {1, 3});
  Store("b", {5});
  index_.Touch(index_.Find("a", TokensOf(std::vector<int32_t>{1, 2})));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(Count("a", {1, 3}), 1);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(Count("b", {5}), 0);
  index_.Pin(Last("a", {1, 2}));
  EXPECT_FALSE(index_.EvictOne()) << "the block is pinned by a reader";
  index_.Unpin(Last("a", {1, 2}));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(index_.EvictOne());
  EXPECT_EQ(index_.blocks(), 0);
  index_.CheckStructure();
}

// After a restart no block has been used. The end with the oldest record is evicted first.
TEST_F(DiskIndexTest, EvictsTheOldestRecordAmongBlocksOfEqualUse) {
  AddFree(4);
  const auto add = [&](const DiskBlock* parent, int32_t number) {
    const std::vector<int32_t> tokens(kKvBlockTokens, number);
    DiskBlock& block = index_.Add(parent, "a", tokens, index_.TakeFree({}), ++ids_);
    index_.SetStored(block, {}, {});
    return &block;
  };
  const DiskBlock* const first = add(nullptr, 1);
  const DiskBlock* const second = add(nullptr, 2);
  add(second, 3);
  add(first, 4);
  const auto counts = [&] { return std::pair(Count("a", {1, 4}), Count("a", {2, 3})); };
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(counts(), std::pair(2, 1));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(counts(), std::pair(2, 0));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(counts(), std::pair(1, 0));
  index_.CheckStructure();
}

TEST_F(DiskIndexTest, UsesOfAPartOfAPathKeepThatPart) {
  AddFree(5);
  Store("a", {1, 2, 3});
  Store("b", {5, 6});
  index_.Touch(index_.Find("a", TokensOf(std::vector<int32_t>{1, 2})));
  index_.CheckStructure();
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(Count("a", {1, 2, 3}), 2);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_EQ(Count("b", {5, 6}), 0);
  EXPECT_EQ(Count("a", {1, 2, 3}), 2);
}

TEST_F(DiskIndexTest, RemovesBlocksWithTheirFollowers) {
  AddFree(6);
  Store("a", {1, 2, 3});
  Store("a", {1, 2, 4});
  Store("a", {1, 5});
  DiskBlock& read = Last("a", {1, 2, 4});
  index_.Pin(read);
  std::set<SlotPlace> gone;
  index_.Remove(Last("a", {1, 2}), [&](SlotPlace place) { gone.insert(place); });
  EXPECT_EQ(gone.size(), 3U);
  EXPECT_EQ(Count("a", {1, 2, 3}), 1);
  EXPECT_EQ(Count("a", {1, 5}), 2);
  index_.CheckStructure();
  // The slot of the pinned block is not reused before it is unpinned.
  EXPECT_EQ(Store("a", {7, 7, 7}), 3);
  EXPECT_EQ(Store("a", {8}), 0);
  index_.Unpin(read);
  EXPECT_EQ(Store("a", {8}), 1);
  index_.CheckStructure();
}

TEST_F(DiskIndexTest, FollowersTakeTheNextSlot) {
  AddFree(9);
  Store("a", {1, 2});
  Store("b", {1});
  Store("a", {1, 2, 3});
  EXPECT_EQ(Last("a", {1, 2}).place.slot, Last("a", {1}).place.slot + 1);
  index_.Clear();
  EXPECT_EQ(index_.blocks(), 0);
  EXPECT_EQ(Store("a", {1, 2, 3, 4, 5, 6, 7, 8, 9}), 9);
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(index_.Find("a", TokensOf(std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9}))[i]->place.slot, i);
  }
}

// Compares the index with a set of paths that contains a path only with all of its prefixes.
TEST_F(DiskIndexTest, MatchesASetOfPaths) {
  constexpr int kSlots = 30;
  AddFree(kSlots);
  std::mt19937 random(5);
  std::map<Path, int> model;  // the last use of each path
  std::vector<DiskBlock*> pinned;
  const auto pick = [&](int below) { return static_cast<int>(random() % below); };
  for (int step = 0; step < 5000; ++step) {
    const std::string name = pick(2) == 0 ? "a" : "b";
    std::vector<int32_t> path(1 + pick(5));
    for (int32_t& number : path) number = pick(3);
    const std::vector<DiskBlock*> chain = index_.Find(name, TokensOf(path));
    size_t there = 0;
    while (there < path.size() &&
           model.contains({name, {path.begin(), path.begin() + static_cast<int>(there) + 1}})) {
      ++there;
    }
    ASSERT_EQ(chain.size(), there);
    switch (pick(4)) {
      case 0:
      case 1: {
        const int done = Store(name, path);
        for (int i = 1; i <= done; ++i) model[{name, {path.begin(), path.begin() + i}}] = step;
        break;
      }
      case 2:
        if (chain.empty() || pick(4) > 0) break;
        index_.Remove(*chain.back(), [](SlotPlace) {});
        path.resize(there);
        std::erase_if(model, [&](const auto& entry) {
          return entry.first.first == name && entry.first.second.size() >= path.size() &&
                 std::equal(path.begin(), path.end(), entry.first.second.begin());
        });
        break;
      case 3:
        if (pick(2) == 0 && !chain.empty()) {
          index_.Pin(*chain.back());
          pinned.push_back(chain.back());
        } else if (!pinned.empty()) {
          index_.Unpin(*pinned.back());
          pinned.pop_back();
        } else if (index_.EvictOne()) {
          // The evicted block is an end, and no other end was used earlier.
          std::vector<Path> gone;
          for (const auto& [known, used] : model) {
            if (Count(known.first, known.second) < static_cast<int>(known.second.size()))
              gone.push_back(known);
          }
          ASSERT_EQ(gone.size(), 1U);
          for (const auto& [known, used] : model) {
            const bool end = std::ranges::none_of(model, [&known = known](const auto& other) {
              return other.first.first == known.first &&
                     other.first.second.size() == known.second.size() + 1 &&
                     std::equal(known.second.begin(), known.second.end(), other.first.second.begin());
            });
            if (!end) continue;
            ASSERT_LE(model.at(gone[0]), used);
          }
          model.erase(gone[0]);
        }
        break;
    }
    ASSERT_EQ(index_.blocks(), static_cast<int>(model.size()));
    index_.CheckStructure();
  }
}

}  // namespace
}  // namespace moesaic::cache
