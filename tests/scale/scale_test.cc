// Runs the program as a person does, with few ranks.

#include <sys/wait.h>

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

struct Outcome {
  int code = -1;
  std::string output;  // Standard output and error.
};

Outcome RunScale(const std::string& arguments) {
  Outcome outcome;
  FILE* pipe = popen(absl::StrCat("tests/scale/scale ", arguments, " 2>&1").c_str(), "r");
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    outcome.output.append(buffer, size);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  return outcome;
}

TEST(ScaleTest, EachPhaseEndsWithAndWithoutATree) {
  for (const int fanout : {8, 40}) {
    SCOPED_TRACE(fanout);
    const Outcome outcome =
        RunScale(absl::StrCat("--ranks=40 --processes=2 --rounds=2 --seconds=3 --fanout=", fanout));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    for (const char* phase : {"start", "exchange", "equal", "step", "shadow", "leave", "beat",
                              "wait", "lose", "shrink", "end"}) {
      EXPECT_THAT(outcome.output,
                  ContainsRegex(absl::StrCat(phase, " +[0-9.]+ s, hub +[0-9.]+ s, ranks")));
    }
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("MiB per rank"), HasSubstr("noticed after")));
  }
}

TEST(ScaleTest, AnUnknownPhaseIsRefused) {
  const Outcome outcome = RunScale("--ranks=2 --processes=1 --phases=other");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("--phases: \"other\" is not a phase"));
}

}  // namespace
