// Memory that the base process shares with one CPU LoRA process: a file that both map and no other process writes.
//
//   | config | request line | process sleeps | done line | base sleeps | step | scales of its slices | x rows | y rows |
//     base     base           process          process     base          base                          base     process
//
//   base       step (slices of rows, each of one adapter), once per engine step
//              per layer and group:  x rows; request.{layer, group, slices}; request.sequence + 1 (release)
//   process    sees it (acquire), computes y = scale * B (A x) of those slices, done.sequence = request.sequence (release)
//
// There is one request at a time. Numbers are compared for equality only, so they may wrap. Each side spins for a while before it
// sleeps on the other's number. A side that sleeps sets a flag in a cache line of its own, so the other side makes no wake-up call
// while the flag is clear. A channel that failed once is never used again, so late writes of its process have no effect.
//
// The base may be a device whose stream writes x and the request line and waits for the done line (kernels/device). A stream cannot
// wake a process, so the process does not sleep meanwhile (`listen`). A stream would wait for ever for a dead process, so the host
// answers for a process that it ended (`release`).
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>

#include <climits>

#include "lora.h"

namespace motet {

constexpr int MAX_SLICES = 16;  // of one channel and step

struct ChannelSlice {
  int64_t device, inode, data_start, file_bytes;  // of /proc/<base_pid>/fd/<fd>
  int64_t first_line[MODULES];  // of the module's pages, which follow each other, from data_start on
  int32_t pages[MODULES];
  int32_t fd, row0, rows;  // rows of x and y
};

struct ChannelHeader {
  int64_t bytes, type, max_rows, layers;
  int64_t in[MODULES], out[MODULES];
  int64_t scales_at, x_at, y_at;  // bytes from here
  int32_t base_pid;
  std::atomic<uint32_t> ready, stop;
  std::atomic<uint32_t> silent;  // requests come from a device now, which cannot wake the process

  struct alignas(64) {
    std::atomic<uint32_t> sequence;
    int32_t layer, group;
    uint32_t slices;  // bit i: slice i
  } request;
  struct alignas(64) {
    std::atomic<uint32_t> sleeps;
  } process;
  struct alignas(64) {
    std::atomic<uint32_t> sequence;
    uint32_t unreadable;  // an adapter's memory could not be mapped
    int64_t busy_ns, at_ns;
    std::atomic<uint32_t> failures;  // requests that were not computed, ever
    std::atomic<int64_t> total_ns;   // busy, ever
  } done;
  struct alignas(64) {
    std::atomic<uint32_t> sleeps;
  } base;

  struct alignas(64) {
    uint32_t number;
    int32_t count;
    ChannelSlice slice[MAX_SLICES];
  } step;

