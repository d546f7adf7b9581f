// The MPIs of this machine in the benchmark: a small program is compiled with an MPI's own
// compiler, and run by its mpirun. Nothing of an MPI is needed to build evenkeel.
//
//   for (const Mpi& mpi : FindMpis(path)) { ... }  // "openmpi", "mpich", or one "mpi"
//   EK_ASSIGN_OR_RETURN(std::string binary, CompileMpiRank(mpi, folder));
//   EK_ASSIGN_OR_RETURN(Program program,
//                       MpiProgram(mpi, binary, 2, folder, "--mca btl self,vader"));
//
// Errors: Unavailable with the output of the compiler or mpirun.

#ifndef EVENKEEL_TOOLS_BENCH_MPI_H_
#define EVENKEEL_TOOLS_BENCH_MPI_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tools/bench/process.h"

namespace evenkeel::bench {

struct Mpi {
  std::string name;    // "mpi", "openmpi", "mpich"
  std::string mpirun;  // A name in PATH, or a path.
  std::string mpicxx;
};

// All that may stand in --backends.
std::vector<Mpi> KnownMpis();

// Returns the MPIs whose mpirun and mpicxx are in `path`, a list of folders as in PATH: Debian's
// openmpi and mpich, which can be installed side by side, else the program called mpirun.
std::vector<Mpi> FindMpis(absl::string_view path);

// OK, or NotFound naming the program that is not in `path`.
absl::Status CheckThere(const Mpi& mpi, absl::string_view path);

// Writes the program's sources to `folder` and compiles them; returns the program's path.
absl::StatusOr<std::string> CompileMpiRank(const Mpi& mpi, const std::string& folder);

// How to start `world` ranks of it, pinned to nothing, that find the benchmark in `folder`. Asks
// mpirun which MPI it is of: Open MPI refuses root, and more ranks than cores, unless it is told
// otherwise.
absl::StatusOr<Program> MpiProgram(const Mpi& mpi, const std::string& binary, int world,
                                   const std::string& folder, absl::string_view more_arguments);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_MPI_H_
