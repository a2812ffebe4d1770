// Multi-adapter LoRA over rank-sized pages (see kernels/pool.py): y[row, out] += scale * B (A x[row]).
//
//   plan      rows sorted by adapter; work cut into pieces of similar size, the same pieces for every layer
//   shrink    piece = rows of one adapter x some pages of A:     s[row, rank] = scale * A x[row], float (bfloat16 on tiles and by pairs)
//   expand    piece = rows of one adapter x some outputs of B:   y[row, out] += B s[row], pages in order
//
// An adapter's page is read from memory once per step and layer however many rows it has.
#pragma once
#include "lora_streams.h"
#include "lora_tiles.h"

namespace motet {

// 8 ranks x R rows of dot products over `in`. `s` has the whole rows, and `ranks` those of the page.
// in one piece: its sums stay in registers from the first line to the last
template <class T, class A, int R>
INLINE void shrink_rows(const T* a, const A* const* x, int64_t in, float scale, Shrunk<T>* const* s,
                        const Ranks& ranks, Next& all_next) {
  constexpr int N = MOTET_LEVEL >= 2 || (MOTET_LEVEL == 1 && R == 1) ? 8 : 4;  // ranks that fit the registers
  Next next = all_next;  // a local copy stays in registers
  for (int half = 0; half < PAGE; half += N, a += N * in) {
    vf acc[N][R];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[n][r] = zero();
    int64_t i = 0;
#if MOTET_LEVEL >= 3
    if constexpr (sizeof(A) == 2) {
      for (; i + 32 <= in; i += 32) {
        __m512bh value[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) value[r] = pairs(x[r] + i);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const __m512bh weights = pairs(a + n * in + i);
          next.line();
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[n][r] = _mm512_dpbf16_ps(acc[n][r], weights, value[r]);
        }
      }
    }
#endif
    for (; i + W <= in; i += W) {
      vf value[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) value[r] = load(x[r] + i);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const vf weights = load(a + n * in + i);
        if (i % (64 / sizeof(T)) == 0) next.line();
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[n][r] += weights * value[r];
      }
    }
    if (i < in)
      for (int n = 0; n < N; ++n) {
        const vf weights = load_n(a + n * in + i, (int)(in - i));
        for (int r = 0; r < R; ++r) acc[n][r] += weights * load_n(x[r] + i, (int)(in - i));
      }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float four[4];
      sum4(acc[0][r], acc[1][r], acc[2][r], acc[3][r], four);
      half == 0 ? put4<0>(s[r], ranks, four, scale) : put4<4>(s[r], ranks, four, scale);
      if constexpr (N == 8) {
        sum4(acc[4][r], acc[5][r], acc[6][r], acc[7][r], four);
        put4<4>(s[r], ranks, four, scale);
      }
    }
  }
  all_next = next;
}

// The pages of A that a piece reads.
template <class T>
INLINE void add_pages(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, int64_t layer, AheadQueue& queue) {
  const int64_t bytes = PAGE * pool.in[piece.module] * (int64_t)sizeof(T);
  for (int p = 0; p < piece.count; ++p) {
    if (SIDE_BY_SIDE > 1 && piece.rows == 1) {
      const LoraPage& page = plan.lone_pages[piece.begin + p];
      queue.add((const T*)pool.arena + page.at + layer * page.by_layer, bytes);
    } else {
      queue.add(lora_page<T>(pool, piece.slot, piece.module, piece.first + p, layer), bytes);
    }
  }
}

