// What is decided before the rounding: what smoothing is to fold, which activation scale each linear gets, or
// that it takes none, found in a walk that reads weights once and leaves them as they are; and which
// precision each linear gets (mix_walk.h).
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "models/decoder_spec.h"
#include "quantizer/calibrate/folding.h"
#include "quantizer/format/grid.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::quantizer {

/// What an analysis is for.
struct AnalysisSettings {
  bool smoothing = false;
  bool static_activations = false;
  /// A linear takes a static scale if its outputs' squared error is at most this times that of dynamic ones.
  double static_tolerance = 2;

  bool wanted() const { return smoothing || static_activations; }
};

/// What smoothing or a choice did to the outputs of linears that share inputs; errors are squared and
/// relative to the outputs' squares.
struct AnalysisFinding {
  std::string name;  // of the first linear
  int layer = 0;
  int64_t tokens = 0;                      // that it saw
  bool stand_ins = false;                  // few tokens reach this expert: others of its layer stood in
  float alpha = 0;                         // 0: not smoothed
  double loss_before = 0, loss_after = 0;  // without and with smoothing
  float scale = 0;                         // static; 0: dynamic
  double static_loss = 0, dynamic_loss = 0;
};

/// What a walk that decides such things has done; it goes on from there. The hidden states behind these
/// layers are in `analysis-N.state`.
struct AnalysisState {
  int layers = 0;
  std::string hidden_xxh3;
};

struct Analysis {
  Folding folding;
  std::map<std::string, float> input_scales;  // of linears that take a static one
  std::vector<AnalysisFinding> findings;
  std::optional<Mix> mix;  // chosen

  nlohmann::ordered_json Json() const;  // findings
  /// A safetensors file: vectors by name, findings in its metadata.
  Status Save(const std::string& path, const std::string& key, const AnalysisState& state = {}) const;
  /// `key` must be the one that it was saved with, or empty; NotFound if it is not, or no such file is there.
  static StatusOr<Analysis> Load(const std::string& path, const std::string& key, bool sandwich,
                                 AnalysisState* state = nullptr);
  /// XXH3 of all that decides bytes, 16 hexadecimal digits.
  std::string Checksum() const;
};

/// The file of an output folder that holds its analysis. Not called .safetensors: loaders would take it for
/// weights.
inline constexpr char kAnalysisFile[] = "quantize.analysis";

/// Called with layers done and in all; returns false to stop.
using AnalysisProgress = std::function<bool(int done, int total)>;

/// A linear that an analysis meets: its outputs, and whether it will be rounded. What is not stays out of it.
struct AnalyzedLinear {
  int outputs = 0;
  bool rounded = false;
};
using AnalyzedLinears = std::map<std::string, AnalyzedLinear>;  // by module

/// How an analysis is run; none of it changes what comes out.
struct AnalysisRun {
  AnalysisProgress progress;  // called before each layer and each group of linears
  int part_rows = 2048;       // CalibrationStream::part_rows()
  /// The folder that states are saved in, after a layer at most every so many seconds, and gone on from if
  /// they were saved with this key. Empty: none.
  std::string folder, key;
  double save_seconds = 30;
  bool* resumed = nullptr;  // becomes true where it went on from such a state; null: nobody asks
};

/// Walks `sequences` through `source`, whose linears are `linears`.
StatusOr<Analysis> Analyze(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                           const models::DecoderSpec& spec, const AnalysisSettings& settings,
                           const Grid& grid, const std::vector<std::vector<int32_t>>& sequences,
                           const AnalyzedLinears& linears, const AnalysisRun& run);

/// Memory that it takes beside that of a walk.
int64_t AnalysisBytes(const models::DecoderSpec& spec);

}  // namespace moesaic::quantizer
