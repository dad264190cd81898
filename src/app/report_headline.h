// Summarizes the outcome of a quantization in a few sentences.
#pragma once

#include <string>

#include "app/report_sections.h"

namespace moesaic::app {

/// Returns "4-bit integer weights in groups of 128 (w4a16), rounded by GPTQ over 4,096 tokens. ...".
/// Sentences about size and quality follow if these are known.
std::string Headline(const ReportInput& input);

}  // namespace moesaic::app
