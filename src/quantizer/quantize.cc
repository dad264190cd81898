#include "quantizer/quantize.h"

#include <sys/stat.h>
#include <filesystem>

#include "base/checksum.h"
#include "checkpoint/open_checkpoint.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "models/model_info.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/io/disk_room.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/io/journal.h"
#include "quantizer/io/unit_rounder.h"
#include "quantizer/mixed/mix_walk.h"
#include "quantizer/stopwatch.h"
#include "runtime/atomic_file.h"
#include "runtime/memory.h"
#include "runtime/partial.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

// Identifies a checkpoint by its config, the names, types and shapes of its tensors, and the sizes and
// modification times of its files. Weights are not hashed, because that would require reading them.
std::string FingerprintOf(const checkpoint::Checkpoint& source) {
  base::Xxh3 sum;
  sum.AddText(source.config().dump());
  for (const checkpoint::TensorEntry& entry : source.tensors()) {
    sum.AddText(entry.name);
    sum.AddText(tensor::DTypeName(entry.dtype));
    sum.AddText(nlohmann::json(entry.shape).dump());
  }
  for (const auto& file : source.files()) {
    struct stat info = {};
    if (stat(file->path().c_str(), &info) != 0) continue;
    sum.AddText(fs::path(file->path()).filename().string());
    sum.AddText(fmt::format("{} {}.{:09}", info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec));
  }
  return sum.Hex();
}

// Identifies the kernels that calibration runs. Other kernels sum in another order, so roundings may differ.
std::string KernelsOf(const kernels::KernelTable& kernels) {
  base::Xxh3 sum;
  for (const kernels::KernelChoice& choice : kernels.choices) sum.AddText(choice.name);
  return sum.Hex();
}

// Creates a missing folder; returns true if it did.
StatusOr<bool> PrepareFolder(const std::string& folder) {
  std::error_code error;
  const bool made = fs::create_directories(folder, error);
  if (!fs::is_directory(folder)) {
    return IoError("{}: cannot create the folder: {}", folder, error ? error.message() : "the name is taken");
  }
  if (fs::exists(fs::path(folder) / kJournalFile)) return made;
  const bool only_analysis =
      std::ranges::all_of(fs::directory_iterator(folder, error), [](const auto& entry) {
        const std::string name = entry.path().filename().string();
        return name == kAnalysisFile || runtime::IsPartialOf(name, kAnalysisFile) || IsAnalysisState(name);
      });
  if (only_analysis && !error) return made;
  return InvalidArgument("{}: the folder is not empty and has no {} to resume from", folder, kJournalFile);
}

// Writes all files other than weights except config.json.
Status WriteTexts(const QuantizeOptions& options, const QuantizePlan& plan, const std::string& folder) {
  for (const auto& [name, text] : options.texts)
    RETURN_IF_ERROR(runtime::WriteFileAtomically(fmt::format("{}/{}", folder, name), text));
  if (plan.output.shards.size() > 1) {
    int64_t total = 0;
    std::string map;
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const OutputItem& item = plan.output.items[i];
      for (const OutputTensor& tensor : item.tensors) {
        total += tensor.stored.bytes();
        map += fmt::format("{}{}:\"{}\"", map.empty() ? "" : ",",
                           ordered_json(plan.items[i].name + tensor.stored.suffix).dump(),
                           plan.output.shards[item.shard].file);
      }
    }
    RETURN_IF_ERROR(runtime::WriteFileAtomically(
        folder + "/model.safetensors.index.json",
        fmt::format("{{\"metadata\":{{\"total_size\":{}}},\"weight_map\":{{{}}}}}\n", total, map)));
  }
  return OkStatus();
}

// Returns the torch_dtype for loaders with one dtype for all weights, so that no kept weight overflows.
const char* WidestKept(const QuantizePlan& plan) {
  bool f32 = false, bf16 = false;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    if (!plan.items[i].roundable) continue;
    const tensor::DType dtype = plan.output.items[i].tensors.front().stored.dtype;
    f32 |= dtype == tensor::DType::kF32;
    bf16 |= dtype == tensor::DType::kBF16;
  }
  return f32 ? "float32" : bf16 ? "bfloat16" : "float16";
}

