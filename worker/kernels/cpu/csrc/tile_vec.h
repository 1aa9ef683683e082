// The functions of products with matrices that are not quantized, which are compiled once for all that multiply.
#pragma once

#include "tile.h"

void lay_dwords(uint32_t *to, const char *x, long stride, long rows, const weights *w);

// Multiplies one tile, whose rows are as `lay_dwords` wrote them.
void multiply_vec(const tiles *t, const weights *w, long number);
