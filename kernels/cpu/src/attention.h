// Paged attention over the KV cache of one layer (kv.h), decode and chunked prefill alike.
//
// A piece of work is some rows of one sequence and some of its KV heads. It walks the sequence's blocks in order, at most
// 16 tokens at a time, with running maximum and sum per query. They start anew with every segment of 256 tokens, whose results are
// added up in order. So the segments of one long context can be computed at the same time, and a row's result depends on its
// position and context alone, not on its chunk, its neighbours or the thread. Memory beyond a row's context is never used.
#pragma once
#include "attention_integers.h"
#include "attention_route.h"
#include "two.h"

namespace motet {

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

template <class F>
INLINE void each_two(float* x, int64_t n, F&& f) {  // in place
  for (int64_t i = 0; i < n; i += 2 * W) {
    const Two v = f(load_two(x + i));
    store(x + i, v.a);
    store(x + i + W, v.b);
  }
}

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

// A query in the form in which keys are multiplied with it.
template <class T>
INLINE void form_query(const KvLayout& layout, float* query, int64_t width) {
  if (MOTET_LEVEL == 1) each_two(query, width, [](Two v) { return sorted(v, (const T*)nullptr); });
  if (in_integers<T>(layout)) to_bytes(query, (int)layout.head_dim);
}

// The result of one query. `sums` are in the order of `load_two` on AVX2 and of `interleaved` in integers, and are changed.
template <class T, class A>
INLINE void write_result(const KvLayout& layout, float* sums, float total, int64_t width, A* to) {
  const float share = 1.0f / total;
  const int head_dim = (int)layout.head_dim;
  if (in_integers<T>(layout)) in_order(sums, width);
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

// A thread's memory for a piece of work: these values for each query, in the order [KV head][row][query head of the KV head].
struct AttentionScratch {
  float *queries, *sums;     // [width]
  float* weights;            // [CHUNK]
  float *top, *total;        // what the query has seen of this segment, with `sums`
  float* shrink;             // what sums of earlier chunks are multiplied with
  float *all_sums, *all_top, *all_total;  // what it has seen of the segments before

  INLINE_MEMBER AttentionScratch(float* at, int64_t count, int64_t width) {
    const auto take = [&](int64_t each) {
      float* begin = at;
      at += count * each;
      return begin;
    };
    queries = take(width), sums = take(width), weights = take(CHUNK), top = take(1), total = take(1), shrink = take(1);
    all_sums = take(width), all_top = take(1), all_total = take(1);
  }
  // Floats for `count` queries.
  static int64_t size(int64_t count, int64_t width) { return count * (3 * width + CHUNK + 5); }
};

// Floats of scratch that one thread needs.
INLINE int64_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t queries = std::max(heads, attention_rows(heads / kv_heads) * (heads / kv_heads));
  return AttentionScratch::size(queries, padded_head(head_dim)) + 64;
}

// A piece of work under way: `begin`, `read_block` for its blocks in order, `end_segment` after the last one of each segment, `write`.
template <class T>
class AttentionWork {
 public:
  INLINE_MEMBER AttentionWork(const Attention& a, const AttentionItem& item, const AttentionItem* after, float* scratch)
      : route(a, item, after), a_(a), item_(item), layout_(a.layout), per_(a.heads / layout_.kv_heads),
        width_(padded_head(layout_.head_dim)), all_((item.head1 - item.head0) * (item.row1 - item.row0) * per_),
        head_dim_((int)layout_.head_dim), queries_((int)((item.row1 - item.row0) * per_)), at_(scratch, all_, width_) {}

  const Route<T> route;

  // Takes the queries; nothing is seen yet.
  INLINE_MEMBER void begin() {
    const float scale = 1.0f / sqrtf((float)head_dim_);
    memset(at_.queries, 0, 2 * all_ * width_ * sizeof(float));  // and sums
    each_query([&](int64_t at, int64_t row, int64_t head) {
      const float* from = a_.qkv + row * a_.ldq + head * head_dim_;
      float* query = at_.queries + at * width_;
      for (int d = 0; d < head_dim_; ++d) query[d] = from[d] * scale;
      form_query<T>(layout_, query, width_);
      at_.top[at] = at_.all_top[at] = -INFINITY;
      at_.total[at] = at_.all_total[at] = 0;
    });
    if (item_.partials < 0) return;
    for (int64_t segment = item_.segment0; segment < item_.segment1; ++segment)  // a window may leave out the first ones
      for (int64_t at = 0; at < all_; ++at) {
        const Seen part = part_of(segment, at);
        *part.top = -INFINITY, *part.total = 0;
      }
  }

