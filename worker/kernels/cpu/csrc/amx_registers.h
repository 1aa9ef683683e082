// The shapes of the registers of AMX: of each, up to 16 rows of up to 64 bytes.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) shapes;

// Sets up registers, which takes as long as ten products.
INLINE void set_shapes(const shapes *s) {
    // GCC believes that only the first 8 bytes are read, and may leave out the others.
    __asm__ volatile("" : : "r"(s) : "memory");
    _tile_loadconfig(s);
}
#endif
