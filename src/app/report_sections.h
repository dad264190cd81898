// What `moesaic report` tells of a quantized folder, section by section.
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

/// What is known; what is not is left out, with a line that says what would bring it.
struct ReportInput {
  std::string folder, source = {}, text = {};        // as they were named
  std::optional<QuantizeRecord> run = std::nullopt;  // quantize.json
  nlohmann::json quality = nullptr;                  // ScoreJson against the source; null: none
  std::vector<quantizer::LinearError> errors = {};
  quantizer::TokenBytes bytes = {};  // of the folder
  std::optional<quantizer::TokenBytes> source_bytes = std::nullopt;
  std::optional<quantizer::Roofline> roofline = std::nullopt;
};

Report MakeReport(const ReportInput& input);

}  // namespace moesaic::app
