// Runs the program as a user does, on traces of the trainer and of replays.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/trainer/report/testing/report_page.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

constexpr char kPredict[] = "tools/predict/predict";

std::string TempPath(const std::string& name) { return testing::TempDir() + "/" + name; }

// The trace of a small gpt over shm, made once.
const std::string& Trace() {
  static const std::string* const path = [] {
    std::ofstream text(TempPath("text.txt"));
    for (int line = 0; line < 5000; ++line) text << "line " << line * line << " of the text\n";
    text.close();
    auto* trace = new std::string(TempPath("two.json"));
    const Ended run =
        Run({"trainer/train", "--model=gpt", "--preset=tiny", "--nproc=2", "--nozero",
             "--backend=shm", "--max_steps=20", "--first_bucket_mb=0.02", "--bucket_cap_mb=0.02",
             "--data=" + TempPath("text.txt"), "--trace=" + *trace});
    EXPECT_EQ(run.code, 0) << run.err;
    return trace;
  }();
  return *path;
}

Ended Predict(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), kPredict);
  return Run(arguments);
}

TEST(PredictTest, PredictsFromATraceAndDrawsTheCurve) {
  const std::string page_path = TempPath("curve.html");
  const Ended ended =
      Predict({"--profile=" + Trace(), "--cores=64", "--ranks=1,2,64", "--html=" + page_path});
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("over shm: begin"), HasSubstr("memory"),
                               HasSubstr(Trace() + " (fitted)"), Not(HasSubstr("network"))));
  // One rank is as efficient as itself, and 64 are less.
  std::vector<double> steps;
  for (const std::string& line : Lines(ended.out)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() == 8 && words.back() == "%") steps.push_back(std::stod(words[1]));
  }
  ASSERT_EQ(steps.size(), 3) << ended.out;
  EXPECT_GT(steps[0], 0);
  EXPECT_LE(steps[0], steps[1]);
  EXPECT_LE(steps[1], steps[2]);

  std::ostringstream page;
  page << std::ifstream(page_path).rdbuf();
  const nlohmann::json data = DataOf(page.str());
  EXPECT_THAT(data["title"].get<std::string>(), HasSubstr("Predicted steps: gpt"));
  const nlohmann::json& curves = data["charts"][0]["curves"];
  ASSERT_EQ(curves.size(), 4);
  EXPECT_EQ(curves[0]["x"], nlohmann::json({1, 2, 64}));
  EXPECT_EQ(curves[3]["name"], "measured, fitted to");
}

TEST(PredictTest, ReplaysTheStepOnMoreRanksAndComparesItself) {
  const std::string four = TempPath("four.json");
  const Ended replay =
      evenkeel::Run({"tools/launch", "--nproc=4", "--", kPredict, "--profile=" + Trace(),
                     "--replay=" + four, "--backend=tcp", "--steps=8"});
  ASSERT_EQ(replay.code, 0) << replay.err;
  // The prediction for another link takes its samples from a run over it.
  const Ended ended = Predict(
      {"--profile=" + Trace(), "--links=" + four, "--backend=tcp", "--check=" + four, "--ranks=4"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("network"), HasSubstr(four), Not(HasSubstr("(fitted)"))));
}

TEST(PredictTest, RefusesWhatItCannotUse) {
  const auto error = [](const std::vector<std::string>& arguments) {
    const Ended ended = Predict(arguments);
    EXPECT_NE(ended.code, 0);
    EXPECT_THAT(ended.out, IsEmpty());
    EXPECT_THAT(ended.err, StartsWith("predict: "));
    return ended.err;
  };
  const std::string profile = "--profile=" + Trace();
  EXPECT_THAT(error({}), HasSubstr("give --profile"));
  EXPECT_THAT(error({"--profile=/no/such"}), HasSubstr("/no/such"));
  EXPECT_THAT(error({"--profile=" + TempPath("text.txt")}), HasSubstr("text.txt is not JSON"));
  EXPECT_THAT(error({profile, "--backend=tcp"}), HasSubstr("no sample of a network"));
  EXPECT_THAT(error({profile, "--ranks=two"}), HasSubstr("\"two\" is not a number"));
  EXPECT_THAT(error({profile, "--ranks=1,65536"}),
              AllOf(HasSubstr("65536 ranks over shm are on one host, and this one has "),
                    HasSubstr("--links")));
  EXPECT_THAT(error({profile, "--replay=x"}), HasSubstr("needs at least two ranks"));
  EXPECT_THAT(error({profile, "--cores=-1"}), HasSubstr("--cores at least 0"));
  EXPECT_THAT(error({profile, "--links=" + TempPath("text.txt")}),
              HasSubstr("text.txt is not JSON"));
}

}  // namespace
}  // namespace evenkeel
