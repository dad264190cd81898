// Scales time limits of tests on a slow or busy machine, as tests/support/patience.py does for scripts.
//
// A limit is written for an idle reference machine. Patient() multiplies it by the larger of two factors: the
// time of a fixed piece of work relative to the reference machine, and the number of processes that wait for
// each CPU. A limit that a test expects to expire is not scaled: it would only take longer.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <thread>

namespace moesaic::base {

/// Steps of MeasurePatience(), whose latency is 4 cycles, and their seconds on an idle processor of 2.7 GHz.
inline constexpr int kPatienceSteps = 1 << 25;
inline constexpr double kPatienceReferenceSeconds = 4.0 * kPatienceSteps / 2.7e9;
/// Maximum factor, so that a test that hangs ends.
inline constexpr double kMaxPatience = 30;

/// Returns the factor of a machine whose piece of work took `seconds` and where `load` processes run or wait
/// on `cpus`.
inline double PatienceOf(double seconds, double load, int cpus) {
  constexpr double kRoom = 2;  // for a load that rises after the measurement
  return std::clamp(kRoom * std::max(seconds / kPatienceReferenceSeconds, load / std::max(cpus, 1)), 1.0,
                    kMaxPatience);
}

/// Returns the factor of this machine at its present load.
inline double MeasurePatience() {
  const auto begin = std::chrono::steady_clock::now();
  uint64_t value = 1;
  for (int i = 0; i < kPatienceSteps; ++i) value = value * 6364136223846793005U + 1442695040888963407U;
  volatile uint64_t keep = value;  // so that the loop is not removed
  (void)keep;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  double load = 0;
  if (getloadavg(&load, 1) != 1) load = 0;
  return PatienceOf(seconds.count(), load, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Returns the limit for this machine. Measures again after 20 s; the factor never decreases. Not
/// thread-safe.
inline double Patient(double seconds) {
  using Clock = std::chrono::steady_clock;
  static double factor = 1;
  static std::optional<Clock::time_point> measured;
  if (!measured || Clock::now() - *measured > std::chrono::seconds(20)) {
    factor = std::max(factor, MeasurePatience());
    measured = Clock::now();
  }
  return seconds * factor;
}

}  // namespace moesaic::base
