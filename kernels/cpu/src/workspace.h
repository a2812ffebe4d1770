// Memory that a step needs and the next one finds again: grown to the largest step so far, never shrunk.
#pragma once
#include <sys/mman.h>

#include <cstdlib>

#include "attention.h"
#include "lora.h"

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }
  void reserve(int64_t bytes) {
    if (bytes <= capacity_) return;
    free(data_);
    capacity_ = (bytes + (bytes >> 2) + 4095) / 4096 * 4096;
    data_ = aligned_alloc(4096, capacity_);
    if (!data_) abort();
    memset(data_, 0, capacity_);
  }
  template <class T>
  T* data() const {
    return (T*)data_;
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

namespace motet {

struct Workspace {
  Buffer x, y, h, s, scratch;
  int64_t scratch_each = 0;  // floats of one thread
  LoraPlan lora;
  std::vector<AttentionItem> attention;
};

}  // namespace motet
