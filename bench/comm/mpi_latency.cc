// Latency of small AllReduce calls between MPI processes: ours and MPI_Allreduce, in alternating blocks of
// one run.
//
// usage: mpirun -n 2 --bind-to core comm_mpi_latency [CALLS]     one line per size: medians over blocks of
// calls, and their quartiles
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/transport/mpi_transport.h"

namespace moesaic::comm {
namespace {

constexpr int kBlocks = 41;

struct Spread {
  double low = 0, median = 0, high = 0;
};
Spread Quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 4], values[values.size() / 2], values[values.size() * 3 / 4]};
}

void ExitOn(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

// Microseconds per call of one block.
template <typename Call>
double Block(int calls, const Call& call) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  for (int i = 0; i < calls; ++i) call();
  return (MPI_Wtime() - start) / calls * 1e6;
}

void Run(int calls) {
  StatusOr<std::unique_ptr<Transport>> transport = MakeMpiTransport(MPI_COMM_WORLD);
  ExitOn(transport.status());
  StatusOr<std::unique_ptr<Communicator>> communicator =
      Communicator::Create(**transport, Topology::Flat((*transport)->size(), {5e-7, 5e9}));
  ExitOn(communicator.status());
  for (const int bytes : {8, 64, 256, 1024, 4096, 14336, 65536}) {
    std::vector<float> input(bytes / 4, 1.0F), output(bytes / 4);
    const auto ours = [&] {
      ExitOn((*communicator)
                 ->AllReduce(std::as_bytes(std::span(input)), std::as_writable_bytes(std::span(output)),
                             tensor::DType::kF32));
    };
    const auto theirs = [&] {
      MPI_Allreduce(input.data(), output.data(), bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    };
    Block(calls, ours);  // plans, and warms caches
    Block(calls, theirs);
    std::vector<double> our_times, their_times, ratios;
    for (int block = 0; block < kBlocks; ++block) {
      our_times.push_back(Block(calls, ours));
      their_times.push_back(Block(calls, theirs));
      ratios.push_back(our_times.back() / their_times.back());
    }
    if ((*transport)->rank() != 0) continue;
    const Spread a = Quartiles(std::move(our_times)), b = Quartiles(std::move(their_times)),
                 c = Quartiles(std::move(ratios));
    std::printf("%6d B  ours %.2f us [%.2f, %.2f]   MPI %.2f us [%.2f, %.2f]   ratio %.2f [%.2f, %.2f]\n",
                bytes, a.median, a.low, a.high, b.median, b.low, b.high, c.median, c.low, c.high);
  }
}

}  // namespace
}  // namespace moesaic::comm

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int calls = argc > 1 ? std::atoi(argv[1]) : 5000;
  if (calls < 1) {
    std::fprintf(stderr, "usage: comm_mpi_latency [CALLS]\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  moesaic::comm::Run(calls);
  MPI_Finalize();
  return 0;
}
