// Which rows, heads and segments of a step's attention are a piece of work, see attention.h.
#pragma once
#include <vector>

#include "gemm.h"
#include "kv.h"

namespace motet {

constexpr int QUERIES = 32;  // query vectors of one KV head that are computed together
constexpr int SEGMENT = 256;  // tokens
constexpr int64_t MAX_PARTIALS = 8 << 20;  // floats

struct AttentionItem {
  int32_t seq, row0, row1, head0, head1;  // rows of the step; KV heads
  int32_t segment0 = 0, segment1 = INT32_MAX;
  int64_t partials = -1;  // with one row and all heads: where the results of its segments are, in floats
};

// A row whose segments are several pieces of work.
struct SpreadRow {
  int32_t row, segments;
  int64_t partials;
};

// The attention of a step.
struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<SpreadRow> spread;
  int64_t partials = 0;  // floats: for each spread row [segments][heads][head_dim padded to 16, maximum, sum]
};

struct Attention {
  const Step* step;
  const float* qkv;  // [rows, ldq]: q after rope
  int64_t ldq;
  const void* kv;  // of this layer
  KvLayout layout;
  int64_t heads, window;
  float* partials;
};

INLINE int64_t attention_rows(int64_t heads_per_kv) { return std::max<int64_t>(1, QUERIES / heads_per_kv); }

INLINE int64_t padded_head(int64_t head_dim) { return round_up(head_dim, 16); }
INLINE int64_t segment_blocks(int64_t block_size) { return std::max<int64_t>(1, SEGMENT / block_size); }

inline void plan_attention(const Step& step, int64_t heads, const KvLayout& layout, int team, AttentionPlan& plan) {
  const int64_t kv_heads = layout.kv_heads, together = attention_rows(heads / kv_heads);
  plan.items.clear(), plan.spread.clear(), plan.partials = 0;
  const bool few = step.seqs < 4 * team;
  for (int32_t s = 0; s < step.seqs; ++s) {
    const int32_t begin = step.seq_starts[s], end = step.seq_starts[s + 1];
    if (end - begin == 1 && !few) {
      plan.items.push_back({s, begin, end, 0, (int32_t)kv_heads});
      continue;
    }
    if (end - begin == 1) {
      const int64_t tokens = segment_blocks(layout.block_size) * layout.block_size;
      const int32_t segments = (int32_t)((step.context_lens[s] + tokens - 1) / tokens);
      const int64_t partials = segments * heads * (padded_head(layout.head_dim) + 2);
      // members have as much to do where each has several segments or as many whole ones
      const int64_t whole = step.context_lens[s] / tokens * step.seqs;
      const bool even = segments * step.seqs >= std::min<int64_t>(2 * team, kv_heads + 1) || (whole && whole % team == 0);
      if (segments > 1 && even && plan.partials + partials <= MAX_PARTIALS) {
        const int32_t items = std::min<int32_t>(segments, (int32_t)((4 * team + step.seqs - 1) / step.seqs));
        for (int32_t i = 0; i < items; ++i)
          plan.items.push_back({s, begin, end, 0, (int32_t)kv_heads, segments * i / items, segments * (i + 1) / items, plan.partials});
        plan.spread.push_back({begin, segments, plan.partials});
        plan.partials += partials;
        continue;
      }
    }
    // a row alone reads memory most of the time, and longer pieces of it are read faster
    const int32_t each = end - begin == 1 ? (int32_t)std::max<int64_t>(1, kv_heads / team) : 1;
    for (int32_t row = end; row > begin; row -= std::min<int32_t>(together, row - begin))  // the longest contexts first
      for (int32_t head = 0; head < kv_heads; head += each)
        plan.items.push_back({s, std::max<int32_t>(begin, row - (int32_t)together), row, head, std::min(head + each, (int32_t)kv_heads)});
  }
}

INLINE int64_t first_position(const Step& step, const AttentionItem& item) {
  return step.context_lens[item.seq] - step.seq_starts[item.seq + 1] + item.row0;
}

}  // namespace motet
