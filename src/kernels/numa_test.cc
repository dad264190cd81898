// Tests weights in several images: mirrored or sliced over simulated NUMA nodes.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "kernels/gemm_tiling.h"
#include "kernels/test_context.h"
#include "runtime/test_topology.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;
using tensor::PackedMatrix;

class NumaTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::mt19937 rng_{17};
};

// Computes C = A W^T with the first rows of `w`, stored in any memory.
std::vector<float> Product(const ExecContext& ctx, const PackedMatrix& w, const std::vector<float>& x,
                           int m) {
  const size_t mark = ctx.scratch->Mark();
  std::vector<float> c(size_t(m) * w.n());
  const QuantizedActivations a = QuantizeActivations(ctx, w.layout.format, x.data(), w.k(), m, w.k());
  Linear(ctx, {.a = &a, .w = &w, .c = c.data(), .c_stride = w.n()});
  ctx.scratch->Rewind(mark);
  return c;
}

// The bits must equal those of the matrix in one piece. This includes views of panels that begin and end
// inside slices, and pools with more or fewer nodes than images.
TEST_P(NumaTest, ImagesDoNotChangeResults) {
  TestContext plain(GetParam(), 1);
  for (int nodes : {2, 4}) {
    const runtime::Topology topology = runtime::SimulatedNodes(nodes, 1);
    TestContext test(GetParam(), topology);
    for (int f = 0; f < tensor::kPackedFormats; ++f) {
      const auto format = static_cast<PackedFormat>(f);
      if (!tensor::CanQuantize(format)) continue;
      for (const auto& [m, n, k] : {std::tuple{1, 1, 1}, {1, 1000, 300}, {7, 333, 65}, {150, 100, 100}}) {
        const TestMatrix w = RandomMatrix(&rng_, format, n, k);
        const auto x = RandomValues(&rng_, size_t(m) * k, 1);
        const int first = n > 200 ? 5 * tensor::kPanelRows : 0;
        const auto expected = Product(plain.context(), w.matrix.Rows(first, n - first), x, m);
        for (const TestImages& images : {Mirrored(w, 2), Mirrored(w, 3), Sliced(w, 2), Sliced(w, 3)}) {
          const auto c = Product(test.context(), images.matrix.Rows(first, n - first), x, m);
          ASSERT_EQ(std::memcmp(c.data(), expected.data(), c.size() * sizeof(float)), 0)
              << PackedFormatName(format) << " " << m << "x" << n << "x" << k << ", " << nodes << " nodes, "
              << images.matrix.images << " images, slices of " << images.matrix.slice_panels;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Host, NumaTest, testing::ValuesIn(runtime::HostIsas(runtime::DetectCpu())),
                         IsaTestName);

// Records the reads of threads, in the order in which each started.
struct Reads {
  std::mutex mutex;
  std::map<std::thread::id, std::vector<const std::byte*>> of;
  size_t threads = 0;
};
Reads* reads = nullptr;

// Takes no further task before every thread has one, so that all take part.
void RecordTile(const GemmTile& tile) {
  {
    const std::lock_guard lock(reads->mutex);
    reads->of[std::this_thread::get_id()].push_back(tile.w);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  for (bool all = false; !all && std::chrono::steady_clock::now() < deadline;) {
    std::this_thread::yield();
    const std::lock_guard lock(reads->mutex);
    all = reads->of.size() == reads->threads;
  }
}

// Runs a product and returns, for each worker, the image read by each task.
std::vector<std::vector<int>> ImagesRead(int nodes, int cpus_each, const TestImages& images) {
  const runtime::Topology topology = runtime::SimulatedNodes(nodes, cpus_each);
  TestContext test(runtime::Isa::kRef, topology);
  KernelTable table = *test.context().kernels;
  table.gemm[static_cast<int>(PackedFormat::kF32)].tile = RecordTile;
  ExecContext ctx = test.context();
  ctx.kernels = &table;
  Reads recorded;
  reads = &recorded;
  recorded.threads = ctx.pool->size();
  std::vector<std::thread::id> ids(ctx.pool->size());
  ctx.pool->RunOnEach([&](int64_t, int worker) { ids[worker] = std::this_thread::get_id(); });
  Product(ctx, images.matrix, std::vector<float>(images.matrix.k()), 1);
  std::vector<std::vector<int>> of_worker(ids.size());
  for (size_t worker = 0; worker < ids.size(); ++worker) {
    for (const std::byte* at : recorded.of[ids[worker]]) {
      of_worker[worker].push_back(static_cast<int>((at - images.buffer.data()) / images.matrix.image_stride));
    }
  }
  return of_worker;
}

TEST(Numa, ThreadsReadCopyOfTheirNode) {
  std::mt19937 rng(3);
  const TestMatrix w = RandomMatrix(&rng, PackedFormat::kF32, 4000, 64);
  for (int nodes : {2, 4}) {
    const auto read = ImagesRead(nodes, 2, Mirrored(w, nodes));
    ASSERT_EQ(std::ssize(read), 2 * nodes);
    for (int worker = 0; worker < 2 * nodes; ++worker) {
      ASSERT_FALSE(read[worker].empty());
      for (int image : read[worker]) EXPECT_EQ(image, worker / 2);
    }
  }
}

TEST(Numa, ThreadsStartWithSliceOfTheirNode) {
  std::mt19937 rng(4);
  const TestMatrix w = RandomMatrix(&rng, PackedFormat::kF32, 4000, 64);
  for (int nodes : {2, 4}) {
    const auto read = ImagesRead(nodes, 1, Sliced(w, nodes));
    for (int worker = 0; worker < nodes; ++worker) {
      ASSERT_FALSE(read[worker].empty());
      EXPECT_EQ(read[worker][0], worker);
      // A worker switches to another slice when its own is empty, and never returns to a slice.
      std::vector<int> order = read[worker];
      order.erase(std::unique(order.begin(), order.end()), order.end());
      EXPECT_EQ(std::set<int>(order.begin(), order.end()).size(), order.size());
    }
  }
}

TEST(TileGemm, GroupsDoNotCrossSlices) {
  for (int slices : {1, 2, 3, 8}) {
    for (int panels : {1, 7, 64, 300}) {
      for (int first : {0, 3, 40}) {
        PackedMatrix w{.layout = tensor::PackedLayout::Of(PackedFormat::kI8, panels * 16 - 5, 512)};
        w.first_row = first * 16;
        w.images = slices;
        w.slice_panels = base::CeilDiv(first + panels, slices);
        const GemmTiling tiling = TileGemm(3, w, 4, 1, {});
        int covered = 0, groups = 0;
        for (int slice = 0; slice < tiling.slices(); ++slice) {
          const auto [begin, end] = tiling.Slice(slice);
          ASSERT_EQ(begin, covered);
          covered = end;
          groups += tiling.panel_groups(slice);
          for (int panel = begin; panel < end; ++panel) EXPECT_EQ((first + panel) / w.slice_panels, slice);
        }
        EXPECT_EQ(covered, panels);
        EXPECT_EQ(groups, tiling.panel_groups());
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
