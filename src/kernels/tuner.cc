#include "kernels/tuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/gemm_tiling.h"
#include "kernels/linear.h"
#include "kernels/moe.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;
using tensor::PackedLayout;

constexpr int kRounds = 15;
constexpr double kMinGain = 0.02;
// Inputs and outputs of an expert in Qwen3-30B-A3B, a source of products with few rows.
constexpr int kHidden = 2048, kIntermediate = 768, kTopK = 8, kExperts = 32;
// Total weights of one format for all threads: more than caches hold, as in a model.
constexpr int64_t kStreamBytes = 128 << 20;

double SecondsOf(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Slowdown of `a` relative to `b`, in rounds that run both in alternating order.
struct Comparison {
  double median = 0, lower_quartile = 0;  // quartiles of time(a) / time(b) - 1
  bool BWins() const { return median > kMinGain && lower_quartile > 0; }
};

Comparison Compare(const auto& a, const auto& b) {
  std::vector<double> ratios;
  for (int round = 0; round < kRounds; ++round) {
    double of_a = 0, of_b = 0;
    if (round % 2 == 0) {
      of_a = a();
      of_b = b();
    } else {
      of_b = b();
      of_a = a();
    }
    ratios.push_back(of_a / of_b - 1);
  }
  std::sort(ratios.begin(), ratios.end());
  return {.median = ratios[kRounds / 2], .lower_quartile = ratios[kRounds / 4]};
}

// Returns whether b is faster than a in two sets of rounds; `gain` is then the lesser of both medians.
bool WinsTwice(const auto& a, const auto& b, double* gain) {
  const Comparison first = Compare(a, b);
  if (!first.BWins()) return false;
  const Comparison second = Compare(a, b);
  *gain = std::min(first.median, second.median);
  return second.BWins();
}

std::vector<float> RandomValues(size_t count) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(count);
  for (float& v : values) v = uniform(rng);
  return values;
}

// Fills packed [n, k] with plausible values. Formats that cannot be quantized from values get codes only,
// with scales of zero.
void FillMatrix(const PackedLayout& layout, std::byte* to) {
  if (!tensor::CanQuantize(layout.format)) return;
  const std::vector<float> values = RandomValues(size_t(layout.n) * layout.k);
  tensor::PackRows(layout, 0, layout.n, values.data(), to);
}

// Products of few rows with weights that stream from memory, on all threads together.
class Stream {
 public:
  static StatusOr<Stream> Create(const KernelTable& table, PackedFormat format, runtime::ThreadPool& pool) {
    Stream s(table, format, pool);
    s.piece_ = PackedLayout::Of(format, kPanels * tensor::kPanelRows, kHidden);
    s.pieces_ = std::max<int64_t>(kStreamBytes / s.piece_.total_bytes / pool.size(), 1);
    ASSIGN_OR_RETURN(s.weights_,
                     runtime::Buffer::Allocate(s.piece_.total_bytes * s.pieces_ * pool.size(), true));
    FillMatrix(s.piece_, s.weights_.data());
    pool.RunOnEach([&](int64_t, int worker) {
      for (int64_t i = worker == 0 ? 1 : 0; i < s.pieces_; ++i) {
        std::memcpy(s.Piece(worker, i), s.weights_.data(), s.piece_.total_bytes);
      }
    });
    s.out_.resize(pool.size());
    for (auto& out : s.out_) out.resize(size_t(kMaxRows) * s.piece_.n);
    return s;
  }

  void SetRows(int rows) {
    scratch_.Reset();
    const std::vector<float> x = RandomValues(size_t(rows) * kHidden);
    const ExecContext ctx{.kernels = table_, .pool = pool_, .scratch = &scratch_};
    rows_ = QuantizeActivations(ctx, piece_.format, x.data(), kHidden, rows, kHidden);
  }

  // Returns the seconds of `tile` for a few pieces per thread; the next call continues after them.
  double Seconds(GemmTileFn tile) {
    const int64_t count = std::min<int64_t>(std::max(kPiecesEach / rows_.rows, kMinPieces), pieces_);
    const double seconds = SecondsOf([&] {
      pool_->RunOnEach([&](int64_t, int worker) {
        for (int64_t i = 0; i < count; ++i) {
          const tensor::PackedMatrix w{.layout = piece_, .data = Piece(worker, (at_ + i) % pieces_)};
          tile(TileOf(rows_, 0, rows_.rows, w, /*node=*/0, 0, kPanels, out_[worker].data(), piece_.n));
        }
      });
    });
    at_ += count;
    return seconds;
  }

  static constexpr int kMaxRows = 64;

