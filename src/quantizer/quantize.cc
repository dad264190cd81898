#include "quantizer/quantize.h"

#define XXH_INLINE_ALL
#include <sys/stat.h>
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "quantizer/journal.h"
#include "quantizer/preflight.h"
#include "quantizer/shard_writer.h"
#include "quantizer/unit_reader.h"
#include "quantizer/unit_rounder.h"
#include "runtime/atomic_file.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// Threads' stacks, names of a unit's tensors, transfers under way.
constexpr int64_t kReserve = int64_t{12} << 20;

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void HashText(XXH3_state_t* state, const std::string& text) {
  XXH3_64bits_update(state, text.c_str(), text.size() + 1);
}

// What tells this checkpoint from another: its config, its tensors' names, types and shapes, its files' sizes
// and times of change. Not its weights, which would have to be read.
std::string FingerprintOf(const checkpoint::Checkpoint& source) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  HashText(&state, source.config().dump());
  for (const checkpoint::TensorEntry& entry : source.tensors()) {
    HashText(&state, entry.name);
    HashText(&state, tensor::DTypeName(entry.dtype));
    HashText(&state, nlohmann::json(entry.shape).dump());
  }
  for (const auto& file : source.files()) {
    struct stat info = {};
    if (stat(file->path().c_str(), &info) != 0) continue;
    HashText(&state, fs::path(file->path()).filename().string());
    HashText(&state, fmt::format("{} {}.{:09}", info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec));
  }
  return fmt::format("{:016x}", XXH3_64bits_digest(&state));
}

uint64_t ChecksumOf(std::span<const OutputExtent> extents) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (const OutputExtent& extent : extents) {
    XXH3_64bits_update(&state, extent.bytes.data(), extent.bytes.size());
  }
  return XXH3_64bits_digest(&state);
}

Status WriteText(const std::string& path, const std::string& text) {
  ASSIGN_OR_RETURN(const auto file, runtime::AtomicFile::Create(path));
  RETURN_IF_ERROR(file->Write(text.data(), text.size()));
  return file->Commit();
}

// Makes the folder where there is none; says whether it did.
StatusOr<bool> PrepareFolder(const std::string& folder) {
  std::error_code error;
  const bool made = fs::create_directories(folder, error);
  if (!fs::is_directory(folder)) {
    return IoError("{}: can't be made a folder: {}", folder,
                   error ? error.message() : "something else is there");
  }
  if (fs::exists(fs::path(folder) / kJournalFile) || fs::is_empty(folder, error)) return made;
  return InvalidArgument("{}: the folder is not empty, and there is no {} to go on from", folder,
                         kJournalFile);
}

Status CheckDisk(const std::string& folder, const OutputPlan& output) {
  int64_t missing = 0;
  for (const Shard& shard : output.shards) {
    std::error_code error;
    const uintmax_t there = fs::file_size(fs::path(folder) / shard.file, error);
    missing += shard.bytes - (error ? 0 : std::min<int64_t>(static_cast<int64_t>(there), shard.bytes));
  }
  const int64_t free = FreeBytes(folder);
  if (free < 0) return OkStatus();
  if (free >= missing) return OkStatus();
  return ResourceExhausted("{}: the disk has {} bytes free, {} more are to be written", folder, free,
                           missing);
}

class Run {
 public:
  Run(const checkpoint::Checkpoint& source, const QuantizeOptions& options, const QuantizePlan& plan,
      const kernels::ExecContext& ctx, const std::string& folder, Journal& journal, runtime::AsyncFiles& io,
      UnitReader& reader)
      : options_(options),
        plan_(plan),
        ctx_(ctx),
        journal_(journal),
        io_(io),
        reader_(reader),
        rounder_(source, plan.items, plan.output, options.output, ctx),
        writer_(folder, plan.output, options.direct, io),
        done_(plan.work.units.size(), false),
        left_(plan.output.shards.size(), 0) {}

  StatusOr<QuantizeReport> Go() {
    for (Slot& slot : slots_) {
      ASSIGN_OR_RETURN(slot.source,
                       runtime::Buffer::Allocate(static_cast<size_t>(plan_.work.source_bytes), false));
      ASSIGN_OR_RETURN(slot.output,
                       runtime::Buffer::Allocate(static_cast<size_t>(plan_.work.output_bytes), false));
    }
    report_.units = plan_.work.units.size();
    RETURN_IF_ERROR(CheckFinished());
    Status status = Work();
    // What is on its way to disk is journaled whatever went wrong, and nothing is left on its way to memory.
    for (Slot& slot : slots_) {
      if (const Status read = FinishRead(slot); status.ok()) status = read;
      if (const Status written = Settle(slot); status.ok()) status = written;
    }
    RETURN_IF_ERROR(status);
    report_.read_bytes += rounder_.reread_bytes();
    for (size_t shard = 0; shard < left_.size(); ++shard) {
      if (!finished_[shard]) RETURN_IF_ERROR(FinishShard(static_cast<int>(shard)));
    }
    return report_;
  }

