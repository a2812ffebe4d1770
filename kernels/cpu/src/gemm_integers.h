// Products with weights of 8 or 4 bits: rows of x are rounded to 8 bits as well, so that integers are multiplied, four k in one
// instruction with VNNI, 64 with AMX tiles.
//
//   x[r, k] = scale[r] * q[r, k]            q in -127..127, scale = max |x[r]| / 127
//   I8   w[n, k] = scale[n] * (b - 128)     b unsigned; y = scale[n] * scale[r] * (sum b q - 128 sum q)
//   I4   w[n, k] = scale[n, k / 32] * (b - 8), b in 0..15: the same for each group of 32 k, whose sums are added as floats
//   I4_SHIFTED, I8_GROUPED: w[n, k] = scale[n, k / 32] * (b - zero[n, k / 32]), b of 4 or 8 bits
//
// Integer sums are exact, and floats are added in order of k, so a row's result depends neither on the other rows nor on the
// instruction.
//
// A panel of I8 is [k / 4][16 outputs][4]. A panel of I4 is, for each 64 k, a line of scales [2 groups][16] in float16, then four
// lines for each group; the low halves of a line's bytes are 4 k as in I8, the high halves the next 4. I4_SHIFTED and I8_GROUPED
// have a line of zero points after the scales, float16 as well; a group of I8_GROUPED has eight lines, each 4 k.
#pragma once
#include "gemm.h"

namespace motet {

constexpr int I_GROUP = 32;
constexpr int I8_ZERO = 128, I4_ZERO = 8;  // what is added to weights to make them unsigned

// Where a row of x lies as whole numbers: [k padded to 64] int8, then its scale, sum, and the sums of its groups; on AVX2 also as
// int16, of each four first the even and then the odd ones.
struct RoundedRow {
  int8_t* values;
  float* scale;
  int32_t *sum, *groups;
  int16_t* wide;
};
constexpr bool WIDE = MOTET_LEVEL == 1;
// Bytes from row to row: an odd number of cache lines.
INLINE int64_t rounded_stride(int64_t k) {
  const int64_t padded = round_up(k, 64);
  return round_up(padded + 8 + padded / I_GROUP * 4 + (WIDE ? padded * 2 : 0), 128) + 64;
}
INLINE RoundedRow rounded_row(char* rows, int64_t row, int64_t k) {
  char* at = rows + row * rounded_stride(k);
  const int64_t padded = round_up(k, 64);
  char* after = at + padded;
  return {(int8_t*)at, (float*)after, (int32_t*)after + 1, (int32_t*)after + 2, (int16_t*)(after + 8 + padded / I_GROUP * 4)};
}

template <class A>
static void round_row(const A* x, int64_t k, const RoundedRow& to) {
  vf most = zero();
  for (int64_t i = 0; i < k; i += W) {
    const vf v = load_n(x + i, (int)std::min<int64_t>(W, k - i));
    most = max(most, (vf)((vu)v & 0x7fffffffu));
  }
  const float limit = largest(most);
  const float inverse = limit > 0 ? 127.0f / limit : 0.0f;
  *to.scale = limit / 127.0f;
  const int64_t padded = round_up(k, 64);
  memset(to.values + k, 0, padded - k);
  for (int64_t i = 0; i < k; i += W) {
    const int live = (int)std::min<int64_t>(W, k - i);
    store_n(to.values + i, load_n(x + i, live) * inverse, live);
  }
  int32_t all = 0;
  for (int64_t group = 0; group < padded / I_GROUP; ++group) {
    int32_t sum = 0;
    for (int i = 0; i < I_GROUP; ++i) sum += to.values[group * I_GROUP + i];
    to.groups[group] = sum;
    all += sum;
  }
  *to.sum = all;
#if MOTET_LEVEL == 1
  for (int64_t i = 0; i < padded; i += 16) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(to.values + i)));
    _mm256_storeu_si256((__m256i*)(to.wide + i), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(wide, 0xd8), 0xd8));
  }
