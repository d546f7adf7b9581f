// Runs the binary as a person does.

#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace {

using testing::HasSubstr;
using testing::Not;

struct Outcome {
  int code = -1;
  std::string output;  // Standard output and error.
};

std::string Folder() { return std::getenv("TEST_TMPDIR"); }

Outcome RunBench(const std::string& arguments, const std::string& variables = "") {
  Outcome outcome;
  const std::string command = absl::StrCat("TMPDIR=", Folder(), " ", variables,
                                           " tools/bench_collectives ", arguments, " 2>&1");
  FILE* const pipe = popen(command.c_str(), "r");
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    outcome.output.append(buffer, size);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return outcome;
}

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

TEST(BenchCollectivesTest, HasARowForEachBackendCollectiveAndSize) {
  const std::string path = Folder() + "/rows.json";
  const Outcome outcome =
      RunBench(absl::StrCat("--backends=shm,tcp,raw_gloo --registered= --sizes=100,5K --pairs=2 "
                            "--min_time=0.0001 --world=3 --json=",
                            path));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("3 ranks, float32"));
  EXPECT_THAT(outcome.output, HasSubstr("time / raw_gloo's"));
  EXPECT_THAT(outcome.output,
              HasSubstr("left out: raw_gloo: of Gloo all_reduce alone is measured"));
  std::set<std::tuple<std::string, std::string, int64_t, std::string>> seen;
  for (const nlohmann::json& row : ReadJson(path)) {
    SCOPED_TRACE(row.dump());
    EXPECT_EQ(row["world"], 3);
    EXPECT_EQ(row["registered"], false);
    EXPECT_GT(row["median_us"].get<double>(), 0);
    EXPECT_GE(row["spread_pct"].get<double>(), 0);
    EXPECT_EQ(row["pairs"], 2);
    const bool is_barrier = row["op"] == "barrier";
    EXPECT_EQ(row["busbw_gbs"].get<double>() > 0, !is_barrier);
    seen.emplace(row["backend"].get<std::string>(), row["op"].get<std::string>(),
                 row["bytes"].get<int64_t>(), row["timing"].get<std::string>());
    if (row["backend"] == "raw_gloo" || row["op"] != "all_reduce") continue;
    EXPECT_GT(row["time_over"]["raw_gloo"]["median"].get<double>(), 0);
  }
  // 7 collectives of two sizes, the loop and the barrier for 2 backends; all_reduce for a third.
  EXPECT_EQ(seen.size(), 2u * (7 * 2 + 2) + 3);
  EXPECT_TRUE(seen.contains({"tcp", "all_gather", 96, "each"})) << "a whole number of parts";
  EXPECT_TRUE(seen.contains({"raw_gloo", "all_reduce", 1024, "loop"}));
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("bench_collectives."))) << "left behind";
  }
}

TEST(BenchCollectivesTest, RegisteredMemoryIsARowOfItsOwn) {
  const std::string path = Folder() + "/registered.json";
  const Outcome outcome = RunBench(absl::StrCat(
      "--backends=shm --ops=all_reduce --sizes=4K --loop_sizes= --pairs=1 --json=", path));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  const nlohmann::json rows = ReadJson(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["registered"], false);
  EXPECT_EQ(rows[1]["registered"], true);
}

TEST(BenchCollectivesTest, AnMpiThatIsNotThereIsSaidInALine) {
  const Outcome outcome = RunBench("--backends=shm,openmpi --ops=broadcast --sizes=1K --pairs=1",
                                   "PATH=/does/not/exist");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              HasSubstr("openmpi is not measured: openmpi: cannot find mpirun.openmpi\n"));
}

TEST(BenchCollectivesTest, BadFlagsAreOneSentence) {
  const struct {
    const char *flags, *sentence;
  } kTable[] = {
      {"--world=1", "--world=1: choose 2 to 64"},
      {"--world=x", "illegal value 'x'"},
      {"--pairs=0", "--pairs must be at least 1"},
      {"--min_time=0", "--min_time must be more than 0"},
      {"--backends=nccl", "--backends: \"nccl\" is not known; choose auto, tcp, shm,"},
      {"--backends=", "--backends must name at least one backend"},
      {"--ops=sum", "--ops: \"sum\" is not known; choose all, all_reduce"},
      {"--sizes=1KB", "--sizes: \"1KB\" is not a size"},
      {"--json=/does/not/exist/x", "cannot write --json=/does/not/exist/x"},
      {"--nonsense", "unknown command line flag 'nonsense'"},
      {"word", "\"word\" is not a flag; see --help"},
  };
  for (const auto& row : kTable) {
    const Outcome outcome = RunBench(row.flags);
    EXPECT_NE(outcome.code, 0) << row.flags;
    EXPECT_THAT(outcome.output, HasSubstr(row.sentence)) << row.flags;
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }
}

// A folder with an mpirun that starts ranks as Open MPI does, and an mpicxx whose MPI adds nothing:
// the check of values must find that out.
TEST(BenchCollectivesTest, AnMpiStartsTheRanksAndAWrongSumEndsIt) {
  const std::string folder = Folder() + "/mpi";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/mpi.h") << R"(
    #include <cstdlib>
    constexpr int MPI_FLOAT = 1, MPI_SUM = 6, MPI_COMM_WORLD = 7, MPI_SUCCESS = 0, MPI_MAX_ERROR_STRING = 256,
        MPI_ERRORS_RETURN = 10;
    static void* const MPI_IN_PLACE = nullptr;
    inline int MPI_Init(int*, char***) { return 0; }
    inline int MPI_Finalize() { return 0; }
    inline int MPI_Comm_rank(int, int* rank) { *rank = std::atoi(std::getenv("MPI_RANK")); return 0; }
    inline int MPI_Comm_size(int, int* size) { *size = 2; return 0; }
    inline int MPI_Comm_set_errhandler(int, int) { return 0; }
    inline int MPI_Error_string(int, char*, int*) { return 0; }
    inline int MPI_Allreduce(const void*, void*, int, int, int, int) { return 0; })";
  const auto add = [&](const std::string& name, const std::string& script) {
    std::ofstream(folder + "/" + name) << "#!/bin/sh\n" << script << "\n";
    std::filesystem::permissions(folder + "/" + name, std::filesystem::perms::owner_all);
  };
  add("mpicxx.mpich", "exec c++ -I" + folder + " \"$@\"");
  add("mpirun.mpich",
      "[ \"$1\" = --version ] && exit 0; shift 2\n"
      "MPI_RANK=1 \"$@\" & other=$!\nMPI_RANK=0 \"$@\"; code=$?\nwait $other && exit $code");
  const std::string path = "PATH=" + folder + ":$PATH";
  const std::string flags = "--backends=shm,mpich --ops=broadcast,all_reduce --sizes=4K --pairs=1";
  const Outcome wrong = RunBench(flags, path);
  EXPECT_EQ(wrong.code, 1) << wrong.output;
  EXPECT_THAT(wrong.output, HasSubstr("2 ranks, float32, "));
  EXPECT_THAT(wrong.output, HasSubstr("started by mpich"));
  EXPECT_THAT(wrong.output, HasSubstr("left out: mpich: of an MPI all_reduce alone is measured"));
  EXPECT_THAT(wrong.output, HasSubstr("mpich computed a wrong result: all_reduce of 1024 bytes"));
}

TEST(BenchCollectivesTest, HelpSaysWhatBandwidthIs) {
  const Outcome outcome = RunBench("--help");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("2 (n - 1) / n for all_reduce"));
  EXPECT_THAT(outcome.output, HasSubstr("--pairs=10"));
}

}  // namespace
