// `moesaic help [VERB]` and `moesaic version`: the same texts as --help and --version.
#include <fmt/format.h>

#include <string>

#include "app/output.h"
#include "app/usage.h"
#include "app/verb.h"

namespace moesaic::app {

void AddHelp(CLI::App& root, VerbRun& run) {
  auto name = std::make_shared<std::string>();
  CLI::App* verb = root.add_subcommand("help", "Print the help of a verb, or the list of verbs");
  verb->add_option("VERB", *name, "The verb")
      ->check(CLI::Validator(
          [&root](std::string& word) {
            return FindVerb(root, word) == nullptr ? UnknownVerb(root, word) : "";
          },
          ""));
  verb->footer("Examples:\n  moesaic help\n  moesaic help serve");
  verb->callback([name, &root, &run] {
    run = [name, &root] {
      const CLI::App* found = name->empty() ? nullptr : FindVerb(root, *name);
      WriteOutput(found != nullptr
                      ? found->help(root.get_name())
                      : root.get_formatter()->make_help(&root, root.get_name(), CLI::AppFormatMode::Normal));
      return OkStatus();
    };
  });
}

void AddVersion(CLI::App& root, VerbRun& run) {
  CLI::App* verb = root.add_subcommand("version", "Print the version");
  verb->callback([&run] {
    run = [] {
      Print("moesaic {}\n", MOESAIC_VERSION);
      return OkStatus();
    };
  });
}

}  // namespace moesaic::app
