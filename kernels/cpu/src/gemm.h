// y[m, n] (+)= x[m, k] w[n, k]^T (* scale[n]) (+ bias[n]) with weights packed once, sums in float.
//
// A packed matrix is panels of 16 outputs, each contiguous, k padded to 32 with zeros, n to 16:
//
//   F32   [k][16]            one line of 64 bytes is one k
//   F16   [k][16]            two
//   BF16  [k / 2][16][2]     two: what vdpbf16ps reads, and 16 lines are an AMX tile
//   I8    [k / 2][16][2]     four
//
// Every sum runs over k in order in one accumulator, so a row's result does not depend on the other rows. A piece of work
// is a group of panels for a block of rows; while it computes it prefetches the group that comes next.
#pragma once
#include <algorithm>
#include <cstdlib>

#include "motet_cpu.h"
#include "simd.h"
#include "team.h"

namespace motet {

constexpr int PANEL = 16;

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The type in which activations meet weights: bf16 where the instruction set multiplies bf16 itself.
template <class T>
struct ActivationOf {
  typedef float type;
};
#if MOTET_LEVEL >= 3
template <>
struct ActivationOf<bf16> {
  typedef bf16 type;
};
#endif

template <class W_>
struct Packed;  // KL: k per line of 64 bytes
template <>
struct Packed<float> {
  static constexpr int KL = 1;
};
template <>
struct Packed<bf16> {
  static constexpr int KL = 2;
};
template <>
struct Packed<f16> {
  static constexpr int KL = 2;
};
template <>
struct Packed<int8_t> {
  static constexpr int KL = 4;
};

// Elements from one row of activations to the next: an odd number of lines, so that rows spread over the cache's sets.
template <class A>
int64_t row_stride(int64_t k) {
  const int64_t line = 64 / sizeof(A);
  return round_up(k, 2 * line) + line;
}

template <class A>
struct Gemm {
  const Matrix* w;
  const A* x;
  int64_t ldx;  // rows of x are padded to 32 values with zeros
  int64_t rows;
  float* y;
  int64_t ldy;
  bool add;
};

INLINE int64_t panel_bytes(const Matrix& w) {
  static const int bytes[] = {4, 2, 2, 1};
  return round_up(w.k, 32) * PANEL * bytes[w.type];
}

// Rows [row, row + R) of panels [panel, panel + P), from sums [R][P * 16].
template <class A>
INLINE void finish(const Gemm<A>& g, int64_t row, int rows, int64_t panel, int panels, const float* sums) {
  const Matrix& w = *g.w;
  for (int r = 0; r < rows; ++r)
    for (int p = 0; p < panels; ++p)
      for (int at = 0; at < PANEL; at += W) {
        const int64_t n = (panel + p) * PANEL + at;
        const int live = (int)std::min<int64_t>(W, w.n - n);
        if (live <= 0) break;
        vf v = load(sums + (r * panels + p) * PANEL + at);
        if (w.type == I8) v *= load_n(w.scale + n, live);
        if (w.bias) v += load_n(w.bias + n, live);
        float* y = g.y + (row + r) * g.ldy + n;
        if (g.add) v += load_n(y, live);
        store_n(y, v, live);
      }
}

#if MOTET_LEVEL >= 3
INLINE __m512bh pairs(const void* p) {
  __m512bh v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE __m512bh pair_everywhere(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}
#endif

// Which of a line's k: the vector of outputs [at, at + W) as floats.
INLINE vf line_values(const float* line, int, int at) { return load(line + at); }
INLINE vf line_values(const f16* line, int u, int at) { return load(line + u * PANEL + at); }
INLINE vf line_values(const bf16* line, int u, int at) {
  vu both;
  memcpy(&both, line + at * 2, sizeof both);
  return (vf)(u ? both & 0xffff0000u : both << 16);
}
INLINE vf line_values(const int8_t* line, int u, int at) {
  vh both;
  memcpy(&both, line + (u / 2) * 2 * PANEL + at * 2, sizeof both);
  const vi wide = __builtin_convertvector(both, vi);
  return __builtin_convertvector(u & 1 ? (wide << 16) >> 24 : (wide << 24) >> 24, vf);
}

struct Ahead {  // lines still to prefetch, `per_line` for every line of weights read
  const char* at;
  const char* end;
  int per_line;
};

template <class Wt, class A, int R, int P>
static __attribute__((noinline)) void sums_of(const Wt* w, int64_t panel_stride, const A* x, int64_t ldx, int64_t k,
                                              float* out, Ahead& ahead) {
  constexpr int KL = Packed<Wt>::KL, VP = PANEL / W;
  constexpr int LINE = 64 / sizeof(Wt);
  vf acc[R][P * VP];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P * VP; ++p) acc[r][p] = zero();
  const char* soon = ahead.at;
  for (int64_t i = 0; i < k; i += KL, w += LINE) {
    for (int j = 0; j < ahead.per_line && soon < ahead.end; ++j, soon += 64) prefetch(soon);
#if MOTET_LEVEL >= 3
    if constexpr (sizeof(A) == 2) {
      __m512bh weights[P];
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) weights[p] = pairs(w + p * panel_stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512bh value = pair_everywhere(x + r * ldx + i);
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], weights[p], value);
      }
      continue;
    }