 private:
  // Memory of a unit on its way: read to `source`, rounded to `output`, written from there.
  struct Slot {
    runtime::Buffer source, output;
    LoadedUnit loaded;
    bool reading = false;
    size_t writing = 0;  // the unit being written, when `extents` is not empty
    std::vector<OutputExtent> extents;
    runtime::AsyncFiles::Ticket ticket = 0;
    uint64_t checksum = 0;
  };

  std::span<const Piece> PiecesOf(size_t unit) const {
    const Unit& u = plan_.work.units[unit];
    return std::span(plan_.work.pieces).subspan(u.first, u.end - u.first);
  }
  int ShardOf(size_t unit) const { return plan_.output.items[PiecesOf(unit).front().item].shard; }

  // Reads the units of the journal back; those whose bytes are not what it says are done again.
  Status CheckFinished() {
    for (size_t unit = 0; unit < done_.size(); ++unit) ++left_[ShardOf(unit)];
    std::span<std::byte> buffer(slots_[0].output.data(), slots_[0].output.size());
    for (const Journal::Entry& entry : journal_.entries()) {
      if (entry.unit >= done_.size())
        return DataLoss("the journal names unit {} of {}", entry.unit, done_.size());
      if (done_[entry.unit]) continue;
      std::vector<OutputExtent> extents;
      for (const OutputRun& run : PlacesOf(plan_.output, PiecesOf(entry.unit)).runs) {
        extents.push_back({run.offset, run.In(buffer)});
      }
      StatusOr<runtime::AsyncFiles::Ticket> ticket = writer_.StartCheck(ShardOf(entry.unit), extents);
      bool right = ticket.ok();
      if (right) {
        RETURN_IF_ERROR(io_.Wait(*ticket));
        right = ChecksumOf(extents) == entry.checksum;
      } else if (ticket.status().code() != StatusCode::kNotFound) {
        return ticket.status();
      }
      if (!right) {
        ++report_.redone_units;
        continue;
      }
      ++report_.resumed_units;
      MarkDone(entry.unit);
      RETURN_IF_ERROR(Tell(true));
    }
    return OkStatus();
  }

  Status Work() {
    std::vector<size_t> todo;
    for (size_t unit = 0; unit < done_.size(); ++unit) {
      if (!done_[unit]) todo.push_back(unit);
    }
    for (size_t i = 0; i < std::min(todo.size(), slots_.size()); ++i)
      RETURN_IF_ERROR(StartRead(todo[i], slots_[i]));
    for (size_t i = 0; i < todo.size(); ++i) {
      Slot& slot = slots_[i % slots_.size()];
      Clock::time_point start = Clock::now();
      RETURN_IF_ERROR(FinishRead(slot));
      report_.read_wait_seconds += Since(start);
      RETURN_IF_ERROR(Settle(slot));
      start = Clock::now();
      ASSIGN_OR_RETURN(slot.extents, rounder_.Run(PiecesOf(todo[i]), slot.loaded,
                                                  {slot.output.data(), slot.output.size()}));
      slot.writing = todo[i];
      slot.checksum = ChecksumOf(slot.extents);
      report_.compute_seconds += Since(start);
      StatusOr<runtime::AsyncFiles::Ticket> ticket = writer_.Start(ShardOf(todo[i]), slot.extents);
      if (!ticket.ok()) {
        slot.extents.clear();
        return ticket.status();
      }
      slot.ticket = *ticket;
      reader_.Forget(slot.loaded);
      if (i + slots_.size() < todo.size()) RETURN_IF_ERROR(StartRead(todo[i + slots_.size()], slot));
      RETURN_IF_ERROR(Tell(false));
    }
    return OkStatus();
  }

  Status StartRead(size_t unit, Slot& slot) {
    ASSIGN_OR_RETURN(slot.loaded,
                     reader_.Start(plan_.items, PiecesOf(unit), {slot.source.data(), slot.source.size()}));
    slot.reading = true;
    report_.read_bytes += slot.loaded.read_bytes;
    return OkStatus();
  }

