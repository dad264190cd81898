// `moesaic doctor` reports the features of this machine and the kernels that run on it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "app/interrupt.h"
#include "app/libraries.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "comm/explain/explanation.h"
#include "comm/probe/link_probe.h"
#include "comm/transport/open_transport.h"
#include "kernels/gptq_accelerator.h"
#include "kernels/probe.h"
#include "runtime/memory.h"
#include "runtime/probe.h"
#include "runtime/topology.h"

namespace moesaic::app {
namespace {

using nlohmann::json;

struct DoctorFlags {
  bool quick = false;
  bool json = false;
};

struct Speeds {
  int threads = 0;
  runtime::ReadBandwidth read;
  std::vector<kernels::DotPeak> dots;
};

StatusOr<Speeds> Measure(const runtime::CpuFeatures& cpu) {
  ASSIGN_OR_RETURN(const auto pool, runtime::ThreadPool::Create({.threads = 0, .pin = true}));
  Speeds speeds{.threads = pool->size(), .read = {}, .dots = {}};
  ASSIGN_OR_RETURN(speeds.read, runtime::MeasureReadBandwidth(pool.get(), runtime::ProbeBytes(pool->size())));
  speeds.dots = kernels::MeasureDotPeaks(cpu, pool.get());
  return speeds;
}

std::vector<std::string> IsaNames(const runtime::CpuFeatures& cpu) {
  std::vector<std::string> names;
  for (const runtime::Isa isa : runtime::HostIsas(cpu)) names.push_back(runtime::IsaName(isa));
  return names;
}

// True if the system can bind memory to a node (mbind), as --numa needs.
bool CanBindMemory(const runtime::Topology& topology) {
  constexpr size_t kBytes = 4096;
  StatusOr<runtime::Buffer> probe = runtime::Buffer::Allocate(kBytes, /*huge=*/false);
  return probe.ok() && !topology.numa_nodes.empty() &&
         probe->Prefer(0, kBytes, topology.numa_nodes.front().index).ok();
}

std::string MachineText(const runtime::Topology& topology, const runtime::CpuFeatures& cpu,
                        const std::string& tuning) {
  std::string caches;
  for (const runtime::CacheLevel& cache : topology.caches) {
    caches += fmt::format("{}L{} {} x {}", caches.empty() ? "" : ", ", cache.level, cache.count,
                          FormatBytes(static_cast<double>(cache.bytes)));
  }
  std::vector<std::vector<std::string>> rows = {
      {"machine", ""},
      {"processor", topology.cpu_model},
      {"cores", fmt::format("{}, {}, {}", Counted(topology.cores, "core"),
                            Counted(topology.hardware_threads, "hardware thread"),
                            Counted(topology.sockets, "socket"))},
      {"threads used", std::to_string(topology.DefaultThreads())},
      {"instruction sets", fmt::format("{}", fmt::join(IsaNames(cpu), " "))},
      {"caches", caches},
      {"NUMA nodes", fmt::format("{}, memory {} be bound to them", topology.numa_nodes.size(),
                                 CanBindMemory(topology) ? "can" : "can't")},
      {"memory", fmt::format("{}, {} available", FormatBytes(static_cast<double>(topology.memory_bytes)),
                             FormatBytes(static_cast<double>(topology.available_bytes)))},
      {"huge pages",
       fmt::format("transparent: {}, reserved: {}",
                   topology.transparent_huge_pages.empty() ? "unknown" : topology.transparent_huge_pages,
                   topology.explicit_huge_pages)},
      {"kernels", tuning},
  };
  if (topology.cpu_quota > 0) rows.push_back({"CPU quota", fmt::format("{:.2f} cores", topology.cpu_quota)});
  return FormatTable(rows, false);
}

json MachineJson(const runtime::Topology& topology, const runtime::CpuFeatures& cpu) {
  json machine = {{"processor", topology.cpu_model},
                  {"sockets", topology.sockets},
                  {"cores", topology.cores},
                  {"hardware_threads", topology.hardware_threads},
                  {"threads_used", topology.DefaultThreads()},
                  {"cpu_quota", topology.cpu_quota},
                  {"instruction_sets", IsaNames(cpu)},
                  {"caches", json::array()},
                  {"numa_nodes", json::array()},
                  {"numa_memory_can_be_bound", CanBindMemory(topology)},
                  {"memory_bytes", topology.memory_bytes},
                  {"available_bytes", topology.available_bytes},
                  {"transparent_huge_pages", topology.transparent_huge_pages},
                  {"explicit_huge_pages", topology.explicit_huge_pages}};
  for (const runtime::CacheLevel& cache : topology.caches) {
    machine["caches"].push_back({{"level", cache.level}, {"bytes", cache.bytes}, {"count", cache.count}});
  }
  for (const runtime::NumaNode& node : topology.numa_nodes) {
    machine["numa_nodes"].push_back(
        {{"index", node.index}, {"memory_bytes", node.memory_bytes}, {"cpus", node.cpus}});
  }
  return machine;
}

constexpr char kNoCard[] = "NVIDIA's driver finds no device";

std::string DevicesText() {
  const StatusOr<std::vector<kernels::GptqAcceleratorEntry>> devices = kernels::ListGptqAccelerators();
  if (!devices.ok()) return fmt::format("devices  none: {}\n", Message(devices.status()));
  if (devices->empty()) return fmt::format("devices  none: {}\n", kNoCard);
  std::vector<std::vector<std::string>> rows = {{"device", "card", "compute capability", "memory"}};
  for (const kernels::GptqAcceleratorEntry& entry : *devices) {
    rows.push_back(
        {entry.device, entry.name, entry.capability, FormatBytes(static_cast<double>(entry.memory_bytes))});
  }
  return FormatTable(rows, false);
}

// `why` receives the reason if there are no devices; else it is empty.
json DevicesJson(std::string* why) {
  json list = json::array();
  const StatusOr<std::vector<kernels::GptqAcceleratorEntry>> devices = kernels::ListGptqAccelerators();
  if (!devices.ok()) {
    *why = Message(devices.status());
    return list;
  }
  if (devices->empty()) *why = kNoCard;
  for (const kernels::GptqAcceleratorEntry& entry : *devices) {
    list.push_back({{"device", entry.device},
                    {"card", entry.name},
                    {"compute_capability", entry.capability},
                    {"memory_bytes", entry.memory_bytes}});
  }
  return list;
}

std::string SpeedsText(const Speeds& speeds) {
  std::vector<std::vector<std::string>> rows = {
      {"measured", "one thread", fmt::format("{} threads", speeds.threads)}};
  rows.push_back({"memory read", fmt::format("{:.1f} GB/s", speeds.read.one_thread / 1e9),
                  fmt::format("{:.1f} GB/s", speeds.read.all_threads / 1e9)});
  for (const kernels::DotPeak& peak : speeds.dots) {
    rows.push_back(
        {fmt::format("{} dot products ({})", tensor::PackedFormatName(peak.format), peak.instruction),
         fmt::format("{:.0f} GOP/s", peak.one_thread / 1e9),
         fmt::format("{:.0f} GOP/s", peak.all_threads / 1e9)});
  }
  return FormatTable(rows, false);
}

json SpeedsJson(const Speeds& speeds) {
  json measured = {{"threads", speeds.threads},
                   {"read_bytes_per_s",
                    {{"one_thread", speeds.read.one_thread}, {"all_threads", speeds.read.all_threads}}},
                   {"dot_products", json::array()}};
  for (const kernels::DotPeak& peak : speeds.dots) {
    measured["dot_products"].push_back({{"format", tensor::PackedFormatName(peak.format)},
                                        {"instruction", peak.instruction},
                                        {"one_thread_ops_per_s", peak.one_thread},
                                        {"all_threads_ops_per_s", peak.all_threads}});
  }
  return measured;
}

std::string KernelsText(const kernels::KernelTable& kernels) {
  std::vector<std::vector<std::string>> rows = {
      {"operator", "kernel", "passed over (not on this processor, or slower)"}};
  for (const kernels::KernelChoice& choice : kernels.choices) {
    rows.push_back(
        {choice.op, choice.name,
         choice.passed_over.empty() ? "-" : fmt::format("{}", fmt::join(choice.passed_over, ", "))});
  }
  return FormatTable(rows, false);
}

json KernelsJson(const kernels::KernelTable& kernels) {
  json list = json::array();
  for (const kernels::KernelChoice& choice : kernels.choices) {
    list.push_back({{"op", choice.op}, {"kernel", choice.name}, {"passed_over", choice.passed_over}});
  }
  return list;
}

// Returns the choices in use, tuned or built in.
json TuningJson(const kernels::KernelTable& kernels, const std::string& tuning, const json& machine) {
  kernels::Tuning made{.tile_sizes = kernels.tile_sizes, .few_below = {}};
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    if (kernels.gemm[f].few != nullptr) made.few_below[f] = kernels.gemm[f].few_below;
  }
  json choices = ChoicesJson(made);
  choices["state"] = tuning;
  choices["machine"] = machine;
  return choices;
}

std::string LibrariesText() {
  std::vector<std::vector<std::string>> rows = {{"library", "built with"}};
  for (const auto& [name, version] : Libraries()) {
    rows.push_back({name, version == "absent" ? "absent: moesaic chat has no line editing" : version});
  }
  return FormatTable(rows, false);
}

// Measures the links of the job of which this process is a rank. Rank 0 returns their topology. Empty on
// other ranks.
StatusOr<std::optional<comm::Topology>> LinksOfJob(comm::Transport& job) {
  Progress progress("measuring links");
  comm::ProbeOptions options{.name = "links of the job"};
  options.progress = [&](int done, int total) {
    progress.Show(done, total, fmt::format("{} of {} pairs", done, total));
    return !Interrupted();
  };
  options.interrupted = Interrupted;
  return comm::ProbeLinks(job, options);
}

Status Report(const DoctorFlags& options, const std::optional<comm::Topology>& links) {
  ASSIGN_OR_RETURN(kernels::KernelTable kernels, KernelsOfHost());
  ASSIGN_OR_RETURN(const nlohmann::json machine, MachineOfKernels(0));
  ASSIGN_OR_RETURN(const TuningState tuning, TuneKernels(true, machine, kernels));
  const runtime::CpuFeatures cpu = runtime::DetectCpu();
  const runtime::Topology topology = runtime::DetectTopology();
  std::optional<Speeds> speeds;
  if (!options.quick) {
    ASSIGN_OR_RETURN(speeds, Measure(cpu));
  }
  if (options.json) {
    std::string why_no_devices;
    json report = {{"version", MOESAIC_VERSION},
                   {"machine", MachineJson(topology, cpu)},
                   {"devices", DevicesJson(&why_no_devices)},
                   {"kernels", KernelsJson(kernels)},
                   {"tuning", TuningJson(kernels, tuning.text, machine)},
                   {"libraries", json::object()}};
    if (!why_no_devices.empty()) report["why_no_devices"] = why_no_devices;
    if (speeds) report["measured"] = SpeedsJson(*speeds);
    if (links) report["links"] = json::parse(links->ToJson());
    for (const auto& [name, version] : Libraries()) report["libraries"][name] = version;
    Print("{}\n", report.dump(2));
    return OkStatus();
  }
  WriteOutput(MachineText(topology, cpu, tuning.text));
  if (speeds) Print("\n{}", SpeedsText(*speeds));
  Print("\n{}\n{}\n{}\nmoesaic {}\n", DevicesText(), KernelsText(kernels), LibrariesText(), MOESAIC_VERSION);
  if (links) Print("\nmeasured links of {} ranks\n{}", links->ranks(), comm::TreeText(*links));
  return OkStatus();
}

// Under a launcher, rank 0 reports its machine and the links between all ranks.
Status RunDoctor(const DoctorFlags& options) {
  if (!comm::IsRankOfJob()) return Report(options, std::nullopt);
  const InterruptGuard guard;
  ASSIGN_OR_RETURN(const comm::OpenedTransport job, comm::OpenTransport(""));
  ASSIGN_OR_RETURN(const std::optional<comm::Topology> links, LinksOfJob(*job));
  return job->rank() == 0 ? Report(options, links) : OkStatus();
}

}  // namespace

void AddDoctor(Verb& root, VerbRun& run) {
  auto options = std::make_shared<DoctorFlags>();
  Verb verb = root.AddVerb("doctor", "Report the features of this machine and the kernels that run on it");
  verb.AddFlag("--quick", options->quick, "Do not measure memory and compute speed");
  verb.AddFlag("--json", options->json, "Print JSON");
  verb.Footer(
      "attention_kv_bf16 is the attention that runs on a KV cache of --kv-dtype bf16, and so on. "
      "MOESAIC_ISA\n"
      "limits the kernels.\n\n"
      "Examples:\n"
      "  moesaic doctor\n"
      "  MOESAIC_ISA=avx2 moesaic doctor --quick\n"
      "  moesaic doctor --quick --json\n"
      "  mpirun -n 4 moesaic doctor --quick                   also the links between the ranks of a job");
  verb.OnParsed([options, &run] { run = [options] { return RunDoctor(*options); }; });
}

}  // namespace moesaic::app
