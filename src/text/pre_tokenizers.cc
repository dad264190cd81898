// Names and rules follow llama.cpp's converter for the models' own tokenizers. Where llama.cpp rewrote a
// regex for its engine, this is the model's original.
#include "text/pre_tokenizers.h"

#include <algorithm>
#include <iterator>

namespace moesaic::text {
namespace {

constexpr const char* kWords =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
    R"(|\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
    R"(|\s+(?!\S)|\s+)";
constexpr const char* kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kDeepSeekV3Words =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kCased =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kDeepSeekLlmLetters =
    R"(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-)"
    R"(ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-)"
    R"(ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇ)"
    R"(ℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲ)"
    R"(ⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓)"
    R"(𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)";

constexpr const char* kGpt2Patterns[] = {kWords};
constexpr const char* kDigitPatterns[] = {R"(\p{N})", kWords};
constexpr const char* kLlama3Patterns[] = {kLlama3};
constexpr const char* kQwen2Patterns[] = {kQwen2};
constexpr const char* kQwen35Patterns[] = {kQwen35};
constexpr const char* kGpt4oPatterns[] = {kCased};
constexpr const char* kTekkenPatterns[] = {kTekken};
constexpr const char* kKimiPatterns[] = {kKimiK2Pattern};
constexpr const char* kDeepSeekV3Patterns[] = {R"(\p{N}{1,3})", "[一-龥\u3040-ゟ゠-ヿ]+", kDeepSeekV3Words};
constexpr const char* kDeepSeekLlmPatterns[] = {
    R"([\r\n])", kDeepSeekLlmLetters,           "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    R"(\s+$)",   "[一-龥ࠀ-一가-\xed\x9f\xbf]+", R"(\p{N}+)"};
constexpr const char* kDeepSeekCoderPatterns[] = {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)",
                                                  "[一-龥ࠀ-一가-\xed\x9f\xbf]+", R"(\p{N})"};
constexpr const char* kFalconPatterns[] = {R"([\p{P}\$\+<=>\^~\|`]+)", kWords, "[0-9][0-9][0-9]"};
constexpr const char* kDefaultPatterns[] = {R"([\p{P}\$\+<=>\^~\|]+)", kWords, R"(\p{N}+)",
                                            "[0-9][0-9][0-9]"};

struct Named {
  std::string_view name;
  PreTokenizer rules;
};

constexpr Named kTable[] = {
    {"default", {kDefaultPatterns, false, false}},
    {"llama3", {kLlama3Patterns, false, true}},
    {"llama-v3", {kLlama3Patterns, false, true}},
    {"llama-bpe", {kLlama3Patterns, false, true}},
    {"falcon3", {kLlama3Patterns, false, true}},
    {"falcon-h1", {kLlama3Patterns, false, true}},
    {"lfm2", {kLlama3Patterns, false, true}},
    {"dbrx", {kLlama3Patterns, false, false}},
    {"smaug-bpe", {kLlama3Patterns, false, false}},
    {"glm4", {kLlama3Patterns, false, false}},
    {"chatglm-bpe", {kLlama3Patterns, false, false}},
    {"deepseek-llm", {kDeepSeekLlmPatterns, false, false}},
    {"deepseek-coder", {kDeepSeekCoderPatterns, false, false}},
    {"deepseek-v3", {kDeepSeekV3Patterns, false, false}},
    {"hunyuan-dense", {kDeepSeekV3Patterns, false, false}},
    {"falcon", {kFalconPatterns, false, false}},
    {"mpt", {kGpt2Patterns, true, false}},
    {"olmo", {kGpt2Patterns, true, false}},
    {"gpt-2", {kGpt2Patterns, false, false}},
    {"phi-2", {kGpt2Patterns, false, false}},
    {"starcoder", {kDigitPatterns, false, false}},
    {"refact", {kDigitPatterns, false, false}},
    {"command-r", {kDigitPatterns, true, false}},
    {"smollm", {kDigitPatterns, false, false}},
    {"codeshell", {kDigitPatterns, false, false}},
    {"qwen2", {kQwen2Patterns, true, false}},
    {"deepseek-r1-qwen", {kQwen2Patterns, true, false}},
    {"megrez", {kQwen2Patterns, true, false}},
    {"stablelm2", {kQwen2Patterns, true, false}},
    {"hunyuan", {kQwen2Patterns, true, false}},
    {"qwen35", {kQwen35Patterns, false, false}},
    {"tekken", {kTekkenPatterns, false, true}},
    {"gpt-4o", {kGpt4oPatterns, false, false}},
    {"llama4", {kGpt4oPatterns, false, false}},
    {"kimi-k2", {kKimiPatterns, false, true}},
};

}  // namespace

const PreTokenizer* FindPreTokenizer(std::string_view name) {
  const auto* found = std::ranges::find(kTable, name, &Named::name);
  return found == std::end(kTable) ? nullptr : &found->rules;
}

}  // namespace moesaic::text
