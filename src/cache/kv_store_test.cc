#include "cache/kv_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace moesaic::cache {
namespace {

using tensor::KvBlockView;
using tensor::KvLayout;

constexpr KvLayout kStoreLayout = {
    .layers = 3, .heads = 2, .key_dim = 5, .value_dim = 3, .summary_bytes = 84};

class KvStoreTest : public testing::Test {
 protected:
  std::unique_ptr<KvStore> Make(KvStoreOptions options) {
    if (options.layout.heads == 0) options.layout = kStoreLayout;
    auto store = KvStore::Create(options, *threads_);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }

  // Returns different finite floats for the keys, values and key summaries of each layer.
  static std::vector<std::byte> Contents(int value) {
    std::vector<std::byte> bytes(kStoreLayout.total_bytes());
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((i / 61 + 7 * value) % 100);
    return bytes;
  }
  static void Write(const KvStore& store, int32_t block, int value) {
    std::vector<std::byte> bytes = Contents(value);
    kStoreLayout.Copy(kStoreLayout.Flat(bytes.data()), store.ViewOf(block));
  }
  static std::vector<std::byte> Read(const KvStore& store, int32_t block) {
    std::vector<std::byte> bytes(kStoreLayout.total_bytes());
    kStoreLayout.Copy(store.ViewOf(block), kStoreLayout.Flat(bytes.data()));
    return bytes;
  }
  static KvResult Apply(KvStore& store, const KvOps& ops) {
    KvResult result;
    store.Apply(ops, &result);
    return result;
  }

  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
};

TEST_F(KvStoreTest, RoundsABudgetDownToWholeBlocks) {
  EXPECT_EQ(*KvStore::BlocksFor(kStoreLayout, 5 * kStoreLayout.total_bytes() - 1), 4);
  EXPECT_EQ(KvStore::BlocksFor(kStoreLayout, kStoreLayout.total_bytes() - 1).status().code(),
            StatusCode::kResourceExhausted);
}

TEST_F(KvStoreTest, BlocksAndTheirSummariesDoNotOverlap) {
  const auto store = Make({.blocks = 4});
  for (int i = 0; i < 4; ++i) Write(*store, i, i);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Read(*store, i), Contents(i)) << i;
}

// Key summaries of one layer are contiguous, and those of another block or layer are elsewhere.
TEST_F(KvStoreTest, SummariesOfALayerAreContiguous) {
  const auto store = Make({.blocks = 4});
  for (int i = 0; i < 4; ++i) {
    const KvBlockView view = store->ViewOf(i);
    EXPECT_EQ(view.data, store->At(i));
    for (int layer = 0; layer < kStoreLayout.layers; ++layer) {
      EXPECT_EQ(view.summaries + layer * view.summary_step,
                store->summaries(layer) + i * kStoreLayout.summary_stride());
    }
  }
  KvLayout plain = kStoreLayout;
  plain.summary_bytes = 0;
  const auto without = Make({.layout = plain, .blocks = 1});
  EXPECT_EQ(without->summaries(0), nullptr);
  EXPECT_EQ(without->ViewOf(0).summaries, nullptr);
}

TEST_F(KvStoreTest, SwapSlotsKeepBlocksWithTheirSummaries) {
  const auto store = Make({.blocks = 4, .swap_slots = 3});
  KvOps saves;
  for (int i = 0; i < 3; ++i) {
    Write(*store, i, i);
    saves.push_back({.kind = KvOpKind::kSave, .area = KvArea::kSwap, .block = i, .slot = 2 - i});
  }
  EXPECT_GT(Apply(*store, saves).swap_copy_seconds, 0);
  for (int i = 0; i < 4; ++i) Write(*store, i, 9);
  for (int i = 2; i >= 0; --i) {
    Apply(*store, {{.kind = KvOpKind::kRestore, .area = KvArea::kSwap, .block = 3 - i, .slot = 2 - i}});
    EXPECT_EQ(Read(*store, 3 - i), Contents(i));
  }
  EXPECT_EQ(Read(*store, 0), Contents(9)) << "other blocks are unchanged";
}

// A slot that is written twice has the contents of the later operation. A block that is saved and then
// overwritten is saved with its earlier contents.
TEST_F(KvStoreTest, OperationsTakeEffectInOrder) {
  const auto store = Make({.blocks = 3, .swap_slots = 1, .warm_slots = 2, .warm_exact = true});
  for (int i = 0; i < 3; ++i) Write(*store, i, i);
  Apply(*store, {{.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 0, .slot = 1},
                 {.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 1, .slot = 1},
                 {.kind = KvOpKind::kSave, .area = KvArea::kSwap, .block = 0, .slot = 0},
                 {.kind = KvOpKind::kRestore, .area = KvArea::kWarm, .block = 0, .slot = 1},
                 {.kind = KvOpKind::kRestore, .area = KvArea::kSwap, .block = 2, .slot = 0}});
  EXPECT_EQ(Read(*store, 0), Contents(1));
  EXPECT_EQ(Read(*store, 1), Contents(1));
  EXPECT_EQ(Read(*store, 2), Contents(0));
}

TEST_F(KvStoreTest, ReportsWarmSlotsOfBlocksThatAreNotFinite) {
  const auto store = Make({.blocks = 2, .warm_slots = 2});
  std::memset(store->At(0), 0, kStoreLayout.block_bytes());
  std::memset(store->At(1), 0, kStoreLayout.block_bytes());
  reinterpret_cast<float*>(store->At(1) + 2 * kStoreLayout.layer_bytes())[7] =
      std::numeric_limits<float>::quiet_NaN();
  const KvResult result =
      Apply(*store, {{.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 0, .slot = 0},
                     {.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 1, .slot = 1}});
  EXPECT_THAT(result.rejected_slots, testing::ElementsAre(1));
}

TEST_F(KvStoreTest, CopiesLeadingTokensAndClearsLayers) {
  const auto store = Make({.blocks = 2});
  std::memset(store->At(0), 1, kStoreLayout.block_bytes());
  std::memset(store->At(1), 2, kStoreLayout.block_bytes());
  Apply(*store, {{.kind = KvOpKind::kCopy, .block = 1, .from = 0, .tokens = 40}});
  const auto count = [&](std::byte value) {
    return std::count(store->At(1), store->At(1) + kStoreLayout.block_bytes(), value);
  };
  EXPECT_EQ(count(std::byte{1}), 40 * kStoreLayout.layers * kStoreLayout.heads * (5 + 3) * 4);
  Apply(*store, {{.kind = KvOpKind::kClear, .block = 1, .layer = 2}});
  EXPECT_EQ(count(std::byte{0}), kStoreLayout.layer_bytes());
}

TEST_F(KvStoreTest, BuildsSummariesOfAdjacentOperationsTogether) {
  const auto store = Make({.blocks = 3});
  std::vector<std::vector<int32_t>> built;
  store->SetSummaryBuilder(
      [&](std::span<const int32_t> blocks) { built.emplace_back(blocks.begin(), blocks.end()); });
  Apply(*store,
        {{.kind = KvOpKind::kBuildSummary, .block = 2}, {.kind = KvOpKind::kBuildSummary, .block = 0}});
  EXPECT_THAT(built, testing::ElementsAre(testing::ElementsAre(2, 0)));
}

}  // namespace
}  // namespace moesaic::cache
