// `moesaic tune` measures the fastest kernel choices on this machine, none of which change a result.
#include <fmt/format.h>

#include <filesystem>

#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/table.h"
#include "app/tuning_file.h"
#include "app/verb.h"
#include "kernels/tuner.h"
#include "runtime/atomic_file.h"

namespace moesaic::app {
namespace {

struct TuneFlags {
  int threads = 0;
  std::string out;
};

std::string FindingsText(const kernels::TuningResult& result) {
  std::vector<std::vector<std::string>> rows = {{"choice", "built in", "here", "faster by"}};
  for (const kernels::TuningFinding& finding : result.findings) {
    rows.push_back({finding.what, std::to_string(finding.before),
                    finding.taken() ? std::to_string(finding.after) : "the same",
                    finding.taken() ? fmt::format("{:.1f}%", 100 * finding.gain) : "-"});
  }
  return FormatTable(rows, false);
}

Status RunTune(const TuneFlags& options) {
  const InterruptGuard guard;
  ASSIGN_OR_RETURN(const std::unique_ptr<runtime::ThreadPool> threads, MakeThreads(options.threads));
  const std::string path = options.out.empty() ? TuningPath(threads->size()) : options.out;
  if (path.empty()) {
    return InvalidArgument("neither XDG_CACHE_HOME nor HOME is set; use --out FILE");
  }
  ASSIGN_OR_RETURN(const nlohmann::json machine, MachineOfKernels(threads->size()));
  ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
  StatusOr<kernels::TuningResult> result = [&] {
    Progress progress("tuning");
    return kernels::Tune(kernels, *threads, [&](int64_t done, int64_t total, const std::string& what) {
      progress.Show(done, total, what);
      return !Interrupted();
    });
  }();
  RETURN_IF_ERROR(result.status());
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code failure;
  if (!folder.empty()) std::filesystem::create_directories(folder, failure);
  if (failure) return IoError("{}: cannot create the folder: {}", folder.string(), failure.message());
  RETURN_IF_ERROR(runtime::WriteFileAtomically(path, TuningText(machine, result->tuning)));
  WriteOutput(FindingsText(*result));
  Print("\nwritten to {}; models loaded with {} threads use it from now on\n", path, threads->size());
  return OkStatus();
}

}  // namespace

void AddTune(Verb& root, VerbRun& run) {
  auto options = std::make_shared<TuneFlags>();
  Verb verb = root.AddVerb("tune", "Measure which kernels and task sizes are fastest on this machine");
  AddThreadsFlag(verb, options->threads);
  verb.AddOption("--out", options->out,
                 "File to write; default: MOESAIC_TUNING, or a file in the user's cache");
  verb.Footer(
      "Takes 10 to 60 seconds and should run on an idle machine. Choices never change a result, and a\n"
      "choice changes only if it is faster by more than the noise. Verbs that load a model read the file\n"
      "if it was made on this machine; each number of threads has its own file. Their choices are\n"
      "disabled by MOESAIC_TUNING=off or --no-tuning; MOESAIC_TUNING=FILE selects another file.\n"
      "moesaic doctor reports the file that is used with one thread per core.\n\n"
      "Examples:\n"
      "  moesaic tune\n"
      "  moesaic tune --threads 8 --out tuning.json");
  verb.OnParsed([options, &run] { run = [options] { return RunTune(*options); }; });
}

}  // namespace moesaic::app