#endif
    if constexpr (sizeof(A) == 4) {
#pragma GCC unroll 4
      for (int u = 0; u < KL; ++u) {
        vf weights[P * VP];
#pragma GCC unroll 16
        for (int p = 0; p < P * VP; ++p) weights[p] = line_values(w + (p / VP) * panel_stride, u, p % VP * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const vf value = broadcast(x[r * ldx + i + u]);
#pragma GCC unroll 16
          for (int p = 0; p < P * VP; ++p) acc[r][p] += value * weights[p];
        }
      }
    }
  }
  ahead.at = soon;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P * VP; ++p) store(out + r * P * PANEL + p * W, acc[r][p]);
}

#if MOTET_LEVEL >= 2
constexpr int GROUP = 3, BLOCK = 8;  // 24 accumulators of 32 registers
#else
constexpr int GROUP = 1, BLOCK = MOTET_LEVEL == 1 ? 6 : 2;
#endif

template <class Wt, class A, int R>
INLINE void block_of(const Gemm<A>& g, const Wt* w, int64_t stride, int64_t row, int64_t panel, int panels, Ahead& ahead) {
  alignas(64) float sums[R * GROUP * PANEL];
  const A* x = g.x + row * g.ldx;
  const int64_t k = round_up(g.w->k, 32);
  if (panels == 1)
    sums_of<Wt, A, R, 1>(w, stride, x, g.ldx, k, sums, ahead);
  else if (panels == 2)
    sums_of<Wt, A, R, GROUP >= 2 ? 2 : 1>(w, stride, x, g.ldx, k, sums, ahead);
  else
    sums_of<Wt, A, R, GROUP>(w, stride, x, g.ldx, k, sums, ahead);
  finish(g, row, R, panel, panels, sums);
}

template <class Wt, class A>
static void panels_by_vectors(const Gemm<A>& g, const Wt* w, int64_t stride, int64_t row0, int64_t row1, int64_t panel,
                              int panels, const char* next) {
  const int64_t blocks = (row1 - row0 + BLOCK - 1) / BLOCK;
  Ahead ahead{next, next ? next + panels * panel_bytes(*g.w) : next, (int)((panels + blocks - 1) / blocks)};
  int64_t row = row0;
  for (; row1 - row >= BLOCK; row += BLOCK) block_of<Wt, A, BLOCK>(g, w, stride, row, panel, panels, ahead);
  for (; row1 - row >= 4 && BLOCK >= 4; row += 4) block_of<Wt, A, BLOCK >= 4 ? 4 : 1>(g, w, stride, row, panel, panels, ahead);
  for (; row1 - row >= 2; row += 2) block_of<Wt, A, 2>(g, w, stride, row, panel, panels, ahead);
  for (; row < row1; ++row) block_of<Wt, A, 1>(g, w, stride, row, panel, panels, ahead);
}

#if MOTET_LEVEL >= 3
// I8 panels as BF16 ones; whole numbers below 256 are exact.
static void widen(const int8_t* from, bf16* to, int64_t k) {
  for (int64_t i = 0; i < k; i += 2, from += 2 * PANEL, to += 2 * PANEL) {
    const __m512i both = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
    const __m512i more = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + PANEL)));
    const __m512bh v = _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(more), _mm512_cvtepi32_ps(both));
    memcpy(to, &v, sizeof v);
  }
}
#endif

