// A whole step of the decoder as one function that every member of the team runs: phases with a barrier between them.
//
//   x += embed                                            [rows, hidden] float, the residual stream
//   per layer   h = norm(x) | y = h Wqkv, s = h A | y += s B | rope, KV write | h = attention | x += h Wo, s = h A | x += s B
//               h = norm(x) | y = h Wgu,  s = h A | y += s B | g = silu(gate) up              | x += g Wd, s = g A | x += s B
//   logits = norm(x[logit_rows]) Whead
//
// While adapters are being copied to the device (`assist`, see assist.h), CPU processes compute "h A" and "s B" of some rows:
// h of these rows is sent to them before the product with the base's matrix, and their results are added after it.
//
// h has the type that the instruction set multiplies with the weights; all other intermediate values are float. Before a product
// with integer weights a separate phase rounds the rows of h to integers; adapters use h before rounding.
#pragma once
#include "attention.h"
#include "gemm_items.h"
#include "lora.h"
#include "workspace.h"

namespace motet {

constexpr int ROWS_EACH = 4;              // of a piece of a row-wise phase
constexpr int64_t AFTER_BYTES = 4 << 20;  // of the first weights that are brought to the last cache between two steps

template <class F, class I>
INLINE void each_rows(Team& team, int64_t rows, F&& f, I&& idle) {
  const auto some = [&](int64_t item, int64_t) {
    for (int64_t row = item * ROWS_EACH; row < std::min(rows, (item + 1) * ROWS_EACH); ++row) f(row);
  };
  team.each((rows + ROWS_EACH - 1) / ROWS_EACH, some, idle);
}
template <class F>
INLINE void each_rows(Team& team, int64_t rows, F&& f) {
  each_rows(team, rows, f, [] {});
}

// to[n] = x / rms(x) * weight, then zeros up to `stride`.
template <class A>
INLINE void norm_row(const float* x, const float* weight, int64_t n, float eps, A* to, int64_t stride) {
  vf squares = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf v = load_n(x + i, (int)std::min<int64_t>(W, n - i));
    squares += v * v;
  }
  const float inverse = 1.0f / sqrtf(sum(squares) / (float)n + eps);
  for (int64_t i = 0; i < n; i += W) {
    const int live = (int)std::min<int64_t>(W, n - i);
    store_n(to + i, load_n(x + i, live) * inverse * load_n(weight + i, live), live);
  }
  if (stride > n) memset((void*)(to + n), 0, (stride - n) * sizeof(A));
}

// x rotated in place: pairs (i, i + half).
INLINE void rotate(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += W) {
    const int live = std::min(W, half - i);
    const vf a = load_n(x + i, live), b = load_n(x + half + i, live), c = load_n(cos + i, live), s = load_n(sin + i, live);
    store_n(x + i, a * c - b * s, live);
    store_n(x + half + i, b * c + a * s, live);
  }
}

template <class A>
INLINE void silu_row(const float* gate, const float* up, int64_t n, A* to) {
  for (int64_t i = 0; i < n; i += W) {
    const int live = (int)std::min<int64_t>(W, n - i);
    const vf g = load_n(gate + i, live);
    store_n(to + i, gated(g, load_n(up + i, live)), live);
  }
}

template <class T, class A>
INLINE void shrink_all(Team& team, const Pool& pool, const LoraPlan& lora, int group, int64_t layer, const A* x, int64_t ldx,
                       float* s) {
  const std::vector<LoraPiece>& shrink = lora.shrink[group];
  team.each((int64_t)shrink.size(), [&](int64_t item, int64_t next) {
    shrink_piece<T, A>(pool, lora, shrink[item], next < 0 ? nullptr : &shrink[next], layer, x, ldx, s);
  });
}

template <class T>
INLINE void expand_all(Team& team, const Pool& pool, const LoraPlan& lora, int group, int64_t layer, const float* s, float* y,
                       int64_t ldy) {
  const std::vector<LoraPiece>& expand = lora.expand[group];
  team.each((int64_t)expand.size(), [&](int64_t item, int64_t next) {
    expand_piece<T>(pool, lora, expand[item], next < 0 ? nullptr : &expand[next], layer, s, y, ldy);
  });
}

// One member's place in a step: while it waits, it prefetches the weights that it reads first in the next product.
struct Place {
  int member;
  Ahead soon;
  AheadQueue between = {};  // a product and the next one
};

