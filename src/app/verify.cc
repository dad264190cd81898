// `moesaic verify DIR --source MODEL` compares a quantized folder with the checkpoint it was made from.
#include "quantizer/verify.h"

#include <fmt/format.h>

#include <cmath>

#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "models/model_info.h"
#include "quantizer/format/loader_rules.h"

namespace moesaic::app {
namespace {

struct VerifyFlags {
  std::string model, source, loader;
  int threads = 0;
};

void PrintVerifyReport(const VerifyFlags& options, const quantizer::VerifyReport& report) {
  Print("{}: all {} are, to the byte, what {} makes of {}: {} linears rounded, {} other tensors\n",
        options.model, FormatBytes(static_cast<double>(report.bytes)), report.settings.Json().dump(),
        options.source, report.rounded, report.other);
  std::vector<std::vector<std::string>> rows = {{"linears", "count", "relative error", "worst", "where"}};
  for (const quantizer::KindError& kind : report.kinds) {
    rows.push_back({kind.kind, std::to_string(kind.linears),
                    fmt::format("{:.5f}", kind.weight > 0 ? std::sqrt(kind.error / kind.weight) : 0),
                    fmt::format("{:.5f}", kind.worst), kind.worst_name});
  }
  Print("{}", FormatTable(rows, /*markdown=*/false));
}

Status CheckSource(const VerifyFlags& options, const checkpoint::Checkpoint& quantized) {
  ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
  ASSIGN_OR_RETURN(const auto pool, MakeThreads(options.threads));
  ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(options.source));
  const InterruptGuard guard;
  quantizer::VerifyReport report;
  {
    Progress progress("verifying");
    const auto show = [&progress](int64_t done, int64_t total) {
      progress.Show(done, total, FormatBytes(static_cast<double>(total)));
      return !Interrupted();
    };
    ASSIGN_OR_RETURN(report, quantizer::Verify(quantized, *source, kernels, *pool, show));
  }
  PrintVerifyReport(options, report);
  return OkStatus();
}

Status RunVerify(const VerifyFlags& options) {
  ASSIGN_OR_RETURN(const auto quantized, checkpoint::Checkpoint::Open(options.model));
  if (!options.source.empty()) RETURN_IF_ERROR(CheckSource(options, *quantized));
  if (options.loader.empty()) return OkStatus();
  ASSIGN_OR_RETURN(const auto verdicts,
                   quantizer::JudgeVllm(quantized->config(), models::ConfigFile(*quantized)));
  std::vector<std::vector<std::string>> rows = {{options.loader, "scheme", "linears", "routed experts"}};
  for (const quantizer::LoaderVerdict& verdict : verdicts) {
    rows.push_back({verdict.group, verdict.scheme, verdict.dense, verdict.experts});
  }
  Print("{}", FormatTable(rows, /*markdown=*/false));
  return OkStatus();
}

}  // namespace

void AddVerify(Verb& root, VerbRun& run) {
  auto options = std::make_shared<VerifyFlags>();
  Verb verb = root.AddVerb("verify", "Compare a quantized folder with the checkpoint it was made from");
  AddModelPath(verb, options->model, "Folder that moesaic quantize wrote");
  verb.AddOption("--source", options->source,
                 "Checkpoint it was made from; every tensor is read and compared")
      .Transform(ResolveModelPath);
  verb.AddOption("--loader", options->loader, "Report whether this program loads its schemes")
      .OneOf({"vllm"});
  AddThreadsFlag(verb, options->threads);
  verb.Footer(
      "Checks that every byte equals the result of the settings in the files' metadata, applied to the\n"
      "source. Checks also that every linear, read as models are loaded, is as near to the source as its\n"
      "grid allows. Calibrated codes are compared with the checksums in quantize.json instead.\n\n"
      "Example:\n"
      "  moesaic verify tiny-w4a16 --source models/moesaic-tiny --loader vllm");
  verb.OnParsed([options, &run] {
    if (options->source.empty() && options->loader.empty()) {
      FailUsage("--source MODEL or --loader PROGRAM is required");
    }
    run = [options] { return RunVerify(*options); };
  });
}

}  // namespace moesaic::app
