#include "app/utf8.h"

namespace moesaic::app {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

}  // namespace

void AppendUtf8(char32_t code, std::string* text) {
  const auto tail = [&](int shift) { text->push_back(static_cast<char>(0x80 | ((code >> shift) & 0x3F))); };
  if (code < 0x80) {
    text->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    text->push_back(static_cast<char>(0xC0 | (code >> 6)));
    tail(0);
  } else if (code < 0x10000) {
    text->push_back(static_cast<char>(0xE0 | (code >> 12)));
    tail(6);
    tail(0);
  } else {
    text->push_back(static_cast<char>(0xF0 | (code >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
}

std::string ToUtf8(std::wstring_view text) {
  std::string bytes;
  for (const wchar_t c : text) AppendUtf8(static_cast<char32_t>(c), &bytes);
  return bytes;
}

bool Utf8Decoder::Push(unsigned char byte, char32_t* code) {
  if (missing_ > 0 && (byte & 0xC0) == 0x80) {
    code_ = code_ << 6 | (byte & 0x3F);
    if (--missing_ > 0) return false;
    *code = code_ < 0x80 || code_ > 0x10FFFF || (code_ >= 0xD800 && code_ < 0xE000) ? kReplacement : code_;
    return true;
  }
  missing_ = 0;
  if (byte < 0x80) {
    *code = byte;
    return true;
  }
  if (byte >= 0xC2 && byte < 0xF5) {
    missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    code_ = byte & (0x3F >> missing_);
    return false;
  }
  *code = kReplacement;
  return true;
}

std::wstring FromUtf8(std::string_view text) {
  std::wstring wide;
  Utf8Decoder decoder;
  char32_t code = 0;
  for (const char c : text) {
    if (decoder.Push(static_cast<unsigned char>(c), &code)) wide.push_back(static_cast<wchar_t>(code));
  }
  return wide;
}

}  // namespace moesaic::app
