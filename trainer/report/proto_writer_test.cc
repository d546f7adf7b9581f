#include "evenkeel/trainer/report/proto_writer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace evenkeel {
namespace {

using namespace std::string_literals;

// Bytes worked out from the specification.
TEST(ProtoWriterTest, WritesEachTypeAsTheFormatSays) {
  EXPECT_EQ(ProtoWriter().Int(1, 150).bytes(), "\x08\x96\x01"s);
  EXPECT_EQ(ProtoWriter().Int(1, 0).bytes(), "\x08\x00"s);
  EXPECT_EQ(ProtoWriter().Int(2, -1).bytes(), "\x10"s + std::string(9, '\xff') + "\x01");
  EXPECT_EQ(ProtoWriter().Int(1, std::numeric_limits<int64_t>::min()).bytes(),
            "\x08"s + std::string(9, '\x80') + "\x01");
  EXPECT_EQ(ProtoWriter().Float(2, 1.0f).bytes(), "\x15\x00\x00\x80\x3f"s);
  EXPECT_EQ(ProtoWriter().Double(1, -2.0).bytes(), "\x09\x00\x00\x00\x00\x00\x00\x00\xc0"s);
  EXPECT_EQ(ProtoWriter().Text(2, "testing").bytes(), "\x12\x07testing"s);
  EXPECT_EQ(ProtoWriter().Text(16, "").bytes(), "\x82\x01\x00"s);  // A key of two bytes.
}

TEST(ProtoWriterTest, LongTextsHaveLongSizes) {
  const std::string bytes = ProtoWriter().Text(1, std::string(300, 'x')).Int(2, 1).bytes();
  EXPECT_EQ(bytes.substr(0, 3), "\x0a\xac\x02"s);
  EXPECT_EQ(bytes.size(), 3 + 300 + 2u);
}

}  // namespace
}  // namespace evenkeel
