// Two vectors of values from memory: adjacent ones, but for bf16 the even and the odd values, which are cheaper to widen.
#pragma once
#include "simd.h"

namespace motet {

struct Two {
  vf a, b;
};
#if MOTET_LEVEL >= 1
INLINE Two load_two(const bf16* p) {
  vu both;
  memcpy(&both, p, sizeof both);
  return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
}
#endif
#if MOTET_LEVEL >= 2
INLINE Two sorted(Two v, const bf16*) {
  const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {_mm512_permutex2var_ps(v.a, (__m512i)even, v.b), _mm512_permutex2var_ps(v.a, (__m512i)(even + 1), v.b)};
}
INLINE Two unsorted(Two v, const bf16*) {
  const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  return {_mm512_permutex2var_ps(v.a, (__m512i)low, v.b), _mm512_permutex2var_ps(v.a, (__m512i)(low + 8), v.b)};
}
#elif MOTET_LEVEL == 1
INLINE Two sorted(Two v, const bf16*) {
  const __m256d even = (__m256d)_mm256_shuffle_ps(v.a, v.b, 0x88), odd = (__m256d)_mm256_shuffle_ps(v.a, v.b, 0xdd);
  return {(vf)_mm256_permute4x64_pd(even, 0xd8), (vf)_mm256_permute4x64_pd(odd, 0xd8)};
}
INLINE Two unsorted(Two v, const bf16*) {
  const __m256 low = _mm256_unpacklo_ps(v.a, v.b), high = _mm256_unpackhi_ps(v.a, v.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
#endif
template <class T>
INLINE Two load_two(const T* p) {
  return {load(p), load(p + W)};
}
// Adjacent values of float in the order of `load_two(const T*)`, and back.
template <class T>
INLINE Two sorted(Two v, const T*) {
  return v;
}
template <class T>
INLINE Two unsorted(Two v, const T*) {
  return v;
}

// The first n of 2 W values, then zeros.
template <class T>
INLINE Two load_two_n(const T* p, int n) {
  if (n >= 2 * W) return load_two(p);
  T part[2 * W] = {};
  memcpy(part, p, n * sizeof(T));
  return load_two((const T*)part);
}

}  // namespace motet
