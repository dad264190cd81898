#include "quantizer/preflight.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace moesaic::quantizer {
namespace {

// What a unit asks of disk and processor.
struct UnitWork {
  double read = 0, compute = 0, write = 0;  // seconds
  double again = 0;  // reading of linears that share a scale and lie in several units, which is waited for
};

std::vector<UnitWork> WorkOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads) {
  const double transfer = (direct ? rates.direct : rates.copy) * threads;
  const double read = rates.read / rates.together, write = rates.write / rates.together;
  std::vector<UnitWork> work;
  std::vector<bool> scaled(plan.items.size(), false);
  // The run of items that share a scale with `item`.
  const auto group_of = [&](size_t item) {
    const int fused = plan.items[item].fused;
    size_t first = item, end = item + 1;
    while (fused >= 0 && first > 0 && plan.items[first - 1].fused == fused) --first;
    while (fused >= 0 && end < plan.items.size() && plan.items[end].fused == fused) ++end;
    return std::pair(first, end);
  };
  for (const Unit& unit : plan.work.units) {
    UnitWork& of_unit = work.emplace_back();
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
      const auto [first, end] = group_of(piece.item);
      bool whole = p + end - first <= unit.end;
      for (size_t i = first; i < end; ++i) {
        scaled[i] = true;
        whole = whole && plan.work.pieces[p + i - first].rows == RowsOf(plan.items[i]);
      }
      for (size_t i = first; i < end && !whole; ++i) {
        of_unit.again += static_cast<double>(plan.forms[i].bytes) / rates.read;
      }
    }
    of_unit.compute += (values > 0 ? values / rates.round : 0) + moved / (rates.copy * threads);
  }
  // Each of the two slots' buffers is new to the first unit that it holds.
  for (size_t u = 0; u < std::min<size_t>(work.size(), 2); ++u) {
    work[u].compute += static_cast<double>(plan.work.buffer_bytes()) / 2 / (rates.touch * threads);
  }
  return work;
}

}  // namespace

Forecast ForecastOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads) {
  const std::vector<UnitWork> work = WorkOf(plan, rates, direct, threads);
  Forecast forecast;
  double reading = 0, writing = 0;
  for (const UnitWork& unit : work) {
    reading += unit.read + unit.again;
    writing += unit.write;
    forecast.compute_seconds += unit.compute;
  }
  forecast.disk_seconds = rates.same_disk ? reading + writing : std::max(reading, writing);
  forecast.disk_bound = forecast.disk_seconds >= forecast.compute_seconds;
  // The run itself (quantize.cc): two slots; a unit is read when the slot's last one was rounded, and rounded
  // when that was written. A disk does one thing after the other.
  double free[2] = {};  // when the disks of the source and the output have done all that they were told
  double& source = free[0];
  double& output = free[rates.same_disk ? 0 : 1];
  const auto queue = [](double& disk, double from, double seconds) {
    return disk = std::max(disk, from) + seconds;
  };
  double now = 0, read[2] = {}, written[2] = {};
  for (size_t u = 0; u < std::min<size_t>(work.size(), 2); ++u) read[u] = queue(source, 0, work[u].read);
  for (size_t u = 0; u < work.size(); ++u) {
    const size_t slot = u % 2;
    now = std::max({now, read[slot], written[slot]});
    if (work[u].again > 0) now = queue(source, now, work[u].again);
    now += work[u].compute;
    written[slot] = queue(output, now, work[u].write);
    if (u + 2 < work.size()) read[slot] = queue(source, now, work[u + 2].read);
  }
  forecast.seconds = std::max({now, written[0], written[1]});
  return forecast;
}

}  // namespace moesaic::quantizer
