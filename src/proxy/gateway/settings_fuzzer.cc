// Fuzzes the directives of a pool. The input has one directive a line, words separated by spaces.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "proxy/gateway/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  moesaic::proxy::PoolSettings pool;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    std::vector<std::string_view> words;
    while (!line.empty()) {
      const std::string_view word = line.substr(0, line.find(' '));
      line.remove_prefix(std::min(word.size() + 1, line.size()));
      if (!word.empty()) words.push_back(word);
    }
    if (words.empty() || words[0] == "key_file") continue;  // opens files
    (void)moesaic::proxy::ApplyDirective(pool, words[0], std::span(words).subspan(1)).ok();
  }
  return 0;
}
