#include "cache/radix_tree.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace moesaic::cache {
namespace {

// One letter is one block of 64 tokens equal to that letter. "abc" is a prompt of three blocks. A digit adds
// a partial block: "ab5" ends with 5 tokens of the block 'z', and "ab5c" with 5 tokens of 'c'.
std::vector<int32_t> Tokens(const std::string& text) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < text.size(); ++i) {
    if (std::isdigit(text[i])) {
      tokens.insert(tokens.end(), text[i] - '0', i + 1 < text.size() ? text[i + 1] : 'z');
      break;
    }
    tokens.insert(tokens.end(), kKvBlockTokens, text[i]);
  }
  return tokens;
}

// Records the events of the tree: "+abc" is stored at the root, "b+cd" after a block b, and "-d" is removed.
class Recorder : public KvObserver {
 public:
  void Stored(std::span<const uint64_t> hashes, std::optional<uint64_t> parent,
              std::span<const int32_t> tokens, std::string_view) override {
    std::string event = parent ? std::string(1, names_.at(*parent)) + "+" : "+";
    for (size_t i = 0; i < hashes.size(); ++i) {
      names_[hashes[i]] = static_cast<char>(tokens[i * kKvBlockTokens]);
      event += names_[hashes[i]];
    }
    events_ += event + " ";
  }
  void Removed(std::span<const uint64_t> hashes) override {
    events_ += "-";
    for (const uint64_t hash : hashes) events_ += names_.at(hash);
    events_ += " ";
  }
  std::string Take() {
    if (!events_.empty()) events_.pop_back();
    return std::exchange(events_, "");
  }

 private:
  std::map<uint64_t, char> names_;
  std::string events_;
};

class RadixTreeTest : public testing::Test {
 protected:
  explicit RadixTreeTest(int blocks = 16, int hash_bits = 64)
      : pool_(std::make_unique<BlockPool>(blocks)),
        tree_(*pool_, MakeLruPolicy(), &recorder_, prefix::KeyedHasher(hash_bits)) {}

  // Runs one request: looks up its prompt, computes the missing blocks, and releases all of them. Returns the
  // number of blocks that it found.
  int Serve(const std::string& text, const std::string& name = "", const SessionHint& hint = {}) {
    std::vector<BlockRef> blocks = Hold(text, name);
    const int found = found_;
    tree_.Touch(blocks, hint);
    return found;
  }

  // Like Serve(), but returns handles of the blocks.
  std::vector<BlockRef> Hold(const std::string& text, const std::string& name = "") {
    const std::vector<int32_t> tokens = Tokens(text);
    PrefixMatch match = tree_.Find(name, tokens);
    tree_.Use(match.blocks);
    found_ = static_cast<int>(match.blocks.size());
    tail_ = match.tail_tokens;
    std::vector<BlockRef> blocks = std::move(match.blocks);
    match = {};
    while (blocks.size() < tokens.size() / kKvBlockTokens) {
      if (pool_->free_blocks() == 0) {
        EXPECT_EQ(tree_.Evict(1), 1);
      }
      blocks.push_back(*pool_->Allocate());
    }
    tree_.Insert(name, std::span(tokens).first(blocks.size() * kKvBlockTokens), blocks, found_);
    tree_.CheckStructure();
    return blocks;
  }

  // Returns the number of cached blocks of `text` and of cached tokens of the next block: "2" or "2+5". Does
  // not mark them as used.
  std::string Look(const std::string& text, const std::string& name = "") const {
    const PrefixMatch match = tree_.Find(name, Tokens(text));
    EXPECT_EQ(match.tail_tokens > 0, static_cast<bool>(match.tail));
    return fmt::format("{}{}", match.blocks.size(),
                       match.tail_tokens > 0 ? fmt::format("+{}", match.tail_tokens) : "");
  }

  Recorder recorder_;
  std::unique_ptr<BlockPool> pool_;
  RadixTree tree_;
  int found_ = 0, tail_ = 0;
};

class HintedTreeTest : public testing::Test {
 protected:
  static SessionHint Returns(double at) { return {.session = Session::kContinues, .returns_at = at}; }
  // Runs a request in a pool that has room for all blocks. Each letter is a block.
  void Serve(const std::string& text, const SessionHint& hint = {}) {
    const std::vector<int32_t> tokens = Tokens(text);
    std::vector<BlockRef> blocks = std::move(tree_.Find("", tokens).blocks);
    tree_.Use(blocks);
    const auto known = static_cast<int>(blocks.size());
    while (blocks.size() < text.size()) blocks.push_back(*pool_->Allocate());
    tree_.Insert("", tokens, blocks, known);
    tree_.Touch(blocks, hint);
  }
  // Evicts `count` blocks and returns their letters in order.
  std::string Evicted(int count) {
    std::string letters;
    tree_.SetEvictionCallback([&](int32_t block) { letters += static_cast<char>(tree_.TokensOf(block)[0]); });
    EXPECT_EQ(tree_.Evict(count), count);
    tree_.SetEvictionCallback(nullptr);
    tree_.CheckStructure();
    return letters;
  }

