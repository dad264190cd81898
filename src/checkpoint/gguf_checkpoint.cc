#include "checkpoint/gguf_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/ggml_blocks.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;
using runtime::Buffer;
using tensor::DType;

std::string Shown(const std::vector<int64_t>& shape) { return json(shape).dump(); }

class GgufCheckpoint : public Checkpoint {
 public:
  GgufCheckpoint(std::string path, std::shared_ptr<const runtime::MappedFile> file)
      : path_(std::move(path)), file_(std::move(file)) {}

  const json& config() const override { return config_; }
  const std::string& path() const override { return path_; }
  std::string container() const override { return "gguf"; }
  const std::vector<TensorEntry>& tensors() const override { return tensors_; }
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
      if (entry.name == "rope_freqs.weight") {
        return Unimplemented(
            "{}: tensor rope_freqs.weight (Llama 3's rope scaling) is not supported in GGUF; "
            "use the Hugging Face folder",
            name);
      }
      ASSIGN_OR_RETURN(entry.name, HubName(entry.name, name));
      RETURN_IF_ERROR(Add(std::move(entry)));
    }
    RETURN_IF_ERROR(JoinKvHalves());
    metadata_ = std::move(gguf.metadata);
    std::sort(tensors_.begin(), tensors_.end(),
              [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
    return OkStatus();
  }

 private:
  Status Add(TensorEntry entry) {
    if (entry.name.ends_with(".k_b.weight") || entry.name.ends_with(".v_b.weight")) {
      halves_[entry.name] = std::move(entry);
      return OkStatus();
    }
    if (entry.name.find("{}") != std::string::npos) return AddStack(entry);
    const bool llama = config_["model_type"] == "llama";
    if (llama && entry.name.ends_with(".q_proj.weight"))
      return Unpermute(std::move(entry), "num_attention_heads");
    if (llama && entry.name.ends_with(".k_proj.weight"))
      return Unpermute(std::move(entry), "num_key_value_heads");
    tensors_.push_back(std::move(entry));
    return OkStatus();
  }

  // [experts, out, in] becomes one tensor an expert, in place.
  Status AddStack(const TensorEntry& stack) {
    if (stack.shape.size() != 3) {
      return InvalidArgument("{}: tensor {} must be [experts, out, in], found {}", stack.file, stack.name,
                             Shown(stack.shape));
    }
    const size_t at = stack.name.find("{}");
    const size_t bytes = stack.bytes.size() / static_cast<size_t>(stack.shape[0]);
    for (int64_t e = 0; e < stack.shape[0]; ++e) {
      TensorEntry expert = stack;
      expert.name = stack.name.substr(0, at) + std::to_string(e) + stack.name.substr(at + 2);
      expert.shape = {stack.shape[1], stack.shape[2]};
      expert.bytes = stack.bytes.subspan(static_cast<size_t>(e) * bytes, bytes);
      tensors_.push_back(std::move(expert));
    }
    return OkStatus();
  }

  // llama.cpp's converter interleaves the two halves of each head's rows for its rotary embedding; Hub
  // checkpoints have them one after the other. Whole rows move, so that blocks keep their values; the copy
  // costs their size.
  Status Unpermute(TensorEntry entry, const char* heads_key) {
    const auto heads = config_[heads_key].get<int64_t>();
    if (entry.shape.size() != 2 || entry.shape[0] % (2 * heads) != 0) {
      return InvalidArgument("{}: tensor {} must have rows in multiples of {}, found {}", entry.file,
                             entry.name, 2 * heads, Shown(entry.shape));
    }
    const int64_t half = entry.shape[0] / heads / 2;
    const size_t row_bytes = entry.bytes.size() / static_cast<size_t>(entry.shape[0]);
    ASSIGN_OR_RETURN(Buffer rows, Buffer::Allocate(entry.bytes.size(), /*huge=*/false));
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < half; ++i) {
        for (int64_t part = 0; part < 2; ++part) {
          const auto from = static_cast<size_t>(head * 2 * half + 2 * i + part);
          const auto to = static_cast<size_t>(head * 2 * half + part * half + i);
          std::memcpy(rows.data() + to * row_bytes, entry.bytes.data() + from * row_bytes, row_bytes);
        }
      }
    }
    entry.bytes = {rows.data(), entry.bytes.size()};
    owned_.push_back(std::move(rows));
    tensors_.push_back(std::move(entry));
    return OkStatus();
  }

  // Newer files store kv_b_proj as k_b [heads, latent, nope], transposed, and v_b [heads, v, latent]. The Hub
  // has rows [heads][nope, then v] of `latent` values: put together in f32.
  Status JoinKvHalves() {
    for (const auto& [name, k] : halves_) {
      if (!name.ends_with(".k_b.weight")) continue;
      const std::string prefix = name.substr(0, name.size() - std::strlen("k_b.weight"));
      const auto found = halves_.find(prefix + "v_b.weight");
      if (found == halves_.end()) return NotFound("{}: tensor {} has no v_b beside it", k.file, name);
      RETURN_IF_ERROR(Join(prefix + "kv_b_proj.weight", k, found->second));
    }
    return OkStatus();
  }

  Status Join(const std::string& name, const TensorEntry& k, const TensorEntry& v) {
    if (!config_.contains("kv_lora_rank"))
      return InvalidArgument("{}: tensor {} is for MLA only", k.file, k.name);
    const auto heads = config_["num_attention_heads"].get<int64_t>(),
               latent = config_["kv_lora_rank"].get<int64_t>();
    const auto nope = config_["qk_nope_head_dim"].get<int64_t>(),
               v_dim = config_["v_head_dim"].get<int64_t>();
    const std::vector<int64_t> k_shape = {heads, latent, nope}, v_shape = {heads, v_dim, latent};
    if (k.shape != k_shape || v.shape != v_shape) {
      return InvalidArgument("{}: tensors {} and v_b must be {} and {}, found {} and {}", k.file, k.name,
                             Shown(k_shape), Shown(v_shape), Shown(k.shape), Shown(v.shape));
    }
    std::vector<float> part(static_cast<size_t>(latent * nope));
    ASSIGN_OR_RETURN(
        Buffer joined,
        Buffer::Allocate(static_cast<size_t>(heads * (nope + v_dim) * latent) * sizeof(float), false));
    const TensorEntry* halves[] = {&k, &v};
    for (const TensorEntry* half : halves) {
      if (!IsReadable(*half))
        return InvalidArgument("{}: tensor {} must be of a floating-point or block type", half->file,
                               half->name);
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* out = joined.as<float>() + h * (nope + v_dim) * latent;
      DequantizeBlocks(k.dtype, k.bytes.data() + tensor::BytesOf(k.dtype, h * latent * nope), latent * nope,
                       part.data());
      for (int64_t i = 0; i < nope; ++i) {
        for (int64_t j = 0; j < latent; ++j) out[i * latent + j] = part[static_cast<size_t>(j * nope + i)];
      }
      DequantizeBlocks(v.dtype, v.bytes.data() + tensor::BytesOf(v.dtype, h * v_dim * latent), v_dim * latent,
                       out + nope * latent);
    }
    tensors_.push_back(
        {name, DType::kF32, {heads * (nope + v_dim), latent}, {joined.data(), joined.size()}, k.file});
    owned_.push_back(std::move(joined));
    return OkStatus();
  }

  static bool IsReadable(const TensorEntry& entry) {
    const bool scalar =
        entry.dtype == DType::kF32 || entry.dtype == DType::kF16 || entry.dtype == DType::kBF16;
    return scalar || tensor::BlockOf(entry.dtype).elements > 1;
  }

  std::string path_;
  std::shared_ptr<const runtime::MappedFile> file_;  // null when the bytes belong to the caller
  json config_;
  GgufMetadata metadata_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, TensorEntry> halves_;  // k_b and v_b
  std::vector<Buffer> owned_;                  // tensors that could not stay in place
};

StatusOr<std::unique_ptr<Checkpoint>> Build(std::span<const std::byte> bytes, const std::string& path,
                                            std::shared_ptr<const runtime::MappedFile> file) {
  ASSIGN_OR_RETURN(GgufFile gguf, ParseGguf(bytes, std::filesystem::path(path).filename().string()));
  auto checkpoint = std::make_unique<GgufCheckpoint>(path, std::move(file));
  RETURN_IF_ERROR(checkpoint->Build(std::move(gguf)));
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

}  // namespace

StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(std::shared_ptr<const runtime::MappedFile> file) {
  const std::span<const std::byte> bytes = file->bytes();
  const std::string path = file->path();
  return Build(bytes, path, std::move(file));
}

StatusOr<std::unique_ptr<Checkpoint>> ReadGguf(std::span<const std::byte> bytes, const std::string& path) {
  return Build(bytes, path, nullptr);
}

}  // namespace moesaic::checkpoint
