// A buffer that is kept from step to step. It grows to the largest size needed so far and never shrinks.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }
  void reserve(int64_t bytes) {
    if (bytes <= capacity_) return;
    free(data_);
    const int64_t page = bytes < HUGE / 32 ? 4096 : HUGE;
    capacity_ = (bytes + (bytes >> 2) + page - 1) / page * page;
    data_ = aligned_alloc(page, capacity_);
    if (!data_) abort();
    if (page == HUGE) madvise(data_, capacity_, MADV_HUGEPAGE);
    memset(data_, 0, capacity_);
  }
  template <class T>
  T* data() const {
    return (T*)data_;
  }

 private:
  static constexpr int64_t HUGE = 2 << 20;  // a page of its own saves most address translations
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};
