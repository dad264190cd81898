// The packed weight file: a valid safetensors file whose tensors hold layouts of tensor/packed.h (dtype U8,
// one dimension). Any safetensors tool can list it, and its weights are used directly from mmap. See
// docs/contracts/packed-file.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "runtime/memory.h"
#include "tensor/packed.h"

namespace moesaic::checkpoint {

/// One region of a packed file: a packed matrix, a stack of experts or plain f32 values.
struct PackedRegion {
  std::string name;    // "model.layers.3.mlp.experts", "model.norm.weight"
  std::string layout;  // JSON: format, n, k and other fields that models::Describe writes
  int64_t bytes = 0;
};

/// Writes regions in a declared order. The header is written first, with its final size. The file appears
/// under its name only when it is complete, so an interrupted run leaves no broken file.
class PackedWriter {
 public:
  /// `metadata` is written to the header's __metadata__ (strings only): source, config.json, texts, and
  /// kLayoutKey if the regions are those of the ranks of a layout (RankRegion).
  static StatusOr<std::unique_ptr<PackedWriter>> Create(
      const std::string& path, std::vector<PackedRegion> regions,
      const std::vector<std::pair<std::string, std::string>>& metadata);
  virtual ~PackedWriter() = default;
  /// Appends bytes of region `index`. Regions must be written in order and have exactly their declared
  /// length.
  virtual Status Append(size_t index, std::span<const std::byte> bytes) = 0;
  /// Flushes, syncs and renames into place.
  virtual Status Finish() = 0;
};

/// Metadata of a file with the parts of the ranks of a layout: the layout's text.
inline constexpr char kLayoutKey[] = "layout";
/// Name in such a file of `region` of one rank: "rank3/model.norm.weight".
std::string RankRegion(int rank, const std::string& region);

/// A mapped packed file. Regions are 64-byte aligned and valid for the lifetime of this object.
class PackedFile {
 public:
  static StatusOr<std::shared_ptr<const PackedFile>> Open(const std::string& path);
  /// Parses a packed file in memory, which must outlive the result and be 64-byte aligned.
  static StatusOr<std::shared_ptr<const PackedFile>> Parse(std::span<const std::byte> bytes,
                                                           const std::string& path);
  /// Returns whether `path` is a safetensors file whose metadata names our layout; false if it cannot be
  /// read.
  static bool Is(const std::string& path);
  /// The part of one rank in a file with a layout; its regions have the names of the whole model's.
  static std::shared_ptr<const PackedFile> OfRank(std::shared_ptr<const PackedFile> file, int rank);
  virtual ~PackedFile() = default;
  /// Text of the layout whose ranks the parts are for; "": the file has the whole model.
  std::string layout() const { return Metadata(kLayoutKey).value_or(""); }
  virtual const std::string& path() const = 0;
  virtual StatusOr<std::string> Metadata(const std::string& key) const = 0;
  virtual const std::vector<PackedRegion>& regions() const = 0;
  virtual StatusOr<std::span<const std::byte>> Region(const std::string& name) const = 0;
  virtual StatusOr<const PackedRegion*> Describe(const std::string& name) const = 0;
};

}  // namespace moesaic::checkpoint
