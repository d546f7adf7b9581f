#include "evenkeel/comm/arith/reduce_kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

template <typename T>
using Carrier = std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;

// One step of a reduction as the header states it, without regard to speed.
template <typename C>
C CombineOnce(ReduceOp op, C a, C b) {
  if constexpr (std::is_integral_v<C>) {
    using U = std::make_unsigned_t<C>;
    const uint64_t ua = static_cast<U>(a), ub = static_cast<U>(b);
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage)
      return static_cast<C>(static_cast<U>(ua + ub));
    if (op == ReduceOp::kProduct) return static_cast<C>(static_cast<U>(ua * ub));
    if (op == ReduceOp::kBitOr) return static_cast<C>(static_cast<U>(ua | ub));
    if (op == ReduceOp::kBitAnd) return static_cast<C>(static_cast<U>(ua & ub));
    if (op == ReduceOp::kBitXor) return static_cast<C>(static_cast<U>(ua ^ ub));
  } else {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<C>::quiet_NaN();
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage) return a + b;
    if (op == ReduceOp::kProduct) return a * b;
  }
  return op == ReduceOp::kMin ? (a < b ? a : b) : (a > b ? a : b);
}

template <typename T>
T Reference(ReduceOp op, std::span<const T> values, double scale) {
  using C = Carrier<T>;
  C result = static_cast<C>(values[0]);
  for (const T& value : values.subspan(1)) result = CombineOnce(op, result, static_cast<C>(value));
  if constexpr (!std::is_integral_v<T>) {
    if (scale != 1.0) result *= static_cast<C>(scale);
  }
  return static_cast<T>(result);
}

template <typename T>
bool IsNan(T value) {
  return std::isnan(static_cast<double>(static_cast<Carrier<T>>(value)));
}

// The same bits; one NaN is as good as another.
template <typename T>
bool Same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (IsNan(a) && IsNan(b));
}

// Random bits, so that subnormals, infinities and NaN are among them; half of the floats are
// ordinary numbers.
template <typename T>
std::vector<T> RandomValues(std::mt19937_64& random, int64_t n) {
  std::vector<T> values(n);
  std::uniform_real_distribution<float> ordinary(-4.0f, 4.0f);
  for (T& value : values) {
    const uint64_t bits = random();
    std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
    if (!std::is_integral_v<T> && (bits >> 63) != 0) value = T(ordinary(random));
  }
  return values;
}

std::vector<const void*> Pointers(const auto& arrays) {
  std::vector<const void*> pointers;
  for (const auto& array : arrays) pointers.push_back(array.data());
  return pointers;
}

template <typename T>
class ReduceIntoTest : public testing::Test {
 protected:
  static constexpr DType kDType = DTypeOf<T>::value;

  std::vector<std::vector<T>> RandomInputs(int inputs, int64_t n) {
    std::vector<std::vector<T>> all;
    for (int k = 0; k < inputs; ++k) all.push_back(RandomValues<T>(random_, n));
    return all;
  }

  static std::vector<T> Expected(ReduceOp op, const std::vector<std::vector<T>>& inputs,
                                 double scale = 1.0) {
    std::vector<T> expected;
    for (size_t i = 0; i < inputs[0].size(); ++i) {
      std::vector<T> column;
      for (const std::vector<T>& input : inputs) column.push_back(input[i]);
      expected.push_back(Reference<T>(op, column, scale));
    }
    return expected;
  }

  static void ExpectSame(const std::vector<T>& actual, const std::vector<T>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(Same(actual[i], expected[i]))
          << "element " << i << ": " << static_cast<double>(static_cast<Carrier<T>>(actual[i]))
          << ", expected " << static_cast<double>(static_cast<Carrier<T>>(expected[i]));
    }
  }

  std::mt19937_64 random_{20240522};
};

using ElementTypes =
    testing::Types<float, double, Float16, BFloat16, int8_t, uint8_t, int16_t, int32_t, int64_t>;
TYPED_TEST_SUITE(ReduceIntoTest, ElementTypes);

