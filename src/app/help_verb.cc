// `moesaic help [VERB]` and `moesaic version` print the texts of --help and --version.
#include <fmt/format.h>

#include <string>

#include "app/output.h"
#include "app/usage.h"
#include "app/verb.h"

namespace moesaic::app {

void AddHelp(Verb& verbs, VerbRun& run) {
  CLI::App& root = *verbs.app();
  auto name = std::make_shared<std::string>();
  Verb verb = verbs.AddVerb("help", "Print the help of a verb, or the list of verbs");
  verb.AddOption("VERB", *name, "Verb to describe").Check([&root](std::string& word) {
    return FindVerb(root, word) == nullptr ? UnknownVerb(root, word) : "";
  });
  verb.Footer("Examples:\n  moesaic help\n  moesaic help serve");
  verb.OnParsed([name, &root, &run] {
    run = [name, &root] {
      const CLI::App* found = name->empty() ? nullptr : FindVerb(root, *name);
      WriteOutput(found != nullptr
                      ? found->help(root.get_name())
                      : root.get_formatter()->make_help(&root, root.get_name(), CLI::AppFormatMode::Normal));
      return OkStatus();
    };
  });
}

void AddVersion(Verb& root, VerbRun& run) {
  Verb verb = root.AddVerb("version", "Print the version");
  verb.Footer("Example:\n  moesaic version");  // otherwise CLI11 shows that of all verbs
  verb.OnParsed([&run] {
    run = [] {
      Print("moesaic {}\n", MOESAIC_VERSION);
      return OkStatus();
    };
  });
}

}  // namespace moesaic::app
