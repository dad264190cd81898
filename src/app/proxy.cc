// `moesaic proxy` and the verbs below it.
#include "app/proxy_serve.h"
#include "app/proxy_simulate.h"
#include "app/verb.h"

namespace moesaic::app {

void AddProxy(Verb& root, VerbRun& run) {
  const Verb proxy = root.AddVerb("proxy", "Schedule requests over many engines");
  AddProxyServing(proxy, run);
  AddProxySimulate(proxy, run);
}

}  // namespace moesaic::app
