// The C interface of the compiled CPU kernels. Every pointer is the caller's and stays valid for the call (Model: until
// motet_model_free). Sizes are in elements unless the name says otherwise. Mirrored by kernels/cpu/library.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace motet {
class Channel;
}

enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, I4 = 4, I4_SHIFTED = 5, I8_GROUPED = 6 };

// A packed [n, k] matrix: panels of 16 outputs, see gemm.h. `scale` [n] belongs to I8 (the other integers have scales among the
// values), `bias` [n] may be null.
struct Matrix {
  const void* data;
  const float* scale;
  const float* bias;
  int64_t n, k;
  int64_t type;
};

struct Layer {
  const float* input_norm;  // [hidden]
  const float* qk_norm;     // [heads + kv_heads, head_dim] or null
  const float* post_norm;   // [hidden]
  Matrix qkv, o, gate_up, down;
  int64_t window;  // tokens, 0 for full attention
};

// Projections in the order q, k, v, o, gate, up, down; a page is 8 ranks, its address is in lines of 8 elements.
struct Pool {
  const void* arena;
  const int64_t* table;  // [slots, 7, max_pages]
  const int32_t* pages;  // [slots, 7]
  const float* scales;   // [slots, 7, layers]
  int64_t slots, max_pages, layers;
  int64_t in[7], out[7];
  int32_t* loaded_layers;  // [slots]: layers that may be read; grows while a Loader copies, see loader.h
};

// Classes of sites of an image model, each with its own number of sites.
struct SitePool {
  const void* arena;
  const int64_t* table;  // [slots, classes, max_pages]
  const int32_t* pages;  // [slots, classes]
  const float* scales;   // [slots, classes, max_sites]
  const int64_t *in, *out;  // [classes]
  int64_t classes, max_pages, max_sites;
};

// A step's rows by adapter, in blocks; see site_lora.h.
struct SiteBatch {
  SitePool pool;
  const int32_t* order;   // rows that have adapters
  const int32_t* starts;  // [blocks + 1] where in `order` a block begins
  const int32_t* slots;   // [blocks, adapters], -1 for none
  const float* weights;   // [blocks, adapters]
  int64_t blocks, adapters, threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel of torch, or null
};

// A step's rows for the layers of another engine, see layer_lora.h. Pools of such layers have one layer each, and may have an arena
// that begins at address 0, so that `table` has addresses.
struct LayerStep {
  const int32_t* row_slot;  // [rows], -1 for the base alone
  int64_t rows, threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel of the engine's OpenMP, or null
};

struct Model {
  int64_t type;  // of embed and adapters: F32, BF16 or F16
  int64_t hidden, heads, kv_heads, head_dim, mlp, vocab, layers;
  float eps;
  const void* embed;  // [vocab, hidden], row-major
  const float* norm;  // [hidden]
  Matrix lm_head;
  const Layer* layer;  // [layers]
  void* kv;            // [layers, blocks], see kv.h
  int64_t kv_type;     // `type` or I8
  int64_t blocks, block_size;
  Pool pool;
};

// An adapter that is not whole on the device when a step begins; see assist.h.
struct Loading {
  Pool host;          // of one slot: its pages follow each other in host memory
  int64_t device, inode, data_start, file_bytes;  // its file, and where in it the arena begins
  int32_t fd;         // -1: other processes cannot map it
  int32_t slot;
  int64_t layerwise;  // 1: wait for the copy, layer by layer
};

struct Assist {
  const Loading* loading;  // [count]
  int64_t count;
  motet::Channel* const* channel;  // [channels], some may have failed
  int64_t channels;
  // nanoseconds that a process takes to read one element of an adapter's pages of a layer, and to compute with it for a row; and
  // nanoseconds that the base takes for that layer, 0 for unknown: then one process takes all rows of an adapter
  double read_ns, row_ns, layer_ns;
  int64_t watchdog_ns, layer_wait_ns;
  // counters that the step adds to: rows times layers of these adapters by place of computation, rows of failed requests,
  // time waited for copies, and layers that did not arrive in that time
  int64_t by_processes, on_device, in_place, repaired, layer_waited_ns, layers_late;
};

struct Step {
  int64_t rows, seqs, logits, table_stride;
  const int64_t* token_ids;     // [rows]
  const int64_t* positions;     // [rows]
  const int32_t* row_slot;      // [rows], -1 for the base alone
  const int32_t* seq_starts;    // [seqs + 1]
  const int32_t* context_lens;  // [seqs]
  const int32_t* block_tables;  // [seqs, table_stride]
  const int64_t* kv_slots;      // [rows]
  const int64_t* logit_rows;    // [logits]
  const float* cos;             // [positions.max() + 1, head_dim / 2]
  const float* sin;
  float* out;  // [logits, vocab]
  Assist* assist;  // null when every adapter that a row names is whole on the device
};
