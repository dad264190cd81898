#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/safetensors.h"
#include "parallel/placement/bounded_input.h"
#include "parallel/placement/load_file.h"

namespace moesaic::parallel {
namespace {

namespace fs = std::filesystem;

// Parses "PREFIX<a>MIDDLE<b>SUFFIX" into two numbers.
bool TwoNumbers(std::string_view text, std::string_view prefix, std::string_view middle,
                std::string_view suffix, int& a, int& b) {
  const auto number = [&](int& value) {
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0) return false;
    text.remove_prefix(rest - text.data());
    return true;
  };
  const auto word = [&](std::string_view expected) {
    if (text.substr(0, expected.size()) != expected) return false;
    text.remove_prefix(expected.size());
    return true;
  };
  return word(prefix) && number(a) && word(middle) && number(b) && word(suffix) && text.empty();
}

StatusOr<Workload> WorkloadOfWindows(const std::map<int, std::vector<std::vector<double>>>& windows,
                                     const std::string& name) {
  Workload workload{.name = name};
  const std::vector<std::vector<double>>& first = windows.begin()->second;
  if (windows.size() > kMaxWindows)
    return InvalidArgument("{}: must have at most {} steps, found {}", name, kMaxWindows, windows.size());
  for (const auto& [step, layers] : windows) {
    if (layers.empty()) return InvalidArgument("{}: step {}: needs a line per layer, found none", name, step);
    if (layers.size() != first.size())
      return InvalidArgument("{}: step {}: must have {} layers as step {}, found {}", name, step,
                             first.size(), windows.begin()->first, layers.size());
    LoadMatrix window{static_cast<int>(layers.size()), static_cast<int>(first.front().size())};
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      if (layers[layer].size() != static_cast<size_t>(window.experts)) {
        return InvalidArgument("{}: step {}, layer {}: must have {} experts, found {}", name, step, layer,
                               window.experts, layers[layer].size());
      }
      window.tokens.insert(window.tokens.end(), layers[layer].begin(), layers[layer].end());
    }
    workload.windows.push_back(std::move(window));
  }
  workload.total = SumOfLoads(workload.windows);
  if (workload.windows.size() == 1) workload.windows.clear();
  RETURN_IF_ERROR(CheckLoad(workload.total, name));
  return workload;
}

StatusOr<Workload> ReadOmniFolder(const std::map<std::pair<int, int>, fs::path>& files,
                                  const std::string& name) {
  std::map<int, std::vector<std::vector<double>>> windows;
  std::map<int, int> next_rank;  // by step
  int64_t values = 0;
  for (const auto& [key, path] : files) {
    const auto [step, rank] = key;
    if (rank != next_rank[step]++)
      return InvalidArgument("{}: step {}: needs the files of all ranks from 0 on, found rank {}", name, step,
                             rank);
    ASSIGN_OR_RETURN(const std::string text, ReadBoundedFile(path.string()));
    RETURN_IF_ERROR(ParseOmniText(text, path.string(), windows[step], values));
  }
  return WorkloadOfWindows(windows, name);
}

