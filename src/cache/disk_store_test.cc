#include "cache/disk_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

namespace moesaic::cache {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A block takes 18,432 bytes, and its summaries take 192.
constexpr KvLayout kDiskLayout = {.layers = 3, .heads = 2, .key_dim = 5, .value_dim = 7, .summary_bytes = 64};
constexpr int64_t kNoLimit = int64_t{1} << 40;

std::vector<int32_t> BlockTokens(std::span<const int32_t> path) {
  std::vector<int32_t> tokens;
  for (const int32_t number : path) tokens.insert(tokens.end(), kKvBlockTokens, number);
  return tokens;
}

// Returns the contents of the last block of a path: a function of its namespace and of all tokens up to it.
std::vector<std::byte> BlockOf(const std::string& name, std::span<const int32_t> path) {
  std::seed_seq seed(path.begin(), path.end());
  std::mt19937_64 random(seed);
  std::vector<std::byte> block(kDiskLayout.total_bytes());
  const auto salt = static_cast<std::byte>(std::hash<std::string>()(name));
  for (std::byte& byte : block) byte = static_cast<std::byte>(random()) ^ salt;
  return block;
}

class DiskStoreTest : public testing::Test {
 protected:
  DiskStoreTest() {
    std::string pattern = testing::TempDir() + "kv_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~DiskStoreTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<DiskStore> Open(int64_t bytes = 16 << 20, const std::string& maker = "model",
                                  const KvLayout& layout = kDiskLayout) {
    auto tier = DiskStore::Open({.folder = folder_,
                                 .bytes = bytes,
                                 .layout = layout,
                                 .fingerprint = maker,
                                 .staging_bytes = 1 << 20});
    EXPECT_TRUE(tier.ok()) << tier.status();
    return *std::move(tier);
  }

  static int StoreSome(DiskStore& tier, const std::string& name, const std::vector<int32_t>& path) {
    const DiskStore::Reserved reserved = tier.Reserve(name, BlockTokens(path), kNoLimit);
    const size_t added = reserved.records.size();
    for (size_t i = 0; i < added; ++i) {
      std::vector<std::byte> block = BlockOf(name, std::span(path).first(reserved.blocks - added + i + 1));
      tier.Write(reserved.records[i], kDiskLayout.Flat(block.data()));
    }
    return reserved.blocks;
  }

  static void Store(DiskStore& tier, const std::string& name, const std::vector<int32_t>& path) {
    while (StoreSome(tier, name, path) < static_cast<int>(path.size()) && tier.CanStore(name)) {
      tier.Wait(std::chrono::seconds(1));
      tier.Poll();
    }
    Settle(tier);
  }

  static void Settle(DiskStore& tier) {
    while (tier.writing()) {
      tier.Wait(std::chrono::seconds(1));
      EXPECT_THAT(tier.Poll(), IsEmpty());
    }
  }

  // Starts a load of the blocks [first, first + blocks.size()) of a path.
  static DiskStore::LoadId StartLoad(DiskStore& tier, const std::string& name,
                                     const std::vector<int32_t>& path, int first,
                                     std::vector<std::vector<std::byte>>& blocks) {
    const DiskStore::OpenedLoad opened =
        tier.OpenLoad(name, BlockTokens(path), first, static_cast<int>(blocks.size()));
    std::vector<DiskStore::Target> targets;
    for (size_t i = 0; i < blocks.size(); ++i) {
      targets.push_back({opened.records[i], kDiskLayout.Flat(blocks[i].data())});
    }
    tier.Read(opened.load, targets);
    return opened.load;
  }

  // Loads the stored blocks of a path from block `first`, and checks each byte. Returns the number of loaded
  // blocks.
  static int Load(DiskStore& tier, const std::string& name, const std::vector<int32_t>& path, int first = 0) {
    const int found = tier.Find(name, BlockTokens(path));
    if (found <= first) return 0;
    std::vector<std::vector<std::byte>> blocks(found - first,
                                               std::vector<std::byte>(kDiskLayout.total_bytes()));
    const DiskStore::LoadId load = StartLoad(tier, name, path, first, blocks);
    std::vector<DiskStore::Loaded> loaded;
    while ((loaded = tier.Poll()).empty()) tier.Wait(std::chrono::seconds(1));
    EXPECT_EQ(loaded.size(), 1U);
    EXPECT_EQ(loaded[0].load, load);
    for (int i = 0; i < loaded[0].blocks; ++i) {
      EXPECT_EQ(blocks[i], BlockOf(name, std::span(path).first(first + i + 1))) << i;
    }
    return loaded[0].blocks;
  }

