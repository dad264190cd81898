#include "checkpoint/packed_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/round.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"
#include "runtime/atomic_file.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

constexpr char kFormatName[] = "moesaic-packed";
constexpr char kFormatVersion[] = "1";
constexpr char kLayoutVersion[] = "2";  // of a file with a layout
// The header begins with these bytes, so that a single read identifies a packed file.
constexpr char kHeaderStart[] = R"({"__metadata__":{"format":"moesaic-packed","version":")";
constexpr int64_t kDataAlignment =
    4096;  // alignment of the first region: a page, so that regions never share one with the header
constexpr int64_t kRegionAlignment = 64;

StatusOr<std::string> MakeHeader(const std::vector<PackedRegion>& regions,
                                 const std::vector<std::pair<std::string, std::string>>& metadata) {
  using nlohmann::ordered_json;
  ordered_json info;
  info["format"] = kFormatName;
  const bool has_layout = std::ranges::any_of(metadata, [](const auto& e) { return e.first == kLayoutKey; });
  info["version"] = has_layout ? kLayoutVersion : kFormatVersion;
  json layouts = json::array();
  for (const PackedRegion& region : regions) {
    json layout = json::parse(region.layout, nullptr, /*allow_exceptions=*/false);
    MOESAIC_CHECK(!layout.is_discarded());
    layouts.push_back({{"name", region.name}, {"bytes", region.bytes}, {"layout", std::move(layout)}});
  }
  info["regions"] = layouts.dump();
  for (const auto& [key, value] : metadata) info[key] = value;
  ordered_json header;
  header["__metadata__"] = std::move(info);
  int64_t offset = 0;
  for (const PackedRegion& region : regions) {
    const int64_t bytes = base::RoundUp(region.bytes, kRegionAlignment);
    header[region.name] = {{"dtype", "U8"}, {"shape", {bytes}}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    return InvalidArgument("the metadata of a packed file must be UTF-8: {}", error.what());
  }
  text.resize(static_cast<size_t>(base::RoundUp(static_cast<int64_t>(text.size()) + 8, kDataAlignment) - 8),
              ' ');
  return text;
}

class FileWriter : public PackedWriter {
 public:
  FileWriter(std::unique_ptr<runtime::AtomicFile> file, std::vector<PackedRegion> regions)
      : file_(std::move(file)), regions_(std::move(regions)) {}

  Status Append(size_t index, std::span<const std::byte> bytes) override {
    MOESAIC_CHECK_LT(index, regions_.size());
    while (region_ < index) RETURN_IF_ERROR(EndRegion());
    MOESAIC_CHECK_EQ(region_, index);
    written_ += std::ssize(bytes);
    MOESAIC_CHECK_LE(written_, regions_[index].bytes);
    return file_->Write(bytes.data(), bytes.size());
  }

  Status Finish() override {
    while (region_ < regions_.size()) RETURN_IF_ERROR(EndRegion());
    return file_->Commit();
  }

 private:
  // Pads the region to its alignment and starts the next.
  Status EndRegion() {
    static constexpr std::array<std::byte, kRegionAlignment> kZeros{};
    const int64_t bytes = regions_[region_].bytes;
    MOESAIC_CHECK_EQ(written_, bytes);
    ++region_;
    written_ = 0;
    return file_->Write(kZeros.data(), static_cast<size_t>(base::RoundUp(bytes, kRegionAlignment) - bytes));
  }

  std::unique_ptr<runtime::AtomicFile> file_;
  std::vector<PackedRegion> regions_;
  size_t region_ = 0;
  int64_t written_ = 0;  // bytes written of the current region
};

class MappedPackedFile : public PackedFile {
 public:
  // `owner` keeps `bytes` alive; it is null if the caller does.
  static StatusOr<std::shared_ptr<const PackedFile>> Make(std::span<const std::byte> bytes, std::string path,
                                                          std::shared_ptr<const runtime::MappedFile> owner) {
    auto result = std::make_shared<MappedPackedFile>();
    ASSIGN_OR_RETURN(result->safetensors_, ParseSafetensors(bytes, path));
    result->start_ = bytes.data();
    result->path_ = std::move(path);
    result->owner_ = std::move(owner);
    RETURN_IF_ERROR(result->ReadRegions());
    return std::shared_ptr<const PackedFile>(std::move(result));
  }

  const std::string& path() const override { return path_; }

  StatusOr<std::string> Metadata(const std::string& key) const override {
    const auto found = safetensors_.metadata.find(key);
    if (found == safetensors_.metadata.end()) return NotFound("{}: no metadata \"{}\"", path_, key);
    return found->second;
  }

  const std::vector<PackedRegion>& regions() const override { return regions_; }

  StatusOr<std::span<const std::byte>> Region(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return NotFound("{}: region {} is missing", path_, name);
    return found->second.bytes;
  }

  StatusOr<const PackedRegion*> Describe(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return NotFound("{}: region {} is missing", path_, name);
    return &regions_[found->second.index];
  }

 private:
  struct StoredRegion {
    size_t index;  // in regions_
    std::span<const std::byte> bytes;
  };

  Status ReadRegions() {
    ASSIGN_OR_RETURN(const std::string format, Metadata("format"));
    ASSIGN_OR_RETURN(const std::string version, Metadata("version"));
    if (format != kFormatName)
      return InvalidArgument("{}: format must be {}, found {}", path_, kFormatName, format);
    const std::string expected = Metadata(kLayoutKey).ok() ? kLayoutVersion : kFormatVersion;
    if (version != expected) {
      return Unimplemented("{}: packed format version must be {}, found {}; convert the checkpoint again",
                           path_, expected, version);
    }
    ASSIGN_OR_RETURN(const std::string text, Metadata("regions"));
    const json list = IsShallowJson(text) ? json::parse(text, nullptr, /*allow_exceptions=*/false) : json();
    if (!list.is_array()) return DataLoss("{}: metadata \"regions\" must be a list", path_);
    std::map<std::string, std::span<const std::byte>> stored;
    for (const TensorEntry& entry : safetensors_.tensors) stored[entry.name] = entry.bytes;
    for (const json& item : list) RETURN_IF_ERROR(ReadRegion(item, stored));
    if (regions_.size() != stored.size()) {
      return DataLoss("{}: metadata \"regions\" must name {} tensors, found {}", path_, stored.size(),
                      regions_.size());
    }
    return OkStatus();
  }

  Status ReadRegion(const json& item, const std::map<std::string, std::span<const std::byte>>& stored) {
    if (!item.is_object() || !item.contains("name") || !item["name"].is_string() || !item.contains("bytes") ||
        !item["bytes"].is_number_unsigned() || !item.contains("layout")) {
      return DataLoss("{}: a region needs \"name\", \"bytes\" and \"layout\", found {}", path_,
                      ShownJson(item));
    }
    PackedRegion region{item["name"].get<std::string>(), item["layout"].dump(), item["bytes"].get<int64_t>()};
    const auto found = stored.find(region.name);
    if (found == stored.end()) return DataLoss("{}: region {} is missing", path_, region.name);
    const std::span<const std::byte> bytes = found->second;
    if (region.bytes < 0 || region.bytes > std::ssize(bytes) ||
        base::RoundUp(region.bytes, kRegionAlignment) != std::ssize(bytes)) {
      return DataLoss("{}: region {} must have {} bytes, found {}", path_, region.name, region.bytes,
                      bytes.size());
    }
    if ((bytes.data() - start_) % kRegionAlignment != 0) {
      return DataLoss("{}: region {} must begin at a multiple of {} bytes, found {}", path_, region.name,
                      kRegionAlignment, bytes.data() - start_);
    }
    const StoredRegion mapped{regions_.size(), bytes.first(static_cast<size_t>(region.bytes))};
    if (!by_name_.emplace(region.name, mapped).second) {
      return DataLoss("{}: region {} occurs twice in metadata \"regions\"", path_, region.name);
    }
    regions_.push_back(std::move(region));
    return OkStatus();
  }

  const std::byte* start_ = nullptr;
  std::string path_;
  std::shared_ptr<const runtime::MappedFile> owner_;
  Safetensors safetensors_;
  std::vector<PackedRegion> regions_;
  std::map<std::string, StoredRegion> by_name_;
};

// The regions of one rank.
class RankPart : public PackedFile {
 public:
  RankPart(std::shared_ptr<const PackedFile> file, int rank) : file_(std::move(file)), rank_(rank) {
    const std::string prefix = RankRegion(rank, "");
    for (const PackedRegion& region : file_->regions()) {
      if (!region.name.starts_with(prefix)) continue;
      regions_.push_back(region);
      regions_.back().name.erase(0, prefix.size());
    }
    for (const PackedRegion& region : regions_) by_name_[region.name] = &region;
  }

  const std::string& path() const override { return file_->path(); }
  StatusOr<std::string> Metadata(const std::string& key) const override { return file_->Metadata(key); }
  const std::vector<PackedRegion>& regions() const override { return regions_; }
  StatusOr<std::span<const std::byte>> Region(const std::string& name) const override {
    return file_->Region(RankRegion(rank_, name));
  }
  StatusOr<const PackedRegion*> Describe(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) {
      return NotFound("{}: region {} is missing", path(), RankRegion(rank_, name));
    }
    return found->second;
  }

 private:
  std::shared_ptr<const PackedFile> file_;
  int rank_;
  std::vector<PackedRegion> regions_;
  std::map<std::string, const PackedRegion*> by_name_;
};

}  // namespace

