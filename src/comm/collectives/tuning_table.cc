#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "comm/collectives/planner.h"

namespace moesaic::comm {
namespace {

using Json = nlohmann::json;

constexpr Collective kCollectives[] = {
    Collective::kBroadcast, Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
    Collective::kAllToAll,  Collective::kAllToAllv, Collective::kBarrier};

StatusOr<Collective> CollectiveOf(const std::string& name) {
  for (const Collective collective : kCollectives) {
    if (Name(collective) == name) return collective;
  }
  return InvalidArgument("unknown collective \"{}\"", name);
}

Status AddEntry(const Json& entry, TuningTable* table) {
  if (!entry.is_object() || !entry.contains("collective") || !entry["collective"].is_string() ||
      !entry.contains("candidate") || !entry["candidate"].is_string()) {
    return InvalidArgument("expected an object with the strings \"collective\" and \"candidate\"; found {}",
                           entry.dump());
  }
  for (const char* name : {"ranks", "bytes", "seconds"}) {
    if (!entry.contains(name) || !entry[name].is_number() || entry[name].get<double>() <= 0) {
      return InvalidArgument("\"{}\" must be a positive number; found {}", name, entry.dump());
    }
  }
  ASSIGN_OR_RETURN(const Collective collective, CollectiveOf(entry["collective"].get<std::string>()));
  table->Add(collective, static_cast<int>(entry["ranks"].get<double>()),
             static_cast<int64_t>(entry["bytes"].get<double>()), entry["candidate"].get<std::string>(),
             entry["seconds"].get<double>());
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
