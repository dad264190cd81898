// The moesaic binary: parses the command line and runs one verb.
#include <cstdio>

#include "app/interrupt.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr int kExitInterrupted = 130;

constexpr const char* kFooter = R"(Examples:
  moesaic chat models/moesaic-tiny                     talk to a model
  moesaic generate model.gguf --prompt "Once upon"     complete a text
  moesaic serve models/moesaic-tiny                    answer over the OpenAI and Anthropic APIs
  moesaic inspect model/                               what a checkpoint holds and needs
  moesaic convert model/ --dtype int8 --out model.moesaic
  moesaic doctor                                       what this machine can do

A MODEL is a Hugging Face folder, a .gguf file, or a packed file written by `moesaic convert`.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
Environment: MOESAIC_ISA=ref|avx2|avxvnni|avx512|avx512vnni|avx512bf16|amx limits the instruction sets used.)";

int Main(int argc, char** argv) {
  CLI::App root{"Moesaic runs mixture-of-experts language models from their published checkpoints.",
                "moesaic"};
  root.set_version_flag("--version", std::string("moesaic ") + MOESAIC_VERSION);
  root.require_subcommand(1);
  root.footer(kFooter);
  root.get_formatter()->column_width(34);

  VerbRun run;
  AddChat(root, run);
  AddGenerate(root, run);
  AddServe(root, run);
  AddPerplexity(root, run);
  AddBench(root, run);
  AddTokenize(root, run);
  AddRender(root, run);
  AddLogits(root, run);
  AddInspect(root, run);
  AddConvert(root, run);
  AddCarve(root, run);
  AddDoctor(root, run);
  AddCompletion(root, run);

  if (argc == 1) {
    std::fputs(root.help().c_str(), stderr);
    return kExitUsage;
  }
  // CLI11 would say only that a subcommand is required.
  if (argv[1][0] != '-' &&
      root.get_subcommands([&](CLI::App* verb) { return verb->check_name(argv[1]); }).empty()) {
    std::fprintf(stderr, "moesaic: there is no verb \"%s\"; --help lists them\n", argv[1]);
    return kExitUsage;
  }
  try {
    root.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return root.exit(error) == 0 ? 0 : kExitUsage;
  }
  const std::string verb = root.get_subcommands().front()->get_name();
  const Status status = run();
  if (status.ok()) return 0;
  if (status.code() == StatusCode::kCancelled) {
    std::fprintf(stderr, "moesaic %s: interrupted\n", verb.c_str());
    return kExitInterrupted;
  }
  std::fprintf(stderr, "moesaic %s: %s\n", verb.c_str(), Message(status).c_str());
  return kExitFailure;
}

}  // namespace
}  // namespace moesaic::app

int main(int argc, char** argv) { return moesaic::app::Main(argc, argv); }
