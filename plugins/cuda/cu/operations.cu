// Operations of a host's graph between two forms, in f32 as the host makes them: sums and products of values
// of one shape or of one that repeats, rows of a table, norms of rows, an append to a region of the state, elements in
// another order, and the choice of the next token.
#include "common.cuh"

#define OPERATION_ADD 0u

// What is left of `left` divided by `by`, which becomes the quotient. Dividing 64 bits is a subroutine, so 32 do where all
// of `count` elements are counted in as many.
__device__ __forceinline__ u64 rest_of(u64 &left, u64 by, u64 count) {
  if (count >> 32) {
    u64 rest = left % by;
    left /= by;
    return rest;
  }
  u32 low = (u32)left, quotient = low / (u32)by, rest = low - quotient * (u32)by;
  left = quotient;
  return rest;
}

// y[i] of a[i] and b[i], each repeated from its start when it is over.
extern "C" __global__ void operation_pair(const float *a, u64 a_count, const float *b, u64 b_count, float *y,
                                          u64 count, u32 kind) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  u64 j = i, k = i;
  float x = a[a_count == count ? i : rest_of(j, a_count, count)];
  float z = b[b_count == count ? i : rest_of(k, b_count, count)];
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
  u64 head = i, at = rest_of(head, rows * width, count);
  region[(head * room + end - rows) * width + at] = x[i];
}

// y is dense; its element (i0, i1, i2, i3, i4), of so many a dim, is x's at the sum of these strides.
extern "C" __global__ void operation_copy(const float *x, float *y, u64 count, u64 n1, u64 n2, u64 n3, u64 n4, u64 s0,
                                          u64 s1, u64 s2, u64 s3, u64 s4) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  u64 left = i, at = rest_of(left, n4, count) * s4;
  at += rest_of(left, n3, count) * s3;
  at += rest_of(left, n2, count) * s2;
  at += rest_of(left, n1, count) * s1;
  y[i] = x[at + left * s0];
}

// Of equals the one that comes first, whoever asks; what is no number is neither larger nor equal.
__device__ __forceinline__ void keep_larger(float &best, u32 &first, float v, u32 at) {
  if (v > best || (v == best && at < first)) {
    best = v;
    first = at;
  }
}

// A row of scores a block: the index of the first of the largest, -1 where none is finite.
extern "C" __global__ void operation_argmax(const float *x, u32 width, u64 *y) {
  __shared__ float bests[32];
  __shared__ u32 firsts[32];
  __shared__ u32 finite;
  if (threadIdx.x == 0) finite = 0;
  __syncthreads();
  const float *row = x + (u64)blockIdx.x * width;
  float best = __uint_as_float(0xff800000u);
  u32 first = 0xffffffffu, some = 0;
#pragma unroll 4
  for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
    float v = row[k];
    some |= (__float_as_uint(v) & 0x7fffffffu) < 0x7f800000u ? 1u : 0u;
    keep_larger(best, first, v, k);
  }
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    float v = __shfl_xor_sync(0xffffffffu, best, step);
    u32 at = __shfl_xor_sync(0xffffffffu, first, step);
    keep_larger(best, first, v, at);
  }
  if (threadIdx.x % WARP == 0) {
    bests[threadIdx.x / WARP] = best;
    firsts[threadIdx.x / WARP] = first;
  }
  // Whoever writes it writes the same.
  if (some) finite = 1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 w = 1; w < blockDim.x / WARP; ++w) keep_larger(best, first, bests[w], firsts[w]);
  y[blockIdx.x] = finite ? (u64)first : ~0ull;
}
