// Runs the benchmark as a person does, with small numbers.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace {

using nlohmann::json;
using testing::HasSubstr;

struct Outcome {
  int code = -1;
  std::string output;  // Standard output and error.
};

Outcome RunBench(const std::string& arguments) {
  Outcome outcome;
  FILE* pipe = popen(absl::StrCat("tools/bench_scaling ", arguments, " 2>&1").c_str(), "r");
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    outcome.output.append(buffer, size);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  return outcome;
}

TEST(BenchScalingTest, MeasuresEachPartAtEachSize) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/report.json");
  const Outcome outcome =
      RunBench(absl::StrCat("--max_params=10000 --max_ranks=8 --agreements=20 --json=", path));
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  std::ifstream file(path);
  const json report = json::parse(file, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(report.is_discarded());
  std::vector<std::string> names;
  for (const json& row : report["rows"]) {
    const std::string name = row["name"];
    SCOPED_TRACE(name);
    names.push_back(name);
    const std::vector<double> sizes = row["sizes"], seconds = row["seconds"];
    EXPECT_THAT(sizes, row["per"] == "rank" ? testing::ElementsAre(2, 4, 8)
                                            : testing::ElementsAre(100, 1000, 10000));
    EXPECT_THAT(seconds, testing::Each(testing::Gt(0)));
    EXPECT_THAT(seconds, testing::SizeIs(sizes.size()));
    // No limit to it here: a busy machine may make of two small sizes what it likes.
    EXPECT_NEAR(row["exponent"], std::log(seconds[2] / seconds[1]) / std::log(sizes[2] / sizes[1]),
                1e-6);
    EXPECT_EQ(row["is_linear"], row["exponent"] <= 1.2);
    EXPECT_THAT(outcome.output, HasSubstr(name));
  }
  EXPECT_THAT(names, testing::SizeIs(10));
}

TEST(BenchScalingTest, SaysWhatIsWrong) {
  const Outcome outcome = RunBench("--max_ranks=1");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("--max_ranks 4"));
}

}  // namespace
