#include "evenkeel/trainer/device/widening_convolutions.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/testing/simulated_math.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

constexpr Device kDevice = Device::Cuda(0);

// Plain loops; 16 bits only if it is said to have them.
class Library : public ConvolutionLibrary {
 public:
  Library(SimulatedDevices& devices, bool has_16_bits)
      : math_(MakeSimulatedMath(devices)), has_16_bits_(has_16_bits) {}

  absl::Status Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                        const ConvolutionTensors& tensors, StreamRef stream) override {
    if (has_16_bits_ || shape.dtype == DType::kFloat32)
      return math_->Convolve(pass, shape, tensors, stream);
    ++refusals_;
    return absl::UnimplementedError("no algorithm");
  }
  int refusals() const { return refusals_; }

 private:
  const std::unique_ptr<DeviceMath> math_;
  const bool has_16_bits_;
  int refusals_ = 0;
};

class WideningConvolutionsTest : public testing::Test {
 protected:
  void* On(DType dtype, int64_t count) {
    memory_.push_back(*devices_.Allocate(kDevice, count * SizeOf(dtype)));
    void* const data = memory_.back().data.get();
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(i * 7 % 11) / 8 - 0.6f;
      if (dtype == DType::kFloat32) static_cast<float*>(data)[i] = value;
      if (dtype == DType::kBFloat16) static_cast<BFloat16*>(data)[i] = BFloat16(value);
      if (dtype == DType::kFloat16) static_cast<Float16*>(data)[i] = Float16(value);
    }
    return data;
  }
  // All that a shape's three passes answer, as bytes.
  std::vector<uint8_t> Answers(ConvolutionLibrary& convolutions, const DeviceConvolution& s) {
    const int64_t side = (s.side - 1) / s.stride + 1, images = s.batch * s.inputs * s.side * s.side,
                  weight = s.outputs * s.inputs * s.kernel * s.kernel,
                  output = s.batch * s.outputs * side * side;
    const void *x = On(s.dtype, images), *w = On(s.dtype, weight), *d = On(s.dtype, output);
    void *y = On(s.dtype, output), *dx = On(s.dtype, images), *dw = On(DType::kFloat32, weight);
    const StreamRef stream = stream_.ref();
    EXPECT_EQ(convolutions.Convolve(ConvolutionPass::kForward, s, {{x, w, y}}, stream),
              absl::OkStatus());
    EXPECT_EQ(convolutions.Convolve(ConvolutionPass::kBackwardImages, s, {{dx, w, d}}, stream),
              absl::OkStatus());
    EXPECT_EQ(convolutions.Convolve(ConvolutionPass::kBackwardWeight, s, {{x, dw, d}, /*add=*/true},
                                    stream),
              absl::OkStatus());
    EXPECT_EQ(devices_.Synchronize(stream, absl::Now() + absl::Minutes(1)), absl::OkStatus());
    std::vector<uint8_t> all;
    const std::pair<void*, int64_t> parts[] = {{y, output * SizeOf(s.dtype)},
                                               {dx, images * SizeOf(s.dtype)},
                                               {dw, weight * SizeOf(DType::kFloat32)}};
    for (const auto& [data, bytes] : parts) {
      all.insert(all.end(), static_cast<uint8_t*>(data), static_cast<uint8_t*>(data) + bytes);
    }
    return all;
  }

  SimulatedDevices devices_;
  Stream stream_ = *devices_.CreateStream(kDevice);
  std::vector<Memory> memory_;
};

TEST_F(WideningConvolutionsTest, AnswersWhatALibraryWouldThatHasSixteenBits) {
  auto lacking = std::make_unique<Library>(devices_, /*has_16_bits=*/false);
  Library& library = *lacking;
  WideningConvolutions widening(devices_, kDevice, std::move(lacking));
  Library full(devices_, /*has_16_bits=*/true);
  int refusals = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DeviceConvolution& shape :
         {DeviceConvolution{.dtype = dtype, .batch = 2, .inputs = 1, .outputs = 3, .side = 5},
          DeviceConvolution{
              .dtype = dtype, .batch = 3, .inputs = 4, .outputs = 2, .side = 6, .stride = 2}}) {
      EXPECT_EQ(Answers(widening, shape), Answers(full, shape));
      refusals += dtype == DType::kFloat32 ? 0 : 3;
      EXPECT_EQ(Answers(widening, shape), Answers(full, shape));
      EXPECT_EQ(library.refusals(), refusals) << "who has been refused once does not ask again";
    }
  }
}

TEST_F(WideningConvolutionsTest, OtherErrorsAreTheLibrarysOwn) {
  WideningConvolutions widening(devices_, kDevice,
                                std::make_unique<Library>(devices_, /*has_16_bits=*/true));
  EXPECT_EQ(
      widening.Convolve(ConvolutionPass::kForward, {.dtype = DType::kBFloat16}, {}, stream_.ref())
          .code(),
      absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel::internal
