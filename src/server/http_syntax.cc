#include "server/http_syntax.h"

#include <arpa/inet.h>

#include <algorithm>

namespace moesaic::server {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

}  // namespace

bool IsTokenChar(char c) {
  constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  return IsLetter(c) || IsDigit(c) || kMarks.find(c) != std::string_view::npos;
}

bool IsToken(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), IsTokenChar);
}

bool IsFieldValue(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return c == '\t' || (byte >= 0x20 && byte != 0x7F);
  });
}

std::string_view TrimBlanks(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return lower;
}

bool IsIpv6Address(std::string_view text) {
  in6_addr ignored;
  return inet_pton(AF_INET6, std::string(text).c_str(), &ignored) == 1;
}

bool IsIpAddress(std::string_view text) {
  in_addr ignored;
  return inet_pton(AF_INET, std::string(text).c_str(), &ignored) == 1 || IsIpv6Address(text);
}

std::vector<std::string_view> ListMembers(std::string_view list) {
  std::vector<std::string_view> members;
  for (size_t begin = 0;;) {
    const size_t comma = list.find(',', begin);
    members.push_back(TrimBlanks(list.substr(begin, comma - begin)));
    if (comma == std::string_view::npos) return members;
    begin = comma + 1;
  }
}

}  // namespace moesaic::server
