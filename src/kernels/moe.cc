// A MoE layer as parallel loops over all experts together.
//
// Slots (token, j) are first sorted by expert, so that the rows of one expert are contiguous. The loops are:
//
//   prepare  quantizes each token's activations once
//   up       by (expert, row tile, panels): h = silu(x gate^T) * (x up^T); the last task of a row tile
//            quantizes its h
//   down     by (expert, row tile, panels): y = h down^T, a row for every slot
//   combine  by (token, columns): out = sum of w y over the slots by ascending expert, in any schedule
//
// Intermediate results should not go through memory. A worker therefore gathers an expert's rows into its own
// buffer. Where y would not stay in the caches, down and combine are one loop over columns: a task computes
// its columns of one expert after the other and adds them to the output while they are in the cache.
//
// With several column parts, down and combine run once for each of them.
//
// The shared expert is one more expert, which processes every token with weight 1.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "base/check.h"
#include "base/round.h"
#include "kernels/gemm_tiling.h"
#include "kernels/linear.h"
#include "kernels/moe.h"

namespace moesaic::kernels {
namespace {

// Columns of one combining task: 2 KiB of output, which stays in the L1 cache over all slots.
constexpr int kCombineColumns = 512;

// Sizes of the loop over columns. y stays in the L2 caches (2 MiB on processors with AMX) up to kCachedBytes
// per thread. A task's columns of the output take kColumnBytes, so that weights and h stream past them.
constexpr int64_t kCachedBytes = 1 << 20, kColumnBytes = 512 << 10;
constexpr int kColumnUnit = 4 * tensor::kPanelRows;  // panels that kernels for few rows process together
constexpr int kColumnTasks = 4;                      // minimum per thread
constexpr int kColumnRows = 96;  // rows of an expert processed together: whole tiles, 96 KiB with 256 columns

// One expert with rows in this step.
struct ExpertJob {
  tensor::PackedMatrix gate, up, down;
  tensor::PackedMatrix down_part = {};       // outputs of `down` in the current column part
  tensor::StaticScale up_scale, down_scale;  // static scales of its inputs
  int part;             // 0: routed rows, 1: rows of the shared expert, which are stored separately
  int first_row, rows;  // rows in its part
};

// Rows of an expert that a worker has gathered: the job's rows from `row` on.
struct alignas(64) Gathered {
  int job = -1, row = -1;
};

struct Task {
  int job, row, rows, panel, panels;  // rows count from the job's first
  std::atomic<int>* remaining;        // unfinished tasks of the same rows (up only)
};

class MoeLayer {
 public:
  MoeLayer(const ExecContext& ctx, const MoeParams& p) : ctx_(ctx), p_(p) {}

  void Run() {
    const size_t mark = ctx_.scratch->Mark();
    SortSlots();
    MakeJobs();
    PrepareTokens();
    RunUp();
    for (int part = 0; part < p_.parts.count; ++part) RunPart(p_.parts.Of(p_.hidden, part));
    ctx_.scratch->Rewind(mark);
  }

 private:
  void RunPart(ColumnParts::Range part) {
    if (part.count == 0) return;
    const size_t mark = ctx_.scratch->Mark();
    part_ = part;
    for (ExpertJob& job : jobs_) job.down_part = job.down.Rows(part.first, part.count);
    const int columns = TaskColumns();
    if (columns > 0) {
      RunDownByColumns(columns);
    } else {
      RunDown();
      Combine();
    }
    ctx_.scratch->Rewind(mark);
    p_.parts.Done(part.first, part.count);
  }

  template <typename T>
  std::span<T> Take(size_t count) {
    return ctx_.scratch->Take<T>(count);
  }
  bool HasShared() const { return !p_.shared_gate.empty(); }
  int TokenOf(int row) const { return slot_of_row_[row] / p_.top_k; }  // token of a routed row
  int64_t Slots() const { return int64_t{p_.rows} * p_.top_k; }

