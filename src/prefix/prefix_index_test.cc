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
    index_.Walk(name, Tokens(path, size()),
                [&](std::span<const int32_t> some) { ids.insert(ids.end(), some.begin(), some.end()); });
    return ids;
  }
  int Count(const std::string& name, const std::string& path) const {
    return static_cast<int>(Find(name, path).size());
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

INSTANTIATE_TEST_SUITE_P(BlockTokens, PrefixIndexTest, testing::Values(1, 16, 64, 300));

TEST(KeyedHasherTest, DependsOnTheSecretTheNamespaceAndTheTokens) {
  const KeyedHasher one, two;
  const std::vector<int32_t> a = Tokens("a", 64), b = Tokens("b", 64);
  EXPECT_EQ(one.Next(one.Root("x"), a), one.Next(one.Root("x"), a));
  EXPECT_NE(one.Next(one.Root("x"), a), two.Next(two.Root("x"), a));
  EXPECT_NE(one.Next(one.Root("x"), a), one.Next(one.Root("y"), a));
  EXPECT_NE(one.Next(one.Root("x"), a), one.Next(one.Root("x"), b));
}

}  // namespace
}  // namespace moesaic::prefix
