#include "evenkeel/comm/arith/convert.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::ConvertFloatsWith;
using internal::InstructionSet;
using internal::SupportedInstructionSets;

template <typename T>
bool IsNan(T value) {
  return std::isnan(static_cast<double>(static_cast<float>(value)));
}

template <typename T>
std::vector<T> AllHalves() {
  std::vector<T> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  return all;
}

// Every exponent and sign with mantissas at and around where rounding turns, random ones,
// infinities and NaNs.
std::vector<float> Floats() {
  std::vector<float> values;
  std::mt19937 random(20240607);
  for (uint32_t head = 0; head < 512; ++head) {
    for (uint32_t tail :
         {0x0u, 0x1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu, 0x2000u, 0x3000u, 0x7fffu, 0x8000u,
          0x8001u, 0xffffu, 0x18000u, 0x7fefffu, 0x7ff000u, 0x7f7fffu, 0x7f8000u, 0x7fffffu}) {
      values.push_back(std::bit_cast<float>(head << 23 | tail));
    }
    for (int i = 0; i < 40; ++i)
      values.push_back(
          std::bit_cast<float>(static_cast<uint32_t>(head << 23 | (random() & 0x7fffffu))));
  }
  return values;
}

template <typename T>
class HalfTest : public testing::Test {};
using Halves = testing::Types<Float16, BFloat16>;
TYPED_TEST_SUITE(HalfTest, Halves);

TYPED_TEST(HalfTest, NarrowingGivesWhatOneElementGives) {
  std::vector<float> from = Floats();
  for (InstructionSet set : SupportedInstructionSets()) {
    std::vector<TypeParam> to(from.size());
    ConvertFloatsWith(set, absl::MakeSpan(from), absl::MakeSpan(to), {});
    for (size_t i = 0; i < from.size(); ++i) {
      ASSERT_EQ(to[i].bits, TypeParam(from[i]).bits)
          << from[i] << " (" << std::bit_cast<uint32_t>(from[i]) << ")";
    }
  }
}

TYPED_TEST(HalfTest, WideningGivesWhatOneElementGives) {
  std::vector<TypeParam> from = AllHalves<TypeParam>();
  for (InstructionSet set : SupportedInstructionSets()) {
    std::vector<float> to(from.size());
    std::vector<double> to_double(from.size());
    ConvertFloatsWith(set, absl::MakeSpan(from), absl::MakeSpan(to), {});
    ConvertFloatsWith(set, absl::MakeSpan(from), absl::MakeSpan(to_double), {});
    for (size_t i = 0; i < from.size(); ++i) {
      ASSERT_EQ(std::isnan(to[i]), IsNan(from[i])) << i;
      ASSERT_EQ(std::isnan(to_double[i]), IsNan(from[i])) << i;
      if (IsNan(from[i])) continue;
      ASSERT_EQ(std::bit_cast<uint32_t>(to[i]),
                std::bit_cast<uint32_t>(static_cast<float>(from[i])))
          << i;
      ASSERT_EQ(to_double[i], static_cast<double>(to[i])) << i;
    }
  }
}

// Between two neighbours the middle goes to the even one, and what is next to the middle goes to
// the nearer one, also if only a float64 can tell it from the middle: rounding to float32 first
// would give the middle there.
TYPED_TEST(HalfTest, Float64IsRoundedOnce) {
  std::vector<double> from;
  std::vector<uint16_t> expected;
  const double infinity = std::numeric_limits<double>::infinity();
  for (uint32_t bits = 0;; ++bits) {
    const TypeParam low = std::bit_cast<TypeParam>(static_cast<uint16_t>(bits));
    const TypeParam high = std::bit_cast<TypeParam>(static_cast<uint16_t>(bits + 1));
    if (std::isinf(static_cast<float>(high))) break;
    const double middle =
        (static_cast<double>(static_cast<float>(low)) + static_cast<float>(high)) / 2;
    for (const double sign : {1.0, -1.0}) {
      const uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      from.insert(from.end(), {sign * middle, sign * std::nextafter(middle, infinity),
                               sign * std::nextafter(middle, 0.0),
                               sign * static_cast<double>(static_cast<float>(low))});
      const uint16_t even = bits % 2 == 0 ? low.bits : high.bits;
      for (uint16_t magnitude : {even, high.bits, low.bits, low.bits})
        expected.push_back(sign_bit | magnitude);
    }
  }
  from.insert(from.end(), {1e300, -1e300, 1e-300, -1e-300, infinity});
  const uint16_t inf = TypeParam(std::numeric_limits<float>::infinity()).bits;
  for (uint16_t bits : {inf, uint16_t(inf | 0x8000), uint16_t(0), uint16_t(0x8000), inf})
    expected.push_back(bits);
  for (InstructionSet set : SupportedInstructionSets()) {
    std::vector<TypeParam> to(from.size());
    ConvertFloatsWith(set, absl::MakeSpan(from), absl::MakeSpan(to), {});
    for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i].bits, expected[i]) << from[i];
    std::vector<double> nan = {std::nan("")};
    ConvertFloatsWith(set, absl::MakeSpan(nan), absl::MakeSpan(to).subspan(0, 1), {});
    EXPECT_TRUE(IsNan(to[0]));
  }
}

