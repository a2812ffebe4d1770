// A packed matrix with one adapter merged into it: to = round(from + scale * B A), in float and rounded once.
//
// A panel is computed 32 k at a time. B of its 16 outputs and A of these k are widened to float first. A fused matrix has the
// outputs of several modules, each with its own A, and a panel may have outputs of two of them.
#pragma once
#include "lora_plan.h"

namespace motet {

constexpr int MERGE_K = 32;                                             // what k is padded to
constexpr int MERGE_KS = MOTET_LEVEL >= 2 ? 8 : MOTET_LEVEL == 1 ? 4 : 2;  // k whose sums stay in registers

// The k-th line of 16 outputs and the next one.
INLINE void put_pair(float* panel, int64_t k, int at, vf first, vf second) {
  store(panel + k * PANEL + at, first);
  store(panel + (k + 1) * PANEL + at, second);
}
INLINE void put_pair(f16* panel, int64_t k, int at, vf first, vf second) {
  store(panel + k * PANEL + at, first);
  store(panel + (k + 1) * PANEL + at, second);
}
INLINE void put_pair(bf16* panel, int64_t k, int at, vf first, vf second) {
  const vu both = __builtin_convertvector(to_bf16(first), vu) | __builtin_convertvector(to_bf16(second), vu) << 16;
  memcpy((void*)(panel + k * PANEL + at * 2), &both, sizeof both);
}

// One module of a fused matrix: it has the outputs [begin, end) of a panel.
struct MergePart {
  int m, begin, end, ranks;
  int64_t first;  // the panel's first output as a number of the module's; negative where another module's come before
  float scale;
};

template <class T>  // of the adapter
INLINE const T* page_of(const Pool& pool, int m, int page, int64_t layer) {
  return (const T*)pool.arena + (pool.table[m * pool.max_pages + page] + layer * (pool.in[m] + pool.out[m])) * PAGE;
}

// B of the panel's outputs in floats: [rank of each part in turn][16].
template <class T>
INLINE void widen_outputs(const Pool& pool, const MergePart* parts, int count, int64_t layer, float* wide) {
  for (int p = 0; p < count; ++p) {
    const MergePart& part = parts[p];
    for (int r = 0; r < part.ranks; ++r, wide += PANEL) {
      const T* row = page_of<T>(pool, part.m, r / PAGE, layer) + PAGE * pool.in[part.m] + r % PAGE * pool.out[part.m];
      memset(wide, 0, PANEL * sizeof(float));
      for (int n = part.begin; n < part.end; n += W)
        store_n(wide + n, load_n(row + part.first + n, std::min(W, part.end - n)), std::min(W, part.end - n));
    }
  }
}

// A of `live` k from k0 on in floats: [rank][32].
template <class T>
INLINE void widen_inputs(const Pool& pool, const MergePart& part, int64_t layer, int64_t k0, int live, float* wide) {
  for (int r = 0; r < part.ranks; ++r) {
    const T* row = page_of<T>(pool, part.m, r / PAGE, layer) + r % PAGE * pool.in[part.m] + k0;
    for (int i = 0; i < MERGE_K; i += W) store(wide + r * MERGE_K + i, i < live ? load_n(row + i, std::min(W, live - i)) : zero());
  }
}

// The 32 k from k0 on of the panel, with `sums` [32][16] added.
template <class Wt>
INLINE void add_to_panel(int64_t k0, const float* sums, const Wt* from, Wt* to) {
  constexpr int KL = Packed<Wt>::KL, LINE = 64 / sizeof(Wt);
  for (int i = 0; i < MERGE_K; i += 2)
    for (int at = 0; at < PANEL; at += W) {
      vf both[2];
      for (int u = 0; u < 2; ++u) {
        const int64_t at_k = k0 + i + u;
        both[u] = line_values(from + at_k / KL * LINE, (int)(at_k % KL), at) + load(sums + (i + u) * PANEL + at);
      }
      put_pair(to, k0 + i, at, both[0], both[1]);
    }
}

// `from` and `to` are the panel's; `a` and `b` have room for 32 and 16 values of every rank.
template <class Wt, class T>
static void merge_panel(const Pool& pool, const MergePart* parts, int count, int64_t layer, int64_t k, const Wt* from, Wt* to,
                        float* a, float* b) {
  constexpr int VP = PANEL / W;
  widen_outputs<T>(pool, parts, count, layer, b);
  for (int64_t k0 = 0; k0 < k; k0 += MERGE_K) {
    alignas(64) float sums[MERGE_K * PANEL] = {};
    const float* own = b;
    for (int p = 0; p < count; ++p) {
      const MergePart& part = parts[p];
      widen_inputs<T>(pool, part, layer, k0, (int)std::min<int64_t>(MERGE_K, k - k0), a);
      for (int i = 0; i < MERGE_K; i += MERGE_KS) {
        vf acc[MERGE_KS][VP];
#pragma GCC unroll 16
        for (int j = 0; j < MERGE_KS; ++j)
#pragma GCC unroll 16
          for (int v = 0; v < VP; ++v) acc[j][v] = zero();
        for (int r = 0; r < part.ranks; ++r) {
          vf outputs[VP];
#pragma GCC unroll 16
          for (int v = 0; v < VP; ++v) outputs[v] = load(own + r * PANEL + v * W);
#pragma GCC unroll 16
          for (int j = 0; j < MERGE_KS; ++j) {
            const vf value = broadcast(a[r * MERGE_K + i + j]);
#pragma GCC unroll 16
            for (int v = 0; v < VP; ++v) acc[j][v] += value * outputs[v];
          }
        }
#pragma GCC unroll 16
        for (int j = 0; j < MERGE_KS; ++j)
#pragma GCC unroll 16
          for (int v = 0; v < VP; ++v) {
            float* sum = sums + (i + j) * PANEL + v * W;
            store(sum, load(sum) + acc[j][v] * part.scale);
          }
      }
      own += part.ranks * PANEL;
    }
    add_to_panel(k0, sums, from, to);
  }
}

// Panels [first, first + count) of a fused matrix of `layer`; `pool` has one slot. `to` is the whole new matrix.
template <class Wt, class T>
static void run_merge(const Pool& pool, int64_t layer, int group, const Matrix& from, void* to, int64_t first, int64_t count,
                      Team& team) {
  const int64_t bytes = panel_bytes(from);
  team.run([&](int) {
    std::vector<float> a, b;
    team.each(count, [&](int64_t item, int64_t) {
      const int64_t panel = first + item;
      MergePart parts[3];
      int found = 0, ranks = 0, most = 0;
      int64_t start = -panel * PANEL;  // of a module's outputs, seen from the panel's
      for (int m = GROUP_START[group]; m < GROUP_START[group + 1]; start += pool.out[m++]) {
        MergePart part{m, (int)std::max<int64_t>(0, start), (int)std::min<int64_t>(PANEL, start + pool.out[m]), pool.pages[m] * PAGE,
                       -start, pool.scales[m * pool.layers + layer]};
        if (part.begin >= part.end || !part.ranks || part.scale == 0.0f) continue;
        parts[found++] = part;
        ranks += part.ranks, most = std::max(most, part.ranks);
      }
      const char* source = (const char*)from.data + panel * bytes;
      if (!found) return (void)memcpy((char*)to + panel * bytes, source, bytes);
      a.resize(most * MERGE_K), b.resize(ranks * PANEL);
      merge_panel<Wt, T>(pool, parts, found, layer, from.k, (const Wt*)source, (Wt*)((char*)to + panel * bytes), a.data(), b.data());
    });
  });
}

}  // namespace motet
