#include "parallel/placement/load_file.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/json_text.h"
#include "parallel/placement/bounded_input.h"
#include "parallel/placement/numpy_file.h"

namespace moesaic::parallel {
namespace {

using Json = nlohmann::json;

// Array of numbers from nested JSON arrays of equal lengths.
class ArrayReader {
 public:
  ArrayReader(const std::string& source, const std::string& key) : source_(source), key_(key) {}

  StatusOr<NumpyArray> Read(const Json& value) {
    for (const Json* at = &value; at->is_array(); at = &at->front()) {
      array_.shape.push_back(static_cast<int64_t>(at->size()));
      if (at->empty() || array_.shape.size() > 4)
        return InvalidArgument("{}: \"{}\" must have 2 or 3 dimensions, none empty", source_, key_);
    }
    if (array_.shape.size() < 2 || array_.shape.size() > 3) {
      return InvalidArgument("{}: \"{}\" must have 2 or 3 dimensions, found {}", source_, key_,
                             array_.shape.size());
    }
    RETURN_IF_ERROR(Visit(value, 0));
    return std::move(array_);
  }

 private:
  Status Visit(const Json& value, size_t depth) {
    if (depth == array_.shape.size()) {
      if (!value.is_number())
        return InvalidArgument("{}: \"{}\" must hold numbers, found {}", source_, key_,
                               checkpoint::ShownJson(value));
      if (array_.values.size() >= static_cast<size_t>(kMaxLoadValues))
        return InvalidArgument("{}: \"{}\" must have at most {} values", source_, key_, kMaxLoadValues);
      array_.values.push_back(value.get<double>());
      return OkStatus();
    }
    if (!value.is_array() || static_cast<int64_t>(value.size()) != array_.shape[depth]) {
      return InvalidArgument("{}: \"{}\" must have rows of equal lengths, found {}", source_, key_,
                             value.is_array() ? std::to_string(value.size()) : checkpoint::ShownJson(value));
    }
    for (const Json& element : value) RETURN_IF_ERROR(Visit(element, depth + 1));
    return OkStatus();
  }