  INLINE_MEMBER void read_block(int64_t block) {
    const T* tokens = route.block_of(item_, block);
    Upcoming<T> upcoming(route, tokens, block);
    for (int64_t offset = 0; offset < route.block_size; offset += CHUNK) {
      const Chunk<T> chunk = route.chunk(tokens, block, offset);
      if (chunk.count <= 0) break;
      if (chunk.position + chunk.count <= route.oldest) continue;
      upcoming.begin(chunk);
      for (int64_t head = item_.head0; head < item_.head1; ++head) score(chunk, head, upcoming.keys(chunk, head));
      weigh(chunk);
      for (int64_t head = item_.head0; head < item_.head1; ++head) add(chunk, head, upcoming.values(chunk, head));
    }
  }

  // What was seen of a segment is added to that of the segments before, or kept in memory for `add_segments`.
  INLINE_MEMBER void end_segment(int64_t segment) {
    for (int64_t at = 0; at < all_; ++at) {
      const Seen seen{at_.sums + at * width_, at_.top + at, at_.total + at};
      if (item_.partials < 0) {
        add_seen({at_.all_sums + at * width_, at_.all_top + at, at_.all_total + at}, seen, width_);
      } else {
        const Seen part = part_of(segment, at);
        memcpy(part.sums, seen.sums, width_ * sizeof(float));
        *part.top = *seen.top, *part.total = *seen.total;
      }
      memset(seen.sums, 0, width_ * sizeof(float));
      *seen.top = -INFINITY, *seen.total = 0;
    }
  }

  template <class A>
  INLINE_MEMBER void write(A* out, int64_t ldo) {
    each_query([&](int64_t at, int64_t row, int64_t head) {
      write_result<T>(layout_, at_.all_sums + at * width_, at_.all_total[at], width_, out + row * ldo + head * head_dim_);
    });
  }

 private:
  // f(query, row of the step, head)
  template <class F>
  INLINE_MEMBER void each_query(F&& f) {
    for (int64_t h = item_.head0, at = 0; h < item_.head1; ++h)
      for (int64_t row = item_.row0; row < item_.row1; ++row)
        for (int64_t g = 0; g < per_; ++g, ++at) f(at, row, h * per_ + g);
  }

  INLINE_MEMBER Seen part_of(int64_t segment, int64_t query) const {
    float* part = a_.partials + item_.partials + (segment * a_.heads + query) * (width_ + 2);
    return {part, part + width_, part + width_ + 1};
  }

  // The scores of the queries of one KV head. Like `add` not inlined by force: one copy serves every type of output.
  void score(const Chunk<T>& chunk, int64_t kv_head, Soon<T>& soon) {
    const int64_t mine = (kv_head - item_.head0) * queries_, stride = route.token_stride;
    const T* k = route.keys(chunk, kv_head);
    float *q = at_.queries + mine * width_, *w = at_.weights + mine * CHUNK;
    Soon<T> none{};  // the first queries prefetch for all
    if constexpr (HAS_SCALES<T>)
      if (in_integers<T>(layout_))
        return each_queries(queries_, [&](auto Q, int at) __attribute__((always_inline)) {
          score_bytes<Q.value>(q + at * width_, width_, k, stride, head_dim_, chunk.count, at ? none : soon, w + at * CHUNK);
        });
    each_queries(queries_, [&](auto Q, int at) __attribute__((always_inline)) {
      score_queries<T, Q.value>(q + at * width_, width_, k, stride, head_dim_, chunk.count, at ? none : soon, w + at * CHUNK);
    });
  }

