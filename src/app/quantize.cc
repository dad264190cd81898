// `moesaic quantize MODEL --output DIR --scheme S`: another grid for a checkpoint's linears, in bounded
// memory.
#include "quantizer/quantize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
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

struct Options {
  std::string model, output, scheme, method = "rtn", io = "buffered";
  MixFlags mix;
  CalibrationFile calibration{.path = "", .max_tokens = 131072, .sequence_length = 2048};
  double damping = 0.01;
  std::string act_order = "on";
  bool weigh_by_router = false;
  std::string rare_experts;  // empty: not said
  double min_coverage = 0.9, save_seconds = 30;
  std::string activations = "dynamic", smoothing = "off";
  double static_tolerance = 2;
  std::vector<std::pair<std::string, std::string>> keep;  // dtype, pattern
  std::string group_size = "32";
  uint64_t memory = uint64_t{8} << 30, shard_bytes = 5'000'000'000;
  int threads = 0;
  std::string device = "cpu";
  bool plan = false;
};

// What linears become, as it was asked for.
std::string What(const Options& options) {
  return options.mix.precisions.empty() ? options.scheme
                                        : fmt::format("a mix of {}", fmt::join(options.mix.precisions, ", "));
}

// Flags that would do nothing.
Status CheckUsed(const Options& options, const Verb& verb) {
  const bool gptq = options.method == "gptq", mix = !options.mix.precisions.empty();
  const bool calibrated = gptq || mix || options.smoothing == "on" || options.activations == "static";
  const char* calibration = "--method gptq, --mix, --smoothing on or --activations static";
  const auto said = [&](const std::string& name) {
    return options.scheme == name || std::ranges::count(options.mix.precisions, name) > 0;
  };
  const bool groups = said("w4a16") || said("w8a16");
  struct Rule {
    const char* flag;
    bool used;
    const char* what;
  };
  for (const Rule& rule :
       {Rule{"--dampening-frac", gptq, "--method gptq"}, Rule{"--act-order", gptq, "--method gptq"},
        Rule{"--weigh-by-router", gptq, "--method gptq"},
        Rule{"--device", gptq || options.device == "cpu", "--method gptq"},
        Rule{"--min-coverage", gptq, "--method gptq"},
        Rule{"--static-tolerance", options.activations == "static", "--activations static"},
        Rule{"--group-size", groups, "--scheme w4a16 or w8a16, or one of them in --mix"},
        Rule{"--bits-per-weight", mix, "--mix"}, Rule{"--budget", mix, "--mix"},
        Rule{"--budget-per-token", mix, "--mix"}, Rule{"--mix-tokens", mix, "--mix"},
        Rule{"--calibration-tokens", calibrated, calibration}, Rule{"--save-every", calibrated, calibration},
        Rule{"--max-seq-length", calibrated, calibration}}) {
    if (verb.Count(rule.flag) > 0 && !rule.used) {
      return InvalidArgument("{} does nothing without {}; leave it out, or add that", rule.flag, rule.what);
    }
  }
  if (verb.Count("--min-coverage") > 0 && options.rare_experts == "all") {
    return InvalidArgument(
        "--min-coverage does nothing with --rare-experts all, by which no expert lacks tokens; leave one "
        "out");
  }
  return OkStatus();
}

