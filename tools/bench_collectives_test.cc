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
  const Outcome outcome = RunBench(absl::StrCat(
      "--backends=local,shm,tcp,raw_gloo,memcpy --registered= --sizes=100,5K --pairs=2 "
      "--min_time=0.0001 --world=3 --json=",
      path));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("3 ranks, float32"));
  EXPECT_THAT(outcome.output, HasSubstr("time / raw_gloo's"));
  EXPECT_THAT(outcome.output, HasSubstr("left out: memcpy: a barrier copies nothing"));
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
    if (row["backend"] == "raw_gloo") continue;
    EXPECT_GT(row["time_over"]["raw_gloo"]["median"].get<double>(), 0);
  }
  // 7 collectives of two sizes and the loop, for 5 backends; the barrier for 4.
  EXPECT_EQ(seen.size(), 5u * (7 * 2 + 1) + 4);
  EXPECT_TRUE(seen.contains({"tcp", "all_gather", 96, "each"})) << "a whole number of parts";
  EXPECT_TRUE(seen.contains({"local", "all_reduce", 1024, "loop"}));
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

TEST(BenchCollectivesTest, EachElementTypeIsCheckedToo) {
  for (const char* dtype : {"float64", "float16", "bfloat16", "int32", "int64"}) {
    const Outcome outcome = RunBench(
        absl::StrCat("--dtype=", dtype,
                     " --backends=local,shm,tcp,raw_gloo --ops=all_reduce,reduce_scatter,reduce"
                     " --sizes=1K --pairs=1 --min_time=0.0001"));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
  }
}

TEST(BenchCollectivesTest, AnMpiThatIsNotThereIsSaidInALine) {
  const Outcome outcome = RunBench("--backends=memcpy,openmpi --ops=broadcast --sizes=1K --pairs=1",
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
      {"--pairs=-1", "--pairs must not be negative"},
      {"--min_time=0", "--min_time and --time_limit must be more than 0"},
      {"--backends=nccl", "--backends: \"nccl\" is not known; choose auto, local, tcp,"},
      {"--backends=", "--backends must name at least one backend"},
      {"--ops=sum", "--ops: \"sum\" is not known; choose all, all_reduce"},
      {"--sizes=1KB", "--sizes: \"1KB\" is not a size"},
      {"--dtype=half", "--dtype: \"half\" is not known; choose float32"},
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

TEST(BenchCollectivesTest, HelpSaysWhatBandwidthIs) {
  const Outcome outcome = RunBench("--help");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("2 (n - 1) / n for all_reduce"));
  EXPECT_THAT(outcome.output, HasSubstr("--time_limit=200"));
}

}  // namespace