  const std::string& source_;
  const std::string& key_;
  NumpyArray array_;
};

StatusOr<Workload> WorkloadOf(const NumpyArray& array, const std::string& name) {
  const size_t dims = array.shape.size();
  if (dims != 2 && dims != 3) {
    return InvalidArgument(
        "{}: a load is [layers, experts] or [windows, layers, experts], found {} dimensions", name, dims);
  }
  const int64_t layers = array.shape[dims - 2], experts = array.shape[dims - 1];
  if (layers < 1 || layers > kMaxLayers || experts < 1 || experts > kMaxExperts || array.values.empty()) {
    return InvalidArgument("{}: layers must be from 1 to {} and experts from 1 to {}, found {} and {}", name,
                           kMaxLayers, kMaxExperts, layers, experts);
  }
  const size_t size = static_cast<size_t>(layers) * experts;
  if (array.values.size() / size > kMaxWindows)
    return InvalidArgument("{}: must have at most {} windows, found {}", name, kMaxWindows,
                           array.values.size() / size);
  Workload workload{.name = name};
  for (size_t at = 0; at < array.values.size(); at += size) {
    LoadMatrix window{static_cast<int>(layers), static_cast<int>(experts)};
    window.tokens.assign(array.values.begin() + static_cast<std::ptrdiff_t>(at),
                         array.values.begin() + static_cast<std::ptrdiff_t>(at + size));
    for (const double value : window.tokens) {
      if (!std::isfinite(value) || value < 0)
        return InvalidArgument("{}: loads must be finite and not negative, found {}", name, value);
    }
    workload.windows.push_back(std::move(window));
  }
  workload.total = SumOfLoads(workload.windows);
  if (workload.windows.size() == 1) workload.windows.clear();
  RETURN_IF_ERROR(CheckLoad(workload.total, name));
  return workload;
}

// Sums the loads of physical experts of one logical expert.
StatusOr<NumpyArray> LogicalLoads(const NumpyArray& physical, const NumpyArray& map,
                                  const std::string& name) {
  const size_t dims = physical.shape.size();
  if (map.shape.size() != 2 || map.shape[0] != physical.shape[dims - 2] ||
      map.shape[1] != physical.shape[dims - 1])
    return InvalidArgument("{}: \"physical_to_logical_map\" must have the layers and experts of the load",
                           name);
  double last = 0;
  for (const double expert : map.values) {
    if (!(expert >= 0 && expert < kMaxExperts && expert == std::floor(expert)))
      return InvalidArgument("{}: \"physical_to_logical_map\" must hold experts, found {}", name, expert);
    last = std::max(last, expert);
  }
  NumpyArray logical{.shape = physical.shape};
  const auto experts = static_cast<int64_t>(last) + 1;
  const auto rows = static_cast<int64_t>(physical.values.size()) / map.shape[1];
  if (rows * experts > kMaxLoadValues)
    return InvalidArgument("{}: must have at most {} logical loads, found {}", name, kMaxLoadValues,
                           rows * experts);
  logical.shape.back() = experts;
  logical.values.assign(static_cast<size_t>(rows * experts), 0);
  for (size_t i = 0; i < physical.values.size(); ++i) {
    const size_t row = i / static_cast<size_t>(map.shape[1]);
    logical.values[row * experts + static_cast<size_t>(map.values[i % map.values.size()])] +=
        physical.values[i];
  }
  return logical;
}

StatusOr<NumpyArray> Member(const Json& file, const std::string& key, const std::string& name) {
  return ArrayReader(name, key).Read(file.at(key));
}

StatusOr<Workload> ParseJsonLoad(std::string_view text, const std::string& name) {
  ASSIGN_OR_RETURN(const Json file, ParseBoundedJson(text, name));
  if (file.contains("logical_count")) {
    ASSIGN_OR_RETURN(const NumpyArray counts, Member(file, "logical_count", name));
    return WorkloadOf(counts, name);
  }
  for (const std::string key : {"expert_load_window", "expert_load_pass"}) {
    if (!file.contains(key)) continue;
    if (!file.contains("physical_to_logical_map"))
      return InvalidArgument("{}: \"{}\" needs \"physical_to_logical_map\"", name, key);
    ASSIGN_OR_RETURN(const NumpyArray loads, Member(file, key, name));
    ASSIGN_OR_RETURN(const NumpyArray map, Member(file, "physical_to_logical_map", name));
    ASSIGN_OR_RETURN(const NumpyArray logical, LogicalLoads(loads, map, name));
    return WorkloadOf(logical, name);
  }
  return InvalidArgument(
      "{}: needs \"logical_count\" (SGLang), or \"expert_load_window\" or \"expert_load_pass\" (vLLM)", name);
}

}  // namespace

StatusOr<Workload> ParseLoad(std::string_view bytes, const std::string& name) {
  if (IsNumpyFile(bytes)) {
    ASSIGN_OR_RETURN(const NumpyArray array, ParseNumpy(bytes, name));
    return WorkloadOf(array, name);
  }
  const size_t first = bytes.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && bytes[first] == '{') return ParseJsonLoad(bytes, name);
  return InvalidArgument("{}: a load is a .npy file, or a JSON object with \"logical_count\"", name);
}

Status ParseOmniText(std::string_view text, const std::string& source,
                     std::vector<std::vector<double>>& layers, int64_t& values) {
  size_t line = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (row.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (line == static_cast<size_t>(kMaxLayers))
      return InvalidArgument("{}: must have at most {} layers", source, kMaxLayers);
    if (layers.size() == line) layers.emplace_back();
    std::vector<double>& layer = layers[line++];
    for (size_t at = row.find_first_not_of(" \t\r"); at != std::string_view::npos;
         at = row.find_first_not_of(" \t\r", at)) {
      const size_t stop = std::min(row.find_first_of(" \t\r", at), row.size());
      double value = 0;
      const auto [rest, error] = std::from_chars(row.data() + at, row.data() + stop, value);
      if (error != std::errc() || rest != row.data() + stop || !std::isfinite(value) || value < 0) {
        return InvalidArgument("{}: line {}: must hold counts, found \"{}\"", source, line,
                               row.substr(at, std::min<size_t>(stop - at, 40)));
      }
      if (++values > kMaxLoadValues)
        return InvalidArgument("{}: all files must have at most {} counts, found more", source,
                               kMaxLoadValues);
      layer.push_back(value);
      at = stop;
    }
  }
  return OkStatus();
}

}  // namespace moesaic::parallel
