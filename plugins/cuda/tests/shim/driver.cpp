// A driver library without a device: memory is the process's own, streams do what they are told at once, and
// a kernel is looked up by name among those compiled for the CPU. What a module's image holds is ignored.
//
// A stream that is recorded notes its launches with their arguments and does nothing; memory, copies and waiting spoil it.
//
// Environment: FAKE_GPU_COUNT (1), FAKE_GPU_ARCH (90), FAKE_GPU_DRIVER (13000), FAKE_GPU_FREE (8 GiB),
// FAKE_GPU_LOSE_AFTER launches after which everything answers that the device is gone, FAKE_GPU_BREAK a part
// of the names of kernels whose launch fails, FAKE_GPU_WRONG of those that do nothing.
#include "shim.h"
#include <map>
#include <mutex>

extern const shim::Kernel KERNELS[];
extern const unsigned KERNEL_COUNT;

namespace {
std::recursive_mutex whole;
long setting(const char *name, long otherwise) {
  const char *text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}
bool names(const char *variable, const char *kernel) {
  const char *part = std::getenv(variable);
  return part && *part && std::strstr(kernel, part);
}
enum { OK = 0, INVALID = 1, MEMORY = 2, NOT_FOUND = 500, LOST = 719, LAUNCH = 701, UNSUPPORTED = 900, SPOILT = 901 };
struct Noted {
  const shim::Kernel *kernel;
  dim3 grid, block;
  unsigned shared;
  std::vector<std::vector<unsigned char>> arguments;
};
struct Tape {
  bool spoilt = false;
  std::vector<Noted> noted;
};
// By stream.
std::map<void *, Tape> recording;
bool spoils() {
  for (auto &each : recording) each.second.spoilt = true;
  return !recording.empty();
}
std::map<uintptr_t, size_t> blocks;
size_t used = 0;
long launches = 0;
thread_local void *current = nullptr;
bool lost() {
  long after = setting("FAKE_GPU_LOSE_AFTER", -1);
  return after >= 0 && launches > after;
}
bool inside(uintptr_t p, size_t n) {
  auto it = blocks.upper_bound(p);
  if (it == blocks.begin()) return false;
  --it;
  return p + n <= it->first + it->second;
}
} // namespace

#define LOCK std::lock_guard<std::recursive_mutex> lock(whole)
#define API extern "C" __attribute__((visibility("default"))) int