  std::vector<std::string> Segments() const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().filename() != "lock") paths.push_back(entry.path());
    }
    std::ranges::sort(paths);
    return paths;
  }

  int64_t FileBytes() const {
    int64_t bytes = 0;
    for (const std::string& path : Segments())
      bytes += static_cast<int64_t>(std::filesystem::file_size(path));
    return bytes;
  }

  struct Slot {
    int slot;
    SlotRecord record;  // without sums
  };
  // Writes a segment of another origin: records and, unless it is cut, a block of zeros for each slot.
  void WriteSegment(uint64_t number, int slots, const std::vector<Slot>& filled, bool cut = false) const {
    const SegmentFormat format(kDiskLayout, FingerprintOf(kDiskLayout, "model"));
    const std::string path = folder_ + "/" + SegmentName(number);
    std::ofstream file(path, std::ios::binary);
    const auto put = [&](int64_t at, const std::vector<std::byte>& bytes) {
      file.seekp(at);
      file.write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    };
    put(0, format.EncodeHeader(number, slots));
    std::vector<std::byte> block(kDiskLayout.total_bytes());
    for (Slot slot : filled) {
      slot.record.layer_sums = format.LayerSums(block.data(), format.layers());
      slot.record.summaries = format.SummariesOf(kDiskLayout.Flat(block.data()));
      put(format.RecordOffset(slot.slot), format.EncodeRecord(slot.record, number, slot.slot));
      if (!cut)
        put(format.BlockOffset(slots, slot.slot), {block.begin(), block.begin() + format.block_bytes()});
    }
  }

  static SlotRecord RecordOf(uint64_t id, uint64_t parent, int32_t token) {
    SlotRecord record = {.id = id, .parent = parent, .name = "a"};
    record.tokens.fill(token);
    return record;
  }

  static void Flip(const std::string& path, int64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(offset);
    file.put(byte);
  }

  std::string folder_;
};

TEST_F(DiskStoreTest, LoadsStoredBlocks) {
  auto tier = Open();
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3}), 0);
  Store(*tier, "a", {1, 2, 3});
  Store(*tier, "a", {1, 2, 4, 5});
  Store(*tier, "b", {1, 2});
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3, 9}), 3);
  EXPECT_EQ(Load(*tier, "a", {1, 2, 4, 5}, 2), 2);
  EXPECT_EQ(Load(*tier, "b", {1, 2, 3}), 2);
  EXPECT_EQ(Load(*tier, "c", {1}), 0);
  const DiskTierStats stats = tier->stats();
  EXPECT_EQ(stats.blocks, 7);
  EXPECT_EQ(stats.written_blocks, 7);
  EXPECT_EQ(stats.loads, 3);
  EXPECT_EQ(stats.loaded_blocks, 7);
  EXPECT_EQ(stats.loaded_bytes, 7 * kDiskLayout.block_bytes());
  EXPECT_GT(stats.load_seconds, 0);
  EXPECT_EQ(stats.refused_blocks + stats.refused_files + stats.write_errors + stats.evicted_blocks, 0);
  EXPECT_THAT(tier->TakeMessages(), IsEmpty());
}

TEST_F(DiskStoreTest, FindsBlocksAfterARestart) {
  for (int round = 0; round < 4; ++round) {
    auto tier = Open();
    EXPECT_EQ(tier->stats().blocks, round == 0 ? 0 : 1 + 2 * round);
    for (int before = 0; before < round; ++before) EXPECT_EQ(Load(*tier, "a", {7, before, 8, 9}), 3);
    Store(*tier, "a", {7, round, 8});
    EXPECT_THAT(tier->TakeMessages(), IsEmpty());
  }
}

TEST_F(DiskStoreTest, LimitsTheMemoryOfPendingWrites) {
  auto tier = Open(64 << 20);
  std::vector<int32_t> path(200);
  for (int i = 0; i < 200; ++i) path[i] = i;
  EXPECT_LE(StoreSome(*tier, "a", path), (1 << 20) / 18432);
  Store(*tier, "a", path);
  EXPECT_EQ(Load(*tier, "a", path), 200);
  EXPECT_FALSE(tier->writing());
}