#endif
}

// Four values from `x` on, given W times.
INLINE vi four_values(const void* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return vi{} + four;
}

// sums[output] += four products: unsigned weights [W outputs][4] with four signed values of a row. AVX2 takes two steps, the even and
// the odd ones of four as 16 bits, so that only half of the weights take registers at a time.
#if MOTET_LEVEL == 1
constexpr int STEPS = 2;
INLINE vu weights_of(vu line, int step) { return step ? (vu)_mm256_srli_epi16((__m256i)line, 8) : line & 0x00ff00ffu; }
typedef int16_t Factor;  // what weights of 8 bits are multiplied with
INLINE const Factor* factors(const RoundedRow& row) { return row.wide; }
INLINE vi dot4(vi sums, vu weights, vi values) {
  vi products;  // see multiply_add
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(values));
  return sums;
}
#else
constexpr int STEPS = 1;
INLINE vu weights_of(vu line, int) { return line; }
typedef int8_t Factor;
INLINE const Factor* factors(const RoundedRow& row) { return row.values; }
INLINE vi dot4(vi sums, vu weights, vi values) {
#if MOTET_LEVEL >= 3
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)values);
#else
  typedef int16_t vs __attribute__((vector_size(W * 4)));
  const vu even = weights & 0x00ff00ffu, odd = (weights >> 8) & 0x00ff00ffu;
  const vs values_even = ((vs)values << 8) >> 8, values_odd = (vs)values >> 8;
#if MOTET_LEVEL == 2
  return sums + (vi)_mm512_madd_epi16((__m512i)even, (__m512i)values_even) + (vi)_mm512_madd_epi16((__m512i)odd, (__m512i)values_odd);
#else
  const auto low = [](vi v) { return (v << 16) >> 16; };
  const vi a = (vi)even, b = (vi)odd, x = (vi)values_even, y = (vi)values_odd;
  return sums + low(a) * low(x) + (a >> 16) * (x >> 16) + low(b) * low(y) + (b >> 16) * (y >> 16);
#endif
#endif
}
#endif

