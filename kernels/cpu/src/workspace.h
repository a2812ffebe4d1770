// Buffers that the steps of an engine reuse.
#pragma once
#include "assist.h"
#include "attention.h"
#include "buffer.h"

namespace motet {

struct Workspace {
  Buffer x, y, h, gated, rounded, s, scratch, partials;
  int64_t scratch_each = 0;  // floats of one thread
  LoraPlan lora;
  AssistStep assist;
  AttentionPlan attention;
};

}  // namespace motet
