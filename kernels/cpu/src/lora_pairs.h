// LoRA's two products by bfloat16 dot products, two k or two ranks to an instruction, where there are no tiles (lora.h says what they
// are). The sums of a row are taken in the same order however many rows its adapter has in the step.
//
//   shrink   many rows are multiplied with a page STRETCH k at a time. Its weights are copied first, so that they stay in the
//            first-level cache: in the page its eight ranks are a power of two apart and would evict each other
//   expand   two ranks of 32 outputs are interleaved within 128 bits: the first vector has outputs 0-3, 8-11, 16-19, 24-27, the second one
//            the others. For many rows this is done once, into memory that stays in the cache
#pragma once
#include "lora_plan.h"

namespace motet {

constexpr int STRETCH = 1024;       // of k
constexpr int STRETCHED_ROWS = 3;   // fewest rows for which the copy is worth its time
constexpr int RANKS_AT_ONCE = 256;  // of 32 outputs

#if MOTET_LEVEL >= 3
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
#endif

#if MOTET_LEVEL == 3
// Adds the products of R rows and the eight ranks of [blocks][8][32] weights to `sums` [R][8].
template <int R>
INLINE void shrink_stretch(const bf16* weights, const bf16* const* x, int64_t k, int64_t blocks, __m512 (*sums)[PAGE]) {
  __m512 acc[PAGE][R];
#pragma GCC unroll 8
  for (int n = 0; n < PAGE; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[n][r] = sums[r][n];
  for (int64_t block = 0; block < blocks; ++block, k += 32, weights += PAGE * 32) {
    __m512bh value[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) value[r] = pairs(x[r] + k);
#pragma GCC unroll 8
    for (int n = 0; n < PAGE; ++n) {
      const __m512bh weight = pairs(weights + n * 32);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[n][r] = _mm512_dpbf16_ps(acc[n][r], weight, value[r]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < PAGE; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][n] = acc[n][r];
}

// s[row][0..8) = scale * A x[row] of one page; `in` is a multiple of 32, `rows` at most LORA_ROWS.
static void shrink_many(const bf16* a, const bf16* const* x, int rows, int64_t in, float scale, bf16* s, int64_t width, Next next) {
  alignas(64) bf16 weights[STRETCH * PAGE];
  __m512 sums[LORA_ROWS][PAGE];
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < PAGE; ++n) sums[r][n] = _mm512_setzero_ps();
  for (int64_t k = 0; k < in; k += STRETCH) {
    const int64_t blocks = std::min<int64_t>(STRETCH, in - k) / 32;
    for (int n = 0; n < PAGE; ++n)
      for (int64_t block = 0; block < blocks; ++block) {
        _mm512_store_si512(weights + (block * PAGE + n) * 32, _mm512_loadu_si512(a + n * in + k + block * 32));
        next.line();
      }
    int r = 0;
    for (; r + 3 <= rows; r += 3) shrink_stretch<3>(weights, x + r, k, blocks, sums + r);
    if (rows - r == 2) shrink_stretch<2>(weights, x + r, k, blocks, sums + r);
    if (rows - r == 1) shrink_stretch<1>(weights, x + r, k, blocks, sums + r);
  }
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < PAGE; n += 4) {
      float four[4];
      sum4(sums[r][n], sums[r][n + 1], sums[r][n + 2], sums[r][n + 3], four);
      put4(s + r * width + n, four, scale);
    }
}

// 32 outputs, or as many as there are.
struct PairBlock {
  int64_t at;
  __mmask32 some;  // of its 32 outputs
  PairBlock(int64_t i, int64_t n) : at(i), some(n - i < 32 ? (1u << (n - i)) - 1 : ~0u) {}
};

INLINE void interleaved(const bf16* b, int64_t out, PairBlock block, __m512bh& first, __m512bh& second) {
  const __m512i even = _mm512_maskz_loadu_epi16(block.some, b + block.at), odd = _mm512_maskz_loadu_epi16(block.some, b + out + block.at);
  first = (__m512bh)_mm512_unpacklo_epi16(even, odd);
  second = (__m512bh)_mm512_unpackhi_epi16(even, odd);
}

INLINE __m512bh two_ranks(const bf16* s) {
  int32_t both;
  memcpy(&both, s, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

template <int R>
struct PairSums {
  __m512 first[R], second[R];

  __attribute__((always_inline)) void take(float* const* y, PairBlock block) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      first[r] = _mm512_maskz_loadu_ps((__mmask16)block.some, y[r] + block.at);
      second[r] = _mm512_maskz_loadu_ps((__mmask16)(block.some >> 16), y[r] + block.at + 16);
      interleave(first[r], second[r]);
    }
  }
  __attribute__((always_inline)) void add(__m512bh weights0, __m512bh weights1, const bf16* const* s, int rank) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh value = two_ranks(s[r] + rank);
      first[r] = _mm512_dpbf16_ps(first[r], weights0, value);
      second[r] = _mm512_dpbf16_ps(second[r], weights1, value);
    }
  }
  __attribute__((always_inline)) void give(float* const* y, PairBlock block) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      deinterleave(first[r], second[r]);
      _mm512_mask_storeu_ps(y[r] + block.at, (__mmask16)block.some, first[r]);
      _mm512_mask_storeu_ps(y[r] + block.at + 16, (__mmask16)(block.some >> 16), second[r]);
    }
  }
};

