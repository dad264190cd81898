<<<<<<< HEAD
// `moesaic proxy` and the verbs below it.
#include "app/proxy_serve.h"
=======
// `moesaic proxy` has sub-verbs around the proxy in front of many engines.
#include "app/proxy_simulate.h"
>>>>>>> 515128459ac927568e87ebece9f6419bae3b4b9d
#include "app/verb.h"

namespace moesaic::app {

void AddProxy(Verb& root, VerbRun& run) {
  const Verb proxy = root.AddVerb("proxy", "Schedule requests over many engines");
<<<<<<< HEAD
  AddProxyServing(proxy, run);
=======
  AddProxySimulate(proxy, run);
  proxy.OnParsed([&run] {  // runs after the sub-verb's own function
    if (!run) FailUsage("needs a sub-verb: simulate");
  });
>>>>>>> 515128459ac927568e87ebece9f6419bae3b4b9d
}

}  // namespace moesaic::app