// The same for weights of 4 bits. On AVX2 a sum is two of int16 until `whole_of_4_bits`: 16 products of a group in each, at most
// 16 * 15 * 127, which has room there.
#if MOTET_LEVEL == 1
INLINE vi dot4_of_4_bits(vi sums, vu weights, vi values) {
  vi products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(values));
  return sums;
}
INLINE vi whole_of_4_bits(vi sums) { return (vi)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#else
INLINE vi dot4_of_4_bits(vi sums, vu weights, vi values) { return dot4(sums, weights, values); }
INLINE vi whole_of_4_bits(vi sums) { return sums; }
#endif

INLINE vu line_bytes(const uint8_t* line, int at) {
  vu v;
  memcpy(&v, line + at * 4, sizeof v);
  return v;
}

// Sums of R rows and P panels as floats, times the rows' scales.
template <int R, int P, class Fetch>
static __attribute__((noinline)) void int8_sums(const uint8_t* w, int64_t panel_stride, const char* rows, int64_t k, float* out,
                                                Fetch fetch) {
  constexpr int VP = PANEL / W, N = P * VP;
  vi acc[R][N];
  const Factor* x[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const RoundedRow row = rounded_row((char*)rows, r, k);
    x[r] = factors(row);
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) acc[r][p] = vi{} - I8_ZERO * *row.sum;
  }
  for (int64_t i = 0, padded = round_up(k, 64); i < padded; i += 4, w += 64) {
    fetch.template lines<P>(1);
#pragma GCC unroll 2
    for (int step = 0; step < STEPS; ++step) {
      vu weights[N];
#pragma GCC unroll 16
      for (int p = 0; p < N; ++p) weights[p] = weights_of(line_bytes(w + (p / VP) * panel_stride, p % VP * W), step);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vi values = four_values(x[r] + i + step * 2);
#pragma GCC unroll 16
        for (int p = 0; p < N; ++p) acc[r][p] = dot4(acc[r][p], weights[p], values);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) store(out + r * P * PANEL + p * W, as_float(acc[r][p]) * *rounded_row((char*)rows, r, k).scale);
}

// in one piece: its sums stay in registers from the first line to the last
template <int TYPE, int R, int P, class Fetch>
static __attribute__((noinline)) void grouped_sums(const uint8_t* w, int64_t panel_stride, const char* rows, int64_t k, float* out,
                                                   Fetch fetch) {
  constexpr int VP = PANEL / W, N = P * VP;
  constexpr bool FOUR_BITS = TYPE != I8_GROUPED, SHIFTED = TYPE != I4;
  constexpr int LINES = FOUR_BITS ? 4 : 8, VALUES_AT = SHIFTED ? 128 : 64;  // lines of a group; where the first begins
  vf sums[R][N];
  RoundedRow row[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    row[r] = rounded_row((char*)rows, r, k);
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) sums[r][p] = zero();
  }
  for (int64_t group = 0, groups = round_up(k, 64) / I_GROUP; group < groups; ++group) {
    const uint8_t* scales_at = w + group / 2 * grouped_bytes(TYPE) + group % 2 * 32;
    const uint8_t* values_at = w + group / 2 * grouped_bytes(TYPE) + VALUES_AT + group % 2 * LINES * 64;
    if (SHIFTED || group % 2 == 0) fetch.template lines<P>(1);
    vi acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int p = 0; p < N; ++p) acc[r][p] = SHIFTED || WIDE ? vi{} : vi{} - I4_ZERO * row[r].groups[group];
#pragma GCC unroll 8
    for (int line = 0; line < LINES; ++line) {
      fetch.template lines<P>(1);
      vu low[N], high[N];
#pragma GCC unroll 16
      for (int p = 0; p < N; ++p) {
        const vu both = line_bytes(values_at + (p / VP) * panel_stride + line * 64, p % VP * W);
        low[p] = FOUR_BITS ? both & 0x0f0f0f0fu : both;
        if (FOUR_BITS) high[p] = (both >> 4) & 0x0f0f0f0fu;
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        if constexpr (!FOUR_BITS) {
          const Factor* x = factors(row[r]) + group * I_GROUP + line * 4;
#pragma GCC unroll 2
          for (int step = 0; step < STEPS; ++step) {
            const vi values = four_values(x + step * 2);
#pragma GCC unroll 16
            for (int p = 0; p < N; ++p) acc[r][p] = dot4(acc[r][p], weights_of(low[p], step), values);
          }
          continue;
        }
        const int8_t* x = row[r].values + group * I_GROUP + line * 8;
        const vi first = four_values(x);
#pragma GCC unroll 16
        for (int p = 0; p < N; ++p) acc[r][p] = dot4_of_4_bits(acc[r][p], low[p], first);
        const vi second = four_values(x + 4);
#pragma GCC unroll 16
        for (int p = 0; p < N; ++p) acc[r][p] = dot4_of_4_bits(acc[r][p], high[p], second);
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) {
      const uint8_t* at = scales_at + (p / VP) * panel_stride;
      const vf scale = load((const f16*)at + p % VP * W);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        vi exact = FOUR_BITS ? whole_of_4_bits(acc[r][p]) : acc[r][p];
        if (WIDE && !SHIFTED) exact -= I4_ZERO * row[r].groups[group];
        vf whole = as_float(exact);  // below 2^24 with and without the zero point: exact
        if (SHIFTED) whole -= load((const f16*)(at + 64) + p % VP * W) * broadcast((float)row[r].groups[group]);
        sums[r][p] += scale * whole;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) store(out + r * P * PANEL + p * W, sums[r][p] * *row[r].scale);
}

// Panels that are multiplied together and the most rows with them, so that sums and weights fit the registers. A single row is
// multiplied with I_STREAMS panels.
#if MOTET_LEVEL >= 2
constexpr int I8_PANELS = 3, I8_ROWS = 8, I_PANELS = 2, I_ROWS = 6, I_STREAMS = 6;
#else
constexpr int I8_PANELS = 1, I8_ROWS = MOTET_LEVEL == 1 ? 4 : 2, I_PANELS = 1, I_ROWS = MOTET_LEVEL == 1 ? 4 : 1;
constexpr int I_STREAMS = MOTET_LEVEL == 1 ? 4 : 1;
#endif

template <int TYPE, class A, int R, int P, class Fetch>
INLINE void integer_block(const Gemm<A>& g, const uint8_t* w, int64_t stride, int64_t row, int64_t panel, Fetch fetch) {
  alignas(64) float sums[R * P * PANEL];
  const char* rows = g.rounded + row * rounded_stride(g.w->k);
  if constexpr (TYPE == I8)
    int8_sums<R, P>(w, stride, rows, g.w->k, sums, fetch);
  else
    grouped_sums<TYPE, R, P>(w, stride, rows, g.w->k, sums, fetch);
  finish(g, row, R, panel, P, Sums{sums, P * PANEL, PANEL});
}

// At most R rows and P panels.
template <int TYPE, class A, int R, int P, class Fetch>
INLINE void integer_rows(int rows, int panels, const Gemm<A>& g, const uint8_t* w, int64_t stride, int64_t row, int64_t panel, Fetch fetch) {
  if constexpr (P > 1)
    if (panels < P) return integer_rows<TYPE, A, R, P - 1>(rows, panels, g, w, stride, row, panel, fetch);
  if constexpr (R > 1)
    if (rows < R) return integer_rows<TYPE, A, R - 1, P>(rows, panels, g, w, stride, row, panel, fetch);
  integer_block<TYPE, A, R, P>(g, w, stride, row, panel, fetch);
}

// The fewest possible blocks of rows of nearly equal size, because each block reads the weights once.
template <int TYPE, class A>
static void integer_panels(const Gemm<A>& g, const uint8_t* w, int64_t stride, int64_t row0, int64_t row1, int64_t panel, int panels,
                           Ahead& ahead) {
  constexpr int ROWS = TYPE == I8 ? I8_ROWS : I_ROWS, PANELS = TYPE == I8 ? I8_PANELS : I_PANELS;
  if (g.rows == 1)
    return integer_rows<TYPE, A, 1, I_STREAMS>(1, panels, g, w, stride, row0, panel, Streams(w, panel_bytes(*g.w), stride, ahead));
  int64_t blocks = (row1 - row0 + ROWS - 1) / ROWS;
  const int64_t lines = blocks * panel_bytes(*g.w) / 64;
  const int per_line = (int)((ahead.lines() + lines - 1) / lines);  // lines ahead for every line of weights read
  for (int64_t row = row0; row < row1; --blocks) {
    const int rows = (int)((row1 - row + blocks - 1) / blocks);
    integer_rows<TYPE, A, ROWS, PANELS>(rows, panels, g, w, stride, row, panel, Evenly{ahead, per_line});
    row += rows;
  }
}

#if MOTET_LEVEL >= 4
template <class A>
static void int8_panels_by_tiles(const Gemm<A>& g, const char* w, int64_t stride, int64_t row0, int64_t row1, int64_t panel,
                                 int panels, Ahead& ahead) {
  const int64_t k = g.w->k;
  panels_by_tiles<true>(g, w, stride, g.rounded, rounded_stride(k), round_up(k, 64), row0, row1, panel, panels, ahead,
                        [&](int64_t row, int rows, int panels, float* sums) {
    for (int r = 0; r < rows; ++r) {
      const RoundedRow x = rounded_row(g.rounded, row + r, k);
      for (int p = 0; p < panels; ++p) {
        float* at = sums + p * 16 * PANEL + r * PANEL;
        vi whole;
        memcpy(&whole, at, sizeof whole);
        store(at, as_float(whole - I8_ZERO * *x.sum) * *x.scale);
      }
    }
  });
}
#endif

}  // namespace motet
