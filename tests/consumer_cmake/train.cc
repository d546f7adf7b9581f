// One rank of a job, over the backend that is named:
//
//   launch --nproc=2 -- train shm

#include <cstdio>
#include <string>

#include "fit_line.h"

int main(int argc, char** argv) {
  const std::string found = FitLine(argc > 1 ? argv[1] : "auto");
  std::printf("%s\n", found.c_str());
  return found.rfind("error", 0) == 0 ? 1 : 0;
}
