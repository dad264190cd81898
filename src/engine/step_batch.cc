#include "engine/step_batch.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "base/check.h"

namespace moesaic::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "batches are written as they are in memory");

constexpr uint32_t kMagic = 0x4253'4d6d;  // "mMSB"
constexpr uint32_t kVersion = 4;

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <typename T>
  void PutAll(const std::vector<T>& values) {
    Put(static_cast<uint64_t>(values.size()));
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads the bytes of a Writer. After the first failure all reads return zeros.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes), size_(bytes.size()) {}

  template <typename T>
  T Get() {
    T value = {};
    if (bytes_.size() < sizeof(value)) {
      Fail(fmt::format("the batch ends at byte {}", size_));
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof(value));
    bytes_ = bytes_.subspan(sizeof(value));
    return value;
  }
  bool GetBool(std::string_view name) {
    const auto value = Get<uint8_t>();
    if (value > 1) Fail(fmt::format("{} must be 0 or 1, found {}", name, value));
    return value == 1;
  }
  template <typename Enum>
  Enum GetEnum(std::string_view name, int values) {
    const auto value = Get<uint8_t>();
    if (value >= values) Fail(fmt::format("{} must be in [0, {}), found {}", name, values, value));
    return static_cast<Enum>(value);
  }
  // A count of entries that take at least `bytes_each`; 0 if that many cannot follow.
  size_t GetCount(std::string_view name, size_t bytes_each) {
    const auto count = Get<uint64_t>();
    if (count <= bytes_.size() / bytes_each) return static_cast<size_t>(count);
    Fail(fmt::format("{} has {} entries, but only {} bytes follow", name, count, bytes_.size()));
    return 0;
  }
  template <typename T>
  std::vector<T> GetAll(std::string_view name) {
    std::vector<T> values(GetCount(name, sizeof(T)));
    if (values.empty()) return values;
    std::memcpy(values.data(), bytes_.data(), values.size() * sizeof(T));
    bytes_ = bytes_.subspan(values.size() * sizeof(T));
    return values;
  }
  void Fail(std::string why) {
    if (failure_.empty()) failure_ = std::move(why);
    bytes_ = {};
  }
  Status Finish() {
    if (failure_.empty() && !bytes_.empty()) Fail(fmt::format("{} bytes follow the batch", bytes_.size()));
    return failure_.empty() ? OkStatus() : InvalidArgument("step batch: {}", failure_);
  }

 private:
  std::span<const std::byte> bytes_;
  const size_t size_;
  std::string failure_;
};

// Of any pipeline: some parts for each of up to 65536 stages.
constexpr int kMaxParts = 1 << 20;

constexpr size_t kOpBytes = 2 + 5 * sizeof(int32_t) + 2 * sizeof(uint64_t);
constexpr size_t kRowsBytes = sizeof(uint64_t) + 7 * sizeof(int32_t) + sizeof(float) + 1;
constexpr size_t kSparsityBytes = 4 * sizeof(int32_t);

void PutOps(const cache::KvOps& ops, Writer* writer) {
  writer->Put(static_cast<uint64_t>(ops.size()));
  for (const cache::KvOp& op : ops) {
    writer->Put(op.kind);
    writer->Put(op.area);
    for (const int32_t number : {op.block, op.from, op.slot, op.tokens, op.layer}) writer->Put(number);
    writer->Put(op.record);
    writer->Put(op.load);
  }
}

cache::KvOps GetOps(std::string_view name, Reader* reader) {
  cache::KvOps ops(reader->GetCount(name, kOpBytes));
  for (cache::KvOp& op : ops) {
    op.kind = reader->GetEnum<cache::KvOpKind>("the kind of an operation", cache::kKvOpKinds);
    op.area = reader->GetEnum<cache::KvArea>("the area of an operation", cache::kKvAreas);
    for (int32_t* number : {&op.block, &op.from, &op.slot, &op.tokens, &op.layer}) {
      *number = reader->Get<int32_t>();
    }
    op.record = reader->Get<uint64_t>();
    op.load = reader->Get<uint64_t>();
  }
  return ops;
}

