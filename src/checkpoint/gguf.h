// The GGUF container, versions 2 and 3: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

/// Key-value section of a GGUF file. Numbers of all widths are stored as int64 or double.
class GgufMetadata {
 public:
  using Value = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>, std::vector<double>,
                             std::vector<std::string>>;

  /// Returns null or nullopt if the key is absent or has another type.
  const std::string* String(const std::string& key) const;
  std::optional<int64_t> Int(const std::string& key) const;
  std::optional<double> Number(const std::string& key) const;  ///< accepts integers too
  std::optional<bool> Bool(const std::string& key) const;
  const std::vector<std::string>* Strings(const std::string& key) const;
  const std::vector<int64_t>* Ints(const std::string& key) const;
  const std::vector<double>* Numbers(const std::string& key) const;
  bool Has(const std::string& key) const { return values_.contains(key); }
  std::vector<std::string> Keys() const;

  void Set(const std::string& key, Value value) { values_[key] = std::move(value); }

 private:
  template <typename T>
  const T* Get(const std::string& key) const;
  std::map<std::string, Value> values_;
};

struct GgufFile {
  GgufMetadata metadata;
  std::vector<TensorEntry> tensors;  // ggml names; shapes in Hub order (slowest dimension first)
};

/// Parses and validates a whole file; `bytes` must outlive the result. `file` prefixes every message.
StatusOr<GgufFile> ParseGguf(std::span<const std::byte> bytes, const std::string& file);

}  // namespace moesaic::checkpoint
