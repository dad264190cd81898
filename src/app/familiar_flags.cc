#include "app/familiar_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace moesaic::app {
namespace {

struct Rename {
  std::string_view name, target;
};

// A target without dashes is a positional argument, which moves to the front.
constexpr Rename kRenames[] = {
    {"-m", "MODEL"},
    {"--model", "MODEL"},
    {"-hf", "MODEL"},
    {"-hfr", "MODEL"},
    {"--hf-repo", "MODEL"},
    {"--model-path", "MODEL"},
    {"-p", "--prompt"},
    {"-f", "--file"},
    {"-sys", "--system"},
    {"--system-prompt", "--system"},
    {"--predict", "--max-tokens"},
    {"--n-predict", "--max-tokens"},
    {"--max-new-tokens", "--max-tokens"},
    {"--temp", "--temperature"},
    {"--repeat-penalty", "--repetition-penalty"},
    {"--max-model-len", "--ctx-size"},
    {"--context-length", "--ctx-size"},
    {"-np", "--max-sequences"},
    {"--parallel", "--max-sequences"},
    {"--max-num-seqs", "--max-sequences"},
    {"--max-running-requests", "--max-sequences"},
    {"--max-num-batched-tokens", "--max-batch-tokens"},
    {"--enable-prefix-caching", "--prefix-cache"},
    {"--no-enable-prefix-caching", "--no-prefix-cache"},
    {"-a", "--served-model-name"},
    {"--alias", "--served-model-name"},
    {"-md", "--speculative-model"},
    {"--disable-log-requests", "--no-access-log"},
    {"--no-enable-log-requests", "--no-access-log"},
    {"--disable-uvicorn-access-log", "--no-access-log"},
    {"-tp", "--tensor-parallel-size"},
    {"--tp-size", "--tensor-parallel-size"},
    {"-pp", "--pipeline-parallel-size"},
    {"--pp-size", "--pipeline-parallel-size"},
    {"-dp", "--data-parallel-size"},
    {"--dp-size", "--data-parallel-size"},
    {"-ep", "--enable-expert-parallel"},
    {"--ep-size", "--expert-parallel-size"},
};

using Values = std::span<const std::pair<std::string_view, std::string_view>>;

constexpr std::pair<std::string_view, std::string_view> kKvTypes[] = {
    {"auto", "auto"}, {"bfloat16", "bf16"}, {"bf16", "bf16"},
    {"f32", "f32"},   {"float32", "f32"},   {"int8", "int8"},
};
constexpr std::pair<std::string_view, std::string_view> kToolParsers[] = {
    {"auto", "auto"},
    {"none", "none"},
    {"hermes", "hermes"},
    {"qwen25", "hermes"},
    {"qwen3_coder", "qwen3-coder"},
    {"qwen3_xml", "qwen3-coder"},
    {"deepseek_v3", "deepseek-v3"},
    {"deepseekv3", "deepseek-v3"},
    {"deepseek_v31", "deepseek-v3.1"},
    {"deepseekv31", "deepseek-v3.1"},
    {"deepseek_v32", "deepseek-v3.2"},
    {"deepseekv32", "deepseek-v3.2"},
    {"kimi_k2", "kimi-k2"},
    {"glm45", "glm-4"},
    {"llama3", "llama3"},
    {"llama3_json", "llama3"},
    {"llama4_json", "llama3"},
    {"minimax_m2", "minimax-m2"},
    {"minimax-m2", "minimax-m2"},
};
constexpr std::pair<std::string_view, std::string_view> kReasoningParsers[] = {
    {"auto", "auto"},         {"none", "none"},
    {"think", "think"},       {"pangu", "pangu"},
    {"deepseek_r1", "think"}, {"deepseek-r1", "think"},
    {"deepseek_v3", "think"}, {"deepseek-v3", "think"},
    {"qwen3", "think"},       {"glm45", "think"},
    {"kimi_k2", "think"},     {"minimax_m2", "think"},
    {"minimax", "think"},     {"qwen3-thinking", "think"},
};

struct Mapped {
  std::string_view name, target;
  Values values;
};
constexpr Mapped kMapped[] = {
    {"--kv-cache-dtype", "--kv-dtype", kKvTypes},
    {"--tool-call-parser", "--tool-format", kToolParsers},
    {"--reasoning-parser", "--reasoning-format", kReasoningParsers},
};

// Names of values that the verb's own flag spells differently.
constexpr std::pair<std::string_view, std::string_view> kDtypes[] = {
    {"bfloat16", "bf16"}, {"float32", "f32"}, {"float", "f32"}};

struct Dropped {
  std::string_view name;
  bool has_value;
  std::string_view why;
};
constexpr std::string_view kOnCpu = "Moesaic computes on the CPU";
constexpr Dropped kDropped[] = {
    {"-ngl", true, kOnCpu},
    {"--gpu-layers", true, kOnCpu},
    {"--n-gpu-layers", true, kOnCpu},
    {"--gpu-memory-utilization", true, "Moesaic computes on the CPU; --kv-memory sizes the KV cache"},
    {"--mem-fraction-static", true, "Moesaic computes on the CPU; --kv-memory sizes the KV cache"},
    {"--enforce-eager", false, "there are no CUDA graphs"},
    {"--trust-remote-code", false, "code in a model's folder is never run"},
    {"--enable-auto-tool-choice", false, "tool calls are always parsed"},
    {"--jinja", false, "chat templates are always rendered as Jinja"},
};

// Formats that a checkpoint's config declares itself.
constexpr std::string_view kQuantizations[] = {"auto", "compressed-tensors", "fp8", "gguf"};

// Flags of kDropped and kQuantizations only make sense for a verb that runs a model.
bool RunsModel(const FlagLookup& lookup) { return lookup("--threads") != FlagKind::kUnknown; }

template <typename Table>
const auto* FindName(const Table& table, std::string_view name) {
  const auto found = std::ranges::find(table, name, [](const auto& entry) { return entry.name; });
  return found == std::end(table) ? nullptr : &*found;
}

std::optional<std::string_view> FindValue(Values values, std::string_view value) {
  for (const auto& [from, to] : values) {
    if (from == value) return to;
  }
  return std::nullopt;
}

class Translator {
 public:
  Translator(const std::vector<std::string>& words, const FlagLookup& lookup) : in_(words), lookup_(lookup) {}

