// Times AllReduce over the transport of a launched job, in alternation with other algorithms:
//   plan                    the planner's choice for the topology
//   flat-block, flat-round-robin  flat ring, ranks in the order of the tree or dealt to its topmost groups
//   mpi                     MPI_Allreduce of the job's MPI
//
//   mpirun -n 4 comm_all_reduce_bench --topology nodes.json --against mpi
//
// With --tune FILE, the plans that the planner prefers are timed instead, and the file becomes a tuning table
// of their medians; --collective names other collectives than AllReduce.
//
// Each round times every contender: --calls calls, each after a barrier that is not timed, as in the OSU
// benchmarks. Rank 0 prints the mean time per call of the slowest rank: "sample BYTES CONTENDER SECONDS". It
// also prints the lower bound and the planner's choice, and the processor time that the choice ("planning")
// and building the chosen plan ("building") took.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <numeric>

#include "bench/comm/bench_rank.h"
#include "comm/collectives/communicator.h"
#include "comm/collectives/plan_factory.h"
#include "comm/explain/explanation.h"
#include "comm/explain/lower_bound.h"
#include "comm/transport/open_transport.h"
#if MOESAIC_HAVE_MPI
#include <mpi.h>
#endif

namespace moesaic::bench {
namespace {

using namespace comm;
using tensor::DType;

constexpr Tag kStartTag = Tag{1} << kCommunicatorTagBits;  // the communicator has those below
constexpr double kLimitSeconds = 600;
constexpr size_t kMaxTunedPlans = 8;  // of each size
constexpr Collective kTuned[] = {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
                                 Collective::kAllToAll, Collective::kBroadcast};

struct Load {
  std::string topology, order = "block", transport, tune;
  std::vector<std::string> against, collectives = {"all_reduce"};
  std::vector<int64_t> bytes = {65536, 1 << 20};
  int rounds = 9, calls = 20;
  bool warms_up = true;
};

Topology OrderedTopology(const Load& load) {
  const Topology topology = ReadTopology(load.topology);
  return load.order == "block" ? topology
                               : Succeed(topology.Selected(OrderedRanks(topology, RankOrder::kRoundRobin)));
}

// Request for `bytes` of f32: the vector, the result of an AllGather, or one rank's input of a ReduceScatter
// or AllToAll.
PlanRequest RequestOf(Collective collective, int ranks, int64_t bytes) {
  PlanRequest request = {.collective = collective, .ranks = ranks};
  const auto count = bytes / static_cast<int64_t>(sizeof(float));
  if (collective == Collective::kAllToAll) {
    request.count = std::max<int64_t>(count / ranks, 1);
  } else if (collective == Collective::kReduceScatter || collective == Collective::kAllGather) {
    request.counts.assign(ranks, count / ranks);
    for (int rank = 0; rank < count % ranks; ++rank) ++request.counts[rank];
  } else {
    request.count = count;
  }
  return request;
}

// One collective and size: buffers, and the plans of flat rings of an AllReduce.
class Contest {
 public:
  Contest(Communicator& communicator, Collective collective, int64_t bytes)
      : communicator_(communicator),
        request_(RequestOf(collective, communicator.size(), bytes)),
        input_(InputCount(request_, communicator.rank())),
        output_(OutputCount(request_, communicator.rank())) {
    for (size_t i = 0; i < input_.size(); ++i) input_[i] = InputAt(static_cast<int64_t>(i));
    if (collective != Collective::kAllReduce) return;
    const Topology& topology = communicator.topology();
    const auto ring = [&](RankOrder order) {
      return std::make_shared<const Plan>(
          Succeed(BuildPlan(request_, FlatTree(OrderedRanks(topology, order)), {.top = Algorithm::kRing})));
    };
    block_ = ring(RankOrder::kBlock);
    round_robin_ = ring(RankOrder::kRoundRobin);
  }

  const PlanRequest& request() const { return request_; }
  /// Sets the plan of the contender "candidate".
  void SetCandidate(Plan plan) { candidate_ = std::make_shared<const Plan>(std::move(plan)); }