TEST_F(DiskStoreTest, FlushCanBeCancelled) {
  auto tier = Open();
  EXPECT_EQ(StoreSome(*tier, "a", {1, 2, 3}), 3);
  EXPECT_EQ(tier->Flush([] { return true; }).code(), StatusCode::kCancelled);
  EXPECT_TRUE(tier->Flush([] { return false; }).ok());
  EXPECT_FALSE(tier->writing());
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3}), 3);
}

TEST_F(DiskStoreTest, KeepsItsFilesWithinTheBudget) {
  constexpr int64_t kBudget = 1 << 20;
  auto tier = Open(kBudget);
  const auto capacity = static_cast<int>(tier->stats().capacity_blocks);
  EXPECT_GT(capacity, 30);
  for (int i = 0; i < 200; ++i) Store(*tier, "a", {i, i + 1});
  EXPECT_EQ(tier->stats().blocks, capacity);
  EXPECT_EQ(tier->stats().evicted_blocks, 400 - capacity);
  EXPECT_LE(FileBytes(), kBudget);
  EXPECT_EQ(Load(*tier, "a", {199, 200}), 2) << "the latest blocks stay";
  EXPECT_EQ(Load(*tier, "a", {0, 1}), 0) << "the oldest blocks are evicted";
  // The beginning of a sequence is kept if the sequence exceeds the budget.
  std::vector<int32_t> path(100);
  for (int i = 0; i < 100; ++i) path[i] = 1000 + i;
  EXPECT_EQ(StoreSome(*tier, "a", path) < 100, true);
  EXPECT_TRUE(tier->Flush().ok());
  for (int i = 0; i < 5 && StoreSome(*tier, "a", path) < 100; ++i) EXPECT_TRUE(tier->Flush().ok());
  EXPECT_EQ(Load(*tier, "a", path), capacity);
  EXPECT_LE(FileBytes(), kBudget);
  tier.reset();
  tier = Open(kBudget);
  EXPECT_EQ(Load(*tier, "a", path), capacity);
  // A smaller budget frees disk space at once.
  tier.reset();
  tier = Open(kBudget / 2);
  EXPECT_LE(FileBytes(), kBudget / 2);
  EXPECT_LE(tier->stats().blocks, capacity / 2 + 1);
  Store(*tier, "b", {1, 2, 3});
  EXPECT_EQ(Load(*tier, "b", {1, 2, 3}), 3);
  EXPECT_LE(FileBytes(), kBudget / 2);
}

TEST_F(DiskStoreTest, CountsTheActualSizeOfFiles) {
  auto tier = Open(1 << 20);
  Store(*tier, "a", {1});
  Store(*tier, "a", {2, 3, 4, 5, 6, 7, 8, 9});
  tier.reset();
  const std::string oldest = Segments().at(0);
  std::filesystem::resize_file(oldest, 1 << 20);
  tier = Open(1 << 20);
  EXPECT_FALSE(std::filesystem::exists(oldest));
  EXPECT_LE(FileBytes(), 1 << 20);
}

TEST_F(DiskStoreTest, SupportsVeryLargeBudgets) {
  EXPECT_GT(Open(int64_t{1} << 60)->stats().capacity_blocks, int64_t{1} << 40);
}

TEST_F(DiskStoreTest, RefusesABudgetBelowOneBlock) {
  const auto tier =
      DiskStore::Open({.folder = folder_, .bytes = 10000, .layout = kDiskLayout, .fingerprint = "model"});
  EXPECT_THAT(Message(tier.status()), HasSubstr("one block of 64 tokens; found 10000"));
}

TEST_F(DiskStoreTest, LocksTheFolderForOneProcess) {
  auto tier = Open();
  const auto second =
      DiskStore::Open({.folder = folder_, .bytes = 16 << 20, .layout = kDiskLayout, .fingerprint = "model"});
  EXPECT_THAT(Message(second.status()), HasSubstr("another process"));
  tier.reset();
  Open();
}

