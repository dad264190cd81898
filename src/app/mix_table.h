// Presents a mix of precisions as text and tables, for `quantize` and `report`.
#pragma once

#include <string>
#include <vector>

#include "app/report_page.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::app {

/// Returns a summary by precision; the first row is the header.
std::vector<std::vector<std::string>> MixSummary(const quantizer::Mix& mix);

/// Returns losses of every precision group and option, with the chosen ones marked; the first row is the
/// header.
std::vector<std::vector<std::string>> MixTable(const quantizer::Mix& mix);

/// Returns one sentence per line: where fp16 overflows, and the loss of rounding routers.
std::vector<std::string> MixNotes(const quantizer::Mix& mix);

/// Returns plots of the losses by layer, one for each kind of group.
std::vector<ReportPlot> MixPlots(const quantizer::Mix& mix);

}  // namespace moesaic::app
