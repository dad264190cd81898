#include "parallel/placement/placement_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/json_text.h"
#include "parallel/placement/bounded_input.h"
#include "parallel/placement/numpy_file.h"
#include "parallel/placement/tensorrt_file.h"

namespace moesaic::parallel {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormatName = "moesaic-placement";
constexpr int64_t kMaxPatternRows = int64_t{4} << 20;  // lists of experts, some 50 bytes each

// Slots of all ranks in order, as lists of numbers separated by ", ".
std::string SlotList(const LayerPlacement& layer) {
  std::string text;
  for (const std::vector<int>& rank : layer) {
    for (const int expert : rank) text += fmt::format("{}{}", text.empty() ? "" : ", ", expert);
  }
  return text;
}

std::string MoesaicText(const Placement& placement) {
  std::string text = fmt::format("{{\"format\": \"{}\", \"version\": 1, \"experts\": {}, \"layers\": [",
                                 kFormatName, placement.experts);
  for (size_t layer = 0; layer < placement.layers.size(); ++layer) {
    text += layer == 0 ? "\n[" : ",\n[";
    for (size_t rank = 0; rank < placement.layers[layer].size(); ++rank)
      text += fmt::format("{}[{}]", rank == 0 ? "" : ", ", SlotList({placement.layers[layer][rank]}));
    text += "]";
  }
  return text + "\n]}\n";
}

StatusOr<std::string> OmniBytes(const Placement& placement) {
  RETURN_IF_ERROR(CheckPlacement(placement, "OmniPlacement's format", /*distinct=*/true));
  const auto layers = static_cast<int64_t>(placement.layers.size());
  if (placement.ranks() * layers * placement.experts > kMaxLoadValues)
    return InvalidArgument(
        "OmniPlacement's format: ranks times layers times experts must be at most {}, found {} x {} x {}",
        kMaxLoadValues, placement.ranks(), layers, placement.experts);
  std::vector<int32_t> pattern(static_cast<size_t>(placement.ranks() * layers * placement.experts), 0);
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int rank = 0; rank < placement.ranks(); ++rank) {
      for (const int expert : placement.layers[layer][rank])
        pattern[(rank * layers + layer) * placement.experts + expert] = 1;
    }
  }
  const int64_t shape[] = {placement.ranks(), layers, placement.experts};
  return NumpyBytes(std::span<const int32_t>(pattern), shape);
}

// Rows are decoder layers. Dense ones get experts in order, as SGLang's "trivial" location has them.
std::string SglangText(const Placement& placement, int first_layer) {
  std::vector<int> in_order(placement.replicas(0));
  for (size_t slot = 0; slot < in_order.size(); ++slot)
    in_order[slot] = static_cast<int>(slot) % placement.experts;
  std::string text = "{\"physical_to_logical_map\": [";
  const auto add_row = [&text](const LayerPlacement& slots) {
    text += fmt::format("{}\n[{}]", text.back() == ']' ? "," : "", SlotList(slots));
  };
  for (int layer = 0; layer < first_layer; ++layer) add_row({in_order});
  for (const LayerPlacement& layer : placement.layers) add_row(layer);
  return text + "\n]}\n";
}

std::string TensorRtText(const Placement& placement, int first_layer) {
  std::string text = fmt::format("num_slots: {}\ninitial_global_assignments:\n", placement.replicas(0));
  for (const LayerPlacement& layer : placement.layers)
    text += fmt::format("  {}: [{}]\n", first_layer++, SlotList(layer));
  return text + "layer_updates_per_iter: 0\n";
}

bool IsExpert(double value) { return value >= 0 && value < kMaxExperts && value == std::floor(value); }

// Placement from the experts of all slots, [layers][slots].
StatusOr<Placement> FromSlots(const std::vector<std::vector<double>>& slots, const std::string& source,
                              int ranks) {
  if (ranks < 1)
    return InvalidArgument("{}: files of this format do not tell the number of ranks; give it (--ranks)",
                           source);
  if (slots.size() > static_cast<size_t>(kMaxLayers))
    return InvalidArgument("{}: layers must be from 1 to {}, found {}", source, kMaxLayers, slots.size());
  Placement placement;
  for (const std::vector<double>& row : slots) {
    if (row.empty() || row.size() % static_cast<size_t>(ranks) != 0)
      return InvalidArgument("{}: slots must be a multiple of the {} ranks, found {}", source, ranks,
                             row.size());
    LayerPlacement layer(ranks);
    const size_t per_rank = row.size() / static_cast<size_t>(ranks);
    for (size_t slot = 0; slot < row.size(); ++slot) {
      if (!IsExpert(row[slot]))
        return InvalidArgument("{}: experts must be from 0 to {}, found {}", source, kMaxExperts - 1,
                               row[slot]);
      layer[slot / per_rank].push_back(static_cast<int>(row[slot]));
      placement.experts = std::max(placement.experts, static_cast<int>(row[slot]) + 1);
    }
    placement.layers.push_back(std::move(layer));
  }
  RETURN_IF_ERROR(CheckPlacement(placement, source, /*distinct=*/false));
  return placement;
}

