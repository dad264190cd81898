// Messages of any length between the driver and the other ranks of a model.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::engine {

/// A message has a first part of fixed size, which holds the length, and a second part if it is longer. Ranks
/// that receive it need not know its length.
inline constexpr size_t kFirstPartBytes = 1024;

/// Tags of messages; groups of ranks use tags from parallel::kFirstGroupTag on.
enum class RankTag : uint32_t { kCommand = 0, kReply = 2, kLogits = 4, kHidden = 5 };

/// First byte of a command of the driver.
enum class RankCommand : char {
  kSetup = 'S',  ///< Creates the cache (RankSetup).
  kBatch = 'B',  ///< Runs a serialized StepBatch.
  kFetch = 'L',  ///< Sends logits of rows of the last batch.
  kMove = 'M',   ///< Begins a move of experts (models::ExpertMoveOrder); has no reply.
  kDrop = 'D',   ///< Gives the move up; has no reply.
  kLoad = 'X',   ///< Sends the loads of its experts (models::ExpertLoad).
  kEnd = 'E'
};

/// Sends a message; kDeadlineExceeded when the receiver takes longer than `limit_s`. Like ReceiveMessage, it
/// ends with Unavailable when any rank of the job has died.
Status SendMessage(comm::Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s);
/// The same, but other ranks than `peer` may be dead.
Status SendLastMessage(comm::Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s);
/// Receives one. InvalidArgument: the length is more than 1 GiB.
StatusOr<std::string> ReceiveMessage(comm::Transport& job, int peer, RankTag tag, double limit_s);
/// Waits without limit for the first part, at a low rate after a while, and then receives the message.
/// Cancelled when `stop`, which is polled, returns true.
StatusOr<std::string> AwaitMessage(comm::Transport& job, int peer, RankTag tag,
                                   const std::function<bool()>& stop, double limit_s);

/// Sends or receives values whose number both sides know.
Status SendFloats(comm::Transport& job, int peer, RankTag tag, std::span<const float> values, double limit_s);
Status ReceiveFloats(comm::Transport& job, int peer, RankTag tag, std::span<float> values, double limit_s);

/// Appends values to a message. All ranks run one binary: values are sent as they are in memory.
class MessageWriter {
 public:
  template <typename T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Append(&value, sizeof value);
  }
  template <typename T>
  void PutAll(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Put(static_cast<uint32_t>(values.size()));
    Append(values.data(), values.size() * sizeof(T));
  }
  void PutText(std::string_view text) {
    Put(static_cast<uint32_t>(text.size()));
    Append(text.data(), text.size());
  }
  std::string_view bytes() const { return {bytes_.data(), bytes_.size()}; }

 private:
  void Append(const void* data, size_t count) {
    const char* begin = static_cast<const char*>(data);
    bytes_.insert(bytes_.end(), begin, begin + count);
  }
  std::vector<char> bytes_;
};

/// Takes values from the front of a message; the first that is missing is a failure.
class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Get() {
    T value{};
    const std::string_view bytes = Take(sizeof value);
    if (bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  template <typename T>
  std::vector<T> GetAll() {
    const std::string_view bytes = Take(size_t{Get<uint32_t>()} * sizeof(T));
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  std::string_view GetText() { return Take(Get<uint32_t>()); }
  /// InvalidArgument: values are missing, or bytes are left.
  Status Finish() const;

 private:
  // The next bytes; none if fewer are left.
  std::string_view Take(size_t count);

  std::string_view bytes_;
  bool failed_ = false;
};

}  // namespace moesaic::engine
