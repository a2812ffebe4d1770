// A fixed team of threads that run one function together.
//
//   team.run(f)             every member runs f(member); returns when all are done
//   team.each(n, f, idle)   inside f: items 0..n-1, each done once by one member; ends with a barrier
//   team.each({n, m}, ...)  items 0..n+m-1, of two kinds: every member has a share of each
//
// A member has the same share of neighbouring items in every phase, and takes the last ones of another's when it has finished its own.
// So what a member writes stays in its own caches, and members meet in memory at the end of a phase only: where their cores have no cache
// in common, a line takes half a microsecond from one to the other. A member knows the next item of its share, and the first before a phase
// begins, so that an item can prefetch the memory of the next one. A waiting member spins for a while and calls `idle` (a phase
// lasts microseconds), then sleeps on a futex (the gap between two engine steps is much longer).
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Memory that is still to be prefetched: [at, end), and for each of its lines the line `gap` bytes behind it. Prefetches go in
// order of address, because the hardware's prefetcher, which fetches more than software can, follows only such a sequence. They
// are spread out, because a burst takes all of a core's line buffers and delays loads from the second-level cache.
struct Ahead {
  const char *at = nullptr, *end = nullptr;
  int64_t gap = 0;
  int64_t stride = 0;  // from panel to panel
  const Ahead *more = nullptr, *last = nullptr;  // what follows, see AheadQueue
  void operator()() {  // some lines, while a member waits
    for (int i = 0; i < 4 && at < end; ++i, at += 64) {
      motet::prefetch(at);
      motet::prefetch(at + gap);
    }
    if (at >= end && more != last) go_on();
  }
  // At most `n` lines, from within a loop.
  __attribute__((always_inline)) void prefetch_lines(int n) {
    for (int i = 0; i < n && at < end; ++i, at += 64) {
      motet::prefetch(at);
      if (gap) motet::prefetch(at + gap);
    }
    if (at >= end && more != last) go_on();
  }
  int64_t lines() const {
    int64_t all = (end - at + 63) / 64;
    for (const Ahead* one = more; one != last; ++one) all += (one->end - one->at + 63) / 64;
    return all;
  }

 private:
  __attribute__((noinline)) void go_on() {  // rare, and a loop that needs all registers must not spend any on it
    at = more->at, end = more->end, gap = more->gap, ++more;
  }
};

constexpr int64_t STREAM_BYTES = 16 * 64;  // by which a stream is prefetched

// Streams of memory that are read side by side, `stride` bytes apart, and where the next ones begin. The processor fetches streams ahead
// by itself, but only within 4 KiB, and needs some lines to notice each.
struct Streams {
  const char *at, *end, *next;
  int64_t stride, next_stride;
  Streams(const void* from, int64_t bytes, int64_t stride, const Ahead& then)
      : at((const char*)from + STREAM_BYTES), end((const char*)from + bytes), next(then.at ? then.at : (const char*)from), stride(stride),
        next_stride(then.stride) {}
  template <int P>  // of P streams
  __attribute__((always_inline)) void lines(int n) {
    if (at >= end) at = next + (at - end), stride = next_stride, end = (const char*)UINTPTR_MAX;
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i, at += 64)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) motet::prefetch(at + p * stride);
  }
};

// Several pieces of memory that are prefetched one after the other.
class AheadQueue {
 public:
  void clear() { count_ = bytes_ = 0; }
  void add(const void* at, int64_t bytes) {
    if (count_ == MOST || bytes_ + bytes > MOST_BYTES) return;
    parts_[count_++] = {(const char*)at, (const char*)at + bytes};
    bytes_ += bytes;
  }
  // These, then `after`. Valid until the next `clear`.
  Ahead then(const Ahead& after) {
    if (!count_) return after;
    parts_[count_] = after;
    return {parts_[0].at, parts_[0].end, 0, 0, parts_ + 1, parts_ + count_ + 1};
  }

 private:
  static constexpr int MOST = 32;
  static constexpr int64_t MOST_BYTES = 256 << 10;  // stay in the second-level cache together with the weights
  Ahead parts_[MOST + 1];
  int64_t count_ = 0, bytes_ = 0;
};

// A growing number that threads can wait for.
class Generation {
 public:
  uint32_t get() const { return value_.load(std::memory_order_acquire); }
  template <class F>
  void wait_beyond(uint32_t seen, int spins, F&& idle) {
    for (int i = 0; i < spins; ++i) {
      if (get() != seen) return;
      idle();
      cpu_relax();
    }
    sleepers_.fetch_add(1);
    while (value_.load() == seen) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
  }
  void advance() {
    value_.fetch_add(1);
    if (sleepers_.load()) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
  }

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// The items of a phase. Those of the second kind follow those of the first.
struct Items {
  int64_t first, second = 0;
  Items(int64_t first, int64_t second = 0) : first(first), second(second) {}
};

class Team {
 public:
  // What this member prefetches while it waits for the next `run`.
  static void afterwards(const Ahead& memory) { afterwards_ = memory; }

