// Paged attention over the KV cache of one layer (kv.h), decode and chunked prefill alike.
//
// A piece of work is some rows of one sequence and some of its KV heads. It walks the sequence's blocks in order, at most
// 16 tokens at a time, with running maximum and sum per query. They start anew with every segment of 256 tokens, whose results are
// added up in order. So the segments of one long context can be computed at the same time, and a row's result depends on its
// position and context alone, not on its chunk, its neighbours or the thread. Memory beyond a row's context is never used.
#pragma once
#include <vector>

#include "attention_integers.h"
#include "attention_tiles.h"
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

// Floats of scratch that one thread needs.
INLINE int64_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t queries = std::max(heads, attention_rows(heads / kv_heads) * (heads / kv_heads));
  return queries * (3 * padded_head(head_dim) + CHUNK + 5) + 64;
}

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

// Memory that is prefetched at the pace at which other memory is read: `count` parts of `bytes` each, `step` bytes apart. Where a burst
// finds no line buffer free, it is dropped. A part is prefetched in WAYS places at a time.
template <int WAYS>
class Parts {
 public:
  Parts() = default;
  Parts(const void* from, int64_t bytes, int64_t count, int64_t step)
      : at_((const char*)from), end_(at_ + bytes / WAYS), bytes_(bytes / WAYS), count_(count), step_(step) {}
  __attribute__((always_inline)) void lines(int n) {
    for (int i = 0; i < n && at_ < end_; ++i) {
      prefetch(at_ + way_ * bytes_);
      if (WAYS == 1 || ++way_ == WAYS) at_ += 64, way_ = 0;
    }
    if (at_ >= end_ && count_ > 1) at_ = end_ - bytes_ + step_, end_ += step_, --count_;
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t bytes_ = 0, count_ = 0, step_ = 0;
  int way_ = 0;
};

// What is prefetched while keys or values are read.
#if MOTET_LEVEL == 1
template <class T>
using Soon = const Lead;
#else
template <class T>
using Soon = Parts<HAS_SCALES<T> ? 8 : 1>;
#endif

#if MOTET_LEVEL != 1
// scores[q][t] = queries[q] . keys[t] for Q queries and 4 tokens.
template <class T, int Q>
INLINE void scores4(const float* q, int64_t ldq, const T* k, int64_t ldk, int head_dim, Soon<T>& soon, float* scores) {
  vf acc[Q][4];
#pragma GCC unroll 4
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) acc[i][t] = zero();
  int d = 0;
  for (; d + W <= head_dim; d += W) {
    soon.lines(sizeof(T));
    vf keys[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) keys[t] = load(k + t * ldk + d);
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i) {
      const vf value = load(q + i * ldq + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[i][t] += value * keys[t];
    }
  }
  if (d < head_dim) {
    for (int t = 0; t < 4; ++t) {
      const vf key = load_n(k + t * ldk + d, head_dim - d);
      for (int i = 0; i < Q; ++i) acc[i][t] += load(q + i * ldq + d) * key;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Q; ++i) sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], scores + i * CHUNK);
}

template <class T, int Q>
INLINE void score_queries(const float* q, int64_t ldq, const T* k, int64_t ldk, int head_dim, int tokens, Soon<T>& soon, float* scores) {
  int t = 0;
  for (; t + 4 <= tokens; t += 4) scores4<T, Q>(q, ldq, k + t * ldk, ldk, head_dim, soon, scores + t);
  if (t < tokens) {  // missing tokens are replaced by the last one; their weights are not used
    const int last = tokens - t;
    for (int one = 0; one < last; ++one) {
      float same[Q * CHUNK];
      scores4<T, Q>(q, ldq, k + (t + one) * ldk, 0, head_dim, soon, same);
      for (int i = 0; i < Q; ++i) scores[i * CHUNK + t + one] = same[i * CHUNK];
    }
  }
}

