// The functions of `linear` for matrices in e4m3, which are compiled apart, because that takes a while.
#pragma once

#include "tile.h"

// The size of a row as `lay_e4m3` writes it.
long e4m3_dwords(const weights *w);

void lay_e4m3(uint32_t *to, const char *x, long stride, long rows, const weights *w);
void multiply_e4m3(const tiles *t, const weights *w, long panel);