#if MOTET_LEVEL >= 4
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Two panels (or one) for rows in blocks of 32 (or 16): tiles 0-3 are sums, 4-5 rows of x, 6-7 weights. Rows of x are
// padded to 16 in memory; what they hold does not matter.
template <bool TWO_ROWS, bool TWO_PANELS>
INLINE void tiles_of(const bf16* w, int64_t stride, const bf16* x, int64_t ldx, int64_t k, float* out, Ahead& ahead) {
  asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char* soon = ahead.at;
  for (int64_t i = 0; i < k; i += 32) {
    for (int j = 0; j < 16 * ahead.per_line && soon < ahead.end; ++j, soon += 64) prefetch(soon);
    _tile_loadd(4, x + i, ldx * 2);
    _tile_loadd(6, w + i * PANEL, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (TWO_PANELS) {
      _tile_loadd(7, w + stride + i * PANEL, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (TWO_ROWS) {
      _tile_loadd(5, x + 16 * ldx + i, ldx * 2);
      _tile_dpbf16ps(2, 5, 6);
      if (TWO_PANELS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  ahead.at = soon;
  constexpr int wide = TWO_PANELS ? 2 * PANEL : PANEL;
  _tile_stored(0, out, wide * 4);
  if (TWO_PANELS) _tile_stored(1, out + PANEL, wide * 4);
  if (TWO_ROWS) _tile_stored(2, out + 16 * wide, wide * 4);
  if (TWO_ROWS && TWO_PANELS) _tile_stored(3, out + 16 * wide + PANEL, wide * 4);
}

static void panels_by_tiles(const Gemm<bf16>& g, const bf16* w, int64_t stride, int64_t row0, int64_t row1, int64_t panel,
                            int panels, const char* next) {
  alignas(64) float sums[32 * 2 * PANEL];
  const int64_t k = round_up(g.w->k, 32), blocks = (row1 - row0 + 31) / 32;
  Ahead ahead{next, next ? next + panels * panel_bytes(*g.w) : next, (int)((panels + blocks - 1) / blocks)};
  for (int64_t row = row0; row < row1; row += 32) {
    const bf16* x = g.x + row * g.ldx;
    const int rows = (int)std::min<int64_t>(32, row1 - row);
    if (rows > 16)
      panels == 2 ? tiles_of<true, true>(w, stride, x, g.ldx, k, sums, ahead)
                  : tiles_of<true, false>(w, stride, x, g.ldx, k, sums, ahead);
    else
      panels == 2 ? tiles_of<false, true>(w, stride, x, g.ldx, k, sums, ahead)
                  : tiles_of<false, false>(w, stride, x, g.ldx, k, sums, ahead);
    finish(g, row, rows, panel, panels, sums);
  }
}
#endif

// AMX tiles are configured per thread, for as long as this lives.
struct Tiles {
#if MOTET_LEVEL >= 4
  Tiles() {
    static const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
#endif
};

// The pieces of a product: [row block][panel group], numbered from 0.
template <class A>
struct GemmItems {
  int64_t rows_each, blocks, groups;
  int per_group;

  explicit GemmItems(const Gemm<A>& g) {
    const bool tiles = MOTET_LEVEL >= 4 && sizeof(A) == 2;
    per_group = tiles ? 2 : GROUP;
    groups = ((g.w->n + PANEL - 1) / PANEL + per_group - 1) / per_group;
    // rows of one block stay in the second-level cache while all panels pass by
    const int64_t fit = (768 << 10) / (int64_t)(g.ldx * sizeof(A));
    rows_each = std::max<int64_t>(96, fit / 96 * 96);
    blocks = (g.rows + rows_each - 1) / rows_each;
  }
  int64_t count() const { return blocks * groups; }
};

template <class A>
static void gemm_item(const Gemm<A>& g, const GemmItems<A>& items, int64_t item, int64_t next_item) {
  const Matrix& w = *g.w;
  const int64_t row0 = item / items.groups * items.rows_each, row1 = std::min(g.rows, row0 + items.rows_each);
  const int64_t panel = item % items.groups * items.per_group;
  const int panels = (int)std::min<int64_t>(items.per_group, (w.n + PANEL - 1) / PANEL - panel);
  const int64_t bytes = panel_bytes(w);
  const char* data = (const char*)w.data + panel * bytes;
  const int64_t next_panel = next_item < 0 ? 0 : next_item % items.groups * items.per_group;
  const char* next = next_item < 0 ? nullptr : (const char*)w.data + next_panel * bytes;
  if constexpr (sizeof(A) == 2) {
#if MOTET_LEVEL >= 3
    const bf16* weights = (const bf16*)data;
    int64_t stride = bytes / 2;
    if (w.type == I8) {
      static thread_local bf16* wide = nullptr;
      static thread_local int64_t capacity = 0;
      stride = round_up(w.k, 32) * PANEL;
      if (capacity < stride * GROUP) {
        free(wide);
        capacity = stride * GROUP;
        wide = (bf16*)aligned_alloc(64, round_up(capacity * 2, 64));
      }
      for (int p = 0; p < panels; ++p) widen((const int8_t*)data + p * bytes, wide + p * stride, round_up(w.k, 32));
      weights = wide;
    }
#if MOTET_LEVEL >= 4
    panels_by_tiles(g, weights, stride, row0, row1, panel, panels, next);
#else
    panels_by_vectors(g, weights, stride, row0, row1, panel, panels, next);
#endif
#endif
  } else {
    switch (w.type) {
      case F32: return panels_by_vectors(g, (const float*)data, bytes / 4, row0, row1, panel, panels, next);
      case BF16: return panels_by_vectors(g, (const bf16*)data, bytes / 2, row0, row1, panel, panels, next);
      case F16: return panels_by_vectors(g, (const f16*)data, bytes / 2, row0, row1, panel, panels, next);
      default: return panels_by_vectors(g, (const int8_t*)data, bytes, row0, row1, panel, panels, next);
    }
  }
}

// x of another type as activations, rows [row0, row1), padding included.
template <class T, class A>
INLINE void take_row(const T* x, A* to, int64_t k, int64_t stride) {
  int64_t i = 0;
  for (; i + W <= k; i += W) store(to + i, load(x + i));
  if (i < k) store_n(to + i, load_n(x + i, (int)(k - i)), (int)(k - i));
  memset((void*)(to + k), 0, (stride - k) * sizeof(A));
}

}  // namespace motet