Status CheckOp(const cache::KvOp& op, const StepLimits& limits) {
  if (op.block < 0 || op.block >= limits.blocks) {
    return InvalidArgument("step batch: an operation names a block outside [0, {}): {}", limits.blocks,
                           op.block);
  }
  const bool needs_disk = op.kind == cache::KvOpKind::kLoad || op.kind == cache::KvOpKind::kCancelLoad ||
                          op.kind == cache::KvOpKind::kStore || op.kind == cache::KvOpKind::kAttach;
  if (needs_disk && !limits.disk) {
    return InvalidArgument("step batch: an operation needs a disk tier, found {}", static_cast<int>(op.kind));
  }
  if (op.kind == cache::KvOpKind::kCopy && op.from == op.block) {
    return InvalidArgument("step batch: block {} is copied to itself", op.block);
  }
  if (op.from < 0 || op.from >= limits.blocks || op.tokens < 0 || op.tokens > tensor::kKvBlockTokens) {
    return InvalidArgument("step batch: an operation copies {} tokens of block {}", op.tokens, op.from);
  }
  const int slots = op.area == cache::KvArea::kSwap ? limits.swap_slots : limits.warm_slots;
  const bool has_slot = op.kind == cache::KvOpKind::kSave || op.kind == cache::KvOpKind::kRestore;
  if (has_slot && (op.slot < 0 || op.slot >= slots)) {
    return InvalidArgument("step batch: an operation names a slot outside [0, {}): {}", slots, op.slot);
  }
  if (op.layer < 0 || op.layer >= limits.layers) {
    return InvalidArgument("step batch: an operation names a layer outside [0, {}): {}", limits.layers,
                           op.layer);
  }
  return OkStatus();
}

// Whether [first, first + count) is inside [0, size).
bool IsInside(int32_t first, int32_t count, size_t size) {
  return first >= 0 && count >= 0 && static_cast<size_t>(first) + static_cast<size_t>(count) <= size;
}

Status CheckRows(const BatchRows& rows, const StepBatch& batch) {
  if (rows.count < 1 || !IsInside(rows.first_token, rows.count, batch.tokens.size())) {
    return InvalidArgument("step batch: rows [{}, {} + {}) are not among {} tokens", rows.first_token,
                           rows.first_token, rows.count, batch.tokens.size());
  }
  if (!IsInside(rows.first_block, rows.blocks, batch.block_tables.size())) {
    return InvalidArgument("step batch: a block table is not among {} entries", batch.block_tables.size());
  }
  const int64_t room = int64_t{rows.blocks} * tensor::kKvBlockTokens;
  if (rows.start < 0 || int64_t{rows.start} + rows.count > room) {
    return InvalidArgument("step batch: rows at {} + {} do not fit a table of {} blocks", rows.start,
                           rows.count, rows.blocks);
  }
  if (rows.first_logits < 0 || rows.first_logits > rows.count) {
    return InvalidArgument("step batch: logits from row {} of {} on", rows.first_logits, rows.count);
  }
  if (!(rows.needs.temperature >= 0)) {
    return InvalidArgument("step batch: a temperature must be at least 0, found {}", rows.needs.temperature);
  }
  if (rows.sparsity < -1 || rows.sparsity >= std::ssize(batch.sparsity)) {
    return InvalidArgument("step batch: sparsity setting {} of {}", rows.sparsity, batch.sparsity.size());
  }
  return OkStatus();
}

Status CheckSparsitySetting(const kernels::SparsitySettings& s) {
  const bool valid = s.budget_blocks >= kernels::kMinSparseBlocks && s.first_position >= 0 && s.reuse >= 1 &&
                     s.reuse <= tensor::kKvBlockTokens && s.audit_every >= 0;
  if (valid) return OkStatus();
  return InvalidArgument("step batch: a sparsity setting is out of range (budget {}, reuse {})",
                         s.budget_blocks, s.reuse);
}

}  // namespace

void StepBatch::AddRows(BatchRows added, std::span<const int32_t> row_tokens, std::span<const int32_t> drafts,
                        std::span<const int32_t> block_table, const kernels::SparsitySettings* setting) {
  added.first_token = static_cast<int32_t>(tokens.size());
  added.count = static_cast<int32_t>(row_tokens.size() + drafts.size());
  MOESAIC_CHECK_LT(0, added.count);
  tokens.insert(tokens.end(), row_tokens.begin(), row_tokens.end());
  tokens.insert(tokens.end(), drafts.begin(), drafts.end());
  added.first_block = static_cast<int32_t>(block_tables.size());
  added.blocks = tensor::KvBlocksFor(added.start + added.count);
  MOESAIC_CHECK_LE(added.blocks, static_cast<int>(block_table.size()));
  block_tables.insert(block_tables.end(), block_table.begin(), block_table.begin() + added.blocks);
  if (setting != nullptr) {
    added.sparsity = static_cast<int32_t>(sparsity.size());
    sparsity.push_back(*setting);
  }
  rows.push_back(added);
}

Status CheckBatch(const StepBatch& batch, const StepLimits& limits) {
  for (const cache::KvOps* ops : {&batch.ops_before, &batch.ops_after}) {
    for (const cache::KvOp& op : *ops) RETURN_IF_ERROR(CheckOp(op, limits));
  }
  if (batch.candidates < 0) {
    return InvalidArgument("step batch: candidates must be at least 0, found {}", batch.candidates);
  }
  for (const int32_t token : batch.tokens) {
    if (token < 0 || token >= limits.vocab_size) {
      return InvalidArgument("step batch: a token is outside the vocabulary [0, {}): {}", limits.vocab_size,
                             token);
    }
  }
  for (const int32_t block : batch.block_tables) {
    if (block < 0 || block >= limits.blocks) {
      return InvalidArgument("step batch: a block table names a block outside [0, {}): {}", limits.blocks,
                             block);
    }
  }
  // More parts than rows would make ranks compute empty parts without end.
  const models::JointStep& joint = batch.joint;
  if (joint.parts < 0 || joint.most_rows < 0 || (joint.number > 0 && joint.parts > kMaxParts)) {
    return InvalidArgument("step batch: joint step {} has {} parts of at most {} rows", joint.number,
                           joint.parts, joint.most_rows);
  }
  size_t next = 0;
  for (const BatchRows& rows : batch.rows) {
    RETURN_IF_ERROR(CheckRows(rows, batch));
    if (static_cast<size_t>(rows.first_token) != next) {
      return InvalidArgument("step batch: rows begin at token {}, found {}", next, rows.first_token);
    }
    next += static_cast<size_t>(rows.count);
  }
  if (next != batch.tokens.size()) {
    return InvalidArgument("step batch: {} rows have {} tokens", next, batch.tokens.size());
  }
  for (const kernels::SparsitySettings& setting : batch.sparsity)
    RETURN_IF_ERROR(CheckSparsitySetting(setting));
  const size_t hidden = batch.kind == StepKind::kMtp ? next * static_cast<size_t>(limits.hidden_size) : 0;
  if (batch.hidden.size() != hidden) {
    return InvalidArgument("step batch: {} hidden values are expected, found {}", hidden,
                           batch.hidden.size());
  }
  return OkStatus();
}

