// LoRA with up to SIDE_BY_SIDE pages that are read at once, each in order of address.
//
//   shrink    pages of any adapters with one row each: s[rank] = scale * A x
//   expand    as many pages of each of R adapters: y[out] += B s; the adapters have one row each, or a single one has a few
//
// One page at a time would not keep the memory busy: the processor fetches ahead in order of address, but only within 4 KiB, and needs
// several lines to notice that these are being read. Every line is also prefetched, AHEAD of where it is read; near the end of a page,
// in the page that is read next.
#pragma once
#include "lora_pairs.h"
#include "two.h"

namespace motet {

template <class T>
constexpr int64_t AHEAD = 2048 / sizeof(T);  // elements

#if MOTET_LEVEL == 3
INLINE vf multiplied(vf sum, const bf16* a, const bf16* x) { return (vf)_mm512_dpbf16_ps((__m512)sum, pairs(a), pairs(x)); }
#endif

// N pages, the same sums as in `shrink_rows`, and the N that are read next. Each N / R of the pages have the same row.
// in one piece: its sums stay in registers from the first line to the last
template <class T, class A, int N, int R>
static __attribute__((noinline)) void shrink_pages(const LoraPage* pages, const LoraPage* next, const T* arena, int64_t layer, int64_t in,
                                                   const A* x, int64_t ldx, Shrunk<T>* s) {
  constexpr int LINE = 64 / (int)sizeof(T), EACH = N / R;
  const int64_t near = PAGE * in - AHEAD<T>;  // up to here, what is prefetched is in the same page
  const T *a[N], *then[N];
  const A* row[R];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    a[n] = arena + pages[n].at + layer * pages[n].by_layer;
    then[n] = arena + next[n].at + layer * next[n].by_layer - near;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) row[r] = x + pages[r * EACH].row * ldx;
  constexpr int SUMS = N < 4 ? 4 : N;
  float scale[SUMS] = {};
  for (int n = 0; n < N; ++n) scale[n] = pages[n].scale[layer];
  Shrunk<T> sums[PAGE][SUMS];
  for (int k = 0; k < PAGE; ++k) {
    vf acc[SUMS];
#pragma GCC unroll 8
    for (vf& sum : acc) sum = zero();
    int64_t i = 0;
    const auto line = [&](const T* const* ahead) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) prefetch(ahead[n] + i);
#if MOTET_LEVEL == 3
      if constexpr (sizeof(A) == 2) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[n] = multiplied(acc[n], a[n] + i, row[n / EACH] + i);
        return;
      }
#endif
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < LINE; j += W) {
          const vf value = load(row[r] + i + j);
#pragma GCC unroll 8
          for (int n = r * EACH; n < (r + 1) * EACH; ++n) acc[n] += load(a[n] + i + j) * value;
        }
    };
    const T* soon[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) soon[n] = a[n] + AHEAD<T>;
    for (const int64_t end = std::min(in, near - k * in); i + LINE <= end; i += LINE) line(soon);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) soon[n] = then[n] + k * in;
    for (; i + LINE <= in; i += LINE) line(soon);
    for (; i < in; i += W) {
      const int live = (int)std::min<int64_t>(W, in - i);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[n] += load_n(a[n] + i, live) * load_n(row[n / EACH] + i, live);
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; n += 4) {
      float four[4];
      sum4(acc[n], acc[n + 1], acc[n + 2], acc[n + 3], four);
      for (int j = 0; j < 4; ++j) four[j] *= scale[n + j];
      rounded(four, 1, sums[k] + n);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) a[n] += in;
  }
  for (int n = 0; n < N; ++n) put<0, PAGE>(s + pages[n].s, pages[n].ranks, [&](int k) { return sums[k][n]; });
}

