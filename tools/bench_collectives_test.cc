// Runs the binary as a person does.

#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
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

void ExpectNoFolders() {
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("bench_collectives."))) << "left behind";
  }
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
              HasSubstr("left out: raw_gloo: only all_reduce is measured with Gloo"));
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
  ExpectNoFolders();
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

// An MPI of two ranks that meet in a file, also to finalize, as real ones do. Its mpirun ends the
// other rank when one fails.
constexpr char kMpiHeader[] = R"(
  #include <fcntl.h>
  #include <sched.h>
  #include <sys/mman.h>
  #include <unistd.h>
  #include <atomic>
  #include <cstdlib>
  #include <cstring>
  constexpr int MPI_FLOAT = 1, MPI_SUM = 6, MPI_COMM_WORLD = 7, MPI_SUCCESS = 0, MPI_MAX_ERROR_STRING = 256,
      MPI_ERRORS_RETURN = 10;
  static void* const MPI_IN_PLACE = nullptr;
  struct Shared { std::atomic<int> arrived, generation; float data[2][1 << 12]; };
  inline Shared* shared;
  inline int rank;
  inline void Meet() {
    const int mine = shared->generation;
    if (++shared->arrived == 2) {
      shared->arrived = 0;
      ++shared->generation;
    }
    while (shared->generation == mine) sched_yield();
  }
  inline int MPI_Init(int*, char***) {
    rank = std::atoi(std::getenv("MPI_RANK"));
    const int file = open(std::getenv("MPI_FILE"), O_RDWR);
    if (ftruncate(file, sizeof(Shared)) != 0) return 1;
    shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    return 0;
  }
  inline int MPI_Finalize() { Meet(); return 0; }
  inline int MPI_Comm_rank(int, int* out) { *out = rank; return 0; }
  inline int MPI_Comm_size(int, int* size) { *size = 2; return 0; }
  inline int MPI_Comm_set_errhandler(int, int) { return 0; }
  inline int MPI_Error_string(int, char*, int*) { return 0; }
  inline int MPI_Allreduce(const void*, void* data, int count, int, int, int) {
    float* const values = static_cast<float*>(data);
    std::memcpy(shared->data[rank], values, count * sizeof(float));
    Meet();
    for (int i = 0; i < count; ++i) values[i] = shared->data[0][i] + shared->data[1][i];
    if (rank == 1 && std::getenv("MPI_LIES") != nullptr) values[0] += 10;
    Meet();
    return 0;
  })";
constexpr char kMpirun[] = R"(
  [ "$1" = --version ] && exit 0
  shift 2
  export MPI_FILE=$(mktemp)
  trap 'rm $MPI_FILE' EXIT
  MPI_RANK=0 "$@" &
  zero=$!
  MPI_RANK=1 "$@" &
  one=$!
  for i in 0 1; do wait -n || { kill -KILL $zero $one 2>/dev/null; exit 1; }; done)";

class BenchMpiTest : public testing::Test {
 protected:
  BenchMpiTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ + "/mpi.h") << kMpiHeader;
    Add("mpicxx.mpich", "exec c++ -I" + folder_ + " \"$@\"");
    Add("mpirun.mpich", kMpirun);
  }
  void Add(const std::string& name, const std::string& script) const {
    std::ofstream(folder_ + "/" + name) << "#!/bin/bash\n" << script << "\n";
    std::filesystem::permissions(folder_ + "/" + name, std::filesystem::perms::owner_all);
  }

  const std::string folder_ = Folder() + "/mpi";
  const std::string path_ = "PATH=" + folder_ + ":$PATH";
};

constexpr char kShort[] = "--ops=broadcast,all_reduce --sizes=4K --pairs=1 ";

TEST_F(BenchMpiTest, AnMpiStartsTheRanksAndIsMeasured) {
  const std::string json = folder_ + "/rows.json";
  const Outcome right =
      RunBench(absl::StrCat(kShort, "--backends=shm,mpich --registered= --json=", json), path_);
  ASSERT_EQ(right.code, 0) << right.output;
  EXPECT_THAT(right.output, HasSubstr("2 ranks, float32, "));
  EXPECT_THAT(right.output, HasSubstr("started by mpich"));
  EXPECT_THAT(right.output, HasSubstr("left out: mpich: only all_reduce is measured with an MPI"));
  int by_mpi = 0;
  for (const nlohmann::json& row : ReadJson(json)) {
    EXPECT_EQ(row["mpi"], "mpich") << row;
    by_mpi += row["backend"] == "mpich" ? 1 : 0;
  }
  EXPECT_EQ(by_mpi, 2) << "the loop and a size";
}

