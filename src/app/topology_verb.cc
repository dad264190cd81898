// `moesaic topology explain FILE` predicts collectives on a cluster; `moesaic topology probe` measures one.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "app/collective_tuning.h"
#include "app/input.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/table.h"
#include "app/verb.h"
#include "comm/explain/explanation.h"
#include "comm/explain/tree_svg.h"
#include "comm/probe/link_probe.h"
#include "comm/probe/rank_place.h"
#include "comm/transport/open_transport.h"
#include "runtime/atomic_file.h"
#include "runtime/topology.h"

namespace moesaic::app {
namespace {

constexpr std::pair<const char*, comm::Collective> kCollectives[] = {
    {"all_reduce", comm::Collective::kAllReduce},         {"all_gather", comm::Collective::kAllGather},
    {"reduce_scatter", comm::Collective::kReduceScatter}, {"all_to_all", comm::Collective::kAllToAll},
    {"broadcast", comm::Collective::kBroadcast},          {"barrier", comm::Collective::kBarrier},
};
constexpr const char* kNoCollective = "none";
constexpr int kMaxThreads = 16;  // ranks of a probe without --ranks

struct TopologyFlags {
  std::string action, file;
  std::vector<std::string> collectives = {"all_reduce", "all_gather", "all_to_all"};
  std::vector<int64_t> sizes = {16 << 10, 1 << 20, 64 << 20};
  int ranks = 0;
  std::string order = "block";
  std::string svg, tuning;
  bool json = false;
  std::string out, transport, name = "probed";
};

std::string RowSize(comm::Collective collective, int64_t bytes) {
  return collective == comm::Collective::kBarrier ? "-" : FormatBytes(static_cast<double>(bytes));
}

// The first --ranks devices, in the order that --order names.
StatusOr<comm::Topology> Placed(const comm::Topology& file, const TopologyFlags& options) {
  if (options.ranks > file.ranks()) {
    return InvalidArgument("{} has {} devices, fewer than --ranks {}", options.file, file.ranks(),
                           options.ranks);
  }
  const auto order = options.order == "block" ? comm::RankOrder::kBlock : comm::RankOrder::kRoundRobin;
  std::vector<int> ranks = comm::OrderedRanks(file, order);
  if (options.ranks > 0) ranks.resize(options.ranks);
  return file.Selected(ranks);
}

std::string_view FlagName(comm::Collective collective) {
  for (const auto& [name, named] : kCollectives) {
    if (named == collective) return name;
  }
  return comm::Name(collective);
}

StatusOr<std::vector<comm::Explanation>> Explanations(
    const comm::Topology& topology, const TopologyFlags& options,
    const std::shared_ptr<const comm::TuningTable>& tuning) {
  std::vector<comm::Explanation> rows;
  const InterruptGuard guard;
  Progress progress("comparing plans");
  int64_t done = 0;
  const auto total = static_cast<int64_t>(options.collectives.size() * options.sizes.size());
  for (const auto& [name, collective] : kCollectives) {
    if (std::find(options.collectives.begin(), options.collectives.end(), name) == options.collectives.end())
      continue;
    for (const int64_t bytes : options.sizes) {
      progress.Show(done++, total, name);
      if (Interrupted()) return Cancelled("interrupted");
      ASSIGN_OR_RETURN(comm::Explanation row, comm::Explain(topology, collective, bytes, tuning));
      rows.push_back(std::move(row));
      if (collective == comm::Collective::kBarrier) break;  // has no size
    }
  }
  return rows;
}

// The column of measured times is printed with --tuning only.
std::string ExplanationTable(const std::vector<comm::Explanation>& explanations, bool has_tuning) {
  std::vector<std::vector<std::string>> rows = {{"collective", "size", "bound", "predicted", "of bound",
                                                 "busiest port", "busy", "over flat block",
                                                 "over flat round-robin"}};
  if (has_tuning) rows[0].push_back("measured");
  rows[0].push_back("algorithm");
  for (const comm::Explanation& row : explanations) {
    rows.push_back({std::string(FlagName(row.collective)), RowSize(row.collective, row.bytes),
                    comm::TimeText(row.bound.seconds), comm::TimeText(row.seconds),
                    comm::ShareText(row.bound.seconds, row.seconds),
                    row.bottleneck.empty() ? "-" : row.bottleneck,
                    row.bottleneck.empty() ? "-" : comm::ShareText(row.busy, 1),
                    comm::FactorText(row.flat_block_s, row.seconds),
                    comm::FactorText(row.flat_round_robin_s, row.seconds)});
    if (has_tuning) rows.back().push_back(row.measured_s > 0 ? comm::TimeText(row.measured_s) : "-");
    rows.back().push_back(row.algorithm);
  }
  return FormatTable(rows, /*markdown=*/false);
}

std::string ExplanationJson(const comm::Topology& topology,
                            const std::vector<comm::Explanation>& explanations, bool has_tuning) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const comm::Explanation& row : explanations) {
    rows.push_back({{"collective", FlagName(row.collective)},
                    {"bytes", row.bytes},
                    {"bound_s", row.bound.seconds},
                    {"bound_by", row.bound.bottleneck},
                    {"predicted_s", row.seconds},
                    {"share_of_bound", row.share()},
                    {"busiest_port", row.bottleneck},
                    {"busy", row.busy},
                    {"flat_block_s", row.flat_block_s},
                    {"flat_round_robin_s", row.flat_round_robin_s},
                    {"algorithm", row.algorithm}});
    if (!has_tuning) continue;
    nlohmann::ordered_json& measured = rows.back()["measured_s"];  // null unless it is set
    if (row.measured_s > 0) measured = row.measured_s;
  }
  const nlohmann::ordered_json all = {{"name", topology.name()},
                                      {"source", topology.origin()},
                                      {"ranks", topology.ranks()},
                                      {"collectives", rows}};
  return all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

Status RunExplain(const TopologyFlags& options) {
  ASSIGN_OR_RETURN(const std::string text, ReadInput(options.file));
  ASSIGN_OR_RETURN(const comm::Topology file, comm::Topology::Parse(text, InputName(options.file)));
  ASSIGN_OR_RETURN(const comm::Topology topology, Placed(file, options));
  ASSIGN_OR_RETURN(const std::shared_ptr<const comm::TuningTable> tuning,
                   ReadCollectiveTuning(options.tuning));
  // Refused arguments leave no picture and no half of an output.
  const bool compares = options.collectives != std::vector<std::string>{kNoCollective};
  if (const Status status = comm::CheckExplained(topology); compares && !status.ok()) {
    return InvalidArgument("{}; use --ranks {}, or --collective {} for the tree alone", Message(status),
                           comm::kMaxExplainedRanks, kNoCollective);
  }
  if (!options.svg.empty()) {
    ASSIGN_OR_RETURN(const std::string svg, comm::TreeSvg(topology));
    RETURN_IF_ERROR(runtime::WriteFileAtomically(options.svg, svg));
  }
  if (!options.json) {
    Print("{}\nranks: {}; values: {}\n\n{}", topology.name(), topology.ranks(), topology.origin(),
          comm::TreeText(topology));
    if (!compares) return OkStatus();
    Print("\n");
  }
  ASSIGN_OR_RETURN(const std::vector<comm::Explanation> rows, Explanations(topology, options, tuning));
  const bool has_tuning = tuning != nullptr;
  WriteOutput(options.json ? ExplanationJson(topology, rows, has_tuning)
                           : ExplanationTable(rows, has_tuning));
  return OkStatus();
}

Status RunProbe(const TopologyFlags& options) {
  RETURN_IF_ERROR(Annotate(comm::Topology::CheckName(options.name), "--name"));
  ASSIGN_OR_RETURN(const comm::OpenedTransport transport, comm::OpenTransport(options.transport));
  const InterruptGuard guard;
  std::optional<comm::Topology> probed;
  {
    Progress progress("measuring links");
    comm::ProbeOptions probe{.name = options.name};
    probe.progress = [&](int done, int total) {
      progress.Show(done, total, fmt::format("{} of {} pairs", done, total));
      return !Interrupted();
    };
    if (transport->size() > 1) {
      if (options.ranks != 0)
        return InvalidArgument("--ranks is for threads; the job has {} ranks", transport->size());
      probe.interrupted = Interrupted;
      ASSIGN_OR_RETURN(probed, comm::ProbeLinks(*transport, probe));
      if (!probed.has_value()) return OkStatus();  // not rank 0
    } else {
      const int cores = std::min(runtime::DetectTopology().cores, kMaxThreads);
      ASSIGN_OR_RETURN(probed, comm::ProbeThreads(options.ranks > 0 ? options.ranks : cores, probe));
    }
  }
  for (const std::string& fact : comm::MachineFacts()) Tell("{}\n", fact);
  if (options.out.empty()) {
    WriteOutput(probed->ToJson());
    return OkStatus();
  }
  RETURN_IF_ERROR(runtime::WriteFileAtomically(options.out, probed->ToJson()));
  Print("{}\nwritten to {}\n", comm::TreeText(*probed), options.out);
  return OkStatus();
}

void AddExplainFlags(Verb& verb, TopologyFlags& options) {
  const std::string group = "Flags of explain";
  std::vector<std::string> names;
  for (const auto& [name, collective] : kCollectives) names.emplace_back(name);
  names.emplace_back(kNoCollective);
  verb.AddOption("--collective", options.collectives,
                 "Collective operations, separated by commas; none: print the tree only")
      .Delimiter(',')
      .OneValue()
      .OneOf(names)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--size", options.sizes,
                 "Sizes of the vector, e.g. 64KiB,1MiB: one rank's input or output, the larger one")
      .Delimiter(',')
      .OneValue()
      .Bytes()
      .Range(int64_t{0}, int64_t{1} << 40)
      .DefaultText("16KiB,1MiB,64MiB")
      .Group(group);
  verb.AddOption("--order", options.order, "Placement of ranks: fill nodes, or deal ranks to them in turn")
      .OneOf({"block", "round-robin"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--tuning", options.tuning,
                 "File of measured times, by which plans are chosen where it has them; comm_all_reduce_bench "
                 "--tune writes it")
      .Check(CheckExistingInput)
      .Group(group);
  verb.AddOption("--svg", options.svg, "File for a picture of the tree").Group(group);
  verb.AddFlag("--json", options.json, "Print JSON").Group(group);
}

}  // namespace