// out[q][d] = out[q][d] * shrink[q] + sum over t of weights[q][t] * values[t][d], for Q queries.
template <class T, int Q>
INLINE void add_values(float* out, int64_t ldo, const float* weights, const float* shrink, const T* v, int64_t ldv, int head_dim,
                       int first, int last, Soon<T>& soon) {
  constexpr int D = W == 16 ? 4 : 2;
  int d = 0;
  for (; d + D * W <= head_dim; d += D * W) {
    vf acc[Q][D];
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) acc[i][j] = load(out + i * ldo + d + j * W) * shrink[i];
    for (int t = first; t < last; ++t) {
      soon.lines(sizeof(T));
      vf values[D];
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) values[j] = load(v + t * ldv + d + j * W);
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) {
        const vf weight = broadcast(weights[i * CHUNK + t]);
#pragma GCC unroll 4
        for (int j = 0; j < D; ++j) acc[i][j] += weight * values[j];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) store(out + i * ldo + d + j * W, acc[i][j]);
  }
  for (; d < head_dim; d += W) {
    vf acc[Q];
    for (int i = 0; i < Q; ++i) acc[i] = load(out + i * ldo + d) * shrink[i];
    for (int t = first; t < last; ++t) {
      const vf values = load_n(v + t * ldv + d, head_dim - d);
      for (int i = 0; i < Q; ++i) acc[i] += weights[i * CHUNK + t] * values;
    }
    for (int i = 0; i < Q; ++i) store(out + i * ldo + d, acc[i]);
  }
}

// Calls f<Q>(first query) over `n` queries, four at a time while four are left.
#define EACH_QUERIES(n, call)                    \
  do {                                           \
    int at = 0;                                  \
    for (; at + 4 <= (n); at += 4) call(4);      \
    if ((n)-at == 3) call(3);                    \
    if ((n)-at == 2) call(2);                    \
    if ((n)-at == 1) call(1);                    \
  } while (0)

INLINE float larger_of(float x, vf v) { return std::max(x, largest(v)); }
#endif

// The scales of `count` tokens from `offset` on, of one head's keys or values; nothing for floats.
template <class T>
struct Scales {
  Scales(const T*, int64_t, int) {}
  void multiply(float*) const {}
};
template <>
struct Scales<int8_t> {
  float one[CHUNK];
  Scales(const int8_t* scales, int64_t offset, int count) {
    const int8_t* from = scales + offset * (int64_t)sizeof(float);
    if (count == CHUNK) {
      memcpy(one, from, sizeof one);  // in registers
    } else {
      memset(one, 0, sizeof one);
      memcpy(one, from, count * sizeof(float));
    }
  }
  void multiply(float* w) const {
    for (int t = 0; t < CHUNK; t += W) store(w + t, load(w + t) * load(one + t));
  }
};

INLINE int64_t first_position(const Step& step, const AttentionItem& item) {
  return step.context_lens[item.seq] - step.seq_starts[item.seq + 1] + item.row0;
}

template <class F>
INLINE void each_two(float* x, int64_t n, F&& f) {  // in place
  for (int64_t i = 0; i < n; i += 2 * W) {
    const Two v = f(load_two(x + i));
    store(x + i, v.a);
    store(x + i + W, v.b);
  }
}

template <class T>
struct Tokens {  // of a block, from `offset` on
  const T* block;
  int64_t offset;
  void prefetch_scales(const KvLayout& layout, int64_t head) const {
    for (int part = 0; part < 2; ++part)
      prefetch(block + layout.keys<T>(head) + layout.scales(part) + offset * (int64_t)sizeof(float));
  }
};

// What a query has seen: the sum of weights[t] * values[t], the largest score, and the sum of weights relative to it.
struct Seen {
  float *sums, *top, *total;
  bool nothing() const { return *top == -INFINITY && *total == 0; }  // a score that is not a number is seen, but not the largest
};

// Adds `part` to `all`, which it follows.
static __attribute__((noinline)) void add_seen(const Seen& all, const Seen& part, int64_t width) {
  if (part.nothing()) return;
  if (all.nothing()) {
    memcpy(all.sums, part.sums, width * sizeof(float));
    *all.top = *part.top, *all.total = *part.total;
    return;
  }
  const float top = std::max(*all.top, *part.top), shrink = expf(*all.top - top), weight = expf(*part.top - top);
  for (int64_t d = 0; d < width; d += W) store(all.sums + d, load(all.sums + d) * shrink + load(part.sums + d) * weight);
  *all.top = top, *all.total = *all.total * shrink + *part.total * weight;
}

// The result of one query. `sums` are in the order of `load_two` on AVX2 and of `interleaved` in integers, and are changed.
template <class T, class A>
INLINE void write_result(const KvLayout& layout, float* sums, float total, int64_t width, A* to) {
  const float share = 1.0f / total;
  const int head_dim = (int)layout.head_dim;
#if MOTET_LEVEL >= 3
  if (in_integers<T>(layout)) in_order(sums, width);
#endif
  if (MOTET_LEVEL == 1) each_two(sums, width, [](Two v) { return unsorted(v, (const T*)nullptr); });
  for (int d = 0; d < head_dim; d += W) store_n(to + d, load(sums + d) * share, head_dim - d);
}

