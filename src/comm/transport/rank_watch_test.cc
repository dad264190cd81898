#include "comm/transport/rank_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/test_patience.h"
#include "comm/transport/free_port.h"

namespace moesaic::comm {
namespace {

// The connections that each rank of a job keeps.
std::vector<std::vector<Socket>> Meet(int size) {
  const uint16_t port = FreePort();
  std::vector<std::vector<Socket>> kept(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&kept, port, rank, size] {
      const auto contacts =
          Rendezvous({.host = "127.0.0.1", .port = port, .rank = rank, .size = size, .secret = "tiger"}, "",
                     &kept[rank]);
      EXPECT_TRUE(contacts.ok()) << contacts.status();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return kept;
}

class Reports {
 public:
  SilenceReport report() {
    return [this](int rank, double silent_s) {
      const std::lock_guard lock(mutex_);
      all_.emplace_back(rank, silent_s);
    };
  }
  // Waits until the last report says that `rank` is silent, or answers again.
  void Await(int rank, bool is_silent) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(base::Patient(60));
    while (std::chrono::steady_clock::now() < end) {
      {
        const std::lock_guard lock(mutex_);
        if (!all_.empty() && all_.back().first == rank && (all_.back().second > 0) == is_silent) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    FAIL() << "rank " << rank << " is not reported";
  }
  std::vector<std::pair<int, double>> all() {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int, double>> all_;
};

TEST(RankWatchTest, NamesARankWhoseProcessDoesNotAnswer) {
  std::vector<std::vector<Socket>> kept = Meet(3);
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(kept[rank].size(), 3U);
    for (int other = 0; other < 3; ++other) {
      EXPECT_EQ(kept[rank][other].fd() >= 0, rank != other && (rank == 0 || other == 0));
    }
  }
  kept[2].clear();  // ends, which is no silence
  Reports reports;
  const auto watch = RankWatch::Start(0, std::move(kept[0]), reports.report());
  ASSERT_TRUE(watch.ok()) << watch.status();
  reports.Await(1, /*is_silent=*/true);
  const auto answering = RankWatch::Start(1, std::move(kept[1]), {});
  ASSERT_TRUE(answering.ok()) << answering.status();
  reports.Await(1, /*is_silent=*/false);
  for (const auto& [rank, silent_s] : reports.all()) {
    EXPECT_EQ(rank, 1);
    EXPECT_TRUE(silent_s == 0 || silent_s >= 1.2);
  }
}

TEST(RankWatchTest, EndsWhenTheOtherSideEnds) {
  std::vector<std::vector<Socket>> kept = Meet(2);
  auto answering = RankWatch::Start(1, std::move(kept[1]), {});
  ASSERT_TRUE(answering.ok()) << answering.status();
  kept[0].clear();
  answering->reset();
}

}  // namespace
}  // namespace moesaic::comm