  void Call(const std::string& contender) {
    const auto input = std::as_bytes(std::span(input_));
    const auto output = std::as_writable_bytes(std::span(output_));
    if (contender == "plan") {
      ExitOn(communicator_.AllReduce(input, output, DType::kF32));
    } else if (contender == "mpi") {
#if MOESAIC_HAVE_MPI
      MPI_Allreduce(input_.data(), output_.data(), static_cast<int>(input_.size()), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
#endif
    } else if (contender == "candidate") {
      ExitOn(communicator_.Run(candidate_, input, output, DType::kF32));
    } else {
      ExitOn(
          communicator_.Run(contender == "flat-block" ? block_ : round_robin_, input, output, DType::kF32));
    }
  }

  /// Mean seconds per call of the slowest rank.
  double Time(const std::string& contender, int calls) {
    Transport& transport = communicator_.transport();
    double seconds = 0;
    std::fill(output_.begin(), output_.end(), -1.0F);
    for (int i = 0; i < calls; ++i) {
      ExitOn(communicator_.Barrier());
      const double start = StartTime(transport);
      Call(contender);
      seconds += transport.Now() - start;
    }
    CheckResult(contender);
    const auto own = static_cast<float>(seconds / calls);
    float slowest = 0;
    ExitOn(communicator_.AllReduce(std::as_bytes(std::span(&own, 1)),
                                   std::as_writable_bytes(std::span(&slowest, 1)), DType::kF32,
                                   ReduceOp::kMax));
    return slowest;
  }

 private:
  // After a barrier. A simulated clock starts all ranks at one moment.
  double StartTime(Transport& transport) {
    return sleep_ ? StartTogether(transport, kStartTag, sleep_, kLimitSeconds) : transport.Now();
  }

  // Input of every rank. Sums of small integers are exact in any order.
  static float InputAt(int64_t i) { return static_cast<float>(i % 1024); }

  float OutputAt(int64_t i) const {
    const std::vector<int64_t>& counts = request_.counts;
    const auto ranks = static_cast<float>(communicator_.size());
    switch (request_.collective) {
      case Collective::kAllReduce:
        return ranks * InputAt(i);
      case Collective::kReduceScatter:
        return ranks *
               InputAt(std::accumulate(counts.begin(), counts.begin() + communicator_.rank(), int64_t{0}) +
                       i);
      case Collective::kAllGather:
        for (int from = 0; i >= counts[from]; ++from) i -= counts[from];
        return InputAt(i);
      case Collective::kAllToAll:
        return InputAt(communicator_.rank() * request_.count + i % request_.count);
      default:
        return InputAt(i);
    }
  }

  void CheckResult(const std::string& contender) {
    for (size_t i = 0; i < output_.size(); ++i) {
      const float expected = OutputAt(static_cast<int64_t>(i));
      if (output_[i] != expected) {
        ExitOn(InvalidArgument("{}: element {} must be {}, found {}", contender, i, expected, output_[i]));
      }
    }
  }

  Communicator& communicator_;
  const SimulatedSleep sleep_ = SleepOfSmpi();
  const PlanRequest request_;
  std::vector<float> input_, output_;
  std::shared_ptr<const Plan> block_, round_robin_, candidate_;
};

// Times the best plans of the contest's size by prediction.
void Tune(Communicator& communicator, Contest& contest, const Load& load, TuningTable* table) {
  const Planner planner(communicator.topology());
  std::vector<Choice> choices = planner.Compare(contest.request(), {});
  if (choices.size() > kMaxTunedPlans) choices.resize(kMaxTunedPlans);
  for (const Choice& choice : choices) {
    contest.SetCandidate(Succeed(planner.Build(contest.request(), choice.candidate)));
    if (load.warms_up) contest.Time("candidate", load.calls);
    std::vector<double> seconds;
    for (int round = 0; round < load.rounds; ++round)
      seconds.push_back(contest.Time("candidate", load.calls));
    std::ranges::sort(seconds);
    const double median = seconds[seconds.size() / 2];
    const int64_t bytes = RequestBytes(contest.request());
    const Collective collective = contest.request().collective;
    table->Add(collective, communicator.size(), bytes, Name(choice.candidate), median);
    if (communicator.rank() == 0) {
      fmt::print("tuned {} {} {:.9g} {:.9g} {}\n", Name(collective), bytes, median, choice.seconds,
                 Name(choice.candidate));
    }
  }
}

// Processor time of this thread.
double ProcessorSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void RunRank(Transport& transport, const Load& load) {
  const auto communicator = Succeed(Communicator::Create(transport, OrderedTopology(load)));
  const bool prints = transport.rank() == 0;
  std::vector<std::string> contenders = {"plan"};
  contenders.insert(contenders.end(), load.against.begin(), load.against.end());
  TuningTable table;
  for (const int64_t bytes : load.bytes) {
    if (!load.tune.empty()) {
      for (const std::string& name : load.collectives) {
        Contest contest(*communicator, Succeed(CollectiveOf(name)), bytes);
        Tune(*communicator, contest, load, &table);
      }
      continue;
    }
    Contest contest(*communicator, Collective::kAllReduce, bytes);
    if (prints) {
      Planner planner(communicator->topology());
      fmt::print("bound {} {:.9g}\n", bytes, BoundOf(contest.request(), communicator->topology()).seconds);
      const double begin = ProcessorSeconds();
      const Candidate candidate = Succeed(planner.Choose(contest.request(), {}));
      const double chosen = ProcessorSeconds();
      const Plan plan = Succeed(planner.Build(contest.request(), candidate));
      const double built = ProcessorSeconds();
      fmt::print("algorithm {} {}\n", bytes, plan.algorithm);
      fmt::print("planning {} {:.6g}\nbuilding {} {:.6g}\n", bytes, chosen - begin, bytes, built - chosen);
    }
    for (int round = load.warms_up ? -1 : 0; round < load.rounds; ++round) {
      for (const std::string& contender : contenders) {
        const double seconds = contest.Time(contender, load.calls);
        if (prints && round >= 0) fmt::print("sample {} {} {:.9g}\n", bytes, contender, seconds);
      }
    }
  }
  if (load.tune.empty() || !prints) return;
  std::ofstream file(load.tune);
  file << table.ToJson() << "\n";
  if (!file.flush()) ExitOn(InvalidArgument("--tune: {} cannot be written", load.tune));
}

int Main(int argc, char** argv) {
  Load load;
  std::vector<std::string> tuned;
  for (const Collective collective : kTuned) tuned.emplace_back(Name(collective));
  CLI::App app("Times AllReduce over the transport of a launched job.");
  app.add_option("--topology", load.topology, "Topology file")->required();
  app.add_option("--transport", load.transport, "mpi or ucx://...; by default as the environment says");
  app.add_option("--order", load.order, "Order in which the launcher placed the ranks on the tree")
      ->check(CLI::IsMember({"block", "round-robin"}));
  app.add_option("--against", load.against, "Other contenders")
      ->delimiter(',')
      ->check(CLI::IsMember({"flat-block", "flat-round-robin", "mpi"}));
  app.add_option("--tune", load.tune, "File for a tuning table: times the plans that the planner prefers")
      ->excludes("--against");
  app.add_option("--collective", load.collectives, "Collectives of the tuning table, separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(tuned))
      ->needs("--tune");
  app.add_option("--bytes", load.bytes,
                 "Sizes of f32: of the vector, of the result of all_gather, of one rank's input of "
                 "reduce_scatter or all_to_all")
      ->delimiter(',');
  app.add_flag("--warm-up,!--no-warm-up", load.warms_up, "A first round is not reported");
  app.add_option("--rounds", load.rounds, "Number of rounds")->check(CLI::PositiveNumber);
  app.add_option("--calls", load.calls, "Calls per round and contender")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  OpenedTransport opened = Succeed(OpenTransport(load.transport));
  for (const std::string& contender : load.against) {
    if (contender == "mpi" && opened->name() != "mpi") {
      ExitOn(InvalidArgument("--against mpi needs a job of MPI; found the transport {}", opened->name()));
    }
  }
  RunRank(*opened, load);
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) { return moesaic::bench::Main(argc, argv); }
