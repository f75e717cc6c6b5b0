// Products `y[m, n] = sum_k x[m, k] * w[n, k]` with an epilogue, in four shapes: tiles on tensor cores by warps
// and by warpgroups, rows streamed by warps for a handful of rows, and one thread a quadruple as the yardstick.
//
// Operands are rows of bytes whose length is a multiple of 16. An epilogue is called with a row, a column
// and two pairs of sums, of the columns `col, col + 1` and `col + 8, col + 9`: a packing that interleaves
// two weights by eights gets both of a pair in one call. Columns beyond N come too and are the epilogue's
// to drop.
#pragma once
#include "common.cuh"

struct Bf16 {
  static const int SIZE = 2;
  static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_bf16(c, a, b0, b1);
  }
#ifdef WARPGROUPS
  static __device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b) { wgmma_bf16(d, a, b); }
#endif
  static __device__ __forceinline__ float value(const u8 *p, u32 k) {
    return bf16_value(((const u16 *)p)[k]);
  }
};

struct E4m3 {
  static const int SIZE = 1;
#if defined(STRUCTURES_SHIM) || __CUDA_ARCH__ >= 890
  static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_e4m3(c, a, b0, b1);
  }
#endif
#ifdef WARPGROUPS
  static __device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b) { wgmma_e4m3(d, a, b); }
#endif
  static __device__ __forceinline__ float value(const u8 *p, u32 k) { return e4m3_value(p[k]); }
};

struct Operands {
  const u8 *x;
  const u8 *w;
  u32 m, n, k; // k in elements
};

// ---- tiles ----------------------------------------------------------------------------------------

// A stage holds rows of 128 bytes. Their 16-byte pieces are permuted by the row, so that eight rows at one
// piece touch every bank once.
#define STAGES 3
#define THREADS 256
#define ROW_BYTES 128
// Tiles of rows that neighbouring blocks share a tile of weights in: what is under way at one time then reads
// little more of either operand than it must.
#define GROUP 16

__device__ __forceinline__ u32 piece_at(u32 row, u32 piece) {
  return row * ROW_BYTES + ((piece ^ (row & 7)) * 16);
}

template <int ROWS>
__device__ __forceinline__ void stage_rows(u8 *to, const u8 *from, u32 first, u32 rows, u32 row_bytes,
                                           u32 at) {
#pragma unroll
  for (int i = 0; i < ROWS * 8 / THREADS; ++i) {
    u32 index = threadIdx.x + i * THREADS;
    u32 row = index / 8, piece = index % 8;
    u32 byte = at + piece * 16;
    bool there = first + row < rows && byte < row_bytes;
    const u8 *source = there ? from + (u64)(first + row) * row_bytes + byte : from;
    copy_start(to + piece_at(row, piece), source, there);
  }
}

// First row and column of this block's tile, of a grid along x alone that has one block a tile.
template <int BM, int BN>
__device__ __forceinline__ void tile_at(const Operands &o, u32 &m0, u32 &n0) {
  const u32 down = (o.m + BM - 1) / BM, across = (o.n + BN - 1) / BN;
  const u32 group = blockIdx.x / (GROUP * across), rest = blockIdx.x % (GROUP * across);
  const u32 height = down - group * GROUP < GROUP ? down - group * GROUP : GROUP;
  m0 = (group * GROUP + rest % height) * BM;
  n0 = rest / height * BN;
}

// Floats between rows of sums: eight rows of a fragment fall on different banks.
template <int BN> __device__ __forceinline__ constexpr int sums_pitch() { return BN + 8; }

// Runs the epilogue on the sums of a tile of BN columns, which lie in shared memory: one loop, instead of as many
// copies of the epilogue as a thread has sums.
template <int BM, int BN, class Epilogue>
__device__ __forceinline__ void tile_end(const float *sums, u32 m0, u32 n0, u32 m, const Epilogue &epilogue) {
#pragma unroll 1
  for (u32 q = threadIdx.x; q < BM * BN / 4; q += THREADS) {
    u32 row = q / (BN / 4), col = q % (BN / 4) / 4 * 16 + q % 4 * 2;
    const float *from = sums + row * sums_pitch<BN>() + col;
    if (m0 + row < m) epilogue(m0 + row, n0 + col, from[0], from[1], from[8], from[9]);
  }
}