  StatusOr<FamiliarArguments> Translate() {
    while (at_ < in_.size()) {
      const std::string& word = in_[at_++];
      if (word == "--") {
        Copy(word);
        while (at_ < in_.size()) Copy(in_[at_++]);
      } else if (word.size() > 1 && word[0] == '-') {
        const size_t equals = word.find('=');
        inline_value_.reset();
        if (equals != std::string::npos) inline_value_ = word.substr(equals + 1);
        RETURN_IF_ERROR(TakeFlag(word, word.substr(0, equals)));
      } else {
        Copy(word);
      }
    }
    out_.words.insert(out_.words.begin(), front_.begin(), front_.end());
    return std::move(out_);
  }

 private:
  void Copy(std::string word) { out_.words.push_back(std::move(word)); }

  // Returns the value of the current flag, whose presence has been checked.
  std::string TakeValue() { return inline_value_ ? *inline_value_ : in_[at_++]; }
  bool HasValue() const { return inline_value_ || at_ < in_.size(); }

  Status TakeFlag(const std::string& word, const std::string& name) {
    const FlagKind kind = lookup_(name);
    if (kind == FlagKind::kUnknown) return TakeUnknown(word, name);
    if (kind == FlagKind::kSwitch || !HasValue()) {
      Copy(word);
    } else {
      const std::string given = TakeValue();
      const auto known = name == "--dtype" ? FindValue(kDtypes, given) : std::nullopt;
      const std::string value(known.value_or(given));
      Copy(inline_value_ ? name + "=" + value : name);
      if (!inline_value_) Copy(value);
    }
    return OkStatus();
  }

