// Attention over paged keys and values, split so that a row's result does not depend on scheduling.
//
// A row's context is divided into splits of 256 keys, or 1,024 where many heads share them, counted from the
// sequence's first token. The online softmax of each split starts from zero and continues from one
// micro-kernel call to the next; the splits are merged in order. This order of arithmetic depends on the row
// alone. The schedule only decides which worker computes which split and when. A tile of rows is normally one
// task, which processes all splits. If that task would be so long that other workers wait for it, the tile is
// several tasks of some splits each, and the last to finish merges.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/round.h"
#include "kernels/attention.h"
#include "kernels/kernel_table.h"
#include "kernels/task_queues.h"

namespace moesaic::kernels {
namespace {

static_assert(kBlockKeys == kKvBlockTokens);
constexpr int kCallTokens = kAttentionRuns * kKvBlockTokens;  // keys of one micro-kernel call

// Calls per split. One is long enough to make a split's fixed cost small: merging is one pass over value_dim
// per 256 keys, and its state is 1/100 of the keys and values of a GQA group. It is short enough that the 4
// KV heads of a model at a context of 1,024 still give 16 tasks. Where a KV head has many query heads (MLA),
// the state is as large as the keys, so that merging costs a tenth of the products. There are enough tasks
// then, because rows can be split too.
constexpr int kManyHeads = 64;
constexpr int SplitCalls(int group) { return group >= kManyHeads ? 4 : 1; }

// Rows of a task. 128 are the query heads of the largest MLA models, so that each latent block is read from
// memory once for all of them. Their queries and sums (128 x (576 + 512) floats = 557 KB) and the block (74
// KB in bfloat16) stay in an L2 cache of 1 MB.
constexpr int kTaskRows = kAttentionRows;
constexpr int kRowStep = 8;  // micro-kernels read whole groups of rows

// Reading a key and its value costs about as much as computing with it for this many rows.
constexpr int kReadCost = 8;
// A task larger than this fraction of a worker's share of the total is split.
constexpr int kTasksPerWorker = 4;

struct RowTile {  // query rows of one KV head: row / group is the token, row % group the head of the group
  const SequenceSlice* sequence;
  int kv_head;
  int first, rows;
  int splits;       // splits of the longest context, the last row's
  float* partials;  // [splits][PartialFloats(rows)] if split into several tasks, otherwise null
  int unfinished;   // unfinished tasks
};

struct Task {
  RowTile* tile;
  int split, end;  // splits [split, end)
  int64_t cost;
};

// Softmax state of some rows.
struct Partial {
  float* max;
  float* sum;
  float* acc;  // [rows][value_dim]
};

int64_t PartialFloats(int rows, int value_dim) { return int64_t{rows} * (value_dim + 2); }

Partial PartialAt(float* memory, int rows, int value_dim) {
  return {.max = memory + int64_t{rows} * value_dim,
          .sum = memory + int64_t{rows} * (value_dim + 1),
          .acc = memory};
}

class Plan {
 public:
  Plan(const ExecContext& ctx, const AttentionParams& params)
      : ctx_(ctx),
        p_(params),
        group_(params.heads / params.cache.heads),
        split_tokens_(SplitCalls(group_) * kCallTokens) {
    ChooseTileRows();
    MakeTiles();
    MakeTasks();
    worker_floats_ = 2 * query_floats() + 2 * PartialFloats(kTaskRows, p_.cache.value_dim);
    worker_memory_ = ctx.scratch->Take<float>(worker_floats_ * ctx.pool->size());
    loaded_ = ctx.scratch->Take<Loaded>(ctx.pool->size());
    std::fill(loaded_.begin(), loaded_.end(), Loaded{nullptr, false});
  }

  void Run() {
    TaskQueues queues(ctx_, std::ssize(tasks_));
    Order(&queues);
    queues.Run([&](int64_t i, int64_t next, int worker) {
      const Task& task = tasks_[i];
      const Task* after = next < 0 ? nullptr : &tasks_[next];
      float* memory = worker_memory_.data() + worker * worker_floats_;
      Loaded& loaded = loaded_[worker];
      if (loaded.tile != task.tile) {
        LoadQueries(*task.tile, memory);
        loaded = {task.tile, false};
      }
      if (task.tile->partials == nullptr) {
        RunWhole(task, after, memory, &loaded.packed);
      } else {
        RunPiece(task, after, memory, &loaded.packed);
      }
    });
  }