// BM x 128 outputs a block of 8 warps, WARPS_M of them along the rows. Dynamic shared memory:
// STAGES * (BM + 128) * 128 bytes.
template <class Op, int BM, int WARPS_M, class Epilogue>
__device__ __forceinline__ void product_tile(const Operands &o, const Epilogue &epilogue) {
  const int BN = 128, WARPS_N = 8 / WARPS_M;
  const int MT = BM / WARPS_M / 16, NT = BN / WARPS_N / 8;
  DYNAMIC_SHARED(shared);
  const u32 row_bytes = o.k * Op::SIZE;
  u32 m0, n0;
  tile_at<BM, BN>(o, m0, n0);
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u32 warp_m = (warp / WARPS_N) * (MT * 16), warp_n = (warp % WARPS_N) * (NT * 8);
  const u32 steps = (row_bytes + ROW_BYTES - 1) / ROW_BYTES;

  float c[MT][NT][4];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][j][e] = 0.0f;

  // A group is committed every step, empty past the end, so that counting groups counts steps.
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < (int)steps) {
      u8 *stage = shared + s * (BM + BN) * ROW_BYTES;
      stage_rows<BM>(stage, o.x, m0, o.m, row_bytes, s * ROW_BYTES);
      stage_rows<BN>(stage + BM * ROW_BYTES, o.w, n0, o.n, row_bytes, s * ROW_BYTES);
    }
    copy_commit();
  }

  for (u32 step = 0; step < steps; ++step) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    u32 next = step + STAGES - 1;
    if (next < steps) {
      u8 *stage = shared + (next % STAGES) * (BM + BN) * ROW_BYTES;
      stage_rows<BM>(stage, o.x, m0, o.m, row_bytes, next * ROW_BYTES);
      stage_rows<BN>(stage + BM * ROW_BYTES, o.w, n0, o.n, row_bytes, next * ROW_BYTES);
    }
    copy_commit();

    const u8 *xs = shared + (step % STAGES) * (BM + BN) * ROW_BYTES;
    const u8 *ws = xs + BM * ROW_BYTES;
#pragma unroll
    for (int kk = 0; kk < ROW_BYTES / 32; ++kk) {
      u32 a[MT][4], b[NT / 2][4];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        u32 row = warp_m + i * 16 + (lane & 15);
        load_matrices(a[i], xs + piece_at(row, kk * 2 + (lane >> 4)));
      }
#pragma unroll
      for (int j = 0; j < NT / 2; ++j) {
        u32 row = warp_n + j * 16 + (lane & 7) + ((lane >> 4) << 3);
        load_matrices(b[j], ws + piece_at(row, kk * 2 + ((lane >> 3) & 1)));
      }
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) Op::mma(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
  copy_wait<0>();
  __syncthreads();

  float *sums = (float *)shared;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 row = warp_m + i * 16 + half * 8 + lane / 4;
        float *to = sums + row * sums_pitch<BN>() + warp_n + j * 8 + lane % 4 * 2;
        to[0] = c[i][j][2 * half];
        to[1] = c[i][j][2 * half + 1];
      }
  __syncthreads();
  tile_end<BM, BN>(sums, m0, n0, o.m, epilogue);
}

// ---- tiles of warpgroups --------------------------------------------------------------------------

#ifdef WARPGROUPS

#define DEEP_STAGES 4
// What a stage begins at a multiple of: the permutation of its pieces is one of address bits up to this size.
#define STAGE_ALIGN 1024

