#include "app/report_headline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "app/table.h"

namespace moesaic::app {
namespace {

using nlohmann::json;

constexpr std::pair<std::string_view, std::string_view> kSchemeWords[] = {
    {"w8a8", "8-bit integer weights and activations"},
    {"w8a16", "8-bit integer weights"},
    {"w4a16", "4-bit integer weights"},
    {"fp8", "FP8 weights and activations"},
    {"nvfp4", "NVFP4 weights"},
};

std::string Grouped(double count) {
  std::string digits = fmt::format("{:.0f}", count);
  for (auto at = std::ssize(digits) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string TextOf(const json& settings, const char* key) {
  const auto found = settings.find(key);
  return found != settings.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string WeightsText(const json& settings) {
  const std::string scheme = TextOf(settings, "scheme");
  if (scheme.empty())
    return settings.contains("mix") ? "A mix of precisions, chosen by precision group" : "Weights";
  const auto* words = std::ranges::find(kSchemeWords, scheme, [](const auto& entry) { return entry.first; });
  const auto group = settings.find("group_size");
  std::string text(words == std::end(kSchemeWords) ? scheme : words->second);
  if (group != settings.end() && group->is_number_integer()) {
    const int size = group->get<int>();
    text += size > 0 ? fmt::format(" in groups of {}", size) : ", one scale per output channel";
  }
  return words == std::end(kSchemeWords) ? text : fmt::format("{} ({})", text, scheme);
}

// Returns a description of the method, from quantize.json.
std::string Making(const QuantizeRecord& run) {
  const json settings = json::parse(run.settings, nullptr, /*allow_exceptions=*/false);
  if (!settings.is_object()) return "";
  const std::string method = TextOf(settings, "method");
  std::string text = WeightsText(settings);
  text += method == "gptq"  ? ", rounded by GPTQ"
          : method == "mse" ? ", rounded to the nearest with scales of least squared error"
                            : ", rounded to the nearest";
  if (settings.value("smoothing", json()).is_boolean()) text += " after smoothing";
  if (run.tokens) text += fmt::format(", calibrated on {} tokens", Grouped(*run.tokens));
  return text + ".";
}

std::string SizeText(const ReportInput& input) {
  const auto total = static_cast<double>(input.bytes.total), active = static_cast<double>(input.bytes.active);
  std::string text = fmt::format("All tensors take {}", FormatBytes(total));
  if (input.source_bytes && input.source_bytes->total > 0) {
    text +=
        fmt::format(", {:.0f} % of the source", 100 * total / static_cast<double>(input.source_bytes->total));
  }
  return text + fmt::format("; a token reads {}.", FormatBytes(active));
}

std::optional<double> NumberOf(const json& from, const char* key) {
  const auto found = from.find(key);
  if (found == from.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

std::string QualityText(const json& quality) {
  const auto ratio = NumberOf(quality, "ratio"), same = NumberOf(quality, "same_top"),
             kl = NumberOf(quality, "kl");
  std::string text;
  if (same)
    text += fmt::format(" It predicts the source's likeliest token {:.3g} % of the time.", 100 * *same);
  if (ratio) {
    const double change = 100 * (*ratio - 1);
    text += fmt::format(" Its perplexity is {:.2g} % {} than the source's.", std::abs(change),
                        change < 0 ? "lower" : "higher");
  }
  if (kl)
    text += fmt::format(" Its predictions diverge from the source's by {:.3g} nats per token (KL).", *kl);
  return text;
}

}  // namespace

std::string Headline(const ReportInput& input) {
  std::string text = input.run ? Making(*input.run) : "";
  if (!text.empty()) text += " ";
  text += SizeText(input);
  if (!input.quality.is_null()) text += QualityText(input.quality);
  return text;
}

}  // namespace moesaic::app