template <class T, class A>
static void shrink_piece(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                         const A* x, int64_t ldx, float* s) {
  typedef Shrunk<T> S;
  const int64_t in = pool.in[piece.module], width = piece.pages * PAGE;
  if constexpr (SIDE_BY_SIDE > 1)
    if (piece.rows == 1) return shrink_beside<T>(pool, plan, piece, after, layer, x, ldx, (S*)s);
  const float scale = pool.scales[(piece.slot * MODULES + piece.module) * pool.layers + layer];
  const A* rows[LORA_ROWS];
  for (int r = 0; r < piece.rows; ++r) rows[r] = x + plan.order[piece.row0 + r] * ldx;
  S* whole = (S*)s + piece.s;  // the first row of s, of all pages
  // the pages of this piece, then the first one of the next
  const auto page = [&](int p) {
    if (p < piece.count) return lora_page<T>(pool, piece.slot, piece.module, piece.first + p, layer);
    return lora_page<T>(pool, after->slot, after->module, after->first, layer);
  };
  const auto next = [&](int p) {
    if (p + 1 >= piece.count && !after) return Next();
    return Next(page(p + 1), p + 1 < piece.count ? in : pool.in[after->module], in);
  };
  if constexpr (lora_on_tiles<T>) {
    if (in % 32 == 0) return shrink_on_tiles(page, next, piece, rows, in, scale, whole + piece.first * PAGE, width);
  } else if constexpr (lora_by_pairs<T>) {
    if (in % 32 == 0 && piece.rows >= STRETCHED_ROWS) {
      for (int p = 0; p < piece.count; ++p) {
        const Ranks ranks(piece.pages, piece.first + p);
        shrink_many(page(p), rows, piece.rows, in, {whole, width, ranks, scale}, next(p));
      }
      return;
    }
  }
  for (int p = 0; p < piece.count; ++p) {
    const Ranks ranks(piece.pages, piece.first + p);
    Next ahead = next(p);
    for (int r = 0; r < piece.rows;) {
      const int n = std::min(3, piece.rows - r);
      S* to[3];
      for (int j = 0; j < n; ++j) to[j] = whole + (r + j) * width;
      if (n == 3) shrink_rows<T, A, 3>(page(p), rows + r, in, scale, to, ranks, ahead);
      if (n == 2) shrink_rows<T, A, 2>(page(p), rows + r, in, scale, to, ranks, ahead);
      if (n == 1) shrink_rows<T, A, 1>(page(p), rows + r, in, scale, to, ranks, ahead);
      r += n;
    }
  }
}

// y[r] += s[r] B for `pages` pages, outputs [0, n) from where `b` and `y` point. `b` has a pointer for each page, or with
// SIDE_BY_SIDE for each rank, in the order of s.
template <class T, int R>
INLINE void expand_rows(const T* const* b, int pages, int64_t out, int64_t n, const float* const* s, float* const* y, Next& all_next) {
  constexpr int C = MOTET_LEVEL == 1 && R == 1 && sizeof(T) == 2 ? 2 : 1;  // half a line at a time would be prefetched twice as fast as read
  constexpr int COLUMNS = C * 2 * W, LINES = (COLUMNS * (int)sizeof(T) + 63) / 64;  // of a rank's vectors
  Next next = all_next;
  int64_t i = 0;
  for (; i + COLUMNS <= n; i += COLUMNS) {
    Two acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) acc[r][c] = sorted(load_two(y[r] + i + c * 2 * W), b[0]);
    for (int p = 0; p < pages; ++p)
#pragma GCC unroll 8
      for (int k = 0; k < PAGE; ++k) {
        const T* rank = (SIDE_BY_SIDE > 1 ? b[p * PAGE + k] : b[p] + k * out) + i;
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          const Two weights = load_two(rank + c * 2 * W);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            acc[r][c].a += weights.a * s[r][p * PAGE + k];
            acc[r][c].b += weights.b * s[r][p * PAGE + k];
          }
        }
#pragma GCC unroll 2
        for (int j = 0; j < LINES; ++j) next.line();
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const Two v = unsorted(acc[r][c], b[0]);
        store(y[r] + i + c * 2 * W, v.a);
        store(y[r] + i + c * 2 * W + W, v.b);
      }
  }
  for (; i < n; i += W) {
    const int live = (int)std::min<int64_t>(W, n - i);
    for (int r = 0; r < R; ++r) {
      vf acc = load_n(y[r] + i, live);
      for (int p = 0; p < pages; ++p)
        for (int k = 0; k < PAGE; ++k) {
          const T* rank = (SIDE_BY_SIDE > 1 ? b[p * PAGE + k] : b[p] + k * out) + i;
          acc += load_n(rank, live) * s[r][p * PAGE + k];
        }
      store_n(y[r] + i, acc, live);
    }
  }
  all_next = next;
}

// The ranks of all pages of B in the order of a row of s, where `b` are the pages.
template <class T>
INLINE const T** in_order_of_s(const T* const* b, int pages, int64_t out, const T** ranks) {
  for (int p = 0, together; p < pages; p += together) {
    together = side_by_side(pages - p);
    const int parts = streams_per_page(together), each = PAGE / parts, step = together * parts;
    const T** to = ranks + p * PAGE;
    for (int j = 0; j < together; ++j) {
      const T* rank = b[p + j];
      for (int part = 0; part < parts; ++part, ++to)
        for (int k = 0; k < each; ++k, rank += out) to[k * step] = rank;
    }
  }
  return ranks;
}

