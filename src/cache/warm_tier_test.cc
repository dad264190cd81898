#include "cache/warm_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "cache/kv_store.h"

namespace moesaic::cache {
namespace {

using tensor::DType;

std::span<std::byte> LayerOf(std::vector<std::byte>& block, const KvLayout& layout, int layer) {
  return std::span(block).subspan(layer * layout.layer_bytes(), layout.layer_bytes());
}

float At(std::span<const std::byte> bytes, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(bytes.data())[i];
  return tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(bytes.data())[i]);
}
void Set(std::span<std::byte> bytes, DType dtype, int64_t i, float value) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(bytes.data())[i] = value;
  } else {
    reinterpret_cast<tensor::BF16*>(bytes.data())[i] = tensor::ToBF16(value);
  }
}

const std::vector<KvLayout>& Layouts() {
  static const std::vector<KvLayout> layouts = [] {
    std::vector<KvLayout> made;
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      made.push_back({.layers = 2, .heads = 3, .key_dim = 5, .value_dim = 7, .dtype = dtype});
      made.push_back({.layers = 3, .heads = 1, .key_dim = 131, .value_dim = 64, .dtype = dtype});
      made.push_back({.layers = 2,
                      .heads = 1,
                      .key_dim = 72,
                      .value_dim = 64,
                      .shared = true,
                      .dtype = dtype,
                      .summary_bytes = 176});
    }
    return made;
  }();
  return layouts;
}

// The error of an element is at most half the scale of its column, which is its largest element over 127.
// Rounded products add about 2^-22 of the largest element. BF16 adds 2^-8 of the element.
TEST(WarmCodecTest, RoundingErrorIsAtMostHalfAScale) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const KvLayout& layout : Layouts()) {
    if (layout.dtype == DType::kI8) continue;
    const WarmCodec codec(layout, /*exact=*/false);
    EXPECT_FALSE(codec.exact());
    EXPECT_LT(codec.block_bytes(), layout.block_bytes());
    EXPECT_EQ(codec.layer_bytes() % 64, 0);
    std::vector<std::byte> block(layout.total_bytes()), back(layout.total_bytes());
    std::vector<std::byte> coded(codec.block_bytes(), std::byte{0x77});
    const int64_t keys = int64_t{kKvBlockTokens} * layout.key_dim;  // of a head
    const int64_t head = keys + (layout.shared ? 0 : int64_t{kKvBlockTokens} * layout.value_dim);
    const int64_t all = layout.heads * head;
    for (int layer = 0; layer < layout.layers; ++layer) {
      for (int64_t i = 0; i < all; ++i) {
        const int64_t column = i % 5;  // the magnitudes of columns are independent
        const float value = i % head < keys && i % head % layout.key_dim == 2
                                ? 0
                                : uniform(random) * std::pow(30.0F, static_cast<float>(column));
        Set(LayerOf(block, layout, layer), layout.dtype, i, value);
      }
      EXPECT_TRUE(codec.IsFinite(layout.Flat(block.data()), layer));
      codec.Encode(layout.Flat(block.data()), layer, coded.data());
    }
    for (int layer = 0; layer < layout.layers; ++layer)
      codec.Decode(coded.data(), layer, layout.Flat(back.data()));
    for (int layer = 0; layer < layout.layers; ++layer) {
      for (int64_t i = 0; i < all; ++i) {
        const bool is_key = i % head < keys;
        const int64_t dim = is_key ? layout.key_dim : layout.value_dim;
        const int64_t from = i / head * head + (is_key ? 0 : keys);
        const int64_t first = from + (i - from) % dim;
        float largest = 0;
        for (int64_t row = 0; row < kKvBlockTokens; ++row) {
          largest =
              std::max(largest, std::abs(At(LayerOf(block, layout, layer), layout.dtype, first + row * dim)));
        }
        const float value = At(LayerOf(block, layout, layer), layout.dtype, i);
        const float bound = largest / 127 * 0.50001F + (layout.dtype == DType::kBF16 ? largest / 256 : 0);
        ASSERT_NEAR(At(LayerOf(back, layout, layer), layout.dtype, i), value, bound) << i;
        if (largest == 0) {
          ASSERT_EQ(At(LayerOf(back, layout, layer), layout.dtype, i), 0);
        }
      }
    }
  }
}