  std::unique_ptr<BlockPool> pool_ = std::make_unique<BlockPool>(32);
  RadixTree tree_{*pool_, MakeCostAwarePolicy(1000, 20), nullptr};
};

TEST_F(HintedTreeTest, EvictsTheLatestPredictedReturnFirst) {
  Serve("a", Returns(10));
  Serve("b", Returns(30));
  Serve("c", Returns(20));
  EXPECT_EQ(Evicted(3), "bca");
}

TEST_F(HintedTreeTest, ComparesTimeUntilReturnWithAge) {
  Serve("a");
  for (const char* other : {"x", "y", "z"}) Serve(other, Returns(100));
  Serve("b", Returns(11));  // The time is 5: "b" returns in 6. "a" was used 4 ago, which counts as 8.
  EXPECT_EQ(Evicted(5), "zyxab");
}

TEST_F(HintedTreeTest, OverdueReturnsCountAsUsedAtTheirPredictedTime) {
  Serve("a", Returns(3));
  Serve("b");
  for (const char* other : {"c", "d", "e"}) Serve(other);
  EXPECT_EQ(Evicted(2), "ba");  // The time is 5: "b" was used 3 ago, and "a" was predicted to be used 2 ago.
}

TEST_F(HintedTreeTest, BlocksAfterTheReturningTokensAreEvictedFirst) {
  Serve("x");
  Serve("abcd", {.session = Session::kContinues, .tokens = kKvBlockTokens + 1});
  EXPECT_EQ(Evicted(4), "dcxb") << "a block is kept if the next request uses a part of it";
  Serve("pq", {.session = Session::kContinues, .tokens = 0});
  EXPECT_EQ(Evicted(3), "qpa");
}

// The path of a block is its namespace and the blocks before it, in all runs. The eviction callback can read
// it.
TEST_F(RadixTreeTest, ReturnsThePathOfABlock) {
  const auto path = [&](int32_t block) {
    const BlockPath found = tree_.PathOf(block);
    std::string text = std::string(found.name) + ":";
    for (const int32_t one : found.blocks) text += static_cast<char>(tree_.TokensOf(one)[0]);
    EXPECT_EQ(found.blocks.back(), block);
    return text;
  };
  const std::vector<BlockRef> whole = Hold("abcd");
  const std::vector<BlockRef> cut = Hold("abxy");
  const std::vector<BlockRef> other = Hold("ab", "tenant");
  EXPECT_EQ(path(whole[0].index()), ":a");
  EXPECT_EQ(path(whole[3].index()), ":abcd");
  EXPECT_EQ(path(cut[2].index()), ":abx");
  EXPECT_EQ(path(cut[3].index()), ":abxy");
  EXPECT_EQ(path(other[1].index()), "tenant:ab");
  Serve("abq");
  std::vector<std::string> left;
  tree_.SetEvictionCallback([&](int32_t block) { left.push_back(path(block)); });
  EXPECT_EQ(tree_.Evict(1), 1);
  EXPECT_THAT(left, testing::ElementsAre(":abq"));
  tree_.SetEvictionCallback(nullptr);
}

TEST_F(RadixTreeTest, FindsInsertedPrefixes) {
  EXPECT_EQ(Serve("abc"), 0);
  EXPECT_EQ(Look("abc"), "3");
  EXPECT_EQ(Look("ab"), "2");
  EXPECT_EQ(Look("abcd"), "3");
  EXPECT_EQ(Look("bc"), "0");
  EXPECT_EQ(Look("axc"), "1");
  EXPECT_EQ(tree_.nodes(), 1);
  EXPECT_EQ(recorder_.Take(), "+abc");
}

TEST_F(RadixTreeTest, SplitsRunsWherePromptsDiverge) {
  Serve("abcd");
  EXPECT_EQ(Serve("abxy"), 2);
  EXPECT_EQ(tree_.nodes(), 3);  // ab, cd, xy
  EXPECT_EQ(Serve("abcz"), 3);
  EXPECT_EQ(tree_.nodes(), 5);  // ab, c, d, xy, z
  EXPECT_EQ(Look("abcd"), "4");
  EXPECT_EQ(Look("abxy"), "4");
  EXPECT_EQ(recorder_.Take(), "+abcd b+xy c+z");
}

