// Parses calls whose arguments are enclosed by markers one by one. Private to this room.
#pragma once

#include <map>
#include <set>
#include <string>

#include "text/tool_calls.h"

namespace moesaic::text {

/// <section_open> <call_open>NAME<call_open_end>
/// [<param_open>KEY<param_open_end>[<value_open>]VALUE<param_close>] <call_close> <section_close>. Empty
/// markers are omitted.
struct XmlCallFormat {
  std::string_view section_open, call_open, call_open_end;
  std::string_view param_open, param_open_end, value_open, param_close;
  std::string_view call_close, section_close;
  bool typed_keys = false;  // KEY is followed by string="true" or "false" (DeepSeek-V3.2)
};

class XmlCallParser : public ToolCallParser {
 public:
  XmlCallParser(const XmlCallFormat& format, std::string_view tools_json);
  void Push(std::string_view piece, ToolDelta* delta) override;
  void Finish(ToolDelta* delta) override;

 private:
  enum class State { kText, kSection, kName, kCall, kKey, kValue };
  bool Step(ToolDelta* delta);  // returns false if it needs more text
  bool StepText(ToolDelta* delta);
  bool StepSection(ToolDelta* delta);
  bool StepName(ToolDelta* delta);
  bool StepCall(ToolDelta* delta);
  bool StepKey();
  bool StepValue(ToolDelta* delta);
  std::string ValueJson(const std::string& text) const;
  void Arguments(ToolDelta* delta, std::string text);
  void EndCall(ToolDelta* delta);

  const XmlCallFormat format_;
  // Types of parameters by tool; a parameter that is missing may have any.
  std::map<std::string, std::map<std::string, std::set<std::string>>> types_;
  State state_ = State::kText;
  std::string held_, raw_, name_, key_;
  bool is_string_ = false;  // from typed_keys
  int parameters_ = 0;
  bool called_ = false;
};

}  // namespace moesaic::text
