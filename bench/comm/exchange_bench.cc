// Times MoE dispatch and combine, forwarded within groups, compared with direct messages to every rank, and
// with the bound of the topology. The ways alternate in one run; the time of a round is that of the slowest
// rank. Experts take no time.
//   direct               one message per destination rank
//   direct-round-robin   the same for ranks that are dealt to the topmost groups in turn
//   comm_exchange_bench --ranks 8 --nodes 2                                    threads of this process
//   comm_exchange_bench --topology topologies/accelerators-4x8-200gbit.json --virtual    threads, time of the
//   topology
//   mpirun -n 8 comm_exchange_bench --transport mpi --nodes 2                       processes of a job
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "bench/comm/bench_rank.h"
#include "comm/exchange/exchange.h"
#include "comm/exchange/exchange_cost.h"
#include "comm/explain/explanation.h"
#include "comm/topology/topology_builder.h"
#include "comm/transport/local_transport.h"
#include "comm/transport/open_transport.h"

namespace moesaic::bench {
namespace {

using namespace comm;

struct Load {
  std::string topology, payload = "bf16", transport = "threads";
  int ranks = 8, nodes = 2;
  bool round_robin = false, virtual_time = false, low_latency = false, warms_up = true,
       levels_by_cost = false;
  int experts = 256, rounds = 11, segment_tokens = 16, direct_segment_tokens = 0;
  ExchangeWorkload workload;
  std::vector<std::string> forward_levels;
  std::vector<std::string> peers = {"direct"};
  SimulatedSleep sleep = SleepOfSmpi();
};

constexpr Tag kControlTag = 1;
constexpr double kLimitSeconds = 600;

double Maximum(Transport& transport, double value) {
  return MaximumOfAll(transport, kControlTag, value, kLimitSeconds);
}

Topology MakeTopology(const Load& load, int ranks) {
  if (!load.topology.empty()) return ReadTopology(load.topology);
  // Links of 1 Gbit/s between nodes; only virtual time uses the numbers.
  const Link outer = {.latency_s = 50e-6, .bytes_per_s = 125e6},
             inner = {.latency_s = 1e-6, .bytes_per_s = 5e9};
  TopologyBuilder builder;
  const int root = builder.AddGroup(-1, "cluster", outer, 0);
  std::vector<std::vector<int>> devices(load.nodes);  // by node
  for (int node = 0, device = 0; node < load.nodes; ++node) {
    const int group = builder.AddGroup(root, "node", inner, 0);
    for (int i = 0; i < ranks / load.nodes + (node < ranks % load.nodes ? 1 : 0); ++i) {
      builder.AddDevice(group, 0, 0);
      devices[node].push_back(device++);
    }
  }
  std::vector<int> order;
  for (size_t i = 0; load.round_robin && static_cast<int>(order.size()) < ranks; ++i) {
    for (const auto& of_node : devices) {
      if (i < of_node.size()) order.push_back(of_node[i]);
    }
  }
  return builder.Finish("nodes", "command line", {DeviceType{}}, order);
}

struct Side {
  std::string name;
  std::unique_ptr<ExpertExchange> exchange = nullptr;
  std::vector<double> dispatch_s = {}, combine_s = {}, total_s = {};
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void RunOnce(Transport& transport, const Load& load, Side& side, const TopK& topk,
             std::span<const tensor::BF16> x, bool record) {
  std::vector<tensor::BF16> out(x.size());
  const double start = StartTogether(transport, kControlTag, load.sleep, kLimitSeconds);
  StatusOr<Dispatched> got = Cancelled("not run");
  if (load.low_latency) {
    auto pending = Succeed(side.exchange->BeginDispatch(RowsOf(x), topk));
    got = Succeed(pending.Finish());
  } else {
    got = Succeed(side.exchange->Dispatch(RowsOf(x), topk));
  }
  const double dispatched = Maximum(transport, transport.Now() - start);
  const std::vector<tensor::BF16> y(static_cast<size_t>(got->rows()) * load.workload.hidden);
  const double resumed = StartTogether(transport, kControlTag, load.sleep, kLimitSeconds);
  ExitOn(side.exchange->Combine(RowsOf(std::span(y)), got->handle(), OutputOf(std::span(out))));
  const double combined = Maximum(transport, transport.Now() - resumed);
  if (!record) return;
  side.dispatch_s.push_back(dispatched);
  side.combine_s.push_back(combined);
  side.total_s.push_back(dispatched + combined);
}

ExchangeOptions OptionsOf(const Load& load) {
  return {.dispatch_payload = load.payload == "fp8"    ? Payload::kF8E4M3
                              : load.payload == "int8" ? Payload::kInt8
                                                       : Payload::kBf16,
          .forward_levels = load.forward_levels,
          .segment_tokens = load.segment_tokens,
          .low_latency_tokens = std::max(1, load.workload.tokens_per_rank),
          .low_latency_slots = load.workload.k,
          .time_limit_s = 300};
}

// Returns the expected rows of one token that enter a group, for a uniform gate: one for each topmost group
// in it that forwards rows, or for each rank outside of those, that has one of the token's experts.
double RowsInto(const Topology& topology, int group, const Load& load, Forwarding forwarding) {
  const Group& at = topology.groups()[group];
  const bool forwards = forwarding != Forwarding::kDirect &&
                        (load.forward_levels.empty() ||
                         std::ranges::find(load.forward_levels, at.level) != load.forward_levels.end());
  if (forwards || at.children.empty()) {
    const double experts = static_cast<double>(load.experts * at.ranks.size()) / topology.ranks();
    return HitProbability(load.experts, static_cast<int>(std::lround(experts)), load.workload.k);
  }
  double rows = 0;
  for (const int child : at.children) rows += RowsInto(topology, child, load, forwarding);
  return rows;
}

// Expected rows that cross the ports of the root's children.
double ExpectedRows(const Topology& topology, const Load& load, Forwarding forwarding) {
  double rows = 0;
  for (const int to : topology.groups()[0].children) {
    const auto ranks = static_cast<double>(topology.groups()[to].ranks.size());
    rows +=
        (topology.ranks() - ranks) * load.workload.tokens_per_rank * RowsInto(topology, to, load, forwarding);
  }
  return rows;
}

// Bytes of all ranks by level, on rank 0.
void PrintTraffic(Transport& transport, const Side& side, const char* phase,
                  std::span<const LevelTraffic> levels, double expected_rows, int64_t row_bytes) {
  for (const LevelTraffic& level : levels) {
    std::vector<double> sums = {static_cast<double>(level.messages), static_cast<double>(level.rows),
                                static_cast<double>(level.row_bytes),
                                static_cast<double>(level.routing_bytes)};
    sums = SumOfAll(transport, kControlTag, std::move(sums), kLimitSeconds);
    if (transport.rank() > 0) continue;
    fmt::print("{:10} {:9} {:10} {:9.0f} messages {:10.0f} rows {:10.3f} MB rows {:8.3f} MB routing",
               side.name, phase, level.level, sums[0], sums[1], sums[2] / 1e6, sums[3] / 1e6);
    if (&level == levels.data()) {
      const double expected_bytes = expected_rows * static_cast<double>(row_bytes);
      fmt::print(", by the formula {:.3f} MB rows (ratio {:.4f})", expected_bytes / 1e6,
                 sums[2] / expected_bytes);
    }
    fmt::print("\n");
  }
}

// Experts of the ranks of a job whose ranks are dealt to the topmost groups in turn.
ExpertMap DealtExperts(const Topology& topology, int experts) {
  const ExpertMap even = ExpertMap::Even(experts, topology.ranks());
  const std::vector<int> order = OrderedRanks(topology, RankOrder::kRoundRobin);
  std::vector<std::vector<int>> by_rank(topology.ranks());
  for (int i = 0; i < even.physical_experts(); ++i)
    by_rank[order[even.physical(i).rank]].push_back(even.physical(i).expert);
  return Succeed(ExpertMap::Create(experts, by_rank));
}

std::vector<Side> MakeSides(Transport& transport, const Topology& topology, const Load& load,
                            ExchangeOptions options) {
  const auto make = [&](const std::string& name, const ExpertMap& map) {
    auto exchange = Succeed(ExpertExchange::Create(transport, topology, map, load.workload.hidden, options));
    options.first_tag += Tag{1} << kExchangeTagBits;
    return Side{.name = name, .exchange = std::move(exchange)};
  };
  std::vector<Side> sides;
  sides.push_back(make("forwarded", ExpertMap::Even(load.experts, transport.size())));
  options.forwarding = Forwarding::kDirect;
  if (load.direct_segment_tokens > 0) options.segment_tokens = load.direct_segment_tokens;
  for (const std::string& peer : load.peers) {
    sides.push_back(make(peer, peer == "direct" ? ExpertMap::Even(load.experts, transport.size())
                                                : DealtExperts(topology, load.experts)));
  }
  return sides;
}

void PrintRatios(const std::vector<Side>& sides, const ExchangeBound& bound) {
  for (size_t i = 1; i < sides.size(); ++i) {
    std::vector<double> ratios;
    for (size_t round = 0; round < sides[0].total_s.size(); ++round)
      ratios.push_back(sides[i].total_s[round] / sides[0].total_s[round]);
    std::sort(ratios.begin(), ratios.end());
    fmt::print("{} / forwarded {:.2f} (median of {} pairs, {:.2f} to {:.2f})\n", sides[i].name,
               Median(ratios), ratios.size(), ratios.front(), ratios.back());
  }
  const double bound_s = bound.dispatch_s + bound.combine_s;
  fmt::print("bound {:.3f} ms ({}), forwarded {:.1f}% of the bound", 1e3 * bound_s, bound.dispatch_port,
             100 * bound_s / Median(sides[0].total_s));
  for (size_t i = 1; i < sides.size(); ++i)
    fmt::print(", {} / bound {:.2f}", sides[i].name, Median(sides[i].total_s) / bound_s);
  fmt::print("\n");
}

void RunRank(Transport& transport, const Topology& topology, const Load& load) {
  const ExchangeOptions options = OptionsOf(load);
  std::vector<Side> sides = MakeSides(transport, topology, load, options);
  const ExpertMap& map = sides[0].exchange->map();
  const TokenRoutes tokens =
      Succeed(UniformTokens(topology, map, load.workload, ReplicaChoice::kNearest, transport.rank()));
  std::vector<int32_t> ids;
  for (const RouteEntry& entry : tokens.entries) ids.push_back(map.physical(entry.physical).expert);
  const std::vector<float> weights(ids.size(), 1.0F / static_cast<float>(load.workload.k));
  std::vector<tensor::BF16> x(static_cast<size_t>(load.workload.tokens_per_rank) * load.workload.hidden);
  std::mt19937 random(static_cast<uint32_t>(transport.rank()));
  for (tensor::BF16& value : x) value = tensor::ToBF16(static_cast<float>(random() % 2000) / 1000.0F - 1);
  const TopK topk = {load.workload.tokens_per_rank, load.workload.k, ids, weights, {}};
  for (int round = load.warms_up ? -1 : 0; round < load.rounds; ++round) {  // the first one warms up
    for (Side& side : sides) {
      side.exchange->ResetTraffic();
      RunOnce(transport, load, side, topk, x, round >= 0);
    }
  }
  for (const Side& side : sides) {
    const double rows =
        ExpectedRows(topology, load, &side == sides.data() ? Forwarding::kHierarchical : Forwarding::kDirect);
    PrintTraffic(transport, side, "dispatch", side.exchange->dispatch_traffic(), rows,
                 WireRowBytes(options.dispatch_payload, load.workload.hidden));
    PrintTraffic(transport, side, "combine", side.exchange->combine_traffic(), rows,
                 WireRowBytes(options.combine_payload, load.workload.hidden));
  }
  if (transport.rank() > 0) return;
  for (const Side& side : sides) {
    fmt::print("{:10} dispatch {:.3f} ms, combine {:.3f} ms, both {:.3f} ms ({:.3f} to {:.3f})\n", side.name,
               1e3 * Median(side.dispatch_s), 1e3 * Median(side.combine_s), 1e3 * Median(side.total_s),
               1e3 * *std::min_element(side.total_s.begin(), side.total_s.end()),
               1e3 * *std::max_element(side.total_s.begin(), side.total_s.end()));
  }
  PrintRatios(sides, Succeed(BoundExchange(topology, map, load.workload, options)));
}

// Returns the set of inner levels that the cost model finds fastest, even where direct messages are.
uint32_t BestLevels(const Topology& topology, const Load& load) {
  const auto ranked = Succeed(RankForwardings(topology, ExpertMap::Even(load.experts, topology.ranks()),
                                              load.workload, OptionsOf(load)));
  const auto best = std::ranges::find(ranked, Forwarding::kHierarchical, &ForwardingCandidate::forwarding);
  if (best == ranked.end()) ExitOn(InvalidArgument("{} has no levels that forward rows", load.topology));
  const std::vector<std::string> levels = InnerLevels(topology);
  uint32_t set = 0;
  for (size_t i = 0; i < levels.size(); ++i) {
    if (std::ranges::find(best->forward_levels, levels[i]) != best->forward_levels.end()) set |= 1U << i;
  }
  return set;
}

void ForwardAt(const Topology& topology, uint32_t set, Load* load) {
  const std::vector<std::string> levels = InnerLevels(topology);
  for (size_t i = 0; i < levels.size(); ++i) {
    if ((set >> i & 1U) != 0) load->forward_levels.push_back(levels[i]);
  }
}

void PrintLoad(const Topology& topology, const Load& load) {
  fmt::print(
      "{} ranks, {} experts, top-{}, hidden {}, {} tokens per rank, {}; rows are forwarded at {}\n",
      topology.ranks(), load.experts, load.workload.k, load.workload.hidden, load.workload.tokens_per_rank,
      load.payload,
      load.forward_levels.empty() ? "all levels" : fmt::format("{}", fmt::join(load.forward_levels, ", ")));
}

int Main(int argc, char** argv) {
  Load load;
  CLI::App app("Times MoE dispatch and combine, forwarded and direct.");
  app.add_option("--topology", load.topology, "Topology file; the default is --nodes equal nodes");
  app.add_option("--ranks", load.ranks, "Number of threads");
  app.add_option("--nodes", load.nodes, "Number of nodes of the default topology")
      ->check(CLI::PositiveNumber);
  app.add_flag("--round-robin", load.round_robin, "Ranks of the default topology alternate between nodes");
  app.add_flag("--virtual", load.virtual_time, "Messages take the time of the topology");
  app.add_option("--transport", load.transport,
                 "threads of this process, or the transport of a launched job: mpi, ucx://...");
  app.add_flag("--low-latency", load.low_latency,
               "Dispatches in the low-latency mode, which is direct for both sides");
  auto* levels = app.add_option("--levels", load.forward_levels, "Levels that forward rows; all by default");
  app.add_flag("--levels-by-cost", load.levels_by_cost,
               "Rows are forwarded at the levels that are predicted best")
      ->excludes(levels);
  app.add_option("--against", load.peers, "Other ways, separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember({"direct", "direct-round-robin"}));
  app.add_flag("--warm-up,!--no-warm-up", load.warms_up, "A first round is not reported");
  app.add_option("--payload", load.payload, "Dispatch payload")
      ->check(CLI::IsMember({"bf16", "int8", "fp8"}));
  app.add_option("--experts", load.experts, "Routed experts")->check(CLI::PositiveNumber);
  app.add_option("--top-k", load.workload.k, "Experts per token");
  app.add_option("--hidden", load.workload.hidden, "Elements per row")->check(CLI::PositiveNumber);
  app.add_option("--tokens", load.workload.tokens_per_rank, "Tokens per rank");
  app.add_option("--segment", load.segment_tokens, "Tokens that travel together")->check(CLI::PositiveNumber);
  app.add_option("--direct-segment", load.direct_segment_tokens,
                 "The same for direct messages, which gain nothing from segments; 0: equal to --segment");
  app.add_option("--rounds", load.rounds, "Number of measured pairs")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (load.transport != "threads") {
    const OpenedTransport opened = Succeed(OpenTransport(load.transport));
    const Topology topology = MakeTopology(load, opened->size());
    if (load.levels_by_cost) {
      const double set = opened->rank() == 0 ? BestLevels(topology, load) : 0;
      ForwardAt(topology, static_cast<uint32_t>(Maximum(*opened, set)), &load);
    }
    if (opened->rank() == 0) PrintLoad(topology, load);
    RunRank(*opened, topology, load);
    return 0;
  }
  const Topology topology = MakeTopology(load, load.ranks);
  if (load.levels_by_cost) ForwardAt(topology, BestLevels(topology, load), &load);
  PrintLoad(topology, load);
  LocalJob job(topology.ranks(), {.topology = load.virtual_time ? &topology : nullptr});
  if (load.virtual_time) load.sleep = [&job](int rank, double seconds) { job.Compute(rank, seconds); };
  RunRanks(job, [&](Transport& transport) { RunRank(transport, topology, load); });
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) { return moesaic::bench::Main(argc, argv); }
