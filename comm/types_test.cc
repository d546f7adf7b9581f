#include "evenkeel/comm/types.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace evenkeel {
namespace {

TEST(DTypeTest, EveryNameReadsBack) {
  std::set<std::string> names;
  for (DType dtype : kAllDTypes) {
    const std::string name(ToString(dtype));
    SCOPED_TRACE(name);
    names.insert(name);
    ASSERT_TRUE(DTypeFromString(name).ok());
    EXPECT_EQ(*DTypeFromString(name), dtype);
  }
  EXPECT_EQ(names.size(), std::size(kAllDTypes));
}

TEST(DTypeTest, AnUnknownNameIsRefusedWithTheKnownOnes) {
  for (const char* name : {"", "float", "Float32", "float32 ", "complex64"}) {
    SCOPED_TRACE(name);
    const absl::Status status = DTypeFromString(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("\"" + std::string(name) + "\""));
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("bfloat16"));
  }
}

TEST(DTypeTest, SizesAreThoseOfTheElementTypes) {
  EXPECT_EQ(SizeOf(DTypeOf<float>::value), sizeof(float));
  EXPECT_EQ(SizeOf(DTypeOf<double>::value), sizeof(double));
  EXPECT_EQ(SizeOf(DTypeOf<Float16>::value), sizeof(Float16));
  EXPECT_EQ(SizeOf(DTypeOf<BFloat16>::value), sizeof(BFloat16));
  EXPECT_EQ(SizeOf(DTypeOf<int8_t>::value), sizeof(int8_t));
  EXPECT_EQ(SizeOf(DTypeOf<uint8_t>::value), sizeof(uint8_t));
  EXPECT_EQ(SizeOf(DTypeOf<int16_t>::value), sizeof(int16_t));
  EXPECT_EQ(SizeOf(DTypeOf<int32_t>::value), sizeof(int32_t));
  EXPECT_EQ(SizeOf(DTypeOf<int64_t>::value), sizeof(int64_t));
}

uint16_t Float16Bits(float value) { return Float16(value).bits; }
uint16_t BFloat16Bits(float value) { return BFloat16(value).bits; }

template <typename T>
float ValueOf(int bits) {
  T half;
  half.bits = static_cast<uint16_t>(bits);
  return static_cast<float>(half);
}

TEST(Float16Test, EveryPatternSurvivesTheRoundTrip) {
  for (int bits = 0; bits <= 0xffff; ++bits) {
    const float value = ValueOf<Float16>(bits);
    const bool is_nan = (bits & 0x7fff) > 0x7c00;
    ASSERT_EQ(std::isnan(value), is_nan) << bits;
    ASSERT_EQ(Float16Bits(value), is_nan ? bits | 0x0200 : bits);  // A NaN comes back quiet.
  }
}

TEST(BFloat16Test, EveryPatternSurvivesTheRoundTrip) {
  for (int bits = 0; bits <= 0xffff; ++bits) {
    const float value = ValueOf<BFloat16>(bits);
    const bool is_nan = (bits & 0x7fff) > 0x7f80;
    ASSERT_EQ(std::isnan(value), is_nan) << bits;
    ASSERT_EQ(BFloat16Bits(value), is_nan ? bits | 0x0040 : bits);
  }
}

// The value of a pattern by its definition: significand times a power of two.
double DefinedValue(int bits, int mantissa_bits, int exponent_bias) {
  const int magnitude = bits & 0x7fff;
  const int exponent = magnitude >> mantissa_bits;
  const int fraction = magnitude & ((1 << mantissa_bits) - 1);
  const int significand = exponent == 0 ? fraction : fraction | (1 << mantissa_bits);
  const double value =
      std::ldexp(significand, std::max(exponent, 1) - exponent_bias - mantissa_bits);
  return (bits & 0x8000) != 0 ? -value : value;
}

TEST(Float16Test, FinitePatternsHaveTheirDefinedValue) {
  for (int bits = 0; bits <= 0xffff; ++bits) {
    if ((bits & 0x7c00) == 0x7c00) continue;
    ASSERT_EQ(static_cast<double>(ValueOf<Float16>(bits)), DefinedValue(bits, 10, 15)) << bits;
  }
}

// Walks every pair of neighbouring finite patterns of one sign: the middle goes to the even one, a
// hair beside it to the nearer one. What lies half a step beyond the last pattern goes to infinity
// (whose pattern is the next one).
template <typename T>
void ExpectNearestEven(int infinity) {
  for (int sign : {0, 0x8000}) {
    for (int low = 0; low < infinity; ++low) {
      const int high = low + 1;
      const double below = std::abs(static_cast<double>(ValueOf<T>(low)));
      const double above = high < infinity
                               ? std::abs(static_cast<double>(ValueOf<T>(high)))
                               : 2 * below - std::abs(static_cast<double>(ValueOf<T>(low - 1)));
      const double middle = (below + above) / 2;
      if (middle > std::numeric_limits<float>::max()) break;
      const float exact = static_cast<float>(sign == 0 ? middle : -middle);
      if (std::abs(static_cast<double>(exact)) != middle)
        continue;  // Below float32's own resolution.
      const int even = (low & 1) == 0 ? low : high;
      ASSERT_EQ(T(exact).bits, even | sign) << low;
      ASSERT_EQ(T(std::nextafter(exact, 0.0f)).bits, low | sign) << low;
      ASSERT_EQ(T(std::nextafter(exact, exact * 4)).bits, high | sign) << low;
    }
  }
}

