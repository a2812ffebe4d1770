// Multi-adapter LoRA over rank-sized pages (see kernels/pool.py): y[row, out] += scale * B (A x[row]).
//
//   plan      rows sorted by adapter; work cut to pieces of similar size, the same pieces for every layer
//   shrink    piece = rows of one adapter x some pages of A:     s[row, rank] = scale * A x[row], float
//   expand    piece = rows of one adapter x some outputs of B:   y[row, out] += B s[row], pages in order
//
// An adapter's page is read from memory once per step and layer however many rows it has.
#pragma once
#include "gemm.h"

namespace motet {

constexpr int PAGE = 8;       // ranks
constexpr int MODULES = 7;    // q k v o gate up down
constexpr int GROUPS = 4;     // fused: qkv, o, gate_up, down
constexpr int GROUP_START[GROUPS + 1] = {0, 3, 4, 6, 7};
constexpr int LORA_ROWS = 48;  // of one piece
constexpr int MAX_PAGES = 128;  // of one adapter: rank 1024

struct LoraPiece {
  int32_t row0, rows;    // into LoraPlan::order
  int32_t slot, module;
  int32_t pages;         // of the adapter: a row of s has 8 * pages values
  int32_t first, count;  // shrink: pages; expand: outputs
  int64_t s;             // where s of row0 starts
};

struct LoraPlan {
  std::vector<int32_t> order, first_of_slot;
  std::vector<LoraPiece> shrink[GROUPS], expand[GROUPS];
  std::vector<uint8_t> on_gate_up;  // [rows]: 1 for those whose adapter adds to the gate or up projection
  int64_t s_size = 0;

  // `row_slot` [rows]; only loaded slots are named. Allocates only beyond the largest step so far.
  void build(const Pool& pool, const int32_t* row_slot, int64_t rows, int64_t element_bytes, int team) {
    order.clear();
    on_gate_up.assign(rows, 0);
    s_size = 0;
    for (int g = 0; g < GROUPS; ++g) shrink[g].clear(), expand[g].clear();
    first_of_slot.assign(pool.slots + 1, 0);
    for (int64_t r = 0; r < rows; ++r)
      if (row_slot[r] >= 0) ++first_of_slot[row_slot[r] + 1];
    for (int64_t s = 0; s < pool.slots; ++s) first_of_slot[s + 1] += first_of_slot[s];
    order.resize(first_of_slot[pool.slots]);
    for (int64_t r = 0; r < rows; ++r)
      if (row_slot[r] >= 0) order[first_of_slot[row_slot[r]]++] = (int32_t)r;
    // first_of_slot[s] is now the end of s
    int64_t adapters = 0;
    for (int64_t s = 0; s < pool.slots; ++s) adapters += first_of_slot[s] > (s ? first_of_slot[s - 1] : 0);
    // few adapters are cut finely, so that everybody has as much work; of many, each page is read in one go
    const bool few = adapters < 4 * team;
    const int32_t rows_each = few ? LORA_ROWS / 3 : LORA_ROWS;
    for (int64_t slot = 0; slot < pool.slots; ++slot) {
      const int32_t begin = slot ? first_of_slot[slot - 1] : 0, end = first_of_slot[slot];
      if (begin == end) continue;
      for (int g = 0; g < GROUPS; ++g)
        for (int m = GROUP_START[g]; m < GROUP_START[g + 1]; ++m) {
          const int32_t pages = pool.pages[slot * MODULES + m];
          if (!pages) continue;
          const int64_t in = pool.in[m], out = pool.out[m];
          const int32_t pages_each = few ? 1 : (int32_t)std::max<int64_t>(1, (24 << 10) / (PAGE * in * element_bytes));
          const int64_t most = (few ? 8 << 10 : 256 << 10) / (PAGE * pages * element_bytes);
          const int32_t columns = (int32_t)std::max<int64_t>(64, round_up(std::min(out, most), 64));
          for (int32_t row = begin; row < end; row += rows_each) {
            const int32_t n = std::min(rows_each, end - row);
            for (int32_t p = 0; p < pages; p += pages_each)
              shrink[g].push_back({row, n, (int32_t)slot, m, pages, p, std::min(pages_each, pages - p), s_size});
            for (int32_t c = 0; c < out; c += columns)
              expand[g].push_back({row, n, (int32_t)slot, m, pages, c, (int32_t)std::min<int64_t>(columns, out - c), s_size});
            s_size += (int64_t)n * pages * PAGE;
            if (g == 2)
              for (int32_t i = row; i < row + n; ++i) on_gate_up[order[i]] = 1;
          }
        }
    }
  }
};

template <class T>
INLINE const T* lora_page(const Pool& pool, int slot, int module, int page, int64_t layer) {
  const int64_t line = pool.table[(slot * MODULES + module) * pool.max_pages + page];
  return (const T*)pool.arena + line * 8 + layer * PAGE * (pool.in[module] + pool.out[module]);
}

// The page that is read next, prefetched little by little between the loads of the one that is read now: a burst would take
// all of a core's line buffers.
struct Next {
  const char *at = nullptr, *end = nullptr;
  int each = 1;  // lines for every line of the page that is read now

