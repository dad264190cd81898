// `moesaic proxy simulate`: replays recorded traces in virtual time and compares scheduling policies.
#pragma once

#include "app/verb.h"

namespace moesaic::app {

/// Declares the verb. When the command line names it, `run` becomes its action.
void AddProxySimulate(const Verb& proxy, VerbRun& run);

}  // namespace moesaic::app