// Writes config.json last, because nothing opens the folder without it.
Status WriteConfig(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                   const QuantizePlan& plan, const std::string& folder) {
  ordered_json config = ordered_json::parse(source.config().dump());
  const OutputSettings& settings = options.output;
  if (settings.mix.wanted() && plan.output.mixed.empty()) {
    config.erase("quantization_config");  // everything is kept: a plain checkpoint
    config[config.contains("dtype") ? "dtype" : "torch_dtype"] = WidestKept(plan);
  } else if (settings.mix.wanted()) {
    config["quantization_config"] = MixedQuantizationConfig(plan.output.mixed, plan.output.ignore);
  } else {
    config["quantization_config"] =
        QuantizationConfig(settings.scheme, settings.group_size, plan.output.ignore,
                           settings.analyze.static_activations, plan.output.dynamic);
  }
  return runtime::WriteFileAtomically(folder + "/config.json", config.dump(2) + "\n");
}

// Adds the device and its slab size, because the shapes of a device's products decide their bits.
void AddDevice(const QuantizeOptions& options, const CalibrationLimits& limits, const Journal& journal,
               ordered_json* header) {
  if (options.device != nullptr) {
    (*header)["device"] = {{"name", options.device->info().identity}, {"slab_values", limits.slab_values}};
  } else if (journal.header().contains("device")) {
    (*header)["device"] = "cpu";  // differs from the start
  }
}

// Returns the slab size that AddDevice recorded for a resumed run; 0: none.
int64_t SlabValuesOf(const Journal& journal) {
  const auto device = journal.header().find("device");
  if (device == journal.header().end() || !device->is_object()) return 0;
  const auto values = device->find("slab_values");
  return values != device->end() && values->is_number_integer() ? values->get<int64_t>() : 0;
}

// Plans the run and writes the journal's header, or takes over the existing one.
StatusOr<QuantizePlan> Begin(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                             const kernels::KernelTable& kernels, const std::string& folder, Journal& journal,
                             std::unique_ptr<GptqStage>* stage) {
  const bool begun = !journal.header().is_null();
  QuantizeOptions taken = options;
  if (begun) {
    const auto unit_bytes = journal.header().find("unit_bytes");
    if (unit_bytes == journal.header().end() || !unit_bytes->is_number_integer() || *unit_bytes < 1) {
      return DataLoss("{}/{}: \"unit_bytes\" is missing; empty the folder to start again", folder,
                      kJournalFile);
    }
    taken.sizes = {unit_bytes->get<int64_t>(), 0};
    const auto alone = journal.header().find("alone_bytes");
    if (alone != journal.header().end() && alone->is_number_integer()) {
      taken.sizes.alone_bytes = alone->get<int64_t>();
    }
    if (options.device != nullptr) taken.slab_values = SlabValuesOf(journal);
  }
  ASSIGN_OR_RETURN(QuantizePlan plan, PlanQuantize(source, taken));
  ordered_json header = {{"moesaic_quantize", 2},
                         {"source", FingerprintOf(source)},
                         {"settings", options.output.Json()},
                         {"unit_bytes", plan.sizes.unit_bytes},
                         {"units", plan.work.units.size()},
                         {"output_bytes", plan.output.bytes}};
  if (plan.sizes.alone_bytes > 0) header["alone_bytes"] = plan.sizes.alone_bytes;
  if (options.output.calibrated()) header["kernels"] = KernelsOf(kernels);
  AddDevice(options, plan.limits, journal, &header);
  if (begun) RETURN_IF_ERROR(CheckSameRun(journal, header));
  RETURN_IF_ERROR(
      CheckDisk(folder, plan.output.shards, options.output.gptq ? StateBytes(plan.spec, options.output) : 0));
  if (options.output.gptq) {
    ASSIGN_OR_RETURN(*stage, MakeGptqStage(options.device, plan.spec, plan.items, options.output.Roundings(),
                                           plan.limits));
  }
  if (!begun) RETURN_IF_ERROR(journal.Begin(header));
  return plan;
}

