// `moesaic completion SHELL` prints a completion script that is generated from the declared flags.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "app/output.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

std::string WordsOf(const CLI::App& verb) {
  std::string flags;
  for (const CLI::Option* option : verb.get_options()) {
    for (const std::string& name : option->get_snames()) flags += fmt::format("-{} ", name);
    for (const std::string& name : option->get_lnames()) flags += fmt::format("--{} ", name);
  }
  if (!flags.empty()) flags.pop_back();
  return flags;
}

std::string BashScript(const CLI::App& root) {
  std::string verbs, cases;
  for (const CLI::App* verb : root.get_subcommands({})) {
    verbs += verb->get_name() + " ";
    cases += fmt::format("    {}) words=\"{}\" ;;\n", verb->get_name(), WordsOf(*verb));
  }
  return fmt::format(R"(_moesaic() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{}--help --version" -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{}  esac
  if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$word")); else COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _moesaic moesaic
)",
                     verbs, cases);
}

std::string FishScript(const CLI::App& root) {
  std::string script;
  for (const CLI::App* verb : root.get_subcommands({})) {
    script += fmt::format("complete -c moesaic -n __fish_use_subcommand -a {} -d '{}'\n", verb->get_name(),
                          verb->get_description());
    for (const CLI::Option* option : verb->get_options()) {
      for (const std::string& name : option->get_lnames()) {
        script += fmt::format("complete -c moesaic -n '__fish_seen_subcommand_from {}' -l {}\n",
                              verb->get_name(), name);
      }
    }
  }
  return script;
}

}  // namespace

void AddCompletion(Verb& root, VerbRun& run) {
  auto shell = std::make_shared<std::string>("bash");
  Verb verb = root.AddVerb("completion", "Print a completion script for your shell");
  verb.AddOption("SHELL", *shell, "Shell to print the script for").OneOf({"bash", "zsh", "fish"});
  verb.Footer(
      "Examples:\n"
      "  source <(moesaic completion bash)\n"
      "  moesaic completion fish > ~/.config/fish/completions/moesaic.fish");
  verb.OnParsed([shell, root, &run] {
    run = [shell, root] {
      std::string script = *shell == "fish" ? FishScript(*root.app()) : BashScript(*root.app());
      if (*shell == "zsh") script = "autoload -U +X bashcompinit && bashcompinit\n" + script;
      WriteOutput(script);
      return OkStatus();
    };
  });
}

}  // namespace moesaic::app