  float* scales(int slice) { return (float*)((char*)this + scales_at) + slice * MODULES * layers; }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "it lies in memory that processes share");

inline int64_t group_out(const int64_t* out, int group) {
  int64_t n = 0;
  for (int m = GROUP_START[group]; m < GROUP_START[group + 1]; ++m) n += out[m];
  return n;
}

// Rows of x and y of one group as the two sides agree on them, both in the type of activations: y is the largest part of what
// passes between two cores.
template <class A>
INLINE A* channel_x(ChannelHeader& h, int group, int64_t row) {
  return (A*)((char*)&h + h.x_at) + row * row_stride<A>(h.in[GROUP_START[group]]);
}
template <class A>
INLINE A* channel_y(ChannelHeader& h, int group, int64_t row) {
  return (A*)((char*)&h + h.y_at) + row * row_stride<A>(group_out(h.out, group));
}

template <class T>
static void describe_rows(ChannelHeader& h, int group, int64_t* to) {
  typedef typename ActivationOf<T>::type A;
  *to++ = (int64_t)channel_x<A>(h, group, 0), *to++ = row_stride<A>(h.in[GROUP_START[group]]);
  *to++ = (int64_t)channel_y<A>(h, group, 0), *to++ = row_stride<A>(group_out(h.out, group));
  *to = sizeof(A) == sizeof(float) ? F32 : BF16;
}

// Computes the layout for the shapes of `pool`; returns the size of the file.
inline int64_t channel_layout(ChannelHeader& h, const Pool& pool, int64_t max_rows) {
  int64_t most_in = 0, most_out = 0;
  for (int g = 0; g < GROUPS; ++g) {
    most_in = std::max(most_in, row_stride<float>(pool.in[GROUP_START[g]]));
    most_out = std::max(most_out, row_stride<float>(group_out(pool.out, g)));
  }
  memcpy(h.in, pool.in, sizeof h.in);
  memcpy(h.out, pool.out, sizeof h.out);
  h.max_rows = max_rows, h.layers = pool.layers;
  h.scales_at = round_up(sizeof h, 4096);
  h.x_at = round_up(h.scales_at + MAX_SLICES * MODULES * pool.layers * (int64_t)sizeof(float), 4096);
  h.y_at = round_up(h.x_at + max_rows * most_in * (int64_t)sizeof(float), 4096);
  return h.bytes = round_up(h.y_at + max_rows * most_out * (int64_t)sizeof(float), 4096);
}

constexpr int64_t SPIN_NS = 50 * 1000;  // after that another thread may need this core
// Between two requests of a step the base computes its own part of a layer. Waking up takes as long as a small request.
constexpr int64_t PROCESS_SPIN_NS = 400 * 1000;

// Waits until `word` is no longer `seen`: spins, beyond SPIN_NS lets others have the core between two looks, then sleeps. False
// when `until_ns` has passed or `gone()`.
template <class F>
static bool await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleeps, int64_t spin_ns, int64_t until_ns, F&& gone) {
  const int64_t began = now_ns(), spin_until = std::min(until_ns, began + spin_ns);
  for (int64_t now = began; now < spin_until; now = now_ns()) {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return true;
      cpu_relax();
    }
    if (now - began > SPIN_NS) sched_yield();
  }
  sleeps.fetch_add(1);
  int64_t left;
  while (word.load() == seen && !gone() && (left = until_ns - now_ns()) > 0) {
    const timespec t{left / 1000000000, left % 1000000000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &t, nullptr, 0);
  }
  sleeps.fetch_sub(1);
  return word.load(std::memory_order_acquire) != seen;
}