  Status FinishRead(Slot& slot) {
    return std::exchange(slot.reading, false) ? reader_.Wait(slot.loaded) : OkStatus();
  }

  // Waits until the slot's output is written, and journals it.
  Status Settle(Slot& slot) {
    if (slot.extents.empty()) return OkStatus();
    const std::vector<OutputExtent> extents = std::exchange(slot.extents, {});
    const Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(io_.Wait(slot.ticket));
    report_.write_wait_seconds += Since(start);
    const int shard = ShardOf(slot.writing);
    writer_.Flush(shard, extents);
    int64_t bytes = 0;
    for (const OutputExtent& extent : extents) bytes += static_cast<int64_t>(extent.bytes.size());
    report_.written_bytes += bytes;
    const ordered_json place = {
        {"file", plan_.output.shards[shard].file}, {"offset", extents.front().offset}, {"bytes", bytes}};
    RETURN_IF_ERROR(journal_.Append({slot.writing, slot.checksum}, place));
    MarkDone(slot.writing);
    return left_[shard] == 0 ? FinishShard(shard) : OkStatus();
  }

  Status FinishShard(int shard) {
    finished_[shard] = true;
    return writer_.Finish(shard,
                          plan_.output.Header(plan_.output.shards[shard], plan_.items, options_.output));
  }

  void MarkDone(size_t unit) {
    done_[unit] = true;
    done_bytes_ += plan_.work.units[unit].output_bytes;
    --left_[ShardOf(unit)];
  }

  Status Tell(bool checking) const {
    if (!options_.progress || options_.progress({done_bytes_, plan_.output.bytes, checking}))
      return OkStatus();
    return Cancelled("stopped; the same command goes on from here");
  }

  const QuantizeOptions& options_;
  const QuantizePlan& plan_;
  const kernels::ExecContext& ctx_;
  Journal& journal_;
  runtime::AsyncFiles& io_;
  UnitReader& reader_;
  UnitRounder rounder_;
  ShardWriter writer_;
  std::array<Slot, 2> slots_;
  std::vector<bool> done_;    // [units]
  std::vector<size_t> left_;  // [shards] units
  std::vector<bool> finished_ = std::vector<bool>(left_.size(), false);
  int64_t done_bytes_ = 0;
  QuantizeReport report_;
};

// The files beside the weights; config.json last, without which nothing opens the folder.
Status WriteTexts(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                  const QuantizePlan& plan, const std::string& folder) {
  for (const auto& [name, text] : options.texts)
    RETURN_IF_ERROR(WriteText(fmt::format("{}/{}", folder, name), text));
  if (plan.output.shards.size() > 1) {
    int64_t total = 0;
    std::string map;
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const OutputItem& item = plan.output.items[i];
      for (const OutputTensor& tensor : item.tensors) {
        total += tensor.stored.bytes();
        map += fmt::format("{}{}:\"{}\"", map.empty() ? "" : ",",
                           ordered_json(plan.items[i].name + tensor.stored.suffix).dump(),
                           plan.output.shards[item.shard].file);
      }
    }
    RETURN_IF_ERROR(
        WriteText(folder + "/model.safetensors.index.json",
                  fmt::format("{{\"metadata\":{{\"total_size\":{}}},\"weight_map\":{{{}}}}}\n", total, map)));
  }
  ordered_json config = ordered_json::parse(source.config().dump());
  config["quantization_config"] =
      QuantizationConfig(options.output.scheme, options.output.group_size, plan.output.ignore);
  return WriteText(folder + "/config.json", config.dump(2) + "\n");
}

// Plans the run and writes the journal's header, or goes by the one that is there.
StatusOr<QuantizePlan> Begin(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                             const std::string& folder, Journal& journal) {
  const bool begun = !journal.header().is_null();
  QuantizeOptions taken = options;
  if (begun) {
    const auto unit_bytes = journal.header().find("unit_bytes");
    if (unit_bytes == journal.header().end() || !unit_bytes->is_number_integer() || *unit_bytes < 1) {
      return DataLoss("{}/{}: \"unit_bytes\" is missing; empty the folder to begin anew", folder,
                      kJournalFile);
    }
    taken.unit_bytes = unit_bytes->get<int64_t>();
  }
  ASSIGN_OR_RETURN(QuantizePlan plan, PlanQuantize(source, taken));
  const ordered_json header = {{"moesaic_quantize", 1},
                               {"source", FingerprintOf(source)},
                               {"settings", options.output.Json()},
                               {"unit_bytes", plan.unit_bytes},
                               {"units", plan.work.units.size()},
                               {"output_bytes", plan.output.bytes}};
  if (begun) RETURN_IF_ERROR(CheckSameRun(journal, header));
  RETURN_IF_ERROR(CheckDisk(folder, plan.output));
  if (!begun) RETURN_IF_ERROR(journal.Begin(header));
  return plan;
}

}  // namespace

