#include "evenkeel/trainer/progress.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "absl/time/time.h"

namespace evenkeel {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

class ProgressTest : public testing::Test {
 protected:
  ~ProgressTest() override { std::fclose(out_); }

  // What was printed so far.
  std::string Printed() {
    std::string text(10000, '\0');
    std::rewind(out_);
    text.resize(std::fread(text.data(), 1, text.size(), out_));
    return text;
  }

  // 10 steps of 100 samples each second.
  static void RunTo(ProgressLine& progress, int tenths, int from = 0) {
    for (int i = from; i <= tenths; ++i) {
      progress.Update({.step = i, .epoch = 0, .samples = i * 100, .loss = 0.5, .accuracy = 0.875},
                      kStart + absl::Milliseconds(100) * i);
    }
  }

  std::FILE* const out_ = std::tmpfile();
};

TEST_F(ProgressTest, PrintsPlainLinesNowAndThen) {
  ProgressLine progress(out_, {.total_steps = 1000, .epochs = 2}, /*is_terminal=*/false);
  RunTo(progress, 105);
  EXPECT_EQ(Printed(),
            "epoch 1/2  step 50/1000  loss 0.5000  accuracy 87.5%  1000 samples/s  1:35 left\n"
            "epoch 1/2  step 100/1000  loss 0.5000  accuracy 87.5%  1000 samples/s  1:30 left\n");
  progress.Finish();
  EXPECT_NE(Printed().rfind("epoch 1/2  step 105/1000  "), std::string::npos);
}

TEST_F(ProgressTest, RewritesTheLineOnATerminal) {
  ProgressLine progress(out_, {.total_steps = 100, .epochs = 1}, /*is_terminal=*/true);
  RunTo(progress, 2);
  EXPECT_EQ(Printed(),
            "\repoch 1/1  step 1/100  loss 0.5000  accuracy 87.5%  1000 samples/s  0:10 left\033[K"
            "\repoch 1/1  step 2/100  loss 0.5000  accuracy 87.5%  1000 samples/s  0:10 left\033[K");
  progress.Finish();
  EXPECT_EQ(Printed().back(), '\n');
  const size_t size = Printed().size();
  progress.Finish();
  EXPECT_EQ(Printed().size(), size);
}

TEST_F(ProgressTest, LeavesOutWhatIsNotKnown) {
  ProgressLine progress(out_, {}, /*is_terminal=*/false);
  progress.Update({.step = 1, .samples = 100, .loss = 2.25, .accuracy = 0.1}, kStart);
  progress.Finish();
  EXPECT_EQ(Printed(), "epoch 1  step 1  loss 2.2500  accuracy 10.0%\n");
}

TEST_F(ProgressTest, PrintsNothingWhenNothingWasDone) {
  ProgressLine(out_, {}, /*is_terminal=*/true).Finish();
  EXPECT_EQ(Printed(), "");
}

TEST_F(ProgressTest, FollowsAChangeOfSpeed) {
  ProgressLine progress(out_, {.total_steps = 1000000}, /*is_terminal=*/false);
  RunTo(progress, 600);
  // Half the speed for two minutes: the first minute is forgotten.
  for (int i = 1; i <= 1200; ++i) {
    progress.Update({.step = 600 + i / 2, .samples = 60000 + i * 50}, kStart + absl::Milliseconds(100) * (600 + i));
  }
  EXPECT_NE(Printed().rfind("  500 samples/s  55:29:20 left\n"), std::string::npos) << Printed();
}

}  // namespace
}  // namespace evenkeel
