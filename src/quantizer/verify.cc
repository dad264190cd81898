#include "quantizer/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "base/check.h"
#include "base/checksum.h"
#include "base/round.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"
#include "kernels/exec_context.h"
#include "models/model_info.h"
#include "quantizer/format/weight_error.h"
#include "quantizer/io/unit_reader.h"
#include "quantizer/io/unit_rounder.h"
#include "quantizer/quantize.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;

// Returns the settings in the metadata of a shard.
StatusOr<OutputSettings> StoredSettings(const Checkpoint& quantized) {
  if (!quantized.files().empty()) {
    const auto& file = quantized.files().front();
    ASSIGN_OR_RETURN(const checkpoint::Safetensors parsed,
                     checkpoint::ParseSafetensors(file->bytes(), file->path()));
    const auto found = parsed.metadata.find(kSettingsKey);
    if (found != parsed.metadata.end()) return OutputSettings::FromJson(found->second, file->path());
  }
  return InvalidArgument(
      "{}: the metadata has no \"moesaic.quantize\"; the folder was not written by "
      "moesaic quantize",
      quantized.path());
}

// Largest rounding error of a value as a share of the largest magnitude under its scale: half the widest step
// of the grid, plus the error of rounding the scale (bf16: d < 2^-8; e4m3: 2^-4).
//
// int4's scale is s = a / 7.5 (1 - d) for a largest magnitude a. A value a is clipped to 7 s and loses a - 7
// a / 7.5 (1 - d) = a / 15 (1 + 14 d). This is more than the half step s / 2 = a / 15 (1 - d) of all others.
float LargestError(GridKind kind) {
  switch (kind) {
    case GridKind::kInt8Channel:
    case GridKind::kInt8Group:
      return 0.5F / 127 * (1 + 0x1p-7F);
    case GridKind::kInt4Group:
      return 0.5F / 7.5F * (1 + 14 * 0x1p-8F);
    case GridKind::kNvfp4:
      return 1.0F / 6 * (1 + 0x1p-3F);
    case GridKind::kFp8Block:
      break;
  }
  return 16.0F / 448 * (1 + 0x1p-7F);
}

// Largest rounding error of a value under the smallest scale (2^-126, e4m3: 2^-9): half the widest step, in
// scales.
float LargestErrorAtLeastScale(GridKind kind, float global_scale) {
  if (kind == GridKind::kNvfp4) return 0x1p-9F / global_scale;
  return (kind == GridKind::kFp8Block ? 16 : 0.5F) * 0x1p-126F;
}

struct ErrorSums {
  double error = 0, weight = 0;
};

class Verifier {
 public:
  Verifier(const Checkpoint& quantized, const Checkpoint& source, const QuantizePlan& plan,
           const OutputSettings& settings, const kernels::ExecContext& ctx)
      : quantized_(quantized), source_(source), plan_(plan), settings_(settings), ctx_(ctx) {}

  // Reads the checksums of the codes that calibration decided.
  Status ReadChecksums() {
    const std::string path = quantized_.path() + "/" + kReportFile;
    const std::optional<std::string> text = quantized_.ReadText(kReportFile);
    if (!text) return NotFound("{}: the file is missing; it holds the checksums of calibrated codes", path);
    ASSIGN_OR_RETURN(const nlohmann::json json, checkpoint::ParseJsonObject(*text, path));
    for (const LinearFinding& linear : CalibrationReport::FromJson(nlohmann::ordered_json(json)).linears) {
      checksums_[linear.name] = linear.xxh3;
    }
    for (size_t i = 0; i < plan_.items.size(); ++i) {
      if (plan_.output.items[i].form == Form::kRounded && !checksums_.contains(plan_.items[i].name)) {
        return DataLoss("{}: has no checksum of {}", path, plan_.items[i].name);
      }
    }
    return OkStatus();
  }

  // Matches the plan's shards with the folder's files and compares their headers.
  Status CheckFiles() {
    for (const Shard& shard : plan_.output.shards) {
      const auto found = std::ranges::find_if(
          quantized_.files(), [&](const auto& file) { return file->path().ends_with("/" + shard.file); });
      if (found == quantized_.files().end())
        return NotFound("{}: {} is missing", quantized_.path(), shard.file);
      const std::span<const std::byte> bytes = (*found)->bytes();
      const std::string header = plan_.output.Header(shard, plan_.items, settings_);
      if (static_cast<int64_t>(bytes.size()) != shard.bytes ||
          std::memcmp(bytes.data(), header.data(), header.size()) != 0) {
        return DataLoss("{}: its header differs from the one that these settings give", (*found)->path());
      }
      files_.push_back(*found);
    }
    return OkStatus();
  }

