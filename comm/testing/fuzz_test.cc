#include "evenkeel/comm/testing/fuzz.h"

#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// A byte of length, then so many bytes.
absl::StatusOr<std::string> Text(absl::string_view bytes) {
  if (bytes.empty() || bytes.size() != size_t{1} + static_cast<uint8_t>(bytes[0]))
    return absl::InvalidArgumentError("no text");
  return std::string(bytes);
}

const std::vector<std::string> kTexts = {std::string(1, '\0'), "\3abc", "\1x"};

TEST(FuzzTest, AGoodParserPasses) { Fuzz(kTexts, Text); }

TEST(FuzzTest, SeesAnotherError) {
  EXPECT_NONFATAL_FAILURE(Fuzz(kTexts,
                               [](absl::string_view bytes) -> absl::StatusOr<std::string> {
                                 if (bytes.size() == 7) return absl::InternalError("seven");
                                 return Text(bytes);
                               },
                               {.rounds = 40}),
                          "seven");
}

TEST(FuzzTest, SeesWhatIsWrittenDifferently) {
  // Takes a text that is too long by one, and drops that.
  EXPECT_NONFATAL_FAILURE(Fuzz({"\3abc"},
                               [](absl::string_view bytes) {
                                 const bool is_longer =
                                     !bytes.empty() &&
                                     bytes.size() == size_t{2} + static_cast<uint8_t>(bytes[0]);
                                 return Text(is_longer ? bytes.substr(0, bytes.size() - 1) : bytes);
                               },
                               {.rounds = 100}),
                          "taken, but written as");
}

TEST(FuzzTest, SeesMemoryThatIsOnlyAnnounced) {
  EXPECT_NONFATAL_FAILURE(Fuzz({std::string("\1\0\0\0x", 5)},
                               [](absl::string_view bytes) -> absl::StatusOr<std::string> {
                                 uint32_t length = 0;
                                 if (bytes.size() < 4) return absl::InvalidArgumentError("short");
                                 std::memcpy(&length, bytes.data(), 4);
                                 const std::string buffer(length % (1 << 20), '\0');
                                 if (bytes.size() - 4 != length)
                                   return absl::InvalidArgumentError("short");
                                 return std::string(bytes);
                               },
                               {.rounds = 10}),
                          "bytes of memory");
}

TEST(FuzzTest, SeesAGoodMessageThatIsRefused) {
  EXPECT_NONFATAL_FAILURE(Fuzz({"good"}, [](absl::string_view) { return Text(""); }),
                          "a good message is refused");
}

TEST(FuzzTest, BreaksInManyWays) {
  std::mt19937_64 random(1);
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(Broken(kTexts, random));
  EXPECT_GT(seen.size(), 500u);
}

TEST(MemoryTakenByTest, CountsWhatWasGivenBack) {
  EXPECT_GE(MemoryTakenBy([] { std::vector<char>(1000).clear(); }), 1000u);
  EXPECT_EQ(MemoryTakenBy([] {}), 0u);
}

}  // namespace
}  // namespace evenkeel
