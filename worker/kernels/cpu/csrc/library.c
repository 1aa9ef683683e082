// Permissions that the library needs from the system.
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#include "vec.h"

// Asks Linux for permission to use the tiles of AMX, which is needed once before the first use; -> whether it is given.
EXPORT int allow_tiles(void) {
#if defined(__AMX_TILE__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}