 private:
  struct Loaded {  // contents of a worker's memory
    const RowTile* tile;
    bool packed;  // a kernel has been called with these queries
  };

  int64_t query_floats() const { return int64_t{kTaskRows} * p_.cache.key_dim; }
  int Rows(const SequenceSlice& s) const { return s.count * group_; }
  int Heads(const SequenceSlice& s) const { return s.kv_head < 0 ? p_.cache.heads : 1; }
  // Returns the number of keys visible to row i of the tile.
  int Context(const RowTile& tile, int i) const {
    return tile.sequence->start + (tile.first + i) / group_ + 1;
  }
  int Context(const RowTile& tile) const { return Context(tile, tile.rows - 1); }  // for any row

  // Tiles with fewer rows read keys more often, but with fewer tasks than workers some workers idle.
  void ChooseTileRows() {
    const int64_t enough = int64_t{2} * ctx_.pool->size();
    for (tile_rows_ = kTaskRows; tile_rows_ > kRowStep; tile_rows_ /= 2) {
      int64_t tasks = 0;
      for (const SequenceSlice& s : p_.sequences) {
        if (s.count == 0) continue;
        const int splits = base::CeilDiv(s.start + s.count, split_tokens_);
        tasks += int64_t{Heads(s)} * base::CeilDiv(Rows(s), tile_rows_) * splits;
      }
      if (tasks >= enough) break;
    }
  }

  int64_t Cost(const RowTile& tile, int keys) const { return int64_t{keys} * (tile.rows + kReadCost); }

  void MakeTiles() {
    size_t count = 0;
    for (const SequenceSlice& s : p_.sequences)
      count += size_t(Heads(s)) * base::CeilDiv(Rows(s), tile_rows_);
    tiles_ = ctx_.scratch->Take<RowTile>(count);
    size_t n = 0;
    for (const SequenceSlice& s : p_.sequences) {
      const int from = std::max(s.kv_head, 0);
      for (int head = from; head < from + Heads(s); ++head) {
        for (int first = 0; first < Rows(s); first += tile_rows_) {
          const int rows = std::min(tile_rows_, Rows(s) - first);
          RowTile& tile = tiles_[n++];
          tile = {&s, head, first, rows, 0, nullptr, 1};
          tile.splits = base::CeilDiv(Context(tile), split_tokens_);
          total_cost_ += Cost(tile, Context(tile));
        }
      }
    }
  }

  void MakeTasks() {
    const int64_t most = total_cost_ / (int64_t{kTasksPerWorker} * ctx_.pool->size());
    int64_t count = 0;
    for (RowTile& tile : tiles_) {
      if (ctx_.pool->size() > 1) {
        const auto length =
            static_cast<int>(std::max<int64_t>(most / Cost(tile, split_tokens_), 1));  // in splits
        tile.unfinished = base::CeilDiv(tile.splits, length);
      }
      if (tile.unfinished > 1) {
        const int64_t floats = PartialFloats(tile.rows, p_.cache.value_dim);
        tile.partials = ctx_.scratch->Take<float>(floats * tile.splits).data();
      }
      count += tile.unfinished;
    }
    tasks_ = ctx_.scratch->Take<Task>(count);
    size_t n = 0;
    for (RowTile& tile : tiles_) {
      for (int i = 0; i < tile.unfinished; ++i) {
        const int split = tile.splits * i / tile.unfinished, end = tile.splits * (i + 1) / tile.unfinished;
        const int keys = std::min(Context(tile), end * split_tokens_) - split * split_tokens_;
        tasks_[n++] = {&tile, split, end, Cost(tile, keys)};
      }
    }
  }

  // Assigns to each worker adjacent tasks of about equal total cost: parts of a tile share its queries. The
  // longest of them run first, so that the last ones to finish are short.
  void Order(TaskQueues* queues) {
    size_t begin = 0, end = 0;
    int64_t cost = 0;  // cost of the tasks before `end`
    for (int i = 0; i < queues->count(); ++i, begin = end) {
      const int64_t share = total_cost_ * (i + 1) / queues->count();
      const bool last = i + 1 == queues->count();
      for (; end < tasks_.size() && (last || cost + tasks_[end].cost / 2 < share); ++end) {
        cost += tasks_[end].cost;
      }
      std::stable_sort(tasks_.begin() + begin, tasks_.begin() + end, [](const Task& a, const Task& b) {
        return std::bit_width(static_cast<uint64_t>(a.cost)) > std::bit_width(static_cast<uint64_t>(b.cost));
      });
      queues->Set(i, begin, end);
    }
  }

