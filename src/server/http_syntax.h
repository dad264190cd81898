// Lexical rules of HTTP that several parts of the transport share: RFC 9110, section 5.6.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moesaic::server {

/// A request that the transport refuses itself, with the status it answers and the reason.
struct HttpRefusal {
  int status = 0;
  std::string message;
};

/// A character of a token: a letter, a digit or one of !#$%&'*+-.^_`|~.
bool IsTokenChar(char c);
bool IsToken(std::string_view text);

/// A field value holds visible characters, obs-text (0x80 to 0xFF), spaces and tabs, but no other control.
bool IsFieldValue(std::string_view text);

/// The value of a hexadecimal digit, -1 for other characters.
int HexValue(char c);

/// Without spaces and tabs at either end.
std::string_view TrimBlanks(std::string_view text);

/// ASCII letters in lower case; other bytes are unchanged.
std::string Lower(std::string_view text);

/// An IPv4 address, or an IPv6 address without brackets.
bool IsIpAddress(std::string_view text);
bool IsIpv6Address(std::string_view text);

/// The members of a comma-separated list without blanks around them. Empty members are kept.
std::vector<std::string_view> ListMembers(std::string_view list);

}  // namespace moesaic::server
