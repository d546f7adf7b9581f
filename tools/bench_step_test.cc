// Runs the benchmark as a person does, with tiny settings.

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

constexpr char kFashionMnist[] = "/usr/share/datasets/fashion-mnist";

struct Outcome {
  int code = -1;
  std::string output;  // Standard output and error.
  json report;         // The --json output.
};

Outcome RunBench(const std::string& arguments) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/report.json");
  std::filesystem::remove(path);
  Outcome outcome;
  FILE* pipe =
      popen(absl::StrCat("tools/bench_step --json=", path, " ", arguments, " 2>&1").c_str(), "r");
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    outcome.output.append(buffer, size);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  std::ifstream file(path);
  if (file) outcome.report = json::parse(file, nullptr, /*allow_exceptions=*/false);
  return outcome;
}

constexpr char kTiny[] = "--plans=tiny:adamw --pairs=3 --steps=2 ";

class BackendTest : public testing::TestWithParam<const char*> {};

TEST_P(BackendTest, MeasuresEveryRowBesideTheLocalOne) {
  const Outcome outcome = RunBench(absl::StrCat(kTiny, "--startups=0 --backends=", GetParam()));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  ASSERT_EQ(outcome.report["results"].size(), 1);
  const json& result = outcome.report["results"][0];
  EXPECT_EQ(result["backend"], GetParam());
  EXPECT_EQ(outcome.report["world"], 2);
  EXPECT_EQ(result["plan"], "tiny:adamw");
  EXPECT_EQ(result["parameters"], 784 * 32 + 32 + 32 * 10 + 10);

  std::vector<std::string> names;
  for (const json& row : result["rows"]) {
    const std::string name = row["name"];
    SCOPED_TRACE(name);
    names.push_back(name);
    EXPECT_GT(row["step_ms"], row["update_ms"]);
    EXPECT_GT(row["update_ms"], 0);
    if (name == "local") {
      EXPECT_EQ(row["collectives"], 0);
      EXPECT_TRUE(row["step_to_local"].is_null());
      continue;
    }
    EXPECT_EQ(row["step_to_local"]["pairs"], 3);
    EXPECT_GT(row["step_to_local"]["median"], 0);
    EXPECT_EQ(row["step_to_reducer"].is_null(), name == "reducer");
    EXPECT_EQ(row["bucket_bytes"].size(), 1);
    EXPECT_EQ(row["exposed_us"].size(), 1);
    // A bucket; with the state over the ranks, also what is updated comes back.
    EXPECT_GE(row["collectives"], 1);
    EXPECT_LE(row["collectives"], name[0] == 'r' ? 1.3 : 4);
  }
  EXPECT_THAT(names, testing::ElementsAre("local", "reducer", "reducer, check_finite",
                                          "reducer, join on", "sharded", "sliced"));
  ASSERT_EQ(outcome.report["bars"].size(), 1);
  EXPECT_THAT(std::string(outcome.report["bars"][0]["what"]),
              HasSubstr("step with join / without"));
  EXPECT_THAT(outcome.output, HasSubstr("reducer, join on"));
}

INSTANTIATE_TEST_SUITE_P(All, BackendTest, testing::Values("tcp", "shm"),
                         [](const auto& info) { return std::string(info.param); });

TEST(BenchStepTest, MeasuresTheRowsThatAreAskedForOverAllBackends) {
  const Outcome outcome = RunBench(absl::StrCat(kTiny, "--startups=0 --rows=sliced,local"));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  ASSERT_EQ(outcome.report["results"].size(), 2);
  EXPECT_EQ(outcome.report["results"][1]["backend"], "tcp");
  ASSERT_EQ(outcome.report["results"][1]["rows"].size(), 2);
  EXPECT_EQ(outcome.report["results"][1]["rows"][0]["name"], "sliced");
  EXPECT_TRUE(outcome.report["bars"].empty());
}

TEST(BenchStepTest, ARowThatJoinsIsNoBaseOfOthers) {
  const Outcome outcome =
      RunBench(absl::StrCat(kTiny, "--startups=0 --backends=shm --rows=local,join,check_finite"));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  const json& rows = outcome.report["results"][0]["rows"];
  ASSERT_EQ(rows.size(), 3);
  for (const json& row : rows) EXPECT_TRUE(row["step_to_reducer"].is_null()) << row;
  EXPECT_EQ(rows[2]["step_to_local"]["pairs"], 3);
}

TEST(BenchStepTest, StartsTheTrainer) {
  if (!std::filesystem::exists(kFashionMnist))
    GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const Outcome outcome = RunBench("--backends= --startups=2");
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  const json& startup = outcome.report["startup"];
  EXPECT_EQ(startup["times"], 2);
  EXPECT_GT(startup["group_seconds"]["low"], 0);
  EXPECT_GE(startup["first_step_seconds"]["median"], startup["group_seconds"]["low"]);
}

TEST(BenchStepTest, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> mistakes[] = {
      {"--backends=mpi", "--backends: \"mpi\" is none of"},
      {"--plans=mlp", "--plans: \"mlp\" is none of model:optimizer"},
      {"--plans=vgg:sgd", "\"vgg\" is not a model"},
      {"--plans=mlp:lion", "\"lion\" is none of sgd, adamw"},
      {"--rows=skew",
       "--rows: \"skew\" is none of local, reducer, check_finite, join, sharded, sliced"},
      {"--world=1", "--world must be at least 2"},
      {"--startups=1 --trainer=/nowhere", "cannot start /nowhere"},
      {"surplus", "\"surplus\" is not a flag"},
  };
  for (const auto& [arguments, sentence] : mistakes) {
    SCOPED_TRACE(arguments);
    const Outcome outcome = RunBench(arguments);
    EXPECT_EQ(outcome.code, 1);
    EXPECT_THAT(outcome.output, HasSubstr(sentence));
    EXPECT_THAT(outcome.output, Not(HasSubstr("..."))) << "it had begun to measure";
    EXPECT_TRUE(outcome.report.is_null());
  }
}

}  // namespace