Status AddTensors(std::string_view bytes, const std::string& source,
                  std::map<int, std::map<int, std::vector<double>>>& windows, int64_t& values) {
  ASSIGN_OR_RETURN(const checkpoint::Safetensors file,
                   checkpoint::ParseSafetensors(std::as_bytes(std::span(bytes)), source));
  for (const checkpoint::TensorEntry& tensor : file.tensors) {
    int iteration = 0, layer = 0;
    if (!TwoNumbers(tensor.name, "", "_", "", iteration, layer))
      return InvalidArgument("{}: tensors must be named ITERATION_LAYER, found \"{}\"", source, tensor.name);
    const size_t width = tensor.dtype == tensor::DType::kI32   ? 4
                         : tensor.dtype == tensor::DType::kI64 ? 8
                                                               : 0;
    if (width == 0 || tensor.shape.size() != 1)
      return InvalidArgument("{}: tensor \"{}\" must be a vector of int32 or int64", source, tensor.name);
    std::vector<double>& counts = windows[iteration][layer];
    const size_t experts = tensor.bytes.size() / width;
    if (counts.empty()) {
      values += static_cast<int64_t>(experts);
      if (values > kMaxLoadValues)
        return InvalidArgument("{}: all files must have at most {} counts, found more", source,
                               kMaxLoadValues);
      counts.assign(experts, 0);
    }
    if (counts.size() != experts)
      return InvalidArgument("{}: tensor \"{}\" must have {} experts, found {}", source, tensor.name,
                             counts.size(), experts);
    for (size_t e = 0; e < experts; ++e) {
      int64_t value = 0;
      if (width == 4) {
        int32_t narrow = 0;
        std::memcpy(&narrow, tensor.bytes.data() + e * width, width);
        value = narrow;
      } else {
        std::memcpy(&value, tensor.bytes.data() + e * width, width);
      }
      if (value < 0)
        return InvalidArgument("{}: tensor \"{}\" must hold counts, found {}", source, tensor.name, value);
      counts[e] += static_cast<double>(value);
    }
  }
  return OkStatus();
}

// [iterations][layers][experts]
using TensorWindows = std::map<int, std::map<int, std::vector<double>>>;

StatusOr<Workload> WorkloadOfTensors(const TensorWindows& windows, const std::string& name) {
  std::map<int, std::vector<std::vector<double>>> rows;
  for (const auto& [iteration, layers] : windows) {
    const auto& first = windows.begin()->second;
    const bool same = std::ranges::equal(
        layers, first, {}, [](const auto& entry) { return entry.first; },
        [](const auto& entry) { return entry.first; });
    if (!same)
      return InvalidArgument("{}: iteration {} must have the layers of iteration {}", name, iteration,
                             windows.begin()->first);
    for (const auto& [layer, counts] : layers) rows[iteration].push_back(counts);
  }
  if (rows.empty()) return InvalidArgument("{}: rank*.safetensors have no tensors", name);
  return WorkloadOfWindows(rows, name);
}

StatusOr<Workload> ReadTensorRtFolder(const std::vector<fs::path>& files, const std::string& name) {
  TensorWindows windows;
  int64_t values = 0;
  for (const fs::path& path : files) {
    ASSIGN_OR_RETURN(const std::string bytes, ReadBoundedFile(path.string()));
    RETURN_IF_ERROR(AddTensors(bytes, path.string(), windows, values));
  }
  return WorkloadOfTensors(windows, name);
}

}  // namespace

StatusOr<Workload> ParseTensorRtFile(std::string_view bytes, const std::string& name) {
  TensorWindows windows;
  int64_t values = 0;
  RETURN_IF_ERROR(AddTensors(bytes, name, windows, values));
  return WorkloadOfTensors(windows, name);
}

StatusOr<Workload> ReadLoad(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    ASSIGN_OR_RETURN(const std::string bytes, ReadBoundedFile(path));
    return ParseLoad(bytes, path);
  }
  std::map<std::pair<int, int>, fs::path> omni;
  std::vector<fs::path> tensors;
  // increment() instead of a range, whose operator++ throws.
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    int step = 0, rank = 0;
    if (TwoNumbers(name, "activation_counts_recordstep_", "_rank_", ".txt", step, rank)) {
      omni[{step, rank}] = entry->path();
    } else if (name.rfind("rank", 0) == 0 &&
               name.find_first_not_of("0123456789", 4) == name.find(".safetensors") &&
               entry->path().extension() == ".safetensors") {
      tensors.push_back(entry->path());
    }
  }
  if (error) return IoError("{}: cannot be read: {}", path, error.message());
  if (!omni.empty()) return ReadOmniFolder(omni, path);
  std::sort(tensors.begin(), tensors.end());
  if (!tensors.empty()) return ReadTensorRtFolder(tensors, path);
  return InvalidArgument(
      "{}: a folder of loads has activation_counts_recordstep_*_rank_*.txt (OmniPlacement) or "
      "rank*.safetensors (TensorRT-LLM)",
      path);
}

}  // namespace moesaic::parallel