// A piece of one row each. It may have more pages than SIDE_BY_SIDE when there are few adapters.
template <class T, class A>
static void shrink_beside(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                          const A* x, int64_t ldx, Shrunk<T>* s) {
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

// Sums of R rows for 2 W outputs in the order of `load_two`, to which one rank is added at a time.
template <class T, int R>
struct RankSums {
  typedef vf Value;
  typedef Two Weights;
  static constexpr int RANKS = 1;
  Two of[R];

  INLINE Value value(const float* s) { return broadcast(*s); }
  INLINE Weights weights(const T* const* b, int64_t i) { return load_two(b[0] + i); }
  __attribute__((always_inline)) void take(float* const* y, int64_t i) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) of[r] = sorted(load_two(y[r] + i), (const T*)nullptr);
  }
  __attribute__((always_inline)) void add(int r, Weights weights, Value value) {
    of[r].a += weights.a * value;
    of[r].b += weights.b * value;
  }
  __attribute__((always_inline)) void give(float* const* y, int64_t i) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Two v = unsorted(of[r], (const T*)nullptr);
      store(y[r] + i, v.a);
      store(y[r] + i + W, v.b);
    }
  }
};
template <class T, int R>
struct SumsOf {
  typedef RankSums<T, R> type;
};
#if MOTET_LEVEL == 3
template <int R>
struct SumsOf<bf16, R> {
  typedef PairSums<R> type;
};
#endif

// N streams of `ranks` ranks for each of R adapters with E rows, outputs [0, n) from where `streams` and `y` point, the same sums as in
// `expand_rows`. `next` are read next.
// in one piece: its sums stay in registers from the first line to the last
template <class T, int N, int R, int E>
static __attribute__((noinline)) void expand_streams(const T* layer, const int64_t* streams, const T* layer_next, const int64_t* next,
                                                     int ranks, int64_t out, int64_t n, const Shrunk<T>* const* s, float* const* y) {
  typedef typename SumsOf<T, E>::type Block;
  typedef typename Block::Value Value;
  constexpr int LINE = 64 / (int)sizeof(T), COLUMNS = std::max(2 * W, LINE), STEP = Block::RANKS, ALL = R * N;
  // a part of the outputs is prefetched a rank ahead
  const int64_t distance = n == out ? AHEAD<T> : out, near = n == out ? ranks * n - AHEAD<T> : (ranks - 1) * n;
  const T *b[ALL], *then[ALL];
#pragma GCC unroll 8
  for (int j = 0; j < ALL; ++j) b[j] = layer + streams[j], then[j] = layer_next + next[j] - near;
  for (int k = 0; k < ranks; ++k) {
    Value value[R * E][N / STEP];
#pragma GCC unroll 8
    for (int row = 0; row < R * E; ++row)
#pragma GCC unroll 8
      for (int j = 0; j < N; j += STEP) value[row][j / STEP] = Block::value(s[row] + k * N + j);
    const auto add = [&](const T* const* b, float* const* y, int64_t i) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Block sums;
        sums.take(y + r * E, i);
#pragma GCC unroll 8
        for (int j = 0; j < N; j += STEP) {
          const typename Block::Weights weights = Block::weights(b + r * N + j, i);
#pragma GCC unroll 4
          for (int e = 0; e < E; ++e) sums.add(e, weights, value[r * E + e][j / STEP]);
        }
        sums.give(y + r * E, i);
      }
    };
    const T* soon[ALL];
    int64_t i = 0;
    const auto columns = [&] {
#pragma GCC unroll 8
      for (int j = 0; j < ALL; ++j)
#pragma GCC unroll 2
        for (int line = 0; line < COLUMNS; line += LINE) prefetch(soon[j] + i + line);
#pragma GCC unroll 2
      for (int block = 0; block < COLUMNS; block += 2 * W) add(b, y, i + block);
    };
#pragma GCC unroll 8
    for (int j = 0; j < ALL; ++j) soon[j] = b[j] + distance;
    for (const int64_t end = std::min(n, near - k * n); i + COLUMNS <= end; i += COLUMNS) columns();