std::string Serialize(const StepBatch& batch) {
  Writer writer;
  writer.Put(kMagic);
  writer.Put(kVersion);
  writer.Put(batch.kind);
  for (const bool flag : {batch.want_hidden, batch.count_experts, batch.want_routes, batch.divides}) {
    writer.Put(static_cast<uint8_t>(flag));
  }
  writer.Put(batch.candidates);
  PutOps(batch.ops_before, &writer);
  PutOps(batch.ops_after, &writer);
  writer.PutAll(batch.ended);
  writer.PutAll(batch.tokens);
  writer.PutAll(batch.block_tables);
  writer.Put(static_cast<uint64_t>(batch.rows.size()));
  for (const BatchRows& rows : batch.rows) {
    writer.Put(rows.sequence);
    for (const int32_t number : {rows.first_token, rows.count, rows.start, rows.first_logits,
                                 rows.first_block, rows.blocks, rows.sparsity}) {
      writer.Put(number);
    }
    writer.Put(rows.needs.temperature);
    writer.Put(static_cast<uint8_t>(rows.needs.normalizer));
  }
  writer.Put(static_cast<uint64_t>(batch.sparsity.size()));
  for (const kernels::SparsitySettings& setting : batch.sparsity) {
    writer.Put(static_cast<int32_t>(setting.budget_blocks));
    writer.Put(static_cast<int32_t>(setting.first_position));
    writer.Put(static_cast<int32_t>(setting.reuse));
    writer.Put(static_cast<int32_t>(setting.audit_every));
  }
  writer.PutAll(batch.hidden);
  writer.Put(batch.joint.number);
  writer.Put(batch.joint.parts);
  writer.Put(batch.joint.most_rows);
  writer.Put(batch.joint.move);
  return writer.Take();
}

StatusOr<StepBatch> ParseStepBatch(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  if (reader.Get<uint32_t>() != kMagic) reader.Fail("the bytes are no step batch");
  if (const auto version = reader.Get<uint32_t>(); version != kVersion) {
    reader.Fail(fmt::format("this build reads version {}, found {}", kVersion, version));
  }
  StepBatch batch;
  batch.kind = reader.GetEnum<StepKind>("kind", 2);
  batch.want_hidden = reader.GetBool("want_hidden");
  batch.count_experts = reader.GetBool("count_experts");
  batch.want_routes = reader.GetBool("want_routes");
  batch.divides = reader.GetBool("divides");
  batch.candidates = reader.Get<int32_t>();
  batch.ops_before = GetOps("ops_before", &reader);
  batch.ops_after = GetOps("ops_after", &reader);
  batch.ended = reader.GetAll<uint64_t>("ended");
  batch.tokens = reader.GetAll<int32_t>("tokens");
  batch.block_tables = reader.GetAll<int32_t>("block_tables");
  batch.rows.resize(reader.GetCount("rows", kRowsBytes));
  for (BatchRows& rows : batch.rows) {
    rows.sequence = reader.Get<uint64_t>();
    for (int32_t* number : {&rows.first_token, &rows.count, &rows.start, &rows.first_logits,
                            &rows.first_block, &rows.blocks, &rows.sparsity}) {
      *number = reader.Get<int32_t>();
    }
    rows.needs.temperature = reader.Get<float>();
    rows.needs.normalizer = reader.GetBool("normalizer");
  }
  batch.sparsity.resize(reader.GetCount("sparsity", kSparsityBytes));
  for (kernels::SparsitySettings& setting : batch.sparsity) {
    setting.budget_blocks = reader.Get<int32_t>();
    setting.first_position = reader.Get<int32_t>();
    setting.reuse = reader.Get<int32_t>();
    setting.audit_every = reader.Get<int32_t>();
  }
  batch.hidden = reader.GetAll<float>("hidden");
  batch.joint.number = reader.Get<uint64_t>();
  batch.joint.parts = reader.Get<int32_t>();
  batch.joint.most_rows = reader.Get<int32_t>();
  batch.joint.move = reader.Get<uint64_t>();
  RETURN_IF_ERROR(reader.Finish());
  return batch;
}

}  // namespace moesaic::engine
