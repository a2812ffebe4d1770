// The plan of multi-adapter LoRA in a step: work cut into pieces, see lora.h.
#pragma once
#include "gemm.h"

namespace motet {

constexpr int PAGE = 8;       // ranks
constexpr int MODULES = 7;    // q k v o gate up down
constexpr int QKV = 0, O = 1, GATE_UP = 2, DOWN = 3, GROUPS = 4;  // modules whose products are fused
constexpr int GROUP_START[GROUPS + 1] = {0, 3, 4, 6, 7};
constexpr int LORA_ROWS = 32;  // of one piece: two tiles
constexpr int MAX_PAGES = 128;  // of one adapter: rank 1024
// How finely the work of a phase is cut.
constexpr int PIECES_EACH = 4;  // with fewer adapters for each member of the team they are cut into so many pieces for each
constexpr int64_t A_PIECE_BYTES = 24 << 10;  // of A that a piece reads at most, or one page of it
constexpr int64_t B_PIECE_BYTES = 256 << 10, FINE_B_PIECE_BYTES = 8 << 10;  // of B; the second one with few adapters
constexpr int64_t COLUMNS = 64;  // outputs of a piece are a multiple of this
// Pages that are read at once, each in order of address, so that more lines are on their way from memory than one page would have. They
// are of one adapter, or of several with one row each.
constexpr int SIDE_BY_SIDE = MOTET_LEVEL >= 1 && MOTET_LEVEL <= 3 ? 8 : 1;

// The largest power of two that is not more than `left` and `most`, which is one.
constexpr int power_of_two(int most, int left) {
  while (most > left) most /= 2;
  return most;
}
// Of `pages` that are left of an adapter, how many are read at once.
constexpr int side_by_side(int pages) { return power_of_two(SIDE_BY_SIDE, pages); }
// Into how many streams a page of B is cut, where `together` pages are read at once. More streams: fewer passes over y, shorter reads.
constexpr int streams_per_page(int together) { return SIDE_BY_SIDE == 1 || together == SIDE_BY_SIDE ? 1 : together == 1 ? 4 : 2; }
// Adapters of which so many pages are expanded at once.
constexpr int rows_beside(int together) { return SIDE_BY_SIDE / (together * streams_per_page(together)); }

// Where the ranks of page `p` of `pages` are in a row of s, which has the order in which B is read: rank by rank of the streams.
struct Ranks {
  int first = 0, step = 1;  // the page's first place, and from rank to rank of a stream
  int each = PAGE;          // ranks of a stream; the next stream of the page begins one place later
  Ranks() = default;
  Ranks(int pages, int p) {
    int begin = p / SIDE_BY_SIDE * SIDE_BY_SIDE, together;
    while (together = side_by_side(pages - begin), begin + together <= p) begin += together;
    const int parts = streams_per_page(together);
    first = begin * PAGE + (p - begin) * parts, step = together * parts, each = PAGE / parts;
  }
};

// Where a page begins in the arena, in elements.
INLINE int64_t page_at(const Pool& pool, int slot, int module, int page) {
  return pool.table[((int64_t)slot * MODULES + module) * pool.max_pages + page] * 8;
}

struct LoraPiece {
  int32_t row0, rows;    // into LoraPlan::order
  int32_t slot, module;
  int32_t pages;         // of the adapter: a row of s has 8 * pages values
  int32_t first, count;  // shrink: pages; expand: outputs
  int64_t s;             // where s of row0 starts
  int64_t begin = 0;     // with one row, into LoraPlan::lone_pages (shrink) or lone_streams (expand)
  int32_t beside = 0, others = 0;  // of LoraPlan::beside: pieces that are expanded at the same time
};

// A page of A for one row. Addresses are in elements from the arena's beginning.
struct LoraPage {
  int64_t at, by_layer;
  int64_t s;           // where the row of s starts
  const float* scale;  // of layer 0
  int32_t row;
  Ranks ranks;
};

struct LoraPlan {
  std::vector<int32_t> order, first_of_slot;
  std::vector<LoraPiece> shrink[GROUPS], expand[GROUPS], beside;
  std::vector<LoraPage> lone_pages;   // of adapters with one row, in the order of the pieces; SIDE_BY_SIDE more at the end
  std::vector<int64_t> lone_streams;  // the same for B in layer 0: where streams begin
  std::vector<uint8_t> on_gate_up;  // [rows]: 1 for those whose adapter adds to the gate or up projection
  int64_t s_size = 0;

