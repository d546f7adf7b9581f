#include "evenkeel/tools/bench/mpi.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

// A folder for this test alone, with programs that are shell scripts.
class MpiTest : public testing::Test {
 protected:
  MpiTest() {
    folder_ = std::string(std::getenv("TEST_TMPDIR")) + "/" +
              testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  std::string Add(const std::string& name, const std::string& script = "exit 0") {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << "#!/bin/sh\n" << script << "\n";
    chmod(path.c_str(), 0755);
    return path;
  }
  std::vector<std::string> Found() const {
    std::vector<std::string> names;
    for (const Mpi& mpi : FindMpis("/does/not/exist:" + folder_)) names.push_back(mpi.name);
    return names;
  }

  std::string folder_;
};

TEST_F(MpiTest, FindsThoseThatHaveBothPrograms) {
  EXPECT_THAT(Found(), ElementsAre());
  Add("mpirun");
  EXPECT_THAT(Found(), ElementsAre());
  Add("mpicxx");
  EXPECT_THAT(Found(), ElementsAre("mpi"));
  Add("mpirun.mpich");
  Add("mpicxx.mpich");
  EXPECT_THAT(Found(), ElementsAre("mpich")) << "what is called mpirun is probably the same";
  Add("mpirun.openmpi");
  Add("mpicxx.openmpi");
  EXPECT_THAT(Found(), ElementsAre("openmpi", "mpich"));
}

TEST_F(MpiTest, NamesWhatIsMissing) {
  EXPECT_EQ(CheckThere({"mpi", "mpirun", "mpicxx"}, folder_),
            absl::NotFoundError("mpi: cannot find mpirun"));
  Add("mpirun");
  EXPECT_EQ(CheckThere({"mpi", "mpirun", "mpicxx"}, folder_),
            absl::NotFoundError("mpi: cannot find mpicxx"));
  EXPECT_TRUE(CheckThere({"mpi", Add("here"), Add("there")}, "").ok());
}

TEST_F(MpiTest, OpenMpiIsToldWhatItAsksFor) {
  const Mpi open{"mpi", Add("open", "echo 'mpirun (Open MPI) 4.1.4'"), ""};
  const absl::StatusOr<Program> program =
      MpiProgram(open, "/x/mpi_rank", 3, folder_, " --mca  btl self ");
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_THAT(program->command, Contains("--oversubscribe"));
  const std::vector<std::string> end(program->command.end() - 5, program->command.end());
  EXPECT_THAT(end, ElementsAre("--mca", "btl", "self", "/x/mpi_rank", folder_));
}

TEST_F(MpiTest, OthersAreNot) {
  const Mpi other{"mpi", Add("hydra", "echo 'HYDRA build details:'"), ""};
  const absl::StatusOr<Program> program = MpiProgram(other, "/x/mpi_rank", 3, folder_, "");
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_THAT(program->command, ElementsAre(other.mpirun, "-n", "3", "/x/mpi_rank", folder_));
}

TEST_F(MpiTest, WhatACompilerComplainsOfIsSaid) {
  const Mpi mpi{"mpi", "", Add("mpicxx", "echo there is no such option; exit 3")};
  EXPECT_THAT(CompileMpiRank(mpi, folder_).status().message(),
              HasSubstr("failed: there is no such option"));
}

// The sources need nothing but what they carry: a compiler sees the folder and a header that stands
// for the MPI's.
TEST_F(MpiTest, SourcesAreCompleteWithoutThisRepository) {
  std::ofstream(folder_ + "/mpi.h") << R"(
    using MPI_Datatype = int; using MPI_Comm = int; using MPI_Op = int; struct MPI_Status;
    constexpr int MPI_FLOAT = 1, MPI_DOUBLE = 2, MPI_INT32_T = 3, MPI_INT64_T = 4, MPI_DATATYPE_NULL = 5, MPI_SUM = 6,
        MPI_COMM_WORLD = 7, MPI_SUCCESS = 0, MPI_ERR_OP = 9, MPI_MAX_ERROR_STRING = 256, MPI_ERRORS_RETURN = 10;
    static void* const MPI_IN_PLACE = nullptr; static MPI_Status* const MPI_STATUS_IGNORE = nullptr;
    int MPI_Init(int*, char***); int MPI_Finalize(); int MPI_Comm_rank(int, int*); int MPI_Comm_size(int, int*);
    int MPI_Comm_set_errhandler(int, int); int MPI_Error_string(int, char*, int*);
    int MPI_Allreduce(const void*, void*, int, int, int, int); int MPI_Barrier(int);
    int MPI_Reduce(const void*, void*, int, int, int, int, int); int MPI_Bcast(void*, int, int, int, int);
    int MPI_Reduce_scatter_block(const void*, void*, int, int, int, int);
    int MPI_Allgather(const void*, int, int, void*, int, int, int);
    int MPI_Alltoall(const void*, int, int, void*, int, int, int);
    int MPI_Sendrecv(const void*, int, int, int, int, void*, int, int, int, int, int, MPI_Status*);)";
  const Mpi mpi{"mpi", "", Add("mpicxx", R"(
      for last in "$@"; do :; done
      exec c++ -Wall -Wextra -Werror -c "$@")")};
  const absl::StatusOr<std::string> binary = CompileMpiRank(mpi, folder_);
  EXPECT_TRUE(binary.ok()) << binary.status();
  EXPECT_TRUE(std::filesystem::exists(*binary));
}

}  // namespace
}  // namespace evenkeel::bench
