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
  const absl::StatusOr<std::vector<std::string>> command = MpiCommand(open, 3);
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_THAT(*command, Contains("--oversubscribe"));
}

TEST_F(MpiTest, OthersAreNot) {
  const Mpi other{"mpi", Add("hydra", "echo 'HYDRA build details:'"), ""};
  const absl::StatusOr<std::vector<std::string>> command = MpiCommand(other, 3);
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_THAT(*command, ElementsAre(other.mpirun, "-n", "3"));
}

TEST_F(MpiTest, AFlagThatMpirunRefusesIsFoundBeforeTheRun) {
  const Mpi picky{"mpi",
                  Add("picky",
                      "[ \"$1\" = --version ] && exec echo 'Open MPI 6'\n"
                      "echo \"there is no option $3\"; exit 2"),
                  ""};
  EXPECT_THAT(MpiCommand(picky, 3).status().message(),
              HasSubstr("failed: there is no option --oversubscribe"));
}

TEST_F(MpiTest, WhatACompilerComplainsOfIsSaid) {
  const Mpi mpi{"mpi", "", Add("mpicxx", "echo there is no such option; exit 3")};
  EXPECT_THAT(CompileMpiLibrary(mpi, folder_).status().message(),
              HasSubstr("failed: there is no such option"));
}

// An MPI of one rank, whose sum counts how often it was asked, and fails for the third time.
TEST_F(MpiTest, TheLibraryIsCompiledAndCalled) {
  std::ofstream(folder_ + "/mpi.h") << R"(
    using MPI_Datatype = int; using MPI_Comm = int;
    constexpr int MPI_FLOAT = 1, MPI_SUM = 6, MPI_COMM_WORLD = 7, MPI_SUCCESS = 0, MPI_MAX_ERROR_STRING = 256,
        MPI_ERRORS_RETURN = 10;
    static void* const MPI_IN_PLACE = nullptr;
    inline int calls = 0;
    inline int MPI_Init(int*, char***) { return 0; }
    inline int MPI_Finalize() { return 0; }
    inline int MPI_Comm_rank(int, int* rank) { *rank = 2; return 0; }
    inline int MPI_Comm_size(int, int* size) { *size = 3; return 0; }
    inline int MPI_Comm_set_errhandler(int, int) { return 0; }
    inline int MPI_Error_string(int, char* text, int* size) { text[0] = 'x'; text[1] = 0; *size = 1; return 0; }
    inline int MPI_Allreduce(const void*, void* data, int count, int, int, int) {
      static_cast<float*>(data)[count - 1] += static_cast<float>(++calls);
      return calls == 3;
    })";
  const Mpi mpi{"mpi", "",
                Add("mpicxx", "exec c++ -Wall -Wextra -Werror -I" + folder_ + " \"$@\"")};
  const absl::StatusOr<std::string> library = CompileMpiLibrary(mpi, folder_);
  ASSERT_TRUE(library.ok()) << library.status();
  const absl::StatusOr<MpiRank> rank = StartMpi(*library);
  ASSERT_TRUE(rank.ok()) << rank.status();
  EXPECT_EQ(rank->rank, 2);
  EXPECT_EQ(rank->world, 3);
  const Case what{.op = Op::kAllReduce, .bytes = 8, .world = 3};
  float data[] = {0, 0};
  EXPECT_TRUE(rank->transport->Supports(what).ok());
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(rank->transport->Run(what, nullptr, data).ok());
  EXPECT_THAT(data, ElementsAre(0, 3));
  EXPECT_EQ(rank->transport->Run(what, nullptr, data), absl::UnavailableError("x"));
  EXPECT_EQ(rank->transport->Supports({.op = Op::kReduce, .bytes = 8, .world = 3}),
            absl::UnimplementedError("only all_reduce is measured with an MPI"));
}

TEST_F(MpiTest, ALibraryThatIsNotThereIsNamed) {
  EXPECT_THAT(StartMpi("/no/such/mpi.so").status().message(), HasSubstr("/no/such/mpi.so"));
}

}  // namespace
}  // namespace evenkeel::bench
