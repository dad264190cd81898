// Times steps of a deployment: real communication between computations that take the time of a roofline.
//   parallel_step_work MODEL --topology FILE -tp 2 -pp 8 > work.json
//   parallel_step_bench work.json --topology FILE --sequences 64            threads in virtual time
//   mpirun -n 16 parallel_step_bench work.json --topology FILE --transport mpi --dilation 1000     real time
// steps.py --simulator smpi runs it under SMPI. Prints one JSON object.
#include <fmt/format.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bench/comm/bench_rank.h"
#include "bench/parallel/step_schedule.h"
#include "comm/transport/local_transport.h"
#include "comm/transport/open_transport.h"

namespace moesaic::bench {
namespace {

constexpr comm::Tag kReportTag = 3;
constexpr double kLimitSeconds = 600;

struct Flags {
  std::string work, topology, transport = "virtual";
  StepRows rows;
  int steps = 0;
  double dilation = 1, quantum_us = 0;
};

// Means over the ranks per step, and bytes of all ranks per step.
void RunRank(comm::Transport& transport, const comm::Topology& topology, const Deployment& deployment,
             const Flags& flags, const Compute& compute) {
  StepSchedule schedule(transport, topology, deployment, flags.rows, flags.dilation, compute);
  schedule.Interval(1);  // exchanges learn their paths, collectives make their plans
  const double latency = schedule.Latency();
  const int steps = flags.steps > 0
                        ? flags.steps
                        : 3 * deployment.degrees.pipeline + (deployment.degrees.pipeline == 1 ? 1 : 0);
  const double interval = schedule.Interval(steps);
  std::vector<double> sums(schedule.parts().begin(), schedule.parts().end());
  const size_t parts = sums.size();
  for (const comm::LevelTraffic& level : schedule.bytes())
    sums.push_back(static_cast<double>(level.row_bytes));
  sums = SumOfAll(transport, kReportTag, std::move(sums), kLimitSeconds);
  if (transport.rank() > 0) return;
  nlohmann::json out = {{"layout", Name(deployment.degrees)},
                        {"ranks", transport.size()},
                        {"latency_ms", 1e3 * latency / flags.dilation},
                        {"interval_ms", 1e3 * interval / flags.dilation}};
  for (size_t part = 0; part < parts; ++part) {
    out["mean_ms"][kStepPartNames[part]] = 1e3 * sums[part] / transport.size() / steps / flags.dilation;
  }
  for (size_t i = parts; i < sums.size(); ++i) {
    out["bytes"][schedule.bytes()[i - parts].level] = sums[i] / steps;
  }
  fmt::print("{}\n", out.dump());
}

// Computes in real time, or in SMPI's time: nanosleep is simulated there. Polls at least once per
// millisecond: over TCP, a large message advances only when the program polls. The network hardware of the
// simulated machine needs no polls.
void SleepAndProgress(comm::Transport& transport, double seconds) {
  constexpr double kResolution = 10e-9;  // SMPI's time does not pass in shorter sleeps
  const double end = transport.Now() + seconds, slice = std::clamp(seconds / 4, 50e-6, 1e-3);
  for (double left = seconds; left > kResolution; left = end - transport.Now()) {
    transport.Progress();
    const double now = std::min(left, slice);
    const timespec time = {
        .tv_sec = static_cast<time_t>(now),
        .tv_nsec = static_cast<long>(1e9 * (now - static_cast<double>(static_cast<time_t>(now))))};
    nanosleep(&time, nullptr);
  }
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times the steps of a deployment.");
  app.add_option("work", flags.work, "Output of parallel_step_work")->required();
  app.add_option("--topology", flags.topology, "Topology file")->required();
  app.add_option("--transport", flags.transport,
                 "virtual: threads in virtual time; or that of a launched job: mpi, ucx://...");
  app.add_option("--sequences", flags.rows.sequences, "Sequences of each replica")
      ->check(CLI::PositiveNumber);
  app.add_option("--rows", flags.rows.rows_per_sequence, "Rows of each sequence")->check(CLI::PositiveNumber);
  app.add_option("--context", flags.rows.context, "Tokens that each sequence's rows read");
  app.add_option("--steps", flags.steps, "Steps; the default is 4, or 3 for each stage of a pipeline");
  app.add_option("--dilation", flags.dilation, "Factor of computing times, for links that are slower by it")
      ->check(CLI::PositiveNumber);
  app.add_option("--quantum-us", flags.quantum_us,
                 "Virtual microseconds within which messages arrive together; makes many ranks faster")
      ->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  const Deployment deployment = Succeed(ReadDeployment(ReadText(flags.work)));
  const comm::Topology topology = ReadTopology(flags.topology);
  if (flags.transport != "virtual") {
    const comm::OpenedTransport opened = Succeed(comm::OpenTransport(flags.transport));
    RunRank(*opened, topology, deployment, flags,
            [&](double seconds) { SleepAndProgress(*opened, seconds); });
    return 0;
  }
  comm::LocalJob job(topology.ranks(), {.topology = &topology, .quantum_s = 1e-6 * flags.quantum_us});
  comm::RunRanks(job, [&](comm::Transport& transport) {
    RunRank(transport, topology, deployment, flags,
            [&](double seconds) { job.Compute(transport.rank(), seconds); });
  });
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) { return moesaic::bench::Main(argc, argv); }
