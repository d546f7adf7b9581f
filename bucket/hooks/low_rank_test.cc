#include "evenkeel/bucket/hooks/low_rank.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

constexpr double kEpsilon = 1e-5;

std::vector<float> Random(int64_t count, uint64_t seed) {
  std::vector<float> values(count);
  FillRandom(values, seed);
  return values;
}

double ColumnsDot(const std::vector<float>& columns, int64_t rows, int64_t a, int64_t b) {
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i)
    sum += static_cast<double>(columns[a * rows + i]) * columns[b * rows + i];
  return sum;
}

TEST(LowRankTest, ProductsAreThoseOfAPlainLoop) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{1, 1, 1}, {7, 5, 2}, {33, 70, 3}}) {
    const int64_t rows = shape[0], cols = shape[1], rank = shape[2];
    std::vector<float> data = Random(rows * cols, 1);
    const MatrixView m{data.data(), rows, cols};
    const std::vector<float> q = Random(cols * rank, 2), p = Random(rows * rank, 3);
    std::vector<float> mq(rows * rank), mtp(cols * rank), sum = data;
    TimesColumns(m, q.data(), rank, mq.data());
    TransposedTimesColumns(m, p.data(), rank, mtp.data());
    AddProduct(p.data(), q.data(), rank, -0.5f, {sum.data(), rows, cols});
    for (int64_t k = 0; k < rank; ++k) {
      for (int64_t i = 0; i < rows; ++i) {
        double expected = 0;
        for (int64_t j = 0; j < cols; ++j)
          expected += static_cast<double>(data[i * cols + j]) * q[k * cols + j];
        EXPECT_NEAR(mq[k * rows + i], expected, 1e-5);
      }
      for (int64_t j = 0; j < cols; ++j) {
        double expected = 0;
        for (int64_t i = 0; i < rows; ++i)
          expected += static_cast<double>(data[i * cols + j]) * p[k * rows + i];
        EXPECT_NEAR(mtp[k * cols + j], expected, 1e-5);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        double expected = data[i * cols + j];
        for (int64_t k = 0; k < rank; ++k) expected -= 0.5 * p[k * rows + i] * q[k * cols + j];
        EXPECT_NEAR(sum[i * cols + j], expected, 1e-5);
      }
    }
  }
}

TEST(OrthonormalizeTest, GivesColumnsOfLengthOneAtRightAngles) {
  std::vector<float> columns = Random(4 * 50, 9);
  for (int64_t i = 0; i < 50; ++i)
    columns[3 * 50 + i] = columns[i] + 1e-3f * columns[2 * 50 + i];  // Almost the first.
  Orthonormalize(columns.data(), 50, 4, kEpsilon);
  for (int a = 0; a < 3; ++a) {
    for (int b = 0; b < 3; ++b)
      EXPECT_NEAR(ColumnsDot(columns, 50, a, b), a == b ? 1.0 : 0.0, 1e-6) << a << b;
  }
  // The last one was a combination of two before it.
  EXPECT_EQ(ColumnsDot(columns, 50, 3, 3), 0.0);
}

TEST(OrthonormalizeTest, WhatIsLeftOfANearlyDependentColumnIsAtRightAnglesToo) {
  std::vector<float> columns = Random(2 * 1000, 4);
  for (int64_t i = 0; i < 1000; ++i) columns[1000 + i] = columns[i] + 1e-4f * columns[1000 + i];
  Orthonormalize(columns.data(), 1000, 2, kEpsilon);
  EXPECT_NEAR(ColumnsDot(columns, 1000, 1, 1), 1.0, 1e-6);
  EXPECT_NEAR(ColumnsDot(columns, 1000, 0, 1), 0.0, 1e-6);  // One pass alone leaves 1e-3.
}

TEST(OrthonormalizeTest, TakesZerosMoreColumnsThanRowsAndAnyMagnitude) {
  std::vector<float> zeros(3 * 2, 0.0f);
  Orthonormalize(zeros.data(), 2, 3, kEpsilon);
  EXPECT_EQ(zeros, std::vector<float>(6, 0.0f));

  std::vector<float> many = Random(3 * 2, 5);
  Orthonormalize(many.data(), 2, 3, kEpsilon);
  EXPECT_NEAR(ColumnsDot(many, 2, 1, 1), 1.0, 1e-6);
  EXPECT_EQ(ColumnsDot(many, 2, 2, 2), 0.0);

  std::vector<float> tiny = Random(2 * 30, 6);
  for (float& value : tiny) value *= 1e-30f;
  Orthonormalize(tiny.data(), 30, 2, kEpsilon);
  EXPECT_NEAR(ColumnsDot(tiny, 30, 0, 0), 1.0, 1e-6);
  EXPECT_NEAR(ColumnsDot(tiny, 30, 0, 1), 0.0, 1e-6);
}

TEST(LowRankTest, KnowsWhatIsFiniteAndWhatHasALength) {
  std::vector<float> values = {3.0f, 0.0f, -4.0f};
  EXPECT_TRUE(Normalize(values));
  EXPECT_EQ(values, (std::vector<float>{0.6f, 0.0f, -0.8f}));
  std::vector<float> zeros(2, 0.0f);
  EXPECT_FALSE(Normalize(zeros));
  EXPECT_TRUE(IsFinite(values));
  values[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(IsFinite(values));
}

TEST(FillRandomTest, DependsOnTheSeedAlone) {
  EXPECT_EQ(Random(100, 1), Random(100, 1));
  EXPECT_NE(Random(100, 1), Random(100, 2));
  for (float value : Random(1000, 3)) EXPECT_LE(std::abs(value), 1.0f);
}

}  // namespace
}  // namespace evenkeel::internal
