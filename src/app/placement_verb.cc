// `moesaic placement` plans, evaluates, compares, converts and explains placements of experts on ranks.
#include <algorithm>
#include <memory>
#include <string_view>

#include "app/placement_flags.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

struct Action {
  const char* name;
  Status (*run)(const PlacementFlags&);
  int least_files, most_files;     // -1: any number
  std::vector<const char*> flags;  // besides those of all actions
};

const std::vector<Action>& Actions() {
  static const std::vector<Action> actions = {
      {"plan", RunPlacementPlan, 1, -1, {"--ranks",       "--slots",       "--groups",
                                         "--nodes",       "--out",         "--format",
                                         "--first-layer", "--html",        "--algorithm",
                                         "--rank-slots",  "--speeds",      "--extra-replicas",
                                         "--current",     "--max-moves",   "--traffic-weight",
                                         "--top-k",       "--top-groups",  "--windows",
                                         "--threads",     "--json",        "--cost",
                                         "--quantile",    "--rank-memory", "--expert-bytes"}},
      {"evaluate",
       RunPlacementEvaluate,
       1,
       -1,
       {"--plan", "--ranks", "--speeds", "--current", "--nodes", "--groups", "--top-k", "--top-groups",
        "--windows", "--html", "--json", "--cost"}},
      {"compare",
       RunPlacementCompare,
       1,
       -1,
       {"--ranks", "--slots", "--groups", "--nodes", "--leave-one-out", "--split", "--moves", "--windows",
        "--html", "--threads", "--json"}},
      {"front",
       RunPlacementFront,
       1,
       -1,
       {"--ranks", "--slots", "--groups", "--nodes", "--top-k", "--top-groups", "--windows", "--html",
        "--threads", "--json"}},
      {"convert", RunPlacementConvert, 1, 1, {"--out", "--format", "--first-layer", "--ranks"}},
      {"explain", RunPlacementExplain, 1, -1, {"--ranks", "--windows", "--html", "--json"}},
      {"generate",
       RunPlacementGenerate,
       0,
       -1,
       {"--out", "--layers", "--experts", "--workloads", "--skew", "--drift", "--spread", "--correlation",
        "--seed", "--windows"}},
  };
  return actions;
}

void AddCommonFlags(Verb& verb, PlacementFlags& options) {
  verb.AddOption("--ranks,--gpus", options.ranks, "Ranks that share the experts of a layer").Range(1, 65536);
  verb.AddOption("--slots,--replicas", options.slots,
                 "Slots of all ranks together; default: the number of experts")
      .Range(1, 1 << 24);
  verb.AddOption("--groups", options.groups, "Groups of adjacent experts, from which the router chooses")
      .Range(1, 65536)
      .ShowDefault();
  verb.AddOption("--nodes", options.nodes, "Nodes, among which the ranks are divided in order")
      .Range(1, 65536)
      .ShowDefault();
  verb.AddOption(
          "--top-k", options.top_k,
          "Experts of a token, to report its traffic between --nodes, and to order the ranks of a plan so "
          "that it is small; default of front: 8")
      .Range(1, 65536);
  verb.AddOption("--top-groups", options.top_groups, "Groups of a token's experts; default: all")
      .Range(1, 65536);
  verb.AddOption("-o,--out", options.out, "File of the plan, or folder of generated loads");
  verb.AddOption("--format", options.format, "Format of --out; default: by its extension")
      .OneOf({"moesaic", "eplb", "sglang", "omni", "tensorrt-llm"});
  verb.AddOption("--first-layer", options.first_layer,
                 "Number of the first MoE layer, for the files of SGLang and TensorRT-LLM, which count dense "
                 "layers, too; not for loads that have rows of dense layers")
      .Range(0, 4096)
      .ShowDefault();
  verb.AddFlag("--windows", options.windows, "Treat each window of a recording as a workload");
  verb.AddOption("--html", options.html, "File for a page with plots");
  verb.AddFlag("--json", options.json, "Print JSON");
  verb.AddOption("--threads", options.threads, "Threads that plan layers").Range(1, 1024).ShowDefault();
}

