// The moesaic binary parses the command line and runs one verb.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "app/help_format.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/usage.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr int kExitSignal = 128;  // plus the signal's number

constexpr const char* kFooter = R"(Examples:
  moesaic chat models/moesaic-tiny                     talk to a model
  moesaic generate model.gguf --prompt "Once upon"     complete a text
  moesaic serve models/moesaic-tiny                    answer over the OpenAI and Anthropic APIs
  moesaic inspect model/                               what a checkpoint holds and needs
  moesaic convert model/ --dtype int8 --out model.moesaic
  moesaic doctor                                       what this machine can do
  moesaic tune                                         measure which kernels are fastest here

A MODEL is a Hugging Face folder, a .gguf file, a packed file written by `moesaic convert`, or the id of a model in
the Hugging Face cache, such as Qwen/Qwen3-30B-A3B. Common flags of vLLM and llama.cpp are understood (docs/server.md).
Environment: MOESAIC_ISA=ref|avx2|avxvnni|avx512|avx512vnni|avx512bf16|amx limits the instruction sets used.)";

// Returns the exit code of a verb or of the help, after flushing its output.
int Finish(const std::string& command, Status status) {
  if (const Status written = FlushOutput(); status.ok()) status = written;
  if (status.ok()) return 0;
  if (status.code() == StatusCode::kCancelled) {
    Tell("{}: interrupted\n", command);
    return kExitSignal + (LastSignal() != 0 ? LastSignal() : SIGINT);
  }
  Tell("{}: {}\n", command, Message(status));
  return kExitFailure;
}

int Main(int argc, char** argv) {
  PrepareStreams();
  // Logs of the libraries are written as notices; only results go to standard output.
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("moesaic", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()));
  CLI::App root{"Moesaic runs mixture-of-experts language models from their published checkpoints.",
                "moesaic"};
  root.set_version_flag("--version", std::string("moesaic ") + MOESAIC_VERSION);
  root.require_subcommand(1);
  root.footer(kFooter);
  root.formatter(std::make_shared<HelpFormat>());

  VerbRun run;
  Verb verbs(&root);
  AddChat(verbs, run);
  AddGenerate(verbs, run);
  AddServe(verbs, run);
  AddProxy(verbs, run);
  AddMockEngine(verbs, run);
  AddPerplexity(verbs, run);
  AddBench(verbs, run);
  AddTokenize(verbs, run);
  AddRender(verbs, run);
  AddLogits(verbs, run);
  AddInspect(verbs, run);
  AddConvert(verbs, run);
  AddCarve(verbs, run);
  AddQuantize(verbs, run);
  AddVerify(verbs, run);
  AddReport(verbs, run);
  AddDoctor(verbs, run);
  AddTune(verbs, run);
  AddPlacement(verbs, run);
  AddTopology(verbs, run);
  AddProtein(verbs, run);
  AddGraph(verbs, run);
  AddCompletion(verbs, run);
  AddHelp(verbs, run);
  AddVersion(verbs, run);
  for (CLI::App* verb : root.get_subcommands({})) verb->group("Verbs");

  if (argc == 1) {
    WriteNotice(root.help());
    return kExitUsage;
  }
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.front()[0] != '-') {
    const CLI::App* verb = FindVerb(root, words.front());
    if (verb == nullptr) {  // CLI11 would only report a missing subcommand
      WriteNotice(UnknownVerbLine(root, words.front()));
      return kExitUsage;
    }
    auto translated = TranslateFlags({words.begin() + 1, words.end()}, FlagsOf(*verb));
    if (!translated.ok()) {
      WriteNotice(UsageLine(*verb, Message(translated.status())));
      return kExitUsage;
    }
    for (const std::string& note : translated->notes) Tell("moesaic {}: {}\n", verb->get_name(), note);
    words.resize(1);
    words.insert(words.end(), translated->words.begin(), translated->words.end());
  }
  try {
    std::reverse(words.begin(), words.end());  // CLI11 takes words from the end
    root.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    if (root.exit(error, text, text) == 0) {  // --help or --version
      WriteOutput(text.str());
      return Finish("moesaic", OkStatus());
    }
    WriteNotice(UsageLine(root, error));
    return kExitUsage;
  }
  return Finish("moesaic " + root.get_subcommands().front()->get_name(), Guarded(run));
}

}  // namespace
}  // namespace moesaic::app

int main(int argc, char** argv) {
  try {
    return moesaic::app::Main(argc, argv);
  } catch (...) {  // out of memory while parsing the command line or writing the last line
    std::fputs("moesaic: out of memory\n", stderr);
    return 1;
  }
}
