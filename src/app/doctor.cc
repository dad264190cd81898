// `moesaic doctor`: what this machine can do, and which kernels that means.
#include <fmt/format.h>

#include <cstdio>

#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "kernels/probe.h"
#include "runtime/probe.h"
#include "runtime/topology.h"

namespace moesaic::app {
namespace {

struct Options {
  bool quick = false;
};

constexpr int64_t kProbeBytes = int64_t{256} << 20;  // a thread: far more than any cache

void PrintMachine(const runtime::Topology& topology, const runtime::CpuFeatures& cpu) {
  std::string isas;
  for (const runtime::Isa isa : runtime::HostIsas(cpu)) isas += runtime::IsaName(isa) + " ";
  std::string caches;
  for (const runtime::CacheLevel& cache : topology.caches) {
    caches += fmt::format("{}L{} {} x {}", caches.empty() ? "" : ", ", cache.level, cache.count,
                          FormatBytes(static_cast<double>(cache.bytes)));
  }
  std::vector<std::vector<std::string>> rows = {
      {"machine", ""},
      {"processor", topology.cpu_model},
      {"cores", fmt::format("{} cores, {} hardware threads, {} sockets", topology.cores,
                            topology.hardware_threads, topology.sockets)},
      {"threads used", std::to_string(topology.DefaultThreads())},
      {"instruction sets", isas},
      {"caches", caches},
      {"NUMA nodes", std::to_string(topology.numa_nodes.size())},
      {"memory", fmt::format("{}, {} available", FormatBytes(static_cast<double>(topology.memory_bytes)),
                             FormatBytes(static_cast<double>(topology.available_bytes)))},
      {"huge pages",
       fmt::format("transparent: {}, reserved: {}",
                   topology.transparent_huge_pages.empty() ? "unknown" : topology.transparent_huge_pages,
                   topology.explicit_huge_pages)},
  };
  if (topology.cpu_quota > 0) rows.push_back({"CPU quota", fmt::format("{:.2f} cores", topology.cpu_quota)});
  std::fputs(FormatTable(rows, false).c_str(), stdout);
}

Status PrintSpeeds(const runtime::CpuFeatures& cpu) {
  ASSIGN_OR_RETURN(const auto pool, runtime::ThreadPool::Create({.threads = 0, .pin = true}));
  ASSIGN_OR_RETURN(const runtime::ReadBandwidth read, runtime::MeasureReadBandwidth(pool.get(), kProbeBytes));
  std::vector<std::vector<std::string>> rows = {
      {"measured", "one thread", fmt::format("{} threads", pool->size())}};
  rows.push_back({"memory read", fmt::format("{:.1f} GB/s", read.one_thread / 1e9),
                  fmt::format("{:.1f} GB/s", read.all_threads / 1e9)});
  for (const kernels::DotPeak& peak : kernels::MeasureDotPeaks(cpu, pool.get())) {
    rows.push_back(
        {fmt::format("{} dot products ({})", tensor::PackedFormatName(peak.format), peak.instruction),
         fmt::format("{:.0f} GOP/s", peak.one_thread / 1e9),
         fmt::format("{:.0f} GOP/s", peak.all_threads / 1e9)});
  }
  std::fputs(("\n" + FormatTable(rows, false)).c_str(), stdout);
  return OkStatus();
}

void PrintKernels(const kernels::KernelTable& kernels) {
  std::vector<std::vector<std::string>> rows = {
      {"operator", "kernel", "passed over (not on this processor)"}};
  for (const kernels::KernelChoice& choice : kernels.choices) {
    std::string passed;
    for (const std::string& name : choice.passed_over) passed += (passed.empty() ? "" : ", ") + name;
    rows.push_back({choice.op, choice.name, passed.empty() ? "-" : passed});
  }
  std::fputs(("\n" + FormatTable(rows, false)).c_str(), stdout);
}

Status RunDoctor(const Options& options) {
  ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
  const runtime::CpuFeatures cpu = runtime::DetectCpu();
  PrintMachine(runtime::DetectTopology(), cpu);
  if (!options.quick) RETURN_IF_ERROR(PrintSpeeds(cpu));
  PrintKernels(kernels);
  std::printf("\nlibraries  fmt %d, CLI11 %s, moesaic %s\n", FMT_VERSION, CLI11_VERSION, MOESAIC_VERSION);
  return OkStatus();
}

}  // namespace

void AddDoctor(CLI::App& root, VerbRun& run) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = root.add_subcommand("doctor", "Say what this machine can do and which kernels will run");
  verb->add_flag("--quick", options->quick, "Measure nothing");
  verb->footer("MOESAIC_ISA limits the kernels, e.g. MOESAIC_ISA=avx2 moesaic doctor --quick");
  verb->callback([options, &run] { run = [options] { return RunDoctor(*options); }; });
}

}  // namespace moesaic::app
