// A GPU's execution model on one CPU thread, enough of it for the kernels of `cu/`.
//
// Blocks run one after the other; the threads of a block are fibres that switch at barriers and at warp
// collectives, so a barrier that not everybody reaches is seen (the run ends with a message) and shared
// memory is shared. Tensor-core instructions exchange fragments exactly as the instruction set documents
// them; asynchronous copies land only when they are waited for, and until then their target holds NaN.
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

struct Fibre {
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  dim3 thread;
  unsigned lane = 0, warp = 0;
  unsigned parity = 0;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
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
inline uint4 load_streamed(const void *p) {
  if ((uintptr_t)p % 16) shim::fail("a load off its alignment");
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