TYPED_TEST(ReduceIntoTest, EveryInstructionSetGivesTheReferenceBitForBit) {
  for (ReduceOp op : kAllReduceOps) {
    if (IsBitwise(op) && IsFloat(this->kDType)) continue;
    for (int64_t n : {0, 1, 7, 64, 1023, 1024, 1025, 3001}) {
      for (int inputs : {1, 2, 3, 5}) {
        const auto in = this->RandomInputs(inputs, n);
        for (const double scale : {1.0, 1.0 / 3}) {
          const auto expected = this->Expected(op, in, scale);
          for (InstructionSet set : SupportedInstructionSets()) {
            SCOPED_TRACE(absl::StrCat(ToString(op), " of ", inputs, " inputs of ", n,
                                      " elements, scale ", scale, ", instruction set ",
                                      static_cast<int>(set)));
            std::vector<TypeParam> out(n);
            ReduceIntoWith(set, op, this->kDType, out.data(), Pointers(in), n, scale);
            this->ExpectSame(out, expected);
            if (this->HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TYPED_TEST(ReduceIntoTest, TheResultDoesNotDependOnSlicing) {
  constexpr int64_t kElements = 2500;
  const auto in = this->RandomInputs(4, kElements);
  const auto expected = this->Expected(ReduceOp::kSum, in, 0.3);
  for (int64_t slice : {1, 13, 1000, 1024}) {
    std::vector<TypeParam> out(kElements);
    for (int64_t begin = 0; begin < kElements; begin += slice) {
      std::vector<const void*> pointers;
      for (const auto& input : in) pointers.push_back(input.data() + begin);
      const int64_t n = std::min(slice, kElements - begin);
      ReduceInto(ReduceOp::kSum, this->kDType, out.data() + begin, pointers, n, 0.3);
    }
    SCOPED_TRACE(slice);
    this->ExpectSame(out, expected);
  }
}

TYPED_TEST(ReduceIntoTest, TheOutputMayBeAnyInput) {
  for (int which = 0; which < 3; ++which) {
    auto in = this->RandomInputs(3, 2049);
    const auto expected = this->Expected(ReduceOp::kSum, in, 0.5);
    ReduceInto(ReduceOp::kSum, this->kDType, in[which].data(), Pointers(in), 2049, 0.5);
    SCOPED_TRACE(which);
    this->ExpectSame(in[which], expected);
  }
}

TYPED_TEST(ReduceIntoTest, AccumulateIsAReductionOfTwo) {
  for (ReduceOp op : kAllReduceOps) {
    if (IsBitwise(op) && IsFloat(this->kDType)) continue;
    auto in = this->RandomInputs(2, 1100);
    const auto expected = this->Expected(op, in);
    Accumulate(op, this->kDType, in[0].data(), in[1].data(), 1100);
    SCOPED_TRACE(ToString(op));
    this->ExpectSame(in[0], expected);
  }
}

TYPED_TEST(ReduceIntoTest, AnIdentityChangesNothing) {
  for (ReduceOp op : kAllReduceOps) {
    if (IsBitwise(op) && IsFloat(this->kDType)) continue;
    const auto in = this->RandomInputs(1, 300);
    std::vector<TypeParam> identity(300);
    FillIdentity(op, this->kDType, identity.data(), 300);
    Accumulate(op, this->kDType, identity.data(), in[0].data(), 300);
    SCOPED_TRACE(ToString(op));
    for (size_t i = 0; i < in[0].size(); ++i) {
      if (IsNan(in[0][i])) continue;  // Arithmetic makes it quiet.
      ASSERT_EQ(static_cast<Carrier<TypeParam>>(identity[i]),
                static_cast<Carrier<TypeParam>>(in[0][i]))
          << i;
    }
  }
}

TEST(ReduceKernelsTest, SumsOf16BitFloatsAreRoundedOnce) {
  // 2048 + 1 is no float16 and rounds back to 2048 at each step; together the ones reach 2052.
  const std::array<Float16, 5> values = {Float16(2048), Float16(1), Float16(1), Float16(1),
                                         Float16(1)};
  std::vector<const void*> in;
  for (const Float16& value : values) in.push_back(&value);
  Float16 out;
  ReduceInto(ReduceOp::kSum, DType::kFloat16, &out, in, 1);
  EXPECT_EQ(static_cast<float>(out), 2052.0f);

  // Also a sum beyond the largest float16, which the scale brings back.
  const Float16 large(60000);
  const std::array<const void*, 2> twice = {&large, &large};
  ReduceInto(ReduceOp::kSum, DType::kFloat16, &out, twice, 1, 0.5);
  EXPECT_EQ(static_cast<float>(out), static_cast<float>(large));
}

TEST(ReduceKernelsTest, MinAndMaxGiveNanIfAnyInputIsNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int at = 0; at < 3; ++at) {
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (InstructionSet set : SupportedInstructionSets()) {
        std::vector<std::vector<float>> in(3, std::vector<float>(100, 1.0f));
        in[at].assign(100, nan);
        std::vector<float> out(100);
        ReduceIntoWith(set, op, DType::kFloat32, out.data(), Pointers(in), 100, 1.0);
        EXPECT_THAT(out, testing::Each(testing::IsNan()));
      }
    }
  }
}

TEST(ReduceKernelsTest, ScaleMultipliesFloatsAndLeavesIntegersAlone) {
  std::vector<double> doubles = {1.0, -3.0};
  Scale(DType::kFloat64, doubles.data(), 2, 0.1);
  EXPECT_THAT(doubles, testing::ElementsAre(0.1, -3.0 * 0.1));

  std::vector<BFloat16> halves = {BFloat16(2.0f), BFloat16(8.0f)};
  Scale(DType::kBFloat16, halves.data(), 2, 0.25);
  EXPECT_EQ(static_cast<float>(halves[0]), 0.5f);
  EXPECT_EQ(static_cast<float>(halves[1]), 2.0f);

  std::vector<int32_t> integers = {1, 2};
  Scale(DType::kInt32, integers.data(), 2, 0.5);
  EXPECT_THAT(integers, testing::ElementsAre(1, 2));
}

}  // namespace
}  // namespace evenkeel::internal
