// The whole library in one translation unit, compiled into one shared library per instruction set. With several units the linker
// would merge inline functions of the standard library that were compiled for different instruction sets. This file has the entry
// points, memory and packing. The interface is plain C; no exception crosses it.
#include "motet_cpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "assist_server.h"
#include "device_target.h"
#include "forward.h"
#include "layer_lora.h"
#include "merge.h"
#include "packing.h"
#include "probes.h"
#include "site_lora.h"
#include "team.h"

using namespace motet;

// The caller's handle: a team of threads and the memory that its steps use.
struct Engine {
  Team team;
  Workspace workspace;
  explicit Engine(int threads) : team(threads) {}
};

#define BY_TYPE(type, call)            \
  switch (type) {                      \
    case BF16: {                       \
      typedef bf16 T;                  \
      call;                            \
      break;                           \
    }                                  \
    case F16: {                        \
      typedef f16 T;                   \
      call;                            \
      break;                           \
    }                                  \
    default: {                         \
      typedef float T;                 \
      call;                            \
    }                                  \
  }

template <class Wt>
static void merge_by_type(const Pool& adapter, int64_t type, int64_t layer, int group, const Matrix& from, void* to, int64_t first,
                          int64_t count, Team& team) {
  BY_TYPE(type, (run_merge<Wt, T>(adapter, layer, group, from, to, first, count, team)))
}

// Asks the system for the registers of the instruction set. False when it refuses.
static bool may_compute() {
#if MOTET_LEVEL >= 4
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // AMX: 8 KiB of state, on request
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return true;
#endif
}

#pragma GCC visibility push(default)
extern "C" {

// Null when the operating system refuses the instruction set's registers.
Engine* motet_engine_new(int threads) { return may_compute() ? new Engine(threads) : nullptr; }
void motet_engine_free(Engine* engine) { delete engine; }

// Zeroed memory in huge pages where the system has them.
void* motet_alloc(int64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}
void motet_release(void* p, int64_t bytes) { munmap(p, bytes); }

int64_t motet_packed_bytes(int64_t n, int64_t k, int64_t type) { return (n + PANEL - 1) / PANEL * panel_bytes(type, k); }

// `from` [n, k] of `from_type` into `to` of `type`; the types differ only for I8, which also fills `scale` [n], and I4.
void motet_pack(Engine* engine, const void* from, int64_t from_type, int64_t n, int64_t k, int64_t type, void* to, float* scale) {
  const int64_t padded = (k + 31) / 32 * 32, panel = motet_packed_bytes(16, k, type);
  engine->team.run([=](int) {
    engine->team.each((n + 15) / 16, [=](int64_t p, int64_t) {
      const int64_t rows = std::min<int64_t>(16, n - p * 16), at = p * 16 * k;
      char* out = (char*)to + p * panel;
      const char* values = (const char*)from + at * (from_type == F32 ? 4 : 2);
      if (type == I8)
        BY_TYPE(from_type, pack_int8((const T*)values, rows, k, (uint8_t*)out, scale + p * 16))
      else if (type == I4)
        BY_TYPE(from_type, pack_int4((const T*)values, rows, k, (uint8_t*)out))
      else if (type == F32)
        pack_panel((const uint32_t*)from + at, rows, k, padded, (uint32_t*)out);
      else if (type == F16)
        pack_panel((const uint16_t*)from + at, rows, k, padded, (uint16_t*)out);
      else if (k % 2 == 0)
        pack_panel((const uint32_t*)((const uint16_t*)from + at), rows, k / 2, padded / 2, (uint32_t*)out);
      else {
        memset(out, 0, panel);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < k; ++i) ((uint16_t*)out)[i / 2 * 32 + r * 2 + i % 2] = ((const uint16_t*)from)[at + r * k + i];
      }
    });
  });
}

// `from` [n, k], integers in bytes, into `to` of `type`; `scales` and `zeros` are float16 [n, k / 32 rounded up], which I8 has none
// of, and I4 no zeros.
void motet_pack_whole(Engine* engine, const uint8_t* from, const uint16_t* scales, const uint16_t* zeros, int64_t n, int64_t k,
                      int64_t type, void* to) {
  const int64_t panel = motet_packed_bytes(16, k, type), groups = (k + I_GROUP - 1) / I_GROUP;
  engine->team.run([=](int) {
    engine->team.each((n + 15) / 16, [=](int64_t p, int64_t) {
      const int64_t at = p * 16 * groups;
      pack_whole(from + p * 16 * k, scales ? scales + at : nullptr, zeros ? zeros + at : nullptr, type,
                 std::min<int64_t>(16, n - p * 16), k, (uint8_t*)to + p * panel);
    });
  });
}

