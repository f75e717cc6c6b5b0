// qkv_pack: up to eight sibling products of one input, packed one after the other, each stored to its own
// output with its own bias.
#include "product.cuh"

#define MOST 8

struct PackEnd {
  static const bool SIXTEEN = false;
  void *y[MOST];
  u32 first[MOST + 1]; // first column of each sibling; the unused ones begin at N
  const float *bias;   // of the whole pack, zeros where a sibling has none; null: none
  const float *scales; // one a channel, null: none
  float scale;
  u32 dtype;

  __device__ __forceinline__ void one(u32 row, u32 col, float sum) const {
    if (col >= first[MOST]) return;
    float v = sum * (scales ? scales[col] : 1.0f) * scale;
    if (bias) v += bias[col];
    // Constant indices keep the table in parameters.
    void *out = y[0];
    u32 begin = 0, end = first[1];
#pragma unroll
    for (int i = 1; i < MOST; ++i)
      if (col >= first[i]) {
        out = y[i];
        begin = first[i];
        end = first[i + 1];
      }
    store_value(out, dtype, (u64)row * (end - begin) + (col - begin), v, 1.0f);
  }
  __device__ __forceinline__ void operator()(u32 row, u32 col, float a, float b, float c, float d) const {
    one(row, col, a);
    one(row, col + 1, b);
    one(row, col + 8, c);
    one(row, col + 9, d);
  }
};

extern "C" __global__ void qkv_pack_operand(const void *x, u32 x_dtype, void *out, u32 kind, u32 width,
                                            float scale) {
  operand_rows(x, x_dtype, out, kind, width, scale);
}

PRODUCTS(qkv_pack, PackEnd)