  // Compares the output of `pieces` in `made`, at `places`, with the files. Calibrated codes differ from
  // rounding to the nearest, so their checksum is compared instead.
  Status CheckBytes(std::span<const Piece> pieces, const OutputPlaces& places,
                    std::span<const std::byte> made) {
    const int shard = plan_.output.items[pieces.front().item].shard;
    const std::byte* file = files_[shard]->bytes().data();
    for (size_t p = 0; p < pieces.size(); ++p) {
      const OutputItem& item = plan_.output.items[pieces[p].item];
      for (size_t t = 0; t < item.tensors.size(); ++t) {
        if (places.tensors[p][t] < 0) continue;
        const auto [offset, bytes] = PlaceOf(item.tensors[t], pieces[p]);
        if (settings_.gptq && item.form == Form::kRounded && t == 0) {
          RETURN_IF_ERROR(CheckCodes(pieces[p], {file + offset, static_cast<size_t>(bytes)}));
          continue;
        }
        const auto expected =
            made.subspan(static_cast<size_t>(places.tensors[p][t]), static_cast<size_t>(bytes));
        if (std::memcmp(file + offset, expected.data(), expected.size()) == 0) continue;
        const auto differ = std::mismatch(expected.begin(), expected.end(), file + offset);
        return DataLoss("{}: byte {}, of tensor {}, is {:#04x} and must be {:#04x}", files_[shard]->path(),
                        differ.second - file,
                        plan_.items[pieces[p].item].name + item.tensors[t].stored.suffix,
                        static_cast<int>(*differ.second), static_cast<int>(*differ.first));
      }
    }
    return OkStatus();
  }

  // Computes the error of a rounded linear against the source; both are read as the loader reads them.
  Status CheckError(size_t index, VerifyReport* report) const {
    const ModelItem& item = plan_.items[index];
    const int64_t n = item.shape[0], k = item.shape[1];
    ASSIGN_OR_RETURN(const checkpoint::LinearSource now, quantized_.FindLinear(item.name, n, k));
    ASSIGN_OR_RETURN(const checkpoint::LinearSource then, source_.FindLinear(item.name, n, k));
    const Grid grid = plan_.output.items[index].precision.grid();
    const int64_t outputs = grid.group_outputs(), blocks = base::CeilDiv(n, outputs);
    std::vector<ErrorSums> sums(static_cast<size_t>(blocks));
    std::mutex mutex;
    Status failure;
    ctx_.pool->Run(blocks, [&](int64_t block, int) {
      const int64_t first = block * outputs, rows = std::min(outputs, n - first);
      std::vector<float> a(static_cast<size_t>(rows * k)), b(a.size());
      Status status = quantized_.ReadLinearRows(now, first, rows, a);
      if (status.ok()) status = source_.ReadLinearRows(then, first, rows, b);
      for (int64_t r = 0; settings_.folding() != nullptr && r < rows; ++r) {
        settings_.folding()->ApplyToRow(item.name, first + r, k, b.data() + r * k);
      }
      if (status.ok()) status = CheckBlock(item, grid, first, rows, a, b, now.global_scale, &sums[block]);
      if (status.ok()) return;
      const std::lock_guard<std::mutex> lock(mutex);
      if (failure.ok()) failure = std::move(status);
    });
    RETURN_IF_ERROR(failure);
    Add(item, sums, report);
    return OkStatus();
  }

 private:
  Status CheckBlock(const ModelItem& item, const Grid& grid, int64_t first, int64_t rows,
                    std::span<const float> now, std::span<const float> then, float global_scale,
                    ErrorSums* sums) const {
    const int64_t k = item.shape[1], group = grid.group_inputs(static_cast<int>(k));
    for (int64_t begin = 0; begin < k; begin += group) {
      const int64_t end = std::min(begin + group, k);
      double error = 0, weight = 0;
      float largest = 0;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = r * k + begin; c < r * k + end; ++c) {
          const double difference = static_cast<double>(now[c]) - then[c];
          error += difference * difference;
          weight += static_cast<double>(then[c]) * then[c];
          largest = std::max(largest, std::fabs(then[c]));
        }
      }
      const double bound = std::max<double>(static_cast<double>(largest) * LargestError(grid.kind),
                                            LargestErrorAtLeastScale(grid.kind, global_scale));
      const double limit = static_cast<double>(rows * (end - begin)) * bound * bound;
      // GPTQ moves weights away from their nearest codes to compensate for others.
      if (!(error <= limit) && !(settings_.gptq && std::isfinite(error))) {
        return DataLoss(
            "{}: {}: outputs from {}, inputs from {}: the squared error is {:.3g}, the grid allows {:.3g}",
            quantized_.path(), item.name, first, begin, error, limit);
      }
      sums->error += error;
      sums->weight += weight;
    }
    return OkStatus();
  }

  // Rows of codes come in order, one linear after another.
  Status CheckCodes(const Piece& piece, std::span<const std::byte> codes) {
    const ModelItem& item = plan_.items[piece.item];
    if (piece.first == 0) codes_ = base::Xxh3();
    codes_.Add(codes.data(), codes.size());
    if (piece.first + piece.rows < item.shape[0]) return OkStatus();
    const auto found = checksums_.find(item.name);
    const std::string now = codes_.Hex();
    MOESAIC_CHECK(found != checksums_.end());  // ensured by ReadChecksums
    if (found->second == now) return OkStatus();
    return DataLoss("{}: {}: its codes have the checksum {}, but had {} when they were written",
                    quantized_.path(), item.name, now, found->second);
  }

  static void Add(const ModelItem& item, std::span<const ErrorSums> sums, VerifyReport* report) {
    ErrorSums total;
    for (const ErrorSums& block : sums) {
      total.error += block.error;
      total.weight += block.weight;
    }
    const std::string kind = KindOf(item.name);
    auto found = std::ranges::find(report->kinds, kind, &KindError::kind);
    if (found == report->kinds.end())
      found = report->kinds.insert(found, KindError{.kind = kind, .worst_name = ""});
    ++found->linears;
    found->error += total.error;
    found->weight += total.weight;
    const double relative = total.weight > 0 ? std::sqrt(total.error / total.weight) : 0;
    if (relative < found->worst) return;
    found->worst = relative;
    found->worst_name = item.name;
  }

  const Checkpoint& quantized_;
  const Checkpoint& source_;
  const QuantizePlan& plan_;
  const OutputSettings& settings_;
  const kernels::ExecContext& ctx_;
  std::vector<std::shared_ptr<const runtime::MappedFile>> files_;  // [shards]
  // Checksums of the codes of calibrated linears.
  std::map<std::string, std::string> checksums_;
  base::Xxh3 codes_;  // of the current linear
};

}  // namespace

