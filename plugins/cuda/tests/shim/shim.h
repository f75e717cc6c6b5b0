// A GPU's execution model on one CPU thread, enough of it for the kernels of `cu/`.
//
// Blocks run one after the other; the threads of a block are fibres that switch at barriers and at warp
// collectives, so a barrier that not everybody reaches is seen (the run ends with a message) and shared
// memory is shared. Tensor-core instructions exchange fragments exactly as the instruction set documents
// them; asynchronous copies land only when they are waited for, and until then their target holds NaN. Products
// of warpgroups read shared memory through their descriptors when they begin, and it must still be the same when
// they are waited for.
// Not here: the memory model between blocks, and time.
#pragma once
#define STRUCTURES_SHIM 1

#include <math.h>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>


#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static
#define DYNAMIC_SHARED(name) unsigned char *name = shim::dynamic_shared

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace shim {

struct Copy {
  void *to;
  unsigned char bytes[16];
};

// What a product that is under way has read: the run ends with a message where it is overwritten meanwhile.
struct Reading {
  const unsigned char *from;
  unsigned char bytes[16];
};

struct Fibre {
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  dim3 thread;
  unsigned lane = 0, warp = 0;
  unsigned parity = 0;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::deque<std::vector<Reading>> products;
  std::vector<Reading> begun;
  bool ordered = false;
  std::unique_ptr<unsigned char[]> stack;
};

struct Barrier {
  std::vector<Fibre *> waiting;
};

struct Warp {
  Barrier barrier;
  unsigned size = 0;
  alignas(16) unsigned char slots[2][32][64];
};

constexpr size_t STACK = 128 * 1024;

inline unsigned char *dynamic_shared = nullptr;
inline dim3 grid, block, at;
inline Fibre *self = nullptr;
inline std::deque<Fibre *> ready;
inline std::vector<Warp> warps;
inline Barrier whole;
inline unsigned alive = 0;
inline jmp_buf back;
inline void (*body)(void *) = nullptr;
inline void *body_data = nullptr;

inline void fail(const char *what) {
  std::fprintf(stderr, "shim: %s (block %u,%u thread %u)\n", what, at.x, at.y, self ? self->thread.x : 0);
  std::abort();
}

// Goes to the next fibre that can run. Nobody can while some have not ended: a barrier was missed.
inline void next() {
  if (ready.empty()) {
    if (alive == 0) longjmp(back, 1);
    fail("a barrier or a collective that not every thread reaches");
  }
  Fibre *f = ready.front();
  ready.pop_front();
  self = f;
  if (f->started) longjmp(f->at, 1);
  f->started = true;
  setcontext(&f->start);
}

inline void entry() {
  body(body_data);
  if (!self->groups.empty() || !self->open.empty())
    for (auto &g : self->groups)
      if (!g.empty()) fail("a thread ended with copies under way");
  if (!self->products.empty() || !self->begun.empty()) fail("a thread ended with products under way");
  --alive;
  next();
}

inline void wait(Barrier &b, unsigned count) {
  if (b.waiting.size() + 1 < count) {
    b.waiting.push_back(self);
    if (setjmp(self->at) == 0) next();
    return;
  }
  for (Fibre *f : b.waiting) ready.push_back(f);
  b.waiting.clear();
}

// Every lane's value, after all have given theirs. Two sets of slots take turns, so one barrier is enough.
template <class T> const unsigned char (*exchange(const T &mine))[64] {
  static_assert(sizeof(T) <= 64, "a slot");
  Warp &w = warps[self->warp];
  unsigned set = self->parity ^= 1;
  std::memcpy(w.slots[set][self->lane], &mine, sizeof(T));
  wait(w.barrier, w.size);
  return w.slots[set];
}

template <class T> T of(const unsigned char (&slot)[64]) {
  T v;
  std::memcpy(&v, slot, sizeof(T));
  return v;
}

inline void land(std::vector<Copy> &group) {
  for (Copy &c : group) std::memcpy(c.to, c.bytes, 16);
  group.clear();
}

// Runs `f(data)` once a thread of the grid.
inline void launch(dim3 g, dim3 b, size_t shared_bytes, void (*f)(void *), void *data) {
  static std::vector<Fibre> fibres;
  static std::vector<unsigned char> memory;
  unsigned threads = b.x;
  if (b.y != 1 || b.z != 1 || threads == 0 || threads > 1024 || threads % 32) fail("a block of an odd shape");
  if (fibres.size() < threads) {
    std::vector<Fibre> more(threads);
    fibres.swap(more);
    for (auto &fibre : fibres) fibre.stack.reset(new unsigned char[STACK]);
  }
  memory.assign(shared_bytes + 128, 0xff);
  dynamic_shared = memory.data() + (128 - (uintptr_t)memory.data() % 128) % 128;
  grid = g;
  block = b;
  body = f;
  body_data = data;
  for (unsigned z = 0; z < g.z; ++z)
    for (unsigned y = 0; y < g.y; ++y)
      for (unsigned x = 0; x < g.x; ++x) {
        at = {x, y, z};
        std::memset(dynamic_shared, 0xff, shared_bytes);
        warps.assign((threads + 31) / 32, Warp());
        whole.waiting.clear();
        ready.clear();
        alive = threads;
        for (unsigned t = 0; t < threads; ++t) {
          Fibre &fibre = fibres[t];
          fibre.started = false;
          fibre.thread = {t, 0, 0};
          fibre.lane = t % 32;
          fibre.warp = t / 32;
          fibre.parity = 0;
          fibre.groups.clear();
          fibre.open.clear();
          fibre.products.clear();
          fibre.begun.clear();
          fibre.ordered = false;
          ++warps[t / 32].size;
          getcontext(&fibre.start);
          fibre.start.uc_stack.ss_sp = fibre.stack.get();
          fibre.start.uc_stack.ss_size = STACK;
          fibre.start.uc_link = nullptr;
          makecontext(&fibre.start, entry, 0);
          ready.push_back(&fibre);
        }
        if (setjmp(back) == 0) next();
      }
  self = nullptr;
}

// A kernel by name, called with the addresses of its arguments as a driver gets them.
struct Kernel {
  const char *name;
  void (*call)(void *);
  // Bytes of each argument, for who keeps them.
  std::vector<size_t> (*sizes)();
};

template <class... A, size_t... I>
void apply(void (*f)(A...), void **p, std::index_sequence<I...>) {
  f(*static_cast<std::remove_reference_t<A> *>(p[I])...);
}
template <auto F> struct Thunk;
template <class... A, void (*F)(A...)> struct Thunk<F> {
  static void call(void *params) { apply(F, static_cast<void **>(params), std::index_sequence_for<A...>()); }
  static std::vector<size_t> sizes() { return {sizeof(std::remove_reference_t<A>)...}; }
};

} // namespace shim

