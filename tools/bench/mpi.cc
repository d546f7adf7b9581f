#include "evenkeel/tools/bench/mpi.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/measure/rank_job.h"

namespace evenkeel::bench {
namespace {

// The source of the library. Only an MPI's own header has its types and constants.
constexpr char kSource[] = R"(#include <mpi.h>
#include <climits>

extern "C" {
int evenkeel_mpi_start(int* rank, int* world) {
  if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS) return 1;
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, world);
  return MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN) != MPI_SUCCESS;
}
const char* evenkeel_mpi_all_reduce(float* data, long count) {
  if (count > INT_MAX) return "MPI counts elements in an int";
  const int code = MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (code == MPI_SUCCESS) return nullptr;
  static char text[MPI_MAX_ERROR_STRING + 1];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}
void evenkeel_mpi_stop() { MPI_Finalize(); }
}
)";

// The limit for the compiler, for mpirun with a program that does nothing, and for an MPI to start
// and to finalize.
constexpr unsigned kMostSeconds = 60;

bool IsThere(absl::string_view program, absl::string_view path) {
  if (absl::StrContains(program, '/')) return access(std::string(program).c_str(), X_OK) == 0;
  for (absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
    if (access(absl::StrCat(folder, "/", program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

// Runs a program to its end, and returns its output.
absl::StatusOr<std::string> OutputOf(const std::vector<std::string>& command) {
  constexpr size_t kMostInMessage = 800;
  const std::string line = ShellCommand(command, absl::Seconds(kMostSeconds));
  FILE* const pipe = popen((line + " 2>&1 </dev/null").c_str(), "r");
  if (pipe == nullptr) return absl::ErrnoToStatus(errno, command[0]);
  std::string output;
  char buffer[4096];
  while (const size_t size = fread(buffer, 1, sizeof(buffer), pipe)) output.append(buffer, size);
  if (pclose(pipe) == 0) return output;
  if (output.size() > kMostInMessage)
    output = absl::StrCat("... ", output.substr(output.size() - kMostInMessage));
  return absl::UnavailableError(absl::StrCat(absl::StrJoin(command, " "), " failed: ", output));
}

class MpiTransport : public Transport {
 public:
  MpiTransport(const char* (*all_reduce)(float*, long), void (*stop)())
      : all_reduce_(all_reduce), stop_(stop) {}
  ~MpiTransport() override {
    alarm(kMostSeconds);
    stop_();
    alarm(0);
  }

  absl::Status Supports(const Case& what) const override { return OnlyAllReduce(what, "an MPI"); }
  absl::Status Run(const Case& what, float*, float* out) override {
    const char* const trouble = all_reduce_(out, what.count());
    return trouble == nullptr ? absl::OkStatus() : absl::UnavailableError(trouble);
  }

 private:
  const char* (*const all_reduce_)(float*, long);
  void (*const stop_)();
};

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

absl::StatusOr<std::string> CompileMpiLibrary(const Mpi& mpi, const std::string& folder) {
  const std::string source = folder + "/mpi.cc", library = folder + "/mpi.so";
  std::ofstream file(source);
  file << kSource;
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", source));
  EK_RETURN_IF_ERROR(
      OutputOf({mpi.mpicxx, "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", library})
          .status());
  return library;
}

absl::StatusOr<std::vector<std::string>> MpiCommand(const Mpi& mpi, int world) {
  EK_ASSIGN_OR_RETURN(const std::string version, OutputOf({mpi.mpirun, "--version"}));
  std::vector<std::string> command = {mpi.mpirun, "-n", absl::StrCat(world)};
  if (absl::StrContains(version, "Open MPI") || absl::StrContains(version, "OpenRTE")) {
    command.insert(command.end(), {"--oversubscribe", "--bind-to", "none"});
    if (geteuid() == 0) command.push_back("--allow-run-as-root");
  }
  std::vector<std::string> trial = command;
  trial.push_back("true");
  EK_RETURN_IF_ERROR(OutputOf(trial).status());
  return command;
}

absl::StatusOr<MpiRank> StartMpi(const std::string& library) {
  // Open MPI's plugins look for its symbols in the whole process.
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (loaded == nullptr) return absl::UnavailableError(dlerror());
  auto* const start = reinterpret_cast<int (*)(int*, int*)>(dlsym(loaded, "evenkeel_mpi_start"));
  auto* const all_reduce =
      reinterpret_cast<const char* (*)(float*, long)>(dlsym(loaded, "evenkeel_mpi_all_reduce"));
  auto* const stop = reinterpret_cast<void (*)()>(dlsym(loaded, "evenkeel_mpi_stop"));
  if (start == nullptr || all_reduce == nullptr || stop == nullptr)
    return absl::InternalError(absl::StrCat(library, " lacks a function (internal error)"));
  MpiRank mpi;
  alarm(kMostSeconds);
  if (start(&mpi.rank, &mpi.world) != 0) return absl::UnavailableError("MPI cannot be initialized");
  alarm(0);
  mpi.transport = std::make_unique<MpiTransport>(all_reduce, stop);
  return mpi;
}

}  // namespace evenkeel::bench