template <int R>
INLINE void expand_interleaved(const bf16* weights, int ranks, const bf16* const* s, float* const* y, PairBlock block) {
  PairSums<R> sums;
  sums.take(y, block);
  for (int k = 0; k < ranks; k += 2) sums.add(pairs(weights + k * 32), pairs(weights + k * 32 + 32), s, k);
  sums.give(y, block);
}

// y[r] += s[r] B for `pages` pages, outputs [0, n) from where `b` and `y` point.
static void expand_many(const bf16* const* b, int pages, int64_t out, int64_t n, const bf16* s, int64_t width, float* const* y, int rows,
                        Next next) {
  alignas(64) bf16 weights[RANKS_AT_ONCE * 32];
  const bf16* from[LORA_ROWS];
  for (int64_t i = 0; i < n; i += 32) {
    const PairBlock block(i, n);
    for (int rank = 0; rank < pages * PAGE; rank += RANKS_AT_ONCE) {
      const int ranks = std::min(RANKS_AT_ONCE, pages * PAGE - rank);
      for (int k = 0; k < ranks; k += 2) {
        __m512bh first, second;
        interleaved(b[(rank + k) / PAGE] + k % PAGE * out, out, block, first, second);
        next.lines(2);
        _mm512_store_si512(weights + k * 32, (__m512i)first);
        _mm512_store_si512(weights + k * 32 + 32, (__m512i)second);
      }
      for (int r = 0; r < rows; ++r) from[r] = s + r * width + rank;
      int r = 0;
      for (; r + 8 <= rows; r += 8) expand_interleaved<8>(weights, ranks, from + r, y + r, block);
      if (r + 4 <= rows) expand_interleaved<4>(weights, ranks, from + r, y + r, block), r += 4;
      for (; r < rows; ++r) expand_interleaved<1>(weights, ranks, from + r, y + r, block);
    }
  }
}

// The same for R rows and one page.
template <int R>
INLINE void expand_page(const bf16* b, int64_t out, int64_t n, const bf16* s, int64_t width, float* const* y, Next& all_next) {
  Next next = all_next;
  const bf16* from[R];
  for (int r = 0; r < R; ++r) from[r] = s + r * width;
  for (int64_t i = 0; i < n; i += 32) {
    const PairBlock block(i, n);
    PairSums<R> sums;
    sums.take(y, block);
#pragma GCC unroll 4
    for (int k = 0; k < PAGE; k += 2) {
      __m512bh first, second;
      interleaved(b + k * out, out, block, first, second);
      next.lines(2);
      sums.add(first, second, from, k);
    }
    sums.give(y, block);
  }
  all_next = next;
}

static void expand_few(const bf16* b, int64_t out, int64_t n, const bf16* s, int64_t width, float* const* y, int rows, Next next) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) expand_page<4>(b, out, n, s + r * width, width, y + r, next);
  if (rows - r >= 2) expand_page<2>(b, out, n, s + r * width, width, y + r, next), r += 2;
  if (r < rows) expand_page<1>(b, out, n, s + r * width, width, y + r, next);
}
#endif

}  // namespace motet
