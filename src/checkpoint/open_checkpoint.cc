#include "checkpoint/open_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/lfs_pointer.h"
#include "checkpoint/gguf_checkpoint.h"
#include "checkpoint/json_text.h"
#include "checkpoint/packed_file.h"
#include "checkpoint/safetensors.h"
#include "runtime/memory.h"

namespace moesaic::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using runtime::MappedFile;

constexpr char kConfig[] = "config.json";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kSingle[] = "model.safetensors";
// Configs, tokenizers and templates are far smaller; larger files are not read into memory.
constexpr uintmax_t kMaxTextBytes = uintmax_t{256} << 20;

StatusOr<std::string> ReadFile(const fs::path& path) {
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  if (error) return NotFound("{}: {}", path.string(), error.message());
  if (size > kMaxTextBytes)
    return InvalidArgument("{}: a text file of {} bytes is too large", path.string(), size);
  std::ifstream in(path, std::ios::binary);
  std::string text(size, '\0');
  if (!in.read(text.data(), static_cast<std::streamsize>(size)))
    return IoError("{}: can't be read", path.string());
  return text;
}

Status CheckFetched(std::span<const std::byte> bytes, const fs::path& file) {
  return base::CheckFetched({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, file.string());
}

// std::filesystem's own function throws if a folder must not be read.
bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

class HubCheckpoint : public Checkpoint {
 public:
  HubCheckpoint(const fs::path& path, std::string container)
      : path_(path.string()), container_(std::move(container)) {}

  const json& config() const override { return config_; }
  const std::string& path() const override { return path_; }
  std::string container() const override { return container_; }
  const std::vector<TensorEntry>& tensors() const override { return tensors_; }
  std::span<const std::shared_ptr<const MappedFile>> files() const override { return files_; }

  std::optional<std::string> ReadText(const std::string& file) const override {
    if (const auto found = texts_.find(file); found != texts_.end()) return found->second;
    if (folder_.empty() || file.find('/') != std::string::npos || !Exists(folder_ / file))
      return std::nullopt;
    StatusOr<std::string> text = ReadFile(folder_ / file);
    if (!text.ok()) return std::nullopt;
    return *std::move(text);
  }

  Status ReadConfig(const fs::path& folder) {
    folder_ = folder;
    ASSIGN_OR_RETURN(const std::string text, ReadFile(folder / kConfig));
    RETURN_IF_ERROR(base::CheckFetched(text, (folder / kConfig).string()));
    ASSIGN_OR_RETURN(config_, ParseJsonObject(text, (folder / kConfig).string()));
    return OkStatus();
  }

  Status TakeConfig(std::string_view text) {
    ASSIGN_OR_RETURN(config_, ParseJsonObject(text, kConfig));
    return OkStatus();
  }

  // Maps one safetensors file and adds its tensors.
  Status AddFile(const fs::path& file) {
    ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> mapped, MappedFile::Open(file.string()));
    RETURN_IF_ERROR(CheckFetched(mapped->bytes(), file));
    RETURN_IF_ERROR(AddBytes(mapped->bytes(), file));
    files_.push_back(std::move(mapped));
    return OkStatus();
  }

  Status AddBytes(std::span<const std::byte> bytes, const fs::path& file) {
    ASSIGN_OR_RETURN(Safetensors parsed, ParseSafetensors(bytes, file.string()));
    for (TensorEntry& entry : parsed.tensors) entry.file = file.filename().string();
    tensors_.insert(tensors_.end(), std::make_move_iterator(parsed.tensors.begin()),
                    std::make_move_iterator(parsed.tensors.end()));
    metadata_ = std::move(parsed.metadata);
    return OkStatus();
  }

  Status AddShards(const fs::path& index_path) {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(index_path));
    RETURN_IF_ERROR(base::CheckFetched(text, index_path.string()));
    ASSIGN_OR_RETURN(const json index, ParseJsonObject(text, index_path.string()));
    const auto map = index.find("weight_map");
    if (map == index.end() || !map->is_object()) {
      return DataLoss("{}: \"weight_map\" must be an object", index_path.string());
    }
    std::set<std::string> shards;
    for (const auto& [name, shard] : map->items()) {
      if (!shard.is_string() || shard.get<std::string>().find('/') != std::string::npos) {
        return DataLoss("{}: tensor {} must name a file of this folder, found {}", index_path.string(), name,
                        ShownJson(shard));
      }
      shards.insert(shard.get<std::string>());
    }
    for (const std::string& shard : shards) RETURN_IF_ERROR(AddFile(index_path.parent_path() / shard));
    RETURN_IF_ERROR(Sort());
    for (const TensorEntry& entry : tensors_) {
      if (!map->contains(entry.name)) {
        return DataLoss("{}: tensor {} of {} is missing in \"weight_map\"", index_path.string(), entry.name,
                        entry.file);
      }
    }
    for (const auto& [name, shard] : map->items()) {
      const TensorEntry* entry = Find(name);
      if (entry == nullptr || entry->file != shard.get<std::string>()) {
        return DataLoss("{}: tensor {} must be in {}, found in {}", index_path.string(), name,
                        shard.get<std::string>(), entry == nullptr ? "no file" : entry->file);
      }
    }
    return OkStatus();
  }

  Status Sort() {
    std::sort(tensors_.begin(), tensors_.end(),
              [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
    for (size_t i = 1; i < tensors_.size(); ++i) {
      if (tensors_[i].name == tensors_[i - 1].name) {
        return DataLoss("{}: tensor {} is in both {} and {}", path_, tensors_[i].name, tensors_[i - 1].file,
                        tensors_[i].file);
      }
    }
    return OkStatus();
  }

  // A packed file stores its config and texts in its metadata.
  Status TakePackedTexts() {
    const auto config = metadata_.find(kConfig);
    if (config == metadata_.end()) return DataLoss("{}: the packed file has no config.json inside", path_);
    ASSIGN_OR_RETURN(config_, ParseJsonObject(config->second, path_ + ": config.json"));
    texts_ = std::move(metadata_);
    return OkStatus();
  }

 private:
  std::string path_, container_;
  fs::path folder_;
  json config_ = json::object();
  std::vector<TensorEntry> tensors_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::map<std::string, std::string> metadata_, texts_;
};

// Single-file models must be opened by file name, because a folder may contain several.
std::string SingleFileHint(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const fs::path extension = entry.path().extension();
    if (extension == ".gguf" || extension == ".moesaic") {
      return fmt::format("; name a file in it, such as {}", entry.path().filename().string());
    }
  }
  return "";
}