// The results of a row whose segments are there, for the heads of one KV head.
template <class T, class A>
static void add_segments(const Attention& a, const SpreadRow& spread, int64_t kv_head, A* out, int64_t ldo, float* scratch) {
  const int64_t per = a.heads / a.layout.kv_heads, width = padded_head(a.layout.head_dim);
  for (int64_t head = kv_head * per; head < (kv_head + 1) * per; ++head) {
    float top = -INFINITY, total = 0;
    for (int64_t segment = 0; segment < spread.segments; ++segment) {
      float* part = a.partials + spread.partials + (segment * a.heads + head) * (width + 2);
      add_seen({scratch, &top, &total}, {part, part + width, part + width + 1}, width);
    }
    write_result<T>(a.layout, scratch, total, width, out + spread.row * ldo + head * a.layout.head_dim);
  }
}

template <class T, class A>
static void attention_item(const Attention& a, const AttentionItem& item, [[maybe_unused]] const AttentionItem* after, A* out,
                           int64_t ldo, float* scratch) {
  const Step& step = *a.step;
  const int64_t kv_heads = a.layout.kv_heads, block_size = a.layout.block_size;
  const int64_t per = a.heads / kv_heads, width = padded_head(a.layout.head_dim), rows = item.row1 - item.row0;
  const int64_t token_stride = a.layout.template token<T>(), block_stride = a.layout.template block<T>();
  const int head_dim = (int)a.layout.head_dim, queries = (int)(rows * per);  // of one KV head: [row][head]
  const int64_t all = (item.head1 - item.head0) * queries;
  float *q = scratch, *sums = q + all * width, *weights = sums + all * width, *top = weights + all * CHUNK, *total = top + all,
        *shrinks = total + all, *all_sums = shrinks + all, *all_top = all_sums + all * width, *all_total = all_top + all;
  const float scale = 1.0f / sqrtf((float)head_dim);
  memset(q, 0, 2 * all * width * sizeof(float));
  for (int64_t h = item.head0, at = 0; h < item.head1; ++h)
    for (int64_t row = item.row0; row < item.row1; ++row)
      for (int64_t g = 0; g < per; ++g, ++at) {
        const float* from = a.qkv + row * a.ldq + (h * per + g) * head_dim;
        for (int d = 0; d < head_dim; ++d) q[at * width + d] = from[d] * scale;
        if (MOTET_LEVEL == 1) each_two(q + at * width, width, [](Two v) { return sorted(v, (const T*)nullptr); });
#if MOTET_LEVEL >= 3
        if (in_integers<T>(a.layout)) to_bytes(q + at * width, head_dim);
#endif
        top[at] = all_top[at] = -INFINITY;
        total[at] = all_total[at] = 0;
      }
  // positions of the first and last row; a row sees (position - window, position]
  const auto oldest_of = [&](int64_t position) { return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0; };
  const int64_t begin = first_position(step, item), final = begin + rows - 1, oldest = oldest_of(begin);
  const auto block_of = [&](const AttentionItem& one, int64_t block) {
    return (const T*)a.kv + step.block_tables[one.seq * step.table_stride + block] * block_stride;
  };
  const int64_t by_segment = segment_blocks(block_size);
  const auto first_block = [&](const AttentionItem& one) {
    return std::max(oldest_of(first_position(step, one)) / block_size, one.segment0 * by_segment);
  };
  const int64_t end_block = std::min(final / block_size + 1, item.segment1 * by_segment);
  const auto part_of = [&](int64_t segment, int64_t query) {
    return a.partials + item.partials + (segment * a.heads + query) * (width + 2);
  };
  const auto end_segment = [&](int64_t segment) {
    for (int64_t i = 0; i < all; ++i) {
      const Seen seen{sums + i * width, top + i, total + i};
      if (item.partials < 0) {
        add_seen({all_sums + i * width, all_top + i, all_total + i}, seen, width);
      } else {
        float* part = part_of(segment, i);
        memcpy(part, seen.sums, width * sizeof(float));
        part[width] = *seen.top, part[width + 1] = *seen.total;
      }
      memset(seen.sums, 0, width * sizeof(float));
      *seen.top = -INFINITY, *seen.total = 0;
    }
  };
  if (item.partials >= 0)
    for (int64_t segment = item.segment0; segment < item.segment1; ++segment)  // a window may leave out the first ones
      for (int64_t i = 0; i < all; ++i) part_of(segment, i)[width] = -INFINITY, part_of(segment, i)[width + 1] = 0;
  for (int64_t block = first_block(item); block < end_block; ++block) {
    const T* tokens = block_of(item, block);
#if MOTET_LEVEL == 1
    const auto after_chunk = [&](int64_t offset) -> Tokens<T> {  // what is read after the tokens from `offset` on
      if (offset + CHUNK < block_size && block * block_size + offset + CHUNK <= final) return {tokens, offset + CHUNK};
      if (block + 1 < end_block) return {block_of(item, block + 1), 0};
      if (!after) return {tokens, offset};
      const int64_t first = first_block(*after), position = oldest_of(first_position(step, *after));
      return {block_of(*after, first) + a.layout.template keys<T>(after->head0) - a.layout.template keys<T>(item.head0),
              position / block_size == first ? position % block_size / CHUNK * CHUNK : 0};
    };
#else
    Soon<T> soon;  // of the next block, perhaps of the piece of work that comes after this one
    const bool last = block + 1 == end_block;
    if (const AttentionItem* one = last ? after : &item) {
      const int64_t there = last ? first_block(*one) : block + 1, end = first_position(step, *one) + one->row1 - one->row0;
      const T* next = block_of(*one, there) + a.layout.template keys<T>(one->head0);
      const int64_t filled = std::min(block_size, end - there * block_size), heads = one->head1 - one->head0;
      const int64_t bytes = a.layout.template keys<T>(heads) * (int64_t)sizeof(T);
      if (HAS_SCALES<T> || heads == kv_heads)
        soon = Soon<T>(next, HAS_SCALES<T> ? bytes : filled * token_stride * (int64_t)sizeof(T), 1, 0);
      else
        soon = Soon<T>(next, bytes, 2 * filled, token_stride / 2 * (int64_t)sizeof(T));  // keys and values of every token
    }
#endif
    for (int64_t offset = 0; offset < block_size; offset += CHUNK) {
      const int64_t base = block * block_size + offset;
      const int here = (int)std::min<int64_t>({CHUNK, block_size - offset, final + 1 - base});
      if (here <= 0) break;
      if (base + here <= oldest) continue;
      const int first = (int)std::max<int64_t>(0, oldest - base);
      const auto keys_of = [&](int64_t h) { return tokens + a.layout.template keys<T>(h) + offset * token_stride; };
      [[maybe_unused]] const auto scales_of = [&](int64_t h, int part) {
        return Scales<T>(tokens + a.layout.template keys<T>(h) + a.layout.scales(part), offset, here);
      };
      Soon<T> none{};  // the first queries prefetch for all
      const auto score = [&](int64_t h, Soon<T>& soon) {
        const int64_t mine = (h - item.head0) * queries;
        const T* k = keys_of(h);
        float *hq = q + mine * width, *hw = weights + mine * CHUNK;
#define SCORE(Q) \
  score_queries<T, Q>(hq + at * width, width, k, token_stride, head_dim, here, at ? none : soon, hw + at * CHUNK)
#if MOTET_LEVEL >= 3
#define SCORE_BYTES(Q) score_bytes<Q>(hq + at * width, width, k, token_stride, head_dim, here, at ? none : soon, hw + at * CHUNK)
        if constexpr (HAS_SCALES<T>)
          if (in_integers<T>(a.layout)) {
            EACH_QUERIES(queries, SCORE_BYTES);
            return;
          }
#endif
        EACH_QUERIES(queries, SCORE);
      };
      // A weight takes many dependent steps, so each step is taken for all queries before the next.
      const auto each_query = [&](int part, auto&& f) {
        for (int64_t h = item.head0, at = 0; h < item.head1; ++h) {
#if MOTET_LEVEL >= 2
          for (int i = 0; i < queries; ++i, ++at) f(scales_of(h, part), i, at, weights + at * CHUNK);  // one vector, loaded again
#else
          const Scales<T> scales = scales_of(h, part);
          for (int i = 0; i < queries; ++i, ++at) f(scales, i, at, weights + at * CHUNK);
#endif
        }
      };
      const auto weigh_all = [&] {
        each_query(0, [&](const Scales<T>& scales, int i, int64_t at, float* w) {
          const int64_t position = begin + i / per;
          const int low = a.window ? (int)std::max<int64_t>(0, position - a.window + 1 - base) : 0;
          const int high = (int)std::min<int64_t>(here, position + 1 - base);
          scales.multiply(w);
          for (int t = 0; t < std::min(low, CHUNK); ++t) w[t] = -INFINITY;
          for (int t = std::max(high, 0); t < CHUNK; ++t) w[t] = -INFINITY;
          shrinks[at] = top[at];
          if (low >= high) return;  // this row sees nothing here
          vf most = load(w);
          for (int t = W; t < CHUNK; t += W) most = max(most, load(w + t));
          top[at] = larger_of(top[at], most);
        });
        each_query(1, [&](const Scales<T>& scales, int, int64_t at, float* w) {
          const float before = shrinks[at], now = top[at];
          vf sum_here = zero();
          for (int t = 0; t < CHUNK; t += W) {
            const vf score = load(w + t), e = score == broadcast(-INFINITY) ? zero() : exp(score - broadcast(now));
            store(w + t, e);
            sum_here += e;
          }
          shrinks[at] = now != before ? expf(before - now) : 1;
          total[at] = total[at] * shrinks[at] + sum(sum_here);
          scales.multiply(w);
        });
#if MOTET_LEVEL >= 3
        if (in_integers<T>(a.layout))
          for (int64_t at = 0; at < all; ++at) weights_to_bytes(weights + at * CHUNK);
#endif
      };
      const auto add = [&](int64_t h, Soon<T>& soon) {
        const int64_t mine = (h - item.head0) * queries;
        const T* v = keys_of(h) + a.layout.template values<T>();
        float *hs = sums + mine * width, *hw = weights + mine * CHUNK;
#define ADD(Q)                                                                                                     \
  add_values<T, Q>(hs + at * width, width, hw + at * CHUNK, shrinks + mine + at, v, token_stride, head_dim, first, \
                   here, at ? none : soon)
#if MOTET_LEVEL >= 3
#define ADD_BYTES(Q)                                                                                                            \
  add_bytes<Q>(hs + at * width, width, hw + at * CHUNK, shrinks + mine + at, v, token_stride, head_dim, first, here, at ? none : soon)
        if constexpr (HAS_SCALES<T>)
          if (in_integers<T>(a.layout)) {
            EACH_QUERIES(queries, ADD_BYTES);
            return;
          }
#endif
        EACH_QUERIES(queries, ADD);
      };
#if MOTET_LEVEL == 1
      const Tokens<T> next = after_chunk(offset);
      const int64_t last = item.head1 - 1, to_values = a.layout.template values<T>();
      const int64_t back = keys_of(item.head0) - keys_of(last);  // from the last head to the first
      const auto later = [&](int64_t h) {
        return next.block + a.layout.template keys<T>(h) + next.offset * token_stride - keys_of(h);
      };
      for (int64_t h = item.head0; h <= last; ++h) {
        if (HAS_SCALES<T>) next.prefetch_scales(a.layout, h);
        score(h, {h < last ? keys_of(h + 1) - keys_of(h) : back + to_values, later(h)});
      }
      weigh_all();
      for (int64_t h = item.head0; h <= last; ++h)
        add(h, {h < last ? keys_of(h + 1) - keys_of(h) : back - to_values + later(item.head0), later(h)});
#else
      for (int64_t h = item.head0; h < item.head1; ++h) score(h, soon);
      weigh_all();
      for (int64_t h = item.head0; h < item.head1; ++h) add(h, soon);
#endif
    }
    if ((block + 1) % by_segment == 0 || block + 1 == end_block) end_segment(block / by_segment);
  }
  if (item.partials >= 0) return;
  for (int64_t h = item.head0, at = 0; h < item.head1; ++h)
    for (int64_t row = item.row0; row < item.row1; ++row)
      for (int64_t g = 0; g < per; ++g, ++at)
        write_result<T>(a.layout, all_sums + at * width, all_total[at], width, out + row * ldo + (h * per + g) * head_dim);
}

// All of a step. `out` [rows, ldo].
template <class T, class A>
INLINE void attend(Team& team, const Attention& a, const AttentionPlan& plan, A* out, int64_t ldo, float* scratch, Ahead& soon) {
  team.each((int64_t)plan.items.size(), [&](int64_t item, int64_t next) {
    attention_item<T>(a, plan.items[item], next < 0 ? nullptr : &plan.items[next], out, ldo, scratch);
  }, soon);
  const int64_t kv_heads = a.layout.kv_heads;
  if (!plan.spread.empty()) team.each((int64_t)plan.spread.size() * kv_heads, [&](int64_t item, int64_t) {
    add_segments<T>(a, plan.spread[item / kv_heads], item % kv_heads, out, ldo, scratch);
  }, soon);
}

}  // namespace motet
