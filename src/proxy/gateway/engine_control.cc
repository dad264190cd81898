#include "proxy/gateway/engine_control.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/percent.h"
#include "proxy/gateway/gateway.h"
#include "proxy/protocol/answer_stream.h"
#include "proxy/protocol/json_members.h"

namespace moesaic::proxy {
namespace {

ControlAnswer Refused(int status, const std::string& message) {
  return {.status = status, .body = ErrorBody(status, "invalid_request_error", message)};
}

}  // namespace

ControlAnswer ControlEngines(Gateway& gateway, std::string_view query) {
  const size_t equals = std::min(query.find('='), query.size());
  const std::string_view verb = query.substr(0, equals);
  const bool drain = verb == "drain";
  if ((!drain && verb != "resume") || equals + 1 >= query.size())
    return Refused(400, "the query must be drain=URL or resume=URL, with the URL of an engine");
  const std::string url = base::PercentDecoded(query.substr(equals + 1));
  int ranks = 0;
  for (const InstanceRecord& engine : gateway.state().Instances()) {
    if (engine.config.url != url || engine.state == InstanceState::kAbandoned) continue;
    // An engine that is being added gets its state from its configuration.
    const InstanceState other = drain ? InstanceState::kEnabled : InstanceState::kDraining;
    const InstanceState wanted = drain ? InstanceState::kDraining : InstanceState::kEnabled;
    if (engine.state == other && !gateway.state().SetInstanceState(engine.id, wanted).ok()) continue;
    if (engine.state == other || engine.state == wanted) ++ranks;
  }
  if (ranks == 0)
    return Refused(404, fmt::format("no engine {} can be changed: it is unknown, or being added", url));
  gateway.transport().Log(false, fmt::format("engine {} {} by request", url, drain ? "drains" : "resumes"));
  gateway.ScheduleSoon();  // requests may wait for it
  return {.status = 200,
          .body = fmt::format("{{\"url\":{},\"state\":\"{}\",\"ranks\":{}}}\n", JsonQuoted(url),
                              drain ? "draining" : "enabled", ranks)};
}

}  // namespace moesaic::proxy