TEST(WarmCodecTest, StoresInt8AndExactBlocksUnchanged) {
  std::mt19937 random(2);
  for (const KvLayout& layout : Layouts()) {
    const WarmCodec codec(layout, /*exact=*/layout.dtype != DType::kI8);
    EXPECT_TRUE(codec.exact());
    EXPECT_EQ(codec.block_bytes(), layout.total_bytes());
    std::vector<std::byte> block(layout.total_bytes()), coded(block.size()), back(block.size());
    for (std::byte& byte : block) byte = static_cast<std::byte>(random());
    for (int layer = 0; layer < layout.layers; ++layer) {
      EXPECT_TRUE(codec.IsFinite(layout.Flat(block.data()), layer))
          << "exact and int8 blocks are always accepted";
      codec.Encode(layout.Flat(block.data()), layer, coded.data());
      codec.Decode(coded.data(), layer, layout.Flat(back.data()));
    }
    EXPECT_EQ(back, block) << "the summaries are stored too";
  }
}

TEST(WarmCodecTest, ReportsBlocksThatAreNotFinite) {
  for (const KvLayout& layout : Layouts()) {
    if (layout.dtype == DType::kI8) continue;
    const WarmCodec codec(layout, /*exact=*/false);
    std::vector<std::byte> block(layout.block_bytes());
    const KvBlockView view = layout.Flat(block.data());
    const int64_t keys = int64_t{kKvBlockTokens} * layout.key_dim;  // of a head
    const int64_t head = keys + (layout.shared ? 0 : int64_t{kKvBlockTokens} * layout.value_dim);
    const int64_t all = layout.heads * head;
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
      for (const int64_t i : {int64_t{0}, int64_t{200}, keys - 1, all - 1}) {
        Set(LayerOf(block, layout, 1), layout.dtype, i, bad);
        EXPECT_TRUE(codec.IsFinite(view, 0));
        EXPECT_FALSE(codec.IsFinite(view, 1));
        Set(LayerOf(block, layout, 1), layout.dtype, i, i == 0 ? 1e-38F : -1e38F);
        EXPECT_TRUE(codec.IsFinite(view, 1));
      }
    }
  }
}

constexpr KvLayout kWarmLayout = {
    .layers = 3, .heads = 2, .key_dim = 5, .value_dim = 7, .summary_bytes = 128};

class WarmTierTest : public testing::Test {
 protected:
  // A tier and the store that owns its memory. Block 0 of the cache is saved, and block 1 is restored.
  struct Warm {
    BlockPool pool{1000};
    std::unique_ptr<WarmTier> tier;
    std::unique_ptr<KvStore> store;

    WarmTier* operator->() const { return tier.get(); }
    WarmTier& operator*() const { return *tier; }
    void Apply(const KvOps& ops) {
      KvResult result;
      store->Apply(ops, &result);
      tier->OnResult(result);
    }
    void Write(std::vector<std::byte>& block) {
      kWarmLayout.Copy(kWarmLayout.Flat(block.data()), store->ViewOf(0));
    }
    std::vector<std::byte> Restore(const SlotRef& slot) {
      Apply({{.kind = KvOpKind::kRestore, .area = KvArea::kWarm, .block = 1, .slot = slot->index()}});
      std::vector<std::byte> block(kWarmLayout.total_bytes());
      kWarmLayout.Copy(store->ViewOf(1), kWarmLayout.Flat(block.data()));
      return block;
    }
  };
  std::unique_ptr<Warm> Open(int blocks, int step_blocks = 1 << 20, bool exact = true) {
    auto warm = std::make_unique<Warm>();
    const WarmTierOptions options = {.bytes = blocks * (kWarmLayout.total_bytes() + 1024),
                                     .exact = exact,
                                     .step_bytes = step_blocks * kWarmLayout.total_bytes()};
    const StatusOr<int> slots = WarmTier::SlotsFor(kWarmLayout, options);
    EXPECT_TRUE(slots.ok()) << slots.status();
    warm->tier = std::make_unique<WarmTier>(warm->pool, nullptr, kWarmLayout, options, *slots);
    warm->store = *KvStore::Create(
        {.layout = kWarmLayout, .blocks = 2, .warm_slots = warm->tier->slots(), .warm_exact = exact},
        *threads_);
    return warm;
  }

