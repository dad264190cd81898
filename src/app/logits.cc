// `moesaic logits MODEL` writes the logits of every position of a prompt to a NumPy file.
#include <fmt/format.h>

#include "app/input.h"
#include "app/interrupt.h"
#include "app/model_text.h"
#include "app/npy.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/verb.h"
#include "runtime/atomic_file.h"

namespace moesaic::app {
namespace {

struct LogitsFlags {
  ModelFlags model;
  std::vector<int32_t> ids;
  std::string prompt;
  std::string out;
};

StatusOr<std::vector<int32_t>> IdsOf(const LogitsFlags& options) {
  if (!options.ids.empty()) return options.ids;
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(options.model.model));
  RETURN_IF_ERROR(text.tokenizer.status());
  return text.tokenizer->Encode(options.prompt, /*add_special=*/true);
}

Status RunLogits(const LogitsFlags& options) {
  InterruptGuard guard;
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, IdsOf(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<runtime::AtomicFile> file, runtime::AtomicFile::Create(options.out));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(options.model));
  RETURN_IF_ERROR(StartEngine(*session, options.model, {.max_sequences = 1}));
  const auto rows = static_cast<int64_t>(ids.size());
  const std::string header = NpyHeader(rows, session->model->info().vocab_size);
  RETURN_IF_ERROR(file->Write(header.data(), header.size()));
  Progress progress("computing");
  RETURN_IF_ERROR(session->engine->Score(ids, [&](int64_t first, std::span<const float> values) {
    if (Interrupted()) return Cancelled("interrupted");
    progress.Show(first, rows, "");
    return file->Write(values.data(), values.size_bytes());
  }));
  RETURN_IF_ERROR(file->Commit());
  Tell("{}: f32 [{}, {}]\n", options.out, rows, session->model->info().vocab_size);
  return OkStatus();
}

}  // namespace

void AddLogits(Verb& root, VerbRun& run) {
  auto options = std::make_shared<LogitsFlags>();
  Verb verb = root.AddVerb("logits", "Write the logits of every position of a prompt");
  AddModelFlags(verb, options->model, /*answers=*/false);
  AddCacheFlags(verb, options->model);
  const Flag ids = AddIdsFlag(verb, options->ids);
  const Flag prompt = verb.AddOption("--prompt", options->prompt, "Prompt text, instead of --ids");
  verb.AddOption("--out", options->out, ".npy file to write: f32 [tokens, vocabulary]").Required();
  verb.Footer(
      "The file is written atomically.\n\n"
      "Examples:\n"
      "  moesaic logits model/ --ids 1,2,3 --dtype f32 --out x.npy\n"
      "  moesaic logits model.gguf --prompt \"Once upon a time\" --out x.npy");
  verb.OnParsed([options, ids, prompt, &run] {
    if (ids.empty() == prompt.empty()) {
      FailUsage("needs either --ids or --prompt");
    }
    run = [options] { return RunOnRanks(options->model, [options] { return RunLogits(*options); }); };
  });
}

}  // namespace moesaic::app