StatusOr<QuantizePlan> PlanQuantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options) {
  if (source.container() == "moesaic") {
    return InvalidArgument("{}: quantize the checkpoint that this file was packed from", source.path());
  }
  QuantizePlan plan;
  if (source.tensors().empty()) {
    ASSIGN_OR_RETURN(const models::DecoderSpec spec, models::SpecFromConfig(source.config(), source.path()));
    plan.items = ListItems(spec);
  } else {
    ASSIGN_OR_RETURN(plan.items, ListItems(source));
  }
  ASSIGN_OR_RETURN(plan.forms, FormsOf(source, plan.items));
  for (const SourceForm& form : plan.forms) plan.source_bytes += form.bytes;
  ASSIGN_OR_RETURN(plan.output, PlanOutput(plan.items, plan.forms, options.output));
  const Grid grid = options.output.grid();
  // Headers were read through the maps; what they take is given back before memory is counted.
  for (const auto& file : source.files()) file->Forget();
  // A run's memory differs a little from the next one's. One that goes on with the units of a run whose
  // memory was full must not fail over that, so it reserves less.
  const int64_t reserve = options.unit_bytes > 0 ? kReserve / 2 : kReserve;
  const int64_t taken = runtime::MeasureResidentMemory().now + reserve;
  plan.unit_bytes = options.unit_bytes;
  const int64_t left = options.memory - taken;
  if (plan.unit_bytes == 0) {
    const StatusOr<int64_t> fitting = FitUnits(plan.items, plan.forms, plan.output, grid, left);
    if (!fitting.ok()) {
      return ResourceExhausted("--memory {} is too little: the program itself takes {}; {}", options.memory,
                               taken, Message(fitting.status()));
    }
    plan.unit_bytes = *fitting;
  }
  plan.work = CutWork(plan.items, plan.forms, plan.output, grid, plan.unit_bytes);
  if (plan.work.bytes() > left) {
    return ResourceExhausted(
        "--memory {} is too little to go on with a run that was begun with more: {} are needed",
        options.memory, plan.work.bytes() + taken);
  }
  return plan;
}

StatusOr<QuantizeReport> Quantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                                  const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                  const std::string& folder) {
  const Clock::time_point start = Clock::now();
  if (source.tensors().empty()) return NotFound("{}: there are no weights here", source.path());
  ASSIGN_OR_RETURN(const bool made, PrepareFolder(folder));
  ASSIGN_OR_RETURN(const std::unique_ptr<Journal> journal, Journal::Open(folder));
  const StatusOr<QuantizePlan> planned = Begin(source, options, folder, *journal);
  if (!planned.ok()) {
    if (journal->header().is_null()) {  // nothing has begun: nothing stays
      RETURN_IF_ERROR(journal->Remove());
      std::error_code ignored;
      if (made) fs::remove(folder, ignored);
    }
    return planned.status();
  }
  const QuantizePlan& plan = *planned;
  ASSIGN_OR_RETURN(const std::unique_ptr<runtime::AsyncFiles> io,
                   runtime::AsyncFiles::Create(options.backend));
  ASSIGN_OR_RETURN(UnitReader reader, UnitReader::Create(source, options.direct, *io));
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  QuantizeReport report;
  {
    Run run(source, options, plan, ctx, folder, *journal, *io, reader);
    ASSIGN_OR_RETURN(report, run.Go());
  }
  RETURN_IF_ERROR(WriteTexts(source, options, plan, folder));
  RETURN_IF_ERROR(journal->Remove());
  report.source_bytes = plan.source_bytes;
  report.output_bytes = plan.output.bytes;
  for (const OutputItem& item : plan.output.items) {
    ++(item.form == Form::kRounded  ? report.rounded
       : item.form == Form::kCopied ? report.copied
                                    : report.converted);
  }
  report.io = io->backend();
  report.peak_bytes = runtime::MeasureResidentMemory().peak;
  report.seconds = Since(start);
  return report;
}

}  // namespace moesaic::quantizer
