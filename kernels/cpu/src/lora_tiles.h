// LoRA's two products on AMX tiles, for bfloat16 adapters and activations. The sums of a row are taken in the same order however
// many rows its adapter has in the step.
//
//   shrink   s^T[8 ranks, rows] = A[8 ranks, k] x^T        a page's ranks are the left operand without a copy; x is transposed, 32 k
//                                                          of up to 16 rows at a time. Even and odd blocks of k have separate sums
//   expand   y[rows, 32 outputs] += s[rows, 8 ranks] B^T   two ranks of 32 outputs are interleaved first, within 128 bits: the first
//                                                          vector has outputs 0-3, 8-11, 16-19, 24-27, the second one the others
#pragma once
#include "buffer.h"
#include "lora_plan.h"
#if MOTET_LEVEL >= 4

namespace motet {

// Outputs in the order of the interleaved weights, and back.
INLINE void interleave(__m512& a, __m512& b) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  const __m512 low = _mm512_permutex2var_ps(a, first, b);
  b = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(4)), b);
  a = low;
}
INLINE void deinterleave(__m512& a, __m512& b) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512 first = _mm512_permutex2var_ps(a, low, b);
  b = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
  a = first;
}

// 32 k of `rows` rows (missing ones are zero) as a tile's 16 lines: line i has k 2i and 2i + 1 of every row.
INLINE void turn_rows(const bf16* const* x, int rows, int64_t k, bf16* to) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) a[r] = r < rows ? _mm512_loadu_si512(x[r] + k) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 2) b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]), b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + i + 2]);
      a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + i + 2]);
    }
  // a[4 q + c] has lines c, 4 + c, 8 + c, 12 + c of rows 4 q to 4 q + 3
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_store_si512(to + c * 32, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_store_si512(to + (4 + c) * 32, _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_store_si512(to + (8 + c) * 32, _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_store_si512(to + (12 + c) * 32, _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}

// s[row][0..8) = scale * A x[row] of one page. `x` are blocks of 32 k, each 16 lines of two k of every row.
INLINE void shrink_page(const bf16* a, const bf16* x, int64_t by_line, int64_t by_block, int64_t in, float scale, int rows, bf16* s,
                        int64_t width, Next& all_next) {
  asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
  Next next = all_next;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
#define MOTET_SHRINK_BLOCK(sum, A, X) \
  next.lines(2);                      \
  _tile_loadd(A, a, in * 2);          \
  next.lines(2);                      \
  _tile_loadd(X, x, by_line);         \
  next.lines(2);                      \
  _tile_dpbf16ps(sum, A, X);          \
  next.lines(2);                      \
  a += 32, x += by_block
  const int64_t blocks = in / 32;
  for (int64_t block = 0; block + 4 <= blocks; block += 4) {
    MOTET_SHRINK_BLOCK(0, 4, 6);
    MOTET_SHRINK_BLOCK(1, 5, 7);
    MOTET_SHRINK_BLOCK(2, 4, 6);
    MOTET_SHRINK_BLOCK(3, 5, 7);
  }
  if (blocks % 4 > 0) {
    MOTET_SHRINK_BLOCK(0, 4, 6);
  }
  if (blocks % 4 > 1) {
    MOTET_SHRINK_BLOCK(1, 5, 7);
  }
  if (blocks % 4 > 2) {
    MOTET_SHRINK_BLOCK(2, 4, 6);
  }
#undef MOTET_SHRINK_BLOCK
  all_next = next;
  alignas(64) float sums[4][PAGE * 16];
  _tile_stored(0, sums[0], rows * 4);
  _tile_stored(1, sums[1], rows * 4);
  _tile_stored(2, sums[2], rows * 4);
  _tile_stored(3, sums[3], rows * 4);
  asm volatile("" ::: "memory");
  const __m256i ranks = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(rows));
  for (int row = 0; row < rows; ++row) {
    const auto of = [&](int block) { return _mm256_i32gather_ps(sums[block] + row, ranks, 4); };
    const __m256 all = _mm256_add_ps(_mm256_add_ps(of(0), of(1)), _mm256_add_ps(of(2), of(3)));
    const __m128bh v = _mm256_cvtneps_pbh(_mm256_mul_ps(all, _mm256_set1_ps(scale)));
    memcpy(s + row * width, &v, sizeof v);
  }
}

// The rows of x of a piece, transposed, in memory of this thread.
INLINE bf16* turned(const bf16* const* x, int rows, int64_t in) {
  static thread_local Buffer memory;
  memory.reserve(in * 16 * sizeof(bf16));
  bf16* to = memory.data<bf16>();
  for (int64_t k = 0; k < in; k += 32) turn_rows(x, rows, k, to + k * 16);
  return to;
}

// A piece of the shrink: `page(p)` is its p-th page, `next(p)` what to prefetch while that one is read.
template <class Page, class Ahead>
static void shrink_on_tiles(const Page& page, const Ahead& next, const LoraPiece& piece, const bf16* const* x, int64_t in, float scale,
                            bf16* s, int64_t width) {
  for (int row = 0; row < piece.rows; row += 16) {
    const int rows = std::min(16, piece.rows - row);
    Tiles::for_shrink(rows);
    // one row already is a tile whose lines have two k each
    const bf16* lines = rows > 1 ? turned(x + row, rows, in) : x[row];
    const int64_t by_line = rows > 1 ? 64 : 4, by_block = rows > 1 ? 512 : 32;
    bf16* to = s + row * width;
    for (int p = 0; p < piece.count; ++p) {
      Next ahead;
      if (row == 0) ahead = next(p);
      shrink_page(page(p), lines, by_line, by_block, in, scale, rows, to + p * PAGE, width, ahead);
    }
  }
}

// y[row] += s[row] B of `pages` pages, outputs [0, n) from where `b` and `y` point; `rows` rows, at most LORA_ROWS.
static void expand_on_tiles(const bf16* const* b, int pages, int64_t out, int64_t n, const bf16* s, int64_t width, float* const* y,
                            int rows, Next next) {
  Tiles::for_expand(rows);
  alignas(64) float sums[2][LORA_ROWS][16];  // [tile][row]
  alignas(64) bf16 pairs[2][PAGE / 2][32];
  const bool more = rows > 16;
  for (int64_t i = 0; i < n; i += 32) {
    const int live = (int)std::min<int64_t>(32, n - i);
    const __mmask32 some = live == 32 ? ~0u : (1u << live) - 1;
    const __mmask16 low = (__mmask16)some, high = (__mmask16)(some >> 16);
    for (int r = 0; r < rows; ++r) {
      __m512 first = _mm512_maskz_loadu_ps(low, y[r] + i), second = _mm512_maskz_loadu_ps(high, y[r] + i + 16);
      interleave(first, second);
      _mm512_store_ps(sums[0][r], first);
      _mm512_store_ps(sums[1][r], second);
    }
    asm volatile("" ::: "memory");
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[1], 64);
    if (more) {
      _tile_loadd(2, sums[0][16], 64);
      _tile_loadd(3, sums[1][16], 64);
    }
    for (int p = 0; p < pages; ++p) {
#pragma GCC unroll 4
      for (int k = 0; k < PAGE; k += 2) {
        const bf16* at = b[p] + k * out + i;
        const __m512i even = _mm512_maskz_loadu_epi16(some, at), odd = _mm512_maskz_loadu_epi16(some, at + out);
        next.line();
        next.line();
        _mm512_store_si512(pairs[0][k / 2], _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(pairs[1][k / 2], _mm512_unpackhi_epi16(even, odd));
      }
      asm volatile("" ::: "memory");
      _tile_loadd(4, s + p * PAGE, width * 2);
      _tile_loadd(6, pairs[0], 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, pairs[1], 64);
      _tile_dpbf16ps(1, 4, 7);
      if (more) {
        _tile_loadd(5, s + 16 * width + p * PAGE, width * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (more) {
      _tile_stored(2, sums[0][16], 64);
      _tile_stored(3, sums[1][16], 64);
    }
    asm volatile("" ::: "memory");
    for (int r = 0; r < rows; ++r) {
      __m512 first = _mm512_load_ps(sums[0][r]), second = _mm512_load_ps(sums[1][r]);
      deinterleave(first, second);
      _mm512_mask_storeu_ps(y[r] + i, low, first);
      _mm512_mask_storeu_ps(y[r] + i + 16, high, second);
    }
  }
}

// The same for one row, without tiles: sums of even and of odd ranks from zero, then both together onto y, as a tile takes them.
static void expand_like_tiles(const bf16* const* b, int pages, int64_t out, int64_t n, const bf16* s, float* y, Next& all_next) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  Next next = all_next;
  for (int64_t i = 0; i < n; i += 32) {
    const int live = (int)std::min<int64_t>(32, n - i);
    const __mmask32 some = live == 32 ? ~0u : (1u << live) - 1;
    const __mmask16 first = (__mmask16)some, second = (__mmask16)(some >> 16);
    const __m512 y0 = _mm512_maskz_loadu_ps(first, y + i), y1 = _mm512_maskz_loadu_ps(second, y + i + 16);
    vf a = _mm512_permutex2var_ps(y0, even, y1), c = _mm512_permutex2var_ps(y0, odd, y1);  // even and odd outputs
    for (int p = 0; p < pages; ++p) {
      vf sums[2][2];  // [parity of the rank][parity of the output]
#pragma GCC unroll 8
      for (int k = 0; k < PAGE; ++k) {
        const vu both = (vu)_mm512_maskz_loadu_epi16(some, b[p] + k * out + i);
        next.line();
        const vf value = (vf)(vu{} + ((uint32_t)s[p * PAGE + k].bits << 16));
        const vf weights0 = (vf)(both << 16), weights1 = (vf)(both & 0xffff0000u);
        sums[k % 2][0] = k < 2 ? weights0 * value : sums[k % 2][0] + weights0 * value;
        sums[k % 2][1] = k < 2 ? weights1 * value : sums[k % 2][1] + weights1 * value;
      }
      a += sums[0][0] + sums[1][0];
      c += sums[0][1] + sums[1][1];
    }
    _mm512_mask_storeu_ps(y + i, first, _mm512_permutex2var_ps(a, low, c));
    _mm512_mask_storeu_ps(y + i + 16, second, _mm512_permutex2var_ps(a, high, c));
  }
  all_next = next;
}

}  // namespace motet
#endif