  // Counting sort: within an expert, rows are in the order of slots.
  void SortSlots() {
    const int experts = p_.experts.count;
    row_of_slot_ = Take<int32_t>(Slots());
    expert_rows_ = Take<int32_t>(experts + 1);
    std::fill(expert_rows_.begin(), expert_rows_.end(), 0);
    for (int64_t slot = 0; slot < Slots(); ++slot) {
      const int id = p_.ids[slot];
      MOESAIC_CHECK_LT(id, experts);
      if (id >= 0) ++expert_rows_[id + 1];
    }
    for (int e = 0; e < experts; ++e) expert_rows_[e + 1] += expert_rows_[e];
    const auto next = Take<int32_t>(experts);
    std::copy_n(expert_rows_.begin(), experts, next.begin());
    routed_rows_ = expert_rows_[experts];
    slot_of_row_ = Take<int32_t>(routed_rows_);
    for (int64_t slot = 0; slot < Slots(); ++slot) {
      const int id = p_.ids[slot];
      row_of_slot_[slot] = id >= 0 ? next[id]++ : -1;
      if (id >= 0) slot_of_row_[row_of_slot_[slot]] = static_cast<int32_t>(slot);
    }
  }

  void MakeJobs() {
    const ExpertWeights& w = p_.experts;
    jobs_ = Take<ExpertJob>(w.count + 1);
    int jobs = 0;
    if (routed_rows_ > 0) {
      if (w.input_scales == nullptr) {
        x_[0] = AllocateActivations(*ctx_.kernels, ctx_.scratch, w.gate.layout.format, p_.rows, p_.hidden);
      }
      h_[0] = AllocateActivations(*ctx_.kernels, ctx_.scratch, w.down.layout.format, routed_rows_,
                                  p_.intermediate);
    }
    for (int e = 0; e < w.count; ++e) {
      const int rows = expert_rows_[e + 1] - expert_rows_[e];
      if (rows == 0) continue;
      const bool has_scales = w.input_scales != nullptr;
      jobs_[jobs++] = {.gate = w.Of(w.gate, e),
                       .up = w.Of(w.up, e),
                       .down = w.Of(w.down, e),
                       .up_scale = has_scales ? w.input_scales[2 * e] : w.gate.input_scale,
                       .down_scale = has_scales ? w.input_scales[2 * e + 1] : w.down.input_scale,
                       .part = 0,
                       .first_row = expert_rows_[e],
                       .rows = rows};
    }
    if (HasShared()) {
      x_[1] =
          AllocateActivations(*ctx_.kernels, ctx_.scratch, p_.shared_gate.layout.format, p_.rows, p_.hidden);
      h_[1] = AllocateActivations(*ctx_.kernels, ctx_.scratch, p_.shared_down.layout.format, p_.rows,
                                  p_.shared_intermediate);
      jobs_[jobs++] = {.gate = p_.shared_gate,
                       .up = p_.shared_up,
                       .down = p_.shared_down,
                       .up_scale = p_.shared_gate.input_scale,
                       .down_scale = p_.shared_down.input_scale,
                       .part = 1,
                       .first_row = 0,
                       .rows = p_.rows};
    }
    jobs_ = jobs_.first(jobs);
  }

  void PrepareTokens() {
    auto prepare = [&](int64_t token, int) { PrepareToken(static_cast<int>(token)); };
    if (p_.rows == 1) {
      prepare(0, 0);  // a microsecond: less than a round trip through the pool
    } else {
      ctx_.pool->Run(p_.rows, prepare);
    }
  }

  // Experts with their own scales quantize the rows that they gather.
  void PrepareToken(int token) {
    const auto rows = row_of_slot_.subspan(int64_t{token} * p_.top_k, p_.top_k);
    std::sort(rows.begin(), rows.end());  // by ascending expert, the order of all sums
    const float* x = p_.x + token * p_.x_stride;
    const ExpertWeights& w = p_.experts;
    if (routed_rows_ > 0 && w.input_scales == nullptr) {
      QuantizeActivationRow(*ctx_.kernels, x, w.gate.input_scale, token, x_[0]);
    }
    if (HasShared()) QuantizeActivationRow(*ctx_.kernels, x, p_.shared_gate.input_scale, token, x_[1]);
  }