  Status TakeUnknown(const std::string& word, const std::string& name) {
    if (const Rename* rename = FindName(kRenames, name); rename != nullptr) {
      if (const FlagKind kind = lookup_(rename->target); kind != FlagKind::kUnknown) {
        return TakeRename(word, *rename, kind);
      }
    }
    if (const Mapped* mapped = FindName(kMapped, name);
        mapped != nullptr && lookup_(mapped->target) != FlagKind::kUnknown && HasValue()) {
      return TakeMapped(*mapped);
    }
    if (!RunsModel(lookup_)) {
      Copy(word);
      return OkStatus();
    }
    if (const Dropped* dropped = FindName(kDropped, name);
        dropped != nullptr && (!dropped->has_value || HasValue())) {
      if (dropped->has_value) TakeValue();
      out_.notes.push_back(fmt::format("{} has no effect: {}", name, dropped->why));
      return OkStatus();
    }
    if (name == "--quantization" && HasValue()) return TakeQuantization();
    Copy(word);
    return OkStatus();
  }

  Status TakeRename(const std::string& word, const Rename& rename, FlagKind kind) {
    const std::string target(rename.target);
    if (target[0] != '-') {
      if (!HasValue()) {
        return InvalidArgument("{} needs a value", word);
      }
      front_.push_back(TakeValue());
    } else if (kind == FlagKind::kSwitch) {
      Copy(inline_value_ ? target + "=" + *inline_value_ : target);
    } else {
      Copy(target);
      if (HasValue()) Copy(TakeValue());
    }
    return OkStatus();
  }

  Status TakeMapped(const Mapped& mapped) {
    const std::string value = TakeValue();
    const auto found = FindValue(mapped.values, value);
    if (!found) {
      std::vector<std::string_view> known;
      for (const auto& [from, to] : mapped.values) known.push_back(from);
      return InvalidArgument("{} {} is not supported; supported: {}", mapped.name, value,
                             fmt::join(known, ", "));
    }
    Copy(std::string(mapped.target));
    Copy(std::string(*found));
    return OkStatus();
  }

  Status TakeQuantization() {
    const std::string value = TakeValue();
    if (std::ranges::find(kQuantizations, value) == std::end(kQuantizations)) {
      return InvalidArgument("--quantization {} is not supported; supported: {}", value,
                             fmt::join(kQuantizations, ", "));
    }
    out_.notes.push_back(
        "--quantization has no effect: the checkpoint names its format; --dtype chooses the weights in "
        "memory");
    return OkStatus();
  }

  const std::vector<std::string>& in_;
  const FlagLookup& lookup_;
  size_t at_ = 0;
  std::optional<std::string> inline_value_;
  std::vector<std::string> front_;
  FamiliarArguments out_;
};

}  // namespace

StatusOr<FamiliarArguments> TranslateFlags(const std::vector<std::string>& words, const FlagLookup& lookup) {
  return Translator(words, lookup).Translate();
}

std::vector<std::string> FamiliarNames(const FlagLookup& lookup) {
  std::vector<std::string> names;
  const auto add = [&](std::string_view name) {
    if (lookup(name) == FlagKind::kUnknown) names.emplace_back(name);
  };
  for (const Rename& rename : kRenames) {
    if (lookup(rename.target) != FlagKind::kUnknown) add(rename.name);
  }
  for (const Mapped& mapped : kMapped) {
    if (lookup(mapped.target) != FlagKind::kUnknown) add(mapped.name);
  }
  if (RunsModel(lookup)) {
    for (const Dropped& dropped : kDropped) add(dropped.name);
    add("--quantization");
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace moesaic::app