StatusOr<quantizer::QuantizeOptions> Parse(const Options& options) {
  quantizer::QuantizeOptions parsed;
  ASSIGN_OR_RETURN(parsed.output.group_size, quantizer::ParseGroupSize(options.group_size));
  if (options.scheme == "w4a16" && parsed.output.group_size == 0) {
    return InvalidArgument("--group-size channel is for w8a16; w4a16 has groups of 32, 64 or 128 inputs");
  }
  if (options.mix.precisions.empty()) {
    ASSIGN_OR_RETURN(parsed.output.scheme, quantizer::ParseScheme(options.scheme));
  } else {
    ASSIGN_OR_RETURN(parsed.output.mix, ParseMix(options.mix, parsed.output.group_size));
  }
  parsed.output.gptq = options.method == "gptq";
  parsed.output.search = options.method != "rtn";
  parsed.output.damping = options.damping;
  parsed.output.act_order = options.act_order == "on";
  parsed.output.weigh_by_router = options.weigh_by_router;
  if (!options.rare_experts.empty()) {
    if (!parsed.output.gptq) {
      return InvalidArgument("--rare-experts is for --method gptq, not {}", options.method);
    }
    ASSIGN_OR_RETURN(parsed.output.rare_experts, quantizer::ParseRareExperts(options.rare_experts));
  }
  if (options.weigh_by_router && parsed.output.rare_experts == quantizer::RareExperts::kAll) {
    return InvalidArgument(
        "--weigh-by-router counts what the router gives an expert's own tokens, --rare-experts all takes all "
        "tokens alike: choose one");
  }
  parsed.min_coverage = options.min_coverage;
  parsed.save_seconds = options.save_seconds;
  parsed.output.analyze = {.smoothing = options.smoothing == "on",
                           .static_activations = options.activations == "static",
                           .static_tolerance = options.static_tolerance};
  if (parsed.output.analyze.wanted() && options.scheme != "w8a8") {
    return InvalidArgument("--activations static and --smoothing on are for --scheme w8a8, not {}",
                           What(options));
  }
  parsed.output.shard_bytes = static_cast<int64_t>(options.shard_bytes);
  for (const auto& [dtype, pattern] : options.keep) {
    if (dtype != "fp32" && dtype != "bf16") {
      return InvalidArgument("--keep takes fp32 or bf16 and a regular expression, found \"{}\"", dtype);
    }
    parsed.output.keep.push_back({dtype == "fp32" ? tensor::DType::kF32 : tensor::DType::kBF16, pattern});
  }
  parsed.memory = static_cast<int64_t>(options.memory);
  parsed.direct = options.io == "direct";
  return parsed;
}

