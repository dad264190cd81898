// `moesaic carve MODEL` converts a dense Llama-like model into a mixture of experts.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "app/calibration_text.h"
#include "app/interrupt.h"
#include "app/model_text.h"
#include "app/new_folder.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/session.h"
#include "app/verb.h"
#include "carve/carve.h"
#include "checkpoint/checkpoint.h"
#include "models/model_info.h"
#include "runtime/atomic_file.h"

namespace moesaic::app {
namespace {

constexpr int kMaxSequence = 2048;  // tokens; longer texts are split

struct CarveFlags {
  std::string model, calibration, out;
  carve::CarveOptions carving;
  int threads = 0;
  bool no_refit = false;
  std::string dtype = "bf16";
  bool print_recipe = false;
  std::optional<std::string> save_plan;
};

// Writes tokenizer and generation files: copies of a folder's, or made from a GGUF file's metadata.
Status WriteTexts(const checkpoint::Checkpoint& source, const std::string& out) {
  ASSIGN_OR_RETURN(const auto texts, HubTexts(source));
  for (const auto& [name, text] : texts)
    RETURN_IF_ERROR(runtime::WriteFileAtomically(fmt::format("{}/{}", out, name), text));
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}) {
    if (const auto text = source.ReadText(name))
      RETURN_IF_ERROR(runtime::WriteFileAtomically(fmt::format("{}/{}", out, name), *text));
  }
  return OkStatus();
}

Status RunCarve(CarveFlags options) {
  options.carving.refit = !options.no_refit;
  options.carving.f32 = options.dtype == "f32";
  if (options.print_recipe) {
    Print("{}\n", carve::CarveRecipe(options.carving));
    return OkStatus();
  }
  if (options.save_plan) {
    if (options.save_plan->empty()) return InvalidArgument("--save-plan needs a file name");
    std::error_code error;  // other faults are reported when the file is created
    if (std::filesystem::exists(std::filesystem::symlink_status(*options.save_plan, error))) {
      return InvalidArgument("{} exists already; --save-plan writes a new file", *options.save_plan);
    }
    if (std::filesystem::absolute(*options.save_plan).lexically_normal() ==
        std::filesystem::absolute(options.out).lexically_normal()) {
      return InvalidArgument("{}: --out and --save-plan cannot have the same name", *options.save_plan);
    }
    options.carving.save_plan = *options.save_plan;
  }
  ASSIGN_OR_RETURN(const kernels::KernelTable kernels, KernelsOfHost());
  ASSIGN_OR_RETURN(const auto pool, MakeThreads(options.threads));
  ASSIGN_OR_RETURN(const auto source, checkpoint::Checkpoint::Open(options.model));
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source->config(), models::ConfigFile(*source)));
  ASSIGN_OR_RETURN(const auto calibration,
                   ReadCalibrationFile({.path = options.calibration,
                                        .max_tokens = options.carving.max_tokens,
                                        .sequence_length = std::min(kMaxSequence, spec.context)},
                                       *source));
  const InterruptGuard guard;
  ASSIGN_OR_RETURN(const std::unique_ptr<NewFolder> folder, NewFolder::Create(options.out));
  const auto start = std::chrono::steady_clock::now();
  std::vector<carve::CarveLayerReport> reports;
  {
    Progress progress("carving");
    options.carving.progress = [&progress](int layer, int layers) {
      progress.Show(layer, layers, fmt::format("layer {} of {}", layer, layers));
      return !Interrupted();
    };
    ASSIGN_OR_RETURN(reports,
                     carve::Carve(*source, calibration, options.carving, kernels, *pool, folder->partial()));
  }
  RETURN_IF_ERROR(WriteTexts(*source, folder->partial()));
  RETURN_IF_ERROR(folder->Commit());
  double kept = 0, before = 0, after = 0;
  for (const carve::CarveLayerReport& report : reports) {
    kept += report.kept_energy / static_cast<double>(reports.size());
    before += report.error_before / static_cast<double>(reports.size());
    after += report.error_after / static_cast<double>(reports.size());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  Tell(
      "{}: {} layers in {:.0f} s; mean energy kept {:.1f}%, squared error of the FFN output {:.4f} before "
      "and {:.4f} after the refit\n",
      options.out, reports.size(), seconds, 100 * kept, before, after);
  return OkStatus();
}

}  // namespace

void AddCarve(Verb& root, VerbRun& run) {
  auto options = std::make_shared<CarveFlags>();
  carve::CarveOptions& carving = options->carving;
  Verb verb = root.AddVerb("carve", "Convert a dense Llama-like model to a mixture of experts");
  verb.AddOption("MODEL", options->model, "Hugging Face folder or .gguf file of a LlamaForCausalLM")
      .Transform(ResolveModelPath);
  verb.AddOption("--calibration", options->calibration,
                 "Text: .txt, .jsonl of {\"text\"} or {\"messages\"}, or .safetensors with token ids, "
                 "I32 \"tokens\" [n, length]")
      .ExistingFile();
  verb.AddOption("-o,--out", options->out, "Hugging Face folder to write");
  verb.AddOption("--slices", carving.slices, "Number of slices of an FFN").Range(2, 4096).ShowDefault();
  verb.AddOption("--shared", carving.shared, "Number of slices that are always active")
      .Range(1, 4095)
      .ShowDefault();
  verb.AddOption("--active", carving.active, "Number of active routed experts (slices) per token")
      .Range(1, 4095)
      .ShowDefault();
  verb.AddFlag("--no-refit", options->no_refit, "Move weights without changing them");
  verb.AddOption("--ridge", carving.ridge, "Ridge of the refit, which pulls towards the old weights")
      .Range(1e-6, 1e3)
      .ShowDefault();
  verb.AddOption("--max-tokens", carving.max_tokens, "Maximum number of calibration tokens")
      .Range(64, 1 << 24)
      .ShowDefault();
  verb.AddOption("--plan", carving.plan,
                 "File with experts and routers to use instead of a search; MODEL, --slices, --shared and "
                 "--active must be those it was made with")
      .ExistingFile();
  verb.AddOption("--save-plan", options->save_plan, "New file to write the experts and routers to");
  verb.AddOption("--dtype", options->dtype, "Dtype of the written weights: bf16 or f32")
      .OneOf({"bf16", "f32"})
      .ShowDefault();
  AddThreadsFlag(verb, options->threads);
  verb.AddFlag("--print-recipe", options->print_recipe, "Print the recipe in one line and exit");
  verb.Footer(
      "The result is a Glm4MoeForCausalLM, which transformers loads as well. --experts-per-token of other\n"
      "verbs changes the number of active experts. With --no-refit and all routed experts active it\n"
      "computes the dense model. The search for experts depends on roundings, which differ between\n"
      "processors; a plan repeats it on other processors, and faster.\n\n"
      "Example:\n"
      "  moesaic carve SmolLM2-135M-Instruct.gguf --calibration chats.safetensors --out smol-moe");
  verb.OnParsed([options, &run] {
    if (!options->print_recipe &&
        (options->model.empty() || options->out.empty() || options->calibration.empty())) {
      FailUsage("MODEL, --calibration FILE and --out FOLDER are required");
    }
    run = [options] { return RunCarve(*options); };
  });
}

}  // namespace moesaic::app