// The first of the group's outputs that a piece adds to.
INLINE int64_t first_column(const Pool& pool, const LoraPiece& piece) {
  int64_t column = piece.first;
  for (int m = piece.module; m > 0 && m != 3 && m != 4 && m != 6; --m) column += pool.out[m - 1];
  return column;
}

// Pages [p, p + together) of B for all rows of a piece, R of them at a time.
template <class T, int R>
INLINE void expand_pages(const LoraPiece& piece, const T* const* pages, int p, int together, int64_t out, const Shrunk<T>* sums,
                         float* const* to, Next& next) {
  typedef Shrunk<T> S;
  const int64_t width = piece.pages * PAGE;
  if constexpr (lora_on_tiles<T>) {
    if (piece.rows >= R)
      expand_on_tiles(pages + p, together, out, piece.count, sums + p * PAGE, width, to, piece.rows, next);
    else
      for (int r = 0; r < piece.rows; ++r)
        expand_like_tiles(pages + p, 1, out, piece.count, sums + r * width + p * PAGE, to[r], next);
  } else {
    const T* ranks[SIDE_BY_SIDE > 1 ? MAX_PAGES * PAGE : 1];
    const T* const* b = pages + p;
    if (SIDE_BY_SIDE > 1) b = in_order_of_s(pages, piece.pages, out, ranks);
    if constexpr (lora_by_pairs<T>) {
      expand_many(b, together * PAGE, piece.count, sums + p * PAGE, width, to, piece.rows, next);
    } else {
      for (int r = 0; r < piece.rows;) {
        const int n = piece.rows - r >= R ? R : 1;
        const S* from[R];
        for (int j = 0; j < n; ++j) from[j] = sums + (r + j) * width + p * PAGE;
        if (n == R)
          expand_rows<T, R>(b, together, out, piece.count, from, to + r, next);
        else
          expand_rows<T, 1>(b, together, out, piece.count, from, to + r, next);
        r += n;
      }
    }
  }
}

// `place(row, i)`: the piece's first output of the i-th of its rows, which has that place in `plan.order`.
template <class T, class Place>
static void expand_piece_to(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                            const float* s, const Place& place) {
  typedef Shrunk<T> S;
  const int64_t in = pool.in[piece.module], out = pool.out[piece.module];
  if constexpr (SIDE_BY_SIDE > 1)
    if (piece.rows == 1) return expand_beside<T>(pool, plan, piece, after, layer, (const S*)s, place);
  const T* pages[MAX_PAGES];
  for (int p = 0; p < piece.pages; ++p)
    pages[p] = lora_page<T>(pool, piece.slot, piece.module, p, layer) + PAGE * in + piece.first;
  float* to[LORA_ROWS];
  for (int r = 0; r < piece.rows; ++r) to[r] = place(piece.row0 + r, r);
  const S* sums = (const S*)s + piece.s;
  // many rows: all pages for some outputs, whose sums stay in registers; few rows: page after page, or SIDE_BY_SIDE, in order of address
  constexpr int R = lora_by_pairs<T> ? 8 : 4;
  for (int p = 0, together; p < piece.pages; p += together) {
    together = piece.rows >= R ? piece.pages : side_by_side(piece.pages - p);
    if constexpr (SIDE_BY_SIDE > 1)
      if (piece.rows < R) {
        expand_few(pages, piece.pages, p, out, piece.count, sums, piece.pages * PAGE, to, piece.rows);
        continue;
      }
    const LoraPiece* soon = p + together < piece.pages ? &piece : after;
    Next next;
    if (soon && soon->count == pool.out[soon->module]) {  // a piece with some of the outputs has many rows: computing hides the reads
      const T* page = lora_page<T>(pool, soon->slot, soon->module, soon == &piece ? p + together : 0, layer);
      next = Next(page + PAGE * pool.in[soon->module], soon->count, piece.count);
    }
    expand_pages<T, R>(piece, pages, p, together, out, sums, to, next);
  }
}

// y[row] += s B, float rows of all outputs of the group.
template <class T>
static void expand_piece(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                         const float* s, float* y, int64_t ldy) {
  float* first = y + first_column(pool, piece);
  expand_piece_to<T>(pool, plan, piece, after, layer, s, [&](int64_t row, int) { return first + plan.order[row] * ldy; });
}

}  // namespace motet
