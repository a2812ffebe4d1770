// Where a loader writes on a device: through pinned memory, on a stream, with functions of the device's driver.
//
//   source --memcpy by some threads--> a part of the ring --copies by the device--> rows of the slot's pages | event
//                                                            after a layer's copies --> its number in loaded_layers
//
// Files belong to the page cache and cannot be pinned, so there is one pinned ring of a few parts. A part is used again when its event
// has completed; the thread looks for that from time to time and sleeps in between. The functions are pointers, so that nothing here
// needs the driver to be built or loaded. A CPU that stands in for a device has functions of its own (host_calls).
#pragma once
#include "loader.h"

// As in the header cuda.h. They return 0, or an error (CUresult). Mirrored by kernels/cpu/library.py.
struct DeviceCalls {
  int (*use)(void* context);                                                       // cuCtxSetCurrent
  int (*copy)(uint64_t to, const void* from, size_t bytes, void* stream);          // cuMemcpyHtoDAsync
  int (*write)(void* stream, uint64_t word, uint32_t value, unsigned int flags);   // cuStreamWriteValue32
  int (*create)(void** event, unsigned int flags);                                 // cuEventCreate
  int (*record)(void* event, void* stream);                                        // cuEventRecord
  int (*query)(void* event);                                                       // cuEventQuery
  int (*destroy)(void* event);                                                     // cuEventDestroy
  void* context;
  void* stream;
  uint64_t words;  // the device's address of loaded_layers
  char* ring;      // pinned: `parts` parts of `part_bytes`
  int64_t part_bytes, parts;
};

namespace motet {

class DeviceTarget final : public Target {
 public:
  // `threads` gather. The ring stays until this object is gone.
  DeviceTarget(const DeviceCalls& calls, int threads) : calls_(calls), parts_(calls.parts), team_(threads) {}

  int64_t piece_bytes() const override { return calls_.part_bytes; }
  int threads() const override { return team_.size(); }
  void begin() override {
    calls_.use(calls_.context);  // if this fails, so does everything that follows
    calls_.create(&end_, DISABLE_TIMING);
    for (Part& part : parts_) calls_.create(&part.event, DISABLE_TIMING);
  }
  void end() override {
    calls_.destroy(end_);
    for (Part& part : parts_) calls_.destroy(part.event);
  }

  int make_room() override {
    const int failed = parts_[next_].bytes ? await(parts_[next_].event) : 0;
    take_in();
    return failed;
  }
  void gather(const Piece& piece) override {
    char* const to = calls_.ring + next_ * calls_.part_bytes;
    team_.run([&](int) {
      team_.each((int64_t)piece.size(), [&](int64_t i, int64_t) { memcpy(to + piece[i].at, piece[i].from, piece[i].bytes); });
    });
  }
  int write(const Piece& piece) override {
    const char* const from = calls_.ring + next_ * calls_.part_bytes;
    for (const Span& span : piece)
      if (const int failed = calls_.copy((uint64_t)span.to, from + span.at, span.bytes, calls_.stream)) return failed;
    if (const int failed = calls_.record(parts_[next_].event, calls_.stream)) return failed;
    parts_[next_].bytes = piece.back().at + piece.back().bytes;
    next_ = (next_ + 1) % parts_.size();
    return 0;
  }
  int publish(int64_t slot, int32_t layers) override {
    constexpr unsigned AFTER_ALL_ELSE = 0;
    return calls_.write(calls_.stream, calls_.words + slot * sizeof(int32_t), layers, AFTER_ALL_ELSE);
  }
  int64_t arrived() override {
    take_in();
    return std::exchange(arrived_, 0);
  }
  int settle() override {
    if (const int failed = calls_.record(end_, calls_.stream)) return failed;
    return await(end_);
  }

 private:
  static constexpr unsigned DISABLE_TIMING = 2;
  static constexpr int NOT_READY = 600;  // CUDA_ERROR_NOT_READY
  struct Part {
    void* event = nullptr;
    int64_t bytes = 0;  // on their way
  };

  int await(void* event) const {
    constexpr timespec PAUSE{0, 20000};  // a layer takes some hundred microseconds
    int failed;
    while ((failed = calls_.query(event)) == NOT_READY) nanosleep(&PAUSE, nullptr);
    return failed;
  }
  // Frees the parts whose bytes have arrived, the oldest first.
  void take_in() {
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& part = parts_[(next_ + i) % parts_.size()];
      if (!part.bytes) continue;
      if (calls_.query(part.event) == NOT_READY) return;
      arrived_ += std::exchange(part.bytes, 0);
    }
  }

  const DeviceCalls calls_;
  std::vector<Part> parts_;
  size_t next_ = 0;
  int64_t arrived_ = 0;
  void* end_ = nullptr;
  Team team_;
};

// The functions of a device that is this machine: a stream is the thread that calls, so everything is done at once.
inline DeviceCalls host_calls() {
  DeviceCalls calls{};
  calls.use = [](void*) { return 0; };
  calls.copy = [](uint64_t to, const void* from, size_t bytes, void*) { return memcpy((void*)to, from, bytes), 0; };
  calls.write = [](void*, uint64_t word, uint32_t value, unsigned) { return announce((int32_t*)word, (int32_t)value), 0; };
  calls.create = [](void**, unsigned) { return 0; };
  calls.record = [](void*, void*) { return 0; };
  calls.query = [](void*) { return 0; };
  calls.destroy = [](void*) { return 0; };
  return calls;
}

}  // namespace motet
