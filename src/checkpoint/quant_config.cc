#include <algorithm>

#include "checkpoint/json_text.h"
#include "checkpoint/linear_source.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

constexpr char kKey[] = "quantization_config";
constexpr size_t kLongestPattern = 1000;
#ifdef __GLIBCXX__
constexpr auto kPolynomial = std::regex_constants::__polynomial;
#else
constexpr auto kPolynomial = std::regex_constants::syntax_option_type{};
#endif

const json& Member(const json& object, const char* key) {
  static const json kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

StatusOr<int> IntMember(const json& object, const char* key, int low, int high, int fallback,
                        const std::string& where) {
  const json& value = Member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_number_integer() || value.get<int64_t>() < low || value.get<int64_t>() > high) {
    return InvalidArgument("{}: \"{}\" must be an integer in [{}, {}], found {}", where, key, low, high,
                           ShownJson(value));
  }
  return value.get<int>();
}

StatusOr<std::string> StringMember(const json& object, const char* key, const std::string& fallback,
                                   const std::string& where) {
  const json& value = Member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_string())
    return InvalidArgument("{}: \"{}\" must be a string, found {}", where, key, ShownJson(value));
  return value.get<std::string>();
}

StatusOr<bool> IsDynamic(const json& args, const std::string& where) {
  const json& value = Member(args, "dynamic");
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  if (value == "local") return true;
  return InvalidArgument("{}: \"dynamic\" must be true, false or \"local\", found {}", where,
                         ShownJson(value));
}

Status ReadBlock(const json& value, const std::string& where, int* rows, int* cols) {
  if (!value.is_array() || value.size() != 2 || !value[0].is_number_integer() ||
      !value[1].is_number_integer() || value[0] < 1 || value[1] < 1 || value[0] > 65536 || value[1] > 65536) {
    return InvalidArgument("{}: block size must be two integers in [1, 65536], found {}", where,
                           ShownJson(value));
  }
  *rows = value[0].get<int>();
  *cols = value[1].get<int>();
  return OkStatus();
}

Status ReadActivations(const json& args, const std::string& where, QuantGroup* group) {
  if (args.is_null()) return OkStatus();
  if (!args.is_object()) return InvalidArgument("{}: \"input_activations\" must be an object", where);
  ASSIGN_OR_RETURN(const int bits, IntMember(args, "num_bits", 1, 16, 8, where));
  ASSIGN_OR_RETURN(const std::string type, StringMember(args, "type", "int", where));
  // Activations of floating-point schemes (FP8, FP4) stay in higher precision, which only adds accuracy.
  if (type != "int") return OkStatus();
  if (bits != 8) return Unimplemented("{}: integer activations must have 8 bits, found {}", where, bits);
  if (Member(args, "symmetric") == false) {
    return Unimplemented("{}: asymmetric activations are not supported; quantize with \"symmetric\": true",
                         where);
  }
  group->int8_activations = true;
  ASSIGN_OR_RETURN(group->dynamic_activations, IsDynamic(args, where));
  return OkStatus();
}

StatusOr<QuantGroup> ReadGroup(const json& value, const std::string& root_format, const std::string& where) {
  if (!value.is_object()) return InvalidArgument("{} must be an object, found {}", where, ShownJson(value));
  QuantGroup group;
  ASSIGN_OR_RETURN(group.targets, ModulePatterns::Parse(Member(value, "targets"), where + ": \"targets\""));
  ASSIGN_OR_RETURN(group.format, StringMember(value, "format", root_format, where));
  const json& weights = Member(value, "weights");
  if (!weights.is_object()) return InvalidArgument("{}: \"weights\" must be an object", where);
  const std::string in_weights = where + ": \"weights\"";
  ASSIGN_OR_RETURN(group.num_bits, IntMember(weights, "num_bits", 1, 16, 8, in_weights));
  ASSIGN_OR_RETURN(group.type, StringMember(weights, "type", "int", in_weights));
  ASSIGN_OR_RETURN(group.strategy, StringMember(weights, "strategy", "tensor", in_weights));
  ASSIGN_OR_RETURN(group.group_size, IntMember(weights, "group_size", -1, 65536, 0, in_weights));
  group.symmetric = Member(weights, "symmetric") != false;
  ASSIGN_OR_RETURN(const std::string actorder, StringMember(weights, "actorder", "", in_weights));
  group.needs_group_index = actorder == "group" || actorder == "dynamic";
  if (group.strategy == "block") {
    RETURN_IF_ERROR(
        ReadBlock(Member(weights, "block_structure"), in_weights, &group.block_rows, &group.block_cols));
  }
  RETURN_IF_ERROR(
      ReadActivations(Member(value, "input_activations"), where + ": \"input_activations\"", &group));
  return group;
}