API cuInit(unsigned) { return OK; }
API cuDriverGetVersion(int *v) { *v = (int)setting("FAKE_GPU_DRIVER", 13000); return OK; }
API cuDeviceGetCount(int *n) { *n = (int)setting("FAKE_GPU_COUNT", 1); return OK; }
API cuDeviceGet(int *d, int i) { *d = i; return OK; }
API cuDeviceGetName(char *to, int n, int) { std::snprintf(to, n, "no device at all"); return OK; }
API cuDeviceTotalMem_v2(size_t *n, int) { *n = (size_t)16 << 30; return OK; }
API cuDeviceGetAttribute(int *v, int what, int) {
  long arch = setting("FAKE_GPU_ARCH", 90);
  *v = what == 75 ? arch / 10 : what == 76 ? arch % 10 : what == 16 ? 4 : what == 97 ? 232448 : 0;
  return OK;
}
API cuDevicePrimaryCtxRetain(void **c, int) { *c = (void *)0x10; return OK; }
API cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API cuCtxSetCurrent(void *c) { current = c; return OK; }
API cuCtxGetCurrent(void **c) { *c = current; return OK; }
API cuCtxSynchronize() { return lost() ? LOST : OK; }
API cuMemGetInfo_v2(size_t *f, size_t *total) {
  LOCK;
  if (!current) return 201;
  size_t all = (size_t)setting("FAKE_GPU_FREE", (long)8 << 30);
  *total = (size_t)16 << 30;
  *f = all > used ? all - used : 0;
  return lost() ? LOST : OK;
}
API cuMemAlloc_v2(uintptr_t *p, size_t n) {
  LOCK;
  if (!current) return 201;
  if (lost()) return LOST;
  if (spoils()) return UNSUPPORTED;
  if (n + used > (size_t)setting("FAKE_GPU_FREE", (long)8 << 30)) return MEMORY;
  *p = (uintptr_t)std::aligned_alloc(256, (n + 255) / 256 * 256);
  // Poison, as far as what is small enough to be read whole goes.
  std::memset((void *)*p, 0xff, n < 1 << 20 ? n : 1 << 20);
  blocks[*p] = n;
  used += n;
  return OK;
}
API cuMemFree_v2(uintptr_t p) {
  LOCK;
  auto it = blocks.find(p);
  if (it == blocks.end()) return INVALID;
  used -= it->second;
  std::free((void *)p);
  blocks.erase(it);
  return OK;
}
API cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t n) {
  LOCK;
  if (lost()) return LOST;
  if (!inside(to, n)) return INVALID;
  std::memcpy((void *)to, from, n);
  return OK;
}
API cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t n) {
  LOCK;
  if (lost()) return LOST;
  if (!inside(from, n)) return INVALID;
  std::memcpy(to, (void *)from, n);
  return OK;
}
API cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t n, void *) { return cuMemcpyHtoD_v2(to, from, n); }
API cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t n, void *) { return cuMemcpyDtoH_v2(to, from, n); }
API cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t n, void *) {
  LOCK;
  if (lost()) return LOST;
  if (!inside(to, n) || !inside(from, n)) return INVALID;
  std::memcpy((void *)to, (void *)from, n);
  return OK;
}
API cuMemsetD8Async(uintptr_t p, unsigned char v, size_t n, void *) {
  LOCK;
  if (lost()) return LOST;
  if (!inside(p, n)) return INVALID;
  std::memset((void *)p, v, n);
  return OK;
}
API cuStreamCreate(void **s, unsigned) { *s = std::malloc(1); return lost() ? LOST : OK; }
API cuStreamDestroy_v2(void *s) { std::free(s); return OK; }
API cuStreamSynchronize(void *) {
  LOCK;
  return lost() ? LOST : spoils() ? UNSUPPORTED : OK;
}
API cuStreamQuery(void *s) {
  LOCK;
  return lost() ? LOST : recording.count(s) ? UNSUPPORTED : OK;
}
API cuStreamBeginCapture_v2(void *s, int) {
  LOCK;
  if (lost()) return LOST;
  return recording.emplace(s, Tape()).second ? OK : INVALID;
}
API cuStreamEndCapture(void *s, void **graph) {
  LOCK;
  auto it = recording.find(s);
  if (it == recording.end()) return INVALID;
  *graph = it->second.spoilt ? nullptr : new Tape(std::move(it->second));
  recording.erase(it);
  return lost() ? LOST : *graph ? OK : SPOILT;
}
API cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long) {
  *exec = new Tape(*static_cast<Tape *>(graph));
  return lost() ? LOST : OK;
}
API cuGraphDestroy(void *graph) { delete static_cast<Tape *>(graph); return OK; }
API cuGraphExecDestroy(void *exec) { delete static_cast<Tape *>(exec); return OK; }
API cuEventCreate(void **e, unsigned) { *e = std::malloc(1); return lost() ? LOST : OK; }
API cuEventDestroy_v2(void *e) { std::free(e); return OK; }
API cuEventRecord(void *, void *) { return lost() ? LOST : OK; }
API cuEventSynchronize(void *) { return lost() ? LOST : OK; }
API cuEventElapsedTime(float *ms, void *, void *) { *ms = 0.5f; return OK; }
API cuModuleLoadData(void **m, const void *) { *m = (void *)0x20; return lost() ? LOST : OK; }
API cuModuleUnload(void *) { return OK; }
API cuModuleGetFunction(const shim::Kernel **f, void *, const char *name) {
  for (unsigned i = 0; i < KERNEL_COUNT; ++i)
    if (!std::strcmp(KERNELS[i].name, name)) {
      *f = &KERNELS[i];
      return OK;
    }
  return NOT_FOUND;
}
API cuFuncSetAttribute(const shim::Kernel *, int, int) { return OK; }
API cuLaunchKernel(const shim::Kernel *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **) {
  LOCK;
  if (!current) return 201;
  auto tape = recording.find(stream);
  if (tape != recording.end()) {
    Noted noted = {f, {gx, gy, gz}, {bx, by, bz}, shared, {}};
    auto sizes = f->sizes();
    for (size_t i = 0; i < sizes.size(); ++i) {
      auto *from = static_cast<unsigned char *>(params[i]);
      noted.arguments.emplace_back(from, from + sizes[i]);
    }
    tape->second.noted.push_back(std::move(noted));
    return lost() ? LOST : OK;
  }
  ++launches;
  if (lost()) return LOST;
  if (names("FAKE_GPU_BREAK", f->name)) return LAUNCH;
  if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || shared > 232448) return INVALID;
  if (names("FAKE_GPU_WRONG", f->name)) return OK;
  shim::launch({gx, gy, gz}, {bx, by, bz}, shared, f->call, params);
  return OK;
}
API cuGraphLaunch(void *exec, void *stream) {
  LOCK;
  for (Noted &noted : static_cast<Tape *>(exec)->noted) {
    std::vector<void *> params;
    for (auto &argument : noted.arguments) params.push_back(argument.data());
    const dim3 &g = noted.grid, &b = noted.block;
    if (int answer = cuLaunchKernel(noted.kernel, g.x, g.y, g.z, b.x, b.y, b.z, noted.shared, stream, params.data(), nullptr))
      return answer;
  }
  return OK;
}
API cuGetErrorName(int e, const char **text) {
  *text = e == LOST ? "CUDA_ERROR_LAUNCH_FAILED" : e == MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return OK;
}
API cuGetErrorString(int, const char **text) { *text = "said by a driver that drives nothing"; return OK; }
