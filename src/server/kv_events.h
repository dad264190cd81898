// Publishes the blocks that enter and leave the KV cache over ZeroMQ, in vLLM's format. A router can then
// send a request to the server that has its prefix.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "cache/kv_events.h"

namespace moesaic::server {

struct KvPublisherOptions {
  std::string endpoint;          ///< PUB socket, e.g. "tcp://*:5557"
  std::string replay_endpoint;   ///< ROUTER socket for missed messages; empty: none
  std::string topic;             ///< first frame of every message
  std::string format = "array";  ///< "array", or "map" as vLLM has it since June 2026
  size_t kept = 10'000;          ///< messages that can be replayed
  size_t max_queued = 100'000;   ///< events that wait to be sent; beyond, a sequence number is left out
};

/// Messages are [topic, sequence number in 8 bytes, high first, msgpack]. The payload is the array
/// [time, events, 0]; an event is an array that begins with "BlockStored" or "BlockRemoved" and continues
/// with vLLM's fields in vLLM's order, or a map of these fields with the kind under "type". A client that
/// sends [number] to the replay socket gets every kept message from that one on, and a last one with number
/// -1.
class KvPublisher : public cache::KvObserver {
 public:
  /// Unavailable when an endpoint cannot be bound.
  static StatusOr<std::unique_ptr<KvPublisher>> Create(const KvPublisherOptions& options);
  /// Sends the waiting events and joins the thread.
  ~KvPublisher() override;

  void Stored(std::span<const uint64_t> hashes, std::optional<uint64_t> parent,
              std::span<const int32_t> tokens, std::string_view name_space) override;
  void Removed(std::span<const uint64_t> hashes) override;

  /// Returns the bound address, with the chosen port in place of "*".
  std::string endpoint() const;
  std::string replay_endpoint() const;

 private:
  class Impl;
  explicit KvPublisher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::server