Status ReadCompressedTensors(const json& quant, const std::string& where, QuantConfig* result) {
  ASSIGN_OR_RETURN(const std::string format, StringMember(quant, "format", "", where));
  ASSIGN_OR_RETURN(const std::string status, StringMember(quant, "quantization_status", "compressed", where));
  if (status != "compressed" && status != "frozen") {
    return Unimplemented("{}: \"quantization_status\" must be \"compressed\", found \"{}\"", where, status);
  }
  if (!Member(quant, "ignore").is_null()) {
    ASSIGN_OR_RETURN(result->ignore, ModulePatterns::Parse(quant["ignore"], where + ": \"ignore\""));
  }
  for (const char* unsupported : {"sparsity_config", "transform_config"}) {
    if (const json& value = Member(quant, unsupported); !value.is_null() && !value.empty()) {
      return Unimplemented("{}: \"{}\" is not supported", where, unsupported);
    }
  }
  const json& groups = Member(quant, "config_groups");
  if (!groups.is_object()) return InvalidArgument("{}: \"config_groups\" must be an object", where);
  for (const auto& [name, value] : groups.items()) {
    ASSIGN_OR_RETURN(QuantGroup group, ReadGroup(value, format, fmt::format("{}: \"{}\"", where, name)));
    result->groups.push_back(std::move(group));
  }
  return OkStatus();
}

}  // namespace

StatusOr<ModulePatterns> ModulePatterns::Parse(const json& list, const std::string& where) {
  if (!list.is_array())
    return InvalidArgument("{} must be a list of names, found {}", where, ShownJson(list));
  ModulePatterns patterns;
  for (const json& item : list) {
    if (!item.is_string())
      return InvalidArgument("{} must be a list of names, found {}", where, ShownJson(item));
    const std::string name = item.get<std::string>();
    if (name == "Linear") {
      patterns.linear_ = true;
    } else if (name.starts_with("re:")) {
      if (name.size() > kLongestPattern) {
        return InvalidArgument("{}: a pattern may have {} characters, found {}", where, kLongestPattern,
                               name.size());
      }
      try {
        // Breadth-first matching is polynomial: a pattern from a file cannot hang the program or exhaust its
        // stack.
        patterns.patterns_.emplace_back(name.substr(3), std::regex::ECMAScript | kPolynomial);
      } catch (const std::regex_error& error) {
        return InvalidArgument("{}: {} is not a regular expression: {}", where, name, error.what());
      }
    } else {
      patterns.names_.push_back(name);
    }
  }
  return patterns;
}

bool ModulePatterns::MatchName(const std::string& module) const {
  if (std::find(names_.begin(), names_.end(), module) != names_.end()) return true;
  const auto from_start = std::regex_constants::match_continuous;  // like Python's re.match
  for (const std::regex& pattern : patterns_) {
    if (std::regex_search(module, pattern, from_start)) return true;
  }
  return false;
}

const QuantGroup* QuantConfig::GroupOf(const std::string& module) const {
  if (ignore.MatchName(module) || ignore.any_linear()) return nullptr;
  for (const QuantGroup& group : groups) {
    if (group.targets.MatchName(module)) return &group;
  }
  for (const QuantGroup& group : groups) {
    if (group.targets.any_linear()) return &group;
  }
  return nullptr;
}

StatusOr<QuantConfig> ParseQuantConfig(const json& config, const std::string& file) {
  QuantConfig result;
  const json& quant = config.is_object() ? Member(config, kKey) : config;
  if (!quant.is_object()) {
    if (quant.is_null()) return result;
    return InvalidArgument("{}: \"{}\" must be an object, found {}", file, kKey, ShownJson(quant));
  }
  const std::string where = fmt::format("{}: \"{}\"", file, kKey);
  ASSIGN_OR_RETURN(const std::string method, StringMember(quant, "quant_method", "", where));
  if (method == "fp8") {
    result.method = QuantConfig::Method::kFp8Blocks;
    ASSIGN_OR_RETURN(const std::string format, StringMember(quant, "fmt", "e4m3", where));
    if (format != "e4m3") return Unimplemented("{}: \"fmt\" must be \"e4m3\", found \"{}\"", where, format);
    ASSIGN_OR_RETURN(const std::string scheme, StringMember(quant, "activation_scheme", "dynamic", where));
    if (scheme != "dynamic") {
      return Unimplemented("{}: \"activation_scheme\" must be \"dynamic\", found \"{}\"", where, scheme);
    }
    RETURN_IF_ERROR(
        ReadBlock(Member(quant, "weight_block_size"), where, &result.block_rows, &result.block_cols));
  } else if (method == "compressed-tensors") {
    result.method = QuantConfig::Method::kCompressedTensors;
    RETURN_IF_ERROR(ReadCompressedTensors(quant, where, &result));
  } else {
    return Unimplemented("{}: \"quant_method\" must be \"fp8\" or \"compressed-tensors\", found \"{}\"",
                         where, method);
  }
  return result;
}

}  // namespace moesaic::checkpoint
