#include "kernels/probe.h"

#include <algorithm>
#include <chrono>

#include "kernels/cpu/peak.h"

namespace moesaic::kernels {
namespace {

using runtime::Isa;
using tensor::PackedFormat;

constexpr int kTries = 7;
constexpr double kSecondsPerTry = 2e-3;  // long compared with a clock read, short compared with a time slice

struct Peak {
  PackedFormat format;
  Isa needs;
  const char* instruction;
  int64_t (*run)(int64_t rounds);
};

constexpr Peak kPeaks[] = {
    {PackedFormat::kF32, Isa::kAvx512, "vfmadd231ps zmm", cpu::PeakF32Avx512},
    {PackedFormat::kF32, Isa::kAvx2, "vfmadd231ps ymm", cpu::PeakF32Avx2},
    {PackedFormat::kBF16, Isa::kAmx, "tdpbf16ps", cpu::PeakBF16Amx},
    {PackedFormat::kBF16, Isa::kAvx512Bf16, "vdpbf16ps zmm", cpu::PeakBF16Avx512BF16},
    {PackedFormat::kBF16, Isa::kAvx512, "vfmadd231ps zmm", cpu::PeakF32Avx512},
    {PackedFormat::kBF16, Isa::kAvx2, "vfmadd231ps ymm", cpu::PeakF32Avx2},
    {PackedFormat::kI8, Isa::kAmx, "tdpbusd", cpu::PeakI8Amx},
    {PackedFormat::kI8, Isa::kAvx512Vnni, "vpdpbusd zmm", cpu::PeakI8Avx512Vnni},
    {PackedFormat::kI8, Isa::kAvxVnni, "vpdpbusd ymm", cpu::PeakI8AvxVnni},
    {PackedFormat::kI8, Isa::kAvx2, "vpmaddubsw ymm", cpu::PeakI8Avx2},
};

template <typename F>
double SecondsOf(const F& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

DotPeak Measure(const Peak& peak, runtime::ThreadPool* pool) {
  int64_t rounds = 1000;
  while (SecondsOf([&] { peak.run(rounds); }) < kSecondsPerTry) rounds *= 2;
  DotPeak best{.format = peak.format, .instruction = peak.instruction};
  for (int i = 0; i < kTries; ++i) {
    int64_t operations = 0;
    const double one = SecondsOf([&] { operations = peak.run(rounds); });
    const double all = SecondsOf([&] { pool->RunOnEach([&](int64_t, int) { peak.run(rounds); }); });
    best.one_thread = std::max(best.one_thread, static_cast<double>(operations) / one);
    best.all_threads = std::max(best.all_threads, static_cast<double>(operations) * pool->size() / all);
  }
  return best;
}

}  // namespace

std::vector<DotPeak> MeasureDotPeaks(const runtime::CpuFeatures& cpu, runtime::ThreadPool* pool) {
  std::vector<DotPeak> peaks;
  for (const Peak& peak : kPeaks) {
    if (!cpu.Has(peak.needs)) continue;
    const DotPeak measured = Measure(peak, pool);
    if (peaks.empty() || peaks.back().format != peak.format) {
      peaks.push_back(measured);
    } else if (measured.all_threads > peaks.back().all_threads) {
      peaks.back() = measured;
    }
  }
  return peaks;
}

}  // namespace moesaic::kernels
