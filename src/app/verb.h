// The pattern of a verb: one file declares its flags on a CLI11 subcommand and what to run once they are
// parsed.
//
//   void AddTokenize(CLI::App& root, VerbRun& run) {
//     auto options = std::make_shared<Options>();
//     CLI::App* verb = root.add_subcommand("tokenize", "Turn text into token ids, or back");
//     verb->add_option("model", options->model, "...")->required();
//     verb->footer("Examples:\n  moesaic tokenize ...");
//     verb->callback([options, &run] { run = [options] { return RunTokenize(*options); }; });
//   }
//
// A verb returns a Status; main prints its message behind "moesaic VERB: " and turns it into an exit code:
// 0 done, 1 failed, 2 usage, 128 and the number of the signal that interrupted it. output.h takes what it
// writes.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "base/status.h"

namespace moesaic::app {

using VerbRun = std::function<Status()>;

void AddBench(CLI::App& root, VerbRun& run);
void AddChat(CLI::App& root, VerbRun& run);
void AddConvert(CLI::App& root, VerbRun& run);
void AddDoctor(CLI::App& root, VerbRun& run);
void AddGenerate(CLI::App& root, VerbRun& run);
void AddHelp(CLI::App& root, VerbRun& run);
void AddInspect(CLI::App& root, VerbRun& run);
void AddLogits(CLI::App& root, VerbRun& run);
void AddPerplexity(CLI::App& root, VerbRun& run);
void AddQuantize(CLI::App& root, VerbRun& run);
void AddRender(CLI::App& root, VerbRun& run);
void AddTokenize(CLI::App& root, VerbRun& run);
void AddCarve(CLI::App& root, VerbRun& run);
void AddCompletion(CLI::App& root, VerbRun& run);
void AddReport(CLI::App& root, VerbRun& run);
void AddTune(CLI::App& root, VerbRun& run);
void AddServe(CLI::App& root, VerbRun& run);
void AddVerify(CLI::App& root, VerbRun& run);
void AddVersion(CLI::App& root, VerbRun& run);

}  // namespace moesaic::app