  // Copies the tile's queries, scaled, into memory [round_up(rows, kRowStep)][key_dim].
  void LoadQueries(const RowTile& tile, float* memory) const {
    const int dim = p_.cache.key_dim;
    for (int i = 0; i < tile.rows; ++i, memory += dim) {
      const float* q = p_.q + BatchRow(tile, i) * p_.q_stride + int64_t{Head(tile, i)} * dim;
      for (int d = 0; d < dim; ++d) memory[d] = q[d] * p_.scale;
    }
    const int idle = base::RoundUp(tile.rows, kRowStep) - tile.rows;
    std::fill_n(memory, int64_t{idle} * dim, 0.0F);
  }

  int64_t BatchRow(const RowTile& tile, int i) const {
    return tile.sequence->row + (tile.first + i) / group_;
  }
  int Head(const RowTile& tile, int i) const { return tile.kv_head * group_ + (tile.first + i) % group_; }

  void RunWhole(const Task& task, const Task* after, float* memory, bool* packed) const {
    const RowTile& tile = *task.tile;
    const int dim = p_.cache.value_dim;
    float* state = memory + 2 * query_floats();
    const Partial total = PartialAt(state, tile.rows, dim);
    const Partial part = PartialAt(state + PartialFloats(kTaskRows, dim), tile.rows, dim);
    RunSplit(task, after, 0, memory, packed, total);
    for (int split = 1; split < tile.splits; ++split) {
      RunSplit(task, after, split, memory, packed, part);
      Merge(tile, split, part, total);
    }
    WriteOutput(tile, total);
  }