// Output bytes a second since the first unit tell the time that is left.
class Eta {
 public:
  std::string Note(const quantizer::QuantizeProgress& at) {
    if (at.checking || start_bytes_ < 0) {
      start_bytes_ = at.done;
      start_ = std::chrono::steady_clock::now();
      return at.checking ? "checking what is there" : "";
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

void PrintAnalysis(const Options& options, const quantizer::Analysis& analysis, size_t rounded) {
  if (options.smoothing == "on") {
    double before = 0, after = 0;
    size_t searched = 0, smoothed = 0;
    for (const quantizer::AnalysisFinding& finding : analysis.findings) {
      before += finding.loss_before;
      after += finding.loss_after;
      searched += finding.loss_before > 0 ? 1 : 0;
      smoothed += finding.alpha > 0 ? 1 : 0;
    }
    Print(
        "smoothing: {} of {} places where it is possible; there the outputs' error is {:.3f} of that "
        "without\n",
        smoothed, searched, before > 0 ? after / before : 1);
  }
  const auto stand_ins = std::ranges::count(analysis.findings, true, &quantizer::AnalysisFinding::stand_ins);
  if (stand_ins > 0) {
    Print("coverage: {} experts see few tokens; others of their layers stood in\n", stand_ins);
  }
  if (options.activations == "static") {
    Print("activations: {} of {} linears static, the others dynamic\n", analysis.input_scales.size(),
          rounded);
  }
}

void PrintMix(const quantizer::Mix& mix) {
  Print("{}", FormatTable(MixSummary(mix), /*markdown=*/false));
  Print("mix: {:.3f} bits a weight, predicted KL {:.3g} nats a token ({} tokens measured{})\n", mix.bits,
        mix.loss, mix.tokens, mix.exact ? "" : "; the choice may be off the best by one unit's step");
  for (const std::string& line : MixNotes(mix)) Print("{}\n", line);
}

void PrintCalibration(const Options& options, const quantizer::CalibrationReport& report) {
  double loss = 0, nearest = 0;
  size_t leaning = 0, unseen = 0, dead = 0;
  for (const quantizer::LinearFinding& linear : report.linears) {
    loss += linear.loss;
    nearest += linear.of_nearest > 0 ? linear.loss / linear.of_nearest : 0;
    leaning += linear.shrinkage > 0.5 ? 1 : 0;
    unseen += linear.tokens == 0 ? 1 : 0;
    dead += linear.nearest ? 1 : 0;
  }
  Print("gptq: the outputs' squared error is {:.3f} of that of rounding to the nearest, over {} linears\n",
        nearest > 0 ? loss / nearest : 1, report.linears.size());
  if (leaning > 0) {
    Print("coverage: {} linears of experts that few tokens reach lean on their layer, {} of them saw none\n",
          leaning, unseen);
  }
  if (dead > 0) {
    Print("{} linears {}whose inputs are 0 in every token are rounded to the nearest\n", dead,
          options.rare_experts == "identity"
              ? fmt::format("of experts that fewer than {} tokens reach, or ", quantizer::kCoveredTokens)
              : "");
  }
  Print("computing: {:.1f} s Hessians, {:.1f} s factors, {:.1f} s rounding, {:.1f} s forward\n",
        report.hessian_seconds, report.factor_seconds, report.round_seconds,
        std::max(0.0, report.walk_seconds - report.hessian_seconds - report.factor_seconds -
                          report.round_seconds));
}

void PrintReport(const Options& options, const quantizer::QuantizeReport& report) {
  const auto bytes = [](int64_t count) { return FormatBytes(static_cast<double>(count)); };
  Print("{}: {}, from {}; {} linears rounded to {}, {} tensors copied, {} converted\n", options.output,
        bytes(report.output_bytes), bytes(report.source_bytes), report.rounded, What(options), report.copied,
        report.converted);
  const quantizer::StreamCounts& stream = report.stream;
  if (stream.resumed_units + stream.redone_units > 0) {
    Print("resumed: {} of {} units were done, {} were done again because their bytes were not right\n",
          stream.resumed_units, report.units, stream.redone_units);
  } else if (report.analysis_resumed) {
    Print("resumed: the analysis, or a part of it, was made before\n");
  }
  if (report.analysis != nullptr && report.analysis->mix) PrintMix(*report.analysis->mix);
  if (report.analysis != nullptr) PrintAnalysis(options, *report.analysis, report.rounded);
  if (options.method == "gptq") PrintCalibration(options, report.calibration);
  if (!report.device.empty()) Print("device: {}\n", report.device);
  const auto moved = static_cast<double>(stream.read_bytes + stream.written_bytes);
  const auto least = static_cast<double>(report.source_bytes + report.output_bytes);
  // Of a run that went on these bytes are a part, and the least is of the whole; what an analysis reads is
  // not counted.
  const std::string of_least = stream.resumed_units > 0 ? " for the units that were left"
                               : report.analysis != nullptr
                                   ? " beside what the analysis read"
                                   : fmt::format(", {:.3f} of the least", moved / least);
  Print(
      "{}: {} read, {} written{} ({}/s together); {:.1f} s computing, {:.1f} s waiting for reads, {:.1f} s "
      "for writes\n",
      FormatSeconds(report.seconds), bytes(stream.read_bytes), bytes(stream.written_bytes), of_least,
      FormatBytes(moved / report.seconds), report.compute_seconds(), stream.read_wait_seconds,
      stream.write_wait_seconds);
  Print("memory: {} at most, --memory {}; {} by {}\n", bytes(report.peak_bytes),
        bytes(static_cast<int64_t>(options.memory)), options.io, report.io);
}

// Of a config alone, which has no tokenizer, --plan takes the tokens that were asked for.
Status ReadCalibration(const Options& options, const checkpoint::Checkpoint& source,
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
        "--method gptq, --mix, --smoothing on and --activations static need --calibration FILE: text like "
        "what "
        "the model will read");
  }
  ASSIGN_OR_RETURN(parsed->calibration, ReadCalibrationFile(file, source));
  parsed->output.calibration = quantizer::CalibrationId::Of(parsed->calibration);
  return OkStatus();
}

Status RunPlan(const Options& options, const quantizer::QuantizeOptions& parsed,
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

// Null: the processor.
StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(const Options& options) {
  if (options.device == "cpu") return nullptr;
  if (const Status named = kernels::CardOf(options.device).status(); !named.ok()) {
    return Annotate(named, "--device " + options.device);
  }
  if (options.plan) {
    return InvalidArgument("--plan foretells the processor's time: leave out --device {}", options.device);
  }
  StatusOr<std::unique_ptr<kernels::Device>> device = kernels::OpenDevice(options.device);
  if (!device.ok()) return Annotate(device.status(), "--device " + options.device);
  return device;
}

Status RunQuantize(const Options& options) {
  ASSIGN_OR_RETURN(quantizer::QuantizeOptions parsed, Parse(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Device> device, OpenDevice(options));
  parsed.device = device.get();
  ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
  ASSIGN_OR_RETURN(const auto pool, MakeThreads(options.threads));
  ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(options.model));
  parsed.threads = pool->size();
  if (!parsed.output.calibrated() && !options.calibration.path.empty()) {
    return InvalidArgument(
        "--calibration is for --method gptq, --mix, --smoothing on and --activations static; --method {} by "
        "itself takes none",
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
  PrintReport(options, report);
  if (report.peak_bytes > static_cast<int64_t>(options.memory)) {
    return ResourceExhausted("the output is complete, but {} bytes were resident, more than --memory {}",
                             report.peak_bytes, options.memory);
  }
  return OkStatus();
}

void AddCalibrationFlags(Verb& verb, Options& options) {
  verb.AddOption("--calibration", options.calibration.path,
                 "Text for gptq, --mix, --smoothing and --activations static: .txt, .jsonl of {\"text\"} or "
                 "{\"messages\"}, or .safetensors with \"tokens\"")
      .ExistingFile();
  verb.AddOption("--calibration-tokens", options.calibration.max_tokens, "At most so many of it")
      .Range(int64_t{2}, int64_t{1} << 30)
      .ShowDefault();
  verb.AddOption("--max-seq-length", options.calibration.sequence_length,
                 "Longer texts are cut into sequences of so many tokens")
      .Range(2, 1 << 20)
      .ShowDefault();
  verb.AddOption("--dampening-frac", options.damping,
                 "gptq: of the mean of a Hessian's diagonal, added to it; raised where that is not enough")
      .Range(1e-6, 1.0)
      .DefaultText("0.01");
  verb.AddOption("--act-order", options.act_order, "gptq: round the inputs of largest activations first")
      .OneOf({"on", "off"})
      .ShowDefault();
  verb.AddFlag("--weigh-by-router", options.weigh_by_router,
               "gptq: an expert's tokens count by the square of what the router gives them");
  verb.AddOption(
          "--rare-experts", options.rare_experts,
          "gptq: an expert that few tokens reach leans on its layer (shrink), is rounded to the nearest "
          "below 32 tokens (identity), or is calibrated as every expert is by all tokens, routed to it or "
          "not (all)")
      .OneOf(quantizer::RareExpertsNames())
      .DefaultText("shrink");
  verb.AddOption(
          "--activations", options.activations,
          "w8a8: scales of activations are found for each token while the model runs (dynamic), or fixed "
          "by calibration wherever that is not much worse (static)")
      .OneOf({"dynamic", "static"})
      .ShowDefault();
  verb.AddOption("--static-tolerance", options.static_tolerance,
                 "static: a linear stays dynamic if its outputs' squared error would be more times that")
      .Range(1.0, 1e6)
      .DefaultText("2");
  verb.AddOption("--smoothing", options.smoothing,
                 "w8a8: SmoothQuant, with the best alpha for each norm and its linears, each up and its down")
      .OneOf({"on", "off"})
      .ShowDefault();
  verb.AddOption("--save-every", options.save_seconds,
                 "save calibration's state after a layer, at most every so many seconds")
      .Check([](const std::string& text) {
        double seconds = 0;
        const char* const end = text.data() + text.size();
        const auto read = std::from_chars(text.data(), end, seconds);
        const bool number = read.ec == std::errc() && read.ptr == end;
        return number && seconds >= 0 ? "" : fmt::format("{} is not a number of seconds, 0 or more", text);
      })
      .ShowDefault();
  verb.AddOption("--min-coverage", options.min_coverage,
                 "gptq: stop where less than this share of a layer's experts see 32 tokens or more")
      .Range(0.0, 1.0)
      .DefaultText("0.9");
}

}  // namespace

void AddQuantize(Verb& root, VerbRun& run) {
  auto options = std::make_shared<Options>();
  Verb verb = root.AddVerb("quantize", "Write a checkpoint in fewer bits, in bounded memory");
  AddModelPath(verb, options->model, "Hugging Face folder or .gguf file");
  verb.AddOption("-o,--output", options->output,
                 "The folder to write; one that a killed run left is gone on with. --plan does without");
  verb.AddOption(
          "--scheme", options->scheme,
          "What linears become: w8a8 (int8 by output, int8 activations), w8a16 (int8 in groups), w4a16 (int4 "
          "in groups), nvfp4, fp8 (128x128 blocks)")
      .OneOf(quantizer::SchemeNames());
  AddMixFlags(verb, options->mix);
  verb.AddOption("--group-size", options->group_size,
                 "Inputs that share a scale of w4a16 or w8a16; channel, for w8a16: one scale for an output")
      .OneOf({"32", "64", "128", "channel"})
      .ShowDefault();
  verb.AddOption(
          "--method", options->method,
          "rtn: scales that fit the largest value; mse: scales of the least squared error; gptq: such "
          "scales, and each weight rounded so that the layer's outputs on calibration text change least")
      .OneOf({"rtn", "mse", "gptq"})
      .ShowDefault();
  AddCalibrationFlags(verb, *options);
  verb.AddOption("--device", options->device,
                 "gptq: where Hessians, factors and rounding are worked out: cpu, cuda or cuda:N (not run on "
                 "a card yet; layers run on the processor)")
      .ShowDefault();
  verb.AddOption(
          "--keep", options->keep,
          "DTYPE REGEX: linears whose name has a match stay in fp32 or bf16; may be said more than once")
      .OneValue();
  verb.AddOption("--memory", options->memory, "What may be resident at most, e.g. 512M or 8G")
      .Bytes()
      .DefaultText("8G");
  verb.AddOption("--io", options->io, "How the checkpoint is read: buffered, or direct (past the page cache)")
      .OneOf({"buffered", "direct"})
      .ShowDefault();
  verb.AddOption("--shard-size", options->shard_bytes, "Size of the files written")
      .Bytes()
      .DefaultText("5000000000");
  verb.AddFlag(
      "--plan", options->plan,
      "Measure this machine for some seconds, tell bytes, waves, memory and time, and do nothing; MODEL may "
      "be a config.json alone");
  AddThreadsFlag(verb, options->threads);
  verb.Footer(
      "Embeddings, heads, routers, norms and MLA's kv_b_proj keep their precision. The folder is a\n"
      "compressed-tensors checkpoint, for Moesaic and for vLLM. A run that was killed goes on when the same\n"
      "command is given again, and what comes out is the same to the byte.\n\n"
      "Examples:\n  moesaic quantize Kimi-K2-Instruct -o Kimi-K2-w4a16 --scheme w4a16 --memory 16G\n"
      "  moesaic quantize models/moesaic-tiny -o tiny-nvfp4 --scheme nvfp4 --method mse\n"
      "  moesaic quantize MODEL -o MIXED --mix nvfp4,fp8,bf16 --bits-per-weight 5 --calibration text.jsonl\n"
      "  moesaic quantize DeepSeek-V3/config.json --scheme w8a8 --plan");
  verb.OnParsed([options, verb, &run] {
    if (options->output.empty() && !options->plan)
      FailUsage(
          "--output"
          " is required");
    if (!options->scheme.empty() && !options->mix.precisions.empty()) {
      FailUsage("--scheme is one precision for all linears, --mix several: give one of them");
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
