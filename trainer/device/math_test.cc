#include "evenkeel/trainer/device/math.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/testing/tested_devices.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/models/place.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::Each;
using testing::ElementsAre;

// The tested memory is also the host's: tests look at it once the stream is done.
class MathTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<DevicePlace> place = MakeDevicePlace(devices_, Device::Cuda(0));
    ASSERT_TRUE(place.ok()) << place.status();
    place_ = *place;
  }
  StreamRef stream() const { return place_.stream.ref(); }
  // In the device's memory.
  template <typename T>
  absl::Span<T> On(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    memory_.push_back(*devices_.Allocate(Device::Cuda(0), bytes));
    std::memcpy(memory_.back().data.get(), values.data(), bytes);
    return absl::MakeSpan(static_cast<T*>(memory_.back().data.get()), values.size());
  }
  void Finish() {
    ASSERT_TRUE(devices_.Synchronize(stream(), absl::Now() + absl::Seconds(60)).ok());
  }

  TestedDevices devices_;
  DevicePlace place_;
  std::vector<Memory> memory_;
};

// [2, 3] times [3, 2].
constexpr StridedShape kPlain{.rows = 2,
                              .columns = 2,
                              .inner = 3,
                              .left = {.row = 3},
                              .right = {.row = 2},
                              .output = {.row = 2}};

TEST_F(MathTest, MultipliesAndAddsABias) {
  const auto left = On<float>({1, 2, 3, 4, 5, 6}), right = On<float>({1, 0, 0, 1, 1, 1}),
             bias = On<float>({10, 20}), output = On(std::vector<float>(4, 100.0f));
  EXPECT_TRUE(place_.math
                  ->Product(kPlain, {DType::kFloat32, left.data()}, right.data(), bias.data(),
                            {DType::kFloat32, output.data()}, stream())
                  .ok());
  Finish();
  EXPECT_THAT(output, ElementsAre(14, 25, 20, 31));
  StridedShape adds = kPlain;
  adds.add = true;
  EXPECT_TRUE(place_.math
                  ->Product(adds, {DType::kFloat32, left.data()}, right.data(), nullptr,
                            {DType::kFloat32, output.data()}, stream())
                  .ok());
  Finish();
  EXPECT_THAT(output, ElementsAre(18, 30, 30, 42));
}

TEST_F(MathTest, ATransposedFactorIsSeenThroughItsStrides) {
  const auto left = On<float>({1, 4, 2, 5, 3, 6}), right = On<float>({1, 0, 1, 0, 1, 1}),
             output = On(std::vector<float>(4));
  StridedShape shape = kPlain;
  shape.left = {.row = 1, .column = 2};
  shape.right = {.row = 1, .column = 3};
  EXPECT_TRUE(place_.math
                  ->Product(shape, {DType::kFloat32, left.data()}, right.data(), nullptr,
                            {DType::kFloat32, output.data()}, stream())
                  .ok());
  Finish();
  EXPECT_THAT(output, ElementsAre(4, 5, 10, 11));
}

TEST_F(MathTest, SumsOfBfloat16AreRoundedOnce) {
  const auto left = On(std::vector<BFloat16>(6, BFloat16(1.0f))),
             right = On(std::vector<BFloat16>(6, BFloat16(1.0f)));
  const auto output = On(std::vector<float>(4));
  EXPECT_TRUE(place_.math
                  ->Product(kPlain, {DType::kBFloat16, left.data()}, right.data(), nullptr,
                            {DType::kFloat32, output.data()}, stream())
                  .ok());
  Finish();
  EXPECT_THAT(output, Each(3.0f));
}

