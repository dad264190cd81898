// Writes the work of a layout's ranks, from a checkpoint's config, for parallel_step_bench:
//   parallel_step_work MODEL --topology FILE -tp 2 -pp 8 > work.json
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/comm/bench_rank.h"
#include "checkpoint/checkpoint.h"
#include "comm/exchange/exchange_cost.h"
#include "comm/topology/topology.h"
#include "models/rank_work.h"
#include "parallel/layout.h"

namespace moesaic::bench {
namespace {

struct Flags {
  std::string model, topology, dtype = "int8", flops_type = "int8";
  double kv_bytes = 2;
  parallel::Degrees degrees;
  bool experts = false;
  int slots = 0, tokens = 128;
};

nlohmann::json Describe(const parallel::RankWork& work) {
  return {{"kv_bytes_per_token", work.kv_bytes_per_token},
          {"layers", work.layers},
          {"has_embedding", work.has_embedding},
          {"has_head", work.has_head},
          {"weight_bytes", work.weight_bytes},
          {"read_bytes", work.read_bytes},
          {"flops_per_row", work.flops_per_row},
          {"head_bytes", work.head_bytes},
          {"head_flops_per_row", work.head_flops_per_row},
          {"expert_layers", work.expert_layers},
          {"all_experts", work.all_experts},
          {"top_k", work.top_k},
          {"expert_bytes", work.expert_bytes},
          {"expert_flops_per_row", work.expert_flops_per_row}};
}

// Rows of a rank travel in eight parts at most, which overlap on their way through forwarding ranks.
int SegmentTokens(int tokens) { return std::max(comm::ExchangeOptions().segment_tokens, (tokens + 7) / 8); }

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Writes the work of a layout's ranks as JSON.");
  app.add_option("model", flags.model, "Checkpoint, or folder with a config.json")->required();
  app.add_option("--topology", flags.topology, "Topology file")->required();
  app.add_option("--dtype", flags.dtype, "Format of the weights");
  app.add_option("--flops", flags.flops_type, "FLOP/s of the devices that bound computation");
  app.add_option("--kv-bytes", flags.kv_bytes, "Bytes of a value of the KV cache");
  app.add_option("--tp", flags.degrees.tensor, "Tensor parallel degree");
  app.add_option("--pp", flags.degrees.pipeline, "Pipeline parallel degree");
  app.add_option("--dp", flags.degrees.data, "Number of replicas");
  app.add_flag("--ep", flags.experts, "Divides experts over the shards of all replicas");
  app.add_option("--expert-slots", flags.slots, "Experts with their replicas; all once by default");
  app.add_option("--tokens", flags.tokens, "Tokens of a rank for which paths of dispatches are chosen");
  CLI11_PARSE(app, argc, argv);
  if (flags.experts) flags.degrees.expert = flags.degrees.tensor * flags.degrees.data;

  const auto model = Succeed(checkpoint::Checkpoint::Open(flags.model));
  const models::WorkOfRanks work =
      Succeed(models::WorkOfRanks::Create(*model, flags.dtype, flags.kv_bytes, /*load_mtp=*/false));
  const parallel::Layout layout = Succeed(parallel::Layout::Create(flags.degrees));
  const comm::Topology topology = ReadTopology(flags.topology);
  nlohmann::json out = {{"model", flags.model},
                        {"hidden", work.spec().hidden},
                        {"flops_type", flags.flops_type},
                        {"degrees",
                         {{"tensor", flags.degrees.tensor},
                          {"pipeline", flags.degrees.pipeline},
                          {"data", flags.degrees.data},
                          {"expert", flags.degrees.expert}}},
                        {"stages", nlohmann::json::array()},
                        {"forwards", true},
                        {"forward_levels", nlohmann::json::array()},
                        {"segment_tokens", SegmentTokens(flags.tokens)}};
  parallel::RankWork first;
  for (int stage = 0; stage < flags.degrees.pipeline; ++stage) {
    const parallel::RankWork of_stage = Succeed(work.Of(layout, layout.RankAt({.stage = stage})));
    if (stage == 0) first = of_stage;
    out["stages"].push_back(Describe(of_stage));
  }
  out["expert_slots"] = flags.slots > 0 ? flags.slots : first.all_experts;
  if (flags.experts && flags.degrees.data > 1) {
    const int ranks = flags.degrees.tensor * flags.degrees.data;
    std::vector<int> of_stage;
    for (int replica = 0; replica < flags.degrees.data; ++replica) {
      for (int shard = 0; shard < flags.degrees.tensor; ++shard) {
        of_stage.push_back(layout.RankAt({.replica = replica, .shard = shard}));
      }
    }
    const auto candidates = Succeed(comm::RankForwardings(
        Succeed(topology.Selected(of_stage)), comm::ExpertMap::Even(first.all_experts, ranks),
        {.tokens_per_rank = flags.tokens, .k = first.top_k, .hidden = work.spec().hidden},
        {.segment_tokens = SegmentTokens(flags.tokens)}));
    out["forwards"] = candidates.front().forwarding == comm::Forwarding::kHierarchical;
    out["forward_levels"] = candidates.front().forward_levels;
  }
  fmt::print("{}\n", out.dump(1));
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) { return moesaic::bench::Main(argc, argv); }