  static std::vector<int32_t> TokensOf(const std::vector<int32_t>& path) {
    std::vector<int32_t> tokens;
    for (const int32_t number : path) tokens.insert(tokens.end(), kKvBlockTokens, number);
    return tokens;
  }

  // Returns the contents of the last block of a path: a function of its namespace and of all tokens up to it.
  static std::vector<std::byte> BlockOf(const std::string& name, const std::vector<int32_t>& path) {
    std::seed_seq seed(path.begin(), path.end());
    std::mt19937_64 random(seed);
    std::vector<std::byte> block(kWarmLayout.total_bytes());
    const auto salt = static_cast<std::byte>(std::hash<std::string>()(name));
    for (std::byte& byte : block) byte = static_cast<std::byte>(random()) ^ salt;
    return block;
  }

  static void Put(Warm& warm, const std::string& name, const std::vector<int32_t>& path, WarmRun run = {}) {
    const std::vector<int32_t> tokens = TokensOf(path);
    std::vector<std::span<const int32_t>> chain;
    for (size_t i = 0; i < path.size(); ++i) {
      chain.push_back(std::span(tokens).subspan(i * kKvBlockTokens, kKvBlockTokens));
    }
    std::vector<std::byte> block = BlockOf(name, path);
    warm.Write(block);
    KvOps ops;
    warm.tier->Put(name, chain, /*block=*/0, &ops, run);
    warm.tier->CheckStructure();
    warm.Apply(ops);
  }
  // Puts the blocks of a path in the order in which the tree evicts them: the last block first.
  static void PutAll(Warm& tier, const std::string& name, std::vector<int32_t> path, size_t down_to = 0) {
    bool before_last = false;
    for (; path.size() > down_to; path.pop_back()) {
      Put(tier, name, path, {.before_last = std::exchange(before_last, true)});
    }
  }

  // Returns the number of stored blocks of a path from block `first`, and checks their contents.
  static int Check(Warm& warm, const std::string& name, const std::vector<int32_t>& path, int first = 0) {
    const std::vector<SlotRef> found = warm.tier->Find(name, TokensOf(path), first, 1000);
    for (size_t i = 0; i < found.size(); ++i) {
      const std::vector<std::byte> block = warm.Restore(found[i]);
      const auto end = path.begin() + first + static_cast<int64_t>(i) + 1;
      EXPECT_EQ(block, BlockOf(name, {path.begin(), end}));
    }
    return static_cast<int>(found.size());
  }

  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
};

TEST_F(WarmTierTest, IdentifiesBlocksByNamespaceTokensAndPredecessors) {
  const auto tier = Open(20);
  PutAll(*tier, "a", {1, 2, 3});
  PutAll(*tier, "b", {1, 2});
  PutAll(*tier, "", {7, 2, 3});
  EXPECT_EQ(Check(*tier, "a", {1, 2, 3}), 3);
  EXPECT_EQ(Check(*tier, "a", {1, 2, 3, 4}), 3);
  EXPECT_EQ(Check(*tier, "a", {1, 2, 4}), 2);
  EXPECT_EQ(Check(*tier, "b", {1, 2, 3}), 2);
  EXPECT_EQ(Check(*tier, "", {1, 2, 3}), 0);
  EXPECT_EQ(Check(*tier, "", {7, 2, 3}), 3);
  EXPECT_EQ(Check(*tier, "c", {1, 2, 3}), 0);
  EXPECT_EQ((*tier)->stats().stored_blocks, 8);
  Put(*tier, "a", {1, 2});
  EXPECT_EQ((*tier)->stats().stored_blocks, 8) << "the block was already stored";
  EXPECT_TRUE((*tier)->Find("a", TokensOf({1, 2, 3}), 0, 2).size() == 2);
  (*tier)->Clear();
  (*tier)->CheckStructure();
  EXPECT_EQ(Check(*tier, "a", {1}), 0);
  EXPECT_EQ((*tier)->stats().blocks, 0);
}

