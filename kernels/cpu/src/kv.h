// The KV cache of one layer: blocks of `block_size` tokens, each in one piece. T is the type of its elements.
//
//   floats   [block_size, 2, kv_heads, head_dim]
//   int8     for each KV head: keys [block_size, head_dim] as integers in -127..127, values likewise, then their scales,
//            float [2, block_size]
//
// A key or value of int8 is integer * scale, with one scale for each token, KV head, and key or value: the largest magnitude
// becomes 127. A key or value that is not finite has the scale NaN, so that its request fails as it would with floats.
#pragma once
#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace motet {

template <class T>
constexpr bool HAS_SCALES = std::is_same<T, int8_t>::value;

struct KvLayout {
  int64_t kv_heads, head_dim, block_size;

  // All in elements of T. From a token to the next, in the keys or values of one head:
  template <class T>
  int64_t token() const {
    return HAS_SCALES<T> ? head_dim : 2 * kv_heads * head_dim;
  }
  int64_t head() const {  // of int8: from a head to the next
    return 2 * block_size * (head_dim + (int64_t)sizeof(float));
  }
  template <class T>
  int64_t block() const {
    return HAS_SCALES<T> ? kv_heads * head() : block_size * token<T>();
  }
  // Where in a block the keys of a head begin, and from there its values, and for int8 its scales of `part` 0 keys, 1 values.
  template <class T>
  int64_t keys(int64_t at) const {
    return at * (HAS_SCALES<T> ? head() : head_dim);
  }
  template <class T>
  int64_t values() const {
    return HAS_SCALES<T> ? block_size * head_dim : kv_heads * head_dim;
  }
  int64_t scales(int part) const { return 2 * block_size * head_dim + part * block_size * (int64_t)sizeof(float); }
};

// The largest magnitude of `n` values; NaN if one of them is not finite.
INLINE float largest_magnitude(const float* x, int64_t n) {
  vf most = zero(), odd = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf v = load_n(x + i, (int)std::min<int64_t>(W, n - i));
    most = max(most, (vf)((vu)v & 0x7fffffffu));
    odd += v * 0.0f;
  }
  return largest(most) + sum(odd);
}

// `n` values as whole numbers; returns their scale.
INLINE float round_head(const float* x, int64_t n, int8_t* to) {
  const float limit = largest_magnitude(x, n);
  const float inverse = limit > 1e-30f ? 127.0f / limit : 0.0f;
  for (int64_t i = 0; i < n; i += W) {
    const int live = (int)std::min<int64_t>(W, n - i);
    store_n(to + i, load_n(x + i, live) * inverse, live);
  }
  return limit / 127.0f;
}

// A token's keys and values, [kv_heads, head_dim] each, into `slot` (block * block_size + offset).
template <class T>
INLINE void write_kv(const KvLayout& layout, const float* k, const float* v, T* kv, int64_t slot) {
  if constexpr (HAS_SCALES<T>) {
    const int64_t offset = slot % layout.block_size, size = layout.head_dim;
    for (int64_t h = 0; h < layout.kv_heads; ++h, k += size, v += size) {
      T* head = kv + slot / layout.block_size * layout.template block<T>() + layout.template keys<T>(h);
      T* to = head + offset * size;
      const float scales[2] = {round_head(k, size, to), round_head(v, size, to + layout.template values<T>())};
      for (int part = 0; part < 2; ++part)
        memcpy(head + layout.scales(part) + offset * (int64_t)sizeof(float), scales + part, sizeof(float));
    }
  } else {
    const int64_t n = layout.kv_heads * layout.head_dim;
    T* to = kv + slot * 2 * n;
    for (int64_t i = 0; i < n; i += W) {
      const int live = (int)std::min<int64_t>(W, n - i);
      store_n(to + i, load_n(k + i, live), live);
      store_n(to + n + i, load_n(v + i, live), live);
    }
  }
}

}  // namespace motet
