#include "app/chat_completion.h"

#include <algorithm>
#include <filesystem>
#include <span>

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kCommands[] = {"/exit", "/help", "/load",  "/regenerate", "/reset",
                                          "/save", "/set",  "/stats", "/system"};
constexpr std::string_view kParameters[] = {
    "frequency_penalty", "max_tokens", "min_p", "presence_penalty", "repetition_penalty", "seed",
    "temperature",       "top_k",      "top_p"};

std::vector<std::string> StartingWith(std::string_view begin, std::span<const std::string_view> words) {
  std::vector<std::string> found;
  for (const std::string_view word : words) {
    if (word.starts_with(begin)) found.emplace_back(word);
  }
  return found;
}

std::vector<std::string> FilesStartingWith(std::string_view begin) {
  const size_t slash = begin.rfind('/');
  const std::string folder(slash == std::string_view::npos ? "" : begin.substr(0, slash + 1));
  const std::string_view name = begin.substr(folder.size());
  std::vector<std::string> found;
  std::error_code error;
  for (auto it = fs::directory_iterator(folder.empty() ? "." : folder, error);
       !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string file = it->path().filename().string();
    if (!file.starts_with(name) || (name.empty() && file.starts_with('.'))) continue;
    std::error_code ignored;
    found.push_back(folder + file + (it->is_directory(ignored) ? "/" : ""));
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace

Completion CompleteChat(std::string_view line) {
  if (!line.starts_with('/')) return {};
  const size_t space = line.find(' ');
  if (space == std::string_view::npos) return {.begin = 0, .candidates = StartingWith(line, kCommands)};
  const std::string_view command = line.substr(0, space);
  const size_t begin = std::min(line.find_first_not_of(' ', space), line.size());
  const std::string_view word = line.substr(begin);
  if (command == "/set" && word.find(' ') == std::string_view::npos) {
    return {.begin = begin, .candidates = StartingWith(word, kParameters)};
  }
  if (command == "/save" || command == "/load") {
    return {.begin = begin, .candidates = FilesStartingWith(word), .adds_space = false};
  }
  return {};
}

}  // namespace moesaic::app