  Next() = default;
  template <class T>
  Next(const T* page, int64_t width, int64_t width_now)
      : at((const char*)page), end((const char*)(page + PAGE * width)), each((int)((width + width_now - 1) / width_now)) {}
  __attribute__((always_inline)) void line() {
    for (int j = 0; j < each && at < end; ++j, at += 64) prefetch(at);
  }
};

// 8 ranks x R rows of dot products over `in`.
template <class T, class A, int R>
INLINE void shrink_rows(const T* a, const A* const* x, int64_t in, float scale, float* const* s, Next& all_next) {
  constexpr int N = MOTET_LEVEL >= 2 ? 8 : 4;  // ranks that fit the registers
  Next next = all_next;  // a copy of our own stays in registers
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
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int n = 0; n < N; n += 4) {
        float four[4];
        sum4(acc[n][r], acc[n + 1][r], acc[n + 2][r], acc[n + 3][r], four);
        for (int j = 0; j < 4; ++j) s[r][half + n + j] = four[j] * scale;
      }
  }
  all_next = next;
}

template <class T, class A>
static void shrink_piece(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                         const A* x, int64_t ldx, float* s) {
  const float scale = pool.scales[(piece.slot * MODULES + piece.module) * pool.layers + layer];
  const int64_t in = pool.in[piece.module], width = piece.pages * PAGE;
  for (int p = 0; p < piece.count; ++p) {
    const T* a = lora_page<T>(pool, piece.slot, piece.module, piece.first + p, layer);
    const LoraPiece* soon = p + 1 < piece.count ? &piece : after;
    Next next;
    if (soon) {
      const int page = soon == &piece ? piece.first + p + 1 : soon->first;
      next = Next(lora_page<T>(pool, soon->slot, soon->module, page, layer), pool.in[soon->module], in);
    }
    const A* rows[4];
    float* sums[4];
    for (int r = 0; r < piece.rows;) {
      const int n = std::min(3, piece.rows - r);
      for (int j = 0; j < n; ++j) {
        rows[j] = x + plan.order[piece.row0 + r + j] * ldx;
        sums[j] = s + piece.s + (r + j) * width + (piece.first + p) * PAGE;
      }
      if (n == 3) shrink_rows<T, A, 3>(a, rows, in, scale, sums, next);
      if (n == 2) shrink_rows<T, A, 2>(a, rows, in, scale, sums, next);
      if (n == 1) shrink_rows<T, A, 1>(a, rows, in, scale, sums, next);
      r += n;
    }
  }
}

