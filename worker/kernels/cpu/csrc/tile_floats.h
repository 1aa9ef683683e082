// The functions of `linear` for matrices whose codes become floats, which are compiled apart, because that takes a while.
#pragma once

#include "tile.h"

// The size of a row as `lay_floats` writes it.
long floats_dwords(const weights *w);

void lay_floats(uint32_t *to, const char *x, long stride, long rows, const weights *w);
void multiply_floats(const tiles *t, const weights *w, long panel);
