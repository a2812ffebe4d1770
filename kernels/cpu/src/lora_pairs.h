// LoRA's two products by bfloat16 dot products, two k or two ranks to an instruction, where there are no tiles (lora.h says what they
// are). The sums of a row are taken in the same order however many rows its adapter has in the step.
//
//   shrink   many rows are multiplied with a page STRETCH k at a time. Its weights are copied first, so that they stay in the
//            first-level cache: in the page its eight ranks are a power of two apart and would evict each other
//   expand   two ranks of 32 outputs are interleaved. For many rows this is done once, into memory that stays in the cache; few rows:
//            lora_streams.h
#pragma once
#include "lora_plan.h"

namespace motet {

constexpr int STRETCH = 1024;       // of k
constexpr int STRETCHED_ROWS = 3;   // fewest rows for which the copy is worth its time
constexpr int RANKS_AT_ONCE = 256;  // of 32 outputs

#if MOTET_LEVEL == 3
// Where sums of a page go.
struct Shrinking {
  bf16* s;
  int64_t width;  // of a row
  const Ranks& ranks;
  float scale;
};

// Adds the products of R rows and the eight ranks of [blocks][8][32] weights to `sums` [R][8], which begin as zeros with the first
// stretch of k. The last one writes s instead.
template <int R>
INLINE void shrink_stretch(const bf16* weights, const bf16* const* x, int64_t k, int64_t blocks, bool last, __m512 (*sums)[PAGE], int row,
                           const Shrinking& to) {
  __m512 acc[PAGE][R];
#pragma GCC unroll 8
  for (int n = 0; n < PAGE; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[n][r] = k ? sums[row + r][n] : _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; ++block, weights += PAGE * 32) {
    __m512bh value[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) value[r] = pairs(x[row + r] + k + block * 32);
#pragma GCC unroll 8
    for (int n = 0; n < PAGE; ++n) {
      const __m512bh weight = pairs(weights + n * 32);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[n][r] = _mm512_dpbf16_ps(acc[n][r], weight, value[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if (last) {
      bf16* s = to.s + (row + r) * to.width;
      float four[4];
      sum4(acc[0][r], acc[1][r], acc[2][r], acc[3][r], four);
      put4<0>(s, to.ranks, four, to.scale);
      sum4(acc[4][r], acc[5][r], acc[6][r], acc[7][r], four);
      put4<4>(s, to.ranks, four, to.scale);
    } else {
#pragma GCC unroll 8
      for (int n = 0; n < PAGE; ++n) sums[row + r][n] = acc[n][r];
    }
  }
}

// s[row] = scale * A x[row] of one page; `in` is a multiple of 32, `rows` at most LORA_ROWS.
static void shrink_many(const bf16* a, const bf16* const* x, int rows, int64_t in, const Shrinking& to, Next next) {
  alignas(64) bf16 weights[STRETCH * PAGE];
  __m512 sums[LORA_ROWS][PAGE];
  for (int64_t k = 0; k < in; k += STRETCH) {
    const int64_t blocks = std::min<int64_t>(STRETCH, in - k) / 32;
    const bool last = k + STRETCH >= in;
    for (int n = 0; n < PAGE; ++n)
      for (int64_t block = 0; block < blocks; ++block) {
        _mm512_store_si512(weights + (block * PAGE + n) * 32, _mm512_loadu_si512(a + n * in + k + block * 32));
        next.line();
      }
    int r = 0;
    for (; r + 3 <= rows; r += 3) shrink_stretch<3>(weights, x, k, blocks, last, sums, r, to);
    if (rows - r == 2) shrink_stretch<2>(weights, x, k, blocks, last, sums, r, to);
    if (rows - r == 1) shrink_stretch<1>(weights, x, k, blocks, last, sums, r, to);
  }
}

// 32 outputs, or as many as there are.
struct PairBlock {
  int64_t at;
  __mmask32 some;  // of its 32 outputs
  PairBlock(int64_t i, int64_t n = INT64_MAX) : at(i), some(n - i < 32 ? (1u << (n - i)) - 1 : ~0u) {}
};

// Two ranks of 32 outputs side by side, for the first 16 outputs and for the others.
struct PairWeights {
  __m512bh first, second;
};
INLINE PairWeights interleaved(__m512i even, __m512i odd) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  even = _mm512_permutexvar_epi64(order, even), odd = _mm512_permutexvar_epi64(order, odd);
  return {(__m512bh)_mm512_unpacklo_epi16(even, odd), (__m512bh)_mm512_unpackhi_epi16(even, odd)};
}

// Sums of R rows for a block of outputs, to which two ranks are added at a time.
template <int R>
struct PairSums {
  typedef __m512bh Value;
  typedef PairWeights Weights;
  static constexpr int RANKS = 2;
  __m512 first[R], second[R];

  INLINE Value value(const bf16* s) {
    int32_t both;
    memcpy(&both, s, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  INLINE Weights weights(const bf16* const* b, int64_t i) {
    return interleaved(_mm512_loadu_si512(b[0] + i), _mm512_loadu_si512(b[1] + i));
  }
  __attribute__((always_inline)) void take(float* const* y, PairBlock block) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      first[r] = _mm512_maskz_loadu_ps((__mmask16)block.some, y[r] + block.at);
      second[r] = _mm512_maskz_loadu_ps((__mmask16)(block.some >> 16), y[r] + block.at + 16);
    }
  }
  __attribute__((always_inline)) void add(int r, Weights weights, Value value) {
    first[r] = _mm512_dpbf16_ps(first[r], weights.first, value);
    second[r] = _mm512_dpbf16_ps(second[r], weights.second, value);
  }
  __attribute__((always_inline)) void give(float* const* y, PairBlock block) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      _mm512_mask_storeu_ps(y[r] + block.at, (__mmask16)block.some, first[r]);
      _mm512_mask_storeu_ps(y[r] + block.at + 16, (__mmask16)(block.some >> 16), second[r]);
    }
  }
};

template <int R>
INLINE void expand_interleaved(const bf16* weights, int ranks, const bf16* const* s, float* const* y, PairBlock block) {
  PairSums<R> sums;
  sums.take(y, block);
  for (int k = 0; k < ranks; k += 2) {
    const PairWeights both{pairs(weights + k * 32), pairs(weights + k * 32 + 32)};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums.add(r, both, PairSums<R>::value(s[r] + k));
  }
  sums.give(y, block);
}

// y[r] += s[r] B, outputs [0, n) from where the `ranks` pointers of `b` and `y` point.
static void expand_many(const bf16* const* b, int ranks, int64_t n, const bf16* s, int64_t width, float* const* y, int rows, Next next) {
  alignas(64) bf16 weights[RANKS_AT_ONCE * 32];
  const bf16* from[LORA_ROWS];
  for (int64_t i = 0; i < n; i += 32) {
    const PairBlock block(i, n);
    for (int rank = 0; rank < ranks; rank += RANKS_AT_ONCE) {
      const int some = std::min(RANKS_AT_ONCE, ranks - rank);
      for (int k = 0; k < some; k += 2) {
        const PairWeights both = interleaved(_mm512_maskz_loadu_epi16(block.some, b[rank + k] + i),
                                             _mm512_maskz_loadu_epi16(block.some, b[rank + k + 1] + i));
        next.lines(2);
        _mm512_store_si512(weights + k * 32, (__m512i)both.first);
        _mm512_store_si512(weights + k * 32 + 32, (__m512i)both.second);
      }
      for (int r = 0; r < rows; ++r) from[r] = s + r * width + rank;
      int r = 0;
      for (; r + 8 <= rows; r += 8) expand_interleaved<8>(weights, some, from + r, y + r, block);
      if (r + 4 <= rows) expand_interleaved<4>(weights, some, from + r, y + r, block), r += 4;
      for (; r < rows; ++r) expand_interleaved<1>(weights, some, from + r, y + r, block);
    }
  }
}
#endif

}  // namespace motet
