// `moesaic proxy` has sub-verbs around the proxy in front of many engines.
#include "app/proxy_simulate.h"
#include "app/verb.h"

namespace moesaic::app {

void AddProxy(Verb& root, VerbRun& run) {
  const Verb proxy = root.AddVerb("proxy", "Schedule requests over many engines");
  AddProxySimulate(proxy, run);
  proxy.OnParsed([&run] {  // runs after the sub-verb's own function
    if (!run) FailUsage("needs a sub-verb: simulate");
  });
}

}  // namespace moesaic::app
