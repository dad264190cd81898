#include "quantizer/preflight.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace moesaic::quantizer {
namespace {

// Disk and CPU work of a unit.
struct UnitWork {
  double read = 0, compute = 0, write = 0;  // seconds
  double again = 0;  // time to read rows of other units that share a scale; the unit waits for it
  bool alone = false;
};

std::vector<UnitWork> WorkOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads,
                             int64_t* reread_bytes) {
  const double transfer = (direct ? rates.direct : rates.copy) * threads;
  const double read = rates.read / rates.together, write = rates.write / rates.together;
  std::vector<UnitWork> work;
  std::vector<bool> scaled(plan.items.size(), false);
  for (const IoUnit& unit : plan.work.units) {
    UnitWork& of_unit = work.emplace_back();
    of_unit.alone = unit.alone;
    const auto pieces = std::span(plan.work.pieces).subspan(unit.first, unit.end - unit.first);
    double values = 0, moved = 0;
    for (size_t p = unit.first; p < unit.end; ++p) {
      const Piece& piece = plan.work.pieces[p];
      const auto rows = static_cast<double>(RowsOf(plan.items[piece.item]));
      const double part = static_cast<double>(piece.rows) / rows;
      const bool rounded = plan.output.items[piece.item].form == Form::kRounded;
      const double in = part * static_cast<double>(plan.forms[piece.item].bytes),
                   out = part * static_cast<double>(plan.output.items[piece.item].bytes());
      (rounded ? values : moved) +=
          rounded ? part * static_cast<double>(plan.items[piece.item].elements()) : out;
      of_unit.compute += (in + out) / transfer;
      of_unit.read += in / read;
      of_unit.write += out / write;
      const bool whole_scale =
          rates.whole_scales && plan.output.items[piece.item].precision.is(Scheme::kNvfp4);
      if (!rounded || !whole_scale || scaled[piece.item]) continue;
      const auto [first, end] = FusedWith(plan.items, piece.item);
      std::fill(scaled.begin() + static_cast<int64_t>(first), scaled.begin() + static_cast<int64_t>(end),
                true);
      for (const Piece& beside : RowsBeside(plan.items, first, end, pieces.subspan(p - unit.first))) {
        const int64_t bytes = plan.forms[beside.item].bytes * beside.rows / RowsOf(plan.items[beside.item]);
        of_unit.again += static_cast<double>(bytes) / rates.read;
        *reread_bytes += bytes;
      }
    }
    of_unit.compute += (values > 0 ? values / rates.round : 0) + moved / (rates.copy * threads);
  }
  // The first unit of each of the two slots touches new memory.
  for (size_t u = 0; u < std::min<size_t>(work.size(), 2); ++u) {
    work[u].compute += static_cast<double>(plan.work.buffer_bytes()) / 2 / (rates.touch * threads);
  }
  return work;
}

}  // namespace

Forecast ForecastOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads) {
  Forecast forecast;
  const std::vector<UnitWork> work = WorkOf(plan, rates, direct, threads, &forecast.reread_bytes);
  double reading = 0, writing = 0;
  for (const UnitWork& unit : work) {
    reading += unit.read + unit.again;
    writing += unit.write;
    forecast.compute_seconds += unit.compute;
  }
  forecast.disk_seconds = rates.same_disk ? reading + writing : std::max(reading, writing);
  forecast.disk_bound = forecast.disk_seconds >= forecast.compute_seconds;
  // Simulates the run (quantize.cc). There are two slots. A unit is read after its slot's last one was
  // rounded, and rounded after that one was written. An exclusive unit is read after all earlier ones were
  // written, and so is the unit after it. A disk does one transfer at a time.
  double free[2] = {};  // time at which the disks of the source and the output become idle
  double& source = free[0];
  double& output = free[rates.same_disk ? 0 : 1];
  const auto queue = [](double& disk, double from, double seconds) {
    return disk = std::max(disk, from) + seconds;
  };
  double now = 0, read[2] = {}, written[2] = {};
  size_t started = 0;
  const auto start_reads = [&](size_t current) {
    for (; started < std::min(work.size(), current + 2); ++started) {
      if (work[started].alone || (started > 0 && work[started - 1].alone)) {
        if (started > current) return;
        now = std::max({now, written[0], written[1]});
      }
      read[started % 2] = queue(source, now, work[started].read);
    }
  };
  start_reads(0);
  for (size_t u = 0; u < work.size(); ++u) {
    const size_t slot = u % 2;
    now = std::max({now, read[slot], written[slot]});
    if (work[u].again > 0) now = queue(source, now, work[u].again);
    now += work[u].compute;
    written[slot] = queue(output, now, work[u].write);
    start_reads(u + 1);
  }
  forecast.seconds = std::max({now, written[0], written[1]});
  return forecast;
}

}  // namespace moesaic::quantizer
