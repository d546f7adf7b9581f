#include "evenkeel/trainer/device/testing/simulated_math.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/device_models.h"

namespace evenkeel {
namespace {

// Elements of any of the types, as floats.
class Elements {
 public:
  Elements(DType dtype, const void* data) : dtype_(dtype), data_(const_cast<void*>(data)) {}

  float operator[](int64_t i) const {
    switch (dtype_) {
      case DType::kBFloat16:
        return static_cast<float>(static_cast<const BFloat16*>(data_)[i]);
      case DType::kFloat16:
        return static_cast<float>(static_cast<const Float16*>(data_)[i]);
      default:
        return static_cast<const float*>(data_)[i];
    }
  }
  void Set(int64_t i, float value) const {
    switch (dtype_) {
      case DType::kBFloat16:
        static_cast<BFloat16*>(data_)[i] = BFloat16(value);
        return;
      case DType::kFloat16:
        static_cast<Float16*>(data_)[i] = Float16(value);
        return;
      default:
        static_cast<float*>(data_)[i] = value;
    }
  }

 private:
  const DType dtype_;
  void* const data_;
};

int64_t At(const MatrixStrides& strides, int64_t outer, int64_t head, int64_t row, int64_t column) {
  return outer * strides.outer + head * strides.head + row * strides.row + column * strides.column;
}

void Multiply(const StridedShape& s, Elements left, Elements right, const float* bias,
              Elements output) {
  std::vector<float> sums(s.columns);
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t r = 0; r < s.rows; ++r) {
        sums.assign(s.columns, 0.0f);
        for (int64_t i = 0; i < s.inner; ++i) {
          const float factor = left[At(s.left, o, h, r, i)];
          for (int64_t c = 0; c < s.columns; ++c)
            sums[c] += factor * right[At(s.right, o, h, i, c)];
        }
        for (int64_t c = 0; c < s.columns; ++c) {
          const int64_t at = At(s.output, o, h, r, c);
          const float sum = bias == nullptr ? sums[c] : sums[c] + bias[c];
          output.Set(at, s.add ? sum + output[at] : sum);
        }
      }
    }
  }
}

// Calls `add`(image element, weight element, output element) for all that belong together.
template <typename AddProduct>
void ForAll(const DeviceConvolution& s, AddProduct add) {
  const int64_t padding = (s.kernel - 1) / 2;
  const int64_t out_side = s.out_side();
  for (int64_t n = 0; n < s.batch; ++n) {
    for (int64_t o = 0; o < s.outputs; ++o) {
      for (int64_t y = 0; y < out_side; ++y) {
        for (int64_t x = 0; x < out_side; ++x) {
          const int64_t output = ((n * s.outputs + o) * out_side + y) * out_side + x;
          for (int64_t i = 0; i < s.inputs; ++i) {
            for (int64_t ky = 0; ky < s.kernel; ++ky) {
              const int64_t from_y = y * s.stride + ky - padding;
              if (from_y < 0 || from_y >= s.side) continue;
              for (int64_t kx = 0; kx < s.kernel; ++kx) {
                const int64_t from_x = x * s.stride + kx - padding;
                if (from_x < 0 || from_x >= s.side) continue;
                add(((n * s.inputs + i) * s.side + from_y) * s.side + from_x,
                    ((o * s.inputs + i) * s.kernel + ky) * s.kernel + kx, output);
              }
            }
          }
        }
      }
    }
  }
}

class SimulatedProducts : public ProductLibrary {
 public:
  explicit SimulatedProducts(SimulatedDevices& devices) : devices_(devices) {}

  absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right,
                       const float* bias, TypedPointer output, StreamRef stream) override {
    return devices_.Put(stream, [=] {
      Multiply(shape, {left.dtype, left.data}, {left.dtype, right}, bias,
               {output.dtype, output.data});
    });
  }

 private:
  SimulatedDevices& devices_;
};

class SimulatedConvolutions : public ConvolutionLibrary {
 public:
  explicit SimulatedConvolutions(SimulatedDevices& devices) : devices_(devices) {}

  absl::Status Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                        const ConvolutionTensors& tensors, StreamRef stream) override {
    return devices_.Put(stream, [=] {
      const Elements images(shape.dtype, tensors.images()), weight(shape.dtype, tensors.weight()),
          output(shape.dtype, tensors.output());
      std::vector<float> sums(shape.counts()[static_cast<size_t>(pass)]);
      ForAll(shape, [&](int64_t i, int64_t w, int64_t o) {
        if (pass == ConvolutionPass::kForward) sums[o] += images[i] * weight[w];
        if (pass == ConvolutionPass::kBackwardImages) sums[i] += output[o] * weight[w];
        if (pass == ConvolutionPass::kBackwardWeight) sums[w] += images[i] * output[o];
      });
      const bool is_weight = pass == ConvolutionPass::kBackwardWeight;
      const Elements to(is_weight ? DType::kFloat32 : shape.dtype, tensors.written(pass));
      for (size_t i = 0; i < sums.size(); ++i) {
        const auto at = static_cast<int64_t>(i);
        to.Set(at, is_weight && tensors.add ? to[at] + sums[i] : sums[i]);
      }
    });
  }

 private:
  SimulatedDevices& devices_;
};

[[maybe_unused]] const bool kIsUsed = [] {
  UseDeviceMath("simulated",
                [](DeviceRuntime& runtime, Device) -> absl::StatusOr<std::unique_ptr<DeviceMath>> {
                  auto* const simulated = dynamic_cast<SimulatedDevices*>(&runtime);
                  if (simulated == nullptr)
                    return absl::InvalidArgumentError("these devices are no SimulatedDevices");
                  return MakeSimulatedMath(*simulated);
                });
  return true;
}();

}  // namespace

std::unique_ptr<DeviceMath> MakeSimulatedMath(SimulatedDevices& devices) {
  return std::make_unique<DeviceMath>(std::make_unique<SimulatedProducts>(devices), [&devices] {
    return std::make_unique<SimulatedConvolutions>(devices);
  });
}

}  // namespace evenkeel