 private:
  static constexpr int kPanels = 16;      // panels of a task
  static constexpr int kPiecesEach = 32;  // pieces for one row: half a millisecond and more
  static constexpr int kMinPieces = 4;

  Stream(const KernelTable& table, PackedFormat format, runtime::ThreadPool& pool)
      : table_(&table), pool_(&pool), piece_(PackedLayout::Of(format, 1, 1)) {}
  std::byte* Piece(int worker, int64_t i) const {
    return weights_.data() + (worker * pieces_ + i) * piece_.total_bytes;
  }

  const KernelTable* table_;
  runtime::ThreadPool* pool_;
  PackedLayout piece_;
  int64_t pieces_ = 0, at_ = 0;
  runtime::Buffer weights_;
  runtime::Arena scratch_;
  QuantizedActivations rows_;
  std::vector<std::vector<float>> out_;  // [workers]
};

// Reports progress between measurements; fails if the user cancels.
using CancelCheck = std::function<Status()>;

// Row counts at which tiles and vectors are compared; a crossover is one of them or 0.
constexpr int kRowSteps[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};

// Moves the crossover from its default, step by step, as long as the other kernel wins the step.
StatusOr<TuningFinding> TuneCrossover(const KernelTable& table, PackedFormat format,
                                      runtime::ThreadPool& pool, const CancelCheck& check_cancelled) {
  const KernelTable::Gemm& gemm = table.gemm[static_cast<int>(format)];
  TuningFinding finding{.what = "minimum rows for tiles, " + tensor::PackedFormatName(format),
                        .before = gemm.few_below,
                        .after = gemm.few_below,
                        .gain = 0};
  ASSIGN_OR_RETURN(Stream stream, Stream::Create(table, format, pool));
  const auto tile = [&] { return stream.Seconds(gemm.tile); };
  const auto few = [&] { return stream.Seconds(gemm.few); };
  stream.SetRows(1);
  tile();  // page faults and clock ramp-up
  const auto* built_in = std::lower_bound(std::begin(kRowSteps), std::end(kRowSteps), gemm.few_below);
  double gain = 0;
  for (const int* step = built_in; step != std::end(kRowSteps); ++step) {  // up: rows that run on tiles now
    RETURN_IF_ERROR(check_cancelled());
    stream.SetRows(*step);
    if (!WinsTwice(tile, few, &gain)) break;
    finding.after = step + 1 != std::end(kRowSteps) ? step[1] : *step + 1;
    finding.gain = std::max(finding.gain, gain);
  }
  if (finding.taken()) return finding;
  for (const int* step = built_in; step != std::begin(kRowSteps);) {  // down: rows that run on vectors now
    RETURN_IF_ERROR(check_cancelled());
    stream.SetRows(*--step);
    if (!WinsTwice(few, tile, &gain)) break;
    finding.after = step == std::begin(kRowSteps) ? 0 : *step;
    finding.gain = std::max(finding.gain, gain);
  }
  return finding;
}

// A MoE layer of int8 experts, with few and with many rows.
class MoeRun {
 public:
  static StatusOr<MoeRun> Create(const KernelTable& table, runtime::ThreadPool& pool) {
    MoeRun m(table, pool);
    const PackedLayout up = PackedLayout::Of(PackedFormat::kI8, kIntermediate, kHidden);
    const PackedLayout down = PackedLayout::Of(PackedFormat::kI8, kHidden, kIntermediate);
    const int64_t stride = 2 * up.total_bytes + down.total_bytes;
    ASSIGN_OR_RETURN(m.weights_, runtime::Buffer::Allocate(stride * kExperts, true));
    std::byte* first = m.weights_.data();
    FillMatrix(up, first);
    FillMatrix(up, first + up.total_bytes);
    FillMatrix(down, first + 2 * up.total_bytes);
    pool.Run(kExperts - 1, [&](int64_t e, int) { std::memcpy(first + (e + 1) * stride, first, stride); });
    m.experts_ = {.gate = {.layout = up, .data = first},
                  .up = {.layout = up, .data = first + up.total_bytes},
                  .down = {.layout = down, .data = first + 2 * up.total_bytes},
                  .stride = stride,
                  .count = kExperts};
    m.x_ = RandomValues(size_t(kMaxRows) * kHidden);
    m.out_.resize(m.x_.size());
    m.route_weights_.assign(size_t(kMaxRows) * kTopK, 1.0F / kTopK);
    std::mt19937 rng(2);
    std::vector<int32_t> all(kExperts);
    for (int e = 0; e < kExperts; ++e) all[e] = e;
    for (int row = 0; row < kMaxRows; ++row) {
      std::shuffle(all.begin(), all.end(), rng);
      m.ids_.insert(m.ids_.end(), all.begin(), all.begin() + kTopK);
    }
    return m;
  }

