#include "evenkeel/trainer/gpt/dropout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

std::vector<float> Mask(const DropoutNoise& noise, const DropoutMatrix& matrix) {
  std::vector<float> values(matrix.rows * matrix.stride, 1.0f);
  Dropout(noise, matrix, values.data(), values.data());
  return values;
}

TEST(DropoutTest, KeepsItsShareAndTheMean) {
  constexpr int64_t kRows = 300, kColumns = 333;
  for (const double probability : {0.0, 0.1, 0.5, 0.99}) {
    const std::vector<float> mask =
        Mask({.probability = probability, .seed = 1}, {0, kRows, kColumns, kColumns});
    const double kept = std::ranges::count_if(mask, [](float value) { return value != 0; });
    const double deviation = std::sqrt(mask.size() * probability * (1 - probability));
    EXPECT_NEAR(kept, mask.size() * (1 - probability), 5 * deviation) << probability;
    for (float value : mask)
      ASSERT_TRUE(value == 0 || value == static_cast<float>(1 / (1 - probability)));
  }
}

TEST(DropoutTest, NeighboursAreIndependent) {
  constexpr int64_t kRows = 256, kColumns = 256;
  const std::vector<float> mask =
      Mask({.probability = 0.5, .seed = 1}, {0, kRows, kColumns, kColumns});
  for (const int64_t distance : {1, 2, 16, 255, 256, 512}) {
    int64_t equal = 0;
    for (size_t i = 0; i + distance < mask.size(); ++i) equal += mask[i] == mask[i + distance];
    const double count = static_cast<double>(mask.size() - distance);
    EXPECT_NEAR(equal / count, 0.5, 5 * 0.5 / std::sqrt(count)) << distance;
  }
}

TEST(DropoutTest, SeedAndStreamMatter) {
  const DropoutMatrix matrix = {0, 4, 100, 100};
  const DropoutNoise noise = {.probability = 0.5, .seed = 1, .stream = 2};
  EXPECT_EQ(Mask(noise, matrix), Mask(noise, matrix));
  EXPECT_NE(Mask(noise, matrix), Mask({.probability = 0.5, .seed = 2, .stream = 2}, matrix));
  EXPECT_NE(Mask(noise, matrix), Mask({.probability = 0.5, .seed = 1, .stream = 3}, matrix));
}

TEST(DropoutTest, APartIsWhatTheWholeHasThere) {
  const DropoutNoise noise = {.probability = 0.5, .seed = 1};
  const std::vector<float> whole = Mask(noise, {0, 6, 50, 64}), part = Mask(noise, {2, 3, 40, 64});
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 64; ++column) {
      // Elements to the right of the columns stay.
      EXPECT_EQ(part[row * 64 + column], column < 40 ? whole[(row + 2) * 64 + column] : 1.0f)
          << row << " " << column;
    }
  }
}

TEST(DropoutTest, ABatchInPartsHasTheNoiseOfTheWholeBatch) {
  const DropoutNoise noise = {.probability = 0.5, .seed = 1};
  const std::vector<float> whole = Mask(noise, WholeMatrix(7, 40));
  for (int64_t first = 0, rows = 1; first < 7; first += rows, ++rows) {
    rows = std::min<int64_t>(rows, 7 - first);
    DropoutNoise of_part = noise;
    of_part.first_row = first;
    const std::vector<float> part = Mask(of_part, WholeMatrix(rows, 40));
    EXPECT_TRUE(std::ranges::equal(part, std::span(whole).subspan(first * 40, rows * 40))) << first;
  }
}

TEST(DropoutTest, EveryTypeLosesTheSameElements) {
  const DropoutNoise noise = {.probability = 0.3, .seed = 9};
  const std::vector<float> expected = Mask(noise, {0, 1, 77, 77});
  std::vector<double> doubles(77, 1.0);
  std::vector<BFloat16> rounded(77, BFloat16(1.0f));
  Dropout(noise, {0, 1, 77, 77}, doubles.data(), doubles.data());
  Dropout(noise, {0, 1, 77, 77}, rounded.data(), rounded.data());
  for (int i = 0; i < 77; ++i) {
    EXPECT_NEAR(doubles[i], expected[i], 1e-6);
    EXPECT_EQ(rounded[i].bits, BFloat16(expected[i]).bits);
  }
}

}  // namespace
}  // namespace evenkeel
