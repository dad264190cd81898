// `moesaic report DIR` writes a report about a quantized folder as Markdown and HTML.
#include <fmt/format.h>

#include <filesystem>

#include "app/interrupt.h"
#include "app/model_score.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/report_sections.h"
#include "app/verb.h"
#include "quantizer/quantize.h"
#include "runtime/atomic_file.h"

namespace moesaic::app {
namespace {

struct ReportFlags {
  ScoreOptions score;  // model.model: the folder; reference: the source
  bool roofline = false;
};

// Checks that the report goes into the output folder of a quantization, not into its source.
Status CheckFolder(const checkpoint::Checkpoint& quantized, const std::string& source) {
  namespace fs = std::filesystem;
  const std::string& folder = quantized.path();
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return InvalidArgument("{}: a report needs the folder that moesaic quantize wrote, not a file", folder);
  }
  if (!source.empty() && fs::equivalent(folder, source, error)) {
    return InvalidArgument("{}: --source is the same folder; a report is never written into the source",
                           folder);
  }
  if (!quantized.config().contains("quantization_config") && !quantized.ReadText(quantizer::kReportFile)) {
    return InvalidArgument(
        "{}: the weights are not quantized: config.json has no \"quantization_config\" and there is no {}; "
        "name the folder that moesaic quantize wrote",
        folder, quantizer::kReportFile);
  }
  return OkStatus();
}

Status RunReport(const ReportFlags& options) {
  const InterruptGuard guard;
  const ScoreOptions& score = options.score;
  const std::string& folder = score.model.model;
  ReportInput input{.folder = folder, .source = score.reference, .text = score.file};
  {
    ASSIGN_OR_RETURN(const auto quantized, checkpoint::Checkpoint::Open(folder));
    RETURN_IF_ERROR(CheckFolder(*quantized, score.reference));
    ASSIGN_OR_RETURN(input.bytes, quantizer::BytesOf(*quantized));
    if (const auto text = quantized->ReadText(quantizer::kReportFile)) {
      ASSIGN_OR_RETURN(input.run, ParseQuantizeRecord(*text, folder + "/" + quantizer::kReportFile));
    }
    if (!score.reference.empty()) {
      ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(score.reference));
      ASSIGN_OR_RETURN(input.source_bytes, quantizer::BytesOf(*source));
      ASSIGN_OR_RETURN(const auto pool, MakeThreads(score.model.threads));
      Progress progress("comparing weights");
      ASSIGN_OR_RETURN(input.errors,
                       quantizer::WeightErrors(*quantized, *source, *pool, [&](int64_t done, int64_t total) {
                         progress.Show(done, total, fmt::format("{} linears", total));
                         return !Interrupted();
                       }));
      if (options.roofline && !(input.run && !input.run->has_roofline())) {
        if (!input.run || !input.run->read_bytes || !input.run->written_bytes) {
          return InvalidArgument("--roofline: {} has no {} that tells what its run moved", folder,
                                 quantizer::kReportFile);
        }
        ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
        ASSIGN_OR_RETURN(input.roofline,
                         quantizer::MeasureRoofline(*quantized, *source, kernels, *pool,
                                                    *input.run->read_bytes, *input.run->written_bytes));
      }
    }
  }
  if (!score.file.empty()) {
    ASSIGN_OR_RETURN(const ModelScore scored, ScoreModel(score));
    input.quality = ScoreJson(scored);
  }
  const Report report = MakeReport(input);
  const std::string markdown = ReportMarkdown(report);
  RETURN_IF_ERROR(runtime::WriteFileAtomically(folder + "/report.md", markdown));
  RETURN_IF_ERROR(runtime::WriteFileAtomically(folder + "/report.html", ReportHtml(report)));
  Print("{}", markdown);
  Tell("{0}/report.md, {0}/report.html\n", folder);
  return OkStatus();
}

}  // namespace

void AddReport(Verb& root, VerbRun& run) {
  auto options = std::make_shared<ReportFlags>();
  ScoreOptions& score = options->score;
  Verb verb = root.AddVerb("report", "Write a report about a quantized folder");
  AddModelPath(verb, score.model.model, "Folder that moesaic quantize wrote");
  Flag source = verb.AddOption("--source", score.reference, "Checkpoint it was made from, to compare weights")
                    .Transform(ResolveModelPath);
  Flag text = verb.AddOption("--text", score.file, "Text file (UTF-8) to run both models over")
                  .ExistingFile()
                  .Needs(source);
  verb.AddOption("-c,--ctx-size", score.window,
                 "Window size in tokens; 0: 1024, or the models' context if that is less")
      .Range(0, 1 << 24)
      .ShowDefault()
      .Needs(text);
  verb.AddOption("--max-tokens", score.max_tokens, "Use only the first tokens of the text; 0: all")
      .Range(int64_t{0}, int64_t{1} << 31)
      .ShowDefault()
      .Needs(text);
  verb.AddFlag("--one-at-a-time", score.one_at_a_time,
               "Run the source first and keep its predictions in a temporary file")
      .Needs(text);
  verb.AddFlag("--roofline", options->roofline,
               "Measure this machine for some seconds and compare the run's times with the rates of its disk "
               "and CPU")
      .Needs(source);
  AddThreadsFlag(verb, score.model.threads);
  verb.Footer(
      "Writes report.md and report.html, which needs no other file, into MODEL: divergence from the source,\n"
      "router flips, weight errors, bytes per token, times, and coverage and losses of calibrated runs.\n"
      "Missing values are omitted, with a line that says how to obtain them.\n\n"
      "Example:\n"
      "  moesaic report tiny-w4a16 --source models/moesaic-tiny --text wiki.txt");
  verb.OnParsed([options, &run] {
    if (options->score.window == 1) FailUsage("--ctx-size must be 0 or at least 2, found 1");
    run = [options] { return RunReport(*options); };
  });
}

}  // namespace moesaic::app
