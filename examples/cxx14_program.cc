// A program in C++14 that trains on all ranks, by trainer_facade.h: a line through points.

#include <cstdio>
#include <string>
#include <vector>

#include "evenkeel/examples/trainer_facade.h"

#if __cplusplus > 201703L
#error "this file shows what compiles without C++20"
#endif

int main() {
  std::vector<double> line = {0, 0}, gradient(2);
  int next = 0;
  const std::string error = TrainOnAllRanks({line.data(), gradient.data(), line.size()}, 0.5, [&] {
    const double x = (next % 7) / 7.0, miss = line[0] * x + line[1] - (2 * x + 1);
    gradient = {miss * x, miss};
    return next++ < 300;
  });
  if (!error.empty()) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 1;
  }
  std::printf("slope=%.6f\n", line[0]);
  return 0;
}
