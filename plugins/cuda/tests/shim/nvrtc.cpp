// A compiler that compiles nothing: every program becomes the same few bytes, for tests of what is around it.
// FAKE_NVRTC_VERSION (13.0) is what it says it is.
#include <cstdlib>
#include <cstring>
#define API extern "C" __attribute__((visibility("default"))) int
static const char IMAGE[] = "\x7f" "ELF made of nothing";
API nvrtcVersion(int *major, int *minor) {
  const char *text = std::getenv("FAKE_NVRTC_VERSION");
  *major = text ? std::atoi(text) : 13;
  const char *dot = text ? std::strchr(text, '.') : nullptr;
  *minor = dot ? std::atoi(dot + 1) : 0;
  return 0;
}
API nvrtcGetNumSupportedArchs(int *n) { *n = 5; return 0; }
API nvrtcGetSupportedArchs(int *to) {
  const int archs[] = {80, 86, 89, 90, 100};
  std::memcpy(to, archs, sizeof archs);
  return 0;
}
API nvrtcCreateProgram(void **p, const char *, const char *, int, const char *const *, const char *const *) {
  *p = std::malloc(1);
  return 0;
}
API nvrtcCompileProgram(void *, int, const char *const *) { return 0; }
API nvrtcGetProgramLogSize(void *, size_t *n) { *n = 1; return 0; }
API nvrtcGetProgramLog(void *, char *to) { *to = 0; return 0; }
API nvrtcGetCUBINSize(void *, size_t *n) { *n = sizeof IMAGE - 1; return 0; }
API nvrtcGetCUBIN(void *, char *to) { std::memcpy(to, IMAGE, sizeof IMAGE - 1); return 0; }
API nvrtcDestroyProgram(void **p) { std::free(*p); *p = nullptr; return 0; }