#pragma GCC unroll 8
    for (int j = 0; j < ALL; ++j) soon[j] = then[j] + k * n;
    for (; i + COLUMNS <= n; i += COLUMNS) columns();
    for (; i < n; i += 2 * W) {  // the last outputs, in memory that is large enough
      const int live = (int)std::min<int64_t>(2 * W, n - i);
      T weights[ALL][2 * W] = {};
      float sums[R * E][2 * W] = {};
      const T* from[ALL];
      float* to[R * E];
      for (int j = 0; j < ALL; ++j) from[j] = (const T*)memcpy((void*)weights[j], b[j] + i, live * sizeof(T));
      for (int row = 0; row < R * E; ++row) to[row] = (float*)memcpy(sums[row], y[row] + i, live * sizeof(float));
      add(from, to, 0);
      for (int row = 0; row < R * E; ++row) memcpy(y[row] + i, sums[row], live * sizeof(float));
    }
#pragma GCC unroll 8
    for (int j = 0; j < ALL; ++j) b[j] += out;
  }
}

// `piece` and those beside it, of the same module with as many pages. `place(row, i)`: see expand_piece_to; i counts these pieces.
template <class T, class Place>
static void expand_beside(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                          const Shrunk<T>* s, const Place& place) {
  const auto layer_of = [&](int module) { return (const T*)pool.arena + layer * PAGE * (pool.in[module] + pool.out[module]); };
  const T* here = layer_of(piece.module);
  const int64_t* streams = &plan.lone_streams[piece.begin];
  const int rows = 1 + piece.others;
  for (int p = 0, some; p < piece.pages; p += some) {
    some = side_by_side(piece.pages - p);
    for (int r = 0, together; r < rows; r += together) {
      together = power_of_two(rows_beside(some), rows - r);
      const Shrunk<T>* from[SIDE_BY_SIDE];
      float* to[SIDE_BY_SIDE];
      for (int j = 0; j < together; ++j) {
        const LoraPiece& one = plan.beside_of(piece, r + j);
        from[j] = s + one.s + p * PAGE, to[j] = place(one.row0, r + j);
      }
      const int64_t* next = streams + together * some * streams_per_page(some);
      const bool last = p + some == piece.pages && r + together == rows && after && after->rows == 1;
      const auto run = [&](auto N, auto R) {
        expand_streams<T, N.value, R.value, 1>(here, streams, last ? layer_of(after->module) : here,
                                               last ? &plan.lone_streams[after->begin] : next, PAGE / streams_per_page(some),
                                               pool.out[piece.module], piece.count, from, to);
      };
      some >= 4 ? run(number<8>, number<1>) : together == 2 ? run(number<4>, number<2>) : run(number<4>, number<1>);
      streams = next;
    }
  }
}

// Pages [p, p + some) of an adapter with a few rows: all rows while they are in the cache. `b` are all of its pages.
template <class T>
static void expand_few(const T* const* b, int pages, int p, int64_t out, int64_t n, const Shrunk<T>* s, int64_t width, float* const* y,
                       int rows) {
  const int some = side_by_side(pages - p), parts = streams_per_page(some), ranks = PAGE / parts;
  const auto streams_of = [&](int page, int64_t* at) {
    for (int j = 0; j < some * parts; ++j) at[j] = b[std::min(page + j / parts, pages - 1)] + j % parts * ranks * out - b[0];
  };
  int64_t streams[SIDE_BY_SIDE], next[SIDE_BY_SIDE];
  streams_of(p, streams);
  streams_of(p + some < pages ? p + some : p, next);
  for (int r = 0, together; r < rows; r += together) {
    together = power_of_two(4, rows - r);
    const Shrunk<T>* from[4];
    for (int j = 0; j < together; ++j) from[j] = s + (r + j) * width + p * PAGE;
    const auto run = [&](auto N, auto E) {
      expand_streams<T, N.value, 1, E.value>(b[0], streams, b[0], next, ranks, out, n, from, y + r);
    };
    const auto run_rows = [&](auto N) { together == 4 ? run(N, number<4>) : together == 2 ? run(N, number<2>) : run(N, number<1>); };
    some >= 4 ? run_rows(number<8>) : run_rows(number<4>);
  }
}

}  // namespace motet