  // Scores become weights. A weight takes many dependent steps, so each step is taken for all queries before the next.
  INLINE_MEMBER void weigh(const Chunk<T>& chunk) {
    each_scaled(chunk, 0, [&](const Scales<T>& scales, int i, int64_t at, float* w) {
      scales.multiply(w);
      at_.shrink[at] = at_.top[at];
      if (!hide(chunk, route.begin + i / per_, w)) return;
      vf most = load(w);
      for (int t = W; t < CHUNK; t += W) most = max(most, load(w + t));
      at_.top[at] = larger_of(at_.top[at], most);
    });
    each_scaled(chunk, 1, [&](const Scales<T>& scales, int, int64_t at, float* w) {
      const float before = at_.shrink[at], now = at_.top[at];
      vf sum_here = zero();
      for (int t = 0; t < CHUNK; t += W) {
        const vf score = load(w + t), e = score == broadcast(-INFINITY) ? zero() : exp(score - broadcast(now));
        store(w + t, e);
        sum_here += e;
      }
      at_.shrink[at] = now != before ? expf(before - now) : 1;
      float kept = at_.total[at] * at_.shrink[at];
      if constexpr (MOTET_LEVEL == 1 && HAS_SCALES<T>) asm("" : "+x"(kept));  // rounded here: a multiply-add would change results
      at_.total[at] = kept + sum(sum_here);
      scales.multiply(w);
    });
    if (in_integers<T>(layout_))
      for (int64_t at = 0; at < all_; ++at) weights_to_bytes(at_.weights + at * CHUNK);
  }

  // Scores of tokens that a row at `position` does not see become -INFINITY. Returns whether it sees any.
  INLINE_MEMBER bool hide(const Chunk<T>& chunk, int64_t position, float* scores) const {
    const int low = a_.window ? (int)std::max<int64_t>(0, position - a_.window + 1 - chunk.position) : 0;
    const int high = (int)std::min<int64_t>(chunk.count, position + 1 - chunk.position);
    for (int t = 0; t < std::min(low, CHUNK); ++t) scores[t] = -INFINITY;
    for (int t = std::max(high, 0); t < CHUNK; ++t) scores[t] = -INFINITY;
    return low < high;
  }

  // f(scales of the keys (part 0) or values, query of its KV head, query, its weights)
  template <class F>
  INLINE_MEMBER void each_scaled(const Chunk<T>& chunk, int part, F&& f) {
    const auto scales_of = [&](int64_t head) {
      return Scales<T>(chunk.block + layout_.template keys<T>(head) + layout_.scales(part), chunk.offset, chunk.count);
    };
    for (int64_t head = item_.head0, at = 0; head < item_.head1; ++head) {
      if constexpr (CHUNK == W) {  // one vector, loaded again
        for (int i = 0; i < queries_; ++i, ++at) f(scales_of(head), i, at, at_.weights + at * CHUNK);
      } else {
        const Scales<T> scales = scales_of(head);
        for (int i = 0; i < queries_; ++i, ++at) f(scales, i, at, at_.weights + at * CHUNK);
      }
    }
  }

  // The sums of the queries of one KV head.
  void add(const Chunk<T>& chunk, int64_t kv_head, Soon<T>& soon) {
    const int64_t mine = (kv_head - item_.head0) * queries_, stride = route.token_stride;
    const int first = chunk.first, last = chunk.count;
    const T* v = route.keys(chunk, kv_head) + layout_.template values<T>();
    float *sums = at_.sums + mine * width_, *w = at_.weights + mine * CHUNK, *shrink = at_.shrink + mine;
    Soon<T> none{};
    if constexpr (HAS_SCALES<T>)
      if (in_integers<T>(layout_))
        return each_queries(queries_, [&](auto Q, int at) __attribute__((always_inline)) {
          add_bytes<Q.value>(sums + at * width_, width_, w + at * CHUNK, shrink + at, v, stride, head_dim_, first, last, at ? none : soon);
        });
    each_queries(queries_, [&](auto Q, int at) __attribute__((always_inline)) {
      add_values<T, Q.value>(sums + at * width_, width_, w + at * CHUNK, shrink + at, v, stride, head_dim_, first, last, at ? none : soon);
    });
  }

  const Attention& a_;
  const AttentionItem& item_;
  const KvLayout& layout_;
  const int64_t per_, width_, all_;  // query heads of a KV head; floats of a query; queries
  const int head_dim_, queries_;     // of one KV head
  const AttentionScratch at_;
};

template <class T, class A>
static void attention_item(const Attention& a, const AttentionItem& item, const AttentionItem* after, A* out, int64_t ldo,
                           float* scratch) {
  AttentionWork<T> work(a, item, after, scratch);
  work.begin();
  const int64_t by_segment = segment_blocks(a.layout.block_size), end = work.route.end_block;
  for (int64_t block = work.route.first_block(item); block < end; ++block) {
    work.read_block(block);
    if ((block + 1) % by_segment == 0 || block + 1 == end) work.end_segment(block / by_segment);
  }
  if (item.partials < 0) work.write(out, ldo);
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