void AddTopology(Verb& root, VerbRun& run) {
  auto options = std::make_shared<TopologyFlags>();
  Verb verb = root.AddVerb("topology", "Describe a cluster: predict collectives on it, or measure it");
  verb.AddOption("ACTION", options->action, "explain a file, or probe this machine or job")
      .OneOf({"explain", "probe"})
      .Required();
  verb.AddOption("FILE", options->file, "Topology file to explain").Check(CheckExistingInput);
  verb.AddOption("--ranks", options->ranks,
                 "explain: first devices of the order; probe: threads of this machine; "
                 "default: all")
      .Range(1, 65536);
  AddExplainFlags(verb, *options);
  const std::string group = "Flags of probe";
  verb.AddOption("-o,--out", options->out, "File to write instead of standard output").Group(group);
  verb.AddOption("--transport", options->transport,
                 "local (threads of this machine), mpi or ucx://HOST:PORT?rank=R&size=N; default: UCX if "
                 "MOESAIC_RENDEZVOUS is set, else mpi under mpirun, else local")
      .Group(group);
  verb.AddOption("--name", options->name, "Name of the topology").ShowDefault().Group(group);
  verb.Footer(
      "explain prints, per collective and size, the time below which no algorithm can complete, the time\n"
      "of the algorithm that the planner chooses, and its factor over the flat algorithm with ranks\n"
      "placed in blocks and in turn. docs/communication.md describes files and columns.\n\n"
      "Examples:\n"
      "  moesaic topology explain topologies/h100-2x8-infiniband.json --size 16KiB,64MiB --svg cluster.svg\n"
      "  moesaic topology probe -o machine.json\n"
      "  mpirun -n 8 moesaic topology probe -o cluster.json");
  verb.OnParsed([options, verb, &run] {
    if (options->action == "explain") {
      if (options->file.empty()) FailUsage("FILE is required");
      for (const char* flag : {"--out", "--transport", "--name"}) {
        if (verb.Count(flag) > 0) FailUsage(flag, "is for moesaic topology probe");
      }
      const auto& named = options->collectives;
      if (named.size() > 1 && std::find(named.begin(), named.end(), kNoCollective) != named.end()) {
        FailUsage("--collective", "none excludes other operations");
      }
      run = [options] { return RunExplain(*options); };
    } else {
      if (!options->file.empty()) FailUsage("probe takes no FILE; --out names the file to write");
      for (const char* flag : {"--collective", "--size", "--order", "--tuning", "--svg", "--json"}) {
        if (verb.Count(flag) > 0) FailUsage(flag, "is for moesaic topology explain");
      }
      run = [options] { return RunProbe(*options); };
    }
  });
}

}  // namespace moesaic::app