// Operand rows of 128 bytes, pieces permuted by the row, as the tensor cores find them: the address in pieces of 16
// bytes, 1024 bytes from eight rows to the next eight, the permutation of 128 bytes. Along k the address advances
// within the row; it is then permuted by the same bits.
__device__ __forceinline__ u64 wgmma_rows(const u8 *p) {
  return (u64)((shared_address(p) & 0x3ffffu) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// 128 x 256 outputs a block of two warpgroups, one below the other. Dynamic shared memory:
// DEEP_STAGES * (128 + 256) * 128 + STAGE_ALIGN bytes.
//
// A step's products run while the next step is waited for. A stage is filled again when everybody has passed the
// barrier behind the step that followed its own, so no tensor core reads it any more. Nothing here waits for
// something that may not come: copies are a thread's own.
template <class Op, class Epilogue>
__device__ __forceinline__ void product_warpgroups(const Operands &o, const Epilogue &epilogue) {
  const int BM = 128, BN = 256, AHEAD = DEEP_STAGES - 2, STAGE = (BM + BN) * ROW_BYTES;
  DYNAMIC_SHARED(raw);
  u8 *shared = raw + (STAGE_ALIGN - shared_address(raw) % STAGE_ALIGN) % STAGE_ALIGN;
  const u32 row_bytes = o.k * Op::SIZE;
  u32 m0, n0;
  tile_at<BM, BN>(o, m0, n0);
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u32 steps = (row_bytes + ROW_BYTES - 1) / ROW_BYTES;

  float d[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) d[i] = 0.0f;

  // A group is committed every step, empty past the end, so that counting groups counts steps.
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    if (s < (int)steps) {
      u8 *stage = shared + s * STAGE;
      stage_rows<BM>(stage, o.x, m0, o.m, row_bytes, s * ROW_BYTES);
      stage_rows<BN>(stage + BM * ROW_BYTES, o.w, n0, o.n, row_bytes, s * ROW_BYTES);
    }
    copy_commit();
  }
  for (u32 step = 0; step < steps; ++step) {
    copy_wait<AHEAD - 1>();
    wgmma_written();
    __syncthreads();
    const u8 *stage = shared + step % DEEP_STAGES * STAGE;
    const u8 *rows = stage + warp / 4 * 64 * ROW_BYTES, *columns = stage + BM * ROW_BYTES;
    wgmma_begin();
#pragma unroll
    for (int kk = 0; kk < ROW_BYTES / 32; ++kk) Op::wgmma(d, wgmma_rows(rows + kk * 32), wgmma_rows(columns + kk * 32));
    wgmma_commit();
    u32 next = step + AHEAD;
    if (next < steps) {
      u8 *to = shared + next % DEEP_STAGES * STAGE;
      stage_rows<BM>(to, o.x, m0, o.m, row_bytes, next * ROW_BYTES);
      stage_rows<BN>(to + BM * ROW_BYTES, o.w, n0, o.n, row_bytes, next * ROW_BYTES);
    }
    copy_commit();
    // The step before this one is done with its stage.
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  copy_wait<0>();
  __syncthreads();

  float *sums = (float *)shared;
  const u32 first = warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    float *to = sums + (first + i / 2 % 2 * 8) * sums_pitch<BN>() + i / 4 * 8 + lane % 4 * 2;
    to[0] = d[i];
    to[1] = d[i + 1];
  }
  __syncthreads();
  tile_end<BM, BN>(sums, m0, n0, o.m, epilogue);
}

#endif

// ---- the yardstick --------------------------------------------------------------------------------

// A thread has one row and four columns. Blocks of 64 threads; x counts quadruples, y rows.
template <class Op, class Epilogue>
__device__ __forceinline__ void product_plain(const Operands &o, const Epilogue &epilogue) {
  u32 quadruple = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  u32 col = quadruple / 4 * 16 + quadruple % 4 * 2;
  if (col >= o.n) return;
  const u8 *x = o.x + (u64)row * o.k * Op::SIZE;
  float sums[4];
  for (int c = 0; c < 4; ++c) {
    u32 channel = col + (c / 2) * 8 + c % 2;
    float sum = 0.0f;
    if (channel < o.n) {
      const u8 *w = o.w + (u64)channel * o.k * Op::SIZE;
      for (u32 k = 0; k < o.k; ++k) sum += Op::value(x, k) * Op::value(w, k);
    }
    sums[c] = sum;
  }
  epilogue(row, col, sums[0], sums[1], sums[2], sums[3]);
}

// ---- a handful of rows ----------------------------------------------------------------------------

// int8 weights are read once, 16 bytes a lane, by up to 8 rows of f32. `x` lies in spans of 512 elements,
// each as 4 x 32 quadruples: what a lane multiplies with its 16 weights is then read side by side with its
// neighbours'. The spans of one row are `x_spans * 512` floats; what lies past K is not read.
#define SPAN 512

// Where element k of a row lies.
__device__ __forceinline__ u32 spread_at(u32 k) {
  u32 span = k / SPAN, lane = k % SPAN / 16, quadruple = k % 16 / 4;
  return span * SPAN + (quadruple * WARP + lane) * 4 + k % 4;
}

struct Rows {
  const float *x;
  const signed char *w;
  u32 m, n, k, x_spans;
  u32 split; // warps that share one quadruple of channels: 1, or all 4 of the block
};

__device__ __forceinline__ float byte_of(u32 word, int i) { return (float)(signed char)(word >> (8 * i)); }

// Blocks of 4 warps; a warp has the channels `col, col + 1, col + 8, col + 9`.
template <int M, class Epilogue>
__device__ __forceinline__ void product_rows(const Rows &o, const Epilogue &epilogue) {
  __shared__ float shares[4][4 * M];
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u32 quadruple = o.split == 1 ? blockIdx.x * 4 + warp : blockIdx.x;
  const u32 col = quadruple / 4 * 16 + quadruple % 4 * 2;
  const u32 first = o.split == 1 ? 0 : warp, step = o.split;

  const signed char *w[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 channel = col + (c / 2) * 8 + c % 2;
    w[c] = o.w + (u64)(channel < o.n ? channel : o.n - 1) * o.k;
  }
  float sums[4][M];
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int m = 0; m < M; ++m) sums[c][m] = 0.0f;

  for (u32 span = first; span < o.x_spans; span += step) {
    u32 k = span * SPAN + lane * 16;
    uint4 codes[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      codes[c].x = codes[c].y = codes[c].z = codes[c].w = 0;
      if (k < o.k) codes[c] = load_streamed(w[c] + k);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float4 x[M];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float4 *row = (const float4 *)(o.x + ((u64)m * o.x_spans + span) * SPAN);
        x[m].x = x[m].y = x[m].z = x[m].w = 0.0f;
        if (k < o.k) x[m] = row[q * WARP + lane];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        u32 word = q == 0 ? codes[c].x : q == 1 ? codes[c].y : q == 2 ? codes[c].z : codes[c].w;
        float a = byte_of(word, 0), b = byte_of(word, 1), d = byte_of(word, 2), e = byte_of(word, 3);
#pragma unroll
        for (int m = 0; m < M; ++m) sums[c][m] += a * x[m].x + b * x[m].y + d * x[m].z + e * x[m].w;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float sum = warp_sum(sums[c][m]);
      if (lane == 0) shares[warp][c * M + m] = sum;
    }
  __syncthreads();
  if (o.split != 1) {
    if (threadIdx.x < M && threadIdx.x < o.m && col < o.n) {
      float total[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        total[c] = 0.0f;
        for (int s = 0; s < 4; ++s) total[c] += shares[s][c * M + threadIdx.x];
      }
      epilogue(threadIdx.x, col, total[0], total[1], total[2], total[3]);
    }
  } else if (lane < M && lane < o.m && col < o.n) {
    const float *mine = shares[warp];
    epilogue(lane, col, mine[lane], mine[M + lane], mine[2 * M + lane], mine[3 * M + lane]);
  }
}

// ---- sums of another library ----------------------------------------------------------------------

// Runs the epilogue on sums that lie in rows of `n`, f32 or bf16. A thread has one row and four columns.
template <class Epilogue>
__device__ __forceinline__ void product_end(const void *sums, u32 dtype, u32 n, const Epilogue &epilogue) {
  u32 quadruple = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  u32 col = quadruple / 4 * 16 + quadruple % 4 * 2;
  if (col >= n) return;
  float own[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 channel = col + (c / 2) * 8 + c % 2;
    own[c] = channel < n ? load_value(sums, dtype, (u64)row * n + channel) : 0.0f;
  }
  epilogue(row, col, own[0], own[1], own[2], own[3]);
}

// ---- operands -------------------------------------------------------------------------------------

// How a prologue hands a row to a product: bf16 or E4M3 in place, or f32 in spans.
#define AS_SPANS 0u

// Rows of the boundary as operand rows; blocks of any size, one row a block.
__device__ __forceinline__ void operand_store(void *out, u32 kind, u32 row, u32 k, u32 width, float v,
                                              float scale) {
  if (kind == AS_SPANS) {
    u32 spans = (width + SPAN - 1) / SPAN;
    ((float *)out)[(u64)row * spans * SPAN + spread_at(k)] = v;
  } else {
    store_value(out, kind, (u64)row * width + k, v, scale);
  }
}

__device__ __forceinline__ void operand_rows(const void *x, u32 x_dtype, void *out, u32 kind, u32 width,
                                             float scale) {
  u32 row = blockIdx.x;
  for (u32 k = threadIdx.x; k < width; k += blockDim.x)
    operand_store(out, kind, row, k, width, load_value(x, x_dtype, (u64)row * width + k), scale);
}

// ---- kernels --------------------------------------------------------------------------------------

// Every product of every structure comes in these shapes. `PARAMS` is the epilogue's own struct, passed
// by value.
#define TILES(name, Op, PARAMS)                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS) name##_tile128(Operands o, PARAMS p) {              \
    product_tile<Op, 128, 2>(o, p);                                                                         \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS) name##_tile32(Operands o, PARAMS p) {               \
    product_tile<Op, 32, 1>(o, p);                                                                          \
  }