// The other rank waits for this one: in the next cell, or for MPI's end.
TEST_F(BenchMpiTest, ASumThatIsWrongOnOneRankIsNamed) {
  const Outcome wrong =
      RunBench(absl::StrCat(kShort, "--backends=mpich"), absl::StrCat("MPI_LIES=1 ", path_));
  EXPECT_EQ(wrong.code, 1) << wrong.output;
  EXPECT_THAT(wrong.output,
              HasSubstr("mpich computed a wrong result: all_reduce of 1024 bytes, rank 1: "));
  EXPECT_THAT(wrong.output, HasSubstr("mpirun.mpich ended with exit code 1"));
}

TEST_F(BenchMpiTest, AnMpiThatDoesNotWorkIsLeftOut) {
  Add("mpicxx.mpich", "echo no such compiler; exit 1");
  const Outcome no_compiler = RunBench(absl::StrCat(kShort, "--backends=shm,mpich"), path_);
  EXPECT_EQ(no_compiler.code, 0) << no_compiler.output;
  EXPECT_THAT(no_compiler.output, HasSubstr("mpich is not measured: "));
  EXPECT_THAT(no_compiler.output, HasSubstr("failed: no such compiler"));
  EXPECT_THAT(no_compiler.output, HasSubstr("all_reduce"));
}

TEST_F(BenchMpiTest, RowsOfFinishedJobsAreWritten) {
  Add("mpicxx.openmpi", "exec c++ -I" + folder_ + " \"$@\"");
  Add("mpirun.openmpi", kMpirun);
  Add("mpirun.mpich", std::string("export MPI_LIES=1\n") + kMpirun);
  const std::string json = folder_ + "/some.json";
  const Outcome outcome =
      RunBench(absl::StrCat(kShort, "--backends=openmpi,mpich --json=", json), path_);
  EXPECT_EQ(outcome.code, 1) << outcome.output;
  const nlohmann::json rows = ReadJson(json);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["mpi"], "openmpi");
}

TEST_F(BenchMpiTest, ASignalWhileTheLibraryIsCompiledLeavesNoFolder) {
  Add("mpicxx.mpich", "touch " + folder_ + "/compiles; sleep 1; exec c++ -I" + folder_ + " \"$@\"");
  const Outcome ended =
      RunBench(absl::StrCat("--backends=mpich & bench=$!; until [ -e ", folder_,
                            "/compiles ]; do sleep 0.05; done; kill -TERM $bench; wait $bench"),
               path_);
  EXPECT_NE(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output, Not(HasSubstr("started by"))) << "it measured";
  ExpectNoFolders();
}

TEST(BenchCollectivesTest, ARankThatIsKilledInABlockEndsTheOthers) {
  const std::string output = Folder() + "/killed.txt";
  std::filesystem::remove(output);
  const auto begin = std::chrono::steady_clock::now();
  // The first cell has a row at once; the second one takes long.
  const Outcome killed = RunBench(absl::StrCat(
      "--backends=shm,tcp --registered= --ops=all_reduce --sizes=4,64M --loop_sizes= --pairs=2000 "
      "--min_time=0.00001 >",
      output, " 2>&1 & bench=$!; until grep -q all_reduce ", output,
      "; do sleep 0.05; done; kill -KILL $(pgrep -P $bench | tail -n 1); wait $bench"));
  std::stringstream text;
  text << std::ifstream(output).rdbuf();
  EXPECT_EQ(killed.code, 1) << text.str();
  EXPECT_THAT(text.str(), HasSubstr("the ranks: rank 1 was killed by SIGKILL"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(100))
      << "the limit of a block is 120 s";
  ExpectNoFolders();
}

TEST(BenchCollectivesTest, HelpSaysWhatBandwidthIs) {
  const Outcome outcome = RunBench("--help");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("2 (n - 1) / n for all_reduce"));
  EXPECT_THAT(outcome.output, HasSubstr("--pairs=10"));
}

}  // namespace