// Panels [first, first + count) of `to` = `from` with the adapter merged, a pool of one slot and of the type `adapter_type`.
void motet_merge(Engine* engine, const Pool* adapter, int64_t adapter_type, int64_t layer, int64_t group, const Matrix* from,
                 void* to, int64_t first, int64_t count) {
  switch (from->type) {
    case BF16: return merge_by_type<bf16>(*adapter, adapter_type, layer, (int)group, *from, to, first, count, engine->team);
    case F16: return merge_by_type<f16>(*adapter, adapter_type, layer, (int)group, *from, to, first, count, engine->team);
    default: return merge_by_type<float>(*adapter, adapter_type, layer, (int)group, *from, to, first, count, engine->team);
  }
}

void motet_forward(Engine* engine, const Model* model, const Step* step) {
  BY_TYPE(model->type, run_forward<T>(*model, *step, engine->workspace, engine->team))
}
// y (+)= x w^T for each of `count` matrices of one shape; more than one is for measuring.
void motet_gemm(Engine* engine, int64_t type, const Matrix* w, int64_t count, const float* x, int64_t rows, float* y, int64_t ldy,
                int64_t add) {
  BY_TYPE(type, run_gemm<T>(w, count, x, rows, y, ldy, add != 0, engine->workspace, engine->team))
}
// `which`: 1 shrink, 2 expand, 3 both; layers [layer, layer + layers) one after the other.
void motet_lora(Engine* engine, int64_t type, const Pool* pool, const int32_t* row_slot, int64_t rows, int64_t layer, int64_t layers,
                int64_t group, int64_t groups, const float* x, float* y, int64_t which) {
  BY_TYPE(type, run_lora<T>(*pool, row_slot, rows, layer, layers, (int)group, (int)groups, x, y, which, engine->workspace, engine->team))
}
// One class at one of its sites; x [rows, in] and y [rows, out].
void motet_site_lora(const SiteBatch* batch, int64_t type, int64_t group, int64_t site, const float* x, float* y) {
  BY_TYPE(type, run_site_lora<T>(*batch, group, site, x, y))
}
// The projections of one group of a layer, `x` rows of `in` and `y` rows of all outputs of the group, `ldx` and `ldy` apart.
void motet_layer_lora(const Pool* pool, const LayerStep* step, int64_t type, int64_t group, const void* x, int64_t ldx, void* y,
                      int64_t ldy) {
  BY_TYPE(type, run_layer_lora<T>(*pool, *step, (int)group, x, ldx, y, ldy))
}
// `kv_type`: that of the cache of one layer, a Model's `type` or I8.
void motet_attention(Engine* engine, int64_t kv_type, const Step* step, const float* qkv, void* kv, int64_t layers, int64_t layer_bytes,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, float* out) {
  const auto run = [&](auto element) {
    run_attention<decltype(element)>(*step, qkv, kv, layers, layer_bytes, heads, kv_heads, head_dim, block_size, window, out,
                                     engine->workspace, engine->team);
  };
  if (kv_type == I8) return run(int8_t());
  BY_TYPE(kv_type, run(T()))
}

Loader* motet_loader_new(const Pool* pool, int64_t usable_bytes, int64_t element_bytes, double bytes_per_s) {
  return new Loader(*pool, std::make_unique<HostTarget>(pool->loaded_layers), usable_bytes, element_bytes, bytes_per_s);
}
// The pool's arena is the device's.
Loader* motet_loader_on_device(const Pool* pool, const DeviceCalls* calls, int64_t element_bytes, double bytes_per_s, int64_t threads) {
  return new Loader(*pool, std::make_unique<DeviceTarget>(*calls, (int)threads), 0, element_bytes, bytes_per_s);
}
void motet_loader_free(Loader* loader) { delete loader; }
void motet_loader_begin(Loader* loader, int64_t slot, const Pool* from) { loader->begin((int32_t)slot, *from); }
void motet_loader_cancel(Loader* loader, int64_t slot) { loader->cancel((int32_t)slot); }
void motet_loader_expect(Loader* loader, int64_t usable_bytes) { loader->expect(usable_bytes); }
void motet_loader_hold(Loader* loader) { loader->hold(); }
void motet_loader_release(Loader* loader) { loader->release(); }
void motet_loader_state(Loader* loader, int64_t* to) { loader->state(to, to + 1, to + 2, to + 3); }
int64_t motet_loader_ahead(Loader* loader, int64_t slot) { return loader->ahead((int32_t)slot); }
void motet_loader_give_up(Loader* loader, int64_t slot) { loader->give_up((int32_t)slot); }
int64_t motet_loader_failure(Loader* loader, int64_t slot) { return loader->failure((int32_t)slot); }
void motet_loader_mended(Loader* loader, int64_t slot) { loader->mended((int32_t)slot); }
// Functions of a device that is this machine.
void motet_host_calls(DeviceCalls* to) { *to = host_calls(); }

