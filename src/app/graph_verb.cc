// `moesaic graph bench` measures graph operators and the read bandwidth of memory on this machine.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "app/host_features.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/table.h"
#include "app/verb.h"
#include "runtime/huge_pages.h"
#include "runtime/probe.h"
#include "science/elements.h"
#include "science/message_ops.h"

namespace moesaic::app {
namespace {

struct GraphFlags {
  std::string action;
  int64_t nodes = 50000, edges = 1000000;
  int columns = 64;
  std::string dtype = "f32";
  int repetitions = 9;
  int threads = 0;
  bool json = false;
};

struct OperatorTime {
  std::string name;
  double median_ms = 0, min_ms = 0;
  double bytes = 0;  // bytes that the operator must read and write; 0: not stated
};

OperatorTime MeasureOperator(const std::string& name, double bytes, int repetitions,
                             const std::function<Status()>& run, Status* status) {
  std::vector<double> times;
  for (int i = 0; i < repetitions + 1 && status->ok() && !Interrupted(); ++i) {
    const auto begin = std::chrono::steady_clock::now();
    *status = run();
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    if (i > 0) times.push_back(ms);  // the first run faults memory in
  }
  if (times.empty()) return {.name = name};
  std::sort(times.begin(), times.end());
  return {.name = name, .median_ms = times[times.size() / 2], .min_ms = times[0], .bytes = bytes};
}

// Arrays of 2 MiB or more are aligned to huge pages, others to cache lines, as those of PyTorch are. A load
// of a vector that crosses two lines takes twice as long.
using Bytes = std::vector<std::byte, runtime::HugePageAllocator<std::byte>>;

// Operands of all operators.
struct BenchGraph {
  std::vector<int32_t> src, dst;
  Bytes nodes, edges, weights, out;
};

tensor::DType TypeOf(const std::string& name) {
  if (name == "f16") return tensor::DType::kF16;
  return name == "bf16" ? tensor::DType::kBF16 : tensor::DType::kF32;
}

void FillRandom(std::mt19937* random, tensor::DType dtype, int64_t count, Bytes* bytes) {
  bytes->resize(tensor::BytesOf(dtype, count));
  for (int64_t i = 0; i < count; ++i)
    graph::StoreElement(bytes->data(), dtype, i, static_cast<float>((*random)() % 2048) / 1024 - 1);
}

StatusOr<std::vector<OperatorTime>> MeasureAll(const GraphFlags& options, const graph::Context& ctx) {
  const tensor::DType dtype = TypeOf(options.dtype);
  const int64_t n = options.nodes, e = options.edges, k = options.columns;
  std::mt19937 random(1);
  BenchGraph b;
  b.src.reserve(e);
  b.dst.reserve(e);
  for (int64_t i = 0; i < e; ++i) {
    b.src.push_back(static_cast<int32_t>(random() % n));
    b.dst.push_back(static_cast<int32_t>(random() % n));
  }
  FillRandom(&random, dtype, n * k, &b.nodes);
  FillRandom(&random, dtype, e * k, &b.edges);
  FillRandom(&random, dtype, e, &b.weights);
  b.out.resize(tensor::BytesOf(dtype, n * k));
  const auto src = graph::Indices::Of(b.src.data(), e), dst = graph::Indices::Of(b.dst.data(), e);
  ASSIGN_OR_RETURN(const graph::Graph plan, graph::Graph::FromCoo(src, dst, n, n));
  const graph::Features u = {b.nodes.data(), dtype, n, k, k}, messages = {b.edges.data(), dtype, e, k, k},
                        weights = {b.weights.data(), dtype, e, 1, 1};
  const graph::Output out = {b.out.data(), dtype, n, k, k};
  const double node_bytes = static_cast<double>(b.nodes.size()),
               edge_bytes = static_cast<double>(b.edges.size());
  std::vector<int32_t> sorted = b.dst;
  std::sort(sorted.begin(), sorted.end());
  ASSIGN_OR_RETURN(const graph::Segments segments,
                   graph::GroupByIndex(graph::Indices::Of(sorted.data(), e), n));
  std::vector<OperatorTime> times;
  Status status = OkStatus();
  Progress progress("measuring");
  auto add = [&](const std::string& name, double bytes, const std::function<Status()>& run) {
    progress.Show(static_cast<int64_t>(times.size()), 6, name);
    times.push_back(MeasureOperator(name, bytes, options.repetitions, run, &status));
  };
  add("plan (COO -> CSC)", 0, [&] { return graph::Graph::FromCoo(src, dst, n, n, ctx.exec.pool).status(); });
  add("segment sum, sorted", edge_bytes + node_bytes,
      [&] { return graph::Segment(ctx, graph::Reduce::kSum, segments, messages, out); });
  add("scatter sum, plan reused", edge_bytes + node_bytes,
      [&] { return graph::Segment(ctx, graph::Reduce::kSum, plan.by_destination(), messages, out); });
  auto spmm = [&](graph::Message message, graph::Reduce reduce) {
    return [&, message, reduce] {
      return graph::Gspmm(
          ctx, plan, {.message = message, .reduce = reduce, .u = u, .e = weights, .out = out, .options = {}});
    };
  };
  // Fused operators read a row of u per edge, from a cache where the nodes fit in it.
  add("copy_u sum", edge_bytes + node_bytes, spmm(graph::Message::kCopyU, graph::Reduce::kSum));
  add("u_mul_e sum", edge_bytes + node_bytes, spmm(graph::Message::kUMulE, graph::Reduce::kSum));
  add("copy_u max", edge_bytes + node_bytes, spmm(graph::Message::kCopyU, graph::Reduce::kMax));
  if (Interrupted()) return Cancelled("interrupted");
  RETURN_IF_ERROR(status);
  return times;
}

Status RunGraphBench(const GraphFlags& options) {
  const InterruptGuard guard;
  ASSIGN_OR_RETURN(const runtime::CpuFeatures cpu, FeaturesOfHost());
  ASSIGN_OR_RETURN(const auto workspace, graph::Workspace::Create(options.threads, cpu));
  const graph::Context ctx = workspace->context();
  ASSIGN_OR_RETURN(const runtime::ReadBandwidth bandwidth,
                   runtime::MeasureReadBandwidth(ctx.exec.pool, runtime::ProbeBytes(workspace->threads())));
  const double read_rate = bandwidth.all_threads / 1e9;
  ASSIGN_OR_RETURN(const std::vector<OperatorTime> times, MeasureAll(options, ctx));
  nlohmann::ordered_json all = {{"nodes", options.nodes},          {"edges", options.edges},
                                {"columns", options.columns},      {"dtype", options.dtype},
                                {"threads", workspace->threads()}, {"kernels", ctx.graph->name},
                                {"read_gb_per_s", read_rate}};
  std::vector<std::vector<std::string>> rows = {
      {"operator", "median ms", "best ms", "GB/s", "share of read"}};
  for (const OperatorTime& time : times) {
    const double rate = time.bytes > 0 ? time.bytes / time.median_ms / 1e6 : 0;
    rows.push_back({time.name, fmt::format("{:.3f}", time.median_ms), fmt::format("{:.3f}", time.min_ms),
                    rate > 0 ? fmt::format("{:.1f}", rate) : "-",
                    rate > 0 ? fmt::format("{:.2f}", rate / read_rate) : "-"});
    all["operators"].push_back({{"name", time.name},
                                {"median_ms", time.median_ms},
                                {"min_ms", time.min_ms},
                                {"gb_per_s", rate},
                                {"share_of_read", rate / read_rate}});
  }
  if (options.json) {
    Print("{}\n", all.dump(2));
    return OkStatus();
  }
  Print("{} nodes, {} edges, {} columns of {}; {} threads, kernels: {}\n", options.nodes, options.edges,
        options.columns, options.dtype, workspace->threads(), ctx.graph->name);
  Print("a read of memory in order: {:.1f} GB/s\n\n{}", read_rate, FormatTable(rows, false));
  return OkStatus();
}

}  // namespace

void AddGraph(Verb& root, VerbRun& run) {
  auto options = std::make_shared<GraphFlags>();
  Verb verb = root.AddVerb("graph", "Measure graph operators of molecular models");
  verb.AddOption("ACTION", options->action, "bench").OneOf({"bench"}).Required();
  verb.AddOption("--nodes", options->nodes, "Nodes of the random graph")
      .Range(int64_t{1}, int64_t{1} << 30)
      .ShowDefault();
  verb.AddOption("--edges", options->edges, "Edges of the random graph")
      .Range(int64_t{1}, int64_t{1} << 30)
      .ShowDefault();
  verb.AddOption("--columns", options->columns, "Features per node").Range(1, 1 << 16).ShowDefault();
  verb.AddOption("--dtype", options->dtype, "Type of the features")
      .OneOf({"f32", "bf16", "f16"})
      .ShowDefault();
  verb.AddOption("-r,--repetitions", options->repetitions, "Runs per operator after the first")
      .Range(1, 10000)
      .ShowDefault();
  verb.AddOption("-t,--threads", options->threads, "Threads; default: one per core").Range(1, 4096);
  verb.AddFlag("--json", options->json, "Print JSON");
  verb.Footer(
      "GB/s counts a row of features per edge and one per node. The last column divides it by the\n"
      "bandwidth of a read of memory in order, which fused operators exceed where a cache holds the "
      "nodes.\n\n"
      "Examples:\n"
      "  moesaic graph bench\n"
      "  moesaic graph bench --nodes 512 --edges 32768 --columns 256 --threads 1");
  verb.OnParsed([options, &run] { run = [options] { return RunGraphBench(*options); }; });
}

}  // namespace moesaic::app
