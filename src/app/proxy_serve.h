// Flags of plain `moesaic proxy`, which writes an nginx configuration and runs nginx.
#pragma once

#include "app/verb.h"

namespace moesaic::app {

void AddProxyServing(Verb proxy, VerbRun& run);

}  // namespace moesaic::app