  void RunPiece(const Task& task, const Task* after, float* memory, bool* packed) const {
    RowTile* tile = task.tile;
    const int dim = p_.cache.value_dim;
    const int64_t floats = PartialFloats(tile->rows, dim);
    for (int split = task.split; split < task.end; ++split) {
      RunSplit(task, after, split, memory, packed,
               PartialAt(tile->partials + split * floats, tile->rows, dim));
    }
    // Releases these splits' states to the worker that finishes last, or acquires the others' states if this
    // is the last.
    if (std::atomic_ref(tile->unfinished).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Partial total = PartialAt(tile->partials, tile->rows, dim);
    for (int s = 1; s < tile->splits; ++s) {
      Merge(*tile, s, PartialAt(tile->partials + s * floats, tile->rows, dim), total);
    }
    WriteOutput(*tile, total);
  }

  void RunSplit(const Task& task, const Task* after, int split, float* memory, bool* packed,
                const Partial& state) const {
    const RowTile& tile = *task.tile;
    const int first = split * split_tokens_;
    const int last = End(task);  // end of the whole task
    for (int key = first; key < std::min(last, first + split_tokens_); key += kCallTokens) {
      const int next = key + kCallTokens;
      const Call follows = next < last        ? Call{&tile, next, last}
                           : after != nullptr ? Call{after->tile, after->split * split_tokens_, End(*after)}
                                              : Call{&tile, last, last};
      RunCall({&tile, key, last}, follows, key > first, memory, packed, state);
    }
  }

  // Returns the end of the task's keys.
  int End(const Task& task) const { return std::min(Context(*task.tile), task.end * split_tokens_); }

  struct Call {  // a micro-kernel call: keys [first, first + kCallTokens), but none from `end` on
    const RowTile* tile;
    int first, end;
  };

  // Returns the offset from the KV head's keys to their scales.
  int64_t ScaleOffset(int kv_head) const {
    const int64_t line = int64_t{kv_head} * kKvBlockTokens;
    return p_.cache.scale_offset() + line * int64_t{sizeof(float)} - kv_head * p_.cache.head_stride();
  }

  // `follows`: the worker's most likely next call.
  void RunCall(const Call& now, const Call& follows, bool resume, float* memory, bool* packed,
               const Partial& state) const {
    const KvLayer& cache = p_.cache;
    const RowTile& tile = *now.tile;
    const int first = now.first;
    int visible[kTaskRows];
    for (int i = 0; i < tile.rows; ++i) visible[i] = std::clamp(Context(tile, i) - first, 0, kCallTokens);
    const int64_t key_bytes = tensor::BytesOf(cache.dtype, cache.key_dim);
    const int64_t value_bytes = tensor::BytesOf(cache.dtype, cache.value_dim);
    const int64_t scales = ScaleOffset(tile.kv_head);
    const int64_t more_scales = scales + int64_t{cache.heads} * kKvBlockTokens * int64_t{sizeof(float)};
    AttentionTile call = {
        .q = memory,
        .q_stride = cache.key_dim,
        .packed_q = reinterpret_cast<std::byte*>(memory + query_floats()),
        .q_is_packed = std::exchange(*packed, true),
        .runs = {},
        .after = {},
        .key_stride = key_bytes,
        .value_offset = cache.value_offset(),
        .value_stride = cache.shared ? key_bytes : value_bytes,
        .kv_dtype = cache.dtype,
        .rows = tile.rows,
        .key_dim = cache.key_dim,
        .value_dim = cache.value_dim,
        .visible = visible,
        .max = state.max,
        .sum = state.sum,
        .acc = state.acc,
        .acc_stride = cache.value_dim,
        .resume = resume,
        .key_scales = scales,
        .rest_scales = more_scales,
        .value_scales = cache.shared ? scales : more_scales,
        .key_split = KeySplit(cache),
        .after_scales = ScaleOffset(follows.tile->kv_head) - scales,
    };
    FindRuns(now, call.runs);
    FindRuns(follows, call.after);
    ctx_.kernels->attention(call);
  }

  void FindRuns(const Call& call, const std::byte** runs) const {
    const int64_t keys = call.tile->kv_head * p_.cache.head_stride();
    for (int key = call.first; key < std::min(call.end, call.first + kCallTokens); key += kKvBlockTokens) {
      *runs++ = Block(*call.tile, key) + keys;
    }
  }

  const std::byte* Block(const RowTile& tile, int key) const {
    return p_.cache.base + tile.sequence->block_table[key / kKvBlockTokens] * p_.cache.block_stride;
  }

  // total += part, for the rows that see any key of the split.
  void Merge(const RowTile& tile, int split, const Partial& part, const Partial& total) const {
    const int dim = p_.cache.value_dim;
    for (int i = 0; i < tile.rows; ++i) {
      if (Context(tile, i) <= split * split_tokens_) continue;
      const float max = std::max(total.max[i], part.max[i]);
      const float keep = std::exp(total.max[i] - max);
      const float add = std::exp(part.max[i] - max);
      total.max[i] = max;
      total.sum[i] = total.sum[i] * keep + part.sum[i] * add;
      ctx_.kernels->axpby(add, part.acc + int64_t{i} * dim, keep, dim, total.acc + int64_t{i} * dim);
    }
  }

  void WriteOutput(const RowTile& tile, const Partial& total) const {
    const int dim = p_.cache.value_dim;
    for (int i = 0; i < tile.rows; ++i) {
      float* out = p_.out + BatchRow(tile, i) * p_.out_stride + int64_t{Head(tile, i)} * dim;
      const float* acc = total.acc + int64_t{i} * dim;
      const float inverse = 1 / total.sum[i];
      for (int d = 0; d < dim; ++d) out[d] = acc[d] * inverse;
      if (p_.lse == nullptr) continue;
      p_.lse[BatchRow(tile, i) * p_.heads + Head(tile, i)] = total.max[i] + std::log(total.sum[i]);
    }
  }

  const ExecContext& ctx_;
  const AttentionParams& p_;
  const int group_;         // query heads of one KV head
  const int split_tokens_;  // keys of a split
  int tile_rows_ = kTaskRows;
  int64_t total_cost_ = 0;
  std::span<RowTile> tiles_;
  std::span<Task> tasks_;
  int64_t worker_floats_ = 0;  // queries, their packed form for a kernel, then two states
  std::span<float> worker_memory_;
  std::span<Loaded> loaded_;  // [workers]
};

}  // namespace

void Attention(const ExecContext& ctx, const AttentionParams& params) {
  const KvLayer& cache = params.cache;
  MOESAIC_CHECK(cache.dtype == tensor::DType::kF32 || cache.dtype == tensor::DType::kBF16 ||
                cache.dtype == tensor::DType::kI8);
  MOESAIC_CHECK_EQ(params.heads % cache.heads, 0);
  MOESAIC_CHECK_EQ(cache.key_dim % 8, 0);
  MOESAIC_CHECK_EQ(cache.value_dim % 8, 0);
  MOESAIC_CHECK(!cache.shared || (cache.heads == 1 && cache.value_dim <= cache.key_dim));
  const size_t mark = ctx.scratch->Mark();
  Plan(ctx, params).Run();
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
