// Behaviour that every transport must have, as test cases that all ranks of a job run together.
#pragma once

#include <ostream>
#include <span>

#include "comm/transport/transport.h"

namespace moesaic::comm {

/// A case reports faults through GoogleTest. All ranks of the job, of any number, run the same cases in the
/// same order.
struct ConformanceCase {
  const char* name;
  void (*run)(Transport& transport, Tag first_tag);  ///< uses the tags first_tag to first_tag + 999

  friend void PrintTo(const ConformanceCase& shown, std::ostream* to) { *to << shown.name; }
};

/// Returns all cases. The test of a transport runs each of them.
std::span<const ConformanceCase> ConformanceCases();

/// Returns `first_tag` for the case of this index. No two cases share a tag.
Tag ConformanceTag(size_t index);

}  // namespace moesaic::comm
