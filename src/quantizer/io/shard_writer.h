// Writes the files of the output checkpoint. Units may arrive in any order.
#pragma once

#include <string>
#include <vector>

#include "quantizer/format/output_plan.h"
#include "quantizer/io/unit_rounder.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {

/// A file's header is written last. Until then the file begins with zeros, which readers reject.
class ShardWriter {
 public:
  /// `direct`: whole blocks bypass the page cache.
  ShardWriter(std::string folder, const OutputPlan& output, bool direct, runtime::AsyncFiles& io);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Starts to write extents, whose bytes must live until the ticket has been waited for. Creates a missing
  /// file with its full size, so that a full disk is detected early. Truncates a file that is too long.
  StatusOr<runtime::AsyncFiles::Ticket> Start(int shard, std::span<const OutputExtent> extents);
  /// Starts to read the same extents, to check the output of an earlier run. Returns NotFound if the file is
  /// missing or too short.
  StatusOr<runtime::AsyncFiles::Ticket> StartCheck(int shard, std::span<const OutputExtent> extents);
  /// Starts write-back of the extents to disk.
  void Flush(int shard, std::span<const OutputExtent> extents) const;
  /// Flushes all files to disk that were written since the last call. No write may be in flight.
  Status Sync();
  /// Writes the header, flushes the file to disk and closes it.
  Status Finish(int shard, const std::string& header);

 private:
  struct File {
    std::string path;
    int fd = -1;           // -1: closed
    int direct_fd = -1;    // for whole blocks
    bool written = false;  // and not flushed since
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
