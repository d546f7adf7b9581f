#include "evenkeel/trainer/report/html_text.h"

#include <gtest/gtest.h>

#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {
namespace {

TEST(EscapeHtmlTest, LeavesNothingThatHtmlWouldRead) {
  EXPECT_EQ(EscapeHtml("</style><script>alert(\"x\" + 'y')&amp;"),
            "&lt;/style&gt;&lt;script&gt;alert(&quot;x&quot; + &#39;y&#39;)&amp;amp;");
  EXPECT_EQ(EscapeHtml(""), "");
  EXPECT_EQ(EscapeHtml("Grüße, 世界 🙂\n"), "Grüße, 世界 🙂\n");
}

TEST(EscapeHtmlTest, ReplacesWhatIsNoText) {
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(EscapeHtml(std::string("a\0b", 3)), "a" + bad + "b");
  EXPECT_EQ(EscapeHtml("\x1b[31m"), bad + "[31m");
  EXPECT_EQ(EscapeHtml("\xFF\xC3"), bad + bad);
  EXPECT_EQ(EscapeHtml("\xC0\xBC"), bad + bad) << "A long form of <.";
  EXPECT_EQ(EscapeHtml("\xE0\x80\xBC"), bad + bad + bad);
  EXPECT_EQ(EscapeHtml("\xED\xA0\x80"), bad + bad + bad) << "Half a pair.";
  EXPECT_EQ(EscapeHtml("\xF4\x90\x80\x80"), bad + bad + bad + bad);
  EXPECT_EQ(EscapeHtml("\xC2\x9B"), bad + bad) << "A control character.";
}

TEST(EscapeHtmlTest, WhateverTwoBytesThereAreTheResultStaysAsItIs) {
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      const std::string once =
          EscapeHtml(std::string{static_cast<char>(first), static_cast<char>(second)});
      EXPECT_EQ(once.find_first_of("<>\"'"), std::string::npos);
      if (once.find('&') == std::string::npos) {
        EXPECT_EQ(EscapeHtml(once), once) << first << " " << second;
      }
    }
  }
}

TEST(FormatTest, IsWhatPeopleWrite) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(int64_t{1} << 20), "1.0 MiB");
  EXPECT_EQ(FormatBytes((int64_t{1} << 20) - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(int64_t{300} << 30), "300 GiB");
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(-123456), "-123,456");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
  EXPECT_EQ(FormatSeconds(0.00012), "120 µs");
  EXPECT_EQ(FormatSeconds(0.0123), "12.3 ms");
  EXPECT_EQ(FormatSeconds(9.87), "9.9 s");
  EXPECT_EQ(FormatSeconds(194), "3 min 14 s");
  EXPECT_EQ(FormatSeconds(7260), "2 h 1 min");
  EXPECT_EQ(FormatNumber(0.43218), "0.432");
  EXPECT_EQ(FormatNumber(12345.6), "12,346");
  EXPECT_EQ(FormatNumber(kUnknown), "-");
  EXPECT_EQ(FormatPercent(0.0123), "1.2 %");
  EXPECT_EQ(Coordinate(12.5), "12.5");
  EXPECT_EQ(Coordinate(100), "100");
  EXPECT_EQ(Coordinate(-0.001), "0");
}

}  // namespace
}  // namespace evenkeel
