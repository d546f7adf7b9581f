// The MPIs of this machine in the benchmark. A small library is compiled with an MPI's own
// compiler; its mpirun starts the benchmark's ranks, which load that library. To build evenkeel, no
// MPI is needed.
//
//   for (const Mpi& mpi : FindMpis(path)) { ... }  // "openmpi", "mpich", or one "mpi"
//   EK_ASSIGN_OR_RETURN(std::string library, CompileMpiLibrary(mpi, folder));
//   EK_ASSIGN_OR_RETURN(std::vector<std::string> command, MpiCommand(mpi, 2));
//
//   // on each rank
//   EK_ASSIGN_OR_RETURN(MpiRank mpi, StartMpi(library));
//
// Errors: Unavailable with the output of the compiler or mpirun if these fail or take 60 s, or if
//         MPI does not start. SIGALRM ends a rank whose MPI takes 60 s to start or to finalize. The
//         destructor of the transport waits for the other ranks, so a rank that fails must end
//         without destroying it.

#ifndef EVENKEEL_TOOLS_BENCH_MPI_H_
#define EVENKEEL_TOOLS_BENCH_MPI_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tools/bench/transport.h"

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

// Compiles the library in `folder`; returns its path.
absl::StatusOr<std::string> CompileMpiLibrary(const Mpi& mpi, const std::string& folder);

// Returns the beginning of a command that starts `world` ranks, pinned to nothing, after a trial
// with a program that does nothing. Asks mpirun to which MPI it belongs: Open MPI refuses to run as
// root, and more ranks than cores, unless flags allow them.
absl::StatusOr<std::vector<std::string>> MpiCommand(const Mpi& mpi, int world);

struct MpiRank {
  int rank = 0, world = 1;
  std::unique_ptr<Transport> transport;  // Its destructor finalizes MPI.
};
absl::StatusOr<MpiRank> StartMpi(const std::string& library);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_MPI_H_
