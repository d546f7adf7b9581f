#include "evenkeel/bucket/plan/trainable_mask.h"

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kSizes[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000};

std::vector<uint8_t> RandomFlags(std::mt19937& random, int size) {
  std::vector<uint8_t> flags(size);
  for (uint8_t& flag : flags) flag = (random() & 1) != 0 ? static_cast<uint8_t>(random() | 1) : 0;
  return flags;
}

TrainableMask MaskOf(const std::vector<uint8_t>& flags) {
  TrainableMask mask(static_cast<int>(flags.size()), false);
  mask.Set(flags);
  return mask;
}

TEST(TrainableMaskTest, StartsAllTrainedOrAllFrozen) {
  for (int size : kSizes) {
    EXPECT_EQ(TrainableMask(size).CountTrained(), size);
    EXPECT_EQ(TrainableMask(size, false).CountTrained(), 0);
    EXPECT_EQ(TrainableMask(size).size(), size);
  }
  EXPECT_EQ(TrainableMask(), TrainableMask(0));
}

TEST(TrainableMaskTest, SetAnswersWhetherTheBitChanged) {
  TrainableMask mask(70);
  EXPECT_FALSE(mask.Set(69, true));
  EXPECT_TRUE(mask.Set(69, false));
  EXPECT_FALSE(mask.Set(69, false));
  EXPECT_FALSE(mask[69]);
  EXPECT_TRUE(mask[68]);
  EXPECT_EQ(mask.CountTrained(), 69);
}

TEST(TrainableMaskTest, FlagsAreTakenOneByOne) {
  std::mt19937 random(1);
  for (int size : kSizes) {
    SCOPED_TRACE(size);
    const std::vector<uint8_t> flags = RandomFlags(random, size);
    TrainableMask mask = MaskOf(flags);
    for (int i = 0; i < size; ++i) ASSERT_EQ(mask[i], flags[i] != 0) << i;
    EXPECT_FALSE(mask.Set(flags));
    for (int i = 0; i < size; ++i) {
      std::vector<uint8_t> other = flags;
      other[i] = flags[i] == 0 ? 0x80 : 0;
      ASSERT_TRUE(mask.Set(other)) << i;
      ASSERT_TRUE(mask.Set(flags)) << i;
    }
  }
}

TEST(TrainableMaskTest, MasksAreEqualWhateverTheWayTheyWereMade) {
  std::mt19937 random(2);
  for (int size : kSizes) {
    SCOPED_TRACE(size);
    const std::vector<uint8_t> flags = RandomFlags(random, size);
    TrainableMask appended;
    TrainableMask one_by_one(size);
    for (int i = 0; i < size; ++i) {
      appended.Append(flags[i] != 0);
      one_by_one.Set(i, flags[i] != 0);
    }
    EXPECT_EQ(appended, MaskOf(flags));
    EXPECT_EQ(one_by_one, MaskOf(flags));
    EXPECT_EQ(appended.Hash(), one_by_one.Hash());
  }
}

TEST(TrainableMaskTest, HashSeesEveryBitAndTheSize) {
  std::set<uint64_t> hashes;
  for (int size = 0; size < 200; ++size) hashes.insert(TrainableMask(size, false).Hash());
  TrainableMask mask(200, false);
  for (int i = 0; i < 200; ++i) {
    mask.Set(i, true);
    hashes.insert(mask.Hash());
    mask.Set(i, false);
  }
  EXPECT_EQ(hashes.size(), 400u);
}

// Ranks compare it across machines: a change here is a change of the protocol.
TEST(TrainableMaskTest, HashStaysAsItIs) {
  TrainableMask mask(70);
  mask.Set(3, false);
  EXPECT_EQ(mask.Hash(), 0x6b867c0c2a84d14eu);
}

TEST(TrainableMaskTest, BytesReadBack) {
  std::mt19937 random(3);
  for (int size : kSizes) {
    SCOPED_TRACE(size);
    const TrainableMask mask = MaskOf(RandomFlags(random, size));
    const std::string bytes = mask.Serialize();
    EXPECT_EQ(bytes.size(), 8u + (size + 7) / 8);
    const absl::StatusOr<TrainableMask> parsed = TrainableMask::Parse(bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, mask);
  }
}

TEST(TrainableMaskTest, BytesThatSerializeDoesNotMakeAreRefused) {
  const std::string good = TrainableMask(9).Serialize();
  ASSERT_TRUE(TrainableMask::Parse(good).ok());

  std::vector<std::string> bad;
  for (size_t length = 0; length < good.size(); ++length)
    bad.push_back(good.substr(0, length));  // Cut short.
  bad.push_back(good + '\0');
  bad.push_back(good);
  bad.back().back() = '\x03';  // A tenth bit.
  for (int at = 1; at < 8; ++at) {
    bad.push_back(good);
    bad.back()[at] = '\x7f';  // A size that the bits do not have.
  }
  bad.push_back(std::string(8, '\xff'));
  for (const std::string& bytes : bad) {
    const absl::Status status = TrainableMask::Parse(bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_FALSE(status.message().empty());
  }
}

// Whatever the bytes are: refused, or exactly what Serialize() makes of the result.
TEST(TrainableMaskTest, ParseIsTheInverseOfSerializeForAnyBytes) {
  std::mt19937 random(4);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(8 + random() % 4, '\0');
    bytes[0] = static_cast<char>(random() % 30);
    for (size_t i = 8; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random());
    if (random() % 8 == 0) bytes[random() % 8] = static_cast<char>(random());
    const absl::StatusOr<TrainableMask> parsed = TrainableMask::Parse(bytes);
    if (!parsed.ok()) continue;
    ++accepted;
    ASSERT_EQ(parsed->Serialize(), bytes);
  }
  EXPECT_GT(accepted, 500);
}

}  // namespace
}  // namespace evenkeel