// Before a product with integers.
template <class A>
INLINE void round_rows(Team& team, const Gemm<A>& gemm, Place& place) {
  if (is_integer(gemm.w->type)) each_rows(team, gemm.rows, [&](int64_t row) { round_row(gemm, row); }, place.soon);
}

// y (+)= h w (+ LoRA of `group`). Two phases, or one without adapters, and one before them for integers.
template <class T, class A>
static void project(Team& team, const Gemm<A>& gemm, const Pool& pool, const LoraPlan& lora, int group, int64_t layer, float* s,
                    Place& place) {
  const GemmItems<A> items(gemm, team.size());
  const int64_t products = items.count();
  const std::vector<LoraPiece>&shrink = lora.shrink[group], &expand = lora.expand[group];
  const int64_t pieces = (int64_t)expand.size();  // read now: after the last barrier the plan may change
  round_rows(team, gemm, place);
  const int64_t shrinks = (int64_t)shrink.size();
  if (shrinks && gemm.rows > BLOCK && !items.tiles) {
    // Many rows leave bandwidth: each piece of the product is followed by some of the adapters', whose pages it prefetches
    const auto multiply_and_shrink = [&](int64_t item, int64_t next) {
      const int64_t begin = shrinks * item / products, end = shrinks * (item + 1) / products;
      place.between.clear();
      for (int64_t i = begin; i < end; ++i) add_pages<T>(pool, lora, shrink[i], layer, place.between);
      gemm_item(gemm, items, item, next, place.member, place.soon, &place.between);
      for (int64_t i = begin; i < end; ++i)
        shrink_piece<T, A>(pool, lora, shrink[i], i + 1 < end ? &shrink[i + 1] : nullptr, layer, gemm.x, gemm.ldx, s);
    };
    team.each(products, multiply_and_shrink, place.soon);
  } else {
    const auto multiply_or_shrink = [&](int64_t item, int64_t next) {
      if (item < products) return gemm_item(gemm, items, item, next < products ? next : -1, place.member, place.soon);
      const LoraPiece* after = next < products ? nullptr : &shrink[next - products];
      shrink_piece<T, A>(pool, lora, shrink[item - products], after, layer, gemm.x, gemm.ldx, s);
    };
    team.each({products, shrinks}, multiply_or_shrink, place.soon);
  }
  if (!pieces) return;
  const auto expand_one = [&](int64_t item, int64_t next) {
    expand_piece<T>(pool, lora, expand[item], next < 0 ? nullptr : &expand[next], layer, s, gemm.y, gemm.ldy);
  };
  team.each(pieces, expand_one, place.soon);
}

// The same while other processes compute the LoRA part of some rows.
template <class T, class A>
static __attribute__((noinline)) void project_assisted(Team& team, const Gemm<A>& gemm, AssistStep& assist, const LoraPlan& lora,
                                                       int group, int64_t layer, float* s, Place& place) {
  const int64_t batches = assist.batches(group);
  if (batches) {
    team.each(batches, [&](int64_t batch, int64_t) { assist.hand_over(batch, group, gemm.x, gemm.ldx); });
    if (place.member == 0) assist.publish(layer, group);
  }
  project<T>(team, gemm, assist.pool(), lora, group, layer, s, place);
  if (!batches) return;
  team.each(batches, [&](int64_t batch, int64_t) { assist.collect<A>(batch, layer, group, gemm.y, gemm.ldy); });
  if (!assist.broken(layer, group)) return;
  if (place.member == 0) assist.repair(layer, group);
  team.barrier();
  const LoraPlan& rest = assist.repair_plan();
  shrink_all<T>(team, assist.pool(), rest, group, layer, gemm.x, gemm.ldx, s);
  expand_all<T>(team, assist.pool(), rest, group, layer, s, gemm.y, gemm.ldy);
}