TEST_F(DiskStoreTest, RefusesAndReplacesBlocksOfOtherModels) {
  constexpr int64_t kBudget = 1 << 20;
  auto tier = Open(kBudget);
  for (int i = 0; i < 50; ++i) Store(*tier, "a", {i});
  tier.reset();
  const size_t files = Segments().size();
  KvLayout int8 = kDiskLayout;
  int8.dtype = tensor::DType::kI8;
  tier = Open(kBudget, "model", int8);
  EXPECT_EQ(tier->Find("a", BlockTokens(std::vector<int32_t>{1})), 0);
  EXPECT_EQ(tier->stats().refused_files, static_cast<int64_t>(files));
  EXPECT_THAT(tier->TakeMessages()[0], HasSubstr("another model, KV type or build"));
  tier.reset();
  tier = Open(kBudget, "other");
  EXPECT_EQ(tier->stats().refused_files, static_cast<int64_t>(files));
  EXPECT_EQ(tier->stats().blocks, 0);
  for (int i = 0; i < 50; ++i) Store(*tier, "a", {i});
  EXPECT_EQ(tier->stats().blocks, std::min<int64_t>(50, tier->stats().capacity_blocks));
  EXPECT_LE(FileBytes(), kBudget);
  EXPECT_EQ(Load(*tier, "a", {49}), 1);
  tier.reset();
  tier = Open(kBudget);
  EXPECT_LT(tier->stats().blocks, 50) << "blocks of the first model were replaced";
}

TEST_F(DiskStoreTest, RefusesDamagedBlocksWithTheirFollowers) {
  const SegmentFormat format(kDiskLayout, FingerprintOf(kDiskLayout, "model"));
  auto tier = Open();
  Store(*tier, "a", {1, 2, 3, 4});
  Store(*tier, "a", {1, 2, 9});
  const std::string file = Segments().at(0);
  // The second block is located by its contents.
  std::ifstream in(file, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::vector<std::byte> wanted = BlockOf("a", std::vector<int32_t>{1, 2});
  const size_t at = all.find(std::string(reinterpret_cast<const char*>(wanted.data()), 64));
  ASSERT_NE(at, std::string::npos);
  Flip(file, static_cast<int64_t>(at) + format.layer_bytes() + 3);
  EXPECT_EQ(tier->Find("a", BlockTokens(std::vector<int32_t>{1, 2, 3, 4})), 4);
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3, 4}), 1);
  EXPECT_EQ(tier->stats().refused_blocks, 1);
  EXPECT_THAT(tier->TakeMessages(), ElementsAre(HasSubstr("is damaged; it is computed again")));
  EXPECT_EQ(Load(*tier, "a", {1, 2, 9}), 1);
  EXPECT_TRUE(tier->Flush().ok());
  tier.reset();
  tier = Open();
  EXPECT_EQ(tier->stats().blocks, 1) << "the block is not found after a restart";
  Store(*tier, "a", {1, 2, 3, 4});
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3, 4}), 4);
}

// Blocks that are found have the stored contents after any bit flip or truncation of a file.
TEST_F(DiskStoreTest, FlippedBitsAndCutFilesAreRefused) {
  constexpr int64_t kBudget = 1 << 20;
  const std::vector<int32_t> path = {1, 2, 3, 4, 5};
  std::mt19937 random(3);
  auto tier = Open(kBudget);
  Store(*tier, "a", path);
  tier.reset();
  const std::string pristine = folder_ + "_pristine";
  std::filesystem::copy(folder_, pristine);
  int whole = 0, partial = 0;
  for (int round = 0; round < 300; ++round) {
    std::filesystem::remove_all(folder_);
    std::filesystem::copy(pristine, folder_);
    for (const std::string& file : Segments()) {
      const auto size = static_cast<int64_t>(std::filesystem::file_size(file));
      // Half of the damage hits records and headers, which are few bytes.
      const int64_t at =
          static_cast<int64_t>(random()) % (round % 2 == 0 ? size : std::min<int64_t>(size, 8192));
      if (round % 3 == 0) {
        std::filesystem::resize_file(file, at);
      } else {
        Flip(file, at);
      }
    }
    tier = Open(kBudget);
    const int came = Load(*tier, "a", path);
    ++(came == 5 ? whole : partial);
    Store(*tier, "a", path);
    EXPECT_EQ(Load(*tier, "a", path), 5) << "the missing blocks are stored again";
    tier.reset();
  }
  EXPECT_GT(whole, 0);  // bits between records are unused
  EXPECT_GT(partial, 100);
  std::filesystem::remove_all(pristine);
}

