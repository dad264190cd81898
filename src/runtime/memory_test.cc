#include "runtime/memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <numeric>
#include <vector>

#include "runtime/huge_pages.h"

namespace moesaic::runtime {
namespace {

bool Aligned(const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

TEST(Buffer, IsZeroedAlignedAndWritable) {
  for (bool huge : {false, true}) {
    for (size_t bytes : {size_t{1}, size_t{4096}, size_t{3} << 20}) {
      auto buffer = Buffer::Allocate(bytes, huge);
      ASSERT_TRUE(buffer.ok());
      EXPECT_EQ(buffer->size(), bytes);
      EXPECT_TRUE(Aligned(buffer->data(), huge && bytes > (size_t{2} << 20) ? 2 << 20 : 4096));
      for (size_t i = 0; i < bytes; i += 997) EXPECT_EQ(buffer->data()[i], std::byte{0});
      std::memset(buffer->data(), 1, bytes);
    }
  }
}

TEST(Buffer, EmptyAndMovedBuffersHaveNoMemory) {
  auto empty = Buffer::Allocate(0, true);
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->data(), nullptr);
  Buffer a = *Buffer::Allocate(100, false);
  const auto* where = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), where);
  a = std::move(b);
  EXPECT_EQ(a.data(), where);
  EXPECT_EQ(a.size(), 100U);
}

TEST(Buffer, ReportsATooLargeSizeAsAnError) {
  EXPECT_EQ(Buffer::Allocate(size_t{1} << 60, true).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Buffer::Allocate(SIZE_MAX, true).status().code(), StatusCode::kResourceExhausted);
}

class MappedFileTest : public testing::Test {
 protected:
  std::string Write(const std::string& text) {
    const auto path = std::filesystem::path(testing::TempDir()) /
                      (std::string("moesaic_mapped_") + std::to_string(getpid()));
    std::ofstream(path) << text;
    path_ = path;
    return path_;
  }
  void TearDown() override {
    if (!path_.empty()) std::filesystem::remove(path_);
  }
  std::string path_;
};

TEST_F(MappedFileTest, ShowsTheFilesBytes) {
  auto file = MappedFile::Open(Write("mixture of experts"));
  ASSERT_TRUE(file.ok());
  const auto bytes = (*file)->bytes();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), "mixture of experts");
  EXPECT_EQ((*file)->path(), path_);
  (*file)->Prefetch(3, 1 << 30);  // clipped to the file
  (*file)->Prefetch(1 << 30, 5);
}

TEST_F(MappedFileTest, EmptyFileIsAnEmptySpan) {
  auto file = MappedFile::Open(Write(""));
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE((*file)->bytes().empty());
}

TEST_F(MappedFileTest, ErrorsNameThePath) {
  const auto missing = MappedFile::Open("/nonexistent/model.safetensors");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_NE(Message(missing.status()).find("/nonexistent/model.safetensors"), std::string::npos);
  EXPECT_EQ(MappedFile::Open(testing::TempDir()).status().code(), StatusCode::kInvalidArgument);
}

TEST(Arena, AllocatesAlignedDistinctMemoryAndReusesItAfterReset) {
  Arena arena;
  auto a = arena.Take<float>(3);
  auto b = arena.Take<float>(3);
  EXPECT_TRUE(Aligned(a.data(), 64));
  EXPECT_TRUE(Aligned(b.data(), 64));
  EXPECT_GE(b.data() - a.data(), 3);
  arena.Reset();
  EXPECT_EQ(arena.Take<float>(3).data(), a.data());
}

TEST(Arena, ThrowsIfMemoryCannotBeMapped) {
  Arena arena;
  EXPECT_THROW(arena.TakeBytes(size_t{1} << 60), std::bad_alloc);
  EXPECT_EQ(arena.Take<float>(10).size(), 10U);
}

TEST(Arena, RewindsAcrossChunksWithoutFreeingThem) {
  Arena arena;
  arena.Take<std::byte>(100);
  const size_t mark = arena.Mark();
  auto first = arena.Take<std::byte>(size_t{3} << 20);
  auto second = arena.Take<std::byte>(size_t{20} << 20);  // needs its own chunk
  std::memset(second.data(), 7, second.size());
  const size_t peak = arena.peak_bytes();
  EXPECT_GE(peak, size_t{23} << 20);
  for (int step = 0; step < 3; ++step) {
    arena.Rewind(mark);
    EXPECT_EQ(arena.Take<std::byte>(size_t{3} << 20).data(), first.data());
    EXPECT_EQ(arena.Take<std::byte>(size_t{20} << 20).data(), second.data());
  }
  EXPECT_EQ(arena.peak_bytes(), peak);
}