inline void change(std::atomic<uint32_t>& word, uint32_t to, const std::atomic<uint32_t>& sleeps) {
  word.store(to);  // sequentially consistent with `sleeps`: either the sleeper sees the number or we see the flag
  if (sleeps.load()) syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct Work {
  int64_t elements = 0, row_elements = 0;  // of adapters' pages; the same times rows
};

// The base's side of one channel. One thread describes and publishes, any may wait; `fail` may come from anywhere.
class Channel {
 public:
  enum State { ALIVE, LATE, DIED, UNREADABLE };  // mirrored by kernels/cpu/assist.py
  enum Outcome { PENDING, DONE, FAILED };
  static constexpr uint32_t ANSWERED = 1u << 30;  // a number that is at most so far ahead counts as reached

  explicit Channel(ChannelHeader* header) : h(*header), sequence_(header->request.sequence.load()) {}

  ChannelHeader& h;
  // done: elements, rows times elements, the process's time, from asking to the answer; one writer at a time, and readers at any
  std::atomic<int64_t> requests{0}, elements{0}, work{0}, busy_ns{0}, answered_ns{0};

  int state() const { return state_.load(std::memory_order_acquire); }
  bool alive() const { return state() == ALIVE; }
  void fail(int why) {
    int alive = ALIVE;
    if (!state_.compare_exchange_strong(alive, why)) return;
    syscall(SYS_futex, &h.done.sequence, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  void begin_step() {
    ++h.step.number;
    h.step.count = 0;
  }
  // One more slice of rows; the caller has checked that there is room.
  int add_slice(const ChannelSlice& slice, const float* scales) {
    const int i = h.step.count++;
    h.step.slice[i] = slice;
    memcpy(h.scales(i), scales, MODULES * h.layers * sizeof(float));
    return i;
  }

  // `bound_ns`: how long `await` waits at most before the channel has failed.
  void publish(int64_t layer, int group, uint32_t slices, Work work_now, int64_t bound_ns) {
    outcome_.store(PENDING, std::memory_order_relaxed);
    sequence_ = h.request.sequence.load();
    h.request.layer = (int32_t)layer, h.request.group = group, h.request.slices = slices;
    work_now_ = work_now, bound_ns_ = bound_ns, published_ns_ = now_ns();
    change(h.request.sequence, ++sequence_, h.process.sleeps);
  }

  // Whether the request was computed: all who ask get the same answer.
  bool await() {
    int outcome = outcome_.load(std::memory_order_acquire);
    if (outcome == PENDING) {
      const int64_t began = now_ns();
      const bool came = await_change(h.done.sequence, sequence_ - 1, h.base.sleeps, SPIN_NS, began + bound_ns_, [this] { return !alive(); });
      const bool good = came && !h.done.unreadable;
      if (outcome_.compare_exchange_strong(outcome, good ? DONE : FAILED)) {
        outcome = good ? DONE : FAILED;
        if (good) {
          ++requests, elements += work_now_.elements, work += work_now_.row_elements;
          seen_ns_ = h.done.total_ns.load();
          busy_ns += h.done.busy_ns, answered_ns += h.done.at_ns - published_ns_;
        } else {
          fail(came ? UNREADABLE : LATE);
        }
      }
    }
    return outcome == DONE;
  }
  void stop() {
    h.stop.store(1);
    syscall(SYS_futex, &h.request.sequence, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Whether requests of a device will follow.
  void listen(bool on) {
    h.silent.store(on);
    if (on) syscall(SYS_futex, &h.request.sequence, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Counts the requests of a device in a step that is over.
  void account(int64_t asked, int64_t elements_now, int64_t work_now) {
    const int64_t total = h.done.total_ns.load();
    requests += asked, elements += elements_now, work += work_now, busy_ns += total - seen_ns_;
    seen_ns_ = total;
  }
  // The process has ended: every request, past or future, has failed, and no stream waits for it.
  void release() {
    fail(DIED);
    h.done.unreadable = 1, ++h.done.failures;
    change(h.done.sequence, h.request.sequence.load() + ANSWERED, h.base.sleeps);
  }
  bool failed_request() const { return outcome_.load(std::memory_order_acquire) == FAILED; }

 private:
  uint32_t sequence_;
  Work work_now_;
  int64_t bound_ns_ = 0, published_ns_ = 0, seen_ns_ = 0;
  std::atomic<int> state_{ALIVE}, outcome_{DONE};
};

inline int64_t elements_of(const Pool& pool, int m) { return (int64_t)pool.pages[m] * PAGE * (pool.in[m] + pool.out[m]); }

// An adapter's rows as the process finds them.
inline ChannelSlice slice_of(const Loading& loading, int64_t row0, int64_t rows) {
  ChannelSlice slice{};
  slice.device = loading.device, slice.inode = loading.inode;
  slice.data_start = loading.data_start, slice.file_bytes = loading.file_bytes;
  slice.fd = loading.fd, slice.row0 = (int32_t)row0, slice.rows = (int32_t)rows;
  for (int m = 0; m < MODULES; ++m) {
    slice.pages[m] = loading.host.pages[m];
    slice.first_line[m] = loading.host.table[m * loading.host.max_pages];
  }
  return slice;
}

// One request outside a step, in two halves: send x [rows, in], receive y [rows, out]. False when the channel has failed.
template <class T>
static void start_call(Channel& channel, const Loading& loading, const float* x, int64_t rows, int64_t layer, int group,
                       int64_t bound_ns) {
  typedef typename ActivationOf<T>::type A;
  ChannelHeader& h = channel.h;
  const int64_t in = h.in[GROUP_START[group]];
  int64_t elements = 0;
  for (int m = GROUP_START[group]; m < GROUP_START[group + 1]; ++m) elements += elements_of(loading.host, m);
  channel.begin_step();
  channel.add_slice(slice_of(loading, 0, rows), loading.host.scales);
  for (int64_t r = 0; r < rows; ++r) take_row(x + r * in, channel_x<A>(h, group, r), in, row_stride<A>(in));
  channel.publish(layer, group, 1, {elements, rows * elements}, bound_ns);
}
// Without `y` the answer stays where it is.
template <class T>
static bool finish_call(Channel& channel, float* y) {
  typedef typename ActivationOf<T>::type A;
  if (!channel.await()) return false;
  if (!y) return true;
  ChannelHeader& h = channel.h;
  const int group = h.request.group;
  const int64_t out = group_out(h.out, group);
  for (int64_t r = 0; r < h.step.slice[0].rows; ++r) take_row(channel_y<A>(h, group, r), y + r * out, out, out);
  return true;
}

}  // namespace motet
