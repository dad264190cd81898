// `moesaic convert MODEL --out FILE` packs a checkpoint into a file that is mapped or copied without
// conversion.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>

#include "app/interrupt.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/table.h"
#include "app/verb.h"
#include "models/model.h"
#include "runtime/thread_pool.h"

namespace moesaic::app {
namespace {

struct ConvertFlags {
  std::string model, out;
  std::string dtype = "auto";
  std::string layout;
  int threads = 0;
  bool force = false;
};

Status RunConvert(const ConvertFlags& options) {
  if (!options.force && std::filesystem::exists(options.out)) {
    return InvalidArgument("{} exists already; use --force to replace it", options.out);
  }
  parallel::Layout layout;
  if (!options.layout.empty()) {
    ASSIGN_OR_RETURN(layout, parallel::Layout::Parse(options.layout));
  }
  ASSIGN_OR_RETURN(const auto pool, MakeThreads(options.threads));
  ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(options.model));
  ASSIGN_OR_RETURN(const auto texts, HubTexts(*source));
  const InterruptGuard guard;
  const auto start = std::chrono::steady_clock::now();
  {
    Progress progress("packing");
    models::LoadOptions load;
    load.dtype = options.dtype;
    load.progress = [&progress](int64_t done, int64_t total) {
      progress.Show(done, total, FormatBytes(static_cast<double>(total)));
      return !Interrupted();
    };
    RETURN_IF_ERROR(models::Convert(options.model, options.out, load, *pool, texts, layout));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  Tell("{}: {} in {:.1f} s\n", options.out,
       FormatBytes(static_cast<double>(std::filesystem::file_size(options.out))), seconds);
  return OkStatus();
}

}  // namespace

void AddConvert(Verb& root, VerbRun& run) {
  auto options = std::make_shared<ConvertFlags>();
  Verb verb = root.AddVerb("convert", "Pack a checkpoint into one file that loads without conversion");
  AddModelPath(verb, options->model, "Hugging Face folder or .gguf file");
  verb.AddOption("-o,--out", options->out, "Packed file to write").Required();
  AddDtypeFlag(verb, options->dtype);
  AddThreadsFlag(verb, options->threads);
  verb.AddOption(
      "--layout", options->layout,
      "Write the part of each rank of this layout, as in tp=2,pp=2 (also ep=2, layers=20+28, "
      "experts=70+58; dp=2 with ep), which ranks map without copying. Only this layout loads the file");
  verb.AddFlag("--force", options->force, "Replace an existing file");
  verb.Footer(
      "The packed file holds weights in the kernels' layout, config, tokenizer and template. It is also a\n"
      "valid safetensors file. An interrupted run leaves no file.\n\n"
      "Examples:\n  moesaic convert models/moesaic-tiny --dtype int8 --out tiny.moesaic\n  moesaic chat "
      "tiny.moesaic\n  moesaic convert models/moesaic-tiny --layout tp=2 --out tiny.moesaic\n  moesaic "
      "serve tiny.moesaic -tp 2");
  verb.OnParsed([options, &run] { run = [options] { return RunConvert(*options); }; });
}

}  // namespace moesaic::app
