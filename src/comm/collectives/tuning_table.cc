#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/collectives/planner.h"

namespace moesaic::comm {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxRanks = 1 << 20, kMaxBytes = int64_t{1} << 60;

Status AddEntry(const Json& entry, TuningTable* table) {
  if (!entry.is_object() || !entry.contains("collective") || !entry["collective"].is_string() ||
      !entry.contains("candidate") || !entry["candidate"].is_string()) {
    return InvalidArgument("expected an object with the strings \"collective\" and \"candidate\"; found {}",
                           entry.dump());
  }
  for (const auto& [name, most] : {std::pair("ranks", kMaxRanks), std::pair("bytes", kMaxBytes)}) {
    const auto value = entry.find(name);
    if (value == entry.end() || !value->is_number_integer() || *value < 1 || *value > most) {
      return InvalidArgument("\"{}\" must be an integer in [1, {}]; found {}", name, most, entry.dump());
    }
  }
  const auto seconds = entry.find("seconds");
  if (seconds == entry.end() || !seconds->is_number() || !(seconds->get<double>() > 0)) {
    return InvalidArgument("\"seconds\" must be a positive number; found {}", entry.dump());
  }
  ASSIGN_OR_RETURN(const Collective collective, CollectiveOf(entry["collective"].get<std::string>()));
  table->Add(collective, entry["ranks"].get<int>(), entry["bytes"].get<int64_t>(),
             entry["candidate"].get<std::string>(), seconds->get<double>());
  return OkStatus();
}

}  // namespace

StatusOr<TuningTable> TuningTable::Parse(std::string_view json, const std::string& source) {
  const Json root = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return InvalidArgument("{}: not a JSON document", source);
  if (!root.is_object() || !root.contains("entries") || !root["entries"].is_array()) {
    return InvalidArgument("{}: expected an object with the array \"entries\"", source);
  }
  TuningTable table;
  const Json& entries = root["entries"];
  for (size_t i = 0; i < entries.size(); ++i) {
    RETURN_IF_ERROR(Annotate(AddEntry(entries[i], &table), fmt::format("{}: entries[{}]", source, i)));
  }
  return table;
}

std::string TuningTable::ToJson() const {
  Json entries = Json::array();
  for (const auto& [key, by_bytes] : times_) {
    for (const auto& [bytes, seconds] : by_bytes) {
      entries.push_back({{"collective", Name(std::get<0>(key))},
                         {"ranks", std::get<1>(key)},
                         {"candidate", std::get<2>(key)},
                         {"bytes", bytes},
                         {"seconds", seconds}});
    }
  }
  return Json{{"entries", entries}}.dump(1);
}

void TuningTable::Add(Collective collective, int ranks, int64_t bytes, const std::string& candidate,
                      double seconds) {
  times_[{collective, ranks, candidate}][bytes] = seconds;
}

std::optional<double> TuningTable::Find(Collective collective, int ranks, int64_t bytes,
                                        const std::string& candidate) const {
  const auto found = times_.find({collective, ranks, candidate});
  if (found == times_.end() || bytes <= 0) return std::nullopt;
  const std::map<int64_t, double>& times = found->second;
  const auto above = times.lower_bound(bytes);
  if (above == times.begin()) {
    return bytes * 2 >= above->first ? std::optional(above->second) : std::nullopt;
  }
  const auto below = std::prev(above);
  if (above == times.end()) {
    // The bandwidth of the largest size is taken for larger ones.
    if (bytes > below->first * 2) return std::nullopt;
    return below->second * static_cast<double>(bytes) / static_cast<double>(below->first);
  }
  const double share = std::log(static_cast<double>(bytes) / static_cast<double>(below->first)) /
                       std::log(static_cast<double>(above->first) / static_cast<double>(below->first));
  return below->second * std::pow(above->second / below->second, share);
}

}  // namespace moesaic::comm