  // Tiles every job's product with `weights` into tasks, those of the first slice first. With `count_down`,
  // the tasks of a row tile share a counter.
  std::span<Task> TileJobs(tensor::PackedMatrix ExpertJob::*weights, bool count_down) {
    const auto tilings = Take<GemmTiling>(jobs_.size());
    int64_t count = 0, counters = 0;
    int slices = 1;
    widest_tile_ = 0;
    most_rows_ = 0;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      const ExpertJob& job = jobs_[i];
      tilings[i] = TileGemm(job.rows, job.*weights, ctx_.pool->size(), static_cast<int>(jobs_.size()),
                            ctx_.kernels->tile_sizes);
      if (job.part == 0) most_rows_ = std::max(most_rows_, tilings[i].row_tile);
      slices = std::max(slices, tilings[i].slices());
      count += tilings[i].tasks();
      counters += tilings[i].row_tiles();
      const int64_t tile = int64_t{tilings[i].row_tile} * tilings[i].panel_group * tensor::kPanelRows;
      widest_tile_ = std::max(widest_tile_, tile);
    }
    const auto tasks = Take<Task>(count);
    const auto remaining = Take<std::atomic<int>>(count_down ? counters : 0);
    task_ends_ = Take<int64_t>(slices);
    int64_t task = 0;
    for (int slice = 0; slice < slices; ++slice) {
      int64_t tile = 0;
      for (size_t i = 0; i < jobs_.size(); ++i) {
        const GemmTiling& tiling = tilings[i];
        const auto [begin, end] = tiling.Slice(slice);  // empty after the product's own slices
        for (int row = 0; row < tiling.rows; row += tiling.row_tile, ++tile) {
          std::atomic<int>* counter = count_down ? &remaining[tile] : nullptr;
          if (count_down && slice == 0) new (counter) std::atomic<int>(tiling.panel_groups());
          const int rows = std::min(tiling.row_tile, tiling.rows - row);
          for (int panel = begin; panel < end; panel += tiling.panel_group) {
            const int panels = std::min(tiling.panel_group, end - panel);
            tasks[task++] = {static_cast<int>(i), row, rows, panel, panels, counter};
          }
        }
      }
      task_ends_[slice] = task;
    }
    return tasks;
  }

  const KernelTable::Gemm& GemmOf(const tensor::PackedMatrix& w) const {
    return ctx_.kernels->gemm[static_cast<int>(w.layout.format)];
  }

  void RunUp() {
    const auto tasks = TileJobs(&ExpertJob::gate, /*count_down=*/true);
    // h in f32: routed rows, then shared ones, each with its own intermediate size.
    h_values_[0] = Take<float>(int64_t{routed_rows_} * p_.intermediate).data();
    h_values_[1] = Take<float>(HasShared() ? int64_t{p_.rows} * p_.shared_intermediate : 0).data();
    const auto scratch = Take<float>(2 * widest_tile_ * ctx_.pool->size());
    if (routed_rows_ > 0) {
      gathered_rows_ = AllocateActivations(*ctx_.kernels, ctx_.scratch, p_.experts.gate.layout.format,
                                           most_rows_ * ctx_.pool->size(), p_.hidden);
      gathered_ = Take<Gathered>(ctx_.pool->size());
      std::fill(gathered_.begin(), gathered_.end(), Gathered{});
    }
    ctx_.pool->RunByNode(task_ends_, [&](int64_t task, int worker) {
      UpTask(tasks[task], worker, scratch.data() + 2 * widest_tile_ * worker);
    });
  }

  // Returns the task's rows as contiguous rows: a single row in place, others copied to the worker's buffer,
  // which may hold them from the previous task. Stores the first row's number in `*x`.
  int Gather(const Task& task, int worker, const QuantizedActivations** x) {
    const ExpertJob& job = jobs_[task.job];
    const int row = job.first_row + task.row;
    *x = &x_[job.part];
    if (job.part == 1) return row;
    const bool rounded = p_.experts.input_scales == nullptr;
    if (rounded && task.rows == 1) return TokenOf(row);
    *x = &gathered_rows_;
    const int first = worker * most_rows_;
    Gathered& has = gathered_[worker];
    if (has.job == task.job && has.row == task.row) return first;
    has = {task.job, task.row};
    for (int r = 0; r < task.rows; ++r) {
      const int64_t token = TokenOf(row + r);
      if (rounded) {
        const QuantizedActivations& from = x_[0];
        std::memcpy(&gathered_rows_.data[(first + r) * from.stride], &from.data[token * from.stride],
                    from.stride);
        gathered_rows_.scales[first + r] = from.scales[token];
      } else {
        QuantizeActivationRow(*ctx_.kernels, p_.x + token * p_.x_stride, job.up_scale, first + r,
                              gathered_rows_);
      }
    }
    return first;
  }