int64_t motet_channel_bytes(const Pool* pool, int64_t max_rows) {
  ChannelHeader header;
  return channel_layout(header, *pool, max_rows);
}
// Makes a channel in zeroed memory of that size. `sequence` is its first number.
void motet_channel_init(void* memory, const Pool* pool, int64_t max_rows, int64_t type, int64_t base_pid, uint32_t sequence) {
  ChannelHeader* header = new (memory) ChannelHeader();
  channel_layout(*header, *pool, max_rows);
  header->type = type, header->base_pid = (int32_t)base_pid;
  header->request.sequence.store(sequence);
  header->done.sequence.store(sequence);
}
Channel* motet_channel_new(void* memory) { return new Channel((ChannelHeader*)memory); }
void motet_channel_free(Channel* channel) { delete channel; }
int64_t motet_channel_ready(Channel* channel) { return channel->h.ready.load(); }
int64_t motet_channel_state(Channel* channel) { return channel->state(); }
void motet_channel_fail(Channel* channel, int64_t why) { channel->fail((int)why); }
void motet_channel_stop(Channel* channel) { channel->stop(); }
void motet_channel_counters(Channel* channel, int64_t* to) {
  for (const auto* one : {&channel->requests, &channel->elements, &channel->work, &channel->busy_ns, &channel->answered_ns}) *to++ = one->load();
}
// What a process computes for x [rows, in] of one adapter, in two halves; 0 when the channel has failed. For measurements.
void motet_channel_start(Channel* channel, const Loading* loading, const float* x, int64_t rows, int64_t layer, int64_t group,
                         int64_t bound_ns) {
  BY_TYPE(channel->h.type, start_call<T>(*channel, *loading, x, rows, layer, (int)group, bound_ns))
}
int64_t motet_channel_finish(Channel* channel, float* y) {
  bool good = false;
  BY_TYPE(channel->h.type, good = finish_call<T>(*channel, y))
  return good;
}
// For a base that is a device: addresses of request.{sequence, layer, group, slices}, done.{sequence, failures}.
void motet_channel_words(Channel* channel, int64_t* to) {
  ChannelHeader& h = channel->h;
  for (const void* one : {(void*)&h.request.sequence, (void*)&h.request.layer, (void*)&h.request.group, (void*)&h.request.slices,
                          (void*)&h.done.sequence, (void*)&h.done.failures})
    *to++ = (int64_t)one;
}
// Rows of x and y of a group: {address of x, elements from row to row, address of y, likewise, their type}.
void motet_channel_rows(Channel* channel, int64_t group, int64_t* to) {
  BY_TYPE(channel->h.type, describe_rows<T>(channel->h, (int)group, to))
}
void motet_channel_listen(Channel* channel, int64_t on) { channel->listen(on != 0); }
void motet_channel_release(Channel* channel) { channel->release(); }
void motet_channel_account(Channel* channel, int64_t requests, int64_t elements, int64_t work) {
  channel->account(requests, elements, work);
}
int64_t motet_assist_divide(Assist* assist, const int32_t* row_slot, int64_t rows, int32_t* slices, int32_t* sliced) {
  Step step{};
  step.rows = rows, step.row_slot = row_slot;
  return AssistStep().division(assist, step, slices, sliced);
}
// The operations of a stream when the caller is the stream: a thread that sees the value sees all that was written before it.
// Numbers may wrap.
void motet_word_write(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
void motet_word_wait(const uint32_t* word, uint32_t value) {
  const int64_t began = now_ns();
  while ((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) {
    cpu_relax();
    if (now_ns() - began > SPIN_NS) sched_yield();
  }
}

// The process's side; returns when the base says so or is gone. `parent_pid` 0: in a thread of the base.
void motet_assist_serve(void* memory, int64_t parent_pid) {
  ChannelHeader* header = (ChannelHeader*)memory;
  if (!may_compute()) return;
  BY_TYPE(header->type, AssistServer<T>(*header, (int)parent_pid).serve())
}

double motet_peak_flops(Engine* engine, int64_t type) {
  return type == BF16 ? peak_of<bf16>(engine->team) : peak_of<float>(engine->team);
}
double motet_read_bandwidth(Engine* engine, const void* data, int64_t bytes) { return bandwidth_of(data, bytes, engine->team); }
}
#pragma GCC visibility pop
