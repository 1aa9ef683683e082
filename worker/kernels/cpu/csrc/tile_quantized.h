// The functions of products with quantized matrices, which are compiled apart, because that takes a while.
#pragma once

#include "quantized_rows.h"
#include "tile.h"

// Multiplies one tile with a panel whose codes are read where they lie.
void multiply_in_place(const tiles *t, const weights *w, long panel);

// Multiplies tiles with a panel whose codes are brought into bytes: one chunk after the other, for all tiles at once.
void multiply_unpacked(const tiles *t, const weights *w, long panel);
