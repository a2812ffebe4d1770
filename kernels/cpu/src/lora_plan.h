// The plan of multi-adapter LoRA in a step: work cut into pieces, see lora.h.
#pragma once
#include "gemm.h"

namespace motet {

constexpr int PAGE = 8;       // ranks
constexpr int MODULES = 7;    // q k v o gate up down
constexpr int GROUPS = 4;     // fused: qkv, o, gate_up, down
constexpr int GROUP_START[GROUPS + 1] = {0, 3, 4, 6, 7};
constexpr int LORA_ROWS = 32;  // of one piece: two tiles
constexpr int MAX_PAGES = 128;  // of one adapter: rank 1024
// Pages of an adapter that are read at once, each in order of address. The processor fetches ahead by itself, but needs several lines
// to notice that a page is being read; meanwhile the other pages keep the memory busy.
constexpr int SIDE_BY_SIDE = MOTET_LEVEL == 1 ? 8 : 1;

struct LoraPiece {
  int32_t row0, rows;    // into LoraPlan::order
  int32_t slot, module;
  int32_t pages;         // of the adapter: a row of s has 8 * pages values
  int32_t first, count;  // shrink: pages; expand: outputs
  int64_t s;             // where s of row0 starts
};

struct LoraPlan {
  std::vector<int32_t> order, first_of_slot;
  std::vector<LoraPiece> shrink[GROUPS], expand[GROUPS];
  std::vector<uint8_t> on_gate_up;  // [rows]: 1 for those whose adapter adds to the gate or up projection
  int64_t s_size = 0;

