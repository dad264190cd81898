// Predicted bytes and times of an exchange: closed formulas, a fit to measurements, and a simulation of all
// messages.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/exchange/exchange_options.h"
#include "comm/exchange/route.h"
#include "comm/exchange/traffic.h"

namespace moesaic::comm {

/// Probability that a token with `k` distinct experts, chosen uniformly among `experts`, has one of a group's
/// `in_group` experts: 1 - C(experts - in_group, k) / C(experts, k). Times the number of groups: the expected
/// number of groups hit.
double HitProbability(int experts, int in_group, int k);

/// Time of an exchange over two kinds of links that work side by side: alpha + max(inner bytes * inner beta,
/// outer bytes * outer beta). Bytes are those that one rank sends.
struct LinkTimes {
  double alpha_s = 0;
  double inner_s_per_byte = 0, outer_s_per_byte = 0;

  double Predict(double inner_bytes, double outer_bytes) const;
};
struct ExchangeSample {
  double inner_bytes = 0, outer_bytes = 0;
  double seconds = 0;
};
/// Least squares of relative errors. The samples with the largest share of outer bytes are taken as bound by
/// the outer links; every split is tried. InvalidArgument: fewer than three samples, or none of positive time
/// and bytes.
StatusOr<LinkTimes> FitLinkTimes(std::span<const ExchangeSample> samples);

/// Shape of an exchange to simulate. The gate is uniform.
struct ExchangeWorkload {
  int tokens_per_rank = 128;
  int k = 8;
  int hidden = 7168;
  uint32_t seed = 1;
};

/// Totals of all ranks.
struct ExchangeEstimate {
  double dispatch_s = 0, combine_s = 0;
  std::vector<LevelTraffic> dispatch, combine;  // by level of the topology
};

/// Tokens of a rank, routed. Reproducible for a seed.
StatusOr<TokenRoutes> UniformTokens(const Topology& topology, const ExpertMap& map,
                                    const ExchangeWorkload& workload, ReplicaChoice choice, int rank);
/// Routes of all ranks, as their exchange of routing would give them. `tokens` has one element per rank.
StatusOr<std::vector<Route>> BuildRoutes(const RouteTree& tree, const ExpertMap& map,
                                         std::span<const TokenRoutes> tokens, int segment_tokens);
/// Simulates a throughput dispatch, with its exchange of routing, and a combine.
StatusOr<ExchangeEstimate> EstimateExchange(const Topology& topology, const ExpertMap& map,
                                            const ExchangeWorkload& workload, const ExchangeOptions& options);

/// Times below which no exchange of the workload can complete, however it forwards and reduces rows: a token
/// enters a group that has one of its experts at least once, and its partial sum, or one row per slot,
/// returns through the same port. One latency of the port is added. Ids and weights are not counted.
struct ExchangeBound {
  double dispatch_s = 0, combine_s = 0;
  std::string dispatch_port, combine_port;  // name of the group whose port is the bottleneck
};
StatusOr<ExchangeBound> BoundExchange(const Topology& topology, const ExpertMap& map,
                                      const ExchangeWorkload& workload, const ExchangeOptions& options);

/// Returns the levels below the root whose groups have children, and which can forward rows.
std::vector<std::string> InnerLevels(const Topology& topology);

/// A way to forward rows and its predicted time.
struct ForwardingCandidate {
  Forwarding forwarding = Forwarding::kDirect;
  std::vector<std::string> forward_levels;
  ExchangeEstimate estimate;
};
/// Candidates, fastest first: direct, and every set of InnerLevels(). Set the first one's values in
/// ExchangeOptions.
StatusOr<std::vector<ForwardingCandidate>> RankForwardings(const Topology& topology, const ExpertMap& map,
                                                           const ExchangeWorkload& workload,
                                                           ExchangeOptions options);

}  // namespace moesaic::comm
