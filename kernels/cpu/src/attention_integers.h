// Attention's two products for keys and values of 8 bits, with VNNI. Queries and weights become whole numbers of 15 and 16 bits, each as
// two bytes, so that products and sums are exact: a result differs from that of floats by the rounding of queries and weights alone,
// 2^-15 of the largest of each.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_tiles.h"
#include "kv.h"

namespace motet {

#if MOTET_LEVEL >= 3

// Whether this code computes the attention of such a cache. Sums are then in the order of `interleaved`, see `in_order`.
template <class T>
INLINE bool in_integers(const KvLayout& layout) {
  return HAS_SCALES<T> && layout.head_dim % 64 == 0 && layout.head_dim <= 256 && layout.block_size % 4 == 0;
}

INLINE __m512i bytes_at(const void* p) { return _mm512_loadu_si512(p); }
// f(0), .., f(N - 1) with constants: an array that is indexed by them alone is kept in registers.
template <int N, class F>
INLINE void each(F f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(std::integral_constant<int, N - 1>{});
  }
}
#define ALL(i) [&](auto i) __attribute__((always_inline))

// sums += the products of four bytes each. The compiler, left to choose which operand is overwritten, copies sums.
INLINE void add_products(__m512i& sums, __m512i without_sign, __m512i with_sign) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(without_sign), "v"(with_sign));
}

// A query, in the memory of its floats: bytes `high` and `low` with 128 * high + low = query / scale, and what the offset of 128 that
// keys get adds to every product.
struct QueryBytes {
  const int8_t* at;
  int head_dim;
  __m512i high(int d) const { return bytes_at(at + d); }
  __m512i low(int d) const { return bytes_at(at + head_dim + d); }
  float scale() const { return value<float>(0); }
  int32_t offset() const { return value<int32_t>(4); }

 private:
  template <class V>
  V value(int byte) const {
    V v;
    memcpy(&v, at + 2 * head_dim + byte, sizeof v);
    return v;
  }
};

// Turns a query's floats into bytes. Its scale is NaN if one of them is not finite.
INLINE void to_bytes(float* query, int head_dim) {
  alignas(64) int8_t high[256], low[256];
  const float limit = largest_magnitude(query, head_dim), scale = limit / (127 * 128);
  const float inverse = limit > 1e-30f ? 127 * 128 / limit : 0;
  int32_t sums = 0;
  for (int d = 0; d < head_dim; d += W) {
    const vi whole = nearest(load(query + d) * inverse), upper = (whole + 64) >> 7;
    _mm_store_si128((__m128i*)(high + d), _mm512_cvtepi32_epi8((__m512i)upper));
    _mm_store_si128((__m128i*)(low + d), _mm512_cvtepi32_epi8((__m512i)(whole - (upper << 7))));
    sums += _mm512_reduce_add_epi32((__m512i)whole);
  }
  const int32_t offset = 128 * sums;
  int8_t* to = (int8_t*)query;
  memcpy(to, high, head_dim);
  memcpy(to + head_dim, low, head_dim);
  memcpy(to + 2 * head_dim, &scale, 4);
  memcpy(to + 2 * head_dim + 4, &offset, 4);
}

// The sums of four vectors of whole numbers.
INLINE __m128i sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// scores[i][t] = queries[i] . keys[t], without the keys' scales, for Q queries and 4 tokens.
template <int Q, class Soon>
INLINE void byte_scores4(const float* q, int64_t ldq, const int8_t* k, int64_t ldk, int head_dim, Soon& soon, float* scores) {
  __m512i high[Q][4], low[Q][4];
  each<Q>(ALL(i) { each<4>(ALL(t) { high[i][t] = low[i][t] = _mm512_setzero_si512(); }); });
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  for (int d = 0; d < head_dim; d += 64) {
    soon.lines(4);
    __m512i keys[4];
    each<4>(ALL(t) { keys[t] = _mm512_xor_si512(bytes_at(k + t * ldk + d), sign); });  // + 128
    each<Q>(ALL(i) {
      const QueryBytes query{(const int8_t*)(q + i * ldq), head_dim};
      const __m512i upper = query.high(d), lower = query.low(d);
      each<4>(ALL(t) {
        add_products(high[i][t], keys[t], upper);
        add_products(low[i][t], keys[t], lower);
      });
    });
  }
  each<Q>(ALL(i) {
    const QueryBytes query{(const int8_t*)(q + i * ldq), head_dim};
    each<4>(ALL(t) { high[i][t] = _mm512_add_epi32(_mm512_slli_epi32(high[i][t], 7), low[i][t]); });
    const __m128i sums = _mm_sub_epi32(sum4(high[i][0], high[i][1], high[i][2], high[i][3]), _mm_set1_epi32(query.offset()));
    _mm_storeu_ps(scores + i * CHUNK, _mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_set1_ps(query.scale())));
  });
}

