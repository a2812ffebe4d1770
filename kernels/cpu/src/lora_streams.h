// LoRA of adapters with one row each where SIDE_BY_SIDE > 1: several pages are read at once, each in order of address.
//
//   shrink    pages of any adapters: s[rank] = scale * A x
//   expand    as many pages of each of R adapters: y[out] += B s
//
// The processor fetches ahead by itself, but only within 4 KiB, and needs several lines to notice that these are being read. So the
// first lines of the next 4 KiB are prefetched, and while one page waits the others keep the memory busy.
#pragma once
#include "lora_plan.h"
#include "two.h"

namespace motet {

constexpr int FIRST_BYTES = 6 * 64;  // of 4 KiB, that are prefetched
template <class T>
constexpr int AHEAD = 1024 / (int)sizeof(T);  // how far, in elements

// Whether `p`, of which the next `step` bytes are read, is in a new line and among the first of 4 KiB.
INLINE bool starts(const void* p, int step) { return ((intptr_t)p & 4095) < FIRST_BYTES && ((intptr_t)p & 63) < step; }

template <int N>
constexpr std::integral_constant<int, N> number;

// N pages, the same sums as in `shrink_rows`, and the N that are read next. Each N / R of the pages have the same row.
template <class T, class A, int N, int R>
static __attribute__((noinline)) void shrink_pages(const LoraPage* pages, const LoraPage* next, const T* arena, int64_t layer, int64_t in,
                                                   const A* x, int64_t ldx, float* s) {
  constexpr int LINE = 64 / (int)sizeof(T), EACH = N / R;
  for (int k = 0; k < PAGE; ++k) {
    vf acc[(N + 3) / 4 * 4];
    const T* a[N];
    const A* row[R];
#pragma GCC unroll 8
    for (vf& sum : acc) sum = zero();
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) a[n] = arena + pages[n].at + layer * pages[n].by_layer + k * in;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = x + pages[r * EACH].row * ldx;
    int64_t i = 0;
    for (const bool last : {false, true}) {
      const T* ahead[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const bool behind = last && k == PAGE - 1;
        ahead[n] = (behind ? arena + next[n].at + layer * next[n].by_layer - in : a[n]) + AHEAD<T>;
      }
      for (const int64_t end = last ? in : in - AHEAD<T>; i + LINE <= end; i += LINE) {
        if (starts(ahead[0] + i, 64))
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) prefetch(ahead[n] + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int j = 0; j < LINE; j += W) {
            const vf value = load(row[r] + i + j);
#pragma GCC unroll 8
            for (int n = r * EACH; n < (r + 1) * EACH; ++n) acc[n] += load(a[n] + i + j) * value;
          }
      }
    }
    for (; i < in; i += W) {
      const int live = (int)std::min<int64_t>(W, in - i);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[n] += load_n(a[n] + i, live) * load_n(row[n / EACH] + i, live);
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; n += 4) {
      float four[4];
      sum4(acc[n], acc[n + 1], acc[n + 2], acc[n + 3], four);
      for (int j = n; j < std::min(n + 4, N); ++j) s[pages[j].s + pages[j].ranks(k)] = four[j - n] * pages[j].scale[layer];
    }
  }
}

// A piece of one row each. It may have more pages than SIDE_BY_SIDE when there are few adapters.
template <class T, class A>
static void shrink_beside(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                          const A* x, int64_t ldx, float* s) {
  const int64_t in = pool.in[piece.module];
  const T* arena = (const T*)pool.arena;
  const LoraPage* pages = &plan.lone_pages[piece.begin];
  for (int left = piece.count, some; left; left -= some, pages += some) {
    some = side_by_side(left);
    const LoraPage* next = left == some && after && after->rows == 1 ? &plan.lone_pages[after->begin] : pages + some;
    const auto same = [&](int from, int to) {
      while (from < to && pages[from].row == pages[to].row) ++from;
      return from == to;
    };
    const auto run = [&](auto n, auto rows) { shrink_pages<T, A, n.value, rows.value>(pages, next, arena, layer, in, x, ldx, s); };
    if (some == 8) {
      if (same(0, 7))
        run(number<8>, number<1>);
      else if (same(0, 3) && same(4, 7))
        run(number<8>, number<2>);
      else if (same(0, 1) && same(2, 3) && same(4, 5) && same(6, 7))
        run(number<8>, number<4>);
      else
        run(number<8>, number<8>);
    }
    if (some == 4) same(0, 3) ? run(number<4>, number<1>) : run(number<4>, number<4>);
    if (some == 2) run(number<2>, number<2>);
    if (some == 1) run(number<1>, number<1>);
  }
}

