// Pages for operators: Prometheus metrics, the state as JSON, a trace of recent requests, and the live page.
#pragma once

#include <string>

namespace moesaic::proxy {

class Gateway;

/// Prometheus text format. Counters are those of the shared memory: any worker answers for all.
std::string MetricsText(Gateway& gateway);
/// `check`: compares all counters with the requests, which holds the zone's lock for a while.
/// "master_since_ns" is the time of CLOCK_MONOTONIC at which the present master took the lease.
std::string StateJson(Gateway& gateway, bool check);
/// The requests that are in the proxy now, in Chrome's trace event format.
std::string TraceJson(Gateway& gateway);
/// A page without outside references that shows StateJson, which it fetches from its own address with
/// "?state".
std::string LivePage(Gateway& gateway);

}  // namespace moesaic::proxy