void AddPlanFlags(Verb& verb, PlacementFlags& options) {
  const std::string group = "Flags of plan";
  verb.AddOption("--algorithm", options.algorithm, "Balancer")
      .OneOf({"moesaic", "eplb", "omni", "flashlb", "swift", "lplb"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--rank-slots", options.rank_slots, "Slots of each rank instead of --slots, e.g. 9,9,8")
      .Delimiter(',')
      .OneValue()
      .Group(group);
  verb.AddOption("--speeds", options.speeds, "Relative speed of each rank, e.g. 1,1,0.5; also of evaluate")
      .Delimiter(',')
      .OneValue()
      .Group(group);
  verb.AddOption("--extra-replicas", options.extra_replicas,
                 "Replicas over all layers on top of the slots, for the layers where they help most")
      .Range(0, 1 << 24)
      .Group(group);
  verb.AddOption("--current", options.current,
                 "Placement in use, from which the plan starts; evaluate counts the moves from it")
      .Group(group);
  verb.AddOption("--max-moves", options.max_moves, "Slots of a layer that may change from --current")
      .Range(0, 1 << 24)
      .Group(group);
}

void AddTrafficFlag(Verb& verb, PlacementFlags& options) {
  verb.AddOption("--traffic-weight", options.traffic_weight,
                 "Cost of experts away from the node of their group; powers of ten, see front")
      .Range(0.0, 1e15)
      .Group("Flags of plan");
}

void AddCostFlags(Verb& verb, PlacementFlags& options) {
  const std::string group = "Flags of plan";
  verb.AddOption(
          "--cost", options.cost,
          "File with rates of the machine: balance predicted times instead of tokens; also of evaluate")
      .Group(group);
  verb.AddOption("--quantile", options.quantile,
                 "Share of the workloads or windows that each layer is planned for, those that fit best")
      .Range(0.01, 1.0)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--rank-memory", options.rank_memory,
                 "Bytes of a rank for experts of all layers, or those of each rank, e.g. 60G,60G,30G; memory "
                 "that --slots leaves goes to the layers that gain most")
      .Bytes()
      .Delimiter(',')
      .OneValue()
      .Group(group);
  verb.AddOption("--expert-bytes", options.expert_bytes, "Bytes of an expert, for --rank-memory")
      .Bytes()
      .Group(group);
}

void AddOtherFlags(Verb& verb, PlacementFlags& options) {
  verb.AddOption("--plan", options.plan, "Placement to evaluate").Group("Flags of evaluate");
  const std::string compare = "Flags of compare";
  verb.AddFlag("--leave-one-out", options.leave_one_out, "Measure each workload on a plan for the others")
      .Group(compare);
  verb.AddFlag("--split", options.split, "Split tokens over replicas exactly; baselines get rows with it")
      .Group(compare);
  verb.AddOption("--moves", options.moves,
                 "Experts that may move per rank and layer for one batch; implies the split")
      .Range(0.0, 64.0)
      .Group(compare);
  const std::string generate = "Flags of generate";
  verb.AddOption("--layers", options.layers, "MoE layers").Range(1, 4096).ShowDefault().Group(generate);
  verb.AddOption("--experts", options.experts, "Experts of a layer")
      .Range(2, 65536)
      .ShowDefault()
      .Group(generate);
  verb.AddOption("--workloads", options.workloads, "Files to write")
      .Range(1, 1000)
      .ShowDefault()
      .Group(generate);
  verb.AddOption("--skew", options.skew, "Distribution of loads")
      .OneOf({"log-normal", "power-law"})
      .ShowDefault()
      .Group(generate);
  verb.AddOption("--drift", options.drift, "Difference of workloads")
      .OneOf({"mixtures", "independent"})
      .ShowDefault()
      .Group(generate);
  verb.AddOption("--spread", options.spread, "Sigma of the log-normal, or exponent of the power law")
      .Range(0.0, 5.0)
      .ShowDefault()
      .Group(generate);
  verb.AddOption("--correlation", options.correlation, "Correlation of workloads")
      .Range(0.0, 1.0)
      .ShowDefault()
      .Group(generate);
  verb.AddOption("--seed", options.seed, "Seed of the random numbers")
      .Range(int64_t{0}, int64_t{1} << 62)
      .ShowDefault()
      .Group(generate);
}

// Refuses flags of other actions.
void CheckFlags(const Verb& verb, const Action& action) {
  for (const Action& other : Actions()) {
    for (const char* flag : other.flags) {
      const bool ours = std::any_of(action.flags.begin(), action.flags.end(),
                                    [&](const char* name) { return std::string_view(name) == flag; });
      if (!ours && verb.Count(flag) > 0)
        FailUsage(flag, std::string("is for moesaic placement ") + other.name + ", not " + action.name);
    }
  }
}

// Refuses flags that would change nothing.
void CheckUse(const Verb& verb, const PlacementFlags& options) {
  if (options.action == "compare" && options.groups > 1 && options.nodes == 1)
    FailUsage("--groups", "needs --nodes");
  if (options.action == "generate") {
    if (options.files.empty() && options.windows) FailUsage("--windows", "needs FILES");
    for (const char* flag : {"--layers", "--experts", "--skew", "--spread", "--drift"}) {
      if (!options.files.empty() && verb.Count(flag) > 0)
        FailUsage(flag, "excludes FILES, which determine it");
    }
    if (options.files.size() > 1 && options.gives_correlation)
      FailUsage("--correlation", "excludes several loads, which determine it");
  }
  const bool plan = options.action == "plan";
  if (!plan && options.action != "evaluate") return;
  const bool traffic = options.top_k > 0;
  if (traffic && verb.Count("--nodes") == 0) FailUsage("--top-k", "needs --nodes");
  if (options.top_groups > 0 && !traffic) FailUsage("--top-groups", "needs --top-k");
  const bool weighed = traffic || options.traffic_weight > 0;
  const bool eplb = plan && options.algorithm == "eplb", omni = plan && options.algorithm == "omni";
  if (options.nodes > 1 && !weighed && !eplb && !omni) {
    FailUsage("--nodes",
              plan ? "needs --top-k, --traffic-weight, or --algorithm eplb or omni" : "needs --top-k");
  }
  if (options.groups > 1 && !weighed && !eplb)
    FailUsage("--groups", plan ? "needs --top-k, --traffic-weight or --algorithm eplb" : "needs --top-k");
  if (plan && options.algorithm != "moesaic" && verb.Count("--threads") > 0)
    FailUsage("--threads", "needs --algorithm moesaic: the published balancers use one thread");
  if (plan && !options.format.empty() && options.out.empty()) FailUsage("--format", "needs --out");
}

}  // namespace