  // `row_slot` [rows]; only loaded slots are named. Allocates only beyond the largest step so far.
  void build(const Pool& pool, const int32_t* row_slot, int64_t rows, int64_t element_bytes, int team) {
    order.clear();
    on_gate_up.assign(rows, 0);
    s_size = 0;
    for (int g = 0; g < GROUPS; ++g) shrink[g].clear(), expand[g].clear();
    first_of_slot.assign(pool.slots + 1, 0);
    for (int64_t r = 0; r < rows; ++r)
      if (row_slot[r] >= 0) ++first_of_slot[row_slot[r] + 1];
    for (int64_t s = 0; s < pool.slots; ++s) first_of_slot[s + 1] += first_of_slot[s];
    order.resize(first_of_slot[pool.slots]);
    for (int64_t r = 0; r < rows; ++r)
      if (row_slot[r] >= 0) order[first_of_slot[row_slot[r]]++] = (int32_t)r;
    // first_of_slot[s] is now the end of s
    int64_t adapters = 0;
    for (int64_t s = 0; s < pool.slots; ++s) adapters += first_of_slot[s] > (s ? first_of_slot[s - 1] : 0);
    // few adapters are cut finely, so that every thread has as much work; with many adapters each page is one piece
    const bool few = adapters < 4 * team;
    for (int64_t slot = 0; slot < pool.slots; ++slot) {
      const int32_t begin = slot ? first_of_slot[slot - 1] : 0, end = first_of_slot[slot];
      if (begin == end) continue;
      for (int g = 0; g < GROUPS; ++g)
        for (int m = GROUP_START[g]; m < GROUP_START[g + 1]; ++m) {
          const int32_t pages = pool.pages[slot * MODULES + m];
          if (!pages) continue;
          const int64_t in = pool.in[m], out = pool.out[m];
          int64_t cuts = (pages * PAGE * in * element_bytes + (24 << 10) - 1) / (24 << 10);
          if (SIDE_BY_SIDE > 1 && end - begin == 1) cuts = (pages + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
          if (few) {
            const int64_t blocks = (end - begin + LORA_ROWS - 1) / LORA_ROWS * adapters * (GROUP_START[g + 1] - GROUP_START[g]);
            cuts = (4 * team + blocks - 1) / blocks;
          }
          cuts = std::min<int64_t>(cuts, pages);
          const int32_t pages_each = (int32_t)((pages + cuts - 1) / cuts);
          const int64_t most = (few ? 8 << 10 : 256 << 10) / (PAGE * pages * element_bytes);
          const int32_t columns = (int32_t)std::max<int64_t>(64, round_up(std::min(out, most), 64));
          for (int32_t row = begin; row < end; row += LORA_ROWS) {
            const int32_t n = std::min<int32_t>(LORA_ROWS, end - row);
            for (int32_t p = 0; p < pages; p += pages_each)
              shrink[g].push_back({row, n, (int32_t)slot, m, pages, p, std::min(pages_each, pages - p), s_size});
            for (int32_t c = 0; c < out; c += columns)
              expand[g].push_back({row, n, (int32_t)slot, m, pages, c, (int32_t)std::min<int64_t>(columns, out - c), s_size});
            s_size += (int64_t)n * pages * PAGE;
            if (g == 2)
              for (int32_t i = row; i < row + n; ++i) on_gate_up[order[i]] = 1;
          }
        }
    }
    // pieces of several pages: large ones first, so that no member waits for another's at the end
    if (SIDE_BY_SIDE > 1 && !few)
      for (int g = 0; g < GROUPS; ++g) {
        large_first(shrink[g], [](const LoraPiece& piece) { return piece.count; });
        large_first(expand[g], [](const LoraPiece& piece) { return (int64_t)piece.count * piece.pages; });
      }
  }

 private:
  template <class F>
  static void large_first(std::vector<LoraPiece>& pieces, F&& size) {
    std::sort(pieces.begin(), pieces.end(), [&](const LoraPiece& a, const LoraPiece& b) {
      return size(a) != size(b) ? size(a) > size(b) : a.s != b.s ? a.s < b.s : a.first < b.first;
    });
  }
};

// Of `pages` that are left of an adapter, how many are read at once: the largest power of two that there are, up to SIDE_BY_SIDE.
INLINE int side_by_side(int pages) {
  int n = SIDE_BY_SIDE;
  while (n > pages) n /= 2;
  return n;
}

// Where the ranks of page `p` of `pages` are in a row of s, which has the order in which B is read: rank by rank of the pages that
// are read at once.
struct Ranks {
  int first = 0, step = 1;
  Ranks() = default;
  Ranks(int pages, int p) {
    int begin = p / SIDE_BY_SIDE * SIDE_BY_SIDE;
    while (step = side_by_side(pages - begin), begin + step <= p) begin += step;
    first = begin * PAGE + p - begin;
  }
};

// The type of s = A x: bfloat16 where it is multiplied with B as bfloat16, which is how PEFT rounds it.
template <class T>
struct ShrunkOf {
  typedef float type;
};
#if MOTET_LEVEL >= 3
template <>
struct ShrunkOf<bf16> {
  typedef bf16 type;
};
#endif
template <class T>
constexpr bool lora_on_tiles = MOTET_LEVEL >= 4 && sizeof(typename ShrunkOf<T>::type) == 2;
template <class T>
constexpr bool lora_by_pairs = MOTET_LEVEL == 3 && sizeof(typename ShrunkOf<T>::type) == 2;

INLINE void put4(float* to, const float* four, float scale, int step = 1) {
  for (int j = 0; j < 4; ++j) to[j * step] = four[j] * scale;
}
#if MOTET_LEVEL >= 3
INLINE void put4(bf16* to, const float* four, float scale, int = 1) {
  const __m128bh v = _mm_cvtneps_pbh(_mm_mul_ps(_mm_loadu_ps(four), _mm_set1_ps(scale)));
  memcpy(to, &v, 4 * sizeof *to);
}
#endif

template <class T>
INLINE const T* lora_page(const Pool& pool, int slot, int module, int page, int64_t layer) {
  const int64_t line = pool.table[(slot * MODULES + module) * pool.max_pages + page];
  return (const T*)pool.arena + line * 8 + layer * PAGE * (pool.in[module] + pool.out[module]);
}

// Prefetches the next page a few lines at a time while the current page is read. A burst would take all of a core's line buffers.
struct Next {
  const char *at = nullptr, *end = nullptr;
  int each = 1;  // lines for every line of the page that is read now

  Next() = default;
  template <class T>
  Next(const T* page, int64_t width, int64_t width_now)
      : at((const char*)page), end((const char*)(page + PAGE * width)), each((int)((width + width_now - 1) / width_now)) {}
  __attribute__((always_inline)) void line() {
    for (int j = 0; j < each && at < end; ++j, at += 64) prefetch(at);
  }
  __attribute__((always_inline)) void lines(int n) {
    for (int i = 0; i < n; ++i) line();
  }
};

}  // namespace motet
