// What every kernel file stands on: types, number formats, loads and stores at the boundary's dtype,
// block reductions, and the few instructions that have no C spelling.
//
// No toolkit header is needed: NVRTC compiles these files with nothing beside them. Everything under
// `instructions` is replaced by the CPU shim of the tests, which is why it stands in functions.
//
// Layouts of fragments and of what descriptors name are those of the PTX ISA, chapters `mma` and `wgmma`.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Type ids of the ABI.
#define F32 1u
#define BF16 3u
#define E4M3 4u

#define WARP 32

// ---- instructions ---------------------------------------------------------------------------------

#ifndef STRUCTURES_SHIM

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

__device__ __forceinline__ u32 shared_address(const void *p) {
  return (u32)__cvta_generic_to_shared(p);
}

// Four 8x8 matrices of 16-bit elements; each lane names one row of 16 bytes.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// c += a * b on 16 x 8 x 16 bf16.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if __CUDA_ARCH__ >= 890
// c += a * b on 16 x 8 x 32 E4M3.
__device__ __forceinline__ void mma_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Tensor cores that four warps use together, on operands in shared memory: sm_90a alone.
#define WARPGROUPS 1

// Orders what threads wrote to shared memory before what the tensor cores read of it next.
__device__ __forceinline__ void wgmma_written() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders a warpgroup's registers before its next products.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `PENDING` of the warpgroup's groups are under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)

// d += a * b on 64 x 256 x 16 bf16, both along k in shared memory as their descriptors say.
__device__ __forceinline__ void wgmma_bf16(float (&d)[128], u64 a, u64 b) {
  asm volatile("{.reg .pred add; setp.ne.b32 add, %130, 0; "
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
               "%128, %129, add, 1, 1, 0, 0;}"
               : SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64), SUMS(80), SUMS(96), SUMS(112)
               : "l"(a), "l"(b), "r"(1));
}

// The same on 64 x 256 x 32 E4M3.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[128], u64 a, u64 b) {
  asm volatile("{.reg .pred add; setp.ne.b32 add, %130, 0; "
               "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
               "%128, %129, add, 1, 1;}"
               : SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64), SUMS(80), SUMS(96), SUMS(112)
               : "l"(a), "l"(b), "r"(1));
}

#undef SUMS
#undef SUMS4
#endif

// Starts copying 16 bytes into shared memory; zeros where `there` is false, and `from` is then any
// address that may be named.
__device__ __forceinline__ void copy_start(void *to, const void *from, bool there) {
  u32 bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Sixteen bytes that nobody reads again; zeros where `there` is false. Begun in the order of the program, so that what
// is asked for early is under way early.
__device__ __forceinline__ uint4 load_streamed(const void *p, bool there) {
  uint4 v;
  asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0; "
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; "
               "@there ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(p), "r"((u32)there)
               : "memory");
  return v;
}

