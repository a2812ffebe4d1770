// A product in pieces for a team.
#pragma once
#include "gemm_integers.h"

namespace motet {

// Whether products of activations A with weights of this type run on tiles.
template <class A>
INLINE bool on_tiles(int64_t type) {
  return MOTET_LEVEL >= 4 && (type == I8 || (sizeof(A) == 2 && !is_integer(type)));
}

constexpr int64_t CACHE_BYTES = MOTET_LEVEL >= 4 ? 1280 << 10 : 768 << 10;  // of the second-level cache; every AMX machine has 2 MiB per core

// The pieces of a product: [row block][groups of panels], numbered from 0. The panels of a group are multiplied together and lie `apart`
// panels from each other. A piece of a gated product is two groups: 64 bytes of every row. By vectors, every member of the team has as many
// groups and panels, the larger groups first; on tiles a group of one panel would cost as much as one of two.
template <class A>
struct GemmItems {
  int64_t rows_each, blocks, panels, groups, groups_each, items_each, apart;
  int team;
  bool tiles, gated;

  GemmItems(const Gemm<A>& g, int team) : team(team), gated(g.gated) {
    const int64_t type = g.w->type, row_bytes = is_integer(type) ? rounded_stride(g.w->k) : g.ldx * (int64_t)sizeof(A);
    tiles = on_tiles<A>(type);
    panels = (g.w->n + PANEL - 1) / PANEL;
    const int integer_panels = g.rows == 1 ? I_STREAMS : type == I8 ? I8_PANELS : I_PANELS;
    const bool pairs = tiles || gated;
    const int most_panels = pairs ? 2 : is_integer(type) ? integer_panels : panels_together(g.rows);
    groups = (panels + most_panels - 1) / most_panels;
    if (!pairs) groups = std::min(round_up(groups, team), panels);
    groups_each = gated ? 2 : 1;
    items_each = (groups + groups_each - 1) / groups_each;
    apart = gated ? panels / 2 : 1;
    // the rows of one block stay in the second-level cache while all panels are read
    const int64_t unit = tiles ? TILE_ROWS : 96, fit = CACHE_BYTES / row_bytes / unit * unit;
    const int64_t most = std::max(unit, tiles ? std::min<int64_t>(MAX_ROWS, fit) : fit);
    blocks = (g.rows + most - 1) / most;
    rows_each = blocks ? round_up((g.rows + blocks - 1) / blocks, unit) : 0;  // a step of prefill chunks alone may want no logits
  }
  int64_t count() const { return blocks * items_each; }
  int64_t first_group(int64_t item) const { return item % items_each * groups_each; }
  int64_t first_panel(int64_t group) const {
    if (gated || groups == panels) return group;
    if (tiles) return std::min(2 * group, panels);
    const int64_t each = groups / team, begin = Team::share(panels, group / each, team);
    return begin + Team::share(Team::share(panels, group / each + 1, team) - begin, group % each, each);
  }
  int count_panels(int64_t group) const { return gated ? 2 : (int)(first_panel(group + 1) - first_panel(group)); }
};

// The weights of a group.
template <class A>
INLINE Ahead ahead_of(const Gemm<A>& g, const GemmItems<A>& items, int64_t group) {
  const int64_t bytes = panel_bytes(*g.w), apart = items.apart * bytes;
  const int count = items.count_panels(group);
  const char* at = (const char*)g.w->data + items.first_panel(group) * bytes;
  const bool side_by_side = count == 2 && (items.tiles || items.gated);
  return {at, at + (side_by_side ? 1 : count) * bytes, side_by_side ? apart : 0, bytes};
}

// Of the first piece that a member takes of a product.
template <class A>
INLINE Ahead first_ahead(const Gemm<A>& g, int member, int team) {
  const GemmItems<A> items(g, team);
  const int64_t count = items.count(), first = Team::share(count, member, team);
  return first < Team::share(count, member + 1, team) ? ahead_of(g, items, items.first_group(first)) : Ahead{};
}

// Rows [row0, row1) of one group.
template <class A>
static void gemm_group(const Gemm<A>& g, const GemmItems<A>& items, int64_t row0, int64_t row1, int64_t group, Ahead& ahead) {
  const Matrix& w = *g.w;
  const int64_t panel = items.first_panel(group), bytes = panel_bytes(w), apart = items.apart * bytes;
  const int panels = items.count_panels(group);
  const char* data = (const char*)w.data + panel * bytes;
  if (w.type == I4) return integer_panels<I4>(g, (const uint8_t*)data, apart, row0, row1, panel, panels, ahead);
  if (w.type == I4_SHIFTED) return integer_panels<I4_SHIFTED>(g, (const uint8_t*)data, apart, row0, row1, panel, panels, ahead);
  if (w.type == I8_GROUPED) return integer_panels<I8_GROUPED>(g, (const uint8_t*)data, apart, row0, row1, panel, panels, ahead);
#if MOTET_LEVEL >= 4
  if (w.type == I8) return int8_panels_by_tiles(g, data, apart, row0, row1, panel, panels, ahead);
#else
  if (w.type == I8) return integer_panels<I8>(g, (const uint8_t*)data, apart, row0, row1, panel, panels, ahead);
#endif
  if constexpr (sizeof(A) == 2) {
#if MOTET_LEVEL >= 4
    panels_by_tiles<false>(g, data, apart, (const char*)g.x, g.ldx * 2, round_up(w.k, 32) * 2, row0, row1, panel, panels, ahead,
                           [](int64_t, int, int, float*) {});
#elif MOTET_LEVEL == 3
    panels_by_vectors(g, (const bf16*)data, apart / 2, row0, row1, panel, panels, ahead);
#endif
  } else {
    switch (w.type) {
      case F32: return panels_by_vectors(g, (const float*)data, apart / 4, row0, row1, panel, panels, ahead);
      case BF16: return panels_by_vectors(g, (const bf16*)data, apart / 2, row0, row1, panel, panels, ahead);
      default: return panels_by_vectors(g, (const f16*)data, apart / 2, row0, row1, panel, panels, ahead);
    }
  }
}

// `ahead` becomes what is left to prefetch for what this member does next: what is in `between`, then its next piece, or its first one of
// the product after this.
template <class A>
static void gemm_item(const Gemm<A>& g, const GemmItems<A>& items, int64_t item, int64_t next_item, int member, Ahead& ahead,
                      AheadQueue* between = nullptr) {
  const int64_t row0 = item / items.items_each * items.rows_each, row1 = std::min(g.rows, row0 + items.rows_each);
  const int64_t begin = items.first_group(item), end = std::min(items.groups, begin + items.groups_each);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t next = group + 1 < end ? group + 1 : next_item < 0 ? -1 : items.first_group(next_item);
    ahead = next < 0 ? g.then ? first_ahead(*g.then, member, items.team) : Ahead{} : ahead_of(g, items, next);
    if (between && group + 1 == end) ahead = between->then(ahead);
    gemm_group(g, items, row0, row1, group, ahead);
  }
}

// Row `row` of x as whole numbers, which must be ready before the product with integers begins.
template <class A>
INLINE void round_row(const Gemm<A>& g, int64_t row) {
  round_row(g.x + row * g.ldx, g.w->k, rounded_row(g.rounded, row, g.w->k));
}

}  // namespace motet
