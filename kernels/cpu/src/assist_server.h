// The CPU LoRA process: waits for requests on its channel and computes them from adapters in host memory, which it maps.
#pragma once
#include <unistd.h>

#include <cstdio>

#include "buffer.h"
#include "channel.h"

namespace motet {

// The mapped adapters of the base process: at most as many as one step may name. All are unmapped after some time without requests.
// A mapped file keeps its inode, so the inode identifies the memory.
class Mappings {
 public:
  ~Mappings() { clear(); }

  // The adapter's first line, or null when its memory cannot be had. Stays valid for this step and the next calls in it.
  const void* find(int base_pid, const ChannelSlice& slice, uint32_t step) {
    for (Mapping& one : all_)
      if (one.device == slice.device && one.inode == slice.inode) {
        one.step = step;
        return one.data + slice.data_start;
      }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", base_pid, slice.fd);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return nullptr;
    void* data = mmap(nullptr, slice.file_bytes, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (data == MAP_FAILED) return nullptr;
    if (all_.size() == MAX_SLICES) drop_oldest(step);
    all_.push_back({slice.device, slice.inode, (const char*)data, slice.file_bytes, step});
    return all_.back().data + slice.data_start;
  }
  void clear() {
    for (const Mapping& one : all_) munmap((void*)one.data, one.bytes);
    all_.clear();
  }

 private:
  struct Mapping {
    int64_t device, inode;
    const char* data;
    int64_t bytes;
    uint32_t step;  // that used it last
  };
  void drop_oldest(uint32_t step) {
    auto oldest = all_.begin();
    for (auto at = all_.begin(); at != all_.end(); ++at)
      if (step - at->step > step - oldest->step) oldest = at;
    munmap((void*)oldest->data, oldest->bytes);
    all_.erase(oldest);
  }
  std::vector<Mapping> all_;
};

template <class T>
class AssistServer {
  typedef typename ActivationOf<T>::type A;
  static constexpr int64_t IDLE_NS = 1000 * 1000 * 1000;

 public:
  // `parent_pid` 0: a thread of the base itself.
  AssistServer(ChannelHeader& header, int parent_pid) : h_(header), parent_pid_(parent_pid) {}

  // Returns when it is told to stop or its parent is gone.
  void serve() {
    uint32_t seen = h_.done.sequence.load();
    h_.ready.store(1);
    for (;;) {
      const bool came = await_change(h_.request.sequence, seen, h_.process.sleeps, PROCESS_SPIN_NS, now_ns() + IDLE_NS, [this] { return h_.stop.load() || h_.silent.load(); });
      if (h_.stop.load() || (parent_pid_ && getppid() != parent_pid_)) return;
      if (!came && h_.silent.load()) continue;
      if (!came) {  // the worker may have dropped its host copies: do not keep their memory
        mappings_.clear();
        step_known_ = false;
        continue;
      }
      const int64_t began = now_ns();
      h_.done.unreadable = !compute();
      h_.done.failures += h_.done.unreadable;
      h_.done.at_ns = now_ns();
      h_.done.busy_ns = h_.done.at_ns - began;
      h_.done.total_ns += h_.done.busy_ns;
      change(h_.done.sequence, seen = h_.request.sequence.load(), h_.base.sleeps);
    }
  }

 private:
  struct SliceWork {
    Pool pool;
    std::vector<int64_t> table;
    std::vector<int32_t> row_slot;
    LoraPlan plan;
    Buffer s;
  };

  bool compute() {
    [[maybe_unused]] const Tiles tiles;
    if (!step_known_ || step_ != h_.step.number) {
      step_ = h_.step.number;
      step_known_ = true;
      for (int i = 0; i < h_.step.count; ++i)
        if (!prepare(i)) return step_known_ = false;
    }
    const int group = h_.request.group;
    const int64_t layer = h_.request.layer, in = h_.in[GROUP_START[group]], out = group_out(h_.out, group);
    const int64_t ldx = row_stride<A>(in), ldy = row_stride<A>(out);
    for (int i = 0; i < h_.step.count; ++i) {
      if (!(h_.request.slices >> i & 1)) continue;
      const ChannelSlice& slice = h_.step.slice[i];
      SliceWork& work = work_[i];
      const A* x = channel_x<A>(h_, group, slice.row0);
      A* y = channel_y<A>(h_, group, slice.row0);
      float* s = work.s.template data<float>();
      const std::vector<LoraPiece>&shrink = work.plan.shrink[group], &expand = work.plan.expand[group];
      for (size_t p = 0; p < shrink.size(); ++p)
        shrink_piece<T, A>(work.pool, work.plan, shrink[p], p + 1 < shrink.size() ? &shrink[p + 1] : nullptr, layer, x, ldx, s);
      int64_t column = 0;
      for (int m = GROUP_START[group]; m < GROUP_START[group + 1]; column += h_.out[m++])
        if (!slice.pages[m])
          for (int r = 0; r < slice.rows; ++r) memset((void*)(y + r * ldy + column), 0, h_.out[m] * sizeof(A));
      for (size_t p = 0; p < expand.size(); ++p)
        expand_to(work, expand[p], p + 1 < expand.size() ? &expand[p + 1] : nullptr, layer, y, ldy);
    }
    return true;
  }

  // Sums are built in this core's cache, so that the shared memory is written once.
  void expand_to(SliceWork& work, const LoraPiece& piece, const LoraPiece* after, int64_t layer, A* y, int64_t ldy) {
    const int64_t stride = row_stride<float>(piece.count), column = first_column(work.pool, piece);
    sums_.reserve(piece.rows * stride * sizeof(float));
    float* sums = sums_.data<float>();
    memset(sums, 0, piece.rows * stride * sizeof(float));
    const float* s = work.s.template data<float>();
    expand_piece<T>(work.pool, work.plan, piece, after, layer, s, sums - piece.row0 * stride - column, stride);
    for (int r = 0; r < piece.rows; ++r)
      take_row(sums + r * stride, y + (piece.row0 + r) * ldy + column, piece.count, piece.count);
  }

  bool prepare(int i) {
    const ChannelSlice& slice = h_.step.slice[i];
    SliceWork& work = work_[i];
    Pool& pool = work.pool;
    pool.arena = mappings_.find(h_.base_pid, slice, step_);
    if (!pool.arena) return false;
    pool.max_pages = 1;
    for (int pages : slice.pages) pool.max_pages = std::max<int64_t>(pool.max_pages, pages);
    work.table.assign(MODULES * pool.max_pages, 0);
    for (int m = 0; m < MODULES; ++m)
      for (int p = 0; p < slice.pages[m]; ++p)
        work.table[m * pool.max_pages + p] = slice.first_line[m] + p * h_.layers * (h_.in[m] + h_.out[m]);
    pool.table = work.table.data(), pool.pages = slice.pages, pool.scales = h_.scales(i);
    pool.slots = 1, pool.layers = h_.layers;
    memcpy(pool.in, h_.in, sizeof pool.in);
    memcpy(pool.out, h_.out, sizeof pool.out);
    work.row_slot.assign(slice.rows, 0);
    work.plan.build(pool, work.row_slot.data(), slice.rows, sizeof(T), 0);  // no team: a page is one piece
    work.s.reserve(work.plan.s_size * sizeof(float));
    return true;
  }

  ChannelHeader& h_;
  const int parent_pid_;
  Mappings mappings_;
  SliceWork work_[MAX_SLICES];
  Buffer sums_;
  uint32_t step_ = 0;
  bool step_known_ = false;
};

}  // namespace motet
