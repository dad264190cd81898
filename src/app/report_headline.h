// Summarizes the outcome of a quantization in a few sentences.
#pragma once

#include <string>

#include "app/report_sections.h"

namespace moesaic::app {

/// Returns "4-bit integer weights in groups of 128 (w4a16), rounded by GPTQ, calibrated on 4,096 tokens. All
/// tensors take 1.50 GiB; ...". Sentences about the method and the quality are omitted if these are unknown.
std::string Headline(const ReportInput& input);

}  // namespace moesaic::app
