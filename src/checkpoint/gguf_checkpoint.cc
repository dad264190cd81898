#include "checkpoint/gguf_checkpoint.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "checkpoint/gguf_rows.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;
using runtime::MappedFile;

class GgufCheckpoint : public Checkpoint {
 public:
  GgufCheckpoint(std::string path, std::vector<std::shared_ptr<const MappedFile>> files)
      : path_(std::move(path)), files_(std::move(files)) {}

  const json& config() const override { return config_; }
  const std::string& path() const override { return path_; }
  std::string container() const override { return "gguf"; }
  const std::vector<TensorEntry>& tensors() const override { return tensors_; }
  std::span<const std::shared_ptr<const MappedFile>> files() const override { return files_; }
  const GgufMetadata* gguf() const override { return &metadata_; }

  std::optional<std::string> ReadText(const std::string& file) const override {
    if (file != "chat_template.jinja") return std::nullopt;
    const std::string* text = metadata_.String("tokenizer.chat_template");
    return text == nullptr ? std::nullopt : std::optional(*text);
  }

  Status Build(GgufFile gguf) {
    const std::string name = std::filesystem::path(path_).filename().string();
    ASSIGN_OR_RETURN(config_, ConfigFromGguf(gguf, name));
    for (TensorEntry& entry : gguf.tensors) {
      if (entry.name == "rope_freqs.weight") continue;  // ConfigFromGguf reads it
      ASSIGN_OR_RETURN(entry.name, HubName(entry.name, entry.file));
      RETURN_IF_ERROR(Add(std::move(entry)));
    }
    RETURN_IF_ERROR(JoinHalves());
    metadata_ = std::move(gguf.metadata);
    return Sort();
  }

 private:
  Status Add(TensorEntry entry) {
    if (entry.name.ends_with(".self_attn.k_b.weight") || entry.name.ends_with(".self_attn.v_b.weight")) {
      halves_[entry.name] = std::move(entry);
      return OkStatus();
    }
    if (entry.name.find("{}") != std::string::npos) return AddStack(entry);
    const bool q = entry.name.find(".self_attn.q_proj.") != std::string::npos;
    const bool k = entry.name.find(".self_attn.k_proj.") != std::string::npos;
    if (config_["model_type"] == "llama" && (q || k)) {
      const auto heads = config_[q ? "num_attention_heads" : "num_key_value_heads"].get<int64_t>();
      ASSIGN_OR_RETURN(entry, UndoRotaryOrder(std::move(entry), heads));
    }
    tensors_.push_back(std::move(entry));
    return OkStatus();
  }

  // Splits [experts, out, in] into one tensor per expert without copying.
  Status AddStack(const TensorEntry& stack) {
    const char* key = config_.contains("n_routed_experts") ? "n_routed_experts" : "num_experts";
    const int64_t experts = config_.contains(key) ? config_[key].get<int64_t>() : 0;
    if (experts < 1 || stack.shape.size() != 3 || stack.shape[0] != experts) {
      return InvalidArgument("{}: tensor {} must be [{}, out, in], found {}", stack.file, stack.name, experts,
                             json(stack.shape).dump());
    }
    const size_t at = stack.name.find("{}");
    const size_t bytes = stack.bytes.size() / static_cast<size_t>(experts);
    for (int64_t e = 0; e < experts; ++e) {
      TensorEntry expert = stack;
      expert.name = stack.name.substr(0, at) + std::to_string(e) + stack.name.substr(at + 2);
      expert.shape = {stack.shape[1], stack.shape[2]};
      expert.bytes = stack.bytes.subspan(static_cast<size_t>(e) * bytes, bytes);
      tensors_.push_back(std::move(expert));
    }
    return OkStatus();
  }

  // Joins k_b and v_b to kv_b_proj. Files of a transition period contain both halves and kv_b_proj itself.
  Status JoinHalves() {
    std::set<std::string> whole;  // names of kv_b_proj
    for (const TensorEntry& entry : tensors_) {
      if (entry.name.ends_with(".kv_b_proj.weight")) whole.insert(entry.name);
    }
    for (const auto& [name, half] : halves_) {
      const bool is_k = name.ends_with("k_b.weight");
      const std::string prefix = name.substr(0, name.size() - std::strlen("k_b.weight"));
      const auto other = halves_.find(prefix + (is_k ? "v_b.weight" : "k_b.weight"));
      if (other == halves_.end()) {
        return NotFound("{}: tensor {} has no matching {}_b", half.file, name, is_k ? "v" : "k");
      }
      const std::string joined = prefix + "kv_b_proj.weight";
      if (!is_k || whole.contains(joined)) continue;
      if (!config_.contains("kv_lora_rank")) {
        return InvalidArgument("{}: tensor {} is for multi-head latent attention only", half.file, name);
      }
      const KvExpansion sizes{config_["num_attention_heads"], config_["qk_nope_head_dim"],
                              config_["v_head_dim"], config_["kv_lora_rank"]};
      ASSIGN_OR_RETURN(TensorEntry entry, JoinKvExpansion(half, other->second, sizes, joined));
      tensors_.push_back(std::move(entry));
    }
    return OkStatus();
  }

