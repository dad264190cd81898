// Computes grammar masks beside the model: a mask costs up to milliseconds on the CPU, the step runs
// meanwhile.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"
#include "text/grammar.h"

namespace moesaic::engine {

/// One thread that takes one batch at a time. Start and Wait come from the engine thread, in turn.
class MaskWorker {
 public:
  struct Job {
    text::Grammar* grammar;           // nobody else's until Wait returns
    std::span<const int32_t> drafts;  // as far as they may follow, each gets a mask of what follows it
    std::span<uint32_t> masks;        // [1 + drafts.size(), ceil(vocab_size / 32)]
    int made = 0;                     // leading masks that are filled
    Status status = OkStatus();       // of the first
  };

  /// Starts the thread: here and not with the first batch, so that it isn't bound to the core that the
  /// engine's thread will be bound to.
  MaskWorker();
  ~MaskWorker();
  MaskWorker(const MaskWorker&) = delete;
  MaskWorker& operator=(const MaskWorker&) = delete;

  void Start(std::vector<Job> jobs);
  /// The jobs that Start took, done.
  std::vector<Job> Wait();

 private:
  void Loop();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Job> jobs_;
  bool working_ = false, stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace moesaic::engine