void AddPlacement(Verb& root, VerbRun& run) {
  auto options = std::make_shared<PlacementFlags>();
  Verb verb = root.AddVerb("placement", "Place experts on ranks: plan, evaluate, compare, convert, explain");
  std::vector<std::string> names;
  for (const Action& action : Actions()) names.emplace_back(action.name);
  verb.AddOption(
          "ACTION", options->action,
          "plan, evaluate, compare or explain loads, print the front of balance and traffic, convert a plan, "
          "generate loads")
      .OneOf(names)
      .Required();
  verb.AddOption("FILES", options->files,
                 "Loads of workloads (.npy, .pt, JSON, folder), loads to imitate (generate), or the "
                 "placement to convert");
  AddCommonFlags(verb, *options);
  AddPlanFlags(verb, *options);
  AddTrafficFlag(verb, *options);
  AddCostFlags(verb, *options);
  AddOtherFlags(verb, *options);
  verb.Footer(
      "A load is a .npy array [layers, experts], SGLang's JSON or .pt with logical_count, vLLM's JSON,\n"
      "or a folder of OmniPlacement or TensorRT-LLM. docs/placement.md describes formats and columns.\n\n"
      "Examples:\n"
      "  moesaic placement plan chat.npy code.npy --ranks 32 --slots 288 --out plan.json --format sglang\n"
      "  moesaic placement plan load.npy --algorithm eplb --replicas 288 --groups 8 --nodes 4 --gpus 32 "
      "--out plan.npz\n"
      "  moesaic placement compare *.npy --ranks 32 --slots 288 --leave-one-out --split");
  verb.OnParsed([options, verb, &run] {
    const auto action = std::find_if(Actions().begin(), Actions().end(),
                                     [&](const Action& entry) { return options->action == entry.name; });
    const int files = static_cast<int>(options->files.size());
    if (files < action->least_files) FailUsage(std::string(action->name) + " needs FILES");
    if (action->most_files >= 0 && files > action->most_files)
      FailUsage(std::string(action->name) + " takes one file");
    CheckFlags(verb, *action);
    const auto needs = [&](const char* flag) {
      if (verb.Count(flag) == 0) FailUsage(flag, std::string("is required by ") + action->name);
    };
    if (options->action == "plan" && options->rank_slots.empty()) needs("--ranks");
    if (options->action == "compare" || options->action == "front") needs("--ranks");
    if (options->action == "front" || options->traffic_weight > 0) needs("--nodes");
    if (options->action == "evaluate") needs("--plan");
    if (options->action == "convert" || options->action == "generate") needs("--out");
    if ((verb.Count("--rank-memory") > 0) != (verb.Count("--expert-bytes") > 0))
      FailUsage("--rank-memory", "and --expert-bytes need each other");
    if (verb.Count("--max-moves") > 0 && options->current.empty())
      FailUsage("--max-moves", "needs --current");
    options->gives_correlation = verb.Count("--correlation") > 0;
    CheckUse(verb, *options);
    run = [options, function = action->run] { return function(*options); };
  });
}

}  // namespace moesaic::app