  void UpTask(const Task& task, int worker, float* scratch) {
    const ExpertJob& job = jobs_[task.job];
    const QuantizedActivations* x = nullptr;
    const int first = Gather(task, worker, &x);
    const int row = job.first_row + task.row;
    const int64_t columns = task.panels * tensor::kPanelRows;
    float* gate = scratch;
    float* up = scratch + task.rows * columns;
    const int node = ctx_.pool->NodeOf(worker);
    const GemmTile tile =
        TileOf(*x, first, task.rows, job.gate, node, task.panel, task.panels, gate, columns);
    GemmOf(job.gate).Run(tile);
    GemmOf(job.up).Run(TileOf(*x, first, task.rows, job.up, node, task.panel, task.panels, up, columns));
    const int width = job.gate.n();
    float* h = h_values_[job.part] + int64_t{row} * width;
    for (int r = 0; r < task.rows; ++r) {
      float* to = h + int64_t{r} * width + task.panel * tensor::kPanelRows;
      ctx_.kernels->silu_mul(gate + r * columns, up + r * columns, tile.columns, to);
    }
    if (task.remaining->fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int r = 0; r < task.rows; ++r) {
      QuantizeActivationRow(*ctx_.kernels, h + int64_t{r} * width, job.down_scale, row + r, h_[job.part]);
    }
  }

  // Returns the columns of a task of RunDownByColumns. 0: y is small, there would be too few tasks for the
  // threads, or the tasks' reads of h would exceed y.
  int TaskColumns() const {
    const int threads = ctx_.pool->size();
    const int64_t rows = routed_rows_ + (HasShared() ? p_.rows : 0);
    const int64_t bytes = rows * part_.count * int64_t{sizeof(float)};
    if (bytes <= kCachedBytes * threads) return 0;
    const int64_t fit = kColumnBytes / (int64_t{p_.rows} * int64_t{sizeof(float)});
    const int64_t share = part_.count / (int64_t{threads} * kColumnTasks);
    const int64_t columns = std::min(std::max<int64_t>(fit, kColumnUnit), share) / kColumnUnit * kColumnUnit;
    if (columns == 0) return 0;
    const int64_t h_bytes = h_[0].rows * h_[0].stride + h_[1].rows * h_[1].stride;
    return h_bytes * (part_.count / columns) <= 2 * bytes ? static_cast<int>(columns) : 0;
  }

  // Returns the ends of the tasks that begin in each slice.
  std::span<const int64_t> ColumnEnds(int columns) {
    const tensor::PackedMatrix& down = jobs_.front().down_part;
    const int slice_panels = down.image_panels();
    const auto ends = Take<int64_t>(base::CeilDiv(down.layout.panels(), slice_panels));
    for (size_t slice = 0; slice < ends.size(); ++slice) {
      const auto outputs = static_cast<int64_t>(slice + 1) * slice_panels * tensor::kPanelRows;
      ends[slice] = base::CeilDiv(std::min<int64_t>(outputs, part_.count), int64_t{columns});
    }
    return ends;
  }

  void RunDownByColumns(int columns) {
    // An odd number of cache lines, as in AllocateActivations: rows of the output itself would share few
    // cache sets.
    const int64_t stride = columns + tensor::kPanelRows;
    const int64_t sums = p_.rows * stride, room = sums + kColumnRows * stride;
    const auto scratch = Take<float>(room * ctx_.pool->size());
    ctx_.pool->RunByNode(ColumnEnds(columns), [&](int64_t task, int worker) {
      const int first = static_cast<int>(task) * columns;
      const int count = std::min(columns, part_.count - first);
      float* out = scratch.data() + worker * room;
      std::fill_n(out, sums, 0.0F);
      const int node = ctx_.pool->NodeOf(worker);
      for (const ExpertJob& job : jobs_) AddColumns(job, node, first, count, out + sums, out, stride);
      for (int token = 0; token < p_.rows; ++token) {
        std::copy_n(out + token * stride, count, OutputOf(token) + first);
      }
    });
  }

  // Returns the current part of the token's output.
  float* OutputOf(int64_t token) const { return p_.out + token * p_.out_stride + part_.first; }

  // Adds the job's contribution to columns [first, first + count) of the part of its tokens to out [tokens,
  // stride]. y has room for kColumnRows rows of the same width.
  void AddColumns(const ExpertJob& job, int node, int first, int count, float* y, float* out,
                  int64_t stride) {
    const int begin = first / tensor::kPanelRows, end = begin + base::CeilDiv(count, tensor::kPanelRows);
    for (int done = 0; done < job.rows; done += kColumnRows) {
      const int row = job.first_row + done;
      const int rows = std::min(kColumnRows, job.rows - done);
      for (int panel = begin, panels = 0; panel < end; panel += panels) {
        const tensor::PackedMatrix down = job.down_part.At(panel, node);  // panels of one slice
        panels = std::min(end - panel, down.layout.panels());
        float* to = y + int64_t{panel - begin} * tensor::kPanelRows;
        GemmOf(down).Run(TileOf(h_[job.part], row, rows, down, node, 0, panels, to, stride));
      }
      for (int r = 0; r < rows; ++r) {
        const int token = job.part == 0 ? TokenOf(row + r) : row + r;
        const float weight = job.part == 0 ? p_.weights[slot_of_row_[row + r]] : 1;
        ctx_.kernels->axpy(weight, y + r * stride, count, out + token * stride);
      }
    }
  }

