#include "models/packer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "base/check.h"
#include "checkpoint/stored_groups.h"

namespace moesaic::models {
namespace {

using checkpoint::Checkpoint;
using checkpoint::LinearSource;
using tensor::PackedFormat;
using tensor::PackedLayout;

// One matrix of one record and its source. Sources are looked up again for each matrix: a lookup is cheap,
// while a large model has 47,000 of them.
struct Matrix {
  const PartDecl* part;
  const PackedLayout* layout;
  LinearSource source;
  int64_t first_row;  // first row in the source
};

// Packs rows [first, first + rows) of a matrix to rows [to_row, ...) of `out`, which has layout `layout`.
struct Tile {
  const Matrix* matrix;
  int first, rows;
  PackedLayout layout;
  int to_row;
  std::byte* out;
};

// Buffers of one worker, reused for all tiles.
struct Scratch {
  std::vector<float> rows, transposed, scales;
  std::vector<int8_t> rows_i8;
  tensor::GroupRows groups;
  tensor::Fp8Rows fp8;
};

template <typename T>
std::span<T> AtLeast(std::vector<T>& values, size_t count) {
  if (values.size() < count) values.resize(count);
  return std::span(values).first(count);
}

Status CheckFinite(const Checkpoint& checkpoint, const Tile& tile, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return DataLoss("{}: the weight of {} must be finite, found {}", checkpoint.path(),
                    tile.matrix->source.module, values[i]);
  }
  return OkStatus();
}

Status PackTile(const Checkpoint& checkpoint, const Tile& tile, Scratch& scratch) {
  const PartDecl& part = *tile.matrix->part;
  const LinearSource& source = tile.matrix->source;
  const int64_t first = tile.matrix->first_row + tile.first;
  const int stored_k = part.transposed ? part.k : static_cast<int>(part.module_in);
  const size_t values = static_cast<size_t>(tile.rows) * stored_k;
  if (tile.layout.format == PackedFormat::kI8 && source.scheme == checkpoint::WeightScheme::kInt8Channel) {
    const std::span<int8_t> rows = AtLeast(scratch.rows_i8, values);
    const std::span<float> scales = AtLeast(scratch.scales, tile.rows);
    RETURN_IF_ERROR(checkpoint.ReadLinearRowsI8(source, first, tile.rows, rows, scales));
    RETURN_IF_ERROR(CheckFinite(checkpoint, tile, scales));
    for (int r = 0; r < tile.rows && part.has_slice(); ++r) {
      const int8_t* from = rows.data() + int64_t{r} * stored_k + part.first_column;
      std::copy_n(from, part.k, rows.data() + int64_t{r} * part.k);  // never copies forward
    }
    tensor::PackRowsI8(tile.layout, tile.to_row, tile.rows, rows.data(), scales.data(), tile.out);
    return OkStatus();
  }
  const bool stored = !part.transposed && checkpoint::StoredFormat(source) == tile.layout.format;
  if (stored && tile.layout.format == PackedFormat::kF8G128) {
    RETURN_IF_ERROR(checkpoint::ReadFp8Rows(source, first, tile.rows, scratch.fp8));
    if (part.has_slice()) scratch.fp8 = scratch.fp8.Columns(part.first_column, part.k);
    tensor::PackFp8Rows(tile.layout, tile.to_row, scratch.fp8, tile.out);
    return OkStatus();
  }
  if (stored) {
    RETURN_IF_ERROR(checkpoint::ReadGroupRows(source, first, tile.rows, scratch.groups));
    if (part.has_slice()) {
      scratch.groups = scratch.groups.Columns(tile.layout.format, part.first_column, part.k);
    }
    tensor::PackGroupRows(tile.layout, tile.to_row, scratch.groups, tile.out);
    return OkStatus();
  }
  // A tile of a transposed matrix consists of columns of the source, so all source rows are read for it.
  const int64_t from = part.transposed ? tile.matrix->first_row : first;
  const int64_t count = part.transposed ? part.k : tile.rows;
  std::span<float> rows = AtLeast(scratch.rows, static_cast<size_t>(count * part.module_in));
  RETURN_IF_ERROR(checkpoint.ReadLinearRows(source, from, count, rows));
  RETURN_IF_ERROR(CheckFinite(checkpoint, tile, rows));
  if (part.transposed) {
    const std::span<float> turned = AtLeast(scratch.transposed, values);
    for (int i = 0; i < tile.rows; ++i) {
      for (int j = 0; j < part.k; ++j) turned[i * part.k + j] = rows[j * part.module_in + tile.first + i];
    }
    rows = turned;
  }
  if (part.has_slice()) {
    tensor::PackColumns(tile.layout, tile.to_row, tile.rows, rows.data(), stored_k, part.first_column,
                        tile.out);
    return OkStatus();
  }
  tensor::PackRows(tile.layout, tile.to_row, tile.rows, rows.data(), tile.out);
  return OkStatus();
}

// Rows per tile, in whole panels: about 1 MiB of f32 values, which stay in a core's L2 cache between reading
// and packing.
int TileRows(int k) {
  const int rows = (1 << 18) / std::max(k, 1) / tensor::kPanelRows * tensor::kPanelRows;
  return std::clamp(rows, tensor::kPanelRows, 512);
}

class Packer {
 public:
  // `total` is the number of bytes reported as 100% progress.
  Packer(const Checkpoint& checkpoint, int64_t total, const PackProgress& progress, runtime::ThreadPool& pool)
      : checkpoint_(checkpoint), total_(total), progress_(progress), pool_(pool), scratch_(pool.size()) {}

