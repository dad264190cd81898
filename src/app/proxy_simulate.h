// `moesaic proxy simulate`.
#pragma once

#include "app/verb.h"

namespace moesaic::app {

/// Declares the sub-verb "simulate" of `proxy`.
void AddProxySimulate(const Verb& proxy, VerbRun& run);

}  // namespace moesaic::app
