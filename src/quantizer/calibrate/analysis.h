// Decisions before the rounding: smoothing factors, and static or dynamic activation scales. Analyze finds
// them in a walk that reads the weights once and does not change them. The choice of precisions (mix_walk.h)
// is stored with them.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "kernels/exec_context.h"
#include "models/decoder_spec.h"
#include "quantizer/calibrate/folding.h"
#include "quantizer/format/grid.h"
#include "quantizer/io/state_store.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::quantizer {

/// Selects the decisions of an analysis.
struct AnalysisSettings {
  bool smoothing = false;
  bool static_activations = false;
  /// Maximum ratio of the outputs' squared error with a static scale to that with dynamic scales.
  double static_tolerance = 2;

  bool wanted() const { return smoothing || static_activations; }
};

/// Effect of smoothing and of a static scale on the outputs of linears that share inputs. Losses are squared
/// errors relative to the outputs' squares.
struct AnalysisFinding {
  std::string name;  // the first linear
  int layer = 0;
  int64_t tokens = 0;  // tokens that reached the linear
  // Few tokens reach this expert; other tokens of its layer were used.
  bool stand_ins = false;
  float alpha = 0;                         // 0: not smoothed
  double loss_before = 0, loss_after = 0;  // without and with smoothing
  float scale = 0;                         // static scale; 0: dynamic
  double static_loss = 0, dynamic_loss = 0;
};

struct Analysis {
  Folding folding;
  std::map<std::string, float> input_scales;  // of linears with a static scale
  std::vector<AnalysisFinding> findings;
  std::optional<Mix> mix;  // chosen precisions

  nlohmann::ordered_json Json() const;  // the findings
  /// Writes a safetensors file: vectors by name, findings in its metadata.
  Status Save(const std::string& path, const std::string& key) const;
  /// Loads a saved analysis. `key` must be empty or the key it was saved with. Returns NotFound if the key
  /// differs or the file does not exist.
  static StatusOr<Analysis> Load(const std::string& path, const std::string& key, bool sandwich);
  /// Returns the XXH3 of all content that decides bytes, 16 hexadecimal digits.
  std::string Checksum() const;
};

/// Name of the analysis file in an output folder. It does not end with .safetensors, because loaders would
/// read it as weights.
inline constexpr char kAnalysisFile[] = "quantize.analysis";

/// Called with the number of layers done and in all; returns false to stop.
using AnalysisProgress = std::function<bool(int done, int total)>;

/// A linear in an analysis: its number of outputs, and whether it will be rounded. Others are skipped.
struct AnalyzedLinear {
  int outputs = 0;
  bool rounded = false;
};
using AnalyzedLinears = std::map<std::string, AnalyzedLinear>;  // by module

/// Parameters of a walk that do not affect its result.
struct AnalysisRun {
  AnalysisProgress progress;    // called before each layer and each group of linears
  int part_rows = 2048;         // CalibrationStream::part_rows()
  StateStore* store = nullptr;  // saves states after layers, to resume from those of the same key; null: none
  bool* resumed = nullptr;      // set to true if the walk resumed from a state; may be null
};

/// Walks `sequences` through `source`, whose linears are `linears`.
StatusOr<Analysis> Analyze(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                           const models::DecoderSpec& spec, const AnalysisSettings& settings,
                           const Grid& grid, const std::vector<std::vector<int32_t>>& sequences,
                           const AnalyzedLinears& linears, const AnalysisRun& run);

/// Returns the memory in bytes of an analysis in addition to that of a walk.
int64_t AnalysisBytes(const models::DecoderSpec& spec);

}  // namespace moesaic::quantizer
