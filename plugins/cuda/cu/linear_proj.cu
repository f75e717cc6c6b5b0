// linear_proj: one product, an optional bias, then nothing, the tanh GELU or a residual sum.
#include "product.cuh"

struct ProjectionEnd {
  static const bool SIXTEEN = false;
  void *y;
  const float *bias;   // null: none
  const void *residual; // null: none
  const float *scales; // one a channel, null: none
  float scale;
  u32 n, dtype, gelu;

  __device__ __forceinline__ void one(u32 row, u32 col, float sum) const {
    if (col >= n) return;
    float v = sum * (scales ? scales[col] : 1.0f) * scale;
    if (bias) v += bias[col];
    if (gelu) v = activate(v, 1);
    u64 at = (u64)row * n + col;
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

extern "C" __global__ void linear_proj_operand(const void *x, u32 x_dtype, void *out, u32 kind, u32 width,
                                               float scale) {
  operand_rows(x, x_dtype, out, kind, width, scale);
}

PRODUCTS(linear_proj, ProjectionEnd)
