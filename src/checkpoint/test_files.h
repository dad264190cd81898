// Shared by tests and fuzzers, also of other rooms: files built in memory, and a temporary folder.
#pragma once

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/test_safetensors.h"

namespace moesaic::checkpoint {

/// A unique folder below the system's temporary folder, removed by the destructor.
class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "moesaic-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string Path(const std::string& name = "") const { return (path_ / name).string(); }
  std::string Write(const std::string& name, std::string_view content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return Path(name);
  }

 private:
  std::filesystem::path path_;
};

inline std::span<const std::byte> BytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }

template <typename T>
std::string RawBytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

/// Builds a safetensors file from tensors.
class SafetensorsMaker {
 public:
  template <typename T>
  SafetensorsMaker& Add(const std::string& name, const char* dtype, const std::vector<int64_t>& shape,
                        const std::vector<T>& values) {
    header_[name] = {{"dtype", dtype},
                     {"shape", shape},
                     {"data_offsets", {data_.size(), data_.size() + values.size() * sizeof(T)}}};
    data_ += RawBytes(values);
    return *this;
  }
  std::string File() const { return SafetensorsFile(header_.dump(), data_); }

 private:
  nlohmann::json header_ = nlohmann::json::object();
  std::string data_;
};

/// Builds a GGUF file: metadata first, then tensors, then File().
class GgufMaker {
 public:
  GgufMaker& String(const std::string& key, const std::string& value) {
    Key(key, 8);
    Text(value, &pairs_);
    return *this;
  }
  GgufMaker& U32(const std::string& key, uint32_t value) { return Scalar(key, 4, value); }
  GgufMaker& I32(const std::string& key, int32_t value) { return Scalar(key, 5, value); }
  GgufMaker& F32(const std::string& key, float value) { return Scalar(key, 6, value); }
  GgufMaker& Bool(const std::string& key, bool value) { return Scalar(key, 7, static_cast<uint8_t>(value)); }
  GgufMaker& U64(const std::string& key, uint64_t value) { return Scalar(key, 10, value); }
  GgufMaker& Strings(const std::string& key, const std::vector<std::string>& values) {
    ArrayOf(key, 8, values.size());
    for (const std::string& value : values) Text(value, &pairs_);
    return *this;
  }
  template <typename T>
  GgufMaker& Array(const std::string& key, uint32_t type, const std::vector<T>& values) {
    ArrayOf(key, type, values.size());
    pairs_ += RawBytes(values);
    return *this;
  }
  /// Adds an array that claims `count` elements but contains none.
  GgufMaker& EmptyArray(const std::string& key, uint32_t type, uint64_t count) {
    ArrayOf(key, type, count);
    return *this;
  }
  /// Adds a tensor; `shape` is in ggml's order, fastest dimension first.
  GgufMaker& Tensor(const std::string& name, const std::vector<uint64_t>& shape, uint32_t type,
                    const std::string& data) {
    data_.resize((data_.size() + 31) / 32 * 32);
    TensorAt(name, shape, type, data_.size());
    data_ += data;
    return *this;
  }
  GgufMaker& F32Tensor(const std::string& name, const std::vector<uint64_t>& shape, float value = 0.5F) {
    uint64_t elements = 1;
    for (const uint64_t size : shape) elements *= size;
    return Tensor(name, shape, 0, RawBytes(std::vector<float>(elements, value)));
  }
  GgufMaker& TensorAt(const std::string& name, const std::vector<uint64_t>& shape, uint32_t type,
                      uint64_t offset) {
    ++tensors_;
    Text(name, &infos_);
    Put(static_cast<uint32_t>(shape.size()), &infos_);
    for (const uint64_t size : shape) Put(size, &infos_);
    Put(type, &infos_);
    Put(offset, &infos_);
    return *this;
  }
  std::string File(uint32_t version = 3) const {
    std::string file = "GGUF";
    Put(version, &file);
    Put(tensors_, &file);
    Put(count_, &file);
    file += pairs_ + infos_;
    file.resize((file.size() + 31) / 32 * 32);
    return file + data_;
  }

 private:
  template <typename T>
  static void Put(T value, std::string* to) {
    to->append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  static void Text(const std::string& text, std::string* to) {
    Put(static_cast<uint64_t>(text.size()), to);
    *to += text;
  }
  void Key(const std::string& key, uint32_t type) {
    ++count_;
    Text(key, &pairs_);
    Put(type, &pairs_);
  }
  template <typename T>
  GgufMaker& Scalar(const std::string& key, uint32_t type, T value) {
    Key(key, type);
    Put(value, &pairs_);
    return *this;
  }
  void ArrayOf(const std::string& key, uint32_t type, uint64_t count) {
    Key(key, 9);
    Put(type, &pairs_);
    Put(count, &pairs_);
  }

  uint64_t count_ = 0, tensors_ = 0;
  std::string pairs_, infos_, data_;
};

}  // namespace moesaic::checkpoint