// Each type, odd sizes, parts of wider matrices, gaps between them, and pointers at any element.
TEST_F(MathTest, SizesStridesAndAddressesMayBeOdd) {
  const auto value = [](int64_t i) { return static_cast<float>(i * 7 % 5) - 2; };
  for (const DType factors : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType result : {DType::kFloat32, factors}) {
      for (const int64_t at : {0, 1}) {
        SCOPED_TRACE(absl::StrCat(ToString(factors), " to ", ToString(result), " at ", at));
        StridedShape s{.outer = 2, .heads = 3, .rows = 5, .columns = 7, .inner = 9};
        s.left = {.outer = 189, .head = 63, .row = 11};
        s.right = {.outer = 195, .head = 65, .row = 1, .column = 9};
        s.output = {.outer = 153, .head = 51, .row = 9};
        const auto fill = [&](DType dtype, int64_t count) {
          memory_.push_back(*devices_.Allocate(Device::Cuda(0), count * SizeOf(dtype)));
          void* const data = memory_.back().data.get();
          for (int64_t i = 0; i < count; ++i) {
            if (dtype == DType::kFloat32) static_cast<float*>(data)[i] = value(i);
            if (dtype == DType::kBFloat16) static_cast<BFloat16*>(data)[i] = BFloat16(value(i));
            if (dtype == DType::kFloat16) static_cast<Float16*>(data)[i] = Float16(value(i));
          }
          return static_cast<std::byte*>(data) + at * SizeOf(dtype);
        };
        std::byte *const left = fill(factors, 500), *const right = fill(factors, 500),
                         *const output = fill(result, 500), *const bias = fill(DType::kFloat32, 20);
        const absl::Status status = place_.math->Product(
            s, {factors, left}, right, reinterpret_cast<float*>(bias), {result, output}, stream());
        ASSERT_TRUE(status.ok()) << status;
        Finish();
        for (int64_t o = 0; o < s.outer; ++o) {
          for (int64_t h = 0; h < s.heads; ++h) {
            for (int64_t r = 0; r < s.rows; ++r) {
              for (int64_t c = 0; c < s.columns; ++c) {
                float wanted = value(c + at);
                for (int64_t i = 0; i < s.inner; ++i) {
                  wanted += value(o * 189 + h * 63 + r * 11 + i + at) *
                            value(o * 195 + h * 65 + i + c * 9 + at);
                }
                const int64_t place = o * 153 + h * 51 + r * 9 + c;
                const float got =
                    result == DType::kFloat32 ? reinterpret_cast<float*>(output)[place]
                    : result == DType::kBFloat16
                        ? static_cast<float>(reinterpret_cast<BFloat16*>(output)[place])
                        : static_cast<float>(reinterpret_cast<Float16*>(output)[place]);
                ASSERT_EQ(got, wanted) << o << " " << h << " " << r << " " << c;
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(MathTest, RefusesWhatTheLibrariesHaveNoKernelFor) {
  StridedShape shape = kPlain;
  shape.left = {.row = 6, .column = 2};
  const absl::Status status = place_.math->Product(shape, {DType::kFloat32, nullptr}, nullptr,
                                                   nullptr, {DType::kFloat32, nullptr}, stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "product: float32 to float32 with strides of row and column 6,2 times 2,1 to 2,1; of "
            "outer and head in 1 x 1 matrices 0,0 times 0,0 to 0,0");
}

TEST_F(MathTest, RefusesBatchesThatNoSingleStrideDescribes) {
  StridedShape shape = kPlain;
  shape.outer = 2;
  shape.heads = 3;
  shape.left.outer = 3 * 6;
  shape.left.head = 6;
  shape.right = {.outer = 3 * 6, .head = 6, .row = 2};
  shape.output = {.outer = 3 * 4 + 1, .head = 4, .row = 2};
  const absl::Status status = place_.math->Product(shape, {DType::kFloat32, nullptr}, nullptr,
                                                   nullptr, {DType::kFloat32, nullptr}, stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "product: float32 to float32 with strides of row and column 3,1 times 2,1 to 2,1; of "
            "outer and head in 2 x 3 matrices 18,6 times 18,6 to 13,4");
}

// Each of the three is the adjoint of the others: <conv(x, w), d> = <x, back_images(w, d)> = <w,
// back_weight(x, d)>.
TEST_F(MathTest, GradientsOfAConvolutionAreItsAdjoints) {
  for (const int64_t stride : {1, 2}) {
    for (const int64_t kernel : {1, 3}) {
      SCOPED_TRACE(absl::StrCat("stride ", stride, ", kernel ", kernel));
      const DeviceConvolution shape{
          .batch = 2, .inputs = 3, .outputs = 2, .side = 5, .kernel = kernel, .stride = stride};
      const int64_t side = (shape.side - 1) / stride + 1;
      const auto of_size = [this](int64_t size, float value = 0) {
        return On(std::vector<float>(size, value));
      };
      const auto images = of_size(2 * 3 * 5 * 5), weight = of_size(2 * 3 * kernel * kernel),
                 diff = of_size(2 * 2 * side * side);
      int next = 0;
      for (const auto values : {images, weight, diff}) {
        for (float& value : values) value = static_cast<float>(next++ * 7 % 11) - 5;
      }
      const auto output = of_size(diff.size()), diff_images = of_size(images.size()),
                 in_bucket = of_size(1 + weight.size(), 1.0f);
      const auto diff_weight = in_bucket.subspan(stride - 1, weight.size());  // At any element.
      const auto convolve = [&](ConvolutionPass pass, const ConvolutionTensors& tensors) {
        return place_.math->Convolve(pass, shape, tensors, stream()).ok();
      };
      const float *x = images.data(), *w = weight.data(), *d = diff.data();
      EXPECT_TRUE(convolve(ConvolutionPass::kForward, {{x, w, output.data()}}));
      EXPECT_TRUE(convolve(ConvolutionPass::kBackwardImages, {{diff_images.data(), w, d}}));
      EXPECT_TRUE(
          convolve(ConvolutionPass::kBackwardWeight, {{x, diff_weight.data(), d}, /*add=*/true}));
      Finish();
      const auto dot = [](absl::Span<const float> a, absl::Span<const float> b) {
        double sum = 0;
        for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
        return sum;
      };
      const double wanted = dot(output, diff);
      // Small integers, so exact; but for an algorithm that transforms them.
      const double bound = devices_.name() == "simulated" ? 0.0 : 1e-3;
      EXPECT_NEAR(dot(images, diff_images), wanted, bound);
      for (float& value : diff_weight) value -= 1;  // The earlier contents.
      EXPECT_NEAR(dot(weight, diff_weight), wanted, bound);
    }
  }
}

}  // namespace
}  // namespace evenkeel