TYPED_TEST(HalfTest, ScalesAndAddsInFloat32AndRoundsOnce) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-3, 3);
  for (const int n : {0, 1, 7, 16, 1023, 1024, 1025, 3001}) {
    std::vector<float> floats(n), sums(n);
    std::vector<TypeParam> halves(n);
    for (int i = 0; i < n; ++i) {
      floats[i] = uniform(random);
      sums[i] = uniform(random);
      halves[i] = TypeParam(uniform(random));
    }
    for (InstructionSet set : SupportedInstructionSets()) {
      SCOPED_TRACE(n);
      std::vector<TypeParam> narrowed = halves;
      ConvertFloatsWith(set, absl::MakeSpan(floats), absl::MakeSpan(narrowed), {.scale = 1.0 / 3});
      std::vector<float> sum = sums;
      ConvertFloatsWith(set, absl::MakeSpan(halves), absl::MakeSpan(sum),
                        {.scale = 1.0 / 3, .add = true});
      std::vector<TypeParam> half_sum = halves;
      ConvertFloatsWith(set, absl::MakeSpan(floats), absl::MakeSpan(half_sum), {.add = true});
      for (int i = 0; i < n; ++i) {
        const volatile float product =
            static_cast<float>(halves[i]) * static_cast<float>(1.0 / 3);  // Not contracted.
        ASSERT_EQ(narrowed[i].bits, TypeParam(floats[i] * static_cast<float>(1.0 / 3)).bits);
        ASSERT_EQ(sum[i], sums[i] + product);
        ASSERT_EQ(half_sum[i].bits, TypeParam(static_cast<float>(halves[i]) + floats[i]).bits);
      }
    }
  }
}

TEST(ConvertFloatsTest, WorksInPlaceAndBetweenAllFloats) {
  const DType types[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  std::vector<float> one = {1.0f, -2.5f, 0.0f, 96.0f};
  for (DType from : types) {
    for (DType to : types) {
      std::vector<double> a(4), b(4), back(4);  // Memory for any of them.
      TensorView in(a.data(), 4, from), out(b.data(), 4, to);
      ConvertFloats(absl::MakeSpan(one), in);
      ConvertFloats(in, out);
      ConvertFloats(out, out, {.scale = 2});
      ConvertFloats(out, absl::MakeSpan(back));
      EXPECT_THAT(back, testing::ElementsAre(2.0, -5.0, 0.0, 192.0))
          << ToString(from) << " to " << ToString(to);
    }
  }
}

TEST(CheckConvertibleTest, RefusesWhatItCanNotConvert) {
  const TensorView floats(nullptr, 4, DType::kFloat32), halves(nullptr, 4, DType::kFloat16);
  EXPECT_TRUE(CheckConvertible(floats, halves).ok());
  const absl::Status integers = CheckConvertible(floats, TensorView(nullptr, 4, DType::kInt32));
  EXPECT_EQ(integers.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(integers.message()), testing::HasSubstr("float32[4] to int32[4]"));
  EXPECT_EQ(CheckConvertible(floats, TensorView(nullptr, 5, DType::kFloat16)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      CheckConvertible(floats, TensorView(nullptr, 4, DType::kFloat16, Device::Cuda(0))).code(),
      absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace evenkeel
