// Lexical rules of HTTP that several parts of the transport need: RFC 9110, section 5.6.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moesaic::server {

/// Status and reason of a request that the transport refuses.
struct HttpRefusal {
  int status = 0;
  std::string message;
};

/// Returns true for a character of a token: a letter, a digit or one of !#$%&'*+-.^_`|~.
bool IsTokenChar(char c);
bool IsToken(std::string_view text);

/// Returns true if `text` has only visible characters, obs-text (0x80 to 0xFF), spaces and tabs.
bool IsFieldValue(std::string_view text);

/// Removes spaces and tabs at both ends.
std::string_view TrimBlanks(std::string_view text);

/// Converts ASCII letters to lower case.
std::string Lower(std::string_view text);

/// Returns true for an IPv4 address, and for an IPv6 address without brackets.
bool IsIpAddress(std::string_view text);
bool IsIpv6Address(std::string_view text);

/// Splits a comma-separated list and trims its members. Keeps empty members.
std::vector<std::string_view> ListMembers(std::string_view list);

}  // namespace moesaic::server
