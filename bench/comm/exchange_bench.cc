// Times MoE dispatch and combine, forwarded within groups, compared with direct messages to every rank. Both
// ways alternate in one run; the time of a round is that of the slowest rank. Experts take no time.
//   comm_exchange_bench --ranks 8 --nodes 2                                    threads of this process
//   comm_exchange_bench --topology topologies/accelerators-4x8-200gbit.json --virtual    threads, time of the
//   topology
//   mpirun -n 8 comm_exchange_bench --transport mpi --nodes 2                       processes of a job
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "base/check.h"
#include "bench/comm/bench_rank.h"
#include "comm/exchange/exchange.h"
#include "comm/exchange/exchange_cost.h"
#include "comm/topology/topology_builder.h"
#include "comm/transport/local_transport.h"
#include "comm/transport/open_transport.h"

namespace moesaic::bench {
namespace {

using namespace comm;

struct Load {
  std::string topology, payload = "bf16", transport = "threads";
  int ranks = 8, nodes = 2;
  bool round_robin = false, virtual_time = false, low_latency = false;
  int experts = 256, rounds = 11, segment_tokens = 16;
  ExchangeWorkload workload;
  std::vector<std::string> forward_levels;
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
  const char* name = "";
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
  Maximum(transport, 0);
  const double start = transport.Now();
  StatusOr<Dispatched> got = Cancelled("not run");
  if (load.low_latency) {
    auto pending = Succeed(side.exchange->BeginDispatch(RowsOf(x), topk));
    got = Succeed(pending.Finish());
  } else {
    got = Succeed(side.exchange->Dispatch(RowsOf(x), topk));
  }
  const double dispatched = Maximum(transport, transport.Now() - start);
  const std::vector<tensor::BF16> y(static_cast<size_t>(got->rows()) * load.workload.hidden);
  Maximum(transport, 0);
  const double resumed = transport.Now();
  const Status status = side.exchange->Combine(RowsOf(std::span(y)), got->handle(), OutputOf(std::span(out)));
  if (!status.ok()) fmt::print(stderr, "comm_exchange_bench: {}\n", Message(status));
  MOESAIC_CHECK(status.ok());
  const double combined = Maximum(transport, transport.Now() - resumed);
  if (!record) return;
  side.dispatch_s.push_back(dispatched);
  side.combine_s.push_back(combined);
  side.total_s.push_back(dispatched + combined);
}

// Expected rows that cross the ports of the root's children, of a uniform gate: one per token and child, or
// per token and rank, that has one of its experts.
double ExpectedRows(const Topology& topology, const Load& load, Forwarding forwarding) {
  const double experts_per_rank = static_cast<double>(load.experts) / topology.ranks();
  const auto hits = [&](double ranks) {
    return HitProbability(load.experts, static_cast<int>(std::lround(ranks * experts_per_rank)),
                          load.workload.k);
  };
  double rows = 0;
  for (const int to : topology.groups()[0].children) {
    const auto ranks = static_cast<double>(topology.groups()[to].ranks.size());
    const double tokens = (topology.ranks() - ranks) * load.workload.tokens_per_rank;
    rows += tokens * (forwarding == Forwarding::kDirect ? ranks * hits(1) : hits(ranks));
  }
  return rows;
}

// Bytes of all ranks by level, on rank 0.
void PrintTraffic(Transport& transport, const Side& side, const char* phase,
                  std::span<const LevelTraffic> levels, double expected_rows) {
  for (const LevelTraffic& level : levels) {
    std::vector<double> sums = {static_cast<double>(level.messages), static_cast<double>(level.rows),
                                static_cast<double>(level.row_bytes),
                                static_cast<double>(level.routing_bytes)};
    sums = SumOfAll(transport, kControlTag, std::move(sums), kLimitSeconds);
    if (transport.rank() > 0) continue;
    fmt::print("{:10} {:9} {:10} {:9.0f} messages {:10.0f} rows {:10.3f} MB rows {:8.3f} MB routing",
               side.name, phase, level.level, sums[0], sums[1], sums[2] / 1e6, sums[3] / 1e6);
    if (&level == levels.data()) fmt::print(", rows {:.4f} of the formula", sums[1] / expected_rows);
    fmt::print("\n");
  }
}

void RunRank(Transport& transport, const Topology& topology, const Load& load) {
  const ExpertMap map = ExpertMap::Even(load.experts, transport.size());
  ExchangeOptions options = {.segment_tokens = load.segment_tokens,
                             .low_latency_tokens = std::max(1, load.workload.tokens_per_rank),
                             .low_latency_slots = load.workload.k,
                             .time_limit_s = 300};
  options.dispatch_payload = load.payload == "fp8"    ? Payload::kF8E4M3
                             : load.payload == "int8" ? Payload::kInt8
                                                      : Payload::kBf16;
  options.forward_levels = load.forward_levels;
  Side sides[2] = {{.name = "forwarded"}, {.name = "direct"}};
  sides[0].exchange =
      Succeed(ExpertExchange::Create(transport, topology, map, load.workload.hidden, options));
  options.forwarding = Forwarding::kDirect;
  options.first_tag += Tag{1} << kExchangeTagBits;
  sides[1].exchange =
      Succeed(ExpertExchange::Create(transport, topology, map, load.workload.hidden, options));
  const TokenRoutes tokens =
      Succeed(UniformTokens(topology, map, load.workload, ReplicaChoice::kNearest, transport.rank()));
  std::vector<int32_t> ids;
  for (const RouteEntry& entry : tokens.entries) ids.push_back(map.physical(entry.physical).expert);
  const std::vector<float> weights(ids.size(), 1.0F / static_cast<float>(load.workload.k));
  std::vector<tensor::BF16> x(static_cast<size_t>(load.workload.tokens_per_rank) * load.workload.hidden);
  std::mt19937 random(static_cast<uint32_t>(transport.rank()));
  for (tensor::BF16& value : x) value = tensor::ToBF16(static_cast<float>(random() % 2000) / 1000.0F - 1);
  const TopK topk = {load.workload.tokens_per_rank, load.workload.k, ids, weights, {}};
  for (int round = -1; round < load.rounds; ++round) {  // the first one warms up
    for (Side& side : sides) {
      side.exchange->ResetTraffic();
      RunOnce(transport, load, side, topk, x, round >= 0);
    }
  }
  for (const Side& side : sides) {
    const double rows =
        ExpectedRows(topology, load, &side == sides ? Forwarding::kHierarchical : Forwarding::kDirect);
    PrintTraffic(transport, side, "dispatch", side.exchange->dispatch_traffic(), rows);
    PrintTraffic(transport, side, "combine", side.exchange->combine_traffic(), rows);
  }
  if (transport.rank() > 0) return;
  for (const Side& side : sides) {
    fmt::print("{:10} dispatch {:.3f} ms, combine {:.3f} ms, both {:.3f} ms ({:.3f} to {:.3f})\n", side.name,
               1e3 * Median(side.dispatch_s), 1e3 * Median(side.combine_s), 1e3 * Median(side.total_s),
               1e3 * *std::min_element(side.total_s.begin(), side.total_s.end()),
               1e3 * *std::max_element(side.total_s.begin(), side.total_s.end()));
  }
  std::vector<double> ratios;
  for (int round = 0; round < load.rounds; ++round)
    ratios.push_back(sides[1].total_s[round] / sides[0].total_s[round]);
  std::sort(ratios.begin(), ratios.end());
  fmt::print("direct / forwarded {:.2f} (median of {} pairs, {:.2f} to {:.2f})\n", Median(ratios),
             load.rounds, ratios.front(), ratios.back());
}

void PrintLoad(const Topology& topology, const Load& load) {
  fmt::print("{} ranks, {} experts, top-{}, hidden {}, {} tokens per rank, {}\n", topology.ranks(),
             load.experts, load.workload.k, load.workload.hidden, load.workload.tokens_per_rank,
             load.payload);
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
  app.add_option("--levels", load.forward_levels, "Levels that forward rows; all by default");
  app.add_option("--payload", load.payload, "Dispatch payload")
      ->check(CLI::IsMember({"bf16", "int8", "fp8"}));
  app.add_option("--experts", load.experts, "Routed experts")->check(CLI::PositiveNumber);
  app.add_option("--top-k", load.workload.k, "Experts per token");
  app.add_option("--hidden", load.workload.hidden, "Elements per row")->check(CLI::PositiveNumber);
  app.add_option("--tokens", load.workload.tokens_per_rank, "Tokens per rank");
  app.add_option("--segment", load.segment_tokens, "Tokens that travel together")->check(CLI::PositiveNumber);
  app.add_option("--rounds", load.rounds, "Number of measured pairs")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (load.transport != "threads") {
    const OpenedTransport opened = Succeed(OpenTransport(load.transport));
    const Topology topology = MakeTopology(load, opened->size());
    if (opened->rank() == 0) PrintLoad(topology, load);
    RunRank(*opened, topology, load);
    return 0;
  }
  const Topology topology = MakeTopology(load, load.ranks);
  PrintLoad(topology, load);
  RunRanks(topology.ranks(), [&](Transport& transport) { RunRank(transport, topology, load); },
           {.topology = load.virtual_time ? &topology : nullptr});
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) { return moesaic::bench::Main(argc, argv); }