#define threadIdx (shim::self->thread)
#define blockIdx (shim::at)
#define blockDim (shim::block)
#define gridDim (shim::grid)

inline void __syncthreads() { shim::wait(shim::whole, shim::block.x); }
inline float __uint_as_float(unsigned v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
inline unsigned __float_as_uint(float v) {
  unsigned u;
  std::memcpy(&u, &v, 4);
  return u;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return expf(v); }
inline float __shfl_xor_sync(unsigned, float v, int step) {
  return shim::of<float>(shim::exchange(v)[shim::self->lane ^ step]);
}
inline unsigned __shfl_xor_sync(unsigned, unsigned v, int step) {
  return shim::of<unsigned>(shim::exchange(v)[shim::self->lane ^ step]);
}

// ---- instructions ---------------------------------------------------------------------------------

// Matrix i's row r is named by lane 8 i + r; lane l gets the four bytes at 4 (l % 4) of row l / 4.
inline void load_matrices(unsigned (&r)[4], const void *row) {
  auto all = shim::exchange(row);
  unsigned lane = shim::self->lane;
  for (int i = 0; i < 4; ++i) {
    auto from = shim::of<const unsigned char *>(all[i * 8 + lane / 4]);
    if ((uintptr_t)from % 16) shim::fail("a matrix row off its alignment");
    std::memcpy(&r[i], from + lane % 4 * 4, 4);
  }
}

namespace shim {
struct Fragments {
  unsigned a[4], b[2];
};
inline float bf16(const void *p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return __uint_as_float((unsigned)h << 16);
}
inline float e4m3_of(unsigned char c) {
  int e = (c >> 3) & 15, f = c & 7;
  float m = e == 15 && f == 7 ? NAN : e ? ldexpf(1.0f + f / 8.0f, e - 7) : ldexpf((float)f, -9);
  return c & 128 ? -m : m;
}
struct E4m3Table {
  float values[256];
  E4m3Table() {
    for (int c = 0; c < 256; ++c) values[c] = e4m3_of((unsigned char)c);
  }
};
inline float e4m3(const void *p) {
  static const E4m3Table table;
  return table.values[*(const unsigned char *)p];
}
// A register holds PER neighbours along k; a's registers are (row, k) halves in the order row first. A lane has two
// rows and two columns of the result.
template <int PER, float (*VALUE)(const void *)>
void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  auto all = exchange(mine);
  const int size = 4 / PER, half = 4 * PER;
  unsigned g = self->lane / 4, t = self->lane % 4;
  float rows[2][2 * half], cols[2][2 * half];
  for (int side = 0; side < 2; ++side)
    for (int k = 0; k < 2 * half; ++k) {
      const unsigned char *from = all[g * 4 + k % half / PER];
      rows[side][k] = VALUE(from + (side + 2 * (k / half)) * 4 + k % PER * size);
      from = all[(t * 2 + side) * 4 + k % half / PER];
      cols[side][k] = VALUE(from + (4 + k / half) * 4 + k % PER * size);
    }
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 2 * half; ++k) c[e] += rows[e / 2][k] * cols[e % 2][k];
}
} // namespace shim

inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  shim::mma<2, shim::bf16>(c, a, b0, b1);
}
inline void mma_e4m3(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  shim::mma<4, shim::e4m3>(c, a, b0, b1);
}

// ---- warpgroups -----------------------------------------------------------------------------------

#define WARPGROUPS 1

namespace shim {
// Where dynamic shared memory begins; not where a tile may.
constexpr unsigned SHARED_BASE = 256;

// Sixteen bytes of a row of an operand that lies along k, at `piece` of the 32 bytes a product reads.
inline const unsigned char *operand_piece(uint64_t descriptor, unsigned row, unsigned piece) {
  unsigned start = (unsigned)(descriptor & 0x3fff) << 4, eight_rows = (unsigned)(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) fail("a descriptor of another permutation");
  if ((start & ~127u) % 1024) fail("an operand off its alignment");
  unsigned at = start + row / 8 * eight_rows + row % 8 * 128 + piece * 16;
  at ^= (at >> 7 & 7) << 4;
  return dynamic_shared + at - SHARED_BASE;
}

// Bits that sums of E4M3 keep in tensor cores, of FAKE_FP8_BITS: 13 on Hopper and Ada; 0: those of f32.
inline int e4m3_bits() {
  const char *text = std::getenv("FAKE_FP8_BITS");
  return text ? std::atoi(text) : 0;
}
// Products and the sum so far, cut to `bits` below the largest exponent among them, added, and cut again.
template <int COUNT> float truncated_sum(float sum, const float *a, const float *b, int bits) {
  int largest = -200, e;
  float products[COUNT];
  if (sum != 0) frexpf(sum, &largest);
  for (int k = 0; k < COUNT; ++k) {
    products[k] = a[k] * b[k];
    if (products[k] == 0) continue;
    frexpf(products[k], &e);
    largest = e > largest ? e : largest;
  }
  const float step = ldexpf(1.0f, largest - 1 - bits);
  float all = truncf(sum / step);
  for (int k = 0; k < COUNT; ++k) all += truncf(products[k] / step);
  all *= step;
  if (all == 0) return 0;
  frexpf(all, &e);
  const float unit = ldexpf(1.0f, e - 1 - bits);
  return truncf(all / unit) * unit;
}

// A thread has rows `r` and `r + 8` of its warp's sixteen and two of every eight columns.
template <int SIZE, float (*VALUE)(const void *)> void wgmma(float (&d)[128], uint64_t a, uint64_t b) {
  struct Both {
    uint64_t a, b;
  };
  auto all = exchange(Both{a, b});
  for (unsigned lane = 0; lane < 32; ++lane)
    if (std::memcmp(all[lane], all[0], sizeof(Both))) fail("lanes name different operands");
  if (!self->ordered) fail("products begin before registers are ordered");
  const int count = 32 / SIZE;
  auto read = [&](uint64_t descriptor, unsigned row, float (&values)[count]) {
    for (unsigned piece = 0; piece < 2; ++piece) {
      Reading reading;
      reading.from = operand_piece(descriptor, row, piece);
      std::memcpy(reading.bytes, reading.from, 16);
      for (int i = 0; i < count / 2; ++i) values[piece * (count / 2) + i] = VALUE(reading.bytes + i * SIZE);
      self->begun.push_back(reading);
    }
  };
  unsigned lane = self->lane, first = self->warp % 4 * 16 + lane / 4;
  float rows[2][count], columns[64][count], sums[2][64], across[count][64];
  read(a, first, rows[0]);
  read(a, first + 8, rows[1]);
  for (unsigned c = 0; c < 64; ++c) {
    read(b, c / 2 * 8 + lane % 4 * 2 + c % 2, columns[c]);
    for (int k = 0; k < count; ++k) across[k][c] = columns[c][k];
  }
  const int bits = SIZE == 1 ? e4m3_bits() : 0;
  for (unsigned half = 0; half < 2; ++half) {
    for (unsigned c = 0; c < 64; ++c) sums[half][c] = d[c / 2 * 4 + half * 2 + c % 2];
    if (bits)
      for (unsigned c = 0; c < 64; ++c) sums[half][c] = truncated_sum<count>(sums[half][c], rows[half], columns[c], bits);
    else
      for (int k = 0; k < count; ++k)
        for (unsigned c = 0; c < 64; ++c) sums[half][c] += rows[half][k] * across[k][c];
    for (unsigned c = 0; c < 64; ++c) d[c / 2 * 4 + half * 2 + c % 2] = sums[half][c];
  }
}
} // namespace shim

