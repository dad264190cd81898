// The checkpoint that a run will write, known to the byte before it starts: what becomes of each item, and
// where its tensors lie in which file.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "quantizer/calibrate/analysis.h"
#include "quantizer/calibrate/rare_experts.h"
#include "quantizer/format/model_items.h"
#include "quantizer/format/scheme.h"
#include "quantizer/format/source_form.h"

namespace moesaic::quantizer {

/// Linears whose name has a match of `pattern`, a regular expression, are not rounded but written in f32 or
/// bf16.
struct KeepRule {
  tensor::DType dtype;  // kF32 or kBF16
  std::string pattern;
};

/// What calibration consists of.
struct CalibrationId {
  std::string xxh3;  // of its token ids, 16 hexadecimal digits; empty: none
  int64_t tokens = 0, sequences = 0, longest = 0;

  static CalibrationId Of(const std::vector<std::vector<int32_t>>& sequences);
};

/// What decides which bytes come out.
struct OutputSettings {
  Scheme scheme = Scheme::kW8A8;  // of all linears, unless there is a mix
  int group_size = 32;            // of a scheme that HasGroupSize; 0: all inputs
  MixSettings mix;
  bool search = false;  // scales of least squared error instead of those that fit the largest value
  /// GPTQ, with such scales, on the Hessians of calibration tokens.
  bool gptq = false;
  double damping = 0.01;         // FactorOptions::damping
  bool act_order = true;         // FactorOptions::act_order
  bool weigh_by_router = false;  // an expert's tokens count by the square of what the router gives them
  RareExperts rare_experts = RareExperts::kShrink;
  /// What calibration says before the rounding; kW8A8 alone has static activations.
  AnalysisSettings analyze;
  std::shared_ptr<const Analysis> analysis;  // of a run that wants one, once it is there
  std::string analysis_xxh3;                 // its Checksum()
  CalibrationId calibration;
  std::vector<KeepRule> keep;
  int64_t shard_bytes = int64_t{5'000'000'000};  // a file gets as many items as fit, and at least one

  /// What linears may be rounded to: the scheme, or those of the mix. Empty where a mix keeps all.
  std::vector<Precision> Roundings() const;
  /// Whether a walk before the rounding decides anything.
  bool analyzed() const { return analyze.wanted() || mix.wanted(); }
  /// Whether calibration decides anything.
  bool calibrated() const { return gptq || analyzed(); }
  const Folding* folding() const { return analysis == nullptr ? nullptr : &analysis->folding; }
  /// The static scale of a linear's activations; 0: dynamic.
  float InputScale(const std::string& module) const;
  nlohmann::ordered_json Json() const;
  /// From Json()'s text, which `file` holds.
  static StatusOr<OutputSettings> FromJson(const std::string& text, const std::string& file);
};

enum class Form : uint8_t {
  kRounded,    // on the grid of its precision
  kCopied,     // its bytes as they are
  kConverted,  // to tensors[0].dtype: f32, bf16 or f16
};

struct OutputTensor {
  StoredTensor stored;
  int64_t offset = 0;  // in the file
};

struct OutputItem {
  Form form = Form::kCopied;
  Precision precision;  // of what is rounded
  int shard = 0;
  std::vector<OutputTensor> tensors;

  int64_t bytes() const;
};

struct Shard {
  std::string file;           // "model-00001-of-00003.safetensors"
  size_t first = 0, end = 0;  // items
  int64_t header_bytes = 0;   // length field included
  int64_t bytes = 0;          // of the file
};

struct OutputPlan {
  std::vector<OutputItem> items;  // one for each of the model's
  std::vector<Shard> shards;
  std::vector<std::string> ignore;      // of "quantization_config"
  std::vector<PrecisionTargets> mixed;  // of a mix: what each scheme is for
  std::vector<std::string> dynamic;  // linears whose activations are dynamic where those of others are static
  int64_t bytes = 0;                 // of all files

  /// A file's length field and header, header_bytes long.
  std::string Header(const Shard& shard, const std::vector<ModelItem>& items,
                     const OutputSettings& settings) const;
};

/// The units of a mix with the sizes of their options, and what the rest takes. Losses are by NominalError.
/// Options that don't fit a unit's shapes are left out. Refuses --keep rules that part fused linears.
struct MixPlan {
  std::vector<MixUnit> units;
  MixFixed fixed;
};
StatusOr<MixPlan> PlanMix(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                          const models::DecoderSpec& spec, const OutputSettings& settings);

/// Plans the output; of a mix with the choice that `settings.analysis` has. Refuses a grid that does not fit
/// an item, --keep rules that part fused linears, and a choice that lacks a unit; errors say what to do.
StatusOr<OutputPlan> PlanOutput(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                                const OutputSettings& settings);

/// The key in the metadata of safetensors files that holds OutputSettings::Json().
inline constexpr char kSettingsKey[] = "moesaic.quantize";

}  // namespace moesaic::quantizer
