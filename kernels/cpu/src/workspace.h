// Memory that a step needs and the next one finds again: grown to the largest step so far, never shrunk.
#pragma once
#include "attention.h"
#include "buffer.h"
#include "lora.h"

namespace motet {

struct Workspace {
  Buffer x, y, h, gated, s, scratch;
  int64_t scratch_each = 0;  // floats of one thread
  LoraPlan lora;
  std::vector<AttentionItem> attention;
};

}  // namespace motet