TEST(Float16Test, RoundsToNearestEven) { ExpectNearestEven<Float16>(0x7c00); }
TEST(BFloat16Test, RoundsToNearestEven) { ExpectNearestEven<BFloat16>(0x7f80); }

TEST(Float16Test, EdgesOfTheRange) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Float16Bits(65504.0f), 0x7bff);
  EXPECT_EQ(Float16Bits(65519.996f), 0x7bff);
  EXPECT_EQ(Float16Bits(65520.0f), 0x7c00);
  EXPECT_EQ(Float16Bits(-1e30f), 0xfc00);
  EXPECT_EQ(Float16Bits(infinity), 0x7c00);
  EXPECT_EQ(Float16Bits(-infinity), 0xfc00);
  EXPECT_EQ(Float16Bits(0x1p-24f), 0x0001);
  EXPECT_EQ(Float16Bits(0x1p-25f), 0x0000);
  EXPECT_EQ(Float16Bits(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(Float16Bits(-0.0f), 0x8000);
  EXPECT_EQ(Float16Bits(std::numeric_limits<float>::denorm_min()), 0x0000);
}

TEST(BFloat16Test, EdgesOfTheRange) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(BFloat16Bits(1.0f), 0x3f80);
  EXPECT_EQ(BFloat16Bits(infinity), 0x7f80);
  EXPECT_EQ(BFloat16Bits(-infinity), 0xff80);
  EXPECT_EQ(BFloat16Bits(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(BFloat16Bits(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(BFloat16Bits(std::bit_cast<float>(0x7f800001u)),
            0x7fc0);  // Not infinity, though its low bits go.
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) uint16_t HardwareFloat16(float value) {
  return _cvtss_sh(value, 0);
}

TEST(Float16Test, AgreesWithTheProcessor) {
  if (internal::BestInstructionSet() == internal::InstructionSet::kBaseline)
    GTEST_SKIP() << "this processor has no AVX2 and F16C";
  // Every float32 whose lower 12 bits lie where rounding decides, and random ones.
  for (uint32_t upper = 0; upper < (1u << 20); ++upper) {
    for (uint32_t lower : {0x000u, 0x001u, 0x7ffu, 0x800u, 0xfffu}) {
      const float value = std::bit_cast<float>(upper << 12 | lower);
      ASSERT_EQ(Float16Bits(value), HardwareFloat16(value)) << std::hex << (upper << 12 | lower);
    }
  }
  std::mt19937 random(20240521);
  for (int i = 0; i < 1'000'000; ++i) {
    const uint32_t bits = random();
    ASSERT_EQ(Float16Bits(std::bit_cast<float>(bits)), HardwareFloat16(std::bit_cast<float>(bits)))
        << std::hex << bits;
  }
}
#endif

TEST(DeviceTest, NamesItself) {
  EXPECT_EQ(ToString(Device::Cpu()), "cpu");
  EXPECT_EQ(ToString(Device::Cuda(3)), "cuda:3");
  EXPECT_NE(Device::Cuda(0), Device::Cpu());
  EXPECT_TRUE(Device().is_cpu());
}

TEST(ReduceOpTest, NamesDiffer) {
  std::set<std::string> names;
  for (ReduceOp op : kAllReduceOps) names.insert(std::string(ToString(op)));
  EXPECT_THAT(names, testing::UnorderedElementsAre("sum", "average", "min", "max", "product",
                                                   "bit_or", "bit_and", "bit_xor"));
}

TEST(TensorViewTest, TakesItsTypeFromTheSpan) {
  std::vector<Float16> halves(7);
  const TensorView view(absl::MakeSpan(halves));
  EXPECT_EQ(view.data, halves.data());
  EXPECT_EQ(view.bytes(), 14);
  EXPECT_EQ(ToString(view), "float16[7]");
  EXPECT_EQ(view, TensorView(std::span(halves)));
  EXPECT_EQ(view.as<Float16>().size(), 7u);
}

TEST(TensorViewTest, ASliceStartsAtItsElement) {
  std::vector<int32_t> numbers = {0, 1, 2, 3, 4};
  const TensorView slice = TensorView(absl::MakeSpan(numbers)).Slice(3, 2);
  EXPECT_THAT(slice.as<int32_t>(), testing::ElementsAre(3, 4));
  EXPECT_EQ(slice.Slice(1, 0).bytes(), 0);
}

TEST(TensorViewTest, NamesItsDeviceUnlessItIsTheCpu) {
  EXPECT_EQ(ToString(TensorView(nullptr, 10, DType::kInt8, Device::Cuda(1))), "int8[10] on cuda:1");
  EXPECT_EQ(ToString(TensorView()), "float32[0]");
}

}  // namespace
}  // namespace evenkeel