TEST_F(DiskStoreTest, GarbageFilesAreRefused) {
  std::ofstream(folder_ + "/" + SegmentName(3)) << std::string(10000, 'x');
  std::ofstream(folder_ + "/" + SegmentName(4)) << "short";
  std::ofstream(folder_ + "/notes.txt") << "mine";
  auto tier = Open();
  EXPECT_EQ(tier->stats().refused_files, 1);
  EXPECT_THAT(tier->TakeMessages(), ElementsAre(HasSubstr("no segment of KV blocks")));
  Store(*tier, "a", {1});
  EXPECT_EQ(Load(*tier, "a", {1}), 1);
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/notes.txt"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/" + SegmentName(4)));
}

TEST_F(DiskStoreTest, ReportsASegmentThatCannotBeOpened) {
  std::filesystem::create_directory(folder_ + "/" + SegmentName(3));
  const auto tier =
      DiskStore::Open({.folder = folder_, .bytes = 16 << 20, .layout = kDiskLayout, .fingerprint = "model"});
  EXPECT_THAT(Message(tier.status()), HasSubstr(SegmentName(3) + ": can't be opened"));
}

TEST_F(DiskStoreTest, TreatsSlotsPastTheEndOfAFileAsEmpty) {
  WriteSegment(1, 4, {{0, RecordOf(5, 0, 1)}, {1, RecordOf(6, 5, 2)}});
  const SegmentFormat format(kDiskLayout, FingerprintOf(kDiskLayout, "model"));
  std::filesystem::resize_file(folder_ + "/" + SegmentName(1), format.RecordOffset(1) + 100);
  auto tier = Open();
  EXPECT_EQ(tier->stats().blocks, 0);
  EXPECT_EQ(tier->stats().refused_blocks, 1);
  Store(*tier, "a", {1, 2, 3, 4});
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3, 4}), 4);
  EXPECT_EQ(Segments().size(), 1U);
}

TEST_F(DiskStoreTest, RefusesDuplicateBlockIds) {
  WriteSegment(1, 4, {{0, RecordOf(5, 0, 1)}, {1, RecordOf(6, 5, 2)}, {2, RecordOf(7, 6, 3)}});
  WriteSegment(2, 4, {{0, RecordOf(5, 0, 9)}, {1, RecordOf(8, 0, 4)}});
  for (int round = 0; round < 3; ++round) {
    auto tier = Open();
    EXPECT_EQ(tier->stats().blocks, 1 + round);
    EXPECT_EQ(tier->stats().refused_blocks, round == 0 ? 3 : 0) << "the records are invalidated";
    EXPECT_EQ(tier->Find("a", BlockTokens(std::vector<int32_t>{1, 2})), 0);
    EXPECT_EQ(tier->Find("a", BlockTokens(std::vector<int32_t>{9, 2})), 0);
    EXPECT_EQ(tier->Find("a", BlockTokens(std::vector<int32_t>{4})), 1);
    Store(*tier, "a", {100 + round});  // reuses one of their slots
  }
}

// Ids of lost records are not reused either: two stores that open the same files assign different ids.
TEST_F(DiskStoreTest, DoesNotReuseIdsOfRecordsWithoutBlocks) {
  std::set<uint64_t> given;
  for (int opening = 0; opening < 2; ++opening) {
    WriteSegment(1, 4, {{3, RecordOf(900, 0, 1)}}, /*cut=*/true);
    auto tier = Open();
    EXPECT_EQ(tier->stats().blocks, 0);
    EXPECT_EQ(tier->stats().refused_blocks, 1);
    Store(*tier, "a", {2});
    tier.reset();
    const SegmentFormat format(kDiskLayout, FingerprintOf(kDiskLayout, "model"));
    std::ifstream file(folder_ + "/" + SegmentName(1), std::ios::binary);
    std::vector<std::byte> bytes(format.record_bytes());
    file.seekg(format.RecordOffset(0));
    file.read(reinterpret_cast<char*>(bytes.data()), std::ssize(bytes));
    const auto record = format.DecodeRecord(bytes, 1, 0);
    ASSERT_TRUE(record);
    EXPECT_GT(record->id, 900U);
    EXPECT_LE(record->id, 901 + (uint64_t{1} << 40));
    given.insert(record->id);
  }
  EXPECT_EQ(given.size(), 2U);
}

