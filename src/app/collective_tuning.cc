#include "app/collective_tuning.h"

#include <utility>

#include "app/input.h"
#include "comm/collectives/planner.h"

namespace moesaic::app {

StatusOr<std::shared_ptr<const comm::TuningTable>> ReadCollectiveTuning(const std::string& path) {
  if (path.empty()) return std::shared_ptr<const comm::TuningTable>();
  ASSIGN_OR_RETURN(const std::string text, ReadInput(path));
  ASSIGN_OR_RETURN(comm::TuningTable table, comm::TuningTable::Parse(text, InputName(path)));
  return std::make_shared<const comm::TuningTable>(std::move(table));
}

}  // namespace moesaic::app
