#include "runtime/probe.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace moesaic::runtime {
namespace {

TEST(Probe, MeasuresAPlausibleBandwidth) {
  auto pool = ThreadPool::Create({.threads = 2, .pin = true});
  ASSERT_TRUE(pool.ok());
  const auto bandwidth = MeasureReadBandwidth(pool->get(), 8 << 20);
  ASSERT_TRUE(bandwidth.ok());
  // The bounds lie between a slow disk and ten times the fastest cache: a unit error of 1000 fails.
  EXPECT_GT(bandwidth->one_thread, 1e8);
  EXPECT_LT(bandwidth->one_thread, 5e12);
  EXPECT_GT(bandwidth->all_threads, 1e8);
}

TEST(Probe, ReadsExactlyTheGivenMemory) {
  auto pool = ThreadPool::Create({.threads = 2, .pin = true});
  ASSERT_TRUE(pool.ok());
  // Guard pages on both sides that must not be read.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const map = mmap(nullptr, 66 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(map, MAP_FAILED);
  auto* const first = static_cast<std::byte*>(map) + page;
  ASSERT_EQ(mprotect(first, 64 * page, PROT_READ | PROT_WRITE), 0);
  for (const size_t skipped : {size_t{0}, size_t{3}, size_t{256}}) {
    for (const size_t bytes : {size_t{0}, size_t{5}, size_t{1000}, 64 * page - skipped}) {
      ReadOnce(pool->get(), {first + skipped, bytes});
      ReadOnce(pool->get(), {first + 64 * page - bytes, bytes});
    }
  }
  // Pages become resident when they are read; only the skipped ends may be missing.
  std::vector<unsigned char> resident(64);
  ASSERT_EQ(madvise(first, 64 * page, MADV_DONTNEED), 0);
  ReadOnce(pool->get(), {first, 64 * page});
  ASSERT_EQ(mincore(first, 64 * page, resident.data()), 0);
  EXPECT_EQ(std::ranges::count_if(resident, [](unsigned char x) { return (x & 1U) != 0; }), 64);
  ASSERT_EQ(munmap(map, 66 * page), 0);
}

TEST(Probe, FailsWithoutMemory) {
  auto pool = ThreadPool::Create({.threads = 1, .pin = false});
  EXPECT_EQ(MeasureReadBandwidth(pool->get(), int64_t{1} << 60).status().code(),
            StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moesaic::runtime
