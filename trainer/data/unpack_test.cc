#include "evenkeel/trainer/data/unpack.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

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

TEST(ReadUnpackedTest, ReturnsAndReportsWhatZlibDoes) {
  const std::string bytes = SomeBytes(300'000);
  const std::string packed = Gzip(bytes);
  std::string wrong_size = packed;
  wrong_size[wrong_size.size() - 2] ^= 1;
  std::string wrong_sum = packed;
  wrong_sum[wrong_sum.size() - 8] ^= 1;
  std::string wrong_byte = packed;
  wrong_byte[wrong_byte.size() / 2] ^= 1;
  std::string huge_size = packed;
  huge_size[huge_size.size() - 1] = '\xff';
  const std::string path = testing::TempDir() + "/file";
  const struct {
    std::string what;
    std::string file;
    int64_t max_bytes = 1 << 20;
    bool is_ok = false;
  } cases[] = {
      {.what = "one member", .file = packed, .is_ok = true},
      {.what = "exactly the limit", .file = packed, .max_bytes = 300'000, .is_ok = true},
      {.what = "above the limit", .file = packed, .max_bytes = 299'999},
      {.what = "several members", .file = packed + Gzip("") + Gzip("end"), .is_ok = true},
      {.what = "no contents", .file = Gzip(""), .is_ok = true},
      {.what = "plain", .file = bytes, .is_ok = true},
      {.what = "plain, above the limit", .file = bytes, .max_bytes = 299'999},
      {.what = "empty", .file = "", .is_ok = true},
      {.what = "begins as gzip", .file = "\x1f\x8b"},
      {.what = "cut", .file = packed.substr(0, packed.size() / 2)},
      {.what = "without its last byte", .file = packed.substr(0, packed.size() - 1)},
      {.what = "more bytes", .file = packed + "x"},
      {.what = "wrong size", .file = wrong_size},
      {.what = "huge size", .file = huge_size},
      {.what = "wrong checksum", .file = wrong_sum},
      {.what = "a wrong byte", .file = wrong_byte},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    std::ofstream(path, std::ios::binary) << c.file;
    const auto expected = ReadFile(path, {.gunzip = true, .max_bytes = c.max_bytes});
    EXPECT_EQ(expected.ok(), c.is_ok) << expected.status();
    const auto found = ReadUnpacked(path, c.max_bytes);
    EXPECT_EQ(found.status(), expected.status());
    EXPECT_TRUE(!expected.ok() || (found.ok() && *found == *expected));
  }
  EXPECT_EQ(ReadUnpacked(path + "?", 100).status(), ReadFile(path + "?").status());
  EXPECT_EQ(ReadUnpacked("/dev/zero", 100).status(), ReadFile("/dev/zero").status());
}

}  // namespace
}  // namespace evenkeel