// Makes the decisions before the rounding.
StatusOr<Analysis> Decide(const checkpoint::Checkpoint& source, const QuantizePlan& plan,
                          const QuantizeOptions& options, const kernels::KernelTable& kernels,
                          runtime::ThreadPool& pool, const std::string& folder, const std::string& key,
                          MixStore& store, MixState from, bool* resumed) {
  const OutputSettings& settings = options.output;
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  const auto tell = [&](const char* what) {
    return [&options, &plan, what](int done, int total) {
      const std::string stage = fmt::format("{} layer {} of {}", what, done + 1, total);
      return !options.progress || options.progress({0, plan.output.bytes, false, stage});
    };
  };
  if (settings.mix.wanted()) {
    Analysis analysis;
    analysis.folding = Folding(plan.spec.sandwich_norm);
    *resumed = from.any();
    ASSIGN_OR_RETURN(analysis.mix,
                     MeasureMix(ctx, source, plan.spec, plan.items, settings, plan.passes, plan.units,
                                options.calibration, {tell("measuring"), &store, std::move(from)}));
    RETURN_IF_ERROR(ChooseMix(settings.mix, plan.fixed, &*analysis.mix));
    return analysis;
  }
  StateStore walk(folder, kAnalysisStateFile, {{"run", key}}, options.save_share);
  AnalyzedLinears linears;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const ModelItem& item = plan.items[i];
    if (!item.linear) continue;
    linears[item.name] = {static_cast<int>(item.shape[0]), plan.output.items[i].form == Form::kRounded};
  }
  return Analyze(ctx, source, plan.spec, settings.analyze, GridOf(settings.scheme, settings.group_size),
                 options.calibration, linears,
                 {.progress = tell("analyzing"),
                  .part_rows = plan.limits.part_rows,
                  .store = &walk,
                  .resumed = resumed});
}

// Returns everything that a mix's losses depend on. All runs have the same keys, except that only GPTQ adds
// some.
ordered_json MixKeyOf(const checkpoint::Checkpoint& source, const OutputSettings& settings,
                      const kernels::KernelTable& kernels) {
  if (!settings.mix.wanted()) return ordered_json::object();
  ordered_json key = {{"version", 3}, {"source", FingerprintOf(source)}, {"kernels", KernelsOf(kernels)}};
  key["keep"] = ordered_json::array();
  key.update(settings.Json());
  // Excludes the budget and the division into files.
  const ordered_json mix = std::move(key["mix"]);
  key["mix"] = mix["options"];
  key["mix_tokens"] = mix["tokens"];
  key.erase("shard_bytes");
  return key;
}

// Returns the analysis that `options` need, from the folder if it exists, and whether any part of it existed.
StatusOr<std::shared_ptr<const Analysis>> FindAnalysis(const checkpoint::Checkpoint& source,
                                                       const QuantizeOptions& options,
                                                       const kernels::KernelTable& kernels,
                                                       runtime::ThreadPool& pool, const std::string& folder,
                                                       bool* resumed) {
  const OutputSettings& settings = options.output;
  const std::string path = folder + "/" + kAnalysisFile;
  const std::string key = FingerprintOf(source) + KernelsOf(kernels) + settings.Json().dump();
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  StatusOr<Analysis> found = Analysis::Load(path, key, spec.sandwich_norm);
  if (!found.ok() && found.status().code() != StatusCode::kNotFound) return found.status();
  if (found.ok()) {
    ASSIGN_OR_RETURN(const std::vector<ModelItem> items, ListItems(source));
    RETURN_IF_ERROR(found->folding.Check(items, path));
  }
  *resumed = found.ok();
  if (!found.ok()) {
    // The passes are planned for the part of the mix that is not measured yet.
    MixStore store(folder, MixKeyOf(source, settings, kernels), options.save_share);
    MixState from;
    QuantizeOptions begun = options;
    if (settings.mix.wanted()) {
      ASSIGN_OR_RETURN(from, store.Load());
      begun.begun = {.first = from.layers, .end = from.pass_end};
    }
    ASSIGN_OR_RETURN(const QuantizePlan plan, PlanQuantize(source, begun));
    const int64_t walked = settings.gptq || settings.analyze.wanted() ? StateBytes(plan.spec, settings) : 0;
    const int64_t variants = MixStateBytes(plan.spec, settings, plan.passes);
    RETURN_IF_ERROR(CheckDisk(folder, plan.output.shards, std::max(walked, variants)));
    found = Decide(source, plan, options, kernels, pool, folder, key, store, std::move(from), resumed);
    RETURN_IF_ERROR(found.status());
    RETURN_IF_ERROR(found->Save(path, key));
  }
  RETURN_IF_ERROR(RemoveStates(folder, States::kAnalysis));
  return std::make_shared<const Analysis>(*std::move(found));
}

