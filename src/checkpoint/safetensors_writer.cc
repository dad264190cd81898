#include "checkpoint/safetensors_writer.h"

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "runtime/atomic_file.h"

namespace moesaic::checkpoint {
namespace {

int64_t BytesOf(const TensorOutput& output) {
  int64_t elements = 1;
  for (const int64_t size : output.shape) elements *= size;
  return tensor::BytesOf(output.dtype, elements);
}

}  // namespace

TensorOutput HeldTensor(std::string name, tensor::DType dtype, std::vector<int64_t> shape,
                        std::span<const std::byte> values) {
  return {std::move(name), dtype, std::move(shape),
          [bytes = std::vector<std::byte>(values.begin(), values.end())] { return bytes; }};
}

Status WriteSafetensors(const std::string& path, const std::vector<TensorOutput>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata) {
  nlohmann::ordered_json header;
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  int64_t offset = 0;
  for (const TensorOutput& output : tensors) {
    const int64_t bytes = BytesOf(output);
    header[output.name] = {{"dtype", tensor::DTypeName(output.dtype)},
                           {"shape", output.shape},
                           {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8,
              ' ');  // tensors are 8-byte aligned, as in the reference writer
  ASSIGN_OR_RETURN(const std::unique_ptr<runtime::AtomicFile> file, runtime::AtomicFile::Create(path));
  const uint64_t length = text.size();
  RETURN_IF_ERROR(file->Write(&length, sizeof(length)));
  RETURN_IF_ERROR(file->Write(text.data(), text.size()));
  for (const TensorOutput& output : tensors) {
    const std::vector<std::byte> bytes = output.bytes();
    MOESAIC_CHECK_EQ(static_cast<int64_t>(bytes.size()), BytesOf(output));
    RETURN_IF_ERROR(file->Write(bytes.data(), bytes.size()));
  }
  return file->Commit();
}

}  // namespace moesaic::checkpoint
