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
__device__ __forceinline__ void tile_end(const float *sums, u32 m0, u32 n0, const Operands &o, const Epilogue &epilogue) {
  const u32 m = o.m;
  if constexpr (Epilogue::SIXTEEN) {
    // N is a multiple of 16.
#pragma unroll 1
    for (u32 q = threadIdx.x; q < BM * BN / 16; q += THREADS) {
      u32 row = q / (BN / 16), col = q % (BN / 16) * 16;
      if (m0 + row >= m || n0 + col >= o.n) continue;
      const float *from = sums + row * sums_pitch<BN>() + col;
      float low[8], high[8];
      load_eight(from, F32, 0, low);
      load_eight(from, F32, 8, high);
      epilogue.sixteen(m0 + row, n0 + col, low, high);
    }
    return;
  }
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
  tile_end<BM, BN>(sums, m0, n0, o, epilogue);
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
  tile_end<BM, BN>(sums, m0, n0, o, epilogue);
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

// int8 weights are read once, by up to 8 rows of bf16, or of f32 as three bf16 whose sum it is. Weights are the left
// operand of `mma`, rows the right one: the work is the same for one row and for eight.
//
// Weights lie in pieces of 16 channels by 64 inputs, 1024 bytes each, those of 16 channels one after the other: first
// the channels 0 to 7 of the piece, then 8 to 15, sixteen bytes a lane. Lane `4 g + t` has channels `g` and `g + 8` and
// the inputs 16 t to 16 t + 15 of the piece; `mma` sums over k in any order, so they are four steps of its own four.
// Inputs past K are codes of 0.
#define PIECE 64
#define PIECE_BYTES 1024
#define ROWS_WARPS 8
#define MOST_ROWS 8

struct Rows {
  const u16 *x; // [planes][MOST_ROWS][k], or [m][k] where there is one plane
  const u8 *w;
  u32 m, n, k;
};

// Of four int8 the two at byte 0 and 1, or at 2 and 3, as bf16, which has them all: 128 plus the low seven bits, less
// 128 or, for a negative one, 256.
__device__ __forceinline__ u32 bf16_of_bytes(u32 word, int upper) {
  u32 pair = __byte_perm(word, 0u, upper ? 0x4342u : 0x4140u);
  u32 low = (pair & 0x007f007fu) | 0x43004300u, less = (pair & 0x00800080u) | 0xc300c300u;
  return bf16_fma(low, 0x3f803f80u, less);
}

// CHANNELS outputs a block of 8 warps, which take turns with the pieces along K; PLANES bf16 an input. A warp's next
// DEPTH pieces are under way while it multiplies.
template <int CHANNELS, int PLANES, class Epilogue>
__device__ __forceinline__ void product_rows(const Rows &o, const Epilogue &epilogue) {
  const int TILES = CHANNELS / 16, DEPTH = 4 / TILES;
  __shared__ float sums[ROWS_WARPS][CHANNELS][MOST_ROWS];
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u32 pieces = (o.k + PIECE - 1) / PIECE, tiles = (o.n + 15) / 16;
  const u32 group = lane / 4, part = lane % 4;
  const u8 *w[TILES];
  bool there[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    u32 tile = blockIdx.x * TILES + i;
    there[i] = tile < tiles;
    w[i] = o.w + (u64)(there[i] ? tile : 0) * pieces * PIECE_BYTES + lane * 16;
  }
  const u16 *x = o.x + (u64)group * o.k + part * 16;

  float c[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[i][e] = 0.0f;
  uint4 codes[DEPTH][TILES][2];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 piece = warp + d * ROWS_WARPS;
        codes[d][i][half] = load_streamed(w[i] + (u64)piece * PIECE_BYTES + half * 512, there[i] && piece < pieces);
      }
  for (u32 first = warp; first < pieces; first += DEPTH * ROWS_WARPS) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const u32 piece = first + d * ROWS_WARPS, next = piece + DEPTH * ROWS_WARPS;
      const bool some = group < o.m && piece * PIECE + part * 16 < o.k;
      uint4 b[PLANES][2];
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          b[p][half].x = b[p][half].y = b[p][half].z = b[p][half].w = 0;
          const u16 *from = x + (u64)p * MOST_ROWS * o.k + piece * PIECE + half * 8;
          if (some) b[p][half] = *(const uint4 *)from;
        }
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const uint4 upper = codes[d][i][0], lower = codes[d][i][1];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          codes[d][i][half] = load_streamed(w[i] + (u64)next * PIECE_BYTES + half * 512, there[i] && next < pieces);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const u32 u = step == 0 ? upper.x : step == 1 ? upper.y : step == 2 ? upper.z : upper.w;
          const u32 l = step == 0 ? lower.x : step == 1 ? lower.y : step == 2 ? lower.z : lower.w;
          const u32 a[4] = {bf16_of_bytes(u, 0), bf16_of_bytes(l, 0), bf16_of_bytes(u, 1), bf16_of_bytes(l, 1)};
#pragma unroll
          for (int p = 0; p < PLANES; ++p) {
            const uint4 &of = b[p][step / 2];
            mma_bf16(c[i], a, step % 2 ? of.z : of.x, step % 2 ? of.w : of.y);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[warp][i * 16 + e / 2 * 8 + group][part * 2 + e % 2] = c[i][e];
  __syncthreads();
  for (u32 q = threadIdx.x; q < CHANNELS / 4 * o.m; q += ROWS_WARPS * WARP) {
    const u32 row = q / (CHANNELS / 4), quadruple = q % (CHANNELS / 4), own = quadruple / 4 * 16 + quadruple % 4 * 2;
    const u32 col = blockIdx.x * CHANNELS + own;
    if (col >= o.n) continue;
    float total[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      total[e] = 0.0f;
      for (int s = 0; s < ROWS_WARPS; ++s) total[e] += sums[s][own + e / 2 * 8 + e % 2][row];
    }
    epilogue(row, col, total[0], total[1], total[2], total[3]);
  }
}

// ---- sums of another library ----------------------------------------------------------------------

// Runs the epilogue on sums that lie in rows of `n`, f32 or bf16. A thread has one row and four columns, or sixteen where
// the epilogue takes as many side by side; `n` is then a multiple of 16.
template <class Epilogue>
__device__ __forceinline__ void product_end_wide(const void *sums, u32 dtype, u32 n, const Epilogue &epilogue) {
  u32 col = (blockIdx.x * blockDim.x + threadIdx.x) * 16, row = blockIdx.y;
  if (col >= n) return;
  float low[8], high[8];
  load_eight(sums, dtype, (u64)row * n + col, low);
  load_eight(sums, dtype, (u64)row * n + col + 8, high);
  epilogue.sixteen(row, col, low, high);
}

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

// How a prologue hands a row to a product: bf16 or E4M3 in place, or f32 as three planes of bf16, each what the ones
// before it left, of MOST_ROWS rows.
#define AS_PLANES 0u

// Rows of the boundary as operand rows; blocks of any size, one row a block.
__device__ __forceinline__ void operand_store(void *out, u32 kind, u32 row, u32 k, u32 width, float v,
                                              float scale) {
  if (kind == AS_PLANES) {
#pragma unroll
    for (u32 plane = 0; plane < 3; ++plane) {
      u16 bits = bf16_bits(v);
      ((u16 *)out)[((u64)plane * MOST_ROWS + row) * width + k] = bits;
      v -= bf16_value(bits);
    }
  } else {
    store_value(out, kind, (u64)row * width + k, v, scale);
  }
}

// Whether eights of rows so wide may be loaded and stored at once.
__device__ __forceinline__ bool by_eights(const void *x, const void *out, u32 kind, u32 width) {
  return kind != AS_PLANES && width % 16 == 0 && ((u64)x | (u64)out) % 16 == 0;
}

__device__ __forceinline__ void operand_rows(const void *x, u32 x_dtype, void *out, u32 kind, u32 width,
                                             float scale) {
  u32 row = blockIdx.x;
  if (by_eights(x, out, kind, width)) {
    const float reciprocal = 1.0f / scale;
    for (u32 k = threadIdx.x * 8; k < width; k += blockDim.x * 8) {
      float v[8];
      load_eight(x, x_dtype, (u64)row * width + k, v);
      store_eight(out, kind, (u64)row * width + k, v, scale, reciprocal);
    }
    return;
  }
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
    if constexpr (PARAMS::SIXTEEN)                                                                          \
      product_end_wide(sums, dtype, n, p);                                                                  \
    else                                                                                                    \
      product_end(sums, dtype, n, p);                                                                       \
  }

#define PLAIN(name, Op, PARAMS)                                                                             \
  extern "C" __global__ void name##_plain(Operands o, PARAMS p) { product_plain<Op>(o, p); }

// Blocks at one time as far as no compiler has to spill for them.
#define ROWS_OF(name, CHANNELS, PLANES, BLOCKS, PARAMS)                                                     \
  extern "C" __global__ void __launch_bounds__(ROWS_WARPS * WARP, BLOCKS) name(Rows o, PARAMS p) {          \
    product_rows<CHANNELS, PLANES>(o, p);                                                                   \
  }

#define ROWS(name, PARAMS)                                                                                  \
  ROWS_OF(name##_rows16, 16, 1, 2, PARAMS)                                                                  \
  ROWS_OF(name##_rows32, 32, 1, 2, PARAMS)                                                                  \
  ROWS_OF(name##_rows64, 64, 1, 2, PARAMS)                                                                  \
  ROWS_OF(name##_rows16x3, 16, 3, 2, PARAMS)                                                                \
  ROWS_OF(name##_rows32x3, 32, 3, 2, PARAMS)                                                                \
  ROWS_OF(name##_rows64x3, 64, 3, 1, PARAMS)

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
