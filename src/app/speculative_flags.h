// Flags of speculative decoding for all verbs that generate.
#pragma once

#include <string>

#include "app/flags.h"
#include "app/session.h"
#include "engine/engine.h"

namespace moesaic::app {

/// Declares --speculative, --speculative-model, and the flags that limit drafts (--num-speculative-tokens,
/// --adaptive-drafts, --prompt-lookup-min and -max). Their values are stored in flags.speculative.
void AddSpeculativeFlags(Verb& verb, ModelFlags& flags);

/// Returns the settings and results of `engine` for people: "mtp, up to 4 tokens a step, 120 of 150 drafted
/// tokens accepted", "mtp+ngram, up to 4 tokens a step from the module, or up to 8 looked up", or "off".
std::string DescribeSpeculation(const engine::Engine& engine);

}  // namespace moesaic::app