// Predecessors of a block may be only in the tree.
TEST_F(WarmTierTest, RestoresBlocksWhoseParentsAreInTheTree) {
  const auto tier = Open(20);
  PutAll(*tier, "", {1, 2, 3, 4}, 2);  // {1, 2, 3, 4} and {1, 2, 3}
  EXPECT_EQ(Check(*tier, "", {1, 2, 3, 4}), 0);
  EXPECT_EQ(Check(*tier, "", {1, 2, 3, 4}, 1), 0);
  EXPECT_EQ(Check(*tier, "", {1, 2, 3, 4}, 2), 2);
  EXPECT_EQ(Check(*tier, "", {1, 2, 3, 4}, 3), 1);
  EXPECT_EQ(Check(*tier, "", {5, 2, 3, 4}, 2), 0) << "the predecessor differs";
  EXPECT_EQ((*tier)->stats().blocks, 2);
}

TEST_F(WarmTierTest, EvictsTheLeastRecentlyUsedEndsFirst) {
  const auto tier = Open(6);
  const int capacity = (*tier)->stats().capacity_blocks;
  ASSERT_EQ(capacity, 6);
  PutAll(*tier, "", {1, 2, 3});
  PutAll(*tier, "", {4, 5, 6});
  (*tier)->Touch("", TokensOf({1, 2, 3}), 3);
  Put(*tier, "", {9});
  EXPECT_EQ(Check(*tier, "", {4, 5, 6}), 2);
  EXPECT_EQ(Check(*tier, "", {1, 2, 3}), 3);
  Put(*tier, "", {10});
  Put(*tier, "", {11});
  EXPECT_EQ(Check(*tier, "", {4, 5, 6}), 0);
  EXPECT_EQ(Check(*tier, "", {1, 2, 3}), 3);
  Put(*tier, "", {12});
  EXPECT_EQ(Check(*tier, "", {1, 2, 3}), 2);
  EXPECT_EQ((*tier)->stats().blocks, capacity);
  EXPECT_EQ((*tier)->stats().evicted_blocks, 4);
  EXPECT_EQ((*tier)->stats().bytes, capacity * kWarmLayout.total_bytes());
}

// A block whose slot is held is not evicted for blocks that are put later.
TEST_F(WarmTierTest, HeldBlocksAreNotEvicted) {
  const auto tier = Open(3);
  PutAll(*tier, "", {1, 2, 3});
  const std::vector<SlotRef> held = (*tier)->Find("", TokensOf({1, 2, 3}), 1, 2);
  ASSERT_EQ(held.size(), 2U);
  for (int i = 0; i < 5; ++i) Put(*tier, "", {20 + i});
  EXPECT_EQ(tier->Restore(held[0]), BlockOf("", {1, 2}));
  EXPECT_EQ(tier->Restore(held[1]), BlockOf("", {1, 2, 3}));
  const std::vector<SlotRef> last = (*tier)->Find("", TokensOf({24}), 0, 1);
  ASSERT_EQ(last.size(), 1U);
  Put(*tier, "", {30});
  EXPECT_EQ(Check(*tier, "", {30}), 0) << "all slots are held";
  EXPECT_EQ((*tier)->stats().refused_blocks, 1);
}

// A step stores a limited number of blocks. Blocks that are already stored do not count, and the beginning of
// a prefix, which is put last, is stored.
TEST_F(WarmTierTest, LimitsTheBlocksStoredInAStep) {
  const auto tier = Open(20, 3);
  for (int i = 0; i < 5; ++i) Put(*tier, "", {i});
  EXPECT_EQ((*tier)->stats().stored_blocks, 3);
  EXPECT_EQ((*tier)->stats().dropped_blocks, 2);
  Put(*tier, "", {1});
  EXPECT_EQ((*tier)->stats().dropped_blocks, 2);
  (*tier)->BeginStep(nullptr);
  const std::vector<int32_t> path = {9, 8, 7, 6, 5};
  for (int end = 5; end > 0; --end) {
    Put(*tier, "", {path.begin(), path.begin() + end}, {.before_last = end < 5, .more = end - 1});
  }
  EXPECT_EQ(Check(*tier, "", path), 3) << "the beginning of the path is stored";
  EXPECT_EQ((*tier)->stats().dropped_blocks, 4);
  (*tier)->BeginStep(nullptr);
  PutAll(*tier, "", path);
  EXPECT_EQ(Check(*tier, "", path), 5);
}