  // Returns the product of the seconds over all row counts: a ratio of products weights them equally.
  double Seconds(const TileSizes& sizes) {
    table_.tile_sizes = sizes;
    double product = 1;
    for (const int rows : {1, 8, kMaxRows}) {
      const int repeats = std::max(16 / rows, 1);
      product *= SecondsOf([&] {
        for (int i = 0; i < repeats; ++i) Step(rows);
      });
    }
    return std::cbrt(product);
  }

 private:
  static constexpr int kMaxRows = 256;

  MoeRun(const KernelTable& table, runtime::ThreadPool& pool) : table_(table), pool_(&pool) {}
  void Step(int rows) {
    const ExecContext ctx{.kernels = &table_, .pool = pool_, .scratch = &scratch_};
    Moe(ctx, {.x = x_.data(),
              .x_stride = kHidden,
              .rows = rows,
              .hidden = kHidden,
              .intermediate = kIntermediate,
              .experts = experts_,
              .ids = ids_.data(),
              .weights = route_weights_.data(),
              .top_k = kTopK,
              .shared_gate = {},
              .shared_up = {},
              .shared_down = {},
              .out = out_.data(),
              .out_stride = kHidden});
  }

  KernelTable table_;
  runtime::ThreadPool* pool_;
  runtime::Arena scratch_;
  runtime::Buffer weights_;
  ExpertWeights experts_;
  std::vector<float> x_, out_, route_weights_;
  std::vector<int32_t> ids_;
};

// Halves or doubles one size of `sizes` as long as that is faster.
template <typename T>
StatusOr<TuningFinding> TuneSize(const char* what, T TileSizes::*size, const CancelCheck& check_cancelled,
                                 MoeRun& run, TileSizes* sizes) {
  const T before = sizes->*size;
  double ratio = 1;
  for (const bool up : {false, true}) {
    for (double gain = 0;;) {
      TileSizes next = *sizes;
      next.*size = up ? next.*size * 2 : next.*size / 2;
      if (!CheckSizes(next).ok()) break;
      RETURN_IF_ERROR(check_cancelled());
      if (!WinsTwice([&] { return run.Seconds(*sizes); }, [&] { return run.Seconds(next); }, &gain)) break;
      *sizes = next;
      ratio *= 1 + gain;
    }
    if (sizes->*size != before) break;
  }
  return TuningFinding{.what = what, .before = before, .after = sizes->*size, .gain = ratio - 1};
}

}  // namespace

StatusOr<TuningResult> Tune(const KernelTable& table, runtime::ThreadPool& pool,
                            const TuneProgress& progress) {
  constexpr int kSizes = 3;
  TuningResult result;
  result.tuning.tile_sizes = table.tile_sizes;
  int64_t done = 0, steps = kSizes;
  for (const KernelTable::Gemm& gemm : table.gemm) steps += gemm.few != nullptr;
  const auto reporting = [&](const std::string& what) -> CancelCheck {
    return [&, what] {
      return progress && !progress(done, steps, what) ? Cancelled("tuning was stopped") : OkStatus();
    };
  };
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    if (table.gemm[f].few == nullptr) continue;
    const auto format = static_cast<PackedFormat>(f);
    const CancelCheck check_cancelled = reporting(tensor::PackedFormatName(format));
    RETURN_IF_ERROR(check_cancelled());
    ASSIGN_OR_RETURN(TuningFinding finding, TuneCrossover(table, format, pool, check_cancelled));
    ++done;
    if (finding.taken()) result.tuning.few_below[f] = static_cast<int>(finding.after);
    result.findings.push_back(std::move(finding));
  }
  // Crossovers are tuned first: sizes are tuned with them.
  KernelTable tuned = table;
  RETURN_IF_ERROR(ApplyTuning(result.tuning, tuned));
  ASSIGN_OR_RETURN(MoeRun run, MoeRun::Create(tuned, pool));
  run.Seconds(table.tile_sizes);
  const auto tune = [&](const char* what, auto TileSizes::*size) -> Status {
    ASSIGN_OR_RETURN(TuningFinding finding,
                     TuneSize(what, size, reporting(what), run, &result.tuning.tile_sizes));
    result.findings.push_back(std::move(finding));
    ++done;
    return OkStatus();
  };
  RETURN_IF_ERROR(tune("panel bytes per task", &TileSizes::panel_bytes));
  RETURN_IF_ERROR(tune("row bytes per task", &TileSizes::row_bytes));
  RETURN_IF_ERROR(tune("tasks per thread", &TileSizes::tasks_per_thread));
  return result;
}

}  // namespace moesaic::kernels
