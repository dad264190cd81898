// Builds the sections of `moesaic report`.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "app/quantize_record.h"
#include "app/report_page.h"
#include "quantizer/format/weight_error.h"
#include "quantizer/roofline.h"

namespace moesaic::app {

/// Input of a report. Only `folder` and `bytes` are required. For each other part that is missing, the report
/// has a line with the command that measures it.
struct ReportInput {
  std::string folder, source = {}, text = {};        // paths as given on the command line
  std::optional<QuantizeRecord> run = std::nullopt;  // contents of quantize.json
  nlohmann::json quality = nullptr;                 // ScoreJson of the comparison with the source; null: none
  std::vector<quantizer::LinearError> errors = {};  // weight errors against the source
  quantizer::TokenBytes bytes = {};                 // bytes of the folder's tensors, all and per token
  std::optional<quantizer::TokenBytes> source_bytes = std::nullopt;
  std::optional<quantizer::Roofline> roofline = std::nullopt;
};

/// Returns the report with its headline and all sections, for report_page.h to render.
Report MakeReport(const ReportInput& input);

}  // namespace moesaic::app