TEST_F(RadixTreeTest, AGrowingPromptStaysOneRun) {
  std::vector<BlockRef> blocks;
  std::vector<int32_t> tokens;
  for (const char* grown : {"a", "ab", "abc"}) {
    tokens = Tokens(grown);
    blocks.push_back(*pool_->Allocate());
    tree_.Insert("", tokens, blocks, static_cast<int>(blocks.size()) - 1);
  }
  EXPECT_EQ(tree_.nodes(), 1);
  EXPECT_EQ(Look("abc"), "3");
  EXPECT_EQ(recorder_.Take(), "+a a+b b+c");
  blocks.clear();
}

TEST_F(RadixTreeTest, FindsPartialBlocksToCopy) {
  Serve("abc");
  EXPECT_EQ(Look("ab5c"), "2+5");
  EXPECT_EQ(Look("ab5"), "2");
  EXPECT_EQ(Look("3a"), "0+3");
  Serve("abd");
  EXPECT_EQ(Look("ab7d"), "2+7");
  EXPECT_EQ(Look("ab7c"), "2+7");
}

TEST_F(RadixTreeTest, NamespacesShareNoBlocks) {
  Serve("abc", "tenant 1");
  EXPECT_EQ(Look("abc", "tenant 2"), "0");
  EXPECT_EQ(Look("3a", "tenant 2"), "0");
  EXPECT_EQ(Look("abc", ""), "0");
  EXPECT_EQ(Serve("abc", "tenant 2"), 0);
  EXPECT_EQ(tree_.blocks(), 6);
  EXPECT_EQ(Look("abc", "tenant 1"), "3");
}

TEST_F(RadixTreeTest, InsertReplacesDuplicateBlocks) {
  const std::vector<int32_t> tokens = Tokens("ab");
  std::vector<BlockRef> first = {*pool_->Allocate(), *pool_->Allocate()};
  std::vector<BlockRef> second = {*pool_->Allocate(), *pool_->Allocate()};
  tree_.Insert("", tokens, first, 0);
  tree_.Insert("", tokens, second, 0);
  EXPECT_EQ(first[0].index(), second[0].index());
  EXPECT_EQ(first[1].index(), second[1].index());
  EXPECT_EQ(pool_->free_blocks(), 14);
  EXPECT_EQ(recorder_.Take(), "+ab");
  tree_.CheckStructure();
}

TEST_F(RadixTreeTest, BlocksWithoutHandlesAreIdle) {
  {
    const std::vector<BlockRef> held = Hold("abc");
    EXPECT_EQ(pool_->idle_blocks(), 0);
    EXPECT_EQ(tree_.Evict(3), 0);
    Serve("abxy");
    EXPECT_EQ(pool_->idle_blocks(), 2);
    EXPECT_EQ(tree_.Evict(9), 2);
    EXPECT_EQ(Look("abxy"), "2");
  }
  EXPECT_EQ(pool_->idle_blocks(), 3);
  tree_.Clear();
  EXPECT_EQ(pool_->free_blocks(), 16);
  EXPECT_EQ(tree_.blocks(), 0);
  EXPECT_EQ(tree_.nodes(), 0);
  EXPECT_EQ(recorder_.Take(), "+abc b+xy -yx -c -ba");
}

TEST_F(RadixTreeTest, EvictsTheEndOfTheLeastRecentlyUsedRunFirst) {
  Serve("ab");
  Serve("cd");
  Serve("ef");
  Serve("ab");
  EXPECT_EQ(tree_.Evict(3), 3);
  EXPECT_EQ(Look("ab"), "2");
  EXPECT_EQ(Look("cd"), "0");
  EXPECT_EQ(Look("ef"), "1");
  tree_.CheckStructure();
}

TEST_F(RadixTreeTest, EvictsSharedPrefixesAfterTheirContinuations) {
  Serve("sab");
  Serve("scd");
  Serve("sef");
  EXPECT_EQ(tree_.Evict(6), 6);
  EXPECT_EQ(Look("sef"), "1");
  EXPECT_EQ(tree_.Evict(6), 1);
}

TEST_F(RadixTreeTest, MatchedBlocksAreNotEvicted) {
  Serve("abc");
  const PrefixMatch match = tree_.Find("", Tokens("ab5c"));
  EXPECT_EQ(tree_.Evict(9), 0);
  EXPECT_EQ(match.tokens(), 2 * kKvBlockTokens + 5);
}

class CollisionTest : public RadixTreeTest {
 protected:
  CollisionTest() : RadixTreeTest(16, /*hash_bits=*/1) {}
};

