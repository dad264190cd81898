#include "parallel/placement/layer_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "parallel/placement/baseline_slots.h"
#include "parallel/placement/bounded_input.h"
#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {
namespace {

using Json = nlohmann::json;

constexpr int kMaxTileRows = 512;
constexpr double kMaxRate = 1e18;
constexpr int kStepsPerTile = 16;    // of the coarse table
constexpr double kFineRows = 16;     // the fine table reaches this many rows
constexpr double kFineStep = 0.125;  // of the fine table; linear between: 0.2% of a tile
constexpr double kDeviations = 8;    // of the Poisson distribution that a sum covers

// Expected number of started tiles: the sum over j of P(rows > j * tile_rows).
double StartedTiles(double mean, int tile_rows) {
  if (mean <= 0) return 0;
  const double spread = kDeviations * std::sqrt(mean) + kDeviations;
  const auto first = static_cast<int64_t>(std::max(0.0, std::floor(mean - spread)));
  const auto last = static_cast<int64_t>(std::ceil(mean + spread));
  double sum = 0, total = 0;
  double probability = std::exp(-mean + static_cast<double>(first) * std::log(mean) -
                                std::lgamma(static_cast<double>(first) + 1));
  for (int64_t rows = first; rows <= last; ++rows) {
    sum += probability * static_cast<double>((rows + tile_rows - 1) / tile_rows);
    total += probability;
    probability *= mean / static_cast<double>(rows + 1);
  }
  return total > 0 ? sum / total : 0;
}

Status Range(const char* name, double value, double low, double high) {
  if (value >= low && value <= high) return OkStatus();
  return InvalidArgument("{} must be from {} to {}, found {}", name, low, high, value);
}

// Sets `value` from a number of `object`; absent members keep it.
Status Read(const Json& object, const char* name, double& value) {
  const auto member = object.find(name);
  if (member == object.end()) return OkStatus();
  if (!member->is_number()) return InvalidArgument("{} must be a number", name);
  value = member->get<double>();
  return OkStatus();
}

Status Read(const Json& object, const char* name, int& value) {
  double number = value;
  RETURN_IF_ERROR(Read(object, name, number));
  if (!(number >= 0 && number <= std::numeric_limits<int>::max()) || number != std::floor(number))
    return InvalidArgument("{} must be a whole number, found {}", name, number);
  value = static_cast<int>(number);
  return OkStatus();
}

Status ReadMembers(const Json& json, CostModel& model) {
  for (const char* name : {"batch_tokens", "tile_s"}) {
    if (!json.contains(name)) return InvalidArgument("{} is missing", name);
  }
  RETURN_IF_ERROR(Read(json, "batch_tokens", model.batch_tokens));
  RETURN_IF_ERROR(Read(json, "top_k", model.routing.top_k));
  RETURN_IF_ERROR(Read(json, "groups", model.routing.groups));
  model.routing.top_groups = model.routing.groups;
  RETURN_IF_ERROR(Read(json, "top_groups", model.routing.top_groups));
  RETURN_IF_ERROR(Read(json, "tile_rows", model.tile_rows));
  RETURN_IF_ERROR(Read(json, "tile_s", model.tile_s));
  RETURN_IF_ERROR(Read(json, "read_s", model.read_s));
  RETURN_IF_ERROR(Read(json, "token_bytes", model.token_bytes));
  RETURN_IF_ERROR(Read(json, "expert_bytes", model.expert_bytes));
  RETURN_IF_ERROR(Read(json, "move_bytes_per_s", model.move_bytes_per_s));
  RETURN_IF_ERROR(Read(json, "interval_batches", model.interval_batches));
  const Json levels = json.value("levels", Json::array());
  if (!levels.is_array()) return InvalidArgument("levels must be a list");
  for (const Json& level : levels) {
    if (!level.is_object()) return InvalidArgument("levels must be objects");
    LinkLevel& added = model.levels.emplace_back();
    RETURN_IF_ERROR(Read(level, "groups", added.groups));
    RETURN_IF_ERROR(Read(level, "bytes_per_s", added.bytes_per_s));
  }
  return OkStatus();
}

}  // namespace