// in one piece: it reads as the transformer, from the embedding to the logits
template <class T>
static void forward(const Model& m, const Step& step, Workspace& ws, Team& team, int member) {
  typedef typename ActivationOf<T>::type A;
  [[maybe_unused]] const Tiles tiles;
  const int64_t rows = step.rows, hidden = m.hidden, hd = m.head_dim, half = hd / 2;
  const int64_t q_n = m.heads * hd, kv_n = m.kv_heads * hd, qkv_n = q_n + 2 * kv_n;
  const int64_t by_hidden = row_stride<A>(hidden), by_q = row_stride<A>(q_n), by_mlp = row_stride<A>(m.mlp);
  const int64_t by_x = row_stride<float>(hidden), by_qkv = row_stride<float>(qkv_n), by_gate_up = row_stride<float>(2 * m.mlp);
  const KvLayout kv_layout{m.kv_heads, hd, m.block_size};
  const bool int8_kv = m.kv_type == I8;
  const int64_t kv_block = int8_kv ? kv_layout.block<int8_t>() : kv_layout.block<T>() * (int64_t)sizeof(T);
  const int64_t type = m.layer[0].gate_up.type;
  const bool gate = m.mlp % PANEL == 0 && (on_tiles<A>(type) || (!is_integer(type) && rows >= GATED_ROWS));
  const uint8_t* plain = ws.lora.on_gate_up.data();
  float *x = ws.x.data<float>(), *y = ws.y.data<float>(), *s = ws.s.data<float>();
  A *h = ws.h.data<A>(), *gated = ws.gated.data<A>();
  float* scratch = ws.scratch.data<float>() + member * ws.scratch_each;
  const T* embed = (const T*)m.embed;
  AssistStep* assist = step.assist ? &ws.assist : nullptr;
  const auto product = [&](int group, int64_t l) {  // qkv, o, gate and up, down of layer l; the head after the last
    const Layer& layer = m.layer[std::min(l, m.layers - 1)];
    Gemm<A> gemm = l == m.layers      ? Gemm<A>{&m.lm_head, h, by_hidden, step.logits, step.out, m.vocab, false}
                   : group == QKV     ? Gemm<A>{&layer.qkv, h, by_hidden, rows, y, by_qkv, false}
                   : group == O       ? Gemm<A>{&layer.o, h, by_q, rows, x, by_x, true}
                   : group == GATE_UP ? Gemm<A>{&layer.gate_up, h, by_hidden, rows, y, by_gate_up, false}
                                      : Gemm<A>{&layer.down, gated, by_mlp, rows, x, by_x, true};
    if (l < m.layers && group == GATE_UP && gate) gemm.gated = gated, gemm.ld_gated = by_mlp, gemm.plain = plain;
    gemm.rounded = ws.rounded.data<char>();
    return gemm;
  };
  Place place{member, first_ahead(product(QKV, 0), member, team.size())};
  Ahead& soon = place.soon;
  const auto project_any = [&](int group, int64_t l) {
    Gemm<A> gemm = product(group, l);
    const Gemm<A> then = group < DOWN ? product(group + 1, l) : product(QKV, l + 1);
    gemm.then = &then;
    if (assist) return project_assisted<T>(team, gemm, *assist, ws.lora, group, l, s, place);
    project<T>(team, gemm, m.pool, ws.lora, group, l, s, place);
  };

  if (assist && member == 0) assist->begin_layer(0);  // it is read after the next barrier
  each_rows(team, rows, [&](int64_t row) {
    const T* from = embed + step.token_ids[row] * hidden;
    float* to = x + row * by_x;
    for (int64_t i = 0; i < hidden; i += W) {
      const int live = (int)std::min<int64_t>(W, hidden - i);
      store_n(to + i, load_n(from + i, live), live);
    }
    norm_row(to, m.layer[0].input_norm, hidden, m.eps, h + row * by_hidden, by_hidden);
    memset((void*)(gated + row * by_mlp + m.mlp), 0, (by_mlp - m.mlp) * sizeof(A));  // for all layers: nothing else writes there
  }, soon);
  for (int64_t l = 0; l < m.layers; ++l) {
    const Layer& layer = m.layer[l];
    char* kv = (char*)m.kv + l * m.blocks * kv_block;
    if (l && assist && member == 0) assist->begin_layer(l);
    if (l) each_rows(team, rows, [&](int64_t row) {
      norm_row(x + row * by_x, layer.input_norm, hidden, m.eps, h + row * by_hidden, by_hidden);
    }, soon);
    project_any(QKV, l);
    each_rows(team, rows, [&](int64_t row) {
      float* qkv = y + row * by_qkv;
      const int64_t at = step.positions[row] * half;
      for (int64_t head = 0; head < m.heads + m.kv_heads; ++head) {
        float* one = qkv + head * hd;
        if (layer.qk_norm) norm_row(one, layer.qk_norm + head * hd, hd, m.eps, one, hd);
        rotate(one, step.cos + at, step.sin + at, (int)half);
      }
      const float *k = qkv + q_n, *v = k + kv_n;
      if (int8_kv)
        write_kv(kv_layout, k, v, (int8_t*)kv, step.kv_slots[row]);
      else
        write_kv(kv_layout, k, v, (T*)kv, step.kv_slots[row]);
      memset((void*)(h + row * by_q + q_n), 0, (by_q - q_n) * sizeof(A));
    }, soon);
    const Attention attention{&step, y, by_qkv, kv, kv_layout, m.heads, layer.window, ws.partials.data<float>()};
    if (int8_kv)
      attend<int8_t>(team, attention, ws.attention, h, by_q, scratch, soon);
    else
      attend<T>(team, attention, ws.attention, h, by_q, scratch, soon);
    project_any(O, l);
    each_rows(team, rows, [&](int64_t row) {
      norm_row(x + row * by_x, layer.post_norm, hidden, m.eps, h + row * by_hidden, by_hidden);
    }, soon);
    project_any(GATE_UP, l);
    if (!gate || !ws.lora.shrink[GATE_UP].empty() || (assist && assist->batches(GATE_UP))) each_rows(team, rows, [&](int64_t row) {
      if (gate && !plain[row]) return;
      const float* both = y + row * by_gate_up;
      silu_row(both, both + m.mlp, m.mlp, gated + row * by_mlp);
    }, soon);
    project_any(DOWN, l);
  }
  each_rows(team, step.logits, [&](int64_t i) {
    norm_row(x + step.logit_rows[i] * by_x, m.norm, hidden, m.eps, h + i * by_hidden, by_hidden);
  }, soon);
  const Gemm<A> head = product(QKV, m.layers);
  round_rows(team, head, place);
  const GemmItems<A> items(head, team.size());
  team.each(items.count(), [&](int64_t item, int64_t next) { gemm_item(head, items, item, next, member, soon); });
  if (member) {  // its core has nothing to do while member 0 draws the tokens
    const Matrix& first = m.layer[0].qkv;
    const int64_t panels = (first.n + PANEL - 1) / PANEL, bytes = panel_bytes(first), begin = Team::share(panels, member, team.size());
    const int64_t mine = (Team::share(panels, member + 1, team.size()) - begin) * bytes;
    const char* at = (const char*)first.data + begin * bytes;
    Team::afterwards({at, at + std::min(mine, AFTER_BYTES / (team.size() - 1))});
  }
}

