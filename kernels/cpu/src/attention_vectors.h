// Attention's two products for vectors of 4 and of 16 floats: four queries at a time.
#pragma once
#include "attention_tiles.h"
#include "kv.h"

namespace motet {

#if MOTET_LEVEL != 1

// Memory that is prefetched at the pace at which other memory is read: `count` parts of `bytes` each, `step` bytes apart. Where a burst
// finds no line buffer free, it is dropped. A part is prefetched in WAYS places at a time.
template <int WAYS>
class Parts {
 public:
  Parts() = default;
  Parts(const void* from, int64_t bytes, int64_t count, int64_t step)
      : at_((const char*)from), end_(at_ + bytes / WAYS), bytes_(bytes / WAYS), count_(count), step_(step) {}
  __attribute__((always_inline)) void lines(int n) {
    for (int i = 0; i < n && at_ < end_; ++i) {
      prefetch(at_ + way_ * bytes_);
      if (WAYS == 1 || ++way_ == WAYS) at_ += 64, way_ = 0;
    }
    if (at_ >= end_ && count_ > 1) at_ = end_ - bytes_ + step_, end_ += step_, --count_;
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t bytes_ = 0, count_ = 0, step_ = 0;
  int way_ = 0;
};

template <class T>
using Soon = Parts<HAS_SCALES<T> ? 8 : 1>;

// scores[q][t] = queries[q] . keys[t] for Q queries and 4 tokens.
template <class T, int Q>
INLINE void scores4(const float* q, int64_t ldq, const T* k, int64_t ldk, int head_dim, Soon<T>& soon, float* scores) {
  vf acc[Q][4];
#pragma GCC unroll 4
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) acc[i][t] = zero();
  int d = 0;
  for (; d + W <= head_dim; d += W) {
    soon.lines(sizeof(T));
    vf keys[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) keys[t] = load(k + t * ldk + d);
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i) {
      const vf value = load(q + i * ldq + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[i][t] += value * keys[t];
    }
  }
  if (d < head_dim) {
    for (int t = 0; t < 4; ++t) {
      const vf key = load_n(k + t * ldk + d, head_dim - d);
      for (int i = 0; i < Q; ++i) acc[i][t] += load(q + i * ldq + d) * key;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Q; ++i) sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], scores + i * CHUNK);
}

template <class T, int Q>
INLINE void score_queries(const float* q, int64_t ldq, const T* k, int64_t ldk, int head_dim, int tokens, Soon<T>& soon, float* scores) {
  int t = 0;
  for (; t + 4 <= tokens; t += 4) scores4<T, Q>(q, ldq, k + t * ldk, ldk, head_dim, soon, scores + t);
  if (t < tokens) {  // missing tokens are replaced by the last one; their weights are not used
    const int last = tokens - t;
    for (int one = 0; one < last; ++one) {
      float same[Q * CHUNK];
      scores4<T, Q>(q, ldq, k + (t + one) * ldk, 0, head_dim, soon, same);
      for (int i = 0; i < Q; ++i) scores[i * CHUNK + t + one] = same[i * CHUNK];
    }
  }
}

// out[q][d] = out[q][d] * shrink[q] + sum over t of weights[q][t] * values[t][d], for Q queries.
template <class T, int Q>
INLINE void add_values(float* out, int64_t ldo, const float* weights, const float* shrink, const T* v, int64_t ldv, int head_dim,
                       int first, int last, Soon<T>& soon) {
  constexpr int D = W == 16 ? 4 : 2;
  int d = 0;
  for (; d + D * W <= head_dim; d += D * W) {
    vf acc[Q][D];
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) acc[i][j] = load(out + i * ldo + d + j * W) * shrink[i];
    for (int t = first; t < last; ++t) {
      soon.lines(sizeof(T));
      vf values[D];
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) values[j] = load(v + t * ldv + d + j * W);
#pragma GCC unroll 4
      for (int i = 0; i < Q; ++i) {
        const vf weight = broadcast(weights[i * CHUNK + t]);
#pragma GCC unroll 4
        for (int j = 0; j < D; ++j) acc[i][j] += weight * values[j];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) store(out + i * ldo + d + j * W, acc[i][j]);
  }
  for (; d < head_dim; d += W) {
    vf acc[Q];
    for (int i = 0; i < Q; ++i) acc[i] = load(out + i * ldo + d) * shrink[i];
    for (int t = first; t < last; ++t) {
      const vf values = load_n(v + t * ldv + d, head_dim - d);
      for (int i = 0; i < Q; ++i) acc[i] += weights[i * CHUNK + t] * values;
    }
    for (int i = 0; i < Q; ++i) store(out + i * ldo + d, acc[i]);
  }
}

INLINE float larger_of(float x, vf v) { return std::max(x, largest(v)); }

#endif

}  // namespace motet