  // `row_slot` [rows]; only loaded slots are named. Allocates only beyond the largest step so far.
  void build(const Pool& pool, const int32_t* row_slot, int64_t rows, int64_t element_bytes, int team) {
    clear();
    rows_ = rows, members_ = std::max(team, 1);
    sort_rows(pool, row_slot);
    // few adapters are cut finely, so that every thread has as much work; with many adapters each page is one piece
    few_ = (int64_t)slots_.size() < PIECES_EACH * team;
    for (const int32_t slot : slots_)  // in order of their rows, so that a member has the same rows as in other phases
      for (int g = 0; g < GROUPS; ++g)
        for (int m = GROUP_START[g]; m < GROUP_START[g + 1]; ++m)
          if (pool.pages[slot * MODULES + m]) add_module(pool, slot, g, m, element_bytes);
    if (SIDE_BY_SIDE > 1) put_together(pool);
  }
  // The piece itself for i = 0, then those beside it.
  const LoraPiece& beside_of(const LoraPiece& piece, int i) const { return i ? beside[piece.beside + i - 1] : piece; }

 private:
  void clear() {
    for (int g = 0; g < GROUPS; ++g) shrink[g].clear(), expand[g].clear(), lone_[g].clear();
    beside.clear(), lone_pages.clear(), lone_streams.clear(), slots_.clear();
    s_size = 0;
  }

  // Rows by adapter, each adapter's in their order; `slots_` in the order of their first rows.
  void sort_rows(const Pool& pool, const int32_t* row_slot) {
    first_of_slot.assign(pool.slots + 1, 0);
    for (int64_t r = 0; r < rows_; ++r)
      if (row_slot[r] >= 0) ++first_of_slot[row_slot[r] + 1];
    for (int64_t s = 0; s < pool.slots; ++s) first_of_slot[s + 1] += first_of_slot[s];
    order.clear();
    order.resize(first_of_slot[pool.slots]);
    for (int64_t r = 0; r < rows_; ++r)
      if (row_slot[r] >= 0) order[first_of_slot[row_slot[r]]++] = (int32_t)r;
    // first_of_slot[s] is now the end of s
    for (int64_t r = 0; r < rows_; ++r)
      if (row_slot[r] >= 0 && order[first_row_of(row_slot[r])] == r) slots_.push_back(row_slot[r]);
    on_gate_up.assign(rows_, 0);
  }
  int32_t first_row_of(int32_t slot) const { return slot ? first_of_slot[slot - 1] : 0; }

  // The pieces of one adapter for one module.
  void add_module(const Pool& pool, int32_t slot, int g, int m, int64_t element_bytes) {
    const int32_t begin = first_row_of(slot), end = first_of_slot[slot], pages = pool.pages[slot * MODULES + m];
    if (g == GATE_UP)
      for (int32_t i = begin; i < end; ++i) on_gate_up[order[i]] = 1;
    if (SIDE_BY_SIDE > 1 && !few_ && end - begin == 1) {
      lone_[g].push_back({begin, 1, slot, m, pages, 0, pages, s_size});
      s_size += pages * PAGE;
      return;
    }
    const int32_t pages_each = pages_of_piece(end - begin, pages, pool.in[m] * element_bytes, GROUP_START[g + 1] - GROUP_START[g]);
    const int32_t columns = columns_of_piece(pool.out[m], PAGE * pages * element_bytes);
    for (int32_t row = begin; row < end; row += LORA_ROWS)
      add_rows(pool, {row, std::min<int32_t>(LORA_ROWS, end - row), slot, m, pages, 0, 0, s_size}, g, pages_each, columns);
  }

