// The functions of `linear` for matrices in e4m3, which are compiled apart, because that takes a while.
#pragma once

#include "quantized.h"

// The size of a row as `lay_e4m3` writes it.
INLINE long e4m3_dwords(const weights *w) { return quads_of(w) * 4; }

void lay_e4m3(uint32_t *to, const char *x, long stride, long rows, const weights *w);
void multiply_e4m3(const uint32_t *x, long rows, const weights *w, long number, fetch ahead, float *sums);
