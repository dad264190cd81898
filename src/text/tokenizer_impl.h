// Implementation of Tokenizer, for the files of this room.
#pragma once

#include "text/bridge.h"
#include "text/tokenizer.h"

namespace moesaic::text {

struct Tokenizer::Impl {
  rust::Box<bridge::Tokenizer> bridge;
  SpecialTokens special;
};

}  // namespace moesaic::text