// N streams of `ranks` ranks for each of R rows, outputs [0, n) from where `streams` and `y` point, the same sums as in
// `expand_rows`. A stream is a page, or half of one where an adapter has no other. `next` are read next.
template <class T, int N, int R>
static __attribute__((noinline)) void expand_streams(const T* layer, const int64_t* streams, const T* layer_next, const int64_t* next,
                                                     int ranks, int64_t out, int64_t n, const float* const* s, float* const* y) {
  constexpr bool ADJACENT = N < 4;  // bringing y into the other order and back would take longer than it saves
  for (int k = 0; k < ranks; ++k) {
    vf value[R][N];
    const T* b[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) value[r][j] = broadcast(s[r][k * N + j]), b[r][j] = layer + streams[r * N + j] + k * out;
    int64_t i = 0;
    for (const bool last : {false, true}) {
      const T* ahead[R][N];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
          const T* soon = k + 1 < ranks ? b[r][j] + out : layer_next + next[r * N + j];
          ahead[r][j] = (last ? soon - n : b[r][j]) + AHEAD<T>;
        }
      for (const int64_t end = last ? n : n - AHEAD<T>; i + 2 * W <= end; i += 2 * W) {
        if (starts(ahead[0][0] + i, 2 * W * (int)sizeof(T)))
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) prefetch(ahead[r][j] + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          Two acc = load_two(y[r] + i);
          if (!ADJACENT) acc = sorted(acc, b[0][0]);
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) {
            const T* from = b[r][j] + i;
            const Two weights = ADJACENT ? Two{load(from), load(from + W)} : load_two(from);
            acc.a += weights.a * value[r][j];
            acc.b += weights.b * value[r][j];
          }
          if (!ADJACENT) acc = unsorted(acc, b[0][0]);
          store(y[r] + i, acc.a);
          store(y[r] + i + W, acc.b);
        }
      }
    }
    for (; i < n; i += W) {
      const int live = (int)std::min<int64_t>(W, n - i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf acc = load_n(y[r] + i, live);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc += load_n(b[r][j] + i, live) * value[r][j];
        store_n(y[r] + i, acc, live);
      }
    }
  }
}

// `piece` and those beside it, of the same module with as many pages. `y` is the first output of the piece in row 0.
template <class T>
static void expand_beside(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                          const float* s, float* y, int64_t ldy) {
  const auto layer_of = [&](int module) { return (const T*)pool.arena + layer * PAGE * (pool.in[module] + pool.out[module]); };
  const T* here = layer_of(piece.module);
  const int64_t* streams = &plan.lone_streams[piece.begin];
  const int rows = 1 + piece.others;
  for (int p = 0, some; p < piece.pages; p += some) {
    some = side_by_side(piece.pages - p);
    for (int r = 0, together; r < rows; r += together) {
      together = power_of_two(rows_beside(some), rows - r);
      const float* from[SIDE_BY_SIDE];
      float* to[SIDE_BY_SIDE];
      for (int j = 0; j < together; ++j) {
        const LoraPiece& one = plan.beside_of(piece, r + j);
        from[j] = s + one.s + p * PAGE, to[j] = y + plan.order[one.row0] * ldy;
      }
      const int64_t* next = streams + together * std::max(some, 2);
      const bool last = p + some == piece.pages && r + together == rows && after && after->rows == 1;
      const auto run = [&](auto n, auto R) {
        expand_streams<T, n.value, R.value>(here, streams, last ? layer_of(after->module) : here,
                                            last ? &plan.lone_streams[after->begin] : next, some == 1 ? PAGE / 2 : PAGE,
                                            pool.out[piece.module], piece.count, from, to);
      };
      if (some == 8) run(number<8>, number<1>);
      if (some == 4) together == 2 ? run(number<4>, number<2>) : run(number<4>, number<1>);
      if (some <= 2) together == 4 ? run(number<2>, number<4>) : together == 2 ? run(number<2>, number<2>) : run(number<2>, number<1>);
      streams = next;
    }
  }
}

}  // namespace motet
