// SPDX-License-Identifier: Apache-2.0
// C functions that know nothing of jaxbridge.
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#pragma GCC visibility push(default)

void axpy(const double* x, int64_t n, double a, double* y) {
  for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

// More of each kind than there are registers.
int many(const float* x, int a1, int a2, int a3, int a4, int a5, int a6, int a7, long a8, float f1,
         double f2, float f3, float f4, float f5, float f6, float f7, float f8, float f9,
         double f10, const char* s, signed char c, unsigned char u, bool b, int32_t k,
         double* out) {
  const double all[] = {a1, a2,  a3, a4, a5, a6, a7,  (double)a8,        f1, f2, f3,
                        f4, f5,  f6, f7, f8, f9, f10, (double)strlen(s), c,  u,  b,
                        k,  x[0]};
  for (int i = 0; i < 24; i++) out[i] = all[i];
  return a1;
}

void pairs(const int* x, int n, int* y) {
  for (int i = 0; i < n; i++) {
    y[2 * i] = x[i];
    y[2 * i + 1] = -x[i];
  }
}

void iota(const int* seed, int n, int* y) {
  for (int i = 0; i < n; i++) y[i] = *seed + i;
}

void bump(float* x, int n) {
  for (int i = 0; i < n; i++) x[i] += 1;
}
