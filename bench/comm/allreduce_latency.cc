// Latency of small AllReduce calls between threads of this process, next to its parts: the hand-over of an
// empty message in both directions, and two copies plus a sum of the same bytes. For two threads, also the
// time of a bare loop that adds the other's vector without plans and messages.
//
// usage: comm_allreduce_latency [RANKS [CALLS]]     one line per size: medians over blocks of calls, and
// their spread
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/transport/local_transport.h"

namespace moesaic::comm {
namespace {

constexpr int kBlocks = 21;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Spread {
  double low = 0, median = 0, high = 0;
};
Spread Quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 4], values[values.size() / 2], values[values.size() * 3 / 4]};
}

// Microseconds per call of `call`, by block. `prepare` runs before each call and is not counted.
template <typename Call, typename Prepare>
Spread Measure(int calls, const Call& call, const Prepare& prepare) {
  std::vector<double> blocks;
  for (int block = 0; block < kBlocks; ++block) {
    double seconds = 0;
    for (int i = 0; i < calls; ++i) {
      prepare();
      const double start = Now();
      call();
      seconds += Now() - start;
    }
    blocks.push_back(seconds / calls * 1e6);
  }
  return Quartiles(std::move(blocks));
}

void ExitOn(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

// AllReduce of two threads: both announce their vectors, read that of the other, and confirm that they have.
class BareLoop {
 public:
  void AllReduce(int rank, std::span<const float> input, std::span<float> output) {
    Side &own = sides_[rank], &other = sides_[1 - rank];
    const int64_t call = ++own.calls;
    own.input = input.data();
    own.announced.store(call, std::memory_order_release);
    while (other.announced.load(std::memory_order_acquire) < call) {
    }
    std::copy_n(other.input, output.size(), output.begin());
    kernel_(reinterpret_cast<std::byte*>(output.data()), reinterpret_cast<const std::byte*>(input.data()),
            static_cast<int64_t>(output.size()));
    own.confirmed.store(call, std::memory_order_release);
    while (other.confirmed.load(std::memory_order_acquire) < call) {
    }
  }

 private:
  // Each member has its own cache lines, so that ranks do not share any.
  struct Side {
    alignas(128) int64_t calls = 0;
    alignas(128) std::atomic<int64_t> announced = 0;
    const float* input = nullptr;
    alignas(128) std::atomic<int64_t> confirmed = 0;
  };
  const ReduceKernel kernel_ = *FindReduceKernel(tensor::DType::kF32, ReduceOp::kSum);
  std::array<Side, 2> sides_;
};

void RunRank(Transport& transport, int calls, BareLoop& bare_loop) {
  StatusOr<std::unique_ptr<Communicator>> communicator =
      Communicator::Create(transport, Topology::Flat(transport.size(), {5e-7, 5e9}));
  ExitOn(communicator.status());
  const int peer = (transport.rank() + 1) % transport.size(),
            before = (transport.rank() + transport.size() - 1) % transport.size();
  for (const int bytes : {8, 1024, 4096, 14336, 65536, 1 << 20}) {
    std::vector<float> input(bytes / 4, 1.0F), output(bytes / 4), other(bytes / 4);
    float value = 0;
    const int count = std::max(10, bytes > 65536 ? calls / 100 : calls);
    // As by the operator before: the lines of the input are in this core's cache alone.
    const auto write = [&] { std::fill(input.begin(), input.end(), value++); };
    const auto nothing = [] {};
    const auto reduce = [&] {
      ExitOn((*communicator)
                 ->AllReduce(std::as_bytes(std::span(input)), std::as_writable_bytes(std::span(output)),
                             tensor::DType::kF32));
    };
    for (int i = 0; i < count; ++i) {  // plans, and warms caches
      write();
      reduce();
    }
    const Spread all_reduce = Measure(count, reduce, write);
    const Spread hand_over = Measure(
        count,
        [&] {
          const StatusOr<TransferId> receive = transport.Receive(before, kTagLimit - 1, {});
          const StatusOr<TransferId> send = transport.Send(peer, kTagLimit - 1, {});
          ExitOn(receive.status());
          ExitOn(send.status());
          ExitOn(Wait(transport, *receive, 10));
          ExitOn(Wait(transport, *send, 10));
        },
        nothing);
    const ReduceKernel kernel = *FindReduceKernel(tensor::DType::kF32, ReduceOp::kMax);
    const Spread local = Measure(
        count,
        [&] {
          std::copy(input.begin(), input.end(), output.begin());
          std::copy(input.begin(), input.end(), other.begin());
          kernel(reinterpret_cast<std::byte*>(output.data()), reinterpret_cast<std::byte*>(other.data()),
                 bytes / 4);
        },
        nothing);
    Spread bare;
    if (transport.size() == 2) {
      bare = Measure(
          count, [&] { bare_loop.AllReduce(transport.rank(), input, output); }, write);
    }
    if (transport.rank() != 0) continue;
    std::printf(
        "%8d B  AllReduce %8.2f us [%.2f, %.2f]   empty exchange %.2f [%.2f, %.2f]   local %.2f [%.2f, "
        "%.2f]",
        bytes, all_reduce.median, all_reduce.low, all_reduce.high, hand_over.median, hand_over.low,
        hand_over.high, local.median, local.low, local.high);
    if (transport.size() == 2)
      std::printf("   bare loop %.2f [%.2f, %.2f]", bare.median, bare.low, bare.high);
    std::printf("\n");
  }
}

}  // namespace
}  // namespace moesaic::comm

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int calls = argc > 2 ? std::atoi(argv[2]) : 2000;
  if (ranks < 1 || calls < 1) {
    std::fprintf(stderr, "usage: comm_allreduce_latency [RANKS [CALLS]]\n");
    return 1;
  }
  moesaic::comm::BareLoop bare_loop;
  moesaic::comm::RunRanks(ranks, [&](moesaic::comm::Transport& transport) {
    moesaic::comm::RunRank(transport, calls, bare_loop);
  });
  return 0;
}
