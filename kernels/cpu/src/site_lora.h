// LoRA at the sites of an image model: y[row, out] += scale * weight * B (A x[row]), for many rows of an adapter and small matrices.
//
//   block     up to 64 rows with the same adapters and weights, in any places. Blocks lie in the order of their adapters, and the
//             adapters of the next one are prefetched while one is computed
//   prepare   scale * weight * A^T of some inputs, [inputs][ranks], in memory of the thread; kept from block to block of an adapter
//   shrink    s[row, rank] = x[row] A^T
//   expand    y[row, out] += s[row] B^T, whose pages are read where they are
//
// Both products are the same one: rows times a matrix whose rows are contiguous, with sums in registers (`multiply`). The threads
// are those of torch: a second team would compete for the same cores.
#pragma once
#include <atomic>

#include "buffer.h"
#include "lora_plan.h"
#include "team.h"

namespace motet {

constexpr int SITE_ROWS = 64;             // of a block; kernels/cpu/sites.py has the same
constexpr int64_t SITE_INPUTS = 512;      // that are prepared at once
constexpr int64_t SITE_ALONE = 1 << 20;   // products below which waking threads would take longer
constexpr int SHARES_EACH = 2, MOST_SHARES = 256;

typedef float v8 __attribute__((vector_size(32)));

INLINE v8 load8(const float* p) {
  v8 v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store8(float* p, v8 x) { memcpy(p, &x, sizeof x); }
#if MOTET_LEVEL >= 1
INLINE v8 load8(const bf16* p) {
  return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
INLINE v8 load8(const f16* p) { return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#endif

// to[i][0..8) = scale * a[0..8)[i] for i of [0, n), where rows of `a` are `in` apart and those of `to` `width`.
template <class T>
static void turn_page(const T* a, int64_t in, int64_t n, float scale, float* to, int64_t width) {
  int64_t i = 0;
#if MOTET_LEVEL >= 1
  const __m256 by = _mm256_set1_ps(scale);
  for (; i + 8 <= n; i += 8, to += 8 * width) {
    __m256 r[8], t[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) r[k] = _mm256_mul_ps((__m256)load8(a + k * in + i), by);
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) t[k] = _mm256_unpacklo_ps(r[k], r[k + 1]), t[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
#pragma GCC unroll 2
    for (int k = 0; k < 8; k += 4)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        r[k + 2 * j] = _mm256_shuffle_ps(t[k + j], t[k + j + 2], 0x44);
        r[k + 2 * j + 1] = _mm256_shuffle_ps(t[k + j], t[k + j + 2], 0xee);
      }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      _mm256_storeu_ps(to + j * width, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
      _mm256_storeu_ps(to + (j + 4) * width, _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
    }
  }
#endif
  for (; i < n; ++i, to += width)
    for (int k = 0; k < 8; ++k) {
      T one[W] = {a[k * in + i]};
      float value[W];
      store(value, load(one));
      to[k] = value[0] * scale;
    }
}

// The right operand: `parts` matrices of [each][..], one below the other, whose rows are `width` apart.
struct SiteMatrix {
  const float* const* part;
  int parts;
  int64_t each, width;
};

// to[r][0..C vectors) (+)= row[r] times the matrix from column `at` on. The last vector may have only `live` columns.
template <int R, int C, bool ADD, bool WHOLE>
INLINE void multiply_tile(const float* const* row, const SiteMatrix& m, int64_t at, int live, float* const* to, Ahead& all_ahead) {
  Ahead ahead = all_ahead;  // a local copy stays in registers
  vf acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      if constexpr (ADD)
        acc[r][c] = WHOLE ? load(to[r] + at + c * W) : load_n(to[r] + at + c * W, live);
      else
        acc[r][c] = zero();
    }
  int64_t k = 0;
  for (int p = 0; p < m.parts; ++p) {
    const float* weights = m.part[p] + at;
    for (const int64_t end = k + m.each; k < end; ++k, weights += m.width) {
      vf w[C];
      ahead.prefetch_lines(1);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) w[c] = WHOLE ? load(weights + c * W) : load_n(weights + c * W, live);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vf value = broadcast(row[r][k]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) multiply_add(acc[r][c], value, w[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      if constexpr (WHOLE)
        store(to[r] + at + c * W, acc[r][c]);
      else
        store_n(to[r] + at + c * W, acc[r][c], live);
    }
  all_ahead = ahead;
}

template <int R, int C, bool ADD, bool WHOLE = true>
static void multiply_rows(const float* const* row, int rows, const SiteMatrix& m, int64_t at, int live, float* const* to, Ahead& ahead) {
  int r = 0;
  for (; r + R <= rows; r += R) {
    if (ADD)
      for (int next = r + R; next < std::min(r + 2 * R, rows); ++next)
        for (int c = 0; c < C * W; c += 16) prefetch_to_store(to[next] + at + c);
    multiply_tile<R, C, ADD, WHOLE>(row + r, m, at, live, to + r, ahead);
  }
  for (; r < rows; ++r) multiply_tile<1, C, ADD, WHOLE>(row + r, m, at, live, to + r, ahead);
}

// to[r][0..n) (+)= row[r] times the matrix, for `rows` rows.
template <bool ADD>
static void multiply(const float* const* row, int rows, const SiteMatrix& m, int64_t n, float* const* to, Ahead& ahead) {
  int64_t at = 0;
  for (int64_t left; (left = (n - at) / W) > 0;) {
#if MOTET_LEVEL >= 2
    if (left == 4 || left > 6) {
      multiply_rows<6, 4, ADD>(row, rows, m, at, W, to, ahead), at += 4 * W;
      continue;
    }
    if (left >= 3) {
      multiply_rows<8, 3, ADD>(row, rows, m, at, W, to, ahead), at += 3 * W;
      continue;
    }
#endif
    if (left >= 2)
      multiply_rows<MOTET_LEVEL >= 2 ? 8 : 4, 2, ADD>(row, rows, m, at, W, to, ahead), at += 2 * W;
    else
      multiply_rows<8, 1, ADD>(row, rows, m, at, W, to, ahead), at += W;
  }
  if (at < n) multiply_rows<4, 1, ADD, false>(row, rows, m, at, (int)(n - at), to, ahead);
}

// What a thread has in memory: A^T of an adapter with its factor, its B as floats, and s of a block.
template <class T>
class SiteWork {
 public:
  SiteWork(const SiteBatch& batch, int64_t group, int64_t site, const float* x, float* y)
      : pool_(batch.pool), batch_(batch), group_(group), site_(site), in_(pool_.in[group]), out_(pool_.out[group]), x_(x), y_(y) {}

  // `after`: the block that follows, or -1.
  void run(int64_t block, int64_t after) {
    expect(block, after);
    const int64_t begin = batch_.starts[block];
    const int rows = (int)(batch_.starts[block + 1] - begin);
    const float* row[SITE_ROWS];
    float* to[SITE_ROWS];
    for (int r = 0; r < rows; ++r) row[r] = x_ + batch_.order[begin + r] * in_, to[r] = y_ + batch_.order[begin + r] * out_;
    for (int64_t k = 0; k < batch_.adapters; ++k) {
      const int32_t slot = batch_.slots[block * batch_.adapters + k];
      if (slot < 0) continue;
      const int64_t of_slot = slot * pool_.classes + group_;
      const float scale = pool_.scales[of_slot * pool_.max_sites + site_] * batch_.weights[block * batch_.adapters + k];
      if (pool_.pages[of_slot] && scale != 0) add(slot, pool_.pages[of_slot], scale, row, to, rows);
    }
  }

 private:
  // Prefetches the adapters of the next block while this one is computed, if they are others.
  void expect(int64_t block, int64_t after) {
    queue_.clear();
    for (int64_t k = 0; k < batch_.adapters && after >= 0; ++k) {
      const int32_t slot = batch_.slots[after * batch_.adapters + k];
      if (slot < 0 || slot == batch_.slots[block * batch_.adapters + k]) continue;
      for (int p = 0; p < pool_.pages[slot * pool_.classes + group_]; ++p) queue_.add(page(slot, p), 8 * (in_ + out_) * sizeof(T));
    }
    ahead_ = queue_.then({});
  }

  void add(int32_t slot, int pages, float scale, const float* const* row, float* const* to, int rows) {
    const int64_t width = (pages * 8 + W - 1) / W * W, some = std::min(in_, SITE_INPUTS);
    static thread_local Buffer turned, sums;
    turned.reserve(some * width * sizeof(float));
    sums.reserve(SITE_ROWS * width * sizeof(float));
    const float* from[SITE_ROWS];
    float* s[SITE_ROWS];
    for (int r = 0; r < rows; ++r) s[r] = sums.data<float>() + r * width;
    for (int64_t i = 0; i < in_; i += SITE_INPUTS) {
      const int64_t n = std::min(SITE_INPUTS, in_ - i);
      if (in_ > SITE_INPUTS || slot != slot_ || scale != scale_) prepare(slot, pages, scale, i, n, turned.data<float>(), width);
      for (int r = 0; r < rows; ++r) from[r] = row[r] + i;
      const float* at = turned.data<float>();
      const SiteMatrix a{&at, 1, n, width};
      i ? multiply<true>(from, rows, a, width, s, ahead_) : multiply<false>(from, rows, a, width, s, ahead_);
    }
    if (slot != slot_) read_b(slot, pages);
    slot_ = slot, scale_ = scale;
    multiply<true>(s, rows, {b_, pages, 8, out_}, out_, to, ahead_);
  }

  void prepare(int32_t slot, int pages, float scale, int64_t i, int64_t n, float* to, int64_t width) {
    if (width > pages * 8)
      for (int64_t k = 0; k < n; ++k) memset(to + k * width + pages * 8, 0, (width - pages * 8) * sizeof(float));
    for (int p = 0; p < pages; ++p) turn_page(page(slot, p) + i, in_, n, scale, to + p * 8, width);
  }

  // Where the pages of B are. Those of 16 bits are converted.
  void read_b(int32_t slot, int pages) {
    if constexpr (std::is_same<T, float>::value) {
      for (int p = 0; p < pages; ++p) b_[p] = page(slot, p) + 8 * in_;
    } else {
      static thread_local Buffer floats;
      const int64_t size = 8 * out_;
      floats.reserve(pages * size * sizeof(float));
      for (int p = 0; p < pages; ++p) {
        const T* b = page(slot, p) + 8 * in_;
        float* to = floats.data<float>() + p * size;
        for (int64_t i = 0; i < size; i += 8)  // a page is a multiple of 8
          if constexpr (W > 8)
            store8(to + i, load8(b + i));
          else
            for (int j = 0; j < 8; j += W) store(to + i + j, load(b + i + j));
        b_[p] = to;
      }
    }
  }

  const T* page(int32_t slot, int p) const {
    const int64_t line = pool_.table[(slot * pool_.classes + group_) * pool_.max_pages + p];
    return (const T*)pool_.arena + line * 8 + site_ * 8 * (in_ + out_);
  }

  const SitePool& pool_;
  const SiteBatch& batch_;
  const int64_t group_, site_, in_, out_;
  const float* const x_;
  float* const y_;
  AheadQueue queue_;
  Ahead ahead_;
  int32_t slot_ = -1;  // of what is prepared
  float scale_ = 0;
  const float* b_[MAX_PAGES];
};

// Blocks in shares of similar work, which the threads take one after another.
struct SiteShares {
  int64_t first[MOST_SHARES + 1], count = 0;
  SiteShares(const SiteBatch& batch, int64_t group) {
    int64_t all = 0, done = 0;
    for (int64_t block = 0; block < batch.blocks; ++block) all += work(batch, group, block);
    const int64_t products = all * 8 * (batch.pool.in[group] + batch.pool.out[group]);
    const int64_t most = products < SITE_ALONE || !batch.parallel ? 1 : std::min<int64_t>(batch.threads * SHARES_EACH, MOST_SHARES);
    first[0] = 0;
    for (int64_t block = 0; block < batch.blocks; ++block) {
      done += work(batch, group, block);
      if (block + 1 == batch.blocks || done * most >= all * (count + 1)) first[++count] = block + 1;
    }
  }

 private:
  static int64_t work(const SiteBatch& batch, int64_t group, int64_t block) {
    int64_t pages = 0;
    for (int64_t k = 0; k < batch.adapters; ++k) {
      const int32_t slot = batch.slots[block * batch.adapters + k];
      if (slot >= 0) pages += batch.pool.pages[slot * batch.pool.classes + group];
    }
    return pages * (batch.starts[block + 1] - batch.starts[block]);
  }
};

template <class T>
static void run_site_lora(const SiteBatch& batch, int64_t group, int64_t site, const float* x, float* y) {
  struct Job {
    const SiteBatch& batch;
    int64_t group, site;
    const float* x;
    float* y;
    SiteShares shares;
    std::atomic<int64_t> next{0};
    void work() {
      for (int64_t share; (share = next.fetch_add(1)) < shares.count;) {
        SiteWork<T> thread(batch, group, site, x, y);
        const int64_t end = shares.first[share + 1];
        for (int64_t block = shares.first[share]; block < end; ++block) thread.run(block, block + 1 < end ? block + 1 : -1);
      }
    }
  } job{batch, group, site, x, y, {batch, group}};
  if (job.shares.count > 1 && batch.parallel)
    batch.parallel([](void* job) { ((Job*)job)->work(); }, &job, (unsigned)batch.threads, 0);
  else
    job.work();
}

}  // namespace motet
