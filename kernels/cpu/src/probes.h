// Measures the limits of the machine, to compare the kernels with: reading memory, and multiply-adds in registers.
#pragma once
#include <chrono>

#include "gemm.h"

namespace motet {

template <class F>
static double seconds_of(Team& team, F&& f) {
  const auto began = std::chrono::steady_clock::now();
  team.run(f);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Reads `data` once, in pieces of 256 KiB with eight streams each.
static double bandwidth_of(const void* data, int64_t bytes, Team& team) {
  const int64_t piece = 256 << 10, count = bytes / piece, stream = piece / 8;
  std::atomic<uint32_t> sink{0};
  const double seconds = seconds_of(team, [&](int) {
    vu seen = {};
    team.each(count, [&](int64_t item, int64_t) {
      const char* from = (const char*)data + item * piece;
      for (int64_t at = 0; at < stream; at += 64)
#pragma GCC unroll 8
        for (int s = 0; s < 8; ++s)
#pragma GCC unroll 4
          for (int part = 0; part < 64; part += W * 4) {
            vu v;
            memcpy(&v, from + s * stream + at + part, sizeof v);
            seen ^= v;
          }
    });
    sink += seen[0];
  });
  return (double)(count * piece) / seconds;
}

template <class T>
static double peak_of(Team& team) {
  const int64_t repeats = MOTET_LEVEL >= 2 ? 400000 : 200000;
  std::atomic<uint32_t> sink{0};
  double flops_each = 0;
  const double seconds = seconds_of(team, [&](int member) {
    [[maybe_unused]] const Tiles tiles;
    float result = 0;
#if MOTET_LEVEL >= 4
    if constexpr (sizeof(T) == 2) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      _tile_zero(4);
      _tile_zero(5);
      _tile_zero(6);
      _tile_zero(7);
      for (int64_t i = 0; i < repeats; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      if (!member) flops_each = 4 * 16 * 16 * 32 * 2;
      return;
    }
#endif
    constexpr int N = MOTET_LEVEL >= 2 ? 24 : 12;
    vf acc[N];
    vf a = broadcast(1e-20f + (float)member), b = broadcast(1e-10f);
    asm volatile("" : "+m"(a), "+m"(b));
    // Without the unrolling here and of the last loop the sums would be kept in memory.
#pragma GCC unroll 24
    for (int j = 0; j < N; ++j) acc[j] = broadcast((float)j);  // equal sums could be computed once for all
#if MOTET_LEVEL >= 3
    if constexpr (sizeof(T) == 2) {
      for (int64_t i = 0; i < repeats; ++i)
#pragma GCC unroll 24
        for (int j = 0; j < N; ++j) acc[j] = _mm512_dpbf16_ps(acc[j], pairs(&a), pairs(&b));
      if (!member) flops_each = N * 64;
    } else
#endif
    {
      for (int64_t i = 0; i < repeats; ++i) {
#if MOTET_LEVEL == 1
        asm volatile("" : "+x"(a));  // so that the product is not computed once, before the loop
#endif
#pragma GCC unroll 24
        for (int j = 0; j < N; ++j) acc[j] += a * b;
      }
      if (!member) flops_each = N * W * 2;
    }
#pragma GCC unroll 24
    for (int j = 0; j < N; ++j) result += sum(acc[j]);
    sink += (uint32_t)result;
  });
  return flops_each * (double)repeats * team.size() / seconds;
}

}  // namespace motet
