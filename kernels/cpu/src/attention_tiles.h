// Attention's two products for vectors of 8 floats, whose 16 registers hold up to six queries and the sums of two tokens each.
//
// While keys or values are read, those that come later are prefetched, see `Lead`.
#pragma once
#include <algorithm>

#include "two.h"

namespace motet {

constexpr int CHUNK = 16;  // tokens
constexpr int QUERIES_TOGETHER = MOTET_LEVEL == 1 ? 6 : 4;  // so many of their sums stay in registers

// Calls f(number<Q>, first query) over `n` queries, QUERIES_TOGETHER at a time while so many are left.
template <int Q, class F>
INLINE void last_queries(int n, int at, F&& f) {
  if constexpr (Q > 0) {
    if (n - at == Q) f(number<Q>, at);
    last_queries<Q - 1>(n, at, f);
  }
}
template <class F>
INLINE void each_queries(int n, F&& f) {
  int at = 0;
  for (; at + QUERIES_TOGETHER <= n; at += QUERIES_TOGETHER) f(number<QUERIES_TOGETHER>, at);
  last_queries<QUERIES_TOGETHER - 1>(n, at, f);
}

// How far away, in elements, what is read next and what is read later lie. The first-level cache has room for little, so what is
// read later comes to the second-level cache before.
struct Lead {
  int64_t next, later;
};

#if MOTET_LEVEL == 1

template <class T>
using Soon = const Lead;  // what is prefetched while keys or values are read

template <class T>
INLINE void prefetch_for(const Lead& lead, const T* at) {
  __builtin_prefetch(at + lead.next, 0, 3);
  prefetch(at + lead.later);
}

// scores[i][t] = q[i] . k[t] for Q queries and two tokens; q in the order of `load_two`.
template <class T, int Q>
INLINE void scores_tile(const float* q, int64_t ldq, const T* k, int64_t ldk, int head_dim, const Lead& lead, float* scores) {
  vf acc[Q][2];
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i) acc[i][0] = acc[i][1] = zero();
  const auto add = [&](const Two& one, const Two& other, const float* q) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int i = 0; i < Q; ++i) {
      const vf query = load(q + i * ldq);
      acc[i][0] += query * one.a;
      acc[i][1] += query * other.a;
    }
#pragma GCC unroll 6
    for (int i = 0; i < Q; ++i) {
      const vf query = load(q + i * ldq + W);
      acc[i][0] += query * one.b;
      acc[i][1] += query * other.b;
    }
  };
  int d = 0;
  for (; d + 2 * W <= head_dim; d += 2 * W) {
    add(load_two(k + d), load_two(k + ldk + d), q + d);
    if (d % (64 / sizeof(T)) == 0) {
      prefetch_for(lead, k + d);
      prefetch_for(lead, k + ldk + d);
    }
  }
  if (d < head_dim) add(load_two_n(k + d, head_dim - d), load_two_n(k + ldk + d, head_dim - d), q + d);
#pragma GCC unroll 3
  for (int i = 0; i < Q; i += 2) {
    const int j = i + 1 < Q ? i + 1 : i;
    float four[4];
    sum4(acc[i][0], acc[i][1], acc[j][0], acc[j][1], four);
    memcpy(scores + i * CHUNK, four, 2 * sizeof(float));
    memcpy(scores + j * CHUNK, four + 2, 2 * sizeof(float));
  }
}

template <class T, int Q>
INLINE void score_queries(const float* q, int64_t ldq, const T* k, int64_t ldk, int head_dim, int tokens, const Lead& lead,
                          float* scores) {
  int t = 0;
  for (; t + 2 <= tokens; t += 2) scores_tile<T, Q>(q, ldq, k + t * ldk, ldk, head_dim, lead, scores + t);
  if (t == tokens) return;
  float same[Q * CHUNK];  // the last token twice
  scores_tile<T, Q>(q, ldq, k + t * ldk, 0, head_dim, lead, same);
  for (int i = 0; i < Q; ++i) scores[i * CHUNK + t] = same[i * CHUNK];
}

// out[i][d] = out[i][d] * shrink[i] + sum over t of weights[i][t] * v[t][d], for 2 W N of d from `out` and `v` on.
template <class T, int Q, int N, bool WHOLE>
INLINE void values_tile(float* out, int64_t ldo, const float* weights, const float* shrink, const T* v, int64_t ldv, int live,
                        int first, int last, const Lead& lead) {
  Two acc[Q][N];
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      const float* from = out + i * ldo + j * 2 * W;
      acc[i][j] = {load(from) * shrink[i], load(from + W) * shrink[i]};
    }
  for (int t = first; t < last; ++t) {
    prefetch_for(lead, v + t * ldv);
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      const Two values = WHOLE ? load_two(v + t * ldv + j * 2 * W) : load_two_n(v + t * ldv, live);
#pragma GCC unroll 6
      for (int i = 0; i < Q; ++i) {
        const vf weight = broadcast(weights[i * CHUNK + t]);
        acc[i][j].a += weight * values.a;
        acc[i][j].b += weight * values.b;
      }
      asm volatile("" ::: "memory");  // or the weights would be kept, and sums leave the registers
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      store(out + i * ldo + j * 2 * W, acc[i][j].a);
      store(out + i * ldo + j * 2 * W + W, acc[i][j].b);
    }
}

template <class T, int Q>
INLINE void add_values(float* out, int64_t ldo, const float* weights, const float* shrink, const T* v, int64_t ldv, int head_dim,
                       int first, int last, const Lead& lead) {
  constexpr int N = Q <= 3 ? 2 : 1;
  int d = 0;
  for (; d + N * 2 * W <= head_dim; d += N * 2 * W)
    values_tile<T, Q, N, true>(out + d, ldo, weights, shrink, v + d, ldv, 2 * W, first, last, lead);
  for (; d + 2 * W <= head_dim; d += 2 * W)
    values_tile<T, Q, 1, true>(out + d, ldo, weights, shrink, v + d, ldv, 2 * W, first, last, lead);
  if (d < head_dim) values_tile<T, Q, 1, false>(out + d, ldo, weights, shrink, v + d, ldv, head_dim - d, first, last, lead);
}

// The largest of x and v, in which few are larger than x.
INLINE float larger_of(float x, vf v) {
  return _mm256_movemask_ps((__m256)(v > broadcast(x))) ? std::max(x, largest(v)) : x;
}

#endif

}  // namespace motet
