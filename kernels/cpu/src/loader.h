// Copies adapters into the device's pool beside the steps: layer by layer, at the pace of a link.
//
//   engine's thread    begin(slot, from)   cancel(slot)   hold() and release() around the moving of a page
//   loader's thread    loads in order of begin; of a load all rows of layer 0, then loaded_layers[slot] = 1, then layer 1, ..
//
// Rules:
// - a thread may read layer l of a slot after it has read loaded_layers[slot] > l with acquire.
// - with an emulated link a layer counts as loaded when its last byte would have passed the link: the thread copies a layer at full
//   speed and then sleeps until that time. Remaining bytes are counted on the link.
// - copying a piece and moving a page exclude each other; every piece looks up its page in the table again.
// - when cancel returns, no piece of that load is being written, and none will be.
// - while there is nothing to load, the thread touches the memory that the pool may use, because fresh pages would take three
//   quarters of a copy's time. Memory beyond it belongs to the KV cache: when expect returns, none of that is being touched.
#pragma once
#include <sys/mman.h>
#include <sys/prctl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>

#include "lora.h"

#ifndef MADV_POPULATE_WRITE  // headers older than Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace motet {

class Loader {
 public:
  // `bytes_per_s` 0: as fast as memory is. The arena begins with a page of memory; its first `usable_bytes` are the pool's.
  Loader(const Pool& pool, int64_t usable_bytes, int64_t element_bytes, double bytes_per_s)
      : pool_(pool), element_bytes_(element_bytes), ns_per_byte_(bytes_per_s > 0 ? 1e9 / bytes_per_s : 0), usable_bytes_(usable_bytes) {
    thread_ = std::thread([this] { run(); });
  }
  ~Loader() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      if (current_) current_->cancelled = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // `from` has one slot and the pool's type; its memory stays until the load is whole or cancelled. The slot's pages and
  // scales are the pool's already.
  void begin(int32_t slot, const Pool& from) {
    auto load = std::make_shared<Load>();
    load->slot = slot, load->begun_ns = now_ns();
    for (int m = 0; m < MODULES; ++m)
      for (int p = 0; p < from.pages[m]; ++p) {
        load->rows.push_back({m, p, (const char*)from.arena + from.table[m * from.max_pages + p] * 8 * element_bytes_});
        load->left += pool_.layers * row_bytes(m);
      }
    std::lock_guard<std::mutex> lock(mutex_);
    queued_ += load->left;
    queue_.push_back(std::move(load));
    changed_.notify_all();
  }