// The nodes of a long path take memory from the blocks. A name that exceeds the budget is refused, and no
// block is evicted for it.
TEST_F(WarmTierTest, NamesCountTowardsTheBudget) {
  const auto tier = Open(4);
  for (int i = 1; i < 5; ++i) Put(*tier, "", {i});
  EXPECT_EQ((*tier)->stats().blocks, 4);
  std::vector<int32_t> path(60);
  for (int i = 0; i < 60; ++i) path[i] = 100 + i;
  Put(*tier, "", path);
  EXPECT_EQ(Check(*tier, "", path, 59), 1);
  EXPECT_LT((*tier)->stats().blocks, 4) << "60 nodes of at least 400 bytes exceed the bytes of a block";
  const int blocks = (*tier)->stats().blocks;
  Put(*tier, std::string(40000, 'n'), {1});
  EXPECT_EQ((*tier)->stats().refused_blocks, 1);
  EXPECT_EQ((*tier)->stats().blocks, blocks);
}

TEST_F(WarmTierTest, RemovesBlocksThatAreNotFinite) {
  const auto warm = Open(2, 1 << 20, /*exact=*/false);
  std::vector<std::byte> block(kWarmLayout.total_bytes());
  const std::vector<int32_t> tokens = TokensOf({1});
  const std::span<const int32_t> chain = tokens;
  const int capacity = warm->tier->stats().capacity_blocks;
  KvOps ops;
  warm->Write(block);
  for (int i = 0; i < capacity; ++i) {
    const std::vector<int32_t> others = TokensOf({10 + i});
    const std::span<const int32_t> other = others;
    warm->tier->Put("", {&other, 1}, 0, &ops);
  }
  warm->Apply(ops);
  ops.clear();
  const WarmTierStats before = warm->tier->stats();
  ASSERT_EQ(before.blocks, capacity);
  Set(LayerOf(block, kWarmLayout, 2), DType::kF32, 7, std::numeric_limits<float>::quiet_NaN());
  warm->Write(block);
  warm->tier->Put("", {&chain, 1}, 0, &ops);
  warm->Apply(ops);
  warm->tier->CheckStructure();
  EXPECT_TRUE(warm->tier->Find("", tokens, 0, 1).empty());
  EXPECT_EQ(warm->tier->stats().refused_blocks, 1);
  EXPECT_EQ(warm->tier->stats().stored_blocks, before.stored_blocks);
  // One block was evicted before the contents of the new block were known.
  EXPECT_EQ(warm->tier->stats().evicted_blocks, before.evicted_blocks + 1);
  EXPECT_EQ(warm->tier->stats().blocks, before.blocks - 1);
  EXPECT_TRUE(warm->tier->Find("", TokensOf({10}), 0, 1).empty());
  for (int i = 1; i < capacity; ++i) {
    EXPECT_EQ(warm->tier->Find("", TokensOf({10 + i}), 0, 1).size(), 1U) << i;
  }
}

TEST_F(WarmTierTest, RandomTracesKeepTheStructure) {
  std::mt19937 random(3);
  const auto tier = Open(12, 7);
  std::vector<SlotRef> held;
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> path(1 + random() % 5);
    for (int32_t& number : path) number = static_cast<int32_t>(random() % 3);
    const std::string name = random() % 4 == 0 ? "x" : "";
    switch (random() % 8) {
      case 0:
        held = (*tier)->Find(name, TokensOf(path), 0, 3);
        break;
      case 1:
        (*tier)->Touch(name, TokensOf(path), static_cast<int>(path.size()));
        break;
      case 2:
        Check(*tier, name, path, static_cast<int>(random() % path.size()));
        break;
      case 3:
        if (random() % 40 == 0) (*tier)->Clear();
        break;
      case 4:
        (*tier)->BeginStep(nullptr);
        PutAll(*tier, name, path, random() % path.size());
        break;
      default:
        Put(*tier, name, path, {.more = static_cast<int>(random() % 3)});
    }
    (*tier)->CheckStructure();
    ASSERT_LE((*tier)->stats().blocks, (*tier)->stats().capacity_blocks);
  }
  EXPECT_GT((*tier)->stats().evicted_blocks, 500);
}

TEST_F(WarmTierTest, RefusesABudgetBelowOneBlock) {
  EXPECT_THAT(Message(WarmTier::SlotsFor(kWarmLayout, {.bytes = 1000}).status()),
              testing::HasSubstr("must be at least"));
}

}  // namespace
}  // namespace moesaic::cache
