// Operations of a host's graph between two forms, in f32 as the host makes them: sums and products of values
// of one shape or of one that repeats, rows of a table, norms of rows, an append to a region of the state.
#include "common.cuh"

#define OPERATION_ADD 0u

// y[i] of a[i] and b[i], each repeated from its start when it is over.
extern "C" __global__ void operation_pair(const float *a, u64 a_count, const float *b, u64 b_count, float *y,
                                          u64 count, u32 kind) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float x = a[i % a_count], z = b[i % b_count];
  y[i] = kind == OPERATION_ADD ? x + z : x * z;
}

// Row `ids[row]` of a table a block; NaN where there is no such row.
extern "C" __global__ void operation_rows(const u64 *ids, const float *table, u64 rows, float *y, u32 width) {
  u64 id = ids[blockIdx.x];
  float *to = y + (u64)blockIdx.x * width;
  for (u32 k = threadIdx.x; k < width; k += blockDim.x)
    to[k] = id < rows ? table[id * width + k] : __uint_as_float(0x7fc00000u);
}

// A row a block: x / sqrt(mean(x^2) + eps), times w where there is one.
extern "C" __global__ void operation_rms_norm(const float *x, const float *w, float eps, float *y, u32 width) {
  __shared__ float partial[32];
  u64 base = (u64)blockIdx.x * width;
  float squares = 0.0f;
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) squares += x[base + k] * x[base + k];
  float norm = 1.0f / sqrtf(block_sum(squares, partial) / (float)width + eps);
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
    float v = x[base + k] * norm;
    y[base + k] = w ? v * w[k] : v;
  }
}

// x [heads, rows, width] becomes the last `rows` of the `*valid` positions of a region [heads, room, width].
// A length that does not fit writes nothing.
extern "C" __global__ void operation_append(const float *x, const u64 *valid, float *region, u64 rows, u64 width,
                                            u64 room, u64 count) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u64 end = *valid;
  if (i >= count || end < rows || end > room) return;
  u64 head = i / (rows * width), at = i % (rows * width);
  region[(head * room + end - rows) * width + at] = x[i];
}
