// Copies adapters into the device's pool beside the steps: layer by layer, at the pace of a link.
//
//   engine's thread    begin(slot, from)   cancel(slot)   hold() and release() around the moving of a page
//   loader's thread    loads in order of begin; of a load all rows of layer 0, then loaded_layers[slot] = 1, then layer 1, ..
//   target             where it writes: memory of this machine (HostTarget), or of a device (device_target.h)
//
// Rules:
// - a thread may read layer l of a slot after it has read loaded_layers[slot] > l with acquire; a stream after it has waited for it.
// - with an emulated link a layer counts as loaded when its last byte would have passed the link: the thread copies a layer at full
//   speed and then sleeps until that time. Remaining bytes are counted on the link.
// - writing a piece and moving a page exclude each other; every piece looks up its pages in the table again.
// - when cancel returns, no piece of that load is being written, and none will be, nor its number. The source is not read any more.
// - a load that fails counts as whole, so that no stream waits for it; `failure` says that it must be copied in another way.
// - while there is nothing to load, the thread touches the memory that the pool may use, because fresh pages would take three
//   quarters of a copy's time. Memory beyond it belongs to the KV cache: when expect returns, none of that is being touched.
#pragma once
#include <sys/mman.h>
#include <sys/prctl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "lora.h"

#ifndef MADV_POPULATE_WRITE  // headers older than Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace motet {

// Bytes of one page and layer on their way.
struct Span {
  const char* from;
  char* to;             // known when the piece is written
  int64_t bytes, at;    // `at`: bytes of the piece before these
  int64_t page, inner;  // index of the page in the pool's table, and where in the page
};
using Piece = std::vector<Span>;

// Where a loader writes. Only the loader's thread calls it. Functions return 0, or the error of a driver (> 0).
struct Target {
  virtual ~Target() = default;
  virtual int64_t piece_bytes() const = 0;  // the most that it takes at once
  virtual int threads() const { return 1; }               // that gather
  virtual void begin() {}                                 // before anything else
  virtual void end() {}                                   // after everything else
  virtual int make_room() { return 0; }                   // waits until it can gather a piece
  virtual void gather(const Piece&) {}                    // reads the source; pages may move meanwhile
  virtual int write(const Piece&) = 0;                    // to where pages are now
  virtual int publish(int64_t slot, int32_t layers) = 0;  // after all that was written before
  virtual int64_t arrived() = 0;                          // bytes that have arrived since the last call
  virtual int settle() { return 0; }                      // waits until everything has arrived and is published
};

