// UTF-8 and code points. wchar_t holds a code point on Linux.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::app {

void AppendUtf8(char32_t code, std::string* text);
std::string ToUtf8(std::wstring_view text);

/// Decodes one byte after another.
class Utf8Decoder {
 public:
  /// Returns true if `byte` completes a character, which is then in `code`. Invalid bytes give U+FFFD.
  bool Push(unsigned char byte, char32_t* code);

 private:
  char32_t code_ = 0;
  int missing_ = 0;
};

std::wstring FromUtf8(std::string_view text);

}  // namespace moesaic::app