// The plan of a step's attention, and room for it.
inline void prepare_attention(const Step& step, int64_t heads, const KvLayout& layout, int team, Workspace& ws) {
  plan_attention(step, heads, layout, team, ws.attention);
  ws.partials.reserve(ws.attention.partials * sizeof(float));
  ws.scratch_each = round_up(attention_scratch(heads, layout.kv_heads, layout.head_dim), 64);
  ws.scratch.reserve(ws.scratch_each * team * sizeof(float));
}

template <class T>
static void run_forward(const Model& m, const Step& step, Workspace& ws, Team& team) {
  typedef typename ActivationOf<T>::type A;
  const int64_t q_n = m.heads * m.head_dim, qkv_n = q_n + 2 * m.kv_heads * m.head_dim;
  const int64_t rows = round_up(std::max(step.rows, step.logits), 16);
  if (step.assist)
    ws.assist.begin(m, step, sizeof(T), team.size(), ws.lora);
  else
    ws.lora.build(m.pool, step.row_slot, step.rows, sizeof(T), team.size());
  prepare_attention(step, m.heads, {m.kv_heads, m.head_dim, m.block_size}, team.size(), ws);
  ws.x.reserve(rows * row_stride<float>(m.hidden) * sizeof(float));
  ws.y.reserve(rows * row_stride<float>(std::max(qkv_n, 2 * m.mlp)) * sizeof(float));
  ws.h.reserve(rows * row_stride<A>(std::max(m.hidden, q_n)) * sizeof(A));
  ws.gated.reserve(rows * row_stride<A>(m.mlp) * sizeof(A));
  if (is_integer(m.lm_head.type)) ws.rounded.reserve(rows * rounded_stride(std::max({m.hidden, q_n, m.mlp})));
  ws.s.reserve(ws.lora.s_size * sizeof(float));
  team.run([&](int member) { forward<T>(m, step, ws, team, member); });
}