TEST_F(DiskStoreTest, ClearedBlocksStayRemovedAfterARestart) {
  auto tier = Open();
  Store(*tier, "a", {1, 2, 3});
  StoreSome(*tier, "a", {1, 2, 3, 4});  // the write of block 4 is pending
  tier->Clear();
  EXPECT_EQ(tier->stats().blocks, 0);
  EXPECT_TRUE(tier->Flush().ok());
  tier.reset();
  tier = Open();
  EXPECT_EQ(tier->stats().blocks, 0);
  EXPECT_EQ(tier->stats().refused_blocks, 0);
}

TEST_F(DiskStoreTest, ClearRemovesTheBlocksOfAllSegments) {
  auto tier = Open(1 << 20);  // a segment has few blocks
  for (int i = 0; i < 20; ++i) Store(*tier, "a", {i, i});
  EXPECT_GT(Segments().size(), 5U);
  tier->Clear();
  Store(*tier, "a", {7, 8});  // is queued after the invalidations
  tier.reset();
  tier = Open(1 << 20);
  EXPECT_EQ(tier->stats().blocks, 2);
  EXPECT_EQ(tier->stats().refused_blocks, 0);
  EXPECT_EQ(Load(*tier, "a", {7, 8}), 2);
}

// A step that waits for a layer does not wait until a load of many pieces ends.
TEST_F(DiskStoreTest, LayerReadsDoNotWaitForTheEndOfALoad) {
  constexpr KvLayout kLarge = {.layers = 4, .heads = 8, .key_dim = 128, .value_dim = 128};
  constexpr int kBlocks = 60, kRounds = 10;  // about 120 MiB, 8 pieces
  auto tier = Open(256 << 20, "model", kLarge);
  std::vector<int32_t> path(kBlocks);
  for (int i = 0; i < kBlocks; ++i) path[i] = i;
  std::vector<std::byte> bytes(kLarge.block_bytes(), std::byte{7});
  for (int done = 0; done < kBlocks;) {
    const DiskStore::Reserved reserved = tier->Reserve("a", BlockTokens(path), kNoLimit);
    for (const uint64_t record : reserved.records) tier->Write(record, kLarge.Flat(bytes.data()));
    done = reserved.blocks;
    tier->Wait(std::chrono::seconds(1));
    tier->Poll();
  }
  Settle(*tier);
  const uint64_t pinned = tier->Pin("a", BlockTokens(path), kBlocks - 1, 1).front();
  std::vector<std::byte> memory(kBlocks * kLarge.block_bytes()), layer(kLarge.layer_bytes());
  int before = 0;
  // On a busy machine each load may end before the layer is read, so the test tries several rounds.
  for (int round = 0; round < kRounds || (before == 0 && round < 100 * kRounds); ++round) {
    const DiskStore::OpenedLoad opened = tier->OpenLoad("a", BlockTokens(path), 0, kBlocks);
    std::vector<DiskStore::Target> to;
    for (int i = 0; i < kBlocks; ++i) {
      to.push_back({opened.records[i], kLarge.Flat(&memory[i * kLarge.block_bytes()])});
    }
    tier->Read(opened.load, to);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the load has begun
    std::ranges::fill(layer, std::byte{0});
    const DiskStore::LayerRead read = {pinned, 2, layer.data()};
    EXPECT_EQ(tier->ReadLayers({&read, 1}), 1U);
    EXPECT_EQ(layer, std::vector<std::byte>(layer.size(), std::byte{7}));
    std::vector<DiskStore::Loaded> loaded = tier->Poll();
    before += loaded.empty() ? 1 : 0;
    while (loaded.empty()) {
      tier->Wait(std::chrono::seconds(1));
      loaded = tier->Poll();
    }
    EXPECT_EQ(loaded[0].blocks, kBlocks);
  }
  EXPECT_GT(before, 0);  // except in rounds in which this thread slept too long
  EXPECT_EQ(std::ranges::count(memory, std::byte{7}), std::ssize(memory));
  tier->Unpin(pinned);
}

