#include "evenkeel/trainer/data/augment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <vector>

#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/sampler.h"

namespace evenkeel {
namespace {

constexpr ImageShape kSmall{.channels = 1, .side = 3};

std::vector<float> Changed(const ImageChange& change, const std::vector<float>& image,
                           const ImageShape& shape = kSmall) {
  std::vector<float> changed(image.size(), -1);
  ApplyChange(change, shape, image, changed);
  return changed;
}

TEST(ApplyChangeTest, MovesAndMirrors) {
  const std::vector<float> image = {1, 2, 3,  //
                                    4, 5, 6,  //
                                    7, 8, 9};
  EXPECT_EQ(Changed({}, image), image);
  EXPECT_EQ(Changed({.right = 1}, image), (std::vector<float>{0, 1, 2, 0, 4, 5, 0, 7, 8}));
  EXPECT_EQ(Changed({.right = -2}, image), (std::vector<float>{3, 0, 0, 6, 0, 0, 9, 0, 0}));
  EXPECT_EQ(Changed({.down = 1}, image), (std::vector<float>{0, 0, 0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(Changed({.down = -1}, image), (std::vector<float>{4, 5, 6, 7, 8, 9, 0, 0, 0}));
  EXPECT_EQ(Changed({.is_mirrored = true}, image), (std::vector<float>{3, 2, 1, 6, 5, 4, 9, 8, 7}));
  // Mirrored first, then moved.
  EXPECT_EQ(Changed({.right = 1, .down = -1, .is_mirrored = true}, image),
            (std::vector<float>{0, 6, 5, 0, 9, 8, 0, 0, 0}));
}

TEST(ApplyChangeTest, NothingIsLeftOfAnImageThatIsMovedAway) {
  const std::vector<float> image(9, 5.0f), empty(9, 0.0f);
  for (int shift : {3, -3, 100, -100}) {
    EXPECT_EQ(Changed({.right = shift}, image), empty) << shift;
    EXPECT_EQ(Changed({.down = shift}, image), empty) << shift;
    EXPECT_EQ(Changed({.right = shift, .is_mirrored = true}, image), empty) << shift;
  }
}

TEST(ApplyChangeTest, ChannelsGoTogetherAndDoNotMix) {
  const ImageShape shape{.channels = 2, .side = 2};
  EXPECT_EQ(Changed({.right = 1}, {1, 2, 3, 4, 5, 6, 7, 8}, shape),
            (std::vector<float>{0, 1, 0, 3, 0, 5, 0, 7}));
}

TEST(ChangeOfTest, EveryChangeComesEquallyOften) {
  std::map<int, int> rights, downs;
  int mirrored = 0;
  constexpr int kSamples = 50000;
  for (int sample = 0; sample < kSamples; ++sample) {
    const ImageChange change = ChangeOf({.max_shift = 2, .seed = 3}, 1, sample);
    ++rights[change.right];
    ++downs[change.down];
    mirrored += change.is_mirrored;
  }
  for (const auto& counts : {rights, downs}) {
    ASSERT_EQ(counts.size(), 5u);
    // Each is binomial: a standard deviation of 90 around 10,000.
    for (int shift = -2; shift <= 2; ++shift)
      EXPECT_NEAR(counts.at(shift), kSamples / 5, 450) << shift;
  }
  EXPECT_NEAR(mirrored, kSamples / 2, 560);
}

TEST(ChangeOfTest, DependsOnSeedEpochAndSampleAlone) {
  const auto changes = [](uint64_t seed, int epoch, int first) {
    std::vector<ImageChange> changes;
    for (int sample = first; sample < first + 100; ++sample)
      changes.push_back(ChangeOf({.seed = seed}, epoch, sample));
    return changes;
  };
  EXPECT_EQ(changes(1, 2, 3), changes(1, 2, 3));
  EXPECT_NE(changes(1, 2, 3), changes(2, 2, 3));
  EXPECT_NE(changes(1, 2, 3), changes(1, 3, 3));
  EXPECT_NE(changes(1, 2, 3), changes(1, 2, 4));
  EXPECT_NE(changes(1, 2, 3), changes(2, 1, 3));
  // On every machine, today and later: a resumed run goes on with the same images.
  EXPECT_EQ(ChangeOf({.max_shift = 100, .seed = 1}, 2, 3),
            (ImageChange{.right = -35, .down = -83, .is_mirrored = true}));
}

TEST(ChangeOfTest, DoesWhatTheOptionsSay) {
  for (int sample = 0; sample < 200; ++sample) {
    EXPECT_EQ(ChangeOf({.max_shift = 0, .mirrors = false}, 0, sample), ImageChange{});
    EXPECT_FALSE(ChangeOf({.mirrors = false}, 0, sample).is_mirrored);
    EXPECT_LE(std::abs(ChangeOf({.max_shift = 1}, 0, sample).right), 1);
  }
}

// Numbered pixels: an image shows which sample it is, and what has become of it.
std::vector<float> Images(const std::vector<int32_t>& samples, const ImageShape& shape) {
  std::vector<float> images;
  for (int32_t sample : samples) {
    for (int p = 0; p < shape.pixels(); ++p)
      images.push_back(static_cast<float>(1000 * sample + p + 1));
  }
  return images;
}

TEST(AugmentTest, AnImageIsTheSameOnWhicheverRankAndInWhicheverBatch) {
  const ImageShape shape{.channels = 2, .side = 5};
  const AugmentOptions options{.seed = 4};
  const std::vector<int32_t> order = ShuffledOrder(60, 1, 0);
  std::vector<float> expected = Images(InOrder(60), shape);
  Augment(options, shape, 6, InOrder(60), expected);
  EXPECT_NE(expected, Images(InOrder(60), shape));
  for (int world_size : {1, 2, 3, 5, 8}) {
    for (int rank = 0; rank < world_size; ++rank) {
      const BatchPlan plan{.samples = 60, .batch_size = 7, .rank = rank, .world_size = world_size};
      for (int64_t b = 0; b < BatchCount(plan); ++b) {
        const auto batch = BatchSamples(plan, order, b);
        const std::vector<int32_t> samples(batch.begin(), batch.end());
        std::vector<float> images = Images(samples, shape);
        Augment(options, shape, 6, samples, images);
        for (size_t i = 0; i < samples.size(); ++i) {
          const auto at = [&](const std::vector<float>& from, int64_t n) {
            return std::vector<float>(from.begin() + n * shape.pixels(),
                                      from.begin() + (n + 1) * shape.pixels());
          };
          ASSERT_EQ(at(images, i), at(expected, samples[i]))
              << "sample " << samples[i] << " on rank " << rank;
        }
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel
