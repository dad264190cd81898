#include "app/protein_files.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>

#include "app/input.h"
#include "base/lfs_pointer.h"
#include "checkpoint/safetensors.h"
#include "runtime/memory.h"
#include "science/elements.h"
#include "science/torch_file.h"

namespace moesaic::app {
namespace {

bool IsGzip(std::string_view bytes) { return bytes.size() > 2 && bytes[0] == '\x1f' && bytes[1] == '\x8b'; }

// Decompresses all members of gzip data: bgzip and concatenated files have several.
StatusOr<std::string> Unzip(std::string_view bytes, const std::string& name) {
  z_stream stream{};
  constexpr int kGzipWindow = 15 + 16;  // the largest window, with a gzip header
  if (inflateInit2(&stream, kGzipWindow) != Z_OK) return ResourceExhausted("{}: zlib cannot start", name);
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, inflateEnd);
  constexpr size_t kMaxFed = size_t{1} << 30;  // avail_in has 32 bits
  std::string text;
  std::string buffer(1 << 20, '\0');
  int state = Z_OK;
  while (true) {
    if (stream.avail_in == 0) {
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));  // zlib reads it only
      stream.avail_in = static_cast<uInt>(std::min(bytes.size(), kMaxFed));
      bytes.remove_prefix(stream.avail_in);
    }
    if (state == Z_STREAM_END) {
      if (stream.avail_in == 0) return text;
      inflateReset(&stream);
    }
    stream.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream.avail_out = static_cast<uInt>(buffer.size());
    state = inflate(&stream, Z_NO_FLUSH);
    if (state != Z_OK && state != Z_STREAM_END)
      return DataLoss("{}: the gzip data are damaged or truncated", name);
    text.append(buffer, 0, buffer.size() - stream.avail_out);
    if (text.size() > kMaxStructureBytes)
      return ResourceExhausted("{}: more than {} bytes after decompression", name, kMaxStructureBytes);
  }
}

// Checks a model's number of neighbours; `text` is the value as the file has it.
StatusOr<int> NeighborsOf(double value, const std::string& text, const std::string& path) {
  constexpr int kMaxNeighbors = 10000;  // the limit of --neighbors
  if (!(value >= 1 && value <= kMaxNeighbors) || value != std::floor(value)) {
    return DataLoss("{}: \"num_edges\" must be an integer in [1, {}], but is {}", path, kMaxNeighbors, text);
  }
  return static_cast<int>(value);
}

StatusOr<ProteinWeights> ReadSafetensors(const runtime::MappedFile& file) {
  ASSIGN_OR_RETURN(const checkpoint::Safetensors parsed,
                   checkpoint::ParseSafetensors(file.bytes(), file.path()));
  ProteinWeights weights;
  for (const checkpoint::TensorEntry& entry : parsed.tensors) {
    using tensor::DType;
    if (entry.dtype != DType::kF32 && entry.dtype != DType::kF16 && entry.dtype != DType::kBF16) {
      return Unimplemented("{}: tensor \"{}\" must be F32, F16 or BF16, not {}", file.path(), entry.name,
                           tensor::DTypeName(entry.dtype));
    }
    science::WeightTensor& to = weights.tensors[entry.name];
    to.shape = entry.shape;
    // Tensors may lie at any address.
    if (entry.dtype == DType::kF32) {
      to.values.resize(entry.bytes.size() / sizeof(float));
      if (!to.values.empty())
        std::memcpy(to.values.data(), entry.bytes.data(), to.values.size() * sizeof(float));
      continue;
    }
    std::vector<uint16_t> halves(entry.bytes.size() / sizeof(uint16_t));
    if (!halves.empty()) std::memcpy(halves.data(), entry.bytes.data(), halves.size() * sizeof(uint16_t));
    to.values.resize(halves.size());
    for (size_t i = 0; i < halves.size(); ++i)
      to.values[i] = graph::LoadElement(halves.data(), entry.dtype, static_cast<int64_t>(i));
  }
  if (const auto found = parsed.metadata.find("num_edges"); found != parsed.metadata.end()) {
    const std::string& text = found->second;
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) value = 0;
    ASSIGN_OR_RETURN(weights.neighbors, NeighborsOf(value, text, file.path()));
  }
  return weights;
}

}  // namespace

StatusOr<science::Structure> ReadStructure(const std::string& path) {
  ASSIGN_OR_RETURN(std::string bytes, ReadInput(path));
  const std::string name = InputName(path);
  RETURN_IF_ERROR(base::CheckFetched(bytes, name));
  if (IsGzip(bytes)) {
    ASSIGN_OR_RETURN(bytes, Unzip(bytes, name));
  }
  if (bytes.size() > kMaxStructureBytes)
    return ResourceExhausted("{}: {} bytes, more than {}", name, bytes.size(), kMaxStructureBytes);
  return science::ParseStructure(bytes, name);
}

StatusOr<ProteinWeights> ReadProteinWeights(const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, runtime::MappedFile::Open(path));
  const std::span<const std::byte> bytes = file->bytes();
  RETURN_IF_ERROR(base::CheckFetched({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path));
  if (bytes.size() < 2 || bytes[0] != std::byte{'P'} || bytes[1] != std::byte{'K'})
    return ReadSafetensors(*file);
  ASSIGN_OR_RETURN(const science::TorchFile torch, science::ParseTorchFile(bytes, path));
  ProteinWeights weights;
  weights.tensors = torch.Under("model_state_dict/");
  if (weights.tensors.empty()) weights.tensors = torch.tensors;
  if (const auto found = torch.numbers.find("num_edges"); found != torch.numbers.end()) {
    ASSIGN_OR_RETURN(weights.neighbors, NeighborsOf(found->second, fmt::format("{}", found->second), path));
  }
  return weights;
}

}  // namespace moesaic::app
