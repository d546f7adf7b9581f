#include "evenkeel/tools/bench/mpi.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/bench/mpi_sources.h"

namespace evenkeel::bench {
namespace {

bool IsThere(absl::string_view program, absl::string_view path) {
  if (absl::StrContains(program, '/')) return access(std::string(program).c_str(), X_OK) == 0;
  for (absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
    if (access(absl::StrCat(folder, "/", program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace

std::vector<Mpi> KnownMpis() {
  return {{"openmpi", "mpirun.openmpi", "mpicxx.openmpi"},
          {"mpich", "mpirun.mpich", "mpicxx.mpich"},
          {"mpi", "mpirun", "mpicxx"}};
}

std::vector<Mpi> FindMpis(absl::string_view path) {
  std::vector<Mpi> found;
  for (Mpi& mpi : KnownMpis()) {
    // The plain name is one of the others' where they are there.
    if (CheckThere(mpi, path).ok() && (mpi.name != "mpi" || found.empty()))
      found.push_back(std::move(mpi));
  }
  return found;
}

absl::Status CheckThere(const Mpi& mpi, absl::string_view path) {
  for (const std::string& program : {mpi.mpirun, mpi.mpicxx}) {
    if (!IsThere(program, path))
      return absl::NotFoundError(absl::StrCat(mpi.name, ": cannot find ", program));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CompileMpiRank(const Mpi& mpi, const std::string& folder) {
  const std::string at = folder + "/evenkeel/tools/bench", binary = folder + "/mpi_rank";
  std::error_code error;
  std::filesystem::create_directories(at, error);
  if (error)
    return absl::UnavailableError(absl::StrCat("cannot create ", at, ": ", error.message()));
  for (const MpiSource& source : kMpiSources) {
    const std::string path = absl::StrCat(at, "/", source.name);
    std::ofstream file(path);
    file << source.text;
    file.close();
    if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  const Program compiler{.command = {mpi.mpicxx, "-std=c++17", "-O2", "-I" + folder,
                                     at + "/mpi_rank.cc", "-o", binary}};
  EK_RETURN_IF_ERROR(RunToEnd(compiler, folder + "/log").status());
  return binary;
}

absl::StatusOr<Program> MpiProgram(const Mpi& mpi, const std::string& binary, int world,
                                   const std::string& folder, absl::string_view more_arguments) {
  EK_ASSIGN_OR_RETURN(const std::string version,
                      RunToEnd({.command = {mpi.mpirun, "--version"}}, folder + "/version"));
  std::vector<std::string> command = {mpi.mpirun, "-n", absl::StrCat(world)};
  if (absl::StrContains(version, "Open MPI") || absl::StrContains(version, "OpenRTE")) {
    command.insert(command.end(), {"--oversubscribe", "--bind-to", "none"});
    if (geteuid() == 0) command.push_back("--allow-run-as-root");
  }
  for (const absl::string_view argument : absl::StrSplit(more_arguments, ' ', absl::SkipEmpty())) {
    command.emplace_back(argument);
  }
  command.insert(command.end(), {binary, folder});
  return Program{.command = std::move(command)};
}

}  // namespace evenkeel::bench
