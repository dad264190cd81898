// Reads the vocabulary of a GGUF file for tests of this room, which must not use src/checkpoint's reader.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace moesaic::text {

class GgufTestReader {
 public:
  explicit GgufTestReader(std::string_view bytes) : bytes_(bytes) {}

  GgufVocab Read() {
    Take<uint32_t>();  // magic
    Take<uint32_t>();  // version
    Take<uint64_t>();  // tensors
    const uint64_t pairs = Take<uint64_t>();
    for (uint64_t i = 0; i < pairs; ++i) ReadPair();
    return vocab_;
  }

 private:
  template <typename T>
  T Take() {
    if (bytes_.size() - at_ < sizeof(T)) throw std::runtime_error("GGUF file cut short");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  std::string TakeString() {
    const uint64_t length = Take<uint64_t>();
    if (bytes_.size() - at_ < length) throw std::runtime_error("GGUF file cut short");
    at_ += length;
    return std::string(bytes_.substr(at_ - length, length));
  }

  double TakeNumber(uint32_t type) {
    switch (type) {
      case 0:
        return Take<uint8_t>();
      case 1:
        return Take<int8_t>();
      case 2:
        return Take<uint16_t>();
      case 3:
        return Take<int16_t>();
      case 4:
        return Take<uint32_t>();
      case 5:
        return Take<int32_t>();
      case 6:
        return Take<float>();
      case 7:
        return Take<uint8_t>();
      case 10:
        return static_cast<double>(Take<uint64_t>());
      case 11:
        return static_cast<double>(Take<int64_t>());
      case 12:
        return Take<double>();
      default:
        throw std::runtime_error("GGUF value of an unknown type");
    }
  }

  void ReadPair() {
    const std::string key = TakeString();
    uint32_t type = Take<uint32_t>();
    std::vector<std::string> strings;
    std::vector<double> numbers;
    uint64_t count = 1;
    if (type == 9) {
      type = Take<uint32_t>();
      count = Take<uint64_t>();
    }
    for (uint64_t i = 0; i < count; ++i) {
      if (type == 8)
        strings.push_back(TakeString());
      else
        numbers.push_back(TakeNumber(type));
    }
    constexpr std::string_view kPrefix = "tokenizer.ggml.";
    if (key.starts_with(kPrefix)) Store(key.substr(kPrefix.size()), strings, numbers);
  }

  void Store(const std::string& key, const std::vector<std::string>& strings,
             const std::vector<double>& numbers) {
    const auto id = [&] { return static_cast<int32_t>(numbers.at(0)); };
    if (key == "model") vocab_.model = strings.at(0);
    if (key == "pre") vocab_.pre = strings.at(0);
    if (key == "tokens") vocab_.tokens = strings;
    if (key == "merges") vocab_.merges = strings;
    if (key == "scores") vocab_.scores.assign(numbers.begin(), numbers.end());
    if (key == "token_type") vocab_.token_types.assign(numbers.begin(), numbers.end());
    if (key == "bos_token_id") vocab_.bos_id = id();
    if (key == "eos_token_id") vocab_.eos_id = id();
    if (key == "unknown_token_id") vocab_.unk_id = id();
    if (key == "padding_token_id") vocab_.pad_id = id();
    if (key == "eot_token_id") vocab_.eot_id = id();
    if (key == "add_bos_token") vocab_.add_bos = numbers.at(0) != 0;
    if (key == "add_eos_token") vocab_.add_eos = numbers.at(0) != 0;
    if (key == "add_space_prefix") vocab_.add_space_prefix = numbers.at(0) != 0;
  }

  std::string_view bytes_;
  size_t at_ = 0;
  GgufVocab vocab_;
};

}  // namespace moesaic::text