TEST_F(DiskStoreTest, CancelledLoadsStopWritingToTheirTargets) {
  auto tier = Open(64 << 20);
  std::vector<int32_t> path(50);
  for (int i = 0; i < 50; ++i) path[i] = i;
  Store(*tier, "a", path);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<std::byte>> memory(50, std::vector<std::byte>(kDiskLayout.total_bytes()));
    const DiskStore::LoadId load = StartLoad(*tier, "a", path, 0, memory);
    std::this_thread::sleep_for(std::chrono::microseconds(round * 100));
    tier->Cancel(load);
    const std::vector<std::vector<std::byte>> then = memory;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(memory, then);
    EXPECT_THAT(tier->Poll(), IsEmpty());
  }
  EXPECT_EQ(Load(*tier, "a", path), 50);
}

TEST_F(DiskStoreTest, LongNamesAreNotStored) {
  auto tier = Open();
  const std::string name(kMaxNameBytes + 1, 'n');
  EXPECT_FALSE(tier->CanStore(name));
  EXPECT_EQ(StoreSome(*tier, name, {1}), 0);
  Store(*tier, name.substr(1), {1});
  EXPECT_EQ(Load(*tier, name.substr(1), {1}), 1);
}

// Runs `body` in a child process and returns its result, which is the exit status of the child.
int InChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST_F(DiskStoreTest, AFullDiskStopsOnlyWrites) {
  const int code = InChild([this] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {220000, 220000};  // maximum bytes of a file: its records and a few blocks
    setrlimit(RLIMIT_FSIZE, &limit);
    auto tier = Open(64 << 20);
    const std::vector<int32_t> path = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    Store(*tier, "a", path);
    const DiskTierStats stats = tier->stats();
    const int kept = Load(*tier, "a", path);
    Store(*tier, "a", {77});
    const bool right = !stats.storing && stats.write_errors > 0 && tier->TakeMessages().size() == 1 &&
                       kept > 0 && kept < 9 && kept == stats.blocks &&
                       tier->Find("a", BlockTokens(std::vector<int32_t>{77})) == 0;
    return right && !HasFailure() ? 40 + kept : 1;
  });
  ASSERT_GT(code, 40);
  auto tier = Open(64 << 20);
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3, 4, 5, 6, 7, 8, 9}), code - 40);
  Store(*tier, "a", {1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(Load(*tier, "a", {1, 2, 3, 4, 5, 6, 7, 8, 9}), 9);
}

// A process that stores blocks in an endless loop is killed 50 times. Its budget is so small that slots are
// reused all the time.
TEST_F(DiskStoreTest, SurvivesBeingKilled) {
  constexpr int64_t kBudget = 1 << 20;
  const auto path_of = [](int i) { return std::vector<int32_t>{i % 5, i, i + 1, i % 3}; };
  std::mt19937 random(11);
  int found = 0;
  for (int round = 0; round < 50; ++round) {
    const auto enough = static_cast<int64_t>(20 + random() % 100);  // blocks
    std::array<int, 2> ready = {};
    ASSERT_EQ(pipe(ready.data()), 0);
    const pid_t child = fork();
    if (child == 0) {
      auto tier = Open(kBudget);
      bool reported = false;
      for (int i = round * 7;; ++i) {
        StoreSome(*tier, i % 2 == 0 ? "a" : "b", path_of(i));
        if (i % 4 == 3) tier->Wait(std::chrono::milliseconds(1));
        tier->Poll();
        if (reported || tier->stats().written_blocks < enough) continue;
        reported = write(ready[1], "x", 1) == 1;
      }
    }
    close(ready[1]);
    char signal = 0;
    EXPECT_EQ(read(ready[0], &signal, 1), 1);
    close(ready[0]);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    auto tier = Open(kBudget);
    EXPECT_EQ(tier->stats().refused_blocks, 0) << "each record has its block";
    EXPECT_EQ(tier->stats().refused_files, 0);
    const int blocks = tier->stats().blocks;
    EXPECT_LE(blocks, tier->stats().capacity_blocks);
    int reached = 0;
    for (int i = round * 7; i < round * 7 + 3000; ++i) {
      const std::string name = i % 2 == 0 ? "a" : "b";
      const int there = tier->Find(name, BlockTokens(path_of(i)));
      if (there <= 1) continue;
      EXPECT_EQ(Load(*tier, name, path_of(i)), there);
      reached += there - 1;
    }
    EXPECT_THAT(tier->TakeMessages(), IsEmpty());
    found += reached;
    EXPECT_LE(FileBytes(), kBudget);
  }
  EXPECT_GT(found, 50);
}

}  // namespace
}  // namespace moesaic::cache
