#include "prefix/prefix_index.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace moesaic::prefix {
namespace {

using Index = PrefixIndex<int>;

// Each letter is one block of `size` equal tokens.
std::vector<int32_t> Tokens(const std::string& text, int size) {
  std::vector<int32_t> tokens;
  for (const char letter : text) tokens.insert(tokens.end(), size, letter);
  return tokens;
}

class PrefixIndexTest : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  // Adds the missing blocks of a path; the payload of a block is the length of its path.
  void Add(const std::string& name, const std::string& path) {
    const std::vector<int32_t> tokens = Tokens(path, size());
    Index::Position at = {.node = &index_.AddRoot(name)};
    for (size_t i = 0; i < path.size(); ++i) {
      const auto block = std::span(tokens).subspan(i * size(), size());
      Index::Position next = index_.Next(at, block);
      if (!next) next = index_.Append(at, index_.NewId(), block, static_cast<int>(i) + 1, true);
      at = next;
    }
    index_.CheckStructure();
  }
  std::vector<int32_t> Find(const std::string& name, const std::string& path) const {
    std::vector<int32_t> ids;
    index_.Walk(name, Tokens(path, size()), [&](int32_t id) { ids.push_back(id); });
    return ids;
  }
  int Count(const std::string& name, const std::string& path) const {
    return static_cast<int>(Find(name, path).size());
  }
  // Uses the known blocks of a path. Returns the first letters of the nodes that were visited.
  std::string Use(const std::string& path) {
    const std::vector<int32_t> ids = Find("", path);
    index_.BeginUse();
    std::string visited;
    if (ids.empty()) return visited;
    index_.CutAfter(ids.back());
    index_.Touch(*index_.position(ids.back()).node,
                 [&](const Index::Node& node) { visited += Letter(node.blocks.front()); });
    index_.CheckStructure();
    return visited;
  }
  uint64_t LastUse(const std::string& path) const { return index_.last_use(Find("", path).back()); }
  char Letter(int32_t id) const { return static_cast<char>(index_.tokens(id)[0]); }
  // A path of up to `letters` letters, of which there are two.
  static std::string RandomPath(std::mt19937& random, size_t letters) {
    std::string path(1 + random() % letters, 'a');
    for (char& letter : path) letter = static_cast<char>('a' + random() % 2);
    return path;
  }

  // With two bits nearly all hashes collide, and only tokens distinguish blocks.
  Index index_{size(), KeyedHasher(/*bits=*/2)};
};

TEST_P(PrefixIndexTest, FindsTheLongestKnownPrefix) {
  Add("", "abcd");
  Add("", "abxy");
  Add("other", "ab");
  EXPECT_EQ(Count("", "abcde"), 4);
  EXPECT_EQ(Count("", "abxz"), 3);
  EXPECT_EQ(Count("", "b"), 0) << "a block is identified by the blocks before it";
  EXPECT_EQ(Count("other", "abc"), 2);
  EXPECT_EQ(Count("unknown", "a"), 0);
  EXPECT_EQ(index_.blocks(), 8);
  EXPECT_EQ(index_.nodes(), 4) << "the nodes are ab, cd, xy and the ab of the other namespace";
}

TEST_P(PrefixIndexTest, ReturnsParentsFollowersAndPaths) {
  Add("", "abcd");
  Add("", "abxy");
  const std::vector<int32_t> first = Find("", "abcd"), second = Find("", "abxy");
  EXPECT_EQ(index_.Parent(first[0]), -1);
  EXPECT_EQ(index_.Parent(first[3]), first[2]);
  EXPECT_EQ(index_.Parent(second[2]), first[1]);
  EXPECT_EQ(index_.Follower(first[2]), first[3]);
  EXPECT_EQ(index_.Follower(first[3]), -1);
  EXPECT_EQ(index_.Path(second[3]), second);
  EXPECT_EQ(index_.NameOf(second[3]), "");
  EXPECT_EQ(index_.payload(second[3]), 4);
}

TEST_P(PrefixIndexTest, RemovingTheLastBlockRemovesItsNamespace) {
  Add("name", "ab");
  index_.Remove(Find("name", "ab")[1]);
  index_.CheckStructure();
  EXPECT_EQ(Count("name", "ab"), 1);
  index_.Remove(Find("name", "a")[0]);
  EXPECT_EQ(index_.FindRoot("name"), nullptr);
  EXPECT_EQ(index_.AnyRoot(), nullptr);
  EXPECT_EQ(index_.nodes(), 0);
}