inline unsigned shared_address(const void *p) {
  return (unsigned)((const unsigned char *)p - shim::dynamic_shared) + shim::SHARED_BASE;
}
inline void wgmma_written() {}
inline void wgmma_begin() { shim::self->ordered = true; }
inline void wgmma_commit() {
  shim::self->products.push_back(std::move(shim::self->begun));
  shim::self->begun.clear();
  shim::self->ordered = false;
}
template <int PENDING> void wgmma_wait() {
  auto &products = shim::self->products;
  while (products.size() > PENDING) {
    for (auto &reading : products.front())
      if (std::memcmp(reading.from, reading.bytes, 16)) shim::fail("an operand was overwritten under a product");
    products.pop_front();
  }
}
inline void wgmma_bf16(float (&d)[128], uint64_t a, uint64_t b) { shim::wgmma<2, shim::bf16>(d, a, b); }
inline void wgmma_e4m3(float (&d)[128], uint64_t a, uint64_t b) { shim::wgmma<1, shim::e4m3>(d, a, b); }

inline void copy_start(void *to, const void *from, bool there) {
  shim::Copy c;
  c.to = to;
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) shim::fail("a copy off its alignment");
  if (there)
    std::memcpy(c.bytes, from, 16);
  else
    std::memset(c.bytes, 0, 16);
  std::memset(to, 0xff, 16);
  shim::self->open.push_back(c);
}
inline void copy_commit() {
  shim::self->groups.push_back(std::move(shim::self->open));
  shim::self->open.clear();
}
template <int PENDING> void copy_wait() {
  auto &groups = shim::self->groups;
  while (groups.size() > PENDING) {
    shim::land(groups.front());
    groups.pop_front();
  }
}
// The bytes of `a` and `b`, eight in all, that the digits of `which` name.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  uint64_t all = (uint64_t)b << 32 | a;
  unsigned v = 0;
  for (int i = 0; i < 4; ++i) v |= (unsigned)(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return v;
}
inline unsigned bf16_fma(unsigned a, unsigned b, unsigned c) {
  unsigned v = 0;
  for (int i = 0; i < 2; ++i) {
    uint16_t x = (uint16_t)(a >> 16 * i), y = (uint16_t)(b >> 16 * i), z = (uint16_t)(c >> 16 * i);
    // Products of bf16 and their sums with one are exact enough in double to round once.
    float sum = (float)((double)shim::bf16(&x) * shim::bf16(&y) + (double)shim::bf16(&z));
    unsigned bits = __float_as_uint(sum);
    v |= (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 << 16 * i;
  }
  return v;
}
inline uint4 load_streamed(const void *p, bool there) {
  uint4 v = {0, 0, 0, 0};
  if (!there) return v;
  if ((uintptr_t)p % 16) shim::fail("a load off its alignment");
  std::memcpy(&v, p, 16);
  return v;
}
