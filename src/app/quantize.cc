// `moesaic quantize MODEL --output DIR --scheme S` rounds a checkpoint's linears to another grid in bounded
// memory.
#include "quantizer/quantize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>

#include "app/calibration_text.h"
#include "app/interrupt.h"
#include "app/mix_flags.h"
#include "app/mix_table.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/quantize_table.h"
#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "models/model_info.h"
#include "quantizer/calibrate/calibration_forecast.h"
#include "quantizer/preflight.h"

namespace moesaic::app {
namespace {

struct QuantizeFlags {
  std::string model, output, scheme, method = "rtn", io = "buffered";
  MixFlags mix;
  CalibrationFile calibration{.path = "", .max_tokens = 131072, .sequence_length = 2048};
  std::string activations = "dynamic";
  std::vector<std::pair<std::string, std::string>> keep;  // dtype, pattern
  uint64_t memory = uint64_t{8} << 30;
  int threads = 0;
  std::string device = "cpu";
  bool plan = false;

  bool smooths() const { return activations != "dynamic"; }
};

// Describes the requested precisions.
std::string What(const QuantizeFlags& options) {
  return options.mix.precisions.empty() ? options.scheme
                                        : fmt::format("a mix of {}", fmt::join(options.mix.precisions, ", "));
}

// Rejects flags that would have no effect.
Status CheckUsed(const QuantizeFlags& options, const Verb& verb) {
  const bool gptq = options.method == "gptq", mix = !options.mix.precisions.empty();
  const bool calibrated = gptq || mix || options.smooths();
  struct Rule {
    const char* flag;
    bool used;
    const char* needs;
  };
  for (const Rule& rule : {Rule{"--device", gptq || options.device == "cpu", "--method gptq"},
                           Rule{"--bits-per-weight", mix, "--mix"}, Rule{"--budget", mix, "--mix"},
                           Rule{"--mix-tokens", mix, "--mix"},
                           Rule{"--calibration-tokens", calibrated,
                                "--method gptq, --mix, or --activations smoothed or static"}}) {
    if (verb.Count(rule.flag) > 0 && !rule.used) {
      return InvalidArgument("{} has no effect without {}; omit it or add that", rule.flag, rule.needs);
    }
  }
  return OkStatus();
}

StatusOr<quantizer::QuantizeOptions> Parse(const QuantizeFlags& options) {
  quantizer::QuantizeOptions parsed;
  if (options.mix.precisions.empty()) {
    ASSIGN_OR_RETURN(const quantizer::Precision precision, quantizer::ParsePrecision(options.scheme));
    parsed.output.scheme = *precision.scheme;
    parsed.output.group_size = precision.group_size;
  } else {
    ASSIGN_OR_RETURN(parsed.output.mix, ParseMix(options.mix));
  }
  parsed.output.gptq = options.method == "gptq";
  parsed.output.search = options.method != "rtn";
  parsed.output.analyze = {.smoothing = options.smooths(),
                           .static_activations = options.activations == "static"};
  if (parsed.output.analyze.wanted() && options.scheme != "w8a8") {
    return InvalidArgument("--activations {} needs --scheme w8a8, found {}", options.activations,
                           What(options));
  }
  for (const auto& [dtype, pattern] : options.keep) {
    if (dtype != "fp32" && dtype != "bf16") {
      return InvalidArgument("--keep needs fp32 or bf16 and a regular expression, found \"{}\"", dtype);
    }
    parsed.output.keep.push_back({dtype == "fp32" ? tensor::DType::kF32 : tensor::DType::kBF16, pattern});
  }
  parsed.memory = static_cast<int64_t>(options.memory);
  parsed.direct = options.io == "direct";
  return parsed;
}

// Estimates the remaining time from the output rate since the first unit.
class Eta {
 public:
  std::string Note(const quantizer::QuantizeProgress& at) {
    if (at.checking || start_bytes_ < 0) {
      start_bytes_ = at.done;
      start_ = std::chrono::steady_clock::now();
      return at.checking ? "checking finished units" : "";
    }
    const std::string stage = at.stage.empty() ? "" : at.stage + ", ";
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const auto bytes = static_cast<double>(at.done - start_bytes_);
    if (bytes <= 0 || seconds <= 0) return at.stage;
    return fmt::format("{}{}, {} left", stage, FormatBytes(static_cast<double>(at.total)),
                       FormatSeconds(static_cast<double>(at.total - at.done) * seconds / bytes));
  }

