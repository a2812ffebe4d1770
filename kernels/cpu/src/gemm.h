// y[m, n] (+)= x[m, k] w[n, k]^T (* scale[n]) (+ bias[n]) with weights packed once, sums in float.
//
// A packed matrix is panels of 16 outputs, each contiguous, k padded to 32 with zeros, n to 16:
//
//   F32   [k][16]            one line of 64 bytes is one k
//   F16   [k][16]            two
//   BF16  [k / 2][16][2]     two: what vdpbf16ps reads, and 16 lines are an AMX tile
//   I8    [k / 4][16][4]     four, k padded to 64: gemm_integers.h
//   I4, I4_SHIFTED, I8_GROUPED    groups of 32 k, k padded to 64: gemm_integers.h
//
// Every sum runs over k in order in one accumulator, so a row's result does not depend on the other rows. A piece of work
// is a group of panels for a block of rows; while it computes it prefetches the group that comes next. A gated product
// computes a panel of the first half of the outputs together with the same panel of the second half and stores
// silu(first) * second as activations, so the two products are never written to memory.
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

// Elements from one row of activations to the next: an odd number of cache lines, so that rows spread over the cache's sets.
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
  A* gated = nullptr;  // takes the place of y: [rows, w.n / 2]
  int64_t ld_gated = 0;
  const uint8_t* plain = nullptr;  // [rows]: 1 for rows that need y as well
  char* rounded = nullptr;         // what integers are multiplied with: room for x as whole numbers, see gemm_integers.h
  const Gemm* then = nullptr;      // the product that follows, whose first weights a member prefetches with its last piece
};

// Bytes of 64 k of a panel in groups: a line of scales, perhaps one of zero points, and values.
INLINE constexpr int64_t grouped_bytes(int64_t type) { return (type == I8_GROUPED ? 18 : type == I4_SHIFTED ? 10 : 9) * 64; }

INLINE bool is_integer(int64_t type) { return type >= I8; }

INLINE int64_t panel_bytes(int64_t type, int64_t k) {
  static const int bytes[] = {4, 2, 2};
  if (type > I8) return round_up(k, 64) / 64 * grouped_bytes(type);
  return type == I8 ? round_up(k, 64) * PANEL : round_up(k, 32) * PANEL * bytes[type];
}
INLINE int64_t panel_bytes(const Matrix& w) { return panel_bytes(w.type, w.k); }

// silu(gate) * up
INLINE vf gated(vf gate, vf up) { return gate / (exp(-gate) + 1.0f) * up; }

// One panel's sums at `at` as values of the product.
template <class A>
INLINE vf finished(const Gemm<A>& g, const float* sums, int64_t n, int live) {
  vf v = load(sums);
  if (g.w->type == I8) v *= load_n(g.w->scale + n, live);
  if (g.w->bias) v += load_n(g.w->bias + n, live);
  return v;
}

struct Sums {  // of some rows and panels; steps in floats
  const float* at;
  int by_row, by_panel;
  const float* of(int row, int panel) const { return at + row * by_row + panel * by_panel; }
};

// Stores `rows` rows from `row` of a panel of each half.
template <class A>
INLINE void finish_gated(const Gemm<A>& g, int64_t row, int rows, int64_t panel, const Sums& sums) {
  for (int r = 0; r < rows; ++r)
    for (int at = 0; at < PANEL; at += W) {
      const int64_t n = panel * PANEL + at;
      const int64_t half = g.w->n / 2;
      const vf gate = finished(g, sums.of(r, 0) + at, n, W), up = finished(g, sums.of(r, 1) + at, half + n, W);
      if (g.plain[row + r]) {
        float* y = g.y + (row + r) * g.ldy + n;
        store(y, gate);
        store(y + half, up);
        continue;
      }
      store(g.gated + (row + r) * g.ld_gated + n, gated(gate, up));
    }
}

