#include "evenkeel/trainer/report/line_chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(RoundTicksTest, AreRoundAndWithinTheRange) {
  for (const double low : {0.0, -3.7, 0.912, 1e6}) {
    for (const double span : {1e-4, 0.07, 1.0, 3.0, 9.99, 12345.0}) {
      SCOPED_TRACE(testing::Message() << low << " + " << span);
      const Ticks ticks = RoundTicks(low, low + span, 5);
      EXPECT_GE(ticks.count, 2);
      EXPECT_LE(ticks.count, 7);
      EXPECT_GE(ticks.first, low - 1e-6 * span);
      EXPECT_LE(ticks.first + (ticks.count - 1) * ticks.step, low + span + 1e-6 * span);
      const double mantissa = ticks.step / std::pow(10, std::floor(std::log10(ticks.step) + 1e-9));
      EXPECT_NEAR(std::fmod(10 / mantissa + 1e-9, 1), 0, 1e-6) << "1, 2 or 5, not " << mantissa;
    }
  }
}

TEST(RoundTicksTest, SurviveRangesWithoutLength) {
  EXPECT_EQ(RoundTicks(3, 3, 5).count, 1);
  EXPECT_EQ(RoundTicks(0, std::numeric_limits<double>::infinity(), 5).count, 1);
  EXPECT_EQ(RoundTicks(0, std::nan(""), 5).count, 1);
}

TEST(LineChartTest, SaysSoIfThereIsNothingToShow) {
  EXPECT_THAT(RenderChart({.title = "Loss", .empty = "No step."}), HasSubstr("No step."));
  EXPECT_THAT(
      RenderChart({.empty = "No step.", .curves = {{.name = "a", .points = {{0, std::nan("")}}}}}),
      HasSubstr("No step."));
}

TEST(LineChartTest, GapsInterruptACurve) {
  const std::string html =
      RenderChart({.curves = {{.name = "a",
                               .style = "train",
                               .points = {{0, 0}, {1, 1}, {2, std::nan("")}, {3, 1}, {4, 0}}}},
                   .begins_at_zero = true,
                   .highest = 1,
                   .x_end = 4});
  EXPECT_THAT(html, HasSubstr("d=\"M0 300L250 0M750 0L1000 300\""));
  EXPECT_THAT(html, HasSubstr("\"curves\":[[0,0,1,1,3,1,4,0]]"));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST(LineChartTest, OnePointAndEqualPointsHaveAnAxis) {
  for (const double value : {0.0, 1.0, -2.0, 1e-12, 1e12}) {
    const std::string html =
        RenderChart({.curves = {{.name = "a", .points = {{0, value}}, .has_dots = true}}});
    EXPECT_THAT(html, Not(HasSubstr("nan"))) << value;
    EXPECT_THAT(html, Not(HasSubstr("inf"))) << value;
    EXPECT_THAT(html, HasSubstr("class=\"dot")) << value;
  }
}

TEST(LineChartTest, ALogarithmicScaleLeavesOutWhatHasNoLogarithm) {
  Chart chart{.title = "Loss",
              .curves = {{.name = "a", .style = "train", .points = {{0, 100}, {1, 0}, {2, 1}}}},
              .has_log = true,
              .begins_at_zero = true,
              .x_end = 2};
  const std::string html = RenderChart(chart);
  EXPECT_THAT(html, HasSubstr("<label class=\"scale\"><input type=\"checkbox\"> log</label>"));
  EXPECT_THAT(html, HasSubstr("aria-label=\"Loss, logarithmic\""));
  // With a margin of a twentieth of the two decades at either end.
  EXPECT_THAT(html, HasSubstr("d=\"M0 13.64M1000 286.36\""));
  for (const char* line : {">1<", ">10<", ">100<", ">20<", ">50<"}) {
    EXPECT_THAT(html, HasSubstr(line));
  }
  EXPECT_THAT(html, Not(HasSubstr("nan")));
  EXPECT_THAT(html, Not(HasSubstr("inf")));
  chart.has_log = false;
  EXPECT_THAT(RenderChart(chart), Not(HasSubstr("log")));
}

TEST(LineChartTest, LogarithmicLinesAreRoundInANarrowRange) {
  const std::string html =
      RenderChart({.curves = {{.name = "a", .points = {{0, 2}, {1, 2.5}}}}, .has_log = true});
  EXPECT_THAT(html, HasSubstr(">2.2<"));
  EXPECT_THAT(html, HasSubstr(">2.4<"));
}

TEST(LineChartTest, BinaryLogarithmsAreLabelledWithTheirNumbers) {
  const std::string html = RenderChart({.curves = {{.name = "a", .points = {{0, 1}, {13, 2}}}},
                                        .x_end = 13,
                                        .x_name = "ranks",
                                        .x_is_log2 = true});
  for (const char* label : {">ranks 1<", ">32<", ">1,024<"}) EXPECT_THAT(html, HasSubstr(label));
  EXPECT_THAT(html, HasSubstr("\"base2\":1,\"name\":\"ranks\""));
  // No label lies between two whole ones.
  const std::string narrow = RenderChart(
      {.curves = {{.name = "a", .points = {{0, 1}, {1, 2}}}}, .x_end = 1, .x_is_log2 = true});
  EXPECT_THAT(narrow, AllOf(HasSubstr(">step 1<"), HasSubstr(">2<")));
}

TEST(LineChartTest, NamesAreText) {
  const std::string html =
      RenderChart({.title = "<&\">",
                   .unit = "<i>/s",
                   .curves = {{.name = "</script>", .points = {{0, 1}, {1, 2}}}}});
  EXPECT_THAT(html, Not(HasSubstr("</script></span>")));
  EXPECT_THAT(html, HasSubstr("&lt;/script&gt;"));
  EXPECT_THAT(html, HasSubstr("&lt;i&gt;/s"));
}

}  // namespace
}  // namespace evenkeel