  StatusOr<Matrix> Find(const RegionPlan& region, int record, size_t part) const {
    const PartDecl& decl = region.decl.parts[part];
    ASSIGN_OR_RETURN(LinearSource source,
                     checkpoint_.FindLinear(decl.Module(record), decl.module_out, decl.module_in));
    return Matrix{&decl, &region.layouts[part], std::move(source), decl.FirstRow(record)};
  }

  StatusOr<std::vector<float>> Vector(const RegionPlan& region) const {
    const RegionDecl& decl = region.decl;
    const int64_t shape[] = {decl.tensor_values};
    ASSIGN_OR_RETURN(std::vector<float> values, checkpoint_.ReadF32(decl.name, shape));
    values.erase(values.begin(), values.begin() + decl.first_value);
    values.resize(decl.values);
    return values;
  }

  Status Run(const std::vector<Tile>& tiles) {
    std::mutex mutex;
    Status failure;
    pool_.Run(static_cast<int64_t>(tiles.size()), [&](int64_t task, int worker) {
      Status status = PackTile(checkpoint_, tiles[task], scratch_[worker]);
      if (status.ok()) return;
      const std::lock_guard<std::mutex> lock(mutex);
      if (failure.ok()) failure = std::move(status);
    });
    return failure;
  }

  Status Advance(int64_t bytes) {
    done_ += bytes;
    if (progress_ && !progress_(done_, total_)) return Cancelled("packing was stopped");
    return OkStatus();
  }