// Two vectors of weights or of y: neighbours, except that bf16 comes as the even and the odd ones, which are cheaper to widen.
struct Two {
  vf a, b;
};
#if MOTET_LEVEL >= 2
INLINE Two load_two(const bf16* p) {
  vu both;
  memcpy(&both, p, sizeof both);
  return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
}
INLINE Two sorted(Two v, const bf16*) {
  const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {_mm512_permutex2var_ps(v.a, (__m512i)even, v.b), _mm512_permutex2var_ps(v.a, (__m512i)(even + 1), v.b)};
}
INLINE Two unsorted(Two v, const bf16*) {
  const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  return {_mm512_permutex2var_ps(v.a, (__m512i)low, v.b), _mm512_permutex2var_ps(v.a, (__m512i)(low + 8), v.b)};
}
#endif
template <class T>
INLINE Two load_two(const T* p) {
  return {load(p), load(p + W)};
}
template <class T>
INLINE Two sorted(Two v, const T*) {
  return v;
}
template <class T>
INLINE Two unsorted(Two v, const T*) {
  return v;
}

// y[r] += s[r] B for `pages` pages, outputs [0, n) from where `b` and `y` point.
template <class T, int R>
INLINE void expand_rows(const T* const* b, int pages, int64_t out, int64_t n, const float* const* s, float* const* y, Next& all_next) {
  constexpr int LINES = (2 * W * (int)sizeof(T) + 63) / 64;  // of a rank's two vectors
  Next next = all_next;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    Two acc[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = sorted({load(y[r] + i), load(y[r] + i + W)}, b[0]);
    for (int p = 0; p < pages; ++p)
#pragma GCC unroll 8
      for (int k = 0; k < PAGE; ++k) {
        const Two weights = load_two(b[p] + k * out + i);
#pragma GCC unroll 2
        for (int j = 0; j < LINES; ++j) next.line();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          acc[r].a += weights.a * s[r][p * PAGE + k];
          acc[r].b += weights.b * s[r][p * PAGE + k];
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Two v = unsorted(acc[r], b[0]);
      store(y[r] + i, v.a);
      store(y[r] + i + W, v.b);
    }
  }
  for (; i < n; i += W) {
    const int live = (int)std::min<int64_t>(W, n - i);
    for (int r = 0; r < R; ++r) {
      vf acc = load_n(y[r] + i, live);
      for (int p = 0; p < pages; ++p)
        for (int k = 0; k < PAGE; ++k) acc += load_n(b[p] + k * out + i, live) * s[r][p * PAGE + k];
      store_n(y[r] + i, acc, live);
    }
  }
  all_next = next;
}

template <class T>
static void expand_piece(const Pool& pool, const LoraPlan& plan, const LoraPiece& piece, const LoraPiece* after, int64_t layer,
                         const float* s, float* y, int64_t ldy) {
  const int64_t in = pool.in[piece.module], out = pool.out[piece.module], width = piece.pages * PAGE;
  int64_t column = piece.first;
  for (int m = piece.module; m > 0 && m != 3 && m != 4 && m != 6; --m) column += pool.out[m - 1];
  constexpr int R = 4;
  const T* pages[MAX_PAGES];
  for (int p = 0; p < piece.pages; ++p)
    pages[p] = lora_page<T>(pool, piece.slot, piece.module, p, layer) + PAGE * in + piece.first;
  // many rows: all pages for some outputs, which stay in registers; few: a page after the other, in order of address
  const int together = piece.rows >= R ? piece.pages : 1;
  for (int p = 0; p < piece.pages; p += together) {
    const LoraPiece* soon = p + together < piece.pages ? &piece : after;
    Next next;
    if (soon && soon->count == pool.out[soon->module]) {  // some outputs only: rows of one adapter, which compute anyway
      const T* page = lora_page<T>(pool, soon->slot, soon->module, soon == &piece ? p + together : 0, layer);
      next = Next(page + PAGE * pool.in[soon->module], soon->count, piece.count);
    }
    const float* from[R];
    float* to[R];
    for (int r = 0; r < piece.rows;) {
      const int n = piece.rows - r >= R ? R : 1;
      for (int j = 0; j < n; ++j) {
        from[j] = s + piece.s + (r + j) * width + p * PAGE;
        to[j] = y + plan.order[piece.row0 + r + j] * ldy + column;
      }
      if (n == R)
        expand_rows<T, R>(pages + p, together, out, piece.count, from, to, next);
      else
        expand_rows<T, 1>(pages + p, together, out, piece.count, from, to, next);
      r += n;
    }
  }
}

}  // namespace motet
