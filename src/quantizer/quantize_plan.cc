#include "quantizer/quantize_plan.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <thread>

#include "models/model_info.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {
namespace {

// Reserve for thread stacks, names of a unit's tensors, and transfers in flight.
constexpr int64_t kReserve = int64_t{12} << 20;
// Reserve for code that a card's libraries load for new shapes, beyond the loading at opening. Estimated; not
// measured on a card.
constexpr int64_t kDeviceReserve = int64_t{128} << 20;
// Size of a unit. Calibration leaves memory for two of them if possible.
constexpr int64_t kAmpleUnit = int64_t{32} << 20;
const int kMachine = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));

// Chooses the fastest limits that leave memory for units, or else the smallest ones.
void ChooseLimits(const QuantizeOptions& options, const CutOptions& cut, int64_t memory, QuantizePlan* plan) {
  const UnitSizes sizes = options.sizes.unit_bytes > 0 ? options.sizes : UnitSizes{.unit_bytes = kAmpleUnit};
  const int64_t units = CutWork(plan->items, plan->forms, plan->output, cut, sizes).bytes();
  std::vector<CalibrationLimits> all = LimitsFor(plan->spec, options.output);
  if (options.slab_values > 0) {
    for (CalibrationLimits& limits : all) limits.slab_values = options.slab_values;
  }
  if (options.limits) all = {*options.limits};
  plan->calibration_bytes = std::numeric_limits<int64_t>::max();
  for (const CalibrationLimits& limits : all) {
    const int64_t bytes = CalibrationBytes(plan->spec, plan->items, options.output,
                                           options.threads > 0 ? options.threads : kMachine, limits);
    if (bytes < plan->calibration_bytes) {
      plan->calibration_bytes = bytes;
      plan->limits = limits;
    }
    if (bytes + units <= memory) return;
  }
}

}  // namespace

StatusOr<QuantizePlan> PlanQuantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options) {
  if (source.container() == "moesaic") {
    return InvalidArgument("{}: quantize the checkpoint that this file was packed from", source.path());
  }
  QuantizePlan plan;
  ASSIGN_OR_RETURN(plan.spec, models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  if (source.tensors().empty()) {
    plan.items = ListItems(plan.spec);
  } else {
    models::DropAbsentMtp(source, plan.spec);
    ASSIGN_OR_RETURN(plan.items, ListItems(source));
  }
  ASSIGN_OR_RETURN(plan.forms, FormsOf(source, plan.items));
  for (const SourceForm& form : plan.forms) plan.source_bytes += form.bytes;
  OutputSettings settings = options.output;
  const bool chosen = settings.analysis != nullptr && settings.analysis->mix.has_value();
  if (settings.mix.wanted()) {
    if (settings.analyze.wanted()) {
      return InvalidArgument("a mix of precisions excludes smoothing and static activations");
    }
    ASSIGN_OR_RETURN(MixPlan mix, PlanMix(plan.items, plan.forms, plan.spec, settings));
    plan.fixed = mix.fixed;
    plan.units = std::move(mix.units);
    if (!chosen) {
      auto nominal = std::make_shared<Analysis>();
      nominal->mix = Mix{.units = plan.units, .routers = {}};
      RETURN_IF_ERROR(ChooseMix(settings.mix, plan.fixed, &*nominal->mix));
      settings.analysis = std::move(nominal);
    }
  }
  ASSIGN_OR_RETURN(plan.output, PlanOutput(plan.items, plan.forms, settings));
  const CutOptions cut{.by_layer = options.output.gptq};
  // Headers were read through the maps. Their pages are released before memory is counted.
  source.ForgetMaps();
  // The memory of runs differs slightly. A run that resumes with the units of a run that used all its memory
  // must not fail for that, so it reserves less.
  const int64_t reserve = kReserve + (options.device != nullptr ? kDeviceReserve : 0);
  const int64_t program =
      runtime::MeasureResidentMemory().now + (options.sizes.unit_bytes > 0 ? reserve / 2 : reserve);
  if (options.output.calibrated()) ChooseLimits(options, cut, options.memory - program, &plan);
  const int64_t taken = program + plan.calibration_bytes, left = options.memory - taken;
  plan.sizes = options.sizes;
  if (settings.mix.wanted() && !chosen) {
    // Gains under GPTQ are measured first, with the memory of calibration.
    MixBegun begun = options.begun;
    begun.slack = reserve - kReserve / 2;  // as above: an earlier pass may have used all its memory
    StatusOr<std::vector<MixPass>> passes =
        PlanMixPasses(plan.spec, plan.items, options.output, begun, options.memory - program);
    if (!passes.ok()) {
      return ResourceExhausted("--memory {} is too little: the program itself needs {}; {}", options.memory,
                               program, Message(passes.status()));
    }
    plan.passes = *std::move(passes);
  }
  if (plan.sizes.unit_bytes == 0) {
    const StatusOr<UnitSizes> fitting = FitUnits(plan.items, plan.forms, plan.output, cut, left);
    if (!fitting.ok()) {
      const std::string calibration =
          plan.calibration_bytes == 0
              ? ""
              : fmt::format(", {} of them for {} calibration tokens (fewer tokens{} need less)",
                            plan.calibration_bytes, options.output.calibration.tokens,
                            options.output.mix.wanted() ? " or --mix-tokens" : "");
      return ResourceExhausted("--memory {} is too little: the program itself needs {}{}; {}", options.memory,
                               taken, calibration, Message(fitting.status()));
    }
    plan.sizes = *fitting;
  }
  plan.work = CutWork(plan.items, plan.forms, plan.output, cut, plan.sizes);
  if (plan.work.alone_bytes == 0) plan.sizes.alone_bytes = 0;
  if (plan.work.bytes() > left) {
    return ResourceExhausted(
        "--memory {} is too little to resume a run that started with more: {} are needed", options.memory,
        plan.work.bytes() + taken);
  }
  // Opening a card may temporarily take more memory than it keeps, and the kernel counts the peak of the
  // whole process. The run would complete and then report an error.
  if (options.device != nullptr && options.resident_before > options.memory) {
    return ResourceExhausted(
        "--memory {} is too little: {} are resident already, including the opening of {}", options.memory,
        options.resident_before, options.device->info().name);
  }
  return plan;
}

}  // namespace moesaic::quantizer
