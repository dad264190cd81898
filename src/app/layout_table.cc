#include "app/layout_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "app/input.h"
#include "app/table.h"
#include "models/rank_work.h"

namespace moesaic::app {
namespace {

using planner::LayoutPlanner;
using planner::StepTime;

constexpr int kDecode8 = 0, kDecode1 = 1, kPrefill = 2;  // indexes of PredictedSteps()

// The FLOP/s of int8 weights are those of int8 operations, where every device states them.
std::string FlopsType(const comm::Topology& topology, const std::string& dtype) {
  const auto have = [&](const char* type) {
    return std::ranges::all_of(topology.device_types(),
                               [&](const comm::DeviceType& device) { return device.flops.contains(type); });
  };
  if (dtype.starts_with("int8") && have("int8")) return "int8";
  return have("bf16") ? "bf16" : "f32";
}

std::string Milliseconds(double seconds) { return fmt::format("{:.2f} ms", seconds * 1e3); }

std::string Share(double part, double whole) {
  return whole > 0 ? fmt::format("{:.0f}%", 100 * part / whole) : "-";
}

}  // namespace

const std::vector<planner::StepShape>& PredictedSteps() {
  static const std::vector<planner::StepShape> steps = {
      {.sequences = 8}, {.sequences = 1}, {.rows_per_sequence = 512}};
  return steps;
}

namespace {

// Calls `ask` with a planner for the devices and the model.
template <typename Ask>
auto AskPlanner(const LayoutQuestion& question, const Ask& ask)
    -> decltype(ask(std::declval<LayoutPlanner>())) {
  ASSIGN_OR_RETURN(const std::string text, ReadInput(question.topology));
  ASSIGN_OR_RETURN(const comm::Topology topology, comm::Topology::Parse(text, question.topology));
  const double kv_bytes = question.kv_dtype == "f32" ? 4 : question.kv_dtype == "int8" ? 1 : 2;
  ASSIGN_OR_RETURN(const models::WorkOfRanks work,
                   models::WorkOfRanks::Create(question.model, question.dtype, kv_bytes, question.load_mtp));
  ASSIGN_OR_RETURN(const LayoutPlanner planner,
                   LayoutPlanner::Create(
                       topology, work.spec().hidden, FlopsType(topology, question.dtype),
                       [&work](const parallel::Layout& layout, int rank) { return work.Of(layout, rank); }));
  return ask(planner);
}

}  // namespace

StatusOr<std::vector<LayoutPlanner::Prediction>> PredictLayouts(const LayoutQuestion& question) {
  return AskPlanner(question, [](const LayoutPlanner& planner) { return planner.Compare(PredictedSteps()); });
}

StatusOr<parallel::Split> PredictSplit(const LayoutQuestion& question, const parallel::Layout& layout) {
  return AskPlanner(question, [&](const LayoutPlanner& planner) {
    return planner.BalanceLayers(layout, PredictedSteps().front());
  });
}

std::string LayoutTable(const std::vector<LayoutPlanner::Prediction>& predictions, size_t lines) {
  std::vector<std::vector<std::string>> rows = {{"layout", "weights of a rank", "free", "decode 8",
                                                 "between ranks", "interval", "decode 1", "between ranks",
                                                 "prefill 512"}};
  for (const LayoutPlanner::Prediction& prediction : predictions) {
    if (rows.size() > lines) break;
    const StepTime &eight = prediction.steps[kDecode8], &one = prediction.steps[kDecode1],
                   &prefill = prediction.steps[kPrefill];
    rows.push_back({prediction.layout.Name(), FormatBytes(prediction.weight_bytes),
                    prediction.fits ? FormatBytes(prediction.free_bytes) : "too large",
                    Milliseconds(eight.seconds), Share(eight.communication, eight.seconds),
                    Milliseconds(eight.interval), Milliseconds(one.seconds),
                    Share(one.communication, one.seconds), Milliseconds(prefill.seconds)});
  }
  return FormatTable(rows, /*markdown=*/false);
}

}  // namespace moesaic::app
