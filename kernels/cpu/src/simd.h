// Vectors of W floats for one instruction set; MOTET_LEVEL says which (see kernels/cpu/build.py). Values of other types are converted
// to float when loaded and rounded to nearest even when stored. `_n` forms touch only the first n elements.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if MOTET_LEVEL >= 1
#include <immintrin.h>
#endif

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace motet {

template <int N>
constexpr std::integral_constant<int, N> number;  // known to the compiler as an argument

#if MOTET_LEVEL >= 2
constexpr int W = 16;
#elif MOTET_LEVEL == 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int8_t vb __attribute__((vector_size(W)));
#if MOTET_LEVEL == 0
typedef _Float16 vhalf __attribute__((vector_size(W * 2)));
#endif

INLINE vf broadcast(float x) {
#if MOTET_LEVEL == 1
  return _mm256_set1_ps(x);  // one load; the compiler must not leave out the addition below, which changes -0
#else
  return vf{} + x;
#endif
}
INLINE vf zero() { return vf{}; }
// sum += a * b, where the sums of a loop take nearly all registers: AVX2 has 16, and the compiler, left to choose which operand is
// overwritten, moves sums to and from memory.
INLINE void multiply_add(vf& sum, vf a, vf b) {
#if MOTET_LEVEL == 1
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum += a * b;
#endif
}
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
INLINE void prefetch_to_store(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*(const char*)p));  // the compiler has it for some processors only; older ones ignore it
#else
  __builtin_prefetch(p, 1, 2);
#endif
}

INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE vh load_bits(const void* p) {
  vh v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE vf from_bf16(vh v) {
#if MOTET_LEVEL >= 2
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#elif MOTET_LEVEL == 1
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
#else
  return (vf)(__builtin_convertvector(v, vu) << 16);
#endif
}
INLINE vf from_f16(vh v) {
#if MOTET_LEVEL >= 2
  return _mm512_cvtph_ps((__m256i)v);
#elif MOTET_LEVEL == 1
  return _mm256_cvtph_ps((__m128i)v);
#else
  return __builtin_convertvector((vhalf)v, vf);
#endif
}
INLINE vh to_bf16(vf x) {
#if MOTET_LEVEL >= 3
  return (vh)_mm512_cvtneps_pbh(x);
#else
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector((vi)(x != x) ? quiet : rounded, vh);
#endif
}
INLINE vh to_f16(vf x) {
#if MOTET_LEVEL >= 2
  return (vh)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif MOTET_LEVEL == 1
  return (vh)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#else
  return (vh)__builtin_convertvector(x, vhalf);
#endif
}
INLINE vf as_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi nearest(vf x) {
#if MOTET_LEVEL >= 2
  return (vi)_mm512_cvtps_epi32(x);
#elif MOTET_LEVEL == 1
  return (vi)_mm256_cvtps_epi32(x);
#else
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  return (vi)(x + magic) - (vi)magic;
#endif
}
INLINE vf load(const bf16* p) { return from_bf16(load_bits(p)); }
INLINE vf load(const f16* p) { return from_f16(load_bits(p)); }
INLINE vf load(const int8_t* p) {
#if MOTET_LEVEL >= 2
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif MOTET_LEVEL == 1
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vb v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vf);
#endif
}
INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
INLINE void store(bf16* p, vf x) {
  const vh v = to_bf16(x);
  memcpy(p, &v, sizeof v);
}
INLINE void store(f16* p, vf x) {
  const vh v = to_f16(x);
  memcpy(p, &v, sizeof v);
}
INLINE void store(int8_t* p, vf x) {
  const vb v = __builtin_convertvector(nearest(x), vb);
  memcpy(p, &v, sizeof v);
}
template <class T>
INLINE vf load_n(const T* p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <class T>
INLINE void store_n(T* p, vf x, int n) {
  if (n >= W) return store(p, x);
  T part[W];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}

INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE float sum(vf v) {
#if MOTET_LEVEL >= 2
  return _mm512_reduce_add_ps(v);
#elif MOTET_LEVEL == 1
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  float s[W];
  memcpy(s, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) s[i] += s[i + half];
  return s[0];
#endif
}
INLINE float largest(vf v) {
#if MOTET_LEVEL >= 2
  return _mm512_reduce_max_ps(v);
#else
  float m[W];
  memcpy(m, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) m[i] = m[i] > m[i + half] ? m[i] : m[i + half];
  return m[0];
#endif
}
// The sums of four vectors at once.
INLINE void sum4(vf a, vf b, vf c, vf d, float* out) {
#if MOTET_LEVEL >= 1
#if MOTET_LEVEL >= 2
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 half = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#endif
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// e^x to about one ulp; exactly 0 below -87.
INLINE vf exp(vf x) {
  const vf low = broadcast(-87.0f), high = broadcast(88.0f);
  const vi under = x < low;
  x = under ? low : x;
  x = x > high ? high : x;
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vf shifted = x * 1.44269504088896341f + magic;
  const vf whole = shifted - magic;
  const vf r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vf p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi power = (((vi)shifted - (vi)magic) + 127) << 23;
  return under ? zero() : p * (vf)power;
}

}  // namespace motet
