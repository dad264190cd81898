// Behaviour that every transport must have, as test cases that all ranks of a job run together.
#pragma once

#include <ostream>
#include <span>

#include "comm/transport/transport.h"

namespace moesaic::comm {

/// A case reports faults through GoogleTest. All ranks call it in the same order of cases; any number of
/// ranks.
struct ConformanceCase {
  const char* name;
  void (*run)(Transport& transport, Tag first_tag);  ///< uses the tags first_tag to first_tag + 999

  friend void PrintTo(const ConformanceCase& shown, std::ostream* to) { *to << shown.name; }
};

std::span<const ConformanceCase> ConformanceCases();

/// Returns a tag for the case of this index, so that no message of a case is matched by another one.
Tag ConformanceTag(size_t index);

}  // namespace moesaic::comm
