// The sources of the program that an MPI's compiler is given (mpi_rank.cc), as text in this
// program. Made by the build.

#ifndef EVENKEEL_TOOLS_BENCH_MPI_SOURCES_H_
#define EVENKEEL_TOOLS_BENCH_MPI_SOURCES_H_

#include <span>

namespace evenkeel::bench {

struct MpiSource {
  const char* name;
  const char* text;
};

extern const std::span<const MpiSource> kMpiSources;

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_MPI_SOURCES_H_