StatusOr<std::unique_ptr<Checkpoint>> OpenFolder(const fs::path& folder) {
  auto checkpoint = std::make_unique<HubCheckpoint>(folder, "safetensors");
  if (!Exists(folder / kConfig)) {
    return NotFound("{}: there is no config.json in this folder{}", folder.string(), SingleFileHint(folder));
  }
  RETURN_IF_ERROR(checkpoint->ReadConfig(folder));
  if (Exists(folder / kIndex)) {
    RETURN_IF_ERROR(checkpoint->AddShards(folder / kIndex));
  } else if (Exists(folder / kSingle)) {
    RETURN_IF_ERROR(checkpoint->AddFile(folder / kSingle));
    RETURN_IF_ERROR(checkpoint->Sort());
  }
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

// The first 8 bytes must be a valid header length.
bool MayBeSafetensors(std::span<const std::byte> bytes) {
  uint64_t header = 0;
  if (bytes.size() < sizeof(header)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header > 0 && header <= kMaxSafetensorsHeader;
}

StatusOr<std::unique_ptr<Checkpoint>> OpenFile(const fs::path& file) {
  if (file.extension() == ".json") {  // a config without weights, for `inspect`
    auto checkpoint = std::make_unique<HubCheckpoint>(file, "config");
    ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
    if (file.filename() != kConfig)
      return InvalidArgument("{}: expected a file named config.json", file.string());
    RETURN_IF_ERROR(checkpoint->ReadConfig(file.parent_path()));
    return std::unique_ptr<Checkpoint>(std::move(checkpoint));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> mapped, MappedFile::Open(file.string()));
  RETURN_IF_ERROR(CheckFetched(mapped->bytes(), file));
  if (mapped->bytes().size() >= 4 && std::memcmp(mapped->bytes().data(), "GGUF", 4) == 0) {
    return OpenGguf(std::move(mapped));
  }
  if (file.extension() == ".gguf") {
    return DataLoss("{}: a GGUF file begins with \"GGUF\", this one does not", file.string());
  }
  if (!MayBeSafetensors(mapped->bytes())) {
    return DataLoss("{}: neither GGUF, safetensors nor a packed file", file.string());
  }
  const bool packed = PackedFile::Is(file.string());
  auto checkpoint = std::make_unique<HubCheckpoint>(file, packed ? "moesaic" : "safetensors");
  RETURN_IF_ERROR(checkpoint->AddFile(file));
  RETURN_IF_ERROR(checkpoint->Sort());
  if (packed) {
    RETURN_IF_ERROR(checkpoint->TakePackedTexts());
  } else if (Exists(file.parent_path() / kConfig)) {
    RETURN_IF_ERROR(checkpoint->ReadConfig(file.parent_path()));
  }
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

}  // namespace

Status WeightsAreMissing(const std::string& path) {
  std::error_code ignored;
  std::vector<std::string> shards, pickles;
  for (const auto& entry : fs::directory_iterator(path, ignored)) {
    const fs::path name = entry.path().filename();
    if (name.extension() == ".safetensors") shards.push_back(name.string());
    if (name.extension() == ".bin" && name.string().starts_with("pytorch_model"))
      pickles.push_back(name.string());
  }
  if (!shards.empty()) {
    // Prefers the name of a shard over other files, such as an adapter.
    const auto order = [](const std::string& name) {
      return std::pair(name.find("-of-") == std::string::npos, name);
    };
    return NotFound(
        "{}: there are no weights here that can be read: neither {} nor {}, which lists the shards, though "
        "there is {}; download the index",
        path, kSingle, kIndex, *std::ranges::min_element(shards, {}, order));
  }
  if (!pickles.empty()) {
    return NotFound(
        "{}: there are no weights here that can be read: {} is PyTorch's format, which may run code when it "
        "is read; use a safetensors or GGUF version of the model, or write one with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        path, *std::ranges::min_element(pickles));
  }
  return NotFound("{}: there are no weights here", path);
}

StatusOr<std::unique_ptr<Checkpoint>> OpenContainer(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return NotFound("{}: no such file or folder", path);
  return fs::is_directory(status) ? OpenFolder(path) : OpenFile(path);
}

StatusOr<std::unique_ptr<Checkpoint>> ReadContainer(std::string_view config,
                                                    std::span<const std::byte> safetensors) {
  auto checkpoint = std::make_unique<HubCheckpoint>(kSingle, "safetensors");
  RETURN_IF_ERROR(checkpoint->TakeConfig(config));
  RETURN_IF_ERROR(checkpoint->AddBytes(safetensors, kSingle));
  RETURN_IF_ERROR(checkpoint->Sort());
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

}  // namespace moesaic::checkpoint
