// Requests of operators to drain engines while the proxy runs.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::proxy {

class Gateway;

struct ControlAnswer {
  int status = 200;
  std::string body;  ///< JSON
};

/// Performs the query of a request: `drain=URL` lets an engine finish its requests and gives it no others,
/// `resume=URL` ends that. URL is that of the state page, and may be percent-encoded; the call counts for all
/// data-parallel ranks of the engine. The state stays over a reload, until the option `drain` of the engine
/// changes. Statuses: 200, 400 (no such query), 404 (no such engine).
ControlAnswer ControlEngines(Gateway& gateway, std::string_view query);

}  // namespace moesaic::proxy