  // Pinned one per allowed CPU when there are as many members as CPUs; otherwise the kernel places them.
  explicit Team(int size) : size_(size < 1 ? 1 : size), members_(size_) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == size_)
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed)) cpus_.push_back(cpu);
    for (int member = 1; member < size_; ++member) threads_.emplace_back([this, member] { serve(member); });
  }
  ~Team() {
    stop_ = true;
    jobs_.advance();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }
  // Where the share of `member` of n items begins; the next one's is its end.
  static int64_t share(int64_t n, int64_t member, int64_t size) { return n / size * member + std::min(n % size, member); }

  template <class F>
  void run(F&& f) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (size_ == 1) return f(0);
    cpu_set_t before;
    const bool pinned = !cpus_.empty() && sched_getaffinity(0, sizeof before, &before) == 0;
    if (pinned) pin(cpus_[0]);
    job_ = std::ref(f);
    jobs_.advance();
    f(0);
    barrier();
    if (pinned) sched_setaffinity(0, sizeof before, &before);
  }

  void barrier() {
    barrier([] {});
  }
  template <class F>
  void barrier(F&& idle) {
    if (size_ == 1) return;
    const uint32_t seen = phase_.get();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.advance();
    } else {
      phase_.wait_beyond(seen, 2000, idle);  // about 100 us; a longer wait means that another process has this CPU
    }
  }

  template <class F>
  void each(Items n, F&& f) {
    each(n, f, [] {});
  }
  template <class F, class I>
  void each(Items n, F&& f, I&& idle) {  // f(item, the one that probably comes next or -1)
    ++members_[member_].phase;
    const Share mine(n, member_, size_);
    for (int64_t item; (item = take(mine, member_)) >= 0;) f(item, next(mine));
    for (int i = 1; i < size_; ++i) {
      const int other = (member_ + i) % size_;
      const Share theirs(n, other, size_);
      for (int64_t item; (item = take(theirs, other)) >= 0;) f(item, -1);
    }
    barrier(idle);
  }

 private:
  // What is left of a member's share: from `begin` to `end` of it, in one word with the phase (8, 28 and 28 bits). Whoever comes first in
  // a phase finds the word of the last one.
  struct alignas(64) Member {
    std::atomic<uint64_t> left{0};
    uint8_t phase = 0;  // that this member is in: all members count the same phases
  };
  // What `owner` has of n items.
  struct Share {
    int64_t first, firsts, second, seconds;  // of each kind, from where and how many
    Share(const Items& n, int owner, int size)
        : first(share(n.first, owner, size)), firsts(share(n.first, owner + 1, size) - first), second(n.first + share(n.second, owner, size)),
          seconds(n.first + share(n.second, owner + 1, size) - second) {}
    int64_t count() const { return firsts + seconds; }
    int64_t item(int64_t at) const { return at < firsts ? first + at : second + at - firsts; }
  };
  // An item of the share of `owner` that nobody has taken: its first for the owner, its last for others. -1 if there is none.
  int64_t take(const Share& share, int owner) {
    const uint64_t phase = members_[member_].phase;
    const bool own = owner == member_;
    std::atomic<uint64_t>& left = members_[owner].left;
    uint64_t seen = left.load(std::memory_order_relaxed);
    while (true) {
      const bool begun = seen >> 56 == phase;
      int64_t begin = begun ? seen >> 28 & COUNT : 0, end = begun ? seen & COUNT : share.count();
      const bool some = begin < end;
      if (!some && (begun || !own)) return -1;
      const int64_t at = own ? begin : end - 1;
      if (some) own ? ++begin : --end;
      if (!left.compare_exchange_weak(seen, phase << 56 | (uint64_t)begin << 28 | (uint64_t)end, std::memory_order_relaxed)) continue;
      return some ? share.item(at) : -1;
    }
  }
  // The item that this member takes next unless another is faster; -1 if none is left.
  int64_t next(const Share& share) const {
    const uint64_t left = members_[member_].left.load(std::memory_order_relaxed), begin = left >> 28 & COUNT;
    return begin < (left & COUNT) ? share.item((int64_t)begin) : -1;
  }
  static void pin(int cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
  }
  void serve(int member) {
    pthread_setname_np(pthread_self(), "motet-kernels");
    member_ = member;
    if (!cpus_.empty()) pin(cpus_[member]);
    for (uint32_t seen = 0;; ++seen) {
      jobs_.wait_beyond(seen, 4000, [] {
        for (int i = 0; i < 4; ++i) afterwards_();
      });
      if (stop_) return;
      afterwards_ = {};
      job_(member);
      barrier();
    }
  }

  static constexpr uint64_t COUNT = (1u << 28) - 1;
  static inline thread_local Ahead afterwards_;
  static inline thread_local int member_ = 0;  // of the team that runs this thread; 0 for one that calls `run`
  const int size_;
  std::vector<Member> members_;
  std::vector<int> cpus_;
  std::vector<std::thread> threads_;
  std::function<void(int)> job_;
  std::mutex mutex_;
  std::atomic<bool> stop_{false};
  Generation jobs_, phase_;
  alignas(64) std::atomic<int> arrived_{0};
};