// Compares the index with a set of paths that contains a path only with all of its prefixes.
TEST_P(PrefixIndexTest, BehavesLikeASetOfPaths) {
  std::mt19937 random(7);
  std::set<std::string> model;
  for (int step = 0; step < 3000; ++step) {
    std::string path;
    for (size_t i = 0, length = 1 + random() % 6; i < length; ++i)
      path += static_cast<char>('a' + random() % 3);
    if (random() % 3 > 0) {
      Add("", path);
      for (size_t i = 1; i <= path.size(); ++i) model.insert(path.substr(0, i));
    } else if (const std::vector<int32_t> ids = Find("", path); !ids.empty()) {
      const std::string known = path.substr(0, ids.size());
      if (index_.Follower(ids.back()) >= 0) continue;
      index_.Remove(ids.back());
      model.erase(known);
      index_.CheckStructure();
    }
    size_t expected = 0;
    while (expected < path.size() && model.contains(path.substr(0, expected + 1))) ++expected;
    ASSERT_EQ(Count("", path), static_cast<int>(expected)) << path;
    ASSERT_EQ(index_.blocks(), static_cast<int>(model.size()));
  }
  index_.Clear();
  index_.CheckStructure();
  EXPECT_EQ(Count("", "a"), 0);
}

TEST_P(PrefixIndexTest, AUseThatEndsInsideANodeDividesIt) {
  Add("", "abcd");
  Add("", "abxy");
  EXPECT_EQ(Use("abc"), "ca") << "the nodes are ab and c, and the last one is visited first";
  EXPECT_EQ(index_.nodes(), 4) << "the nodes are ab, c, d, xy";
  EXPECT_EQ(LastUse("a"), 1U);
  EXPECT_EQ(LastUse("abc"), 1U);
  EXPECT_EQ(LastUse("abcd"), 0U);
  EXPECT_EQ(LastUse("abx"), 0U);
  EXPECT_EQ(Use("q"), "");
  EXPECT_EQ(index_.now(), 2U) << "a use of unknown blocks advances the time too";
  EXPECT_EQ(Use("abxy"), "xa");
  EXPECT_EQ(LastUse("ab"), 3U);
  EXPECT_EQ(LastUse("abc"), 1U);
}

// Compares the last use of each block with that in a map. Every use marks the known blocks of a path, and may
// add the others.
TEST_P(PrefixIndexTest, RemembersTheLastUseOfEachBlock) {
  std::mt19937 random(11);
  std::map<std::string, uint64_t> model;  // last use of each path
  for (uint64_t now = 1; now <= 600; ++now) {
    const std::string path = RandomPath(random, 5);
    const std::string known = path.substr(0, Find("", path).size());
    Use(path);
    ASSERT_EQ(index_.now(), now);
    for (size_t i = 1; i <= known.size(); ++i) model[path.substr(0, i)] = now;
    const uint32_t next = random() % 4;
    if (next < 2) {
      Add("", path);
      for (size_t i = known.size() + 1; i <= path.size(); ++i) model[path.substr(0, i)] = now;
    } else if (const int32_t last = known.empty() ? -1 : Find("", known).back();
               next == 2 && last >= 0 && index_.Follower(last) < 0) {
      index_.Remove(last);
      index_.CheckStructure();
      model.erase(known);
    }
    for (const auto& [text, used] : model) ASSERT_EQ(LastUse(text), used) << text;
  }
}

// Compares the list of blocks with a vector.
TEST_P(PrefixIndexTest, ListsBlocksInTheOrderOfTheirLastUse) {
  std::mt19937 random(13);
  std::vector<std::string> model;  // the paths of the listed blocks, the least recently used first
  for (int step = 0; step < 2000; ++step) {
    const std::string path = RandomPath(random, 4);
    const std::vector<int32_t> ids = Find("", path);
    const std::string known = path.substr(0, ids.size());
    const uint32_t next = random() % 5;
    if (next == 0) {
      Add("", path);
    } else if (!ids.empty() && next < 3) {
      index_.MoveToNewest(ids.back());
      std::erase(model, known);
      model.push_back(known);
    } else if (!ids.empty() && next == 3) {
      index_.Unlist(ids.back());
      std::erase(model, known);
    } else if (!ids.empty() && index_.Follower(ids.back()) < 0) {
      index_.Remove(ids.back());
      std::erase(model, known);
    }
    index_.CheckStructure();
    std::vector<std::string> listed;
    for (int32_t id = index_.oldest(); id >= 0; id = index_.newer(id)) {
      EXPECT_TRUE(index_.listed(id));
      std::string& text = listed.emplace_back();
      for (const int32_t each : index_.Path(id)) text += Letter(each);
    }
    ASSERT_EQ(listed, model);
    ASSERT_EQ(index_.listed_blocks(), static_cast<int>(model.size()));
  }
  index_.Clear();
  index_.CheckStructure();
  EXPECT_EQ(index_.oldest(), -1);
  EXPECT_EQ(index_.listed_blocks(), 0);
}

INSTANTIATE_TEST_SUITE_P(BlockTokens, PrefixIndexTest, testing::Values(1, 16, 64, 300));

}  // namespace
}  // namespace moesaic::prefix