StatusOr<Placement> FromOmni(const NumpyArray& array, const std::string& source) {
  if (array.shape.size() != 3 || array.values.empty() || array.shape[0] > kMaxRanks ||
      array.shape[1] > kMaxLayers || array.shape[2] > kMaxExperts)
    return InvalidArgument(
        "{}: a pattern of OmniPlacement is [ranks, layers, experts] of at most [{}, {}, {}], found [{}]",
        source, kMaxRanks, kMaxLayers, kMaxExperts, fmt::join(array.shape, ", "));
  if (array.shape[0] * array.shape[1] > kMaxPatternRows)
    return InvalidArgument("{}: ranks times layers must be at most {}, found {}", source, kMaxPatternRows,
                           array.shape[0] * array.shape[1]);
  Placement placement{.experts = static_cast<int>(array.shape[2])};
  placement.layers.assign(array.shape[1], LayerPlacement(array.shape[0]));
  for (int64_t i = 0; i < static_cast<int64_t>(array.values.size()); ++i) {
    if (array.values[i] == 0) continue;
    if (array.values[i] != 1)
      return InvalidArgument("{}: a pattern holds 0 and 1, found {}", source, array.values[i]);
    const int64_t row = i / placement.experts;
    placement.layers[row % array.shape[1]][row / array.shape[1]].push_back(
        static_cast<int>(i % placement.experts));
  }
  RETURN_IF_ERROR(CheckPlacement(placement, source, /*distinct=*/true));
  return placement;
}

StatusOr<std::vector<double>> NumberRow(const Json& row, const std::string& source) {
  if (!row.is_array())
    return InvalidArgument("{}: expected a list of experts, found {}", source, row.type_name());
  std::vector<double> values;
  for (const Json& value : row) {
    if (!value.is_number())
      return InvalidArgument("{}: experts must be numbers, found {}", source, checkpoint::ShownJson(value));
    values.push_back(value.get<double>());
  }
  return values;
}

StatusOr<Placement> FromMoesaic(const Json& file, const std::string& source) {
  if (!file.contains("version") || file["version"] != 1)
    return InvalidArgument("{}: \"version\" must be 1", source);
  if (!file.contains("experts") || !file["experts"].is_number_integer() || file["experts"] < 1 ||
      file["experts"] > kMaxExperts)
    return InvalidArgument("{}: \"experts\" must be an integer from 1 to {}", source, kMaxExperts);
  if (!file.contains("layers") || !file["layers"].is_array() || file["layers"].empty())
    return InvalidArgument("{}: \"layers\" must be a list that is not empty", source);
  if (file["layers"].size() > static_cast<size_t>(kMaxLayers))
    return InvalidArgument("{}: layers must be from 1 to {}, found {}", source, kMaxLayers,
                           file["layers"].size());
  Placement placement{.experts = file["experts"].get<int>()};
  for (const Json& layer : file["layers"]) {
    if (!layer.is_array() || layer.empty() || layer.size() > static_cast<size_t>(kMaxRanks))
      return InvalidArgument("{}: layer {}: must be a list of 1 to {} ranks, found {}", source,
                             placement.layers.size(), kMaxRanks, checkpoint::ShownJson(layer));
    placement.layers.emplace_back();
    for (const Json& rank : layer) {
      ASSIGN_OR_RETURN(const std::vector<double> row, NumberRow(rank, source));
      placement.layers.back().emplace_back();
      for (const double expert : row) {
        if (!IsExpert(expert))
          return InvalidArgument("{}: layer {}: experts must be from 0 to {}, found {}", source,
                                 placement.layers.size() - 1, placement.experts - 1, expert);
        placement.layers.back().back().push_back(static_cast<int>(expert));
      }
    }
  }
  RETURN_IF_ERROR(CheckPlacement(placement, source, /*distinct=*/false));
  return placement;
}

