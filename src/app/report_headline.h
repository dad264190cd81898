// The outcome of a quantization in a few sentences.
#pragma once

#include <string>

#include "app/report_sections.h"

namespace moesaic::app {

/// "4-bit integer weights in groups of 128 (w4a16), rounded by GPTQ over 4,096 tokens. ..." Sentences about
/// the size and the quality follow where those are known.
std::string Headline(const ReportInput& input);

}  // namespace moesaic::app
