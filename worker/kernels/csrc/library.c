// What the library asks of the system.
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#include "vec.h"

// Whether the kernel lets this process use the tiles of AMX; it wants to be asked once, before the first use.
EXPORT int allow_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