 private:
  const Checkpoint& checkpoint_;
  int64_t total_;
  const PackProgress& progress_;
  runtime::ThreadPool& pool_;
  std::vector<Scratch> scratch_;  // [workers]
  int64_t done_ = 0;
};

void AddTiles(const Matrix& matrix, int first, int rows, const PackedLayout& layout, std::byte* out,
              std::vector<Tile>& tiles) {
  const int step = TileRows(matrix.part->k);
  for (int row = 0; row < rows; row += step) {
    tiles.push_back({&matrix, first + row, std::min(step, rows - row), layout, row, out});
  }
}

// Bytes packed by one parallel loop: enough tiles to keep all cores busy, few enough for frequent progress.
constexpr int64_t kBatchBytes = int64_t{64} << 20;

// Packs to a region of `image`'s layout, slice by slice.
Status PackRegion(Packer& packer, const RegionPlan& region, const RegionPlan& place,
                  const WeightImage& image) {
  for (int record = 0; record < region.decl.count;) {
    const int64_t fit = std::max<int64_t>(kBatchBytes / region.stride, 1);
    const auto end = static_cast<int>(std::min<int64_t>(region.decl.count, record + fit));
    const int first = record;
    std::vector<Matrix> matrices;
    matrices.reserve((end - first) * region.decl.parts.size());  // tiles hold pointers into it
    std::vector<Tile> tiles;
    for (; record < end; ++record) {
      for (size_t part = 0; part < region.decl.parts.size(); ++part) {
        ASSIGN_OR_RETURN(Matrix matrix, packer.Find(region, record, part));
        matrices.push_back(std::move(matrix));
        const PackedLayout& layout = place.layouts[part];
        std::byte* to = image.data() + place.start + record * place.stride + place.offsets[part];
        for (int row = 0; row < region.layouts[part].n; row += layout.n, to += image.stride()) {
          AddTiles(matrices.back(), row, std::min(layout.n, region.layouts[part].n - row), layout, to, tiles);
        }
      }
    }
    RETURN_IF_ERROR(packer.Run(tiles));
    RETURN_IF_ERROR(packer.Advance((end - first) * region.stride));
  }
  return OkStatus();
}

using Sink = std::function<Status(std::span<const std::byte>)>;

// Streams one matrix: panels in chunks of whole tiles, then the scales and sums that follow all panels, which
// are collected meanwhile.
Status StreamMatrix(Packer& packer, const Matrix& matrix, runtime::ThreadPool& pool, const Sink& sink) {
  const PackedLayout& layout = *matrix.layout;
  const int64_t panels_bytes = layout.panels() * layout.panel_bytes;
  std::vector<std::byte> tail(layout.total_bytes - panels_bytes);
  const int step = TileRows(layout.k) * pool.size() * 4;
  for (int first = 0; first < layout.n; first += step) {
    const int rows = std::min(step, layout.n - first);
    const PackedLayout chunk = PackedLayout::Of(layout.format, rows, layout.k);
    std::vector<std::byte> storage(chunk.total_bytes + 63);
    void* aligned = storage.data();
    size_t room = storage.size();
    auto* out = static_cast<std::byte*>(std::align(64, chunk.total_bytes, aligned, room));
    std::vector<Tile> tiles;
    AddTiles(matrix, first, rows, chunk, out, tiles);
    RETURN_IF_ERROR(packer.Run(tiles));
    const int64_t chunk_panels = chunk.panels() * chunk.panel_bytes;
    RETURN_IF_ERROR(sink({out, static_cast<size_t>(chunk_panels)}));
    const size_t bytes = static_cast<size_t>(chunk.n_padded) * sizeof(float);
    const int64_t at = first * static_cast<int64_t>(sizeof(float)) - panels_bytes;
    if (layout.scales_offset > 0) {
      std::memcpy(tail.data() + layout.scales_offset + at, out + chunk.scales_offset, bytes);
    }
    if (layout.sums_offset > 0) {
      std::memcpy(tail.data() + layout.sums_offset + at, out + chunk.sums_offset, bytes);
    }
    RETURN_IF_ERROR(packer.Advance(chunk_panels));
  }
  if (tail.empty()) return OkStatus();
  RETURN_IF_ERROR(sink(tail));
  return packer.Advance(static_cast<int64_t>(tail.size()));
}

}  // namespace

Status PackImage(const Checkpoint& checkpoint, const WeightPlan& plan, const PackProgress& progress,
                 runtime::ThreadPool& pool, const WeightImage& image) {
  Packer packer(checkpoint, image.total(), progress, pool);
  for (size_t i = 0; i < plan.regions.size(); ++i) {
    const RegionPlan &region = plan.regions[i], &place = image.layout().regions[i];
    if (!region.decl.is_vector()) {
      RETURN_IF_ERROR(PackRegion(packer, region, place, image));
      continue;
    }
    ASSIGN_OR_RETURN(const std::vector<float> values, packer.Vector(region));
    std::memcpy(image.data() + place.start, values.data(), region.bytes);
    RETURN_IF_ERROR(packer.Advance(region.placed_bytes()));
  }
  return image.Mirror(progress, pool);
}

Status PackStream(const Checkpoint& checkpoint, const WeightPlan& plan, const PackProgress& progress,
                  runtime::ThreadPool& pool,
                  const std::function<Status(size_t region, std::span<const std::byte>)>& sink) {
  Packer packer(checkpoint, plan.bytes, progress, pool);
  for (size_t i = 0; i < plan.regions.size(); ++i) {
    const RegionPlan& region = plan.regions[i];
    const Sink append = [&](std::span<const std::byte> bytes) { return sink(i, bytes); };
    if (region.decl.is_vector()) {
      ASSIGN_OR_RETURN(const std::vector<float> values, packer.Vector(region));
      RETURN_IF_ERROR(append(std::as_bytes(std::span(values))));
      RETURN_IF_ERROR(packer.Advance(region.placed_bytes()));
      continue;
    }
    for (int record = 0; record < region.decl.count; ++record) {
      for (size_t part = 0; part < region.decl.parts.size(); ++part) {
        ASSIGN_OR_RETURN(const Matrix matrix, packer.Find(region, record, part));
        RETURN_IF_ERROR(StreamMatrix(packer, matrix, pool, append));
      }
    }
  }
  return OkStatus();
}

}  // namespace moesaic::models
