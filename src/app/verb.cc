#include "app/verb.h"

#include <exception>
#include <new>

namespace moesaic::app {

Status Guarded(const VerbRun& run) {
  try {
    return run();
  } catch (const std::bad_alloc& error) {
    return ResourceExhausted("out of memory: {}", error.what());
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace moesaic::app