#ifdef WARPGROUPS
#define WARPGROUP_TILES(name, Op, PARAMS)                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name##_wgmma(Operands o, PARAMS p) {             \
    product_warpgroups<Op>(o, p);                                                                           \
  }
#else
#define WARPGROUP_TILES(name, Op, PARAMS)
#endif

#define END(name, PARAMS)                                                                                   \
  extern "C" __global__ void name##_end(const void *sums, u32 dtype, u32 n, PARAMS p) {                     \
    product_end(sums, dtype, n, p);                                                                         \
  }

#define PLAIN(name, Op, PARAMS)                                                                             \
  extern "C" __global__ void name##_plain(Operands o, PARAMS p) { product_plain<Op>(o, p); }

#define ROWS(name, PARAMS)                                                                                  \
  extern "C" __global__ void __launch_bounds__(128) name##_rows1(Rows o, PARAMS p) { product_rows<1>(o, p); } \
  extern "C" __global__ void __launch_bounds__(128) name##_rows2(Rows o, PARAMS p) { product_rows<2>(o, p); } \
  extern "C" __global__ void __launch_bounds__(128) name##_rows4(Rows o, PARAMS p) { product_rows<4>(o, p); } \
  extern "C" __global__ void __launch_bounds__(128) name##_rows8(Rows o, PARAMS p) { product_rows<8>(o, p); }

#if defined(STRUCTURES_SHIM) || __CUDA_ARCH__ >= 890
#define PRODUCTS(name, PARAMS)                                                                              \
  TILES(name##_bf16, Bf16, PARAMS)                                                                          \
  WARPGROUP_TILES(name##_bf16, Bf16, PARAMS)                                                                \
  PLAIN(name##_bf16, Bf16, PARAMS)                                                                          \
  TILES(name##_e4m3, E4m3, PARAMS)                                                                          \
  WARPGROUP_TILES(name##_e4m3, E4m3, PARAMS)                                                                \
  PLAIN(name##_e4m3, E4m3, PARAMS)                                                                          \
  ROWS(name##_int8, PARAMS)                                                                                 \
  END(name, PARAMS)
#else
#define PRODUCTS(name, PARAMS)                                                                              \
  TILES(name##_bf16, Bf16, PARAMS)                                                                          \
  WARPGROUP_TILES(name##_bf16, Bf16, PARAMS)                                                                \
  PLAIN(name##_bf16, Bf16, PARAMS)                                                                          \
  ROWS(name##_int8, PARAMS)                                                                                 \
  END(name, PARAMS)
#endif
