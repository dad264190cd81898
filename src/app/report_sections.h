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

/// Input of a report. Unknown parts are omitted, with a line that says how to get them.
struct ReportInput {
  std::string folder, source = {}, text = {};        // as named on the command line
  std::optional<QuantizeRecord> run = std::nullopt;  // quantize.json
  nlohmann::json quality = nullptr;                  // ScoreJson against the source; null: none
  std::vector<quantizer::LinearError> errors = {};
  quantizer::TokenBytes bytes = {};  // tensors of the folder
  std::optional<quantizer::TokenBytes> source_bytes = std::nullopt;
  std::optional<quantizer::Roofline> roofline = std::nullopt;
};

Report MakeReport(const ReportInput& input);

}  // namespace moesaic::app
