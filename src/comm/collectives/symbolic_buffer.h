// Symbolic contents of a buffer: for each element the input elements whose sum it is. Adjacent elements that
// are computed alike share one interval, so the cost does not depend on the number of elements.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace moesaic::comm {

/// One contribution to element x of a buffer: element x + delta of the input of `rank`.
struct Term {
  int rank = 0;
  int64_t delta = 0;
  auto operator<=>(const Term&) const = default;
};
using Terms = std::vector<Term>;  // a multiset, sorted

/// Elements from `begin` to `end`. Their contributions are `terms` with `shift` added to each delta.
struct SymbolicInterval {
  int64_t begin = 0, end = 0;
  std::shared_ptr<const Terms> terms;
  int64_t shift = 0;
};

/// Contents of a message: adjacent intervals whose positions count from the start of the message.
using SymbolicMessage = std::vector<SymbolicInterval>;

class SymbolicBuffer {
 public:
  /// Copies a range. Returns false when an element of it was never written; `*missing` is its position.
  bool Read(int64_t offset, int64_t count, SymbolicMessage* message, int64_t* missing) const;
  /// Overwrites the range at `offset` with a message.
  void Write(int64_t offset, const SymbolicMessage& message);
  /// Adds a message to the range at `offset`. Returns false when an element there was never written.
  bool Reduce(int64_t offset, const SymbolicMessage& message, int64_t* missing);

 private:
  struct Value {
    int64_t end = 0;
    std::shared_ptr<const Terms> terms;
    int64_t shift = 0;
  };
  // Makes `position` a border of intervals.
  void Split(int64_t position);

  std::map<int64_t, Value> intervals_;  // by begin; disjoint
};

/// Returns "rank 0 [+0], rank 2 [+0] x2" for messages.
std::string Describe(const Terms& terms, int64_t shift);

}  // namespace moesaic::comm