// Stores `rows` rows from `row` of `panels` panels from `panel`.
template <class A>
INLINE void finish(const Gemm<A>& g, int64_t row, int rows, int64_t panel, int panels, const Sums& sums) {
  for (int r = 0; r < rows; ++r)
    for (int p = 0; p < panels; ++p)
      for (int at = 0; at < PANEL; at += W) {
        const int64_t n = (panel + p) * PANEL + at;
        const int live = (int)std::min<int64_t>(W, g.w->n - n);
        if (live <= 0) break;
        vf v = finished(g, sums.of(r, p) + at, n, live);
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

// Rows of a block and the panels that are multiplied with it together, so that sums and weights fit the registers. A few rows alone
// leave registers for more panels, which are as many streams of memory. A gated product has blocks of its own, for two panels, and is
// worth it from GATED_ROWS on. STRIP: lines of weights between two calls of prefetch.
#if MOTET_LEVEL >= 2
constexpr int BLOCK = 8, GATED_BLOCK = 12, STRIP = 4;
INLINE constexpr int panels_together(int64_t rows) { return rows == 1 ? 6 : 3; }
#else
constexpr int BLOCK = MOTET_LEVEL == 1 ? 6 : 2, GATED_BLOCK = BLOCK, STRIP = 8;
INLINE constexpr int panels_together(int64_t rows) { return MOTET_LEVEL == 0 || rows > 2 ? 1 : rows == 2 ? 2 : 6; }
#endif
constexpr int GATED_ROWS = 64;

// A single row is multiplied with panels that are Streams. More rows prefetch the group that comes next, evenly.
struct Evenly {
  Ahead& ahead;
  int each;  // lines, whenever some of the panels are read
  template <int P>
  __attribute__((always_inline)) void lines(int) {
    ahead.prefetch_lines(each);
  }
};

// The rows of N values each that a block is stored to. They are brought in while the sums are computed, a row at a time: stores that
// miss the caches would hold up the next block.
template <class T, int N>
struct Stored {
  const T *at, *end;
  int64_t stride;
  Stored(const T* to, int rows, int64_t stride) : at(to), end(to + rows * stride), stride(stride) {}
  __attribute__((always_inline)) void row() {
    if (at == end) return;
#pragma GCC unroll 16
    for (int i = 0; i < N; i += 64 / (int)sizeof(T)) prefetch_to_store(at + i);
    at += stride;
  }
};

template <class Wt, class A, int R, int P, class Fetch, class Store>
static __attribute__((noinline)) void sums_of(const Wt* w, int64_t panel_stride, const A* x, int64_t ldx, int64_t k,
                                              float* out, Fetch fetch, Store stored) {
  constexpr int KL = Packed<Wt>::KL, VP = PANEL / W;
  constexpr int LINE = 64 / sizeof(Wt);
  vf acc[R][P * VP];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P * VP; ++p) acc[r][p] = zero();
  for (int64_t strip = 0; strip < k; strip += STRIP * KL) {
    fetch.template lines<P>(STRIP);
    stored.row();
#pragma GCC unroll 4
    for (int line = 0; line < STRIP; ++line, w += LINE) {
      const int64_t i = strip + line * KL;
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
            for (int p = 0; p < P * VP; ++p) multiply_add(acc[r][p], value, weights[p]);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P * VP; ++p) store(out + r * P * PANEL + p * W, acc[r][p]);
}

template <class Wt, class A, int R, int P, class Fetch>
INLINE void block_of(const Gemm<A>& g, const Wt* w, int64_t stride, int64_t row, int64_t panel, int panels, Fetch fetch) {
  if constexpr (P > 1)
    if (panels != P) return block_of<Wt, A, R, P - 1>(g, w, stride, row, panel, panels, fetch);
  alignas(64) float sums[R * P * PANEL];
  const Stored<float, P * PANEL> to(g.y + row * g.ldy + panel * PANEL, R, g.ldy);
  sums_of<Wt, A, R, P>(w, stride, g.x + row * g.ldx, g.ldx, round_up(g.w->k, 32), sums, fetch, to);
  finish(g, row, R, panel, P, Sums{sums, P * PANEL, PANEL});
}

// A panel of each half, for at most R rows. The two are multiplied one after the other where registers hold the sums of one only.
template <class Wt, class A, int R>
INLINE void gated_rows_of(int rows, const Gemm<A>& g, const Wt* w, int64_t stride, int64_t row, int64_t panel, Evenly fetch) {
  if constexpr (R > 1)
    if (rows != R) return gated_rows_of<Wt, A, R - 1>(rows, g, w, stride, row, panel, fetch);
  constexpr int P = std::min(panels_together(R), 2);
  alignas(64) float sums[R * 2 * PANEL];
  for (int p = 0; p < 2; p += P) {
    const Stored<A, PANEL> to(g.gated + row * g.ld_gated + panel * PANEL, p ? 0 : R, g.ld_gated);
    sums_of<Wt, A, R, P>(w + p * stride, stride, g.x + row * g.ldx, g.ldx, round_up(g.w->k, 32), sums + p * R * PANEL, fetch, to);
  }
  finish_gated(g, row, R, panel, Sums{sums, P * PANEL, P == 2 ? PANEL : R * PANEL});
}

// At most as many rows as there are accumulators for.
template <class Wt, class A, int R, class Fetch>
INLINE void rows_of(int rows, const Gemm<A>& g, const Wt* w, int64_t stride, int64_t row, int64_t panel, int panels, Fetch fetch) {
  if constexpr (R > 1)
    if (rows != R) return rows_of<Wt, A, R - 1>(rows, g, w, stride, row, panel, panels, fetch);
  block_of<Wt, A, R, panels_together(R)>(g, w, stride, row, panel, panels, fetch);
}

// The fewest possible blocks of nearly equal size, because each block reads the weights once.
template <class Wt, class A>
static void panels_by_vectors(const Gemm<A>& g, const Wt* w, int64_t stride, int64_t row0, int64_t row1, int64_t panel,
                              int panels, Ahead& ahead) {
  const Streams streams(w, panel_bytes(*g.w), stride * sizeof(Wt), ahead);
  if (g.rows == 1) return rows_of<Wt, A, 1>(1, g, w, stride, row0, panel, panels, streams);
  const int64_t most = g.gated ? GATED_BLOCK : BLOCK;
  int64_t blocks = (row1 - row0 + most - 1) / most;
  const int64_t strips = blocks * round_up(g.w->k, 32) / (STRIP * Packed<Wt>::KL);
  const int per_strip = (int)((ahead.lines() + strips - 1) / strips);  // lines ahead for every strip of weights read
  for (int64_t row = row0; row < row1; --blocks) {
    const int rows = (int)((row1 - row + blocks - 1) / blocks);
    if (g.gated)
      gated_rows_of<Wt, A, GATED_BLOCK>(rows, g, w, stride, row, panel, Evenly{ahead, per_strip});
    else
      rows_of<Wt, A, BLOCK>(rows, g, w, stride, row, panel, panels, Evenly{ahead, per_strip});
    row += rows;
  }
}

constexpr int TILE_ROWS = 32, TILES_K = 512;  // rows that tiles take at once; bytes of their k for which two panels stay in the first cache
constexpr int MAX_ROWS = 256;                 // of one piece of work: their sums are kept between blocks of k

#if MOTET_LEVEL >= 4
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
#endif

// AMX tiles of one thread, configured as long as this object lives. Each `for_` method reconfigures them only when needed.
class Tiles {
#if MOTET_LEVEL >= 4
 public:
  Tiles() { for_product(16); }
  ~Tiles() {
    _tile_release();
    key_ = 0;
  }
  // Others may have configured this thread's tiles.
  static void forget() { key_ = 0; }
  // 0-3 sums and 4-5 rows of x with `rows` rows, 6-7 weights
  static void for_product(int rows) {
    configure(rows, [&](TileConfig& config) { std::fill_n(config.rows, 6, (uint8_t)rows); });
  }
  // 0-3 sums and 4-5 ranks of a page, 6-7 turned `rows` rows of x
  static void for_shrink(int rows) {
    configure(64 + rows, [&](TileConfig& config) {
      std::fill_n(config.rows, 6, (uint8_t)8);
      for (int tile : {0, 1, 2, 3, 6, 7}) config.bytes[tile] = (uint16_t)(rows * 4);
    });
  }
  // 0-1 sums and 4 ranks of the first 16 of `rows` rows, 2-3 and 5 of the others, 6-7 weights of 8 ranks
  static void for_expand(int rows) {
    configure(128 + rows, [&](TileConfig& config) {
      for (int tile : {0, 1, 4}) config.rows[tile] = (uint8_t)std::min(rows, 16);
      for (int tile : {2, 3, 5}) config.rows[tile] = (uint8_t)std::max(rows - 16, 1);
      for (int tile : {4, 5}) config.bytes[tile] = 16;
      for (int tile : {6, 7}) config.rows[tile] = 4;
    });
  }

 private:
  static inline thread_local int key_ = 0;
  template <class F>
  static void configure(int key, F&& change) {
    if (key == key_) return;
    TileConfig config;
    change(config);
    asm volatile("" ::"m"(config));  // g++ 12 believes that the next line reads 8 bytes of it, and leaves the others out
    _tile_loadconfig(&config);
    key_ = key;
  }
#else
 public:
  static void forget() {}
#endif
};

#if MOTET_LEVEL >= 4

// Adds the products over bytes [k0, k1) of x and one or two panels to the sums of 32 rows (or 16), which lie at `sums` tile after
// tile: whole numbers for INTEGERS. Rows of x are padded to 16 in memory; the padding may hold anything.
template <bool INTEGERS, bool TWO_ROWS, bool TWO_PANELS>
INLINE void tiles_of(const char* w, int64_t stride, const char* x, int64_t ldx, int64_t k0, int64_t k1, float* sums,
                     Ahead& all_ahead, int lines) {
  constexpr int TILE = 16 * PANEL;
  asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
  if (k0) {
    _tile_loadd(0, sums, 64);
    if (TWO_PANELS) _tile_loadd(1, sums + TILE, 64);
    if (TWO_ROWS) _tile_loadd(2, sums + 2 * TILE, 64);
    if (TWO_ROWS && TWO_PANELS) _tile_loadd(3, sums + 3 * TILE, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  Ahead ahead = all_ahead;
  for (int64_t i = k0; i < k1; i += 64) {
    for (int j = 0; j < lines && ahead.at < ahead.end; ++j, ahead.at += 64) {
      prefetch(ahead.at);
      prefetch(ahead.at + ahead.gap);
    }
    _tile_loadd(4, x + i, ldx);
    _tile_loadd(6, w + i * PANEL, 64);
    if constexpr (INTEGERS)
      _tile_dpbsud(0, 4, 6);
    else
      _tile_dpbf16ps(0, 4, 6);
    if (TWO_PANELS) {
      _tile_loadd(7, w + stride + i * PANEL, 64);
      if constexpr (INTEGERS)
        _tile_dpbsud(1, 4, 7);
      else
        _tile_dpbf16ps(1, 4, 7);
    }
    if (TWO_ROWS) {
      _tile_loadd(5, x + 16 * ldx + i, ldx);
      if constexpr (INTEGERS)
        _tile_dpbsud(2, 5, 6);
      else
        _tile_dpbf16ps(2, 5, 6);
      if (TWO_PANELS) {
        if constexpr (INTEGERS)
          _tile_dpbsud(3, 5, 7);
        else
          _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  all_ahead = ahead;
  _tile_stored(0, sums, 64);
  if (TWO_PANELS) _tile_stored(1, sums + TILE, 64);
  if (TWO_ROWS) _tile_stored(2, sums + 2 * TILE, 64);
  if (TWO_ROWS && TWO_PANELS) _tile_stored(3, sums + 3 * TILE, 64);
}

// `x` has rows of `ldx` bytes, of which `k` are multiplied; `adjust` turns the sums of 16 rows from a row into values.
template <bool INTEGERS, class A, class Adjust>
static void panels_by_tiles(const Gemm<A>& g, const char* w, int64_t stride, const char* x, int64_t ldx, int64_t k, int64_t row0,
                            int64_t row1, int64_t panel, int panels, Ahead& ahead, Adjust&& adjust) {
  alignas(64) float sums[MAX_ROWS * 2 * PANEL];  // per 32 rows: [row half][panel][16][16]
  const int64_t blocks = (row1 - row0 + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t k_each = blocks == 1 ? k : TILES_K;
  Tiles::for_product((int)std::min<int64_t>(16, row1 - row0));
  const int lines = (int)((16 + blocks - 1) / blocks);  // of each panel ahead, for 64 bytes of a block of rows
  for (int64_t k0 = 0; k0 < k; k0 += k_each)
    for (int64_t row = row0; row < row1; row += TILE_ROWS) {
      const char* at = x + row * ldx;
      const int64_t k1 = std::min(k, k0 + k_each);
      float* block = sums + (row - row0) * 2 * PANEL;
      if (row1 - row > 16)
        panels == 2 ? tiles_of<INTEGERS, true, true>(w, stride, at, ldx, k0, k1, block, ahead, lines)
                    : tiles_of<INTEGERS, true, false>(w, stride, at, ldx, k0, k1, block, ahead, lines);
      else
        panels == 2 ? tiles_of<INTEGERS, false, true>(w, stride, at, ldx, k0, k1, block, ahead, lines)
                    : tiles_of<INTEGERS, false, false>(w, stride, at, ldx, k0, k1, block, ahead, lines);
    }
  for (int64_t row = row0; row < row1; row += 16) {
    float* block = sums + (row - row0) * 2 * PANEL;
    const Sums tiles{block, PANEL, 16 * PANEL};
    const int rows = (int)std::min<int64_t>(16, row1 - row);
    adjust(row, rows, panels, block);
    g.gated ? finish_gated(g, row, rows, panel, tiles) : finish(g, row, rows, panel, panels, tiles);
  }
}
#endif

// A row of x in another type, and zeros up to `stride`.
template <class T, class A>
INLINE void take_row(const T* x, A* to, int64_t k, int64_t stride) {
  int64_t i = 0;
  for (; i + W <= k; i += W) store(to + i, load(x + i));
  if (i < k) store_n(to + i, load_n(x + i, (int)(k - i)), (int)(k - i));
  memset((void*)(to + k), 0, (stride - k) * sizeof(A));
}

}  // namespace motet