template <int Q, class Soon>
INLINE void score_bytes(const float* q, int64_t ldq, const int8_t* k, int64_t ldk, int head_dim, int tokens, Soon& soon, float* scores) {
  if constexpr (Q > 3) {  // sums of 4 queries would not stay in registers
    Soon none{};
    score_bytes<2>(q, ldq, k, ldk, head_dim, tokens, soon, scores);
    score_bytes<Q - 2>(q + 2 * ldq, ldq, k, ldk, head_dim, tokens, none, scores + 2 * CHUNK);
  } else {
    int t = 0;
    for (; t + 4 <= tokens; t += 4) byte_scores4<Q>(q, ldq, k + t * ldk, ldk, head_dim, soon, scores + t);
    for (; t < tokens; ++t) {
      float same[Q * CHUNK];
      byte_scores4<Q>(q, ldq, k + t * ldk, 0, head_dim, soon, same);
      for (int i = 0; i < Q; ++i) scores[i * CHUNK + t] = same[i * CHUNK];
    }
  }
}

// The weights of 16 tokens, in the memory of their floats: bytes high[16], low[16] with 256 * high + low = weight / scale, then the scale.
INLINE void weights_to_bytes(float* weights) {
  static_assert(CHUNK == W, "one vector");
  const vf w = load(weights);
  const float limit = largest(w), inverse = limit > 1e-30f ? 65535 / limit : 0;
  const bool odd = _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q) != 0;
  const float scale = odd ? NAN : limit / 65535;
  const vi whole = nearest(w * inverse);
  _mm_storeu_si128((__m128i*)weights, _mm512_cvtepi32_epi8((__m512i)(whole >> 8)));
  _mm_storeu_si128((__m128i*)(weights + 4), _mm512_cvtepi32_epi8((__m512i)whole));
  weights[8] = scale;
}

// Four tokens' values of 64 d: every 32 bits of the result have the four values of one d. The d of vector j are, for L in 0..3,
// 16 L + 4 j + 0..3.
INLINE void interleaved(const int8_t* v, int64_t ldv, __m512i* out) {
  const __m512i a = bytes_at(v), b = bytes_at(v + ldv), c = bytes_at(v + 2 * ldv), d = bytes_at(v + 3 * ldv);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi8(a, b), cd2 = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_unpacklo_epi16(ab, cd), out[1] = _mm512_unpackhi_epi16(ab, cd);
  out[2] = _mm512_unpacklo_epi16(ab2, cd2), out[3] = _mm512_unpackhi_epi16(ab2, cd2);
}

// The bytes of four tokens from `t` on, in every 32 bits.
INLINE __m512i four_at(const float* bytes, int t) {
  int32_t four;
  memcpy(&four, (const char*)bytes + t, sizeof four);
  return _mm512_set1_epi32(four);
}

// Sums in the order of `interleaved`, in the order of d.
INLINE void in_order(float* sums, int64_t width) {
  for (int64_t d = 0; d < width; d += 64) {
    float from[64];
    memcpy(from, sums + d, sizeof from);
    for (int j = 0; j < 4; ++j)
      for (int lane = 0; lane < 4; ++lane) memcpy(sums + d + 16 * lane + 4 * j, from + 16 * j + 4 * lane, 16);
  }
}

// out[i] = out[i] * shrink[i] + sum over t of weights[i][t] * values[t], for Q queries and the tokens first..last, in groups of 4.
template <int Q, class Soon>
INLINE void add_bytes(float* out, int64_t ldo, const float* weights, const float* shrink, const int8_t* v, int64_t ldv, int head_dim,
                      int first, int last, Soon& soon) {
  if constexpr (Q > 3) {
    Soon none{};
    add_bytes<2>(out, ldo, weights, shrink, v, ldv, head_dim, first, last, soon);
    add_bytes<Q - 2>(out + 2 * ldo, ldo, weights + 2 * CHUNK, shrink + 2, v, ldv, head_dim, first, last, none);
  } else {
    for (int d = 0; d < head_dim; d += 64) {
      __m512i high[Q][4], low[Q][4];
      each<Q>(ALL(i) { each<4>(ALL(j) { high[i][j] = low[i][j] = _mm512_setzero_si512(); }); });
      for (int t = first / 4 * 4; t < last; t += 4) {
        soon.lines(4);
        __m512i values[4];
        interleaved(v + t * ldv + d, ldv, values);
        each<Q>(ALL(i) {
          const __m512i upper = four_at(weights + i * CHUNK, t), lower = four_at(weights + i * CHUNK + 4, t);
          each<4>(ALL(j) {
            add_products(high[i][j], upper, values[j]);
            add_products(low[i][j], lower, values[j]);
          });
        });
      }
      each<Q>(ALL(i) {
        const vf scale = broadcast(weights[i * CHUNK + 8]), before = broadcast(shrink[i]);
        each<4>(ALL(j) {
          float* to = out + i * ldo + d + j * W;
          const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high[i][j], 8), low[i][j]);
          store(to, load(to) * before + (vf)_mm512_cvtepi32_ps(sums) * scale);
        });
      });
    }
  }
}

#else  // without VNNI nothing is computed in integers, and none of these is called

template <class T>
INLINE bool in_integers(const KvLayout&) {
  return false;
}
INLINE void to_bytes(float*, int) {}
INLINE void weights_to_bytes(float*) {}
INLINE void in_order(float*, int64_t) {}
template <int Q, class Soon>
INLINE void score_bytes(const float*, int64_t, const int8_t*, int64_t, int, int, Soon&, float*) {}
template <int Q, class Soon>
INLINE void add_bytes(float*, int64_t, const float*, const float*, const int8_t*, int64_t, int, int, int, Soon&) {}

#endif

}  // namespace motet