  Status Sort() {
    std::sort(tensors_.begin(), tensors_.end(),
              [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
    const auto same = [](const TensorEntry& a, const TensorEntry& b) { return a.name == b.name; };
    const auto twice = std::adjacent_find(tensors_.begin(), tensors_.end(), same);
    if (twice == tensors_.end()) return OkStatus();
    return DataLoss("{}: tensor {} occurs twice (also in {})", twice->file, twice->name, (twice + 1)->file);
  }

  std::string path_;
  std::vector<std::shared_ptr<const MappedFile>> files_;  // empty if the caller owns the bytes
  json config_;
  GgufMetadata metadata_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, TensorEntry> halves_;  // k_b and v_b
};

// Errors name the path; tensor entries name the file.
StatusOr<GgufFile> ParseAt(std::span<const std::byte> bytes, const std::string& path) {
  ASSIGN_OR_RETURN(GgufFile gguf, ParseGguf(bytes, path));
  const std::string name = std::filesystem::path(path).filename().string();
  for (TensorEntry& entry : gguf.tensors) entry.file = name;
  return gguf;
}

// Returns the path of part `part` of a model whose first part is `path`: "...-00001-of-00003.gguf".
StatusOr<std::string> PartPath(const std::string& path, int64_t part, int64_t parts) {
  const std::string suffix = fmt::format("-{:05}-of-{:05}.gguf", 1, parts);
  if (!path.ends_with(suffix)) {
    return InvalidArgument("{}: the first of {} parts must be named ...{}", path, parts, suffix);
  }
  return fmt::format("{}-{:05}-of-{:05}.gguf", path.substr(0, path.size() - suffix.size()), part + 1, parts);
}

// Large models are split into parts; the first contains the metadata.
Status AddParts(GgufFile* first, std::vector<std::shared_ptr<const MappedFile>>* files) {
  const std::string path = files->front()->path();
  const int64_t parts = first->metadata.Int("split.count").value_or(1);
  const int64_t number = first->metadata.Int("split.no").value_or(0);
  if (parts < 1 || parts > 65535 || number != 0) {
    return InvalidArgument("{}: this is part {} of {}; open the first one", path, number + 1, parts);
  }
  for (int64_t part = 1; part < parts; ++part) {
    ASSIGN_OR_RETURN(const std::string part_path, PartPath(path, part, parts));
    ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> file, MappedFile::Open(part_path));
    ASSIGN_OR_RETURN(GgufFile gguf, ParseAt(file->bytes(), part_path));
    if (gguf.metadata.Int("split.no") != part || gguf.metadata.Int("split.count") != parts) {
      return InvalidArgument("{}: must be part {} of {}, found {} of {}", part_path, part + 1, parts,
                             gguf.metadata.Int("split.no").value_or(-1) + 1,
                             gguf.metadata.Int("split.count").value_or(0));
    }
    std::move(gguf.tensors.begin(), gguf.tensors.end(), std::back_inserter(first->tensors));
    files->push_back(std::move(file));
  }
  const auto found = static_cast<int64_t>(first->tensors.size());
  const int64_t expected = first->metadata.Int("split.tensors.count").value_or(found);
  if (found != expected) {
    return DataLoss("{}: the parts must have {} tensors together, found {}", path, expected, found);
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(std::shared_ptr<const MappedFile> file) {
  const std::string path = file->path();
  ASSIGN_OR_RETURN(GgufFile gguf, ParseAt(file->bytes(), path));
  std::vector<std::shared_ptr<const MappedFile>> files = {std::move(file)};
  RETURN_IF_ERROR(AddParts(&gguf, &files));
  auto checkpoint = std::make_unique<GgufCheckpoint>(path, std::move(files));
  RETURN_IF_ERROR(checkpoint->Build(std::move(gguf)));
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

StatusOr<std::unique_ptr<Checkpoint>> ReadGguf(std::span<const std::byte> bytes, const std::string& path) {
  ASSIGN_OR_RETURN(GgufFile gguf, ParseAt(bytes, path));
  if (gguf.metadata.Int("split.count").value_or(1) > 1) {
    return InvalidArgument("{}: a model in parts must be opened from its files", path);
  }
  auto checkpoint = std::make_unique<GgufCheckpoint>(path, std::vector<std::shared_ptr<const MappedFile>>{});
  RETURN_IF_ERROR(checkpoint->Build(std::move(gguf)));
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

}  // namespace moesaic::checkpoint