  void cancel(int32_t slot) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto at = queue_.begin(); at != queue_.end(); ++at)
      if ((*at)->slot == slot) {
        queued_ -= (*at)->left;
        queue_.erase(at);
        return;
      }
    const std::shared_ptr<Load> load = current_;  // kept here: the thread drops it as soon as it sees the cancellation
    if (!load || load->slot != slot || load->cancelled) return;
    load->cancelled = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !copying_; });
    queued_ -= load->left;
    free_at_ns_ = std::min(free_at_ns_, now_ns());
  }

  void hold() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++held_;
    changed_.wait(lock, [this] { return !copying_; });
  }
  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    --held_;
    changed_.notify_all();
  }

  // Over all loads: bytes still to come, bytes copied so far, nanoseconds in which the link was busy, and the part of them in
  // which this thread copied.
  void state(int64_t* queued, int64_t* copied, int64_t* busy_ns, int64_t* copying_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    *queued = queued_ + on_the_way(), *copied = copied_, *busy_ns = busy_ns_, *copying_ns = copying_ns_;
  }
  // The pool may use so many bytes from now on. What is behind them can be given back when this returns.
  void expect(int64_t usable_bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    usable_bytes_ = usable_bytes, touched_ = std::min(touched_, usable_bytes);
    changed_.notify_all();
    changed_.wait(lock, [this] { return !touching_; });
  }
  // Bytes that pass the link until this slot is whole, those of the loads before it included; 0 when it is.
  int64_t ahead(int32_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t bytes = 0;
    if (current_ && !current_->cancelled) {
      bytes = current_->left + on_the_way();
      if (current_->slot == slot) return bytes;
    }
    for (const auto& load : queue_) {
      bytes += load->left;
      if (load->slot == slot) return bytes;
    }
    return 0;
  }

 private:
  static constexpr int64_t PIECE = 64 << 10;           // bytes: the longest wait of a move or a cancel
  static constexpr int64_t TOUCHED_AT_ONCE = 2 << 20;  // one huge page: a millisecond

  struct Row {
    int module, page;
    const char* from;
  };
  struct Load {
    int32_t slot;
    int64_t begun_ns;
    std::vector<Row> rows;
    int64_t left = 0;  // bytes
    bool cancelled = false;
  };

  int64_t row_bytes(int m) const { return PAGE * (pool_.in[m] + pool_.out[m]) * element_bytes_; }

  void run() {
    pthread_setname_np(pthread_self(), "motet-loader");
    prctl(PR_SET_TIMERSLACK, 1000);  // sleeps are as short as a piece takes
    while (next()) {
      Load& load = *current_;
      bool whole = true;
      for (int64_t layer = 0; whole && layer < pool_.layers; ++layer) whole = copy_layer(load, layer) && publish(load, layer + 1);
    }
  }

  bool next() {
    std::unique_lock<std::mutex> lock(mutex_);
    current_.reset();
    while (!stop_ && queue_.empty()) {
      if (touched_ < usable_bytes_)
        touch_memory(lock);
      else
        changed_.wait(lock);
    }
    if (stop_) return false;
    current_ = std::move(queue_.front());
    queue_.pop_front();
    free_at_ns_ = std::max(free_at_ns_, current_->begun_ns);  // until then the link had nothing to do
    seen_ns_ = now_ns();
    return true;
  }

  // A system that does not know this call hands out pages when they are written, as it would anyway.
  void touch_memory(std::unique_lock<std::mutex>& lock) {
    char* from = (char*)pool_.arena + touched_;
    const int64_t n = std::min(TOUCHED_AT_ONCE, usable_bytes_ - touched_);
    touched_ += n, touching_ = true;
    lock.unlock();
    madvise(from, n, MADV_POPULATE_WRITE);
    lock.lock();
    touching_ = false;
    changed_.notify_all();
  }

  bool copy_layer(Load& load, int64_t layer) {
    for (const Row& row : load.rows) {
      const int64_t bytes = row_bytes(row.module);
      for (int64_t at = 0; at < bytes; at += PIECE) {
        const int64_t n = std::min(PIECE, bytes - at);
        if (!copy_piece(load, row, layer * bytes + at, n)) return false;
      }
    }
    return true;
  }

  bool copy_piece(Load& load, const Row& row, int64_t at, int64_t n) {
    char* to;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !held_; });
      if (load.cancelled) return false;
      copying_ = true;
      to = (char*)pool_.arena + pool_.table[(load.slot * MODULES + row.module) * pool_.max_pages + row.page] * 8 * element_bytes_;
    }
    const int64_t began = now_ns();
    memcpy(to + at, row.from + at, n);
    std::lock_guard<std::mutex> lock(mutex_);
    copying_ = false;
    copying_ns_ += now_ns() - began;
    changed_.notify_all();
    load.left -= n, queued_ -= n, copied_ += n;
    free_at_ns_ += (int64_t)((double)n * ns_per_byte_);
    count_time();
    return true;
  }

  bool publish(Load& load, int64_t layers) {
    int32_t* word = pool_.loaded_layers + load.slot;
    std::unique_lock<std::mutex> lock(mutex_);
    if (on_the_way()) {
      const std::chrono::steady_clock::time_point passed{std::chrono::nanoseconds(free_at_ns_)};
      changed_.wait_until(lock, passed, [&] { return load.cancelled; });
    }
    count_time();
    if (load.cancelled) return false;
    __atomic_store_n(word, (int32_t)layers, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);  // a step may wait for this layer
    return true;
  }

  void count_time() {
    const int64_t now = now_ns();
    busy_ns_ += now - seen_ns_;
    seen_ns_ = now;
  }

  // Bytes that were copied and have not passed the link.
  int64_t on_the_way() const {
    return ns_per_byte_ > 0 ? (int64_t)((double)std::max<int64_t>(0, free_at_ns_ - now_ns()) / ns_per_byte_) : 0;
  }

  const Pool pool_;
  const int64_t element_bytes_;
  const double ns_per_byte_;
  int64_t seen_ns_ = 0;  // the thread's own

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Load>> queue_;
  std::shared_ptr<Load> current_;
  bool copying_ = false, touching_ = false, stop_ = false;
  int64_t usable_bytes_, touched_ = 0;
  int held_ = 0;
  int64_t queued_ = 0, copied_ = 0, busy_ns_ = 0, copying_ns_ = 0;
  int64_t free_at_ns_ = 0;  // when all that was copied has passed the link
  std::thread thread_;
};

}  // namespace motet