  // The pieces of `rows` for one module. `rows` has neither pages nor outputs yet.
  void add_rows(const Pool& pool, const LoraPiece& rows, int g, int32_t pages_each, int32_t columns) {
    const bool lone = SIDE_BY_SIDE > 1 && rows.rows == 1;
    for (int32_t page = 0; page < rows.pages; page += pages_each) {
      LoraPiece piece = rows;
      piece.first = page, piece.count = std::min(pages_each, rows.pages - page), piece.begin = (int64_t)lone_pages.size();
      shrink[g].push_back(piece);
      if (lone) add_pages(pool, piece);
    }
    const int64_t out = pool.out[rows.module];
    for (int32_t column = 0; column < out; column += columns) {
      LoraPiece piece = rows;
      piece.first = column, piece.count = (int32_t)std::min<int64_t>(columns, out - column);
      piece.begin = (int64_t)lone_streams.size();
      expand[g].push_back(piece);
      if (lone) add_streams(pool, piece);
    }
    s_size += (int64_t)rows.rows * rows.pages * PAGE;
  }

  // How many pages of A, with ranks of `rank_bytes` each, a piece reads. `modules`: of the group.
  int32_t pages_of_piece(int32_t rows, int32_t pages, int64_t rank_bytes, int modules) const {
    int64_t pieces = (pages * PAGE * rank_bytes + A_PIECE_BYTES - 1) / A_PIECE_BYTES;
    if (SIDE_BY_SIDE > 1 && rows == 1) pieces = (pages + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
    if (few_) {
      const int64_t blocks = (rows + LORA_ROWS - 1) / LORA_ROWS * (int64_t)slots_.size() * modules;
      pieces = (PIECES_EACH * members_ + blocks - 1) / blocks;
    }
    pieces = std::min<int64_t>(pieces, pages);
    return (int32_t)((pages + pieces - 1) / pieces);
  }

  // How many of `out` outputs, each with `output_bytes` of B, a piece adds to.
  int32_t columns_of_piece(int64_t out, int64_t output_bytes) const {
    const int64_t most = (few_ ? FINE_B_PIECE_BYTES : B_PIECE_BYTES) / output_bytes;
    return (int32_t)std::max<int64_t>(COLUMNS, round_up(std::min(out, most), COLUMNS));
  }

  // With many adapters, those with one row share pieces. The ends of the lists are repeated: what is read next is always there.
  void put_together(const Pool& pool) {
    if (!few_)
      for (int g = 0; g < GROUPS; ++g) {
        shrink_together(pool, g);
        expand_together(pool, g);
        large_first(shrink[g], [](const LoraPiece& piece) { return piece.count; });
        large_first(expand[g], [](const LoraPiece& piece) { return (int64_t)piece.count * piece.pages * (1 + piece.others); });
      }
    for (int i = 0; i < SIDE_BY_SIDE && !lone_pages.empty(); ++i)
      lone_pages.push_back(lone_pages.back()), lone_streams.push_back(lone_streams.back());
  }

  // The member that has the piece's first row in phases that go by rows. It also computes LoRA of that row: fetching a row of s or y that
  // another core has written takes long.
  int64_t owner(const LoraPiece& piece) const { return (int64_t)order[piece.row0] * members_ / rows_; }

  // Adapters with one row: SIDE_BY_SIDE pages are a piece, whichever adapters of a member they are of. The last pieces are smaller, so
  // that no member waits long for another.
  void shrink_together(const Pool& pool, int g) {
    std::vector<LoraPiece>& lone = lone_[g];
    std::sort(lone.begin(), lone.end(), [&](const LoraPiece& a, const LoraPiece& b) {
      const int64_t of_a = owner(a), of_b = owner(b);
      if (of_a != of_b) return of_a < of_b;
      return a.pages != b.pages ? a.pages > b.pages : a.s < b.s;  // as few rows as possible in a piece
    });
    for (size_t i = 0, n; i < lone.size(); i += n) {
      int64_t left = 0;
      for (n = 0; i + n < lone.size() && owner(lone[i + n]) == owner(lone[i]); ++n) left += lone[i + n].pages;
      int32_t room = 0;
      for (size_t j = i; j < i + n; ++j) {
        LoraPiece one = lone[j];
        for (one.first = 0; one.first < one.pages; one.first += one.count) {
          const bool head = !room;
          if (head) room = left > SIDE_BY_SIDE ? SIDE_BY_SIDE : SIDE_BY_SIDE / 2;
          one.count = std::min(room, one.pages - one.first);
          one.begin = (int64_t)lone_pages.size();
          add_pages(pool, one);
          room -= one.count, left -= one.count;
          if (head)
            shrink[g].push_back(one);
          else
            shrink[g].back().count += one.count;
        }
      }
    }
  }

  // Adapters of a member with one row and as many pages of a module.
  void expand_together(const Pool& pool, int g) {
    std::vector<LoraPiece>& lone = lone_[g];
    const auto alike = [&](const LoraPiece& a, const LoraPiece& b) {
      return owner(a) == owner(b) && a.module == b.module && a.pages == b.pages;
    };
    std::sort(lone.begin(), lone.end(), [&](const LoraPiece& a, const LoraPiece& b) {
      const int64_t of_a = owner(a), of_b = owner(b);
      if (of_a != of_b) return of_a < of_b;
      return a.module != b.module ? a.module < b.module : a.pages != b.pages ? a.pages > b.pages : a.s < b.s;
    });
    for (size_t i = 0, n; i < lone.size(); i += n) {
      LoraPiece piece = lone[i];
      piece.first = 0, piece.count = (int32_t)pool.out[piece.module];
      piece.beside = (int32_t)beside.size(), piece.begin = (int64_t)lone_streams.size();
      const size_t most = rows_beside(side_by_side(piece.pages));
      for (n = 1; n < most && i + n < lone.size() && alike(lone[i + n], piece); ++n) beside.push_back(lone[i + n]), ++piece.others;
      expand[g].push_back(piece);
      add_streams(pool, piece);
    }
  }

  void add_pages(const Pool& pool, const LoraPiece& piece) {
    const int64_t by_layer = PAGE * (pool.in[piece.module] + pool.out[piece.module]);
    const float* scale = pool.scales + ((int64_t)piece.slot * MODULES + piece.module) * pool.layers;
    for (int p = piece.first; p < piece.first + piece.count; ++p) {
      const int64_t at = page_at(pool, piece.slot, piece.module, p);
      lone_pages.push_back({at, by_layer, piece.s, scale, order[piece.row0], Ranks(piece.pages, p)});
    }
  }

  void add_streams(const Pool& pool, const LoraPiece& piece) {
    for (int p = 0, some; p < piece.pages; p += some) {
      some = side_by_side(piece.pages - p);
      for (int r = 0; r <= piece.others; ++r)
        for (int j = 0; j < some; ++j)
          for (int part = 0; part < streams_per_page(some); ++part) {
            const int64_t rank = part * (PAGE / streams_per_page(some)), at = page_at(pool, beside_of(piece, r).slot, piece.module, p + j);
            lone_streams.push_back(at + PAGE * pool.in[piece.module] + rank * pool.out[piece.module] + piece.first);
          }
    }
  }

  // Pieces in the order of their members, large ones first, so that no member waits long for another at the end.
  template <class F>
  void large_first(std::vector<LoraPiece>& pieces, F&& size) {
    std::sort(pieces.begin(), pieces.end(), [&](const LoraPiece& a, const LoraPiece& b) {
      const int64_t of_a = owner(a), of_b = owner(b), size_of_a = size(a), size_of_b = size(b);
      if (of_a != of_b) return of_a < of_b;
      return size_of_a != size_of_b ? size_of_a > size_of_b : a.s != b.s ? a.s < b.s : a.first < b.first;
    });
  }

  std::vector<LoraPiece> lone_[GROUPS];  // adapters with one row
  int64_t rows_ = 0, members_ = 1;
  bool few_ = false;  // adapters, for this team
  std::vector<int32_t> slots_;
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
using Shrunk = typename ShrunkOf<T>::type;
template <class T>
constexpr bool lora_on_tiles = MOTET_LEVEL >= 4 && sizeof(Shrunk<T>) == 2;
template <class T>
constexpr bool lora_by_pairs = MOTET_LEVEL == 3 && sizeof(Shrunk<T>) == 2;

INLINE void rounded(const float* four, float scale, float* to) {
  for (int j = 0; j < 4; ++j) to[j] = four[j] * scale;
}
#if MOTET_LEVEL >= 3
INLINE void rounded(const float* four, float scale, bf16* to) {
  const __m128bh v = _mm_cvtneps_pbh(_mm_mul_ps(_mm_loadu_ps(four), _mm_set1_ps(scale)));
  memcpy(to, &v, 4 * sizeof *to);
}
#endif
// `value(k)` of a page's ranks [BEGIN, END) to their places in a row of s.
template <int BEGIN, int END, class S, class F>
INLINE void put(S* row, const Ranks& ranks, F&& value) {
  static_assert(SIDE_BY_SIDE == 1 || SIDE_BY_SIDE == 8);
  const auto put_all = [&](auto step, auto each) {
#pragma GCC unroll 8
    for (int k = BEGIN; k < END; ++k) row[ranks.first + k % each * step + k / each] = value(k);
  };
  if (SIDE_BY_SIDE == 1) return put_all(number<1>, number<PAGE>);
  if (ranks.each == 8) return put_all(number<8>, number<8>);
  if (ranks.each == 2) return put_all(number<4>, number<2>);
  ranks.step == 8 ? put_all(number<8>, number<4>) : put_all(number<4>, number<4>);
}
// Ranks [K, K + 4), times `scale`.
template <int K, class S>
INLINE void put4(S* row, const Ranks& ranks, const float* four, float scale) {
  S to[4];
  rounded(four, scale, to);
  put<K, K + 4>(row, ranks, [&](int k) { return to[k - K]; });
}

template <class T>
INLINE const T* lora_page(const Pool& pool, int slot, int module, int page, int64_t layer) {
  return (const T*)pool.arena + page_at(pool, slot, module, page) + layer * PAGE * (pool.in[module] + pool.out[module]);
}

// Prefetches the next page a few lines at a time while the current page is read. A burst would take all of a core's line buffers. Its
// ranks come side by side, which is how they are read: the processor then fetches ahead in all of them.
struct Next {
  const char *at = nullptr, *end = nullptr;  // of the first rank
  int64_t by_rank = 0, rank = 0;             // bytes from rank to rank, and to the one whose turn it is
  int each = 1;                              // lines for every line of the page that is read now

  Next() = default;
  template <class T>
  Next(const T* page, int64_t width, int64_t width_now)
      : at((const char*)page), end((const char*)(page + width)), by_rank(width * (int64_t)sizeof(T)),
        each((int)((width + width_now - 1) / width_now)) {}
  __attribute__((always_inline)) void line() {
    for (int j = 0; j < each && at < end; ++j) {
      prefetch(at + rank);
      rank += by_rank;
      if (rank == PAGE * by_rank) rank = 0, at += 64;
    }
  }
  __attribute__((always_inline)) void lines(int n) {
    for (int i = 0; i < n; ++i) line();
  }
};

}  // namespace motet
