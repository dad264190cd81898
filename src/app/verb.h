// The pattern of a verb. One file declares its flags and the function to run after parsing.
//
//   void AddTokenize(Verb& root, VerbRun& run) {
//     auto options = std::make_shared<Options>();
//     Verb verb = root.AddVerb("tokenize", "Turn text into token ids, or back");
//     verb.AddOption("model", options->model, "...").Required();
//     verb.Footer("Examples: moesaic tokenize ...");
//     verb.OnParsed([options, &run] { run = [options] { return RunTokenize(*options); }; });
//   }
//
// A verb returns a Status. main prints its message after "moesaic VERB: " and converts it to an exit code: 0
// done, 1 failed, 2 usage, 128 plus the number of the signal that interrupted it. Output goes through
// output.h.
#pragma once

#include <functional>

#include "app/flags.h"
#include "base/status.h"

namespace moesaic::app {

using VerbRun = std::function<Status()>;

/// Returns the result of `run`. An exception, a bug or a lack of memory, becomes an error: scripts must not
/// see it as a crash, and other ranks must learn of it.
Status Guarded(const VerbRun& run);

void AddBench(Verb& root, VerbRun& run);
void AddChat(Verb& root, VerbRun& run);
void AddConvert(Verb& root, VerbRun& run);
void AddDoctor(Verb& root, VerbRun& run);
void AddGenerate(Verb& root, VerbRun& run);
void AddGraph(Verb& root, VerbRun& run);
void AddHelp(Verb& root, VerbRun& run);
void AddInspect(Verb& root, VerbRun& run);
void AddLogits(Verb& root, VerbRun& run);
void AddMockEngine(Verb& root, VerbRun& run);
void AddPerplexity(Verb& root, VerbRun& run);
void AddProtein(Verb& root, VerbRun& run);
void AddProxy(Verb& root, VerbRun& run);
void AddQuantize(Verb& root, VerbRun& run);
void AddRender(Verb& root, VerbRun& run);
void AddTokenize(Verb& root, VerbRun& run);
void AddCarve(Verb& root, VerbRun& run);
void AddCompletion(Verb& root, VerbRun& run);
void AddReport(Verb& root, VerbRun& run);
void AddPlacement(Verb& root, VerbRun& run);
void AddTopology(Verb& root, VerbRun& run);
void AddTune(Verb& root, VerbRun& run);
void AddServe(Verb& root, VerbRun& run);
void AddVerify(Verb& root, VerbRun& run);
void AddVersion(Verb& root, VerbRun& run);

}  // namespace moesaic::app
