#include "evenkeel/trainer/data/unpack.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

std::string Gzip(const std::string& bytes) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string SomeBytes(int count) {
  std::string bytes;
  StableRandom random(7);
  while (std::ssize(bytes) < count) bytes += static_cast<char>(random.Below(40));
  return bytes;
}

std::string Path() { return testing::TempDir() + "/file"; }

std::string Write(const std::string& file) {
  std::ofstream(Path(), std::ios::binary) << file;
  return Path();
}

TEST(ReadUnpackedTest, ReturnsTheContents) {
  const std::string bytes = SomeBytes(300'000);
  const std::string packed = Gzip(bytes);
  const std::string even = std::string(5'000'000, 'x');  // Huge pages, and a limit of 1032 times.
  const struct {
    std::string what;
    std::string file;
    std::string contents;
    int64_t max_bytes = 8 << 20;
  } cases[] = {
      {"one member", packed, bytes},
      {"exactly the limit", packed, bytes, 300'000},
      {"easily packed", Gzip(even), even},
      {"several members", packed + Gzip("") + Gzip("end"), bytes + "end"},
      {"an empty end, exactly the limit", packed + Gzip(""), bytes, 300'000},
      {"a larger end", Gzip("begin") + packed, "begin" + bytes},
      {"no contents", Gzip(""), ""},
      {"no contents, no room", Gzip(""), "", 0},
      {"plain", bytes, bytes},
      {"plain, exactly the limit", bytes, bytes, 300'000},
      {"empty", "", ""},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const auto found = ReadUnpacked(Write(c.file), c.max_bytes);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_TRUE(*found == c.contents);
    const auto begin = ReadUnpackedBegin(Path(), 1000);
    ASSERT_TRUE(begin.ok()) << begin.status();
    EXPECT_EQ(*begin, c.contents.substr(0, 1000));
  }
}

TEST(ReadUnpackedTest, ReportsWhatCannotBeUnpacked) {
  const std::string bytes = SomeBytes(300'000);
  const std::string packed = Gzip(bytes);
  // Returns `packed` with another byte, `back` bytes before its end.
  const auto with = [&packed](size_t back, char byte) {
    std::string damaged = packed;
    damaged[damaged.size() - back] = byte;
    return damaged;
  };
  const auto flipped = [&](size_t back) { return with(back, packed[packed.size() - back] ^ 1); };
  const std::string damaged = "the gzip data ends too early or is damaged";
  const struct {
    std::string what;
    std::string file;
    std::string message;
    absl::StatusCode code = absl::StatusCode::kDataLoss;
    int64_t max_bytes = 1 << 20;
  } cases[] = {
      {"begins as gzip", "\x1f\x8b", damaged},
      {"begins as gzip, with another method", "\x1f\x8b\x63 nothing that zlib knows", damaged},
      {"a header cut short", packed.substr(0, 5), damaged},
      {"cut", packed.substr(0, packed.size() / 2), damaged},
      {"without its last byte", packed.substr(0, packed.size() - 1), damaged},
      {"a second member cut short", packed + packed.substr(0, 100'000), damaged},
      {"more bytes", packed + "x", "1 bytes follow the end of the gzip data"},
      {"half of a second header", packed + "\x1f", "1 bytes follow the end of the gzip data"},
      {"wrong size", flipped(2), damaged},
      {"huge size", with(1, '\xff'), damaged},
      {"wrong checksum", flipped(8), damaged},
      {"no trailer", packed.substr(0, packed.size() - 8) + std::string(8, '\0'), damaged},
      {"above the limit", packed, "unpacks to more than the 299999 bytes expected",
       absl::StatusCode::kResourceExhausted, 299'999},
      {"far above the limit", Gzip(std::string(50'000'000, 'x')),
       "unpacks to more than the 100000 bytes expected", absl::StatusCode::kResourceExhausted,
       100'000},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const absl::Status status = ReadUnpacked(Write(c.file), c.max_bytes).status();
    EXPECT_EQ(status, absl::Status(c.code, absl::StrCat(Path(), ": ", c.message)));
  }
  EXPECT_FALSE(ReadUnpacked(Write(flipped(packed.size() / 2)), 1 << 20).ok());
  Write(bytes);
  EXPECT_EQ(ReadUnpacked(Path(), 299'999).status(),
            ReadFile(Path(), {.max_bytes = 299'999}).status());
  EXPECT_EQ(ReadUnpacked(Path() + "?", 100).status(), ReadFile(Path() + "?").status());
  EXPECT_EQ(ReadUnpacked("/dev/zero", 100).status(), ReadFile("/dev/zero").status());
}

TEST(ReadUnpackedTest, ABeginningNeedsNoMoreOfTheFile) {
  const std::string bytes = SomeBytes(300'000);
  const std::string packed = Gzip(bytes);
  const auto begin = ReadUnpackedBegin(Write(packed.substr(0, packed.size() / 2)), 16);
  ASSERT_TRUE(begin.ok()) << begin.status();
  EXPECT_EQ(*begin, bytes.substr(0, 16));
  EXPECT_EQ(ReadUnpackedBegin(Write("\x1f\x8b\x63 nothing"), 16).status(),
            absl::DataLossError(Path() + ": cannot be unpacked"));
  for (const size_t bytes : {size_t{2}, size_t{12}}) {
    EXPECT_EQ(ReadUnpackedBegin(Write(packed.substr(0, bytes)), 16).status(),
              absl::DataLossError(Path() + ": cannot be unpacked"))
        << bytes;
  }
  EXPECT_EQ(*ReadUnpackedBegin(Write(Gzip("short")), 16), "short");
  EXPECT_EQ(ReadUnpackedBegin("/dev/zero", 16).status(), ReadFile("/dev/zero").status());
}

}  // namespace
}  // namespace evenkeel