Status AddAnalysis(const checkpoint::Checkpoint& source, const kernels::KernelTable& kernels,
                   runtime::ThreadPool& pool, const std::string& folder, const Journal& journal,
                   QuantizeOptions* options, bool* resumed) {
  if (!options->output.mix.wanted()) RETURN_IF_ERROR(MixStore::CheckNone(folder));
  if (!options->output.analyzed()) return OkStatus();
  if (!journal.header().is_null()) {  // keeps the analysis of another run
    OutputSettings settings = options->output;
    const auto begun = journal.header().find("settings");
    if (begun != journal.header().end() && begun->is_object()) {
      const auto analysis = begun->find("analysis");
      if (analysis != begun->end() && analysis->is_string()) settings.analysis_xxh3 = *analysis;
    }
    RETURN_IF_ERROR(CheckSameRun(
        journal,
        {{"source", FingerprintOf(source)}, {"settings", settings.Json()}, {"kernels", KernelsOf(kernels)}}));
  }
  ASSIGN_OR_RETURN(options->output.analysis, FindAnalysis(source, *options, kernels, pool, folder, resumed));
  options->output.analysis_xxh3 = options->output.analysis->Checksum();
  return OkStatus();
}

}  // namespace

double QuantizeReport::compute_seconds() const {
  return std::max(0.0, seconds - stream.read_wait_seconds - stream.write_wait_seconds);
}

ordered_json QuantizeReport::Json(const OutputSettings& settings) const {
  ordered_json json = {{"settings", settings.Json()}};
  const CalibrationReport& c = calibration;
  if (settings.calibrated()) {
    json["calibration"] = {{"tokens", settings.calibration.tokens},
                           {"sequences", settings.calibration.sequences}};
  }
  const double inner = c.hessian_seconds + c.factor_seconds + c.round_seconds;
  const double other = std::max(0.0, compute_seconds() - c.walk_seconds - analysis_seconds);
  // Without GPTQ the rest is rounding and copying.
  for (const auto& [name, value] :
       {std::pair("read", stream.read_wait_seconds), std::pair("write", stream.write_wait_seconds),
        std::pair("hessians", c.hessian_seconds), std::pair("factors", c.factor_seconds),
        std::pair("rounding", settings.gptq ? c.round_seconds : other),
        std::pair("analysis", analysis_seconds), std::pair("forward", std::max(0.0, c.walk_seconds - inner)),
        std::pair("other", settings.gptq ? other : 0)}) {
    if (settings.calibrated() || value > 0) json["stages"].push_back({{"name", name}, {"seconds", value}});
  }
  json.update(c.Json());
  if (analysis != nullptr && settings.analyze.wanted()) json["analysis"] = analysis->Json();
  if (analysis != nullptr && analysis->mix) json["mix"] = analysis->mix->Json();
  if (!device.empty()) json["device"] = device;
  if (settings.analyzed()) json["resumed_analysis"] = analysis_resumed;
  json["resumed_layers"] = c.resumed_layers;
  json["units"] = units;
  json["resumed_units"] = stream.resumed_units;
  json["peak_bytes"] = peak_bytes;
  json["seconds"] = seconds;
  json["bytes"] = {{"source", source_bytes},
                   {"output", output_bytes},
                   {"read", stream.read_bytes},
                   {"written", stream.written_bytes}};
  return json;
}