StatusOr<OutputSettings> SettingsOf(const Checkpoint& quantized, const Checkpoint& source) {
  ASSIGN_OR_RETURN(OutputSettings settings, StoredSettings(quantized));
  if (!settings.analyzed()) return settings;
  const std::string path = quantized.path() + "/" + kAnalysisFile;
  ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                   models::SpecFromConfig(source.config(), models::ConfigFile(source)));
  ASSIGN_OR_RETURN(Analysis analysis, Analysis::Load(path, "", spec.sandwich_norm));
  if (analysis.Checksum() != settings.analysis_xxh3) {
    return DataLoss("{}: differs from the analysis that the weights were made with", path);
  }
  ASSIGN_OR_RETURN(const std::vector<ModelItem> items, ListItems(source));
  RETURN_IF_ERROR(analysis.folding.Check(items, path));
  settings.analysis = std::make_shared<const Analysis>(std::move(analysis));
  return settings;
}

QuantizeOptions OptionsOf(const OutputSettings& settings) {
  QuantizeOptions options;
  options.output = settings;
  options.memory = int64_t{1} << 62;  // no calibration uses it
  options.sizes.unit_bytes = kLargestUnit;
  return options;
}

StatusOr<VerifyReport> Verify(const Checkpoint& quantized, const Checkpoint& source,
                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                              const VerifyProgress& progress) {
  VerifyReport report;
  ASSIGN_OR_RETURN(report.settings, SettingsOf(quantized, source));
  const QuantizeOptions options = OptionsOf(report.settings);
  ASSIGN_OR_RETURN(const QuantizePlan plan, PlanQuantize(source, options));
  ASSIGN_OR_RETURN(const auto io, runtime::AsyncFiles::Create(runtime::AsyncFiles::Backend::kBest));
  ASSIGN_OR_RETURN(UnitReader reader, UnitReader::Create(source, false, *io));
  ASSIGN_OR_RETURN(const runtime::Buffer from,
                   runtime::Buffer::Allocate(static_cast<size_t>(plan.work.source_bytes), false));
  ASSIGN_OR_RETURN(const runtime::Buffer to,
                   runtime::Buffer::Allocate(static_cast<size_t>(plan.work.output_bytes), false));
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  UnitRounder rounder(source, plan.items, plan.output, options.output, ctx);
  Verifier verifier(quantized, source, plan, report.settings, ctx);
  RETURN_IF_ERROR(verifier.CheckFiles());
  if (report.settings.gptq) RETURN_IF_ERROR(verifier.ReadChecksums());
  for (const IoUnit& unit : plan.work.units) {
    const auto pieces = std::span(plan.work.pieces).subspan(unit.first, unit.end - unit.first);
    ASSIGN_OR_RETURN(LoadedUnit loaded, reader.Start(plan.items, pieces, {from.data(), from.size()}));
    RETURN_IF_ERROR(reader.Wait(loaded));
    const OutputPlaces places = PlacesOf(plan.output, pieces);
    RETURN_IF_ERROR(rounder.Run(pieces, loaded, places, {to.data(), to.size()}));
    RETURN_IF_ERROR(verifier.CheckBytes(pieces, places, {to.data(), to.size()}));
    for (const OutputRun& run : places.runs) report.bytes += run.bytes;
    for (const Piece& piece : pieces) {
      if (piece.first > 0) continue;  // a linear is counted with its first piece
      const bool rounded = plan.output.items[piece.item].form == Form::kRounded;
      ++(rounded ? report.rounded : report.other);
      if (rounded) RETURN_IF_ERROR(verifier.CheckError(piece.item, &report));
    }
    source.ForgetMaps();
    quantized.ForgetMaps();
    if (progress && !progress(report.bytes, plan.output.bytes)) return Cancelled("verifying was interrupted");
  }
  return report;
}

}  // namespace moesaic::quantizer