// Makes a number visible to threads that spin or sleep until it changes.
inline void announce(int32_t* word, int32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

class HostTarget final : public Target {
 public:
  explicit HostTarget(int32_t* loaded_layers) : loaded_layers_(loaded_layers) {}
  int64_t piece_bytes() const override { return 64 << 10; }  // the longest wait of a move or a cancel
  int write(const Piece& piece) override {
    for (const Span& span : piece) memcpy(span.to, span.from, span.bytes), arrived_ += span.bytes;
    return 0;
  }
  int publish(int64_t slot, int32_t layers) override {
    announce(loaded_layers_ + slot, layers);
    return 0;
  }
  int64_t arrived() override { return std::exchange(arrived_, 0); }

 private:
  int32_t* const loaded_layers_;
  int64_t arrived_ = 0;
};

class Loader {
 public:
  static constexpr int GIVEN_UP = -1;  // a failure, beside the errors of a driver

  // `bytes_per_s` 0: as fast as the target is. The arena begins with a page of memory; its first `usable_bytes` are the pool's and may
  // be touched.
  Loader(const Pool& pool, std::unique_ptr<Target> target, int64_t usable_bytes, int64_t element_bytes, double bytes_per_s)
      : pool_(pool), target_(std::move(target)), element_bytes_(element_bytes), ns_per_byte_(bytes_per_s > 0 ? 1e9 / bytes_per_s : 0),
        usable_bytes_(usable_bytes) {
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
    queue_.push_back(std::move(load));
    changed_.notify_all();
  }

  void cancel(int32_t slot) {
    std::unique_lock<std::mutex> lock(mutex_);
    failures_.erase(slot);
    if (const std::shared_ptr<Load> load = stop(slot)) {
      changed_.wait(lock, [&] { return current_ != load; });
      free_at_ns_ = std::min(free_at_ns_, now_ns());
    }
  }

  // Ends the load of this slot as a failed one, if there is one. Any thread may call it. It returns when nothing more is written.
  void give_up(int32_t slot) {
    constexpr auto AGAIN = std::chrono::milliseconds(10);  // what a stream does late may write a smaller number
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<Load> load = stop(slot);
    if (!load) return;
    failures_[slot] = GIVEN_UP;
    do announce(pool_.loaded_layers + slot, (int32_t)pool_.layers);
    while (!changed_.wait_for(lock, AGAIN, [&] { return current_ != load; }));
    announce(pool_.loaded_layers + slot, (int32_t)pool_.layers);
  }

  // Why the load of this slot failed; 0 if it did not.
  int failure(int32_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = failures_.find(slot);
    return at == failures_.end() ? 0 : at->second;
  }
  // It has been copied in another way.
  void mended(int32_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_.erase(slot);
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
  // which threads of this machine copied.
  void state(int64_t* queued, int64_t* copied, int64_t* busy_ns, int64_t* copying_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    *queued = on_the_way(), *copied = copied_, *busy_ns = busy_ns_, *copying_ns = copying_ns_;
    for (const Load* load : unfinished()) *queued += load->left;
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
    int64_t bytes = on_the_way();
    for (const Load* load : unfinished()) {
      bytes += load->left;
      if (load->slot == slot) return bytes;
    }
    return 0;
  }

 private:
  static constexpr int CANCELLED = -1;                 // beside the errors of a driver
  static constexpr int64_t TOUCHED_AT_ONCE = 2 << 20;  // one huge page: a millisecond

  struct Row {
    int module, page;
    const char* from;
  };
  struct Load {
    int32_t slot;
    int64_t begun_ns;
    std::vector<Row> rows;
    int64_t left = 0;  // bytes that have not arrived
    bool cancelled = false;
  };

  int64_t row_bytes(int m) const { return PAGE * (pool_.in[m] + pool_.out[m]) * element_bytes_; }

  // Under the lock: in order, without what was cancelled.
  std::vector<const Load*> unfinished() const {
    std::vector<const Load*> found;
    if (current_ && !current_->cancelled) found.push_back(current_.get());
    for (const auto& load : queue_) found.push_back(load.get());
    return found;
  }

  // Under the lock: takes the slot's load out of the queue, or lets the thread leave it. Null if there is none.
  std::shared_ptr<Load> stop(int32_t slot) {
    for (auto at = queue_.begin(); at != queue_.end(); ++at)
      if ((*at)->slot == slot) {
        const std::shared_ptr<Load> load = *at;
        queue_.erase(at);
        return load;
      }
    if (!current_ || current_->slot != slot || current_->cancelled) return nullptr;
    current_->cancelled = true;
    changed_.notify_all();
    return current_;
  }

  void run() {
    pthread_setname_np(pthread_self(), "motet-loader");
    prctl(PR_SET_TIMERSLACK, 1000);  // sleeps are as short as a piece takes
    target_->begin();
    while (next()) {
      Load& load = *current_;
      int failed = 0;
      for (int64_t layer = 0; !failed && layer < pool_.layers; ++layer) {
        failed = copy_layer(load, layer);
        if (!failed) failed = publish(load, layer + 1);
      }
      leave(load, failed);
    }
    target_->end();
  }

  bool next() {
    std::unique_lock<std::mutex> lock(mutex_);
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

  int copy_layer(Load& load, int64_t layer) {
    const int64_t most = target_->piece_bytes();
    int64_t bytes = 0;  // of the piece
    piece_.clear();
    for (const Row& row : load.rows) {
      const int64_t all = row_bytes(row.module), page = (load.slot * MODULES + row.module) * pool_.max_pages + row.page;
      for (int64_t at = 0, n; at < all; at += n) {
        n = std::min(most - bytes, all - at);
        piece_.push_back({row.from + layer * all + at, nullptr, n, bytes, page, layer * all + at});
        if ((bytes += n) < most) continue;
        if (const int failed = copy_piece(load)) return failed;
        piece_.clear(), bytes = 0;
      }
    }
    return bytes ? copy_piece(load) : 0;
  }

  int copy_piece(Load& load) {
    if (const int failed = target_->make_room()) return failed;
    const int64_t began = now_ns();
    target_->gather(piece_);
    const int64_t gathered = now_ns();
    if (!may_write(load, true)) return CANCELLED;
    const int64_t held = now_ns();
    const int failed = target_->write(piece_);
    written(load, (gathered - began) * target_->threads() + now_ns() - held);
    return failed;
  }

  // Whether the load goes on. Then it is being written until `written`.
  bool may_write(Load& load, bool pages) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (pages) changed_.wait(lock, [&] { return !held_ || load.cancelled; });
    if (load.cancelled) return false;
    copying_ = true;
    if (pages)
      for (Span& span : piece_) span.to = (char*)pool_.arena + pool_.table[span.page] * 8 * element_bytes_ + span.inner;
    return true;
  }
  void written(Load& load, int64_t copying_ns) {
    const int64_t arrived = target_->arrived();
    std::lock_guard<std::mutex> lock(mutex_);
    copying_ = false, copying_ns_ += copying_ns;
    changed_.notify_all();
    count(load, arrived);
  }

  int publish(Load& load, int64_t layers) {
    if (ns_per_byte_ > 0) {
      if (const int failed = target_->settle()) return failed;
      const int64_t arrived = target_->arrived();
      std::unique_lock<std::mutex> lock(mutex_);
      count(load, arrived);
      if (on_the_way()) {
        const std::chrono::steady_clock::time_point passed{std::chrono::nanoseconds(free_at_ns_)};
        changed_.wait_until(lock, passed, [&] { return load.cancelled; });
        count(load, 0);
      }
    }
    if (!may_write(load, false)) return CANCELLED;
    const int failed = target_->publish(load.slot, (int32_t)layers);
    written(load, 0);
    return failed;
  }

  // Ends the load. Nothing more of it is read or written then.
  void leave(Load& load, int failed) {
    const int late = target_->settle();
    const int64_t arrived = target_->arrived();
    std::lock_guard<std::mutex> lock(mutex_);
    count(load, arrived);
    failed = failed ? failed : late;
    if (failed > 0 && !load.cancelled) {
      load.cancelled = true, failures_[load.slot] = failed;
      announce(pool_.loaded_layers + load.slot, (int32_t)pool_.layers);
    }
    current_.reset();
    changed_.notify_all();
  }

  // Under the lock.
  void count(Load& load, int64_t arrived) {
    load.left -= arrived, copied_ += arrived;
    free_at_ns_ += (int64_t)((double)arrived * ns_per_byte_);
    const int64_t now = now_ns();
    busy_ns_ += now - seen_ns_;
    seen_ns_ = now;
  }

  // Bytes that were copied and have not passed the link.
  int64_t on_the_way() const {
    return ns_per_byte_ > 0 ? (int64_t)((double)std::max<int64_t>(0, free_at_ns_ - now_ns()) / ns_per_byte_) : 0;
  }

  const Pool pool_;
  const std::unique_ptr<Target> target_;
  const int64_t element_bytes_;
  const double ns_per_byte_;
  Piece piece_;          // the thread's own
  int64_t seen_ns_ = 0;  // likewise

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Load>> queue_;
  std::shared_ptr<Load> current_;    // until nothing of it is on its way
  std::map<int32_t, int> failures_;  // by slot
  bool copying_ = false, touching_ = false, stop_ = false;
  int64_t usable_bytes_, touched_ = 0;
  int held_ = 0;
  int64_t copied_ = 0, busy_ns_ = 0, copying_ns_ = 0;
  int64_t free_at_ns_ = 0;  // when all that was copied has passed the link
  std::thread thread_;
};

}  // namespace motet
