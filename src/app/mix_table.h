// A mix of precisions in words and tables: for the verb that makes one and for its report.
#pragma once

#include <string>
#include <vector>

#include "app/report_page.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::app {

/// What each precision was chosen for; the first row is the header.
std::vector<std::vector<std::string>> MixSummary(const quantizer::Mix& mix);

/// Losses of every unit and option, the chosen ones marked; the first row is the header.
std::vector<std::vector<std::string>> MixTable(const quantizer::Mix& mix);

/// Where fp16 overflows, and what rounding routers would cost. A sentence a line.
std::vector<std::string> MixNotes(const quantizer::Mix& mix);

/// Losses by layer, a plot for each kind of unit.
std::vector<ReportPlot> MixPlots(const quantizer::Mix& mix);

}  // namespace moesaic::app