StatusOr<QuantizeReport> Quantize(const checkpoint::Checkpoint& source, const QuantizeOptions& wanted,
                                  const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                  const std::string& folder) {
  const Clock::time_point start = Clock::now();
  if (source.tensors().empty()) return checkpoint::WeightsAreMissing(source.path());
  ASSIGN_OR_RETURN(const bool made, PrepareFolder(folder));
  ASSIGN_OR_RETURN(const std::unique_ptr<Journal> journal, Journal::Open(folder));
  RETURN_IF_ERROR(RemoveStates(folder, States::kUnfinished));
  QuantizeReport report;
  QuantizeOptions options = wanted;
  options.resident_before = runtime::MeasureResidentMemory().peak;
  std::unique_ptr<GptqStage> stage;  // GPTQ only
  StatusOr<QuantizePlan> planned = Cancelled("");
  const Clock::time_point analyzing = Clock::now();
  Status analyzed = AddAnalysis(source, kernels, pool, folder, *journal, &options, &report.analysis_resumed);
  if (analyzed.ok()) {
    report.analysis_seconds = options.output.analysis == nullptr ? 0 : Since(analyzing);
    planned = Begin(source, options, kernels, folder, *journal, &stage);
  } else {
    planned = std::move(analyzed);
  }
  if (!planned.ok()) {
    if (journal->header().is_null()) {  // nothing was written, so the folder is left as it was
      RETURN_IF_ERROR(journal->Remove());
      std::error_code ignored;
      if (made) fs::remove(folder, ignored);
    }
    return planned.status();
  }
  const QuantizePlan& plan = *planned;
  ASSIGN_OR_RETURN(const std::unique_ptr<runtime::AsyncFiles> io,
                   runtime::AsyncFiles::Create(options.backend));
  ASSIGN_OR_RETURN(UnitReader reader, UnitReader::Create(source, options.direct, *io));
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  report.units = plan.work.units.size();
  UnitRounder rounder(source, plan.items, plan.output, options.output, ctx);
  {
    UnitStream units(plan, options, folder, *journal, *io, reader);
    RETURN_IF_ERROR(units.CheckFinished());
    if (options.output.gptq) {
      if (options.device != nullptr) report.device = options.device->info().identity;
      CalibratedRun run(ctx, source, plan, options, folder, *journal, units, rounder, *stage);
      RETURN_IF_ERROR(run.Go());
      report.calibration = run.report();
    } else {
      RETURN_IF_ERROR(units.Begin());
      RETURN_IF_ERROR(RoundUntil(units, rounder, plan.items.size()));
    }
    RETURN_IF_ERROR(units.Finish());
    report.stream = units.counts();
  }
  report.stream.read_bytes += rounder.reread_bytes();
  RETURN_IF_ERROR(WriteTexts(options, plan, folder));
  report.analysis = options.output.analysis;
  report.source_bytes = plan.source_bytes;
  report.output_bytes = plan.output.bytes;
  for (const OutputItem& item : plan.output.items) {
    ++(item.form == Form::kRounded  ? report.rounded
       : item.form == Form::kCopied ? report.copied
                                    : report.converted);
  }
  report.io = io->backend();
  report.peak_bytes = runtime::MeasureResidentMemory().peak;
  report.seconds = Since(start);
  RETURN_IF_ERROR(
      runtime::WriteFileAtomically(folder + "/" + kReportFile, report.Json(options.output).dump(1) + "\n"));
  RETURN_IF_ERROR(WriteConfig(source, options, plan, folder));
  RETURN_IF_ERROR(RemoveStates(folder, States::kAll));
  RETURN_IF_ERROR(journal->Remove());
  return report;
}

}  // namespace moesaic::quantizer
