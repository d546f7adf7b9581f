#include "evenkeel/trainer/app/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/time/time.h"

namespace evenkeel {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

class ProgressTest : public testing::Test {
 protected:
  ~ProgressTest() override { std::fclose(out_); }

  // Returns the output so far.
  std::string Printed() {
    std::string text(10000, '\0');
    std::rewind(out_);
    text.resize(std::fread(text.data(), 1, text.size(), out_));
    return text;
  }

  // 10 steps of 100 samples each second.
  static void RunTo(ProgressLine& progress, int tenths, int from = 0) {
    for (int i = from; i <= tenths; ++i) {
      progress.Update({.step = i, .epoch = 0, .count = i * 100, .loss = 0.5, .accuracy = 0.875},
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
  EXPECT_EQ(
      Printed(),
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
  progress.Update({.step = 1, .count = 100, .loss = 2.25, .accuracy = 0.1}, kStart);
  progress.Finish();
  EXPECT_EQ(Printed(), "epoch 1  step 1  loss 2.2500  accuracy 10.0%\n");
  progress.Update({.step = 2}, kStart);
  progress.Finish();
  EXPECT_EQ(Printed(), "epoch 1  step 1  loss 2.2500  accuracy 10.0%\nepoch 1  step 2\n");
}

TEST_F(ProgressTest, JudgesLanguageModelsByTheirLoss) {
  ProgressOptions options{.unit = "tokens", .quality = ProgressQuality::kPerplexity};
  for (ProgressQuality quality : {ProgressQuality::kPerplexity, ProgressQuality::kBitsPerByte}) {
    options.quality = quality;
    ProgressLine progress(out_, options, /*is_terminal=*/false);
    progress.Update({.step = 1, .count = 0, .loss = 3}, kStart);
    progress.Update({.step = 2, .count = 123456, .loss = 1.25, .exposed = 0.0416},
                    kStart + absl::Seconds(5));
  }
  EXPECT_EQ(Printed(),
            "epoch 1  step 2  loss 1.2500  perplexity 3.49  24.7k tokens/s  exposed 4.2%\n"
            "epoch 1  step 2  loss 1.2500  1.803 bits/byte  24.7k tokens/s  exposed 4.2%\n");
}

TEST_F(ProgressTest, ALongRunFitsInALine) {
  ProgressLine progress(out_,
                        {.total_steps = 100000,
                         .epochs = 90,
                         .unit = "tokens",
                         .quality = ProgressQuality::kPerplexity},
                        /*is_terminal=*/false);
  progress.Update({.step = 90000, .epoch = 80}, kStart);
  progress.Update({.step = 90001, .epoch = 80, .count = 500000, .loss = 9, .exposed = 0.999},
                  kStart + absl::Seconds(5));
  EXPECT_EQ(Printed(),
            "epoch 81/90  step 90001/100000  loss 9.0000  perplexity 8103  100k tokens/s  exposed "
            "100%  13h53 left\n");
  EXPECT_LE(Printed().size(), 102u);
}

TEST_F(ProgressTest, ShortensLargeRates) {
  for (const auto& [rate, text] : {std::pair<int64_t, const char*>{0, "  0 samples/s\n"},
                                   {9999, "  9999 samples/s\n"},
                                   {10000, "  10.0k samples/s\n"},
                                   {99990, "  100k samples/s\n"},
                                   {999900, "  1.00M samples/s\n"},
                                   {123456789, "  123.46M samples/s\n"}}) {
    ProgressLine progress(out_, {}, /*is_terminal=*/false);
    progress.Update({.step = 1}, kStart);
    progress.Update({.step = 2, .count = rate * 5}, kStart + absl::Seconds(5));
    EXPECT_NE(Printed().rfind(text), std::string::npos) << Printed();
  }
}

// A terminal of that kind and so many columns.
struct Terminal {
  explicit Terminal(const char* kind, uint16_t columns = 40) {
    setenv("TERM", kind, /*overwrite=*/1);
    EXPECT_GE(terminal, 0);
    EXPECT_EQ(grantpt(terminal), 0);
    EXPECT_EQ(unlockpt(terminal), 0);
    const winsize size{.ws_row = 10, .ws_col = columns};
    EXPECT_EQ(ioctl(terminal, TIOCSWINSZ, &size), 0);
    side = std::fopen(ptsname(terminal), "w");
    EXPECT_NE(side, nullptr);
  }
  ~Terminal() {
    std::fclose(side);
    close(terminal);
  }

  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  std::FILE* side = nullptr;
};

std::string OnTerminal(const char* kind, uint16_t columns = 40) {
  const Terminal on(kind, columns);
  ProgressLine progress(on.side, {.total_steps = 1000, .epochs = 2});
  progress.Update({.step = 1, .loss = 0.5}, kStart);
  progress.Update({.step = 2, .loss = 0.5}, kStart + absl::Seconds(5));
  char text[200] = {};
  EXPECT_GT(read(on.terminal, text, sizeof(text) - 1), 0);
  return text;
}

TEST_F(ProgressTest, ANarrowTerminalShowsTheTimeLeftBeforeOtherParts) {
  EXPECT_EQ(OnTerminal("xterm"), "\rstep 2/1000  loss 0.5000  1h23 left\033[K");
  EXPECT_EQ(OnTerminal("xterm", 72),
            "\rstep 2/1000  loss 0.5000  accuracy 0.0%  0 samples/s  1h23 left\033[K");
  EXPECT_EQ(OnTerminal("xterm", 10), "\rstep 2/10\033[K");
}

// A line of another writer takes the place of an open progress line.
TEST_F(ProgressTest, AnotherLineBeginsWhereTheProgressStood) { EXPECT_EQ(BeginLine(out_), ""); }

TEST_F(ProgressTest, ADumbTerminalGetsLines) {
  EXPECT_EQ(OnTerminal("dumb"),
            "epoch 1/2  step 2/1000  loss 0.5000  accuracy 0.0%  0 samples/s  1h23 left\r\n");
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
    progress.Update({.step = 600 + i / 2, .count = 60000 + i * 50},
                    kStart + absl::Milliseconds(100) * (600 + i));
  }
  EXPECT_NE(Printed().rfind("  500 samples/s  55h29 left\n"), std::string::npos) << Printed();
}

}  // namespace
}  // namespace evenkeel
