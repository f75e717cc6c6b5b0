// cublasLt without a device: products of rows in plain loops, with what the real one asks of E4M3 operands.
// FAKE_LT_WRONG makes every sum twice as large, FAKE_LT_NONE leaves it without an algorithm, FAKE_LT_EXACT has every
// algorithm serve the rows alone that it was chosen for.
#include "shim.h"
#define API extern "C" __attribute__((visibility("default"))) int
namespace {
enum { OK = 0, INVALID = 7, UNSUPPORTED = 15, R32F = 0, BF16 = 14, E4M3 = 28 };
struct Layout {
  int dtype;
  uint64_t length, rows;
  int64_t pitch;
};
struct Description {
  bool turned = false, fast = false;
};
float value(const void *p, int dtype, size_t i) {
  if (dtype == R32F) return ((const float *)p)[i];
  return dtype == BF16 ? shim::bf16((const uint16_t *)p + i) : shim::e4m3((const unsigned char *)p + i);
}
} // namespace
API cublasLtCreate(void **h) { *h = std::malloc(1); return OK; }
API cublasLtDestroy(void *h) { std::free(h); return OK; }
API cublasLtMatrixLayoutCreate(Layout **l, int dtype, uint64_t length, uint64_t rows, int64_t pitch) {
  *l = new Layout{dtype, length, rows, pitch};
  return pitch < (int64_t)length ? INVALID : OK;
}
API cublasLtMatrixLayoutDestroy(Layout *l) { delete l; return OK; }
API cublasLtMatmulDescCreate(Description **d, int compute, int scale) {
  *d = new Description;
  return compute == 68 && scale == R32F ? OK : INVALID;
}
API cublasLtMatmulDescSetAttribute(Description *d, int what, const void *value, size_t size) {
  if (what == 25) {
    d->fast = *(const signed char *)value != 0;
    return size == 1 ? OK : INVALID;
  }
  if (what != 3 || size != 4) return INVALID;
  d->turned = *(const int *)value == 1;
  return OK;
}
API cublasLtMatmulDescDestroy(Description *d) { delete d; return OK; }
API cublasLtMatmulPreferenceCreate(void **p) { *p = std::malloc(1); return OK; }
API cublasLtMatmulPreferenceSetAttribute(void *, int what, const void *, size_t size) {
  return (what == 1 && size == 8) || (what >= 5 && what <= 8 && size == 4) ? OK : INVALID;
}
API cublasLtMatmulPreferenceDestroy(void *p) { std::free(p); return OK; }
struct Found {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
API cublasLtMatmulAlgoGetHeuristic(void *, Description *d, Layout *w, Layout *x, Layout *, Layout *y, void *, int,
                                   Found *found, int *count) {
  std::memset(found, 0, sizeof *found);
  *count = 0;
  if (std::getenv("FAKE_LT_NONE")) return UNSUPPORTED;
  if (!d->turned || w->length != x->length || y->length != w->rows || y->rows != x->rows) return INVALID;
  if (w->dtype == E4M3 && (w->length % 16 || w->rows % 16)) return UNSUPPORTED;
  *count = 1;
  found->algorithm[0] = x->rows;
  return OK;
}
API cublasLtMatmul(void *, Description *d, const float *alpha, const void *w, Layout *wl, const void *x, Layout *xl,
                   const float *beta, const void *, Layout *, void *y, Layout *yl, const uint64_t *algorithm, void *, size_t, void *) {
  if (!d->turned || wl->length != xl->length || yl->length != wl->rows || *beta != 0) return INVALID;
  if (std::getenv("FAKE_LT_EXACT") && algorithm[0] != xl->rows) return UNSUPPORTED;
  float factor = std::getenv("FAKE_LT_WRONG") ? 2 * *alpha : *alpha;
  for (uint64_t m = 0; m < xl->rows; ++m)
    for (uint64_t n = 0; n < wl->rows; ++n) {
      float sum = 0;
      const int bits = d->fast ? shim::e4m3_bits() : 0;
      for (uint64_t k = 0; k < wl->length && !bits; ++k)
        sum += value(w, wl->dtype, n * wl->pitch + k) * value(x, xl->dtype, m * xl->pitch + k);
      for (uint64_t k = 0; k < wl->length && bits; k += 32) {
        float a[32] = {}, b[32] = {};
        for (uint64_t i = 0; i < 32 && k + i < wl->length; ++i) {
          a[i] = value(w, wl->dtype, n * wl->pitch + k + i);
          b[i] = value(x, xl->dtype, m * xl->pitch + k + i);
        }
        sum = shim::truncated_sum<32>(sum, a, b, bits);
      }
      sum *= factor;
      if (yl->dtype == R32F) {
        ((float *)y)[m * yl->pitch + n] = sum;
      } else {
        unsigned bits = __float_as_uint(sum);
        ((uint16_t *)y)[m * yl->pitch + n] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
      }
    }
  return OK;
}