  void RunDown() {
    const auto tasks = TileJobs(&ExpertJob::down_part, /*count_down=*/false);
    y_[0] = Take<float>(int64_t{routed_rows_} * part_.count).data();
    y_[1] = Take<float>(HasShared() ? int64_t{p_.rows} * part_.count : 0).data();
    ctx_.pool->RunByNode(task_ends_, [&](int64_t i, int worker) {
      const Task& task = tasks[i];
      const ExpertJob& job = jobs_[task.job];
      const int row = job.first_row + task.row;
      float* y = y_[job.part] + int64_t{row} * part_.count + task.panel * tensor::kPanelRows;
      GemmOf(job.down).Run(TileOf(h_[job.part], row, task.rows, job.down_part, ctx_.pool->NodeOf(worker),
                                  task.panel, task.panels, y, part_.count));
    });
  }

  void Combine() {
    const int chunks = base::CeilDiv(part_.count, kCombineColumns);
    ctx_.pool->Run(int64_t{p_.rows} * chunks, [&](int64_t task, int) {
      const int64_t token = task / chunks;
      const int column = static_cast<int>(task % chunks) * kCombineColumns;
      const int columns = std::min(kCombineColumns, part_.count - column);
      float* out = OutputOf(token) + column;
      std::fill_n(out, columns, 0.0F);
      for (const int32_t row : row_of_slot_.subspan(token * p_.top_k, p_.top_k)) {
        if (row < 0) continue;
        const float weight = p_.weights[slot_of_row_[row]];
        ctx_.kernels->axpy(weight, y_[0] + int64_t{row} * part_.count + column, columns, out);
      }
      if (HasShared()) ctx_.kernels->axpy(1, y_[1] + token * part_.count + column, columns, out);
    });
  }

  const ExecContext& ctx_;
  const MoeParams& p_;
  std::span<int32_t> row_of_slot_;  // [tokens, top_k] by slot, later sorted per token; -1: skipped
  std::span<int32_t> expert_rows_;  // [experts + 1] first row of each expert
  int routed_rows_ = 0;
  std::span<int32_t> slot_of_row_;  // [routed rows]
  std::span<ExpertJob> jobs_;
  QuantizedActivations x_[2], h_[2];    // by part; x is indexed by token
  QuantizedActivations gathered_rows_;  // [workers, most_rows_]
  std::span<Gathered> gathered_;        // [workers]
  float* h_values_[2] = {};             // by part: [rows, intermediate]
  int64_t widest_tile_ = 0;             // values of the largest task's output
  int most_rows_ = 0;                   // maximum rows of a routed task
  std::span<int64_t> task_ends_;        // ends of each slice's tasks
  ColumnParts::Range part_;             // columns of the current column part
  float* y_[2] = {};                    // by part: [rows, part_.count]
};

void CheckParams(const MoeParams& p) {
  const ExpertWeights& w = p.experts;
  MOESAIC_CHECK(w.count == 0 || (w.gate.k() == p.hidden && w.gate.n() == p.intermediate));
  MOESAIC_CHECK(w.count == 0 || (w.up.k() == p.hidden && w.up.n() == p.intermediate));
  MOESAIC_CHECK(w.count == 0 || (w.down.k() == p.intermediate && w.down.n() == p.hidden));
  MOESAIC_CHECK(w.count == 0 || w.up.layout.format == w.gate.layout.format);
  MOESAIC_CHECK(p.shared_gate.empty() || p.shared_down.k() == p.shared_intermediate);
  MOESAIC_CHECK(p.shared_gate.empty() || p.shared_up.layout.format == p.shared_gate.layout.format);
}

}  // namespace

void Moe(const ExecContext& ctx, const MoeParams& params) {
  CheckParams(params);
  MOESAIC_CHECK_GE(params.parts.count, 1);
  if (params.rows > 0) MoeLayer(ctx, params).Run();
}

}  // namespace moesaic::kernels
