// The files of the checkpoint that is written, at whose places units arrive in any order.
#pragma once

#include <string>
#include <vector>

#include "quantizer/format/output_plan.h"
#include "quantizer/io/unit_rounder.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {

/// A file's header is written last: until then it begins with zeros, which no reader takes for a checkpoint.
class ShardWriter {
 public:
  /// `direct`: whole blocks go past the page cache.
  ShardWriter(std::string folder, const OutputPlan& output, bool direct, runtime::AsyncFiles& io);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Starts to write runs of bytes, which must stay until the ticket was waited for. Makes the file at its
  /// full size when it is not there, so that a full disk shows now; one that is longer is cut.
  StatusOr<runtime::AsyncFiles::Ticket> Start(int shard, std::span<const OutputExtent> extents);
  /// Starts to read the same places, for a check of what an earlier run wrote. NotFound: the file is not
  /// there or too short.
  StatusOr<runtime::AsyncFiles::Ticket> StartCheck(int shard, std::span<const OutputExtent> extents);
  /// Asks the system to bring what was written to disk.
  void Flush(int shard, std::span<const OutputExtent> extents) const;
  /// Writes the header, brings the file to disk and closes it.
  Status Finish(int shard, const std::string& header);

 private:
  struct File {
    std::string path;
    int fd = -1;         // -1: closed
    int direct_fd = -1;  // for whole blocks
  };
  Status OpenFile(int shard);
  static void Close(File& file);

  std::string folder_;
  const OutputPlan& output_;
  runtime::AsyncFiles& io_;
  bool direct_;
  std::vector<File> files_;  // [shards]
};

}  // namespace moesaic::quantizer
