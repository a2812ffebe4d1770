// Where a piece of attention reads, and what is prefetched meanwhile.
#pragma once
#include "attention_plan.h"
#include "attention_vectors.h"

namespace motet {

// At most CHUNK tokens of a block, which are read together.
template <class T>
struct Chunk {
  const T* block;
  int64_t offset, position;  // of the first token: in its block, in its sequence
  int first, count;          // tokens before `first` are older than any row's window
};

// The tokens that a piece of work reads: blocks [first_block(item), end_block) of its sequence.
template <class T>
struct Route {
  const Attention& a;
  const Step& step;
  const AttentionItem& item;
  const AttentionItem* after;  // what this member computes next, if anything
  const KvLayout& layout;
  int64_t block_size, token_stride;
  int64_t begin, final, oldest;  // positions: of the first and the last row, and the first one that a row sees
  int64_t end_block;

  INLINE_MEMBER Route(const Attention& a, const AttentionItem& item, const AttentionItem* after)
      : a(a), step(*a.step), item(item), after(after), layout(a.layout), block_size(layout.block_size),
        token_stride(layout.template token<T>()), begin(first_position(step, item)), final(begin + item.row1 - item.row0 - 1),
        oldest(oldest_of(begin)), end_block(std::min(final / block_size + 1, item.segment1 * segment_blocks(block_size))) {}

  // A row sees (position - window, position].
  INLINE_MEMBER int64_t oldest_of(int64_t position) const { return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0; }
  INLINE_MEMBER int64_t first_block(const AttentionItem& one) const {
    return std::max(oldest_of(first_position(step, one)) / block_size, one.segment0 * segment_blocks(block_size));
  }
  INLINE_MEMBER const T* block_of(const AttentionItem& one, int64_t block) const {
    return (const T*)a.kv + step.block_tables[one.seq * step.table_stride + block] * layout.template block<T>();
  }
  // The tokens from `offset` on of a block that begins at `tokens`; none (`count` <= 0) after the last row.
  INLINE_MEMBER Chunk<T> chunk(const T* tokens, int64_t block, int64_t offset) const {
    const int64_t position = block * block_size + offset;
    return {tokens, offset, position, (int)std::max<int64_t>(0, oldest - position),
            (int)std::min<int64_t>({CHUNK, block_size - offset, final + 1 - position})};
  }
  INLINE_MEMBER const T* keys(const Chunk<T>& chunk, int64_t head) const {
    return chunk.block + layout.template keys<T>(head) + chunk.offset * token_stride;
  }
};

// What is prefetched while a block is read: `keys` and `values` say so for the keys and the values of one head of a chunk.
#if MOTET_LEVEL == 1

// The first-level cache gets what is read next, the second-level cache the same head's keys of the next chunk.
template <class T>
class Upcoming {
 public:
  INLINE_MEMBER Upcoming(const Route<T>& route, const T* tokens, int64_t block) : route_(route), tokens_(tokens), block_(block) {}

  INLINE_MEMBER void begin(const Chunk<T>& chunk) {
    next_ = after(chunk.offset);
    to_values_ = route_.layout.template values<T>();
    back_ = route_.keys(chunk, route_.item.head0) - route_.keys(chunk, last());
  }
  INLINE_MEMBER Lead keys(const Chunk<T>& chunk, int64_t head) const {
    if (HAS_SCALES<T>)
      for (int part = 0; part < 2; ++part) prefetch(next_.block + scales_at(head, part));
    return {head < last() ? to_next(chunk, head) : back_ + to_values_, later(chunk, head)};
  }
  INLINE_MEMBER Lead values(const Chunk<T>& chunk, int64_t head) const {
    return {head < last() ? to_next(chunk, head) : back_ - to_values_ + later(chunk, route_.item.head0), later(chunk, head)};
  }

 private:
  struct Tokens {  // of a block, from `offset` on
    const T* block;
    int64_t offset;
  };

  // What is read after the tokens from `offset` on.
  INLINE_MEMBER Tokens after(int64_t offset) const {
    const int64_t size = route_.block_size;
    if (offset + CHUNK < size && block_ * size + offset + CHUNK <= route_.final) return {tokens_, offset + CHUNK};
    if (block_ + 1 < route_.end_block) return {route_.block_of(route_.item, block_ + 1), 0};
    if (!route_.after) return {tokens_, offset};
    const AttentionItem& one = *route_.after;
    const int64_t first = route_.first_block(one), position = route_.oldest_of(first_position(route_.step, one));
    const KvLayout& layout = route_.layout;
    return {route_.block_of(one, first) + layout.template keys<T>(one.head0) - layout.template keys<T>(route_.item.head0),
            position / size == first ? position % size / CHUNK * CHUNK : 0};
  }
  INLINE_MEMBER int64_t last() const { return route_.item.head1 - 1; }
  INLINE_MEMBER int64_t to_next(const Chunk<T>& chunk, int64_t head) const {
    return route_.keys(chunk, head + 1) - route_.keys(chunk, head);
  }
  INLINE_MEMBER int64_t later(const Chunk<T>& chunk, int64_t head) const {
    return next_.block + route_.layout.template keys<T>(head) + next_.offset * route_.token_stride - route_.keys(chunk, head);
  }
  INLINE_MEMBER int64_t scales_at(int64_t head, int part) const {
    return route_.layout.template keys<T>(head) + route_.layout.scales(part) + next_.offset * (int64_t)sizeof(float);
  }

  const Route<T>& route_;
  const T* tokens_;
  int64_t block_, to_values_ = 0, back_ = 0;  // `back_`: from the last head's keys to the first one's
  Tokens next_{};
};

#else

// The next block, perhaps of the piece of work that comes after this one, bit by bit.
template <class T>
class Upcoming {
 public:
  INLINE_MEMBER Upcoming(const Route<T>& route, const T*, int64_t block) {
    const KvLayout& layout = route.layout;
    const bool last = block + 1 == route.end_block;
    if (const AttentionItem* one = last ? route.after : &route.item) {
      const int64_t there = last ? route.first_block(*one) : block + 1, end = first_position(route.step, *one) + one->row1 - one->row0;
      const T* next = route.block_of(*one, there) + layout.template keys<T>(one->head0);
      const int64_t filled = std::min(route.block_size, end - there * route.block_size), heads = one->head1 - one->head0;
      const int64_t bytes = layout.template keys<T>(heads) * (int64_t)sizeof(T);
      if (HAS_SCALES<T> || heads == layout.kv_heads)
        soon_ = Soon<T>(next, HAS_SCALES<T> ? bytes : filled * route.token_stride * (int64_t)sizeof(T), 1, 0);
      else
        soon_ = Soon<T>(next, bytes, 2 * filled, route.token_stride / 2 * (int64_t)sizeof(T));  // keys and values of every token
    }
  }
  INLINE_MEMBER void begin(const Chunk<T>&) {}
  INLINE_MEMBER Soon<T>& keys(const Chunk<T>&, int64_t) { return soon_; }
  INLINE_MEMBER Soon<T>& values(const Chunk<T>&, int64_t) { return soon_; }

 private:
  Soon<T> soon_;
};

#endif

}  // namespace motet
