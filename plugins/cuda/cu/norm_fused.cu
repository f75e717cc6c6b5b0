// norm_fused: layer norm with its affine part, in f32, rounded once: to the boundary's dtype, or to E4M3
// codes under the scale of whoever reads them.
#include "common.cuh"

// One row a block.
extern "C" __global__ void norm_fused_layer(const void *x, u32 x_dtype, const float *w, const float *b,
                                            float eps, void *y, u32 y_dtype, u32 width, float scale) {
  __shared__ float partial[32];
  u64 base = (u64)blockIdx.x * width;
  float sum = 0.0f;
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) sum += load_value(x, x_dtype, base + k);
  float mean = block_sum(sum, partial) / (float)width;
  float squares = 0.0f;
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
    float d = load_value(x, x_dtype, base + k) - mean;
    squares += d * d;
  }
  float norm = 1.0f / sqrtf(block_sum(squares, partial) / (float)width + eps);
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
    float v = (load_value(x, x_dtype, base + k) - mean) * norm * w[k] + b[k];
    // A code is made of what the boundary would have kept.
    if (y_dtype == E4M3) v = at_boundary(v, x_dtype);
    store_value(y, y_dtype, base + k, v, scale);
  }
}