StatusOr<Placement> FromJson(std::string_view text, const std::string& source, int ranks) {
  ASSIGN_OR_RETURN(const Json file, ParseBoundedJson(text, source));
  if (file.contains("format") && file["format"] == kFormatName) return FromMoesaic(file, source);
  if (!file.contains("physical_to_logical_map") || !file["physical_to_logical_map"].is_array() ||
      file["physical_to_logical_map"].empty()) {
    return InvalidArgument("{}: needs \"format\": \"{}\", or \"physical_to_logical_map\" (SGLang)", source,
                           kFormatName);
  }
  std::vector<std::vector<double>> slots;
  for (const Json& row : file["physical_to_logical_map"]) {
    ASSIGN_OR_RETURN(std::vector<double> values, NumberRow(row, source));
    slots.push_back(std::move(values));
  }
  return FromSlots(slots, source, ranks);
}

StatusOr<Placement> FromPhy2Log(const NumpyArray& array, const std::string& source, int ranks) {
  if (array.shape.size() != 2 || array.values.empty() || array.shape[0] > kMaxLayers)
    return InvalidArgument("{}: phy2log must be [layers, replicas] of at most {} layers, found [{}]", source,
                           kMaxLayers, fmt::join(array.shape, ", "));
  std::vector<std::vector<double>> slots;
  for (int64_t layer = 0; layer < array.shape[0]; ++layer) {
    const auto row = array.values.begin() + layer * array.shape[1];
    slots.emplace_back(row, row + array.shape[1]);
  }
  return FromSlots(slots, source, ranks);
}

}  // namespace

std::string EplbBytes(const EplbPlan& plan) {
  const int64_t layers = plan.layers;
  const std::pair<std::string, std::string> files[] = {
      {"phy2log",
       NumpyBytes(std::span<const int64_t>(plan.phy2log), std::vector<int64_t>{layers, plan.replicas})},
      {"log2phy", NumpyBytes(std::span<const int64_t>(plan.log2phy),
                             std::vector<int64_t>{layers, plan.experts, plan.max_copies})},
      {"logcnt",
       NumpyBytes(std::span<const int64_t>(plan.logcnt), std::vector<int64_t>{layers, plan.experts})}};
  return NumpyZipBytes(files);
}

StatusOr<std::string> PlacementBytes(const Placement& placement, PlacementFormat format, int first_layer) {
  if (first_layer > 0 && !CountsDenseLayers(format))
    return InvalidArgument("this format counts MoE layers only, so the first one is 0, found {}",
                           first_layer);
  switch (format) {
    case PlacementFormat::kMoesaic:
      return MoesaicText(placement);
    case PlacementFormat::kOmni:
      return OmniBytes(placement);
    case PlacementFormat::kEplb: {
      ASSIGN_OR_RETURN(const EplbPlan plan, ToEplb(placement));
      return EplbBytes(plan);
    }
    case PlacementFormat::kSglang:
      RETURN_IF_ERROR(CheckEqualSlots(placement));
      return SglangText(placement, first_layer);
    case PlacementFormat::kTensorRt:
      RETURN_IF_ERROR(CheckEqualSlots(placement));
      return TensorRtText(placement, first_layer);
  }
  return InvalidArgument("unknown format of a placement");
}

namespace {

StatusOr<Placement> ParseAnyFormat(std::string_view bytes, const std::string& source, int ranks) {
  if (IsZipFile(bytes)) {
    ASSIGN_OR_RETURN(const NumpyArray array, ParseNumpyZip(bytes, "phy2log", source));
    return FromPhy2Log(array, source, ranks);
  }
  if (IsNumpyFile(bytes)) {
    ASSIGN_OR_RETURN(const NumpyArray array, ParseNumpy(bytes, source));
    return array.shape.size() == 2 ? FromPhy2Log(array, source, ranks) : FromOmni(array, source);
  }
  const size_t first = bytes.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && bytes[first] == '{') return FromJson(bytes, source, ranks);
  if (IsTensorRtYaml(bytes)) {
    ASSIGN_OR_RETURN(const std::vector<std::vector<double>> slots, ParseTensorRtYaml(bytes, source));
    return FromSlots(slots, source, ranks);
  }
  return InvalidArgument("{}: a placement is a .npz, .npy or YAML file, or a JSON object", source);
}

}  // namespace

StatusOr<Placement> ParsePlacement(std::string_view bytes, const std::string& source, int ranks) {
  ASSIGN_OR_RETURN(Placement placement, ParseAnyFormat(bytes, source, ranks));
  if (ranks > 0 && placement.ranks() != ranks)
    return InvalidArgument("{}: must have the {} ranks that were given, found {}", source, ranks,
                           placement.ranks());
  return placement;
}

StatusOr<Placement> ReadPlacement(const std::string& path, int ranks) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadBoundedFile(path));
  return ParsePlacement(bytes, path, ranks);
}

}  // namespace moesaic::parallel
