// decoder_ffn: RMS norm with optional modulation, gate and up as one product, activation times up as the
// operand of down, down, optional gating, residual.
//
// Gate and up are packed by eights: channels 16 i .. 16 i + 7 are gate's, the next eight up's, so that both
// sums of a hidden channel meet in one thread.
#include "product.cuh"

extern "C" __global__ void decoder_ffn_operand(const void *x, u32 x_dtype, void *out, u32 kind, u32 width,
                                               float scale) {
  operand_rows(x, x_dtype, out, kind, width, scale);
}

// `w` has the offset in it. `mod_scale` and `mod_shift` are null where nothing modulates. The normed row
// is rounded as the boundary rounds it, then once more into the operand's format.
extern "C" __global__ void decoder_ffn_norm(const void *x, u32 dtype, const float *w, float eps,
                                            const void *mod_scale, const void *mod_shift, void *out,
                                            u32 kind, u32 width, float scale) {
  __shared__ float partial[32];
  u32 row = blockIdx.x;
  u64 base = (u64)row * width;
  float squares = 0.0f;
  if (by_eights(x, out, kind, width)) {
    for (u32 k = threadIdx.x * 8; k < width; k += blockDim.x * 8) {
      float v[8];
      load_eight(x, dtype, base + k, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
    }
  } else {
    for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
      float v = load_value(x, dtype, base + k);
      squares += v * v;
    }
  }
  float norm = 1.0f / sqrtf(block_sum(squares, partial) / (float)width + eps);
  if (by_eights(x, out, kind, width) && !mod_scale && !mod_shift) {
    const float reciprocal = 1.0f / scale;
    for (u32 k = threadIdx.x * 8; k < width; k += blockDim.x * 8) {
      float v[8], by[8];
      load_eight(x, dtype, base + k, v);
      load_eight(w, F32, k, by);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = at_boundary(v[i] * norm * by[i], dtype);
      store_eight(out, kind, base + k, v, scale, reciprocal);
    }
    return;
  }
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
    float v = load_value(x, dtype, base + k) * norm * w[k];
    if (mod_scale) v *= 1.0f + load_value(mod_scale, dtype, base + k);
    if (mod_shift) v += load_value(mod_shift, dtype, base + k);
    operand_store(out, kind, row, k, width, at_boundary(v, dtype), scale);
  }
}

struct HiddenEnd {
  static const bool SIXTEEN = true;
  void *hidden;        // the operand of down
  const float *scales; // one a packed channel, null: none
  float scale;         // of the sums
  float hidden_scale;  // of the codes of hidden
  u32 f, kind, dtype, activation;

  __device__ __forceinline__ void one(u32 row, u32 col, float g, float u) const {
    u32 channel = col / 16 * 8 + col % 8;
    if (channel >= f) return;
    float gs = scales ? scales[col] : 1.0f, us = scales ? scales[col + 8] : 1.0f;
    float gate = at_boundary(g * gs * scale, dtype);
    float up = at_boundary(u * us * scale, dtype);
    float v = at_boundary(at_boundary(activate(gate, activation), dtype) * up, dtype);
    operand_store(hidden, kind, row, channel, f, v, hidden_scale);
  }
  __device__ __forceinline__ void operator()(u32 row, u32 col, float g0, float g1, float u0, float u1) const {
    one(row, col, g0, u0);
    one(row, col + 1, g1, u1);
  }
  // Eight hidden channels.
  __device__ __forceinline__ void sixteen(u32 row, u32 col, const float (&g)[8], const float (&u)[8]) const {
    if (scales || kind == AS_PLANES || dtype == F32) {
      for (u32 i = 0; i < 8; ++i) one(row, col + i, g[i], u[i]);
      return;
    }
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float gate = at_boundary(g[i] * scale, dtype), up = at_boundary(u[i] * scale, dtype);
      v[i] = at_boundary(at_boundary(activate_roughly(gate, activation), dtype) * up, dtype);
    }
    store_eight(hidden, kind, (u64)row * f + col / 2, v, hidden_scale, 1.0f / hidden_scale);
  }
};

struct DownEnd {
  static const bool SIXTEEN = false;
  void *y;
  const void *gate;     // cond_gate, null: none
  const void *residual; // null: none
  const float *scales;  // one a channel, null: none
  float scale;
  u32 n, dtype;

  __device__ __forceinline__ void one(u32 row, u32 col, float sum) const {
    if (col >= n) return;
    u64 at = (u64)row * n + col;
    float v = at_boundary(sum * (scales ? scales[col] : 1.0f) * scale, dtype);
    if (gate) v = at_boundary(v * load_value(gate, dtype, at), dtype);
    if (residual) v += load_value(residual, dtype, at);
    store_value(y, dtype, at, v, 1.0f);
  }
  __device__ __forceinline__ void operator()(u32 row, u32 col, float a, float b, float c, float d) const {
    one(row, col, a);
    one(row, col + 1, b);
    one(row, col + 8, c);
    one(row, col + 9, d);
  }
};

PRODUCTS(decoder_ffn_hidden, HiddenEnd)
PRODUCTS(decoder_ffn_down, DownEnd)
