// A disk for tests, which is preloaded into a program (LD_PRELOAD): a flush takes SLOW_DISK_MS
// milliseconds, and fails while the file FULL_DISK exists.

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

extern "C" int fsync(int descriptor) {
  if (const char* const delay = getenv("SLOW_DISK_MS")) usleep(atoi(delay) * 1000);
  const char* const full = getenv("FULL_DISK");
  if (full != nullptr && access(full, F_OK) == 0) {
    errno = ENOSPC;
    return -1;
  }
  static const auto real = reinterpret_cast<int (*)(int)>(dlsym(RTLD_NEXT, "fsync"));
  return real(descriptor);
}