TEST(Buffer, TrimZeroesTailAndKeepsRest) {
  for (const bool huge : {false, true}) {
    Buffer buffer = *Buffer::Allocate(3 * kHugePage, huge);
    std::memset(buffer.data(), 1, buffer.size());
    const size_t used = kHugePage + 1, end = huge ? 2 * kHugePage : kHugePage + 4096;
    buffer.Trim(used);
    EXPECT_EQ(buffer.size(), 3 * kHugePage);
    EXPECT_EQ(buffer.data()[used - 1], std::byte{1});
    EXPECT_EQ(buffer.data()[end - 1], std::byte{1});
    EXPECT_EQ(buffer.data()[end], std::byte{0});
    EXPECT_EQ(buffer.data()[buffer.size() - 1], std::byte{0});
    buffer.data()[end] = std::byte{2};
    buffer.Trim(buffer.size());
    EXPECT_EQ(buffer.data()[end], std::byte{2});
    buffer.Trim(0);
    EXPECT_EQ(buffer.data()[0], std::byte{0});
  }
  Buffer().Trim(0);
}

// Node 0 exists on every machine.
TEST(Buffer, InterleavesPagesOverNodes) {
  Buffer buffer = *Buffer::Allocate(size_t{4} << 20, /*huge=*/true);
  const int first[] = {0};
  ASSERT_TRUE(buffer.Interleave(first).ok());
  buffer.data()[0] = std::byte{1};
  int policy = -1;
  ASSERT_EQ(syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, buffer.data(), MPOL_F_ADDR), 0);
  EXPECT_EQ(policy, MPOL_INTERLEAVE);
  const int absent[] = {1000};
  EXPECT_THAT(Message(buffer.Interleave(absent)), testing::HasSubstr("over NUMA nodes 1000: "));
  EXPECT_TRUE(buffer.Interleave({}).ok());
  EXPECT_TRUE(Buffer().Interleave(first).ok());
}

TEST(Buffer, PlacesPagesOnPreferredNode) {
  Buffer buffer = *Buffer::Allocate(2 * kHugePage, /*huge=*/true);
  ASSERT_TRUE(buffer.Prefer(kHugePage, kHugePage, 0).ok());
  std::memset(buffer.data(), 1, buffer.size());
  const int expected[] = {MPOL_DEFAULT, MPOL_PREFERRED};
  for (int i = 0; i < 2; ++i) {
    int policy = -1;
    ASSERT_EQ(syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, buffer.data() + i * kHugePage, MPOL_F_ADDR),
              0);
    EXPECT_EQ(policy, expected[i]);
  }
  EXPECT_THAT(Message(buffer.Prefer(0, kHugePage, 1000)), testing::HasSubstr("on NUMA node 1000: "));
}

TEST(HugePageAllocator, KeepsValuesOfSmallAndLargeVectors) {
  for (const size_t size : {size_t{1}, size_t{1000}, kHugePage / 4, kHugePage}) {
    std::vector<int32_t, HugePageAllocator<int32_t>> x(size, 7);
    EXPECT_EQ(std::accumulate(x.begin(), x.end(), int64_t{0}), static_cast<int64_t>(7 * size));
    EXPECT_TRUE(size * 4 < kHugePage || Aligned(x.data(), kHugePage));
    x.resize(2 * size);  // moves to another kind of memory at some size
    x.back() = 9;
    const auto copy = x;
    EXPECT_EQ(copy[size - 1], 7);
    EXPECT_EQ(copy.back(), 9);
  }
  AdviseHugePages(nullptr, 0);
  char small[16] = {1};
  AdviseHugePages(small, sizeof(small));  // has no whole page
  EXPECT_EQ(small[0], 1);
}

TEST(HugePageAllocator, UsesFreedBlocksOfTheSameSizeFirst) {
  constexpr size_t kSize = 3 * kHugePage;
  void* first = AllocateHuge(kSize);
  FreeHuge(first, kSize);
  void* other = AllocateHuge(kSize + kHugePage);
  EXPECT_NE(other, first);
  void* again = AllocateHuge(kSize - 1);  // both have three huge pages
  EXPECT_EQ(again, first);
  FreeHuge(again, kSize - 1);
  FreeHuge(other, kSize + kHugePage);
}

TEST(HugePageAllocator, KeepsABoundedNumberOfFreedBytes) {
  constexpr size_t kBlocks = kKeptHugeBytes / kHugePage + 3;
  std::vector<void*> blocks;
  for (size_t i = 0; i < kBlocks; ++i) blocks.push_back(AllocateHuge(kHugePage));
  for (void* block : blocks) FreeHuge(block, kHugePage);
  // The last ones are kept; those before them were freed.
  std::vector<void*> again;
  for (size_t i = 0; i < kKeptHugeBytes / kHugePage; ++i) {
    void* block = AllocateHuge(kHugePage);
    EXPECT_EQ(block, blocks[kBlocks - 1 - i]);
    again.push_back(block);
  }
  for (void* block : again) FreeHuge(block, kHugePage);
  void* large = AllocateHuge(kKeptHugeBytes + 1);
  static_cast<char*>(large)[kKeptHugeBytes] = 1;
  FreeHuge(large, kKeptHugeBytes + 1);
}

}  // namespace
}  // namespace moesaic::runtime
