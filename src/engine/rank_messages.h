// Messages of any length between the driver and the other ranks of a model.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::engine {

/// Number of the driver: the rank whose process has the engine and answers requests.
inline constexpr int kDriverRank = 0;

/// Size of the first part of a message. It begins with the length of the message; a second part follows if
/// the message is longer. So a receiver that knows this size need not know the length.
inline constexpr size_t kFirstPartBytes = 1024;

/// Tags of messages; groups of ranks use tags from parallel::kFirstGroupTag on.
enum class RankTag : uint32_t {
  kCommand = 0,
  kReply = 2,
  kLogits = 4,   ///< logits of a batch
  kHidden = 5,   ///< hidden states of a batch
  kFetched = 6,  ///< logits for kFetch; not kReply, because replies of batches in flight may come first
  kLoad = 8
};

/// First byte of a command of the driver.
enum class RankCommand : char {
  kCapacity = 'C',  ///< Computes the numbers of blocks that fit (CapacityQuestion).
  kSetup = 'S',     ///< Creates the cache (RankSetup).
  kBatch = 'B',     ///< Runs a serialized StepBatch.
  kFetch = 'L',     ///< Sends logits of rows of the last batch.
  kMove = 'M',      ///< Begins a move of experts (models::ExpertMoveOrder); has no reply.
  kDrop = 'D',      ///< Cancels the move; has no reply.
  kExclude = 'N',   ///< Continues without these ranks of the job; has no reply.
  kLoad = 'X',      ///< Sends the loads of its experts (models::ExpertLoad).
  kEnd = 'E'
};

/// Returns whether another rank that died or does not answer may be the cause of `status`, the error of a
/// transfer or an exchange.
bool IsOfPeer(const Status& status);

/// Sends a message. DeadlineExceeded: the receiver takes longer than `limit_s`. Unavailable: a rank of the
/// job has died, even if it is not `peer`; ReceiveMessage() returns the same errors.
Status SendMessage(comm::Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s);
/// The same, but other ranks than `peer` may be dead.
Status SendLastMessage(comm::Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s);
/// Receives a message. InvalidArgument: the length is more than 1 GiB.
StatusOr<std::string> ReceiveMessage(comm::Transport& job, int peer, RankTag tag, double limit_s);
/// Waits for the first part, at a low rate after a while, and then receives the message. Calls `poll`
/// meanwhile, whose error ends the wait. `first_limit_s` is the limit for the first part, and `limit_s` that
/// for the rest.
StatusOr<std::string> AwaitMessage(comm::Transport& job, int peer, RankTag tag,
                                   const std::function<Status()>& poll, double first_limit_s, double limit_s);
/// Waits for the reply of a rank that may still be loading its weights: some ranks take much longer than
/// others. The error of `check` ends the wait, and so does the death of a rank.
StatusOr<std::string> AwaitLoadedRank(comm::Transport& job, int peer, const std::function<Status()>& check,
                                      double limit_s);

/// Sends messages without waiting for their receivers, whose processes may be computing. One thread.
class MessageSender {
 public:
  /// Borrows the transport.
  explicit MessageSender(comm::Transport& job) : job_(job) {}
  ~MessageSender();  ///< cancels the sends that have not ended
  MessageSender(const MessageSender&) = delete;
  MessageSender& operator=(const MessageSender&) = delete;

  /// Starts to send the concatenation of `texts`, which is copied once, to all `peers`. Returns the first
  /// error of earlier sends that have ended, too.
  Status Start(std::span<const int> peers, RankTag tag, std::initializer_list<std::string_view> texts,
               size_t first_part_bytes = kFirstPartBytes);
  /// Starts to send values, which are copied, to a peer that calls ReceiveFloats.
  Status StartFloats(int peer, RankTag tag, std::span<const float> values);
  /// Waits until all sends have ended.
  Status Finish(double limit_s);

 private:
  struct Message {
    std::vector<std::byte> bytes;
    std::vector<comm::TransferId> sends;
  };
  Status Retire();
  Message& Add(size_t bytes);

  comm::Transport& job_;
  std::deque<Message> messages_;                // with sends that have not ended
  std::vector<std::vector<std::byte>> unused_;  // memory of earlier messages
};

/// A message that is received while the rank does other work.
class ExpectedMessage {
 public:
  /// Starts to receive the first part. Borrows the transport.
  static StatusOr<ExpectedMessage> Start(comm::Transport& job, int peer, RankTag tag,
                                         size_t first_part_bytes = kFirstPartBytes);
  ExpectedMessage(ExpectedMessage&& other) noexcept;
  ExpectedMessage& operator=(ExpectedMessage&&) = delete;
  ~ExpectedMessage();

  /// Waits for the message. Called once.
  StatusOr<std::string> Await(double limit_s);

 private:
  ExpectedMessage(comm::Transport& job, int peer, RankTag tag) : job_(&job), peer_(peer), tag_(tag) {}

  comm::Transport* job_;  // null: nothing is received
  int peer_;
  RankTag tag_;
  std::vector<std::byte> first_;
  comm::TransferId id_;
};

/// Receives values that StartFloats() sent. Both sides know their number.
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
    const size_t at = bytes_.size();
    bytes_.resize(at + count);
    if (count > 0) std::memcpy(bytes_.data() + at, data, count);
  }
  std::vector<char> bytes_;
};

/// Takes values from the front of a message. Values that are missing are zero or empty, and
/// Finish() fails.
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