// Half of all blocks share their hash with another block. Lookups still return only blocks with equal tokens.
TEST_F(CollisionTest, BlocksAreComparedByTokens) {
  for (const char* text : {"abc", "def", "abd", "gbc", "ab"}) Serve(text);
  EXPECT_EQ(Look("abc"), "3");
  EXPECT_EQ(Look("def"), "3");
  EXPECT_EQ(Look("abd"), "3");
  EXPECT_EQ(Look("gbc"), "3");
  EXPECT_EQ(Look("hbc"), "0");
  EXPECT_EQ(Look("dbc"), "1");
  EXPECT_EQ(tree_.Evict(99), 10);
  EXPECT_EQ(pool_->free_blocks(), 16);
}

// Compares the tree after random requests with a set of the expected prefixes. Prompts have few letters, so
// that they share prefixes. `bits`: bits of the hash; few make hashes collide.
void RandomAgainstSet(uint32_t seed, int bits) {
  std::mt19937 random(seed);
  const int total = 4 + static_cast<int>(random() % 40);
  auto pool = std::make_unique<BlockPool>(total);
  auto policy = random() % 2 == 0 ? MakeLruPolicy() : MakeCostAwarePolicy(1000, 20);
  RadixTree tree(*pool, std::move(policy), nullptr, prefix::KeyedHasher(bits));
  std::set<std::string> model;  // "name/abc" for the block c after a and b
  std::vector<std::pair<std::string, std::vector<BlockRef>>> live;
  for (int step = 0; step < 400; ++step) {
    if (!live.empty() && (random() % 3 == 0 || live.size() > 4)) {
      const size_t victim = random() % live.size();
      tree.Touch(live[victim].second,
                 {.session = static_cast<Session>(random() % 3),
                  .tokens = static_cast<int64_t>(random() % 9) * 50,
                  .returns_at = random() % 2 == 0 ? 0 : step + static_cast<double>(random() % 50)});
      live.erase(live.begin() + static_cast<int64_t>(victim));
    }
    const std::string name = random() % 4 == 0 ? "t" : "";
    std::string text(1 + random() % 7, 'a');
    for (char& letter : text) letter = static_cast<char>('a' + random() % 2);
    const std::vector<int32_t> tokens = Tokens(text);
    PrefixMatch match = tree.Find(name, tokens);
    size_t expected = 0;
    while (expected < text.size() && model.contains(name + "/" + text.substr(0, expected + 1))) ++expected;
    ASSERT_EQ(match.blocks.size(), expected) << text;
    ASSERT_EQ(match.tail_tokens, 0);  // letters fill whole blocks
    tree.Use(match.blocks);
    std::vector<BlockRef> blocks = std::move(match.blocks);
    while (blocks.size() < text.size()) {
      if (pool->free_blocks() == 0) {
        const int idle = pool->idle_blocks();
        const int wanted = 1 + static_cast<int>(random() % 3);
        const int before = tree.blocks();
        ASSERT_EQ(tree.Evict(wanted), std::min(idle, wanted));
        ASSERT_EQ(tree.blocks(), before - std::min(idle, wanted));
        // Evicted blocks are those that lookups no longer find. A block is evicted after the blocks that
        // follow it.
        std::erase_if(model, [&](const std::string& key) {
          const std::string letters = key.substr(key.find('/') + 1);
          return tree.Find(key.substr(0, key.find('/')), Tokens(letters)).blocks.size() < letters.size();
        });
        ASSERT_EQ(static_cast<int>(model.size()), tree.blocks());
      }
      auto block = pool->Allocate();
      if (!block.ok()) break;
      blocks.push_back(*std::move(block));
    }
    tree.Insert(name, std::span(tokens).first(blocks.size() * kKvBlockTokens), blocks,
                static_cast<int>(expected));
    for (size_t i = 0; i < blocks.size(); ++i) model.insert(name + "/" + text.substr(0, i + 1));
    tree.CheckStructure();
    ASSERT_EQ(static_cast<int>(model.size()), tree.blocks());
    ASSERT_EQ(pool->free_blocks() + tree.blocks(), total);
    live.emplace_back(text, std::move(blocks));
  }
  live.clear();
  tree.Clear();
  EXPECT_EQ(pool->free_blocks(), total);
}

TEST(RadixTreePropertyTest, MatchesASetOfPrefixes) {
  for (uint32_t seed = 0; seed < 30; ++seed) RandomAgainstSet(seed, 64);
}

TEST(RadixTreePropertyTest, MatchesASetOfPrefixesWithHashCollisions) {
  for (uint32_t seed = 0; seed < 30; ++seed) RandomAgainstSet(seed, static_cast<int>(seed % 4));
}

}  // namespace
}  // namespace moesaic::cache