// One kernel at a time, for tests and measurements: float in and out, `type` as in a Model of that type.

template <class T>
static void run_gemm(const Matrix* w, int64_t count, const float* x, int64_t rows, float* y, int64_t ldy, bool add, Workspace& ws,
                     Team& team) {
  typedef typename ActivationOf<T>::type A;
  const int64_t k = w->k, stride = row_stride<A>(k);
  ws.h.reserve(round_up(rows, 16) * stride * sizeof(A));
  A* h = ws.h.data<A>();
  if (is_integer(w->type)) ws.rounded.reserve(round_up(rows, 16) * rounded_stride(k));
  team.run([&](int member) {
    [[maybe_unused]] const Tiles tiles;
    const auto product = [&](int64_t i) {
      Gemm<A> gemm{w + i, h, stride, rows, y, ldy, add};
      gemm.rounded = ws.rounded.data<char>();
      return gemm;
    };
    Place place{member, first_ahead(product(0), member, team.size())};
    each_rows(team, rows, [&](int64_t row) { take_row(x + row * k, h + row * stride, k, stride); }, place.soon);
    for (int64_t i = 0; i < count; ++i) {
      Gemm<A> gemm = product(i);
      const Gemm<A> then = product(std::min(i + 1, count - 1));
      if (i + 1 < count) gemm.then = &then;
      round_rows(team, gemm, place);
      const GemmItems<A> items(gemm, team.size());
      const auto multiply = [&](int64_t item, int64_t next) { gemm_item(gemm, items, item, next, member, place.soon); };
      team.each(items.count(), multiply, place.soon);
    }
  });
}

template <class T>
static void run_lora(const Pool& pool, const int32_t* row_slot, int64_t rows, int64_t layer, int64_t layers, int group, int groups,
                     const float* x, float* y, int64_t which, Workspace& ws, Team& team) {
  typedef typename ActivationOf<T>::type A;
  int64_t in = 0, out = 0;
  for (int g = group; g < group + groups; ++g)
    in = std::max(in, pool.in[GROUP_START[g]]), out = std::max(out, group_out(pool.out, g));
  const int64_t stride = row_stride<A>(in);
  ws.lora.build(pool, row_slot, rows, sizeof(T), team.size());
  ws.h.reserve(round_up(rows, 16) * stride * sizeof(A));
  ws.s.reserve(ws.lora.s_size * sizeof(float));
  A* h = ws.h.data<A>();
  float* s = ws.s.data<float>();
  team.run([&](int) {
    each_rows(team, rows, [&](int64_t row) { take_row(x + row * in, h + row * stride, in, stride); });
    for (int64_t l = layer; l < layer + layers; ++l)
      for (int g = group; g < group + groups; ++g) {
        if (which & 1) shrink_all<T>(team, pool, ws.lora, g, l, h, stride, s);
        if (which & 2) expand_all<T>(team, pool, ws.lora, g, l, s, y, out);
      }
  });
}

// For `layers` layers whose caches are `layer_bytes` apart.
template <class T>
static void run_attention(const Step& step, const float* qkv, void* kv, int64_t layers, int64_t layer_bytes, int64_t heads,
                          int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, float* out, Workspace& ws, Team& team) {
  const int64_t q_n = heads * head_dim, kv_n = kv_heads * head_dim, qkv_n = q_n + 2 * kv_n;
  const KvLayout layout{kv_heads, head_dim, block_size};
  prepare_attention(step, heads, layout, team.size(), ws);
  team.run([&](int member) {
    Ahead nothing;
    for (int64_t layer = 0; layer < layers; ++layer) {
      T* cache = (T*)((char*)kv + layer * layer_bytes);
      each_rows(team, step.rows, [&](int64_t row) {
        const float* k = qkv + row * qkv_n + q_n;
        write_kv(layout, k, k + kv_n, cache, step.kv_slots[row]);
      });
      const Attention attention{&step, qkv, qkv_n, cache, layout, heads, window, ws.partials.data<float>()};
      attend<T>(team, attention, ws.attention, out, q_n, ws.scratch.data<float>() + member * ws.scratch_each, nothing);
    }
  });
}

}  // namespace motet