Status CheckCostModel(const CostModel& model, int experts, int ranks) {
  RETURN_IF_ERROR(CheckRouting(model.routing, experts));
  RETURN_IF_ERROR(Range("batch_tokens", model.batch_tokens, 1, 1e9));
  RETURN_IF_ERROR(Range("tile_rows", model.tile_rows, 1, kMaxTileRows));
  RETURN_IF_ERROR(Range("tile_s", model.tile_s, 1e-12, 1e3));
  RETURN_IF_ERROR(Range("read_s", model.read_s, 0, 1e3));
  RETURN_IF_ERROR(Range("token_bytes", model.token_bytes, 0, kMaxRate));
  RETURN_IF_ERROR(Range("expert_bytes", model.expert_bytes, 0, kMaxRate));
  RETURN_IF_ERROR(Range("move_bytes_per_s", model.move_bytes_per_s, 0, kMaxRate));
  RETURN_IF_ERROR(Range("interval_batches", model.interval_batches, 1, kMaxRate));
  if (model.levels.size() > 8)
    return InvalidArgument("levels must be at most 8, found {}", model.levels.size());
  for (const LinkLevel& level : model.levels) {
    if (level.groups < 1 || ranks % level.groups != 0)
      return InvalidArgument("groups of a level must divide the {} ranks, found {}", ranks, level.groups);
    // Each thread has the tokens between all pairs of groups.
    if (int64_t{level.groups} * level.groups > kMaxLoadValues)
      return InvalidArgument("groups times groups of a level must be at most {}, found {} groups",
                             kMaxLoadValues, level.groups);
    RETURN_IF_ERROR(Range("bytes_per_s of a level", level.bytes_per_s, 1, kMaxRate));
  }
  return OkStatus();
}

StatusOr<CostModel> ParseCostModel(std::string_view text, const std::string& source) {
  ASSIGN_OR_RETURN(const Json json, ParseBoundedJson(text, source));
  CostModel model;
  const Status status = ReadMembers(json, model);
  if (!status.ok()) return InvalidArgument("{}: {}", source, Message(status));
  return model;
}

StatusOr<CostModel> ReadCostModel(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadBoundedFile(path, size_t{1} << 20));
  return ParseCostModel(text, path);
}

ExpertTime::ExpertTime(const CostModel& model)
    : tile_s_(model.tile_s), read_s_(model.read_s), tile_rows_(model.tile_rows) {
  if (tile_rows_ == 1) return;
  fine_ = kFineStep;
  for (int i = 0; i <= static_cast<int>(kFineRows / fine_); ++i)
    few_.push_back(StartedTiles(i * fine_, tile_rows_));
  // From 4 * tile_rows^2 rows on, the deviation spans several tiles, whose steps average out.
  coarse_ = std::max(kFineStep, static_cast<double>(tile_rows_) / kStepsPerTile);
  const int steps = static_cast<int>(4.0 * tile_rows_ * tile_rows_ / coarse_);
  for (int i = 0; i <= steps; ++i) many_.push_back(StartedTiles(i * coarse_, tile_rows_));
}

double ExpertTime::Tiles(double rows) const {
  if (tile_rows_ == 1) return rows;
  const bool few = rows < kFineRows;
  const std::vector<double>& table = few ? few_ : many_;
  const double at = rows / (few ? fine_ : coarse_);
  if (at >= static_cast<double>(table.size() - 1))
    return rows / tile_rows_ + (tile_rows_ - 1) / (2.0 * tile_rows_);
  const auto index = static_cast<size_t>(at);
  return table[index] + (at - static_cast<double>(index)) * (table[index + 1] - table[index]);
}

double ExpertTime::operator()(double rows) const {
  return tile_s_ * Tiles(rows) - read_s_ * std::expm1(-rows);
}

LayerCost PredictCost(const LayerPlacement& layer, std::span<const double> loads, const CostModel& model,
                      const ExpertTime& time, std::span<const double> speeds, const LayerPlacement* current) {
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  LayerCost cost;
  if (!(total > 0)) return cost;
  const std::vector<int> copies = CopiesOf(layer, static_cast<int>(loads.size()));
  size_t most_moved = 0;
  for (size_t rank = 0; rank < layer.size(); ++rank) {
    double sum = 0;
    for (const int expert : layer[rank]) sum += time(model.rows() * loads[expert] / total / copies[expert]);
    cost.compute_s = std::max(cost.compute_s, speeds.empty() ? sum : sum / speeds[rank]);
    if (current == nullptr) continue;
    most_moved = std::max<size_t>(
        most_moved, std::count_if(layer[rank].begin(), layer[rank].end(),
                                  [&](int expert) { return !HoldsExpert((*current)[rank], expert); }));
  }
  for (const LinkLevel& level : model.levels) {
    const std::vector<double> received = TokensReceived(layer, loads, level.groups, model.routing);
    cost.exchange_s += *std::max_element(received.begin(), received.end()) * model.batch_tokens *
                       model.token_bytes / level.bytes_per_s;
  }
  if (model.move_bytes_per_s > 0) {
    cost.move_s = static_cast<double>(most_moved) * model.expert_bytes / model.move_bytes_per_s /
                  model.interval_batches;
  }
  return cost;
}

}  // namespace moesaic::parallel
