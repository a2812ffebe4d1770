// LoRA of one linear layer of another engine: y[row, out] += scale * B (A x[row]), in the engine's types and by its own threads.
//
//   round    rows of x in the type in which they meet weights, if that is another
//   shrink   s = scale * A x           the pieces and kernels of lora.h
//   expand   y += B s                  rows of 16 bits are widened into memory of the thread, and rounded once
//
// The engine's OpenMP runs the threads: a second team would compete for the same cores. There may be fewer of them than were asked
// for, so nothing here counts them. A thread takes items of a phase until none is left, and begins the next phase when all are done.
#pragma once
#include <atomic>

#include "lora.h"

namespace motet {

constexpr int64_t LAYER_ALONE_BYTES = 48 << 10;  // of adapters, below which waking threads would take longer
constexpr int ROUNDED_ROWS = 8;                  // of x, in an item

// Tiles of this thread, which others use between two calls: given back as they were found.
class BorrowedTiles {
#if MOTET_LEVEL >= 4
 public:
  BorrowedTiles() {
    _tile_storeconfig(&before_);
    Tiles::forget();
  }
  ~BorrowedTiles() {
    _tile_loadconfig(&before_);
    Tiles::forget();
  }

 private:
  alignas(64) char before_[64];
#endif
};

// Items 0..count-1 of a phase, handed out in runs of neighbours.
class PhaseItems {
 public:
  void begin(int64_t count, int64_t threads) {
    count_ = count, each_ = std::max<int64_t>(1, count / (threads * 8));
    next_.store(0, std::memory_order_relaxed), done_.store(0, std::memory_order_relaxed);
  }
  template <class F>
  void run(F&& f) {  // f(item, whether this thread has the next one too)
    for (int64_t begin; (begin = next_.fetch_add(each_, std::memory_order_relaxed)) < count_;) {
      const int64_t end = std::min(begin + each_, count_);
      for (int64_t item = begin; item < end; ++item) f(item, item + 1 < end);
      done_.fetch_add(end - begin, std::memory_order_release);
    }
  }
  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_;)
      if (++spins < 4000)
        cpu_relax();
      else
        sched_yield();
  }

 private:
  int64_t count_ = 0, each_ = 1;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Memory of the calling thread that its calls reuse.
struct LayerWork {
  LoraPlan plan;
  Buffer rounded, s;
  PhaseItems round, shrink, expand;
};

template <class T>
class LayerLora {
  typedef typename ActivationOf<T>::type A;
  static constexpr bool ROUNDS = !std::is_same<T, A>::value;

 public:
  LayerLora(const Pool& pool, const LayerStep& step, int group, const T* x, int64_t ldx, T* y, int64_t ldy, LayerWork& work)
      : pool_(pool), work_(work), group_(group), in_(pool.in[GROUP_START[group]]), x_(x), ldx_(ldx), y_(y), ldy_(ldy) {
    work.plan.build(pool, step.row_slot, step.rows, sizeof(T), (int)step.threads);
    if (ROUNDS) work.rounded.reserve(step.rows * in_ * sizeof(A));
    work.s.reserve(work.plan.s_size * sizeof(float));
    work.round.begin(ROUNDS ? ((int64_t)work.plan.order.size() + ROUNDED_ROWS - 1) / ROUNDED_ROWS : 0, step.threads);
    work.shrink.begin((int64_t)shrinks().size(), step.threads);
    work.expand.begin((int64_t)expands().size(), step.threads);
  }
  bool idle() const { return expands().empty(); }
  bool alone() const {
    int64_t bytes = 0;
    for (const LoraPiece& piece : shrinks()) bytes += piece.count * PAGE * in_ * (int64_t)sizeof(T);
    return bytes < LAYER_ALONE_BYTES;
  }
  void work() {
    [[maybe_unused]] BorrowedTiles tiles;
    if constexpr (ROUNDS) {
      work_.round.run([&](int64_t item, bool) { round_rows(item); });
      work_.round.wait();
      shrink((const A*)work_.rounded.template data<A>(), in_);
    } else {
      shrink(x_, ldx_);
    }
    work_.shrink.wait();
    work_.expand.run([&](int64_t item, bool more) { expand(expands()[item], more ? &expands()[item + 1] : nullptr); });
    work_.expand.wait();  // what the call's thread owns must outlast all
  }

 private:
  const std::vector<LoraPiece>& shrinks() const { return work_.plan.shrink[group_]; }
  const std::vector<LoraPiece>& expands() const { return work_.plan.expand[group_]; }

  void round_rows(int64_t item) {
    const int64_t end = std::min<int64_t>((item + 1) * ROUNDED_ROWS, work_.plan.order.size());
    for (int64_t i = item * ROUNDED_ROWS; i < end; ++i) {
      const int64_t row = work_.plan.order[i];
      take_row(x_ + row * ldx_, work_.rounded.template data<A>() + row * in_, in_, in_);
    }
  }

  void shrink(const A* x, int64_t ldx) {
    work_.shrink.run([&](int64_t item, bool more) {
      shrink_piece<T, A>(pool_, work_.plan, shrinks()[item], more ? &shrinks()[item + 1] : nullptr, 0, x, ldx, work_.s.template data<float>());
    });
  }

  void expand(const LoraPiece& piece, const LoraPiece* after) {
    const float* s = work_.s.template data<float>();
    T* first = y_ + first_column(pool_, piece);
    const auto row_of = [&](int64_t place) { return first + work_.plan.order[place] * ldy_; };
    if constexpr (sizeof(T) == sizeof(float)) {
      expand_piece_to<T>(pool_, work_.plan, piece, after, 0, s, [&](int64_t place, int) { return (float*)row_of(place); });
    } else {
      static thread_local Buffer wide;
      const int rows = piece.rows + piece.others;
      const int64_t n = piece.count, width = round_up(n, 16);
      wide.reserve(rows * width * sizeof(float));
      float* to = wide.data<float>();
      const auto place_of = [&](int i) { return piece.others ? work_.plan.beside_of(piece, i).row0 : piece.row0 + i; };
      for (int i = 0; i < rows; ++i) take_row(row_of(place_of(i)), to + i * width, n, width);
      expand_piece_to<T>(pool_, work_.plan, piece, after, 0, s, [&](int64_t, int i) { return to + i * width; });
      for (int i = 0; i < rows; ++i) take_row(to + i * width, row_of(place_of(i)), n, n);
    }
  }

  const Pool& pool_;
  LayerWork& work_;
  const int group_;
  const int64_t in_;
  const T* x_;
  const int64_t ldx_;
  T* y_;
  const int64_t ldy_;
};

template <class T>
static void run_layer_lora(const Pool& pool, const LayerStep& step, int group, const void* x, int64_t ldx, void* y, int64_t ldy) {
  static thread_local LayerWork memory;
  LayerLora<T> job(pool, step, group, (const T*)x, ldx, (T*)y, ldy, memory);
  if (job.idle()) return;
  if (!step.parallel || step.threads < 2 || job.alone()) return job.work();
  step.parallel([](void* job) { ((LayerLora<T>*)job)->work(); }, &job, (unsigned)step.threads, 0);
}

}  // namespace motet