std::string RankRegion(int rank, const std::string& region) { return fmt::format("rank{}/{}", rank, region); }

std::shared_ptr<const PackedFile> PackedFile::OfRank(std::shared_ptr<const PackedFile> file, int rank) {
  return std::make_shared<RankPart>(std::move(file), rank);
}

StatusOr<std::unique_ptr<PackedWriter>> PackedWriter::Create(
    const std::string& path, std::vector<PackedRegion> regions,
    const std::vector<std::pair<std::string, std::string>>& metadata) {
  ASSIGN_OR_RETURN(const std::string header, MakeHeader(regions, metadata));
  ASSIGN_OR_RETURN(std::unique_ptr<runtime::AtomicFile> file, runtime::AtomicFile::Create(path));
  const uint64_t length = header.size();
  // A full disk is found before hours of work.
  int64_t bytes = static_cast<int64_t>(sizeof(length) + length);
  for (const PackedRegion& region : regions) bytes += static_cast<int64_t>(region.bytes);
  RETURN_IF_ERROR(file->Reserve(bytes));
  RETURN_IF_ERROR(file->Write(&length, sizeof(length)));
  RETURN_IF_ERROR(file->Write(header.data(), header.size()));
  return std::unique_ptr<PackedWriter>(std::make_unique<FileWriter>(std::move(file), std::move(regions)));
}

StatusOr<std::shared_ptr<const PackedFile>> PackedFile::Open(const std::string& path) {
  ASSIGN_OR_RETURN(std::shared_ptr<const runtime::MappedFile> file, runtime::MappedFile::Open(path));
  const std::span<const std::byte> bytes = file->bytes();
  const std::string name = file->path();
  return MappedPackedFile::Make(bytes, name, std::move(file));
}

StatusOr<std::shared_ptr<const PackedFile>> PackedFile::Parse(std::span<const std::byte> bytes,
                                                              const std::string& path) {
  return MappedPackedFile::Make(bytes, path, nullptr);
}

bool PackedFile::Is(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  const auto file = runtime::MappedFile::Open(path);
  if (!file.ok()) return false;
  constexpr size_t kLength = sizeof(kHeaderStart) - 1;
  const auto bytes = (*file)->bytes();
  return bytes.size() > 8 + kLength && std::memcmp(bytes.data() + 8, kHeaderStart, kLength) == 0;
}

}  // namespace moesaic::checkpoint
