// Packs matrices [n, k] into panels of weights: floats as they are, floats rounded to integers, and integers. See gemm.h and
// gemm_integers.h for the layouts. A panel has at most 16 `rows` of a matrix.
#pragma once
#include <vector>

#include "gemm_integers.h"

namespace motet {

// One 2- or 4-byte unit of 16 rows per line; a unit is two bf16 neighbours, one float or one f16. Rows are turned a line at a time:
// read unit by unit, 16 rows that lie a multiple of 4 KiB apart would push each other out of the first-level cache.
template <class U>
static void pack_panel(const U* from, int64_t rows, int64_t k, int64_t padded, U* to) {
  constexpr int64_t UNITS = 64 / sizeof(U);
  alignas(64) U lines[PANEL][UNITS] = {};
  for (int64_t i = 0; i < k; i += UNITS, to += UNITS * PANEL) {
    const int64_t live = std::min(UNITS, k - i);
    for (int64_t r = 0; r < rows; ++r) memcpy(lines[r], from + r * k + i, live * sizeof(U));
    for (int64_t u = 0; u < live; ++u)
      for (int64_t r = 0; r < PANEL; ++r) to[u * PANEL + r] = lines[r][u];
  }
  to -= (round_up(k, UNITS) - k) * PANEL;
  memset(to, 0, (padded - k) * PANEL * sizeof(U));
}

// Rows are rounded as rows of activations are: 127 steps to either side of zero.
template <class T>
static void pack_int8(const T* from, int64_t rows, int64_t k, uint8_t* to, float* scale) {
  thread_local std::vector<char> scratch;
  scratch.resize(std::max<size_t>(scratch.size(), rounded_stride(k)));
  if (rows < PANEL || k % 64) memset(to, I8_ZERO, panel_bytes(I8, k));
  for (int64_t r = 0; r < rows; ++r) {
    const RoundedRow row = rounded_row(scratch.data(), 0, k);
    round_row(from + r * k, k, row);
    scale[r] = *row.scale;
    for (int64_t i = 0; i < k; i += 4) {
      uint32_t four;
      memcpy(&four, row.values + i, 4);
      four ^= 0x80808080u;  // I8_ZERO added
      memcpy(to + i * 16 + r * 4, &four, 4);
    }
  }
}

// The first of a group's values that are furthest from zero becomes -8, so that all sixteen numbers are used.
template <class T>
static void pack_int4(const T* from, int64_t rows, int64_t k, uint8_t* to) {
  typedef uint8_t bytes __attribute__((vector_size(W)));
  memset(to, 0, panel_bytes(I4, k));
  for (int64_t r = 0; r < 16; ++r)
    for (int64_t group = 0; group < round_up(k, 64) / I_GROUP; ++group) {
      uint8_t* block = to + group / 2 * grouped_bytes(I4);
      const int64_t first = group * I_GROUP;
      const int live = r < rows ? (int)std::min<int64_t>(I_GROUP, std::max<int64_t>(0, k - first)) : 0;
      float values[I_GROUP] = {};
      vf most = zero();
      for (int i = 0; i < live; i += W) {
        const vf v = load_n(from + r * k + first + i, std::min(W, live - i));
        store(values + i, v);
        most = max(most, (vf)((vu)v & 0x7fffffffu));
      }
      const float size = largest(most);
      float furthest = 0;
      for (int i = 0; i < live && furthest == 0; ++i)
        if (std::fabs(values[i]) == size) furthest = values[i];
      const _Float16 scale = (_Float16)(furthest / -8.0f);
      const vf inverse = broadcast((float)scale != 0.0f ? 1.0f / (float)scale : 0.0f);
      memcpy(block + group % 2 * 32 + r * 2, &scale, 2);
      uint8_t whole[I_GROUP];
      for (int i = 0; i < I_GROUP; i += W) {
        vf v = load(values + i) * inverse;
        v = max(v, broadcast(-8.0f));
        v = v < 7.0f ? v : broadcast(7.0f);
        const bytes b = __builtin_convertvector(nearest(v) + I4_ZERO, bytes);
        memcpy(whole + i, &b, W);
      }
      uint8_t* at = block + 64 + group % 2 * 256 + r * 4;
      for (int line = 0; line < 4; ++line) {
        uint32_t low, high;
        memcpy(&low, whole + line * 8, 4);
        memcpy(&high, whole + line * 8 + 4, 4);
        low |= high << 4;
        memcpy(at + line * 64, &low, 4);
      }
    }
}

// Four bytes of a row, of which `live` exist.
INLINE uint32_t four_bytes(const uint8_t* from, int64_t live) {
  uint32_t four = 0;
  if (live >= 4)
    memcpy(&four, from, 4);
  else if (live > 0)
    memcpy(&four, from, live);
  return four;
}

// Whole numbers as a checkpoint has them: `from` [rows, k] as unsigned bytes; `scales` and `zeros` [rows, groups] are float16.
inline void pack_whole(const uint8_t* from, const uint16_t* scales, const uint16_t* zeros, int64_t type, int64_t rows, int64_t k,
                       uint8_t* to) {
  const int64_t groups = (k + I_GROUP - 1) / I_GROUP, block_bytes = grouped_bytes(type);
  if (rows < PANEL || k % 64) memset(to, type == I8 ? I8_ZERO : 0, panel_bytes(type, k));
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = from + r * k;
    uint8_t* out = to + r * 4;
    if (type == I8) {
      for (int64_t i = 0; i < k; i += 4) {
        const uint32_t four = four_bytes(row + i, k - i);
        memcpy(out + i * 16, &four, 4);
      }
      continue;
    }
    for (int64_t group = 0; group < groups; ++group) {
      uint8_t* block = to + group / 2 * block_bytes;
      memcpy(block + group % 2 * 32 + r * 2, scales + r * groups + group, 2);
      if (type != I4) memcpy(block + 64 + group % 2 * 32 + r * 2, zeros + r * groups + group, 2);
      uint8_t* at = block + (type == I4 ? 64 : 128) + group % 2 * (type == I8_GROUPED ? 512 : 256) + r * 4;
      const int64_t step = type == I8_GROUPED ? 4 : 8;
      for (int64_t i = group * I_GROUP, end = i + I_GROUP; i < end; i += step, at += 64) {
        uint32_t line = four_bytes(row + i, k - i);
        if (type != I8_GROUPED) line |= four_bytes(row + i + 4, k - i - 4) << 4;
        memcpy(at, &line, 4);
      }
    }
  }
}

}  // namespace motet