 private:
  int64_t start_bytes_ = -1;
  std::chrono::steady_clock::time_point start_;
};

void PrintAnalysis(const QuantizeFlags& options, const quantizer::Analysis& analysis, size_t rounded) {
  if (options.smooths()) {
    double before = 0, after = 0;
    size_t searched = 0, smoothed = 0;
    for (const quantizer::AnalysisFinding& finding : analysis.findings) {
      before += finding.loss_before;
      after += finding.loss_after;
      searched += finding.loss_before > 0 ? 1 : 0;
      smoothed += finding.alpha > 0 ? 1 : 0;
    }
    Print(
        "smoothing: {} of {} possible places; the outputs' error there is {:.3f} of that without smoothing\n",
        smoothed, searched, before > 0 ? after / before : 1);
  }
  const auto stand_ins = std::ranges::count(analysis.findings, true, &quantizer::AnalysisFinding::stand_ins);
  if (stand_ins > 0) {
    Print("coverage: {} experts have few tokens; other tokens of their layers were used\n", stand_ins);
  }
  if (options.activations == "static") {
    Print("activations: {} of {} linears are static, the others dynamic\n", analysis.input_scales.size(),
          rounded);
  }
}

void PrintMix(const quantizer::Mix& mix) {
  Print("{}", FormatTable(MixSummary(mix), /*markdown=*/false));
  Print("mix: {:.3f} bits per weight, predicted KL {:.3g} nats per token ({} tokens measured{})\n", mix.bits,
        mix.loss, mix.tokens,
        mix.exact ? "" : "; the choice may differ from the optimum by one step of a group");
  for (const std::string& line : MixNotes(mix)) Print("{}\n", line);
}

void PrintCalibration(const quantizer::CalibrationReport& report) {
  double loss = 0, nearest = 0;
  size_t shrunk = 0, unseen = 0, dead = 0;
  for (const quantizer::LinearFinding& linear : report.linears) {
    loss += linear.loss;
    nearest += linear.of_nearest > 0 ? linear.loss / linear.of_nearest : 0;
    shrunk += linear.shrinkage > 0.5 ? 1 : 0;
    unseen += linear.tokens == 0 ? 1 : 0;
    dead += linear.nearest ? 1 : 0;
  }
  Print("gptq: the outputs' squared error is {:.3f} of that of rounding to the nearest, over {} linears\n",
        nearest > 0 ? loss / nearest : 1, report.linears.size());
  if (shrunk > 0) {
    Print(
        "coverage: {} linears of experts with few tokens use mostly the Hessian of their layer, {} of them "
        "had no tokens\n",
        shrunk, unseen);
  }
  const auto thin = std::ranges::count_if(report.routing, &quantizer::LayerRouting::thin);
  if (thin > 0) {
    Print(
        "coverage: in {} of {} layers more than a tenth of the experts have fewer than {} tokens; calibrate "
        "with more or more varied text\n",
        thin, report.routing.size(), quantizer::kCoveredTokens);
  }
  if (dead > 0) {
    Print("{} linears are rounded to the nearest, because their inputs are 0 in every token\n", dead);
  }
  Print("computing: {:.1f} s Hessians, {:.1f} s factors, {:.1f} s rounding, {:.1f} s forward\n",
        report.hessian_seconds, report.factor_seconds, report.round_seconds,
        std::max(0.0, report.walk_seconds - report.hessian_seconds - report.factor_seconds -
                          report.round_seconds));
}

void PrintQuantizeReport(const QuantizeFlags& options, const quantizer::QuantizeReport& report) {
  const auto bytes = [](int64_t count) { return FormatBytes(static_cast<double>(count)); };
  Print("{}: {}, from {}; {} linears rounded to {}, {} tensors copied, {} converted\n", options.output,
        bytes(report.output_bytes), bytes(report.source_bytes), report.rounded, What(options), report.copied,
        report.converted);
  const quantizer::StreamCounts& stream = report.stream;
  if (stream.resumed_units + stream.redone_units > 0) {
    Print("resumed: {} of {} units were finished, {} were repeated because their bytes were wrong\n",
          stream.resumed_units, report.units, stream.redone_units);
  } else if (report.analysis_resumed) {
    Print("resumed: an earlier run made the analysis or a part of it\n");
  }
  if (report.analysis != nullptr && report.analysis->mix) PrintMix(*report.analysis->mix);
  if (report.analysis != nullptr) PrintAnalysis(options, *report.analysis, report.rounded);
  if (options.method == "gptq") PrintCalibration(report.calibration);
  if (!report.device.empty()) Print("device: {}\n", report.device);
  const auto moved = static_cast<double>(stream.read_bytes + stream.written_bytes);
  const auto least = static_cast<double>(report.source_bytes + report.output_bytes);
  // The bytes of a resumed run cover a part, but the minimum covers the whole. Reads of an analysis are not
  // counted.
  const std::string of_least = stream.resumed_units > 0 ? " for the remaining units"
                               : report.analysis != nullptr
                                   ? " in addition to the reads of the analysis"
                                   : fmt::format(", {:.3f} x the minimum bytes", moved / least);
  Print(
      "{}: {} read, {} written{} ({}/s together); {:.1f} s computing, {:.1f} s waiting for reads, {:.1f} s "
      "for writes\n",
      FormatSeconds(report.seconds), bytes(stream.read_bytes), bytes(stream.written_bytes), of_least,
      FormatBytes(moved / report.seconds), report.compute_seconds(), stream.read_wait_seconds,
      stream.write_wait_seconds);
  Print("memory: peak {}, --memory {}; {} I/O with {}\n", bytes(report.peak_bytes),
        bytes(static_cast<int64_t>(options.memory)), options.io, report.io);
}

// For a config alone, which has no tokenizer, --plan assumes the requested number of tokens.
Status ReadCalibration(const QuantizeFlags& options, const checkpoint::Checkpoint& source,
                       quantizer::QuantizeOptions* parsed) {
  CalibrationFile file = options.calibration;
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  file.sequence_length = std::min(file.sequence_length, spec.context);
  if (options.plan && file.path.empty()) {
    parsed->output.calibration = {.xxh3 = "",
                                  .tokens = file.max_tokens,
                                  .sequences = (file.max_tokens - 1) / file.sequence_length + 1,
                                  .longest = file.sequence_length};
    return OkStatus();
  }
  if (file.path.empty()) {
    return InvalidArgument(
        "--method gptq, --mix, and --activations smoothed and static need --calibration FILE, a text similar "
        "to the model's future input");
  }
  ASSIGN_OR_RETURN(parsed->calibration, ReadCalibrationFile(file, source));
  parsed->output.calibration = quantizer::CalibrationId::Of(parsed->calibration);
  return OkStatus();
}

Status RunPlan(const QuantizeFlags& options, const quantizer::QuantizeOptions& parsed,
               const checkpoint::Checkpoint& source, const kernels::KernelTable& kernels,
               runtime::ThreadPool& pool) {
  ASSIGN_OR_RETURN(const quantizer::QuantizePlan plan, quantizer::PlanQuantize(source, parsed));
  ASSIGN_OR_RETURN(
      const quantizer::MachineRates rates,
      quantizer::MeasureRates(source, parsed.output, kernels, pool, options.output, parsed.direct));
  const quantizer::Forecast forecast = quantizer::ForecastOf(plan, rates, parsed.direct, pool.size());
  quantizer::CalibrationForecast calibration;
  if (parsed.output.calibrated()) {
    runtime::Arena scratch;
    const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
    const std::vector<quantizer::Precision> roundings = parsed.output.Roundings();
    const quantizer::Precision rounding =
        roundings.empty() ? quantizer::Precision{.scheme = quantizer::Scheme::kW8A8} : roundings.front();
    ASSIGN_OR_RETURN(const quantizer::CalibrationRates calibrating,
                     quantizer::MeasureCalibration(ctx, rounding.grid(), plan.limits.part_rows));
    calibration = quantizer::ForecastCalibration(plan, parsed.output, calibrating);
  }
  PrintPlan(What(options), options.model, options.output, parsed, plan, rates, forecast, calibration,
            !source.tensors().empty());
  return OkStatus();
}

// Returns null for the CPU.
StatusOr<std::unique_ptr<kernels::GptqAccelerator>> OpenAccelerator(const QuantizeFlags& options) {
  if (options.device == "cpu") return nullptr;
  if (const Status named = kernels::CardOf(options.device).status(); !named.ok()) {
    return Annotate(named, "--device " + options.device);
  }
  if (options.plan) {
    return InvalidArgument("--plan forecasts the time of the CPU; omit --device {}", options.device);
  }
  StatusOr<std::unique_ptr<kernels::GptqAccelerator>> device = kernels::OpenGptqAccelerator(options.device);
  if (!device.ok()) return Annotate(device.status(), "--device " + options.device);
  return device;
}

Status RunQuantize(const QuantizeFlags& options) {
  ASSIGN_OR_RETURN(quantizer::QuantizeOptions parsed, Parse(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::GptqAccelerator> device, OpenAccelerator(options));
  parsed.device = device.get();
  ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
  ASSIGN_OR_RETURN(const auto pool, MakeThreads(options.threads));
  ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(options.model));
  parsed.threads = pool->size();
  if (!parsed.output.calibrated() && !options.calibration.path.empty()) {
    return InvalidArgument(
        "--calibration has no effect with --method {} alone; it needs --method gptq, --mix, or --activations "
        "smoothed or static",
        options.method);
  }
  if (parsed.output.calibrated()) RETURN_IF_ERROR(ReadCalibration(options, *source, &parsed));
  if (options.plan) return RunPlan(options, parsed, *source, kernels, *pool);
  ASSIGN_OR_RETURN(parsed.texts, SideTexts(*source));
  const InterruptGuard guard;
  quantizer::QuantizeReport report;
  {
    Progress progress("quantizing");
    Eta eta;
    parsed.progress = [&](const quantizer::QuantizeProgress& at) {
      progress.Show(at.done, at.total, eta.Note(at));
      return !Interrupted();
    };
    ASSIGN_OR_RETURN(report, quantizer::Quantize(*source, parsed, kernels, *pool, options.output));
  }
  PrintQuantizeReport(options, report);
  if (report.peak_bytes > static_cast<int64_t>(options.memory)) {
    return ResourceExhausted(
        "the output is complete, but the peak resident memory was {} bytes, more than "
        "--memory {}",
        report.peak_bytes, options.memory);
  }
  return OkStatus();
}

// Rejects names that are not rounded precisions.
std::string CheckScheme(const std::string& name) {
  const StatusOr<quantizer::Precision> precision = quantizer::ParsePrecision(name);
  if (!precision.ok()) return Message(precision.status());
  return precision->kept() ? name + " rounds nothing" : "";
}

void AddCalibrationFlags(Verb& verb, QuantizeFlags& options) {
  verb.AddOption("--calibration", options.calibration.path,
                 "Text for gptq, --mix, and --activations smoothed and static: .txt, .jsonl of {\"text\"} or "
                 "{\"messages\"}, or .safetensors with \"tokens\"")
      .ExistingFile();
  verb.AddOption("--calibration-tokens", options.calibration.max_tokens,
                 "Maximum number of calibration tokens")
      .Range(int64_t{2}, int64_t{1} << 30)
      .ShowDefault();
  verb.AddOption(
          "--activations", options.activations,
          "w8a8: dynamic: a scale for each token, computed at run time; smoothed: also SmoothQuant with "
          "the best alpha for each norm and its linears, each up and its down; static: smoothed, with "
          "scales fixed by calibration if the error of a linear's outputs grows at most twofold")
      .OneOf({"dynamic", "smoothed", "static"})
      .ShowDefault();
}

}  // namespace

void AddQuantize(Verb& root, VerbRun& run) {
  auto options = std::make_shared<QuantizeFlags>();
  Verb verb = root.AddVerb("quantize", "Write a checkpoint in fewer bits, in bounded memory");
  AddModelPath(verb, options->model, "Hugging Face folder or .gguf file");
  verb.AddOption("-o,--output", options->output,
                 "Folder to write; the folder of an interrupted run is resumed. Not needed with --plan");
  verb.AddOption(
          "--scheme", options->scheme,
          "Precision of the linears: w8a8 (int8 by output, int8 activations), w8a16 (int8 in groups), w4a16 "
          "(int4 in groups), nvfp4, fp8 (128x128 blocks); w4a16 and w8a16 have groups of 32 inputs, or end "
          "with -g64 or -g128; w8a16-channel has one scale per output")
      .Check(CheckScheme);
  AddMixFlags(verb, options->mix);
  verb.AddOption(
          "--method", options->method,
          "rtn: scales that fit the largest value; mse: scales of least squared error; gptq: these scales, "
          "and weights rounded so that the layer's outputs on calibration text change least")
      .OneOf({"rtn", "mse", "gptq"})
      .ShowDefault();
  AddCalibrationFlags(verb, *options);
  verb.AddOption("--device", options->device,
                 "gptq: device for Hessians, factors and rounding: cpu, cuda or cuda:N (not run on a card "
                 "yet; layers run on the CPU)")
      .ShowDefault();
  verb.AddOption("--keep", options->keep,
                 "DTYPE REGEX: keep linears whose names match in fp32 or bf16; can be repeated")
      .OneValue();
  verb.AddOption("--memory", options->memory, "Maximum resident memory, e.g. 512M or 8G")
      .Bytes()
      .DefaultText("8G");
  verb.AddOption("--io", options->io, "I/O mode: buffered, or direct (past the page cache)")
      .OneOf({"buffered", "direct"})
      .ShowDefault();
  verb.AddFlag("--plan", options->plan,
               "Measure this machine for some seconds, print bytes, waves, memory and time, and exit; MODEL "
               "may be a config.json alone");
  AddThreadsFlag(verb, options->threads);
  verb.Footer(
      "Embeddings, heads, routers, norms and MLA's kv_b_proj keep their precision. The folder is a\n"
      "compressed-tensors checkpoint for Moesaic and vLLM. Repeat the command to resume an interrupted run;\n"
      "the result is identical to the byte.\n\n"
      "Examples:\n  moesaic quantize Kimi-K2-Instruct -o Kimi-K2-w4a16 --scheme w4a16 --memory 16G\n"
      "  moesaic quantize models/moesaic-tiny -o tiny-nvfp4 --scheme nvfp4 --method mse\n"
      "  moesaic quantize MODEL -o MIXED --mix nvfp4,fp8,bf16 --bits-per-weight 5 --calibration text.jsonl\n"
      "  moesaic quantize DeepSeek-V3/config.json --scheme w8a8 --plan");
  verb.OnParsed([options, verb, &run] {
    if (options->output.empty() && !options->plan) FailUsage("--output is required");
    if (!options->scheme.empty() && !options->mix.precisions.empty()) {
      FailUsage("--scheme gives all linears one precision, --mix several; use only one of them");
    }
    if (options->scheme.empty() && options->mix.precisions.empty()) {
      FailUsage("one of --scheme and --mix is required");
    }
    run = [options, verb]() -> Status {
      RETURN_IF_ERROR(CheckUsed(*options, verb));
      return RunQuantize(*options);
    };
  });
}

}  // namespace moesaic::app
