// Parses calls with JSON arguments. Private to this room.
#pragma once

#include <string>

#include "text/json_scan.h"
#include "text/tool_calls.h"

namespace moesaic::text {

struct JsonCallFormat {
  std::string_view section_open, call_open;
  std::string_view
      arguments_open;  // follows the header; empty: the call is one object with name and arguments
  std::string_view call_close, section_close;
  bool starts_bare = false;               // the output may begin with the object, without a marker
  std::string_view arguments_close = "";  // precedes call_close; may be missing
};

class JsonCallParser : public ToolCallParser {
 public:
  explicit JsonCallParser(const JsonCallFormat& format);
  void Push(std::string_view piece, ToolDelta* delta) override;
  void Finish(ToolDelta* delta) override;

 private:
  enum class State { kStart, kText, kSection, kHeader, kArguments, kObject, kClose };
  bool Step(ToolDelta* delta);  // returns false if it needs more text
  bool StepStart();
  bool StepText(ToolDelta* delta);
  bool StepSection(ToolDelta* delta);
  bool StepHeader(ToolDelta* delta);
  bool StepArguments(ToolDelta* delta);
  bool StepObject(ToolDelta* delta);
  bool StepClose(ToolDelta* delta);
  bool StepSectionClose(ToolDelta* delta);
  bool ClosesHere(size_t at, bool* waits) const;
  void Emit(ToolDelta* delta, std::string name, std::string id, std::string arguments);

  const JsonCallFormat format_;
  State state_;
  std::string held_;
  std::string raw_;  // text of the current call, emitted as content if it is not a call
  JsonValueScan arguments_;
  CallObjectScan object_;
  std::string space_;    // white space after the arguments so far, possibly not part of them
  bool fenced_ = false;  // arguments_close may still follow
  bool skips_ = false;   // the call contains something other than an object of arguments
  bool named_ = false;   // the current call has been announced
  bool argued_ = false;  // some of its arguments have been emitted
  bool called_ = false;  // a call has ended
};

}  // namespace moesaic::text