// Two E4M3 codes, to nearest, beyond 448 the largest.
#if __CUDA_ARCH__ >= 890
#define E4M3_PAIRS 1
__device__ __forceinline__ u16 e4m3_pair_bits(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// Two bf16, to nearest, ties to even; NaN is 0x7fff. One alone is a slower instruction.
#define BF16_CONVERTS 1
__device__ __forceinline__ u32 bf16_converted(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// a * b + c on two bf16.
__device__ __forceinline__ u32 bf16_fma(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

#endif

// ---- number formats -------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }

// To nearest, ties to even; a NaN stays one.
__device__ __forceinline__ u16 bf16_bits(float v) {
#ifdef BF16_CONVERTS
  return (u16)bf16_converted(v, 0.0f);
#else
  u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ u32 bf16_pair_bits(float low, float high) {
#ifdef BF16_CONVERTS
  return bf16_converted(low, high);
#else
  return bf16_bits(low) | (u32)bf16_bits(high) << 16;
#endif
}

// To nearest, ties to even, beyond 448 the largest; NaN is 0x7f.
__device__ __forceinline__ u8 e4m3_bits(float v) {
#ifdef E4M3_PAIRS
  return (u8)e4m3_pair_bits(v, 0.0f);
#else
  u32 bits = __float_as_uint(v);
  u32 sign = (bits >> 24) & 0x80u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (u8)(sign | 0x7fu);
  if (bits >= 0x43e00000u) return (u8)(sign | 0x7eu);
  if (bits < 0x3c800000u) {
    // Below 2^-6 a step is 2^-9: adding 2^14 leaves that as the last bit of the sum.
    float sum = __uint_as_float(bits) + 16384.0f;
    return (u8)(sign | (__float_as_uint(sum) - 0x46800000u));
  }
  u32 code = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  return (u8)(sign | (code > 0x7eu ? 0x7eu : code));
#endif
}

__device__ __forceinline__ float e4m3_value(u8 code) {
  u32 exponent = (code >> 3) & 15u, fraction = code & 7u;
  float magnitude;
  if ((code & 0x7fu) == 0x7fu)
    magnitude = __uint_as_float(0x7fc00000u);
  else if (exponent == 0)
    magnitude = (float)fraction * 0.001953125f;
  else
    magnitude = __uint_as_float(((exponent + 120u) << 23) | (fraction << 20));
  return code & 0x80u ? -magnitude : magnitude;
}

// ---- the boundary ---------------------------------------------------------------------------------

__device__ __forceinline__ float load_value(const void *p, u32 dtype, u64 i) {
  return dtype == F32 ? ((const float *)p)[i] : bf16_value(((const u16 *)p)[i]);
}

// What a value becomes when the boundary keeps it.
__device__ __forceinline__ float at_boundary(float v, u32 dtype) {
  return dtype == F32 ? v : bf16_value(bf16_bits(v));
}

// `scale` is that of codes; other dtypes have none.
__device__ __forceinline__ void store_value(void *p, u32 dtype, u64 i, float v, float scale) {
  if (dtype == F32)
    ((float *)p)[i] = v;
  else if (dtype == BF16)
    ((u16 *)p)[i] = bf16_bits(v);
  else
    ((u8 *)p)[i] = e4m3_bits(v / scale);
}

// Eight of a row whose address is a multiple of 16 bytes, side by side.
__device__ __forceinline__ void load_eight(const void *p, u32 dtype, u64 i, float (&v)[8]) {
  if (dtype == F32) {
    const float4 *from = (const float4 *)((const float *)p + i);
    const float4 low = from[0], high = from[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
    const uint4 all = *(const uint4 *)((const u16 *)p + i);
    const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      v[2 * w] = __uint_as_float(words[w] << 16);
      v[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
    }
  }
}

// v / scale as the division rounds it, of a reciprocal that was taken once.
__device__ __forceinline__ float divided(float v, float scale, float reciprocal) {
  float q = v * reciprocal;
  float rest = fmaf(-q, scale, v);
  // Zero keeps its sign; infinity and what overflows has no rest.
  return q != 0.0f && fabsf(q) <= 3.0e38f ? fmaf(rest, reciprocal, q) : q;
}

// Stores eight; as `load_eight`, where a code takes one byte.
__device__ __forceinline__ void store_eight(void *p, u32 dtype, u64 i, const float (&v)[8], float scale,
                                            float reciprocal) {
  if (dtype == F32) {
    float4 *to = (float4 *)((float *)p + i);
    float4 low, high;
    low.x = v[0], low.y = v[1], low.z = v[2], low.w = v[3];
    high.x = v[4], high.y = v[5], high.z = v[6], high.w = v[7];
    to[0] = low;
    to[1] = high;
  } else if (dtype == BF16) {
    uint4 all;
    all.x = bf16_pair_bits(v[0], v[1]);
    all.y = bf16_pair_bits(v[2], v[3]);
    all.z = bf16_pair_bits(v[4], v[5]);
    all.w = bf16_pair_bits(v[6], v[7]);
    *(uint4 *)((u16 *)p + i) = all;
  } else {
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      float q[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) q[e] = divided(v[4 * w + e], scale, reciprocal);
#ifdef E4M3_PAIRS
      words[w] = e4m3_pair_bits(q[0], q[1]) | (u32)e4m3_pair_bits(q[2], q[3]) << 16;
#else
      words[w] = e4m3_bits(q[0]) | (u32)e4m3_bits(q[1]) << 8 | (u32)e4m3_bits(q[2]) << 16 | (u32)e4m3_bits(q[3]) << 24;
#endif
    }
    *(u64 *)((u8 *)p + i) = words[0] | (u64)words[1] << 32;
  }
}

__device__ __forceinline__ float activate(float v, u32 kind) {
  // 0 SiLU, 1 the tanh GELU.
  if (kind == 0) return v / (1.0f + expf(-v));
  return 0.5f * v * (1.0f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}

// The same for a result that bf16 rounds: a division and an exponential of a few ulp of f32.
__device__ __forceinline__ float activate_roughly(float v, u32 kind) {
  return kind == 0 ? __fdividef(v, 1.0f + __expf(-v)) : activate(v, kind);
}

// ---- reductions -----------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// Of a whole block; `partial` holds one float a warp. Every thread gets the sum.
__device__ __forceinline__ float block_sum(float v, float *partial) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = v;
  __syncthreads();
  float sum = 0.0f;
  for (u32 w = 0; w < blockDim.x / WARP; ++w) sum += partial[w];
  return sum;
}
