// Plans the output checkpoint to the byte before a run starts: the form of each item, and the file and offset
// of each of its tensors.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "quantizer/calibrate/analysis.h"
#include "quantizer/format/model_items.h"
#include "quantizer/format/scheme.h"
#include "quantizer/format/source_form.h"

namespace moesaic::quantizer {

/// A --keep rule: linears whose names match `pattern`, a regular expression, are not rounded but written as
/// `dtype`.
struct KeepRule {
  tensor::DType dtype;  // kF32 or kBF16
  std::string pattern;
};

/// Identity of the calibration text.
struct CalibrationId {
  std::string xxh3;  // XXH3 of the token ids, 16 hexadecimal digits; empty: no calibration
  int64_t tokens = 0, sequences = 0, longest = 0;

  static CalibrationId Of(const std::vector<std::vector<int32_t>>& sequences);
};

/// All settings that decide the output bytes.
struct OutputSettings {
  Scheme scheme = Scheme::kW8A8;  // scheme of all linears, unless there is a mix
  int group_size = 32;            // group size of a scheme with HasGroupSize; 0: all inputs
  MixSettings mix;
  bool search = false;  // chooses scales of least squared error instead of scales that fit the largest value
  /// Enables GPTQ with such scales, on the Hessians of the calibration tokens.
  bool gptq = false;
  /// Decisions of calibration before the rounding. Only kW8A8 has static activations.
  AnalysisSettings analyze;
  std::shared_ptr<const Analysis> analysis;  // result of the analysis, once it is made
  std::string analysis_xxh3;                 // Analysis::Checksum()
  CalibrationId calibration;
  std::vector<KeepRule> keep;
  int64_t shard_bytes = int64_t{5'000'000'000};  // a file gets as many items as fit, at least one

  /// Returns the precisions that linears may be rounded to: the scheme, or those of the mix. Empty if a mix
  /// keeps all.
  std::vector<Precision> Roundings() const;
  /// True if a walk before the rounding decides anything.
  bool analyzed() const { return analyze.wanted() || mix.wanted(); }
  /// True if calibration decides anything.
  bool calibrated() const { return gptq || analyzed(); }
  const Folding* folding() const { return analysis == nullptr ? nullptr : &analysis->folding; }
  /// Returns the static activation scale of a linear; 0: dynamic.
  float InputScale(const std::string& module) const;
  nlohmann::ordered_json Json() const;
  /// Parses the text of Json(); `file` is its origin in errors.
  static StatusOr<OutputSettings> FromJson(const std::string& text, const std::string& file);
};

enum class Form : uint8_t {
  kRounded,    // rounded to the grid of its precision
  kCopied,     // copied byte by byte
  kConverted,  // converted to tensors[0].dtype: f32, bf16 or f16
};

struct OutputTensor {
  StoredTensor stored;
  int64_t offset = 0;  // in the file
};

struct OutputItem {
  Form form = Form::kCopied;
  Precision precision;  // precision, if rounded
  int shard = 0;
  std::vector<OutputTensor> tensors;

  int64_t bytes() const;
};

struct Shard {
  std::string file;           // "model-00001-of-00003.safetensors"
  size_t first = 0, end = 0;  // range of items
  int64_t header_bytes = 0;   // includes the length field
  int64_t bytes = 0;          // of the file
};

struct OutputPlan {
  std::vector<OutputItem> items;  // one for each model item
  std::vector<Shard> shards;
  std::vector<std::string> ignore;      // of "quantization_config"
  std::vector<PrecisionTargets> mixed;  // of a mix: modules by scheme
  std::vector<std::string> dynamic;     // linears with dynamic activations where others have static ones
  int64_t bytes = 0;                    // of all files

  /// Returns a file's length field and header, header_bytes long.
  std::string Header(const Shard& shard, const std::vector<ModelItem>& items,
                     const OutputSettings& settings) const;
};

/// The precision groups of a mix with the sizes of their options, and the bytes of everything else. Losses
/// are by NominalError. Options that do not fit the shapes of a group are omitted. Fails if --keep rules
/// separate fused linears.
struct MixPlan {
  std::vector<PrecisionGroup> units;
  MixFixed fixed;
};
StatusOr<MixPlan> PlanMix(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                          const models::DecoderSpec& spec, const OutputSettings& settings);

/// Plans the output. For a mix it uses the choice in `settings.analysis`. Fails if a grid does not fit an
/// item, if --keep rules separate fused linears, or if the choice lacks a group. Errors say how to fix it.
StatusOr<OutputPlan> PlanOutput(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                                const OutputSettings& settings);

/// Metadata key of safetensors files that holds OutputSettings::Json().
inline constexpr char kSettingsKey[] = "moesaic.quantize";

}  // namespace moesaic::quantizer
