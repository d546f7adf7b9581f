// The value types of all evenkeel libraries: element types, devices, and a view of a tensor's
// memory.
//
//   std::vector<float> gradient(1000);
//   TensorView view{absl::MakeSpan(gradient)};     // float32[1000] on the CPU
//   view.Slice(10, 20).bytes();                    // 80
//
// evenkeel never sees a tensor class, an autograd engine or a model, only `TensorView`. So it works
// with any C++ tensor library.
//
// Units:     elements (`count`) unless a name contains bytes.
// Ownership: a view owns nothing; the memory must outlive every use of the view.
// Threads:   immutable values, safe from any thread.

#ifndef EVENKEEL_COMM_TYPES_H_
#define EVENKEEL_COMM_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/cpp20.h"
#include "evenkeel/comm/dtype.h"

namespace evenkeel {

// Returns "float32", "bfloat16", "int8", ...; and the reverse. InvalidArgument names the unknown
// word.
absl::string_view ToString(DType dtype);
absl::StatusOr<DType> DTypeFromString(absl::string_view name);
absl::string_view ToString(ReduceOp op);  // "sum", "average", ...

// The 16-bit floats as storage: IEEE binary16, and the upper half of a binary32. Conversions round
// to nearest even.
struct Float16 {
  uint16_t bits = 0;
  Float16() = default;
  explicit Float16(float value);
  explicit operator float() const;
};
struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float value);
  explicit operator float() const;
};

// DTypeOf<float>::value is DType::kFloat32, and so on for each C++ type of an element.
template <typename T>
struct DTypeOf;
template <DType kDType>
struct DTypeIs {
  static constexpr DType value = kDType;
};
template <>
struct DTypeOf<float> : DTypeIs<DType::kFloat32> {};
template <>
struct DTypeOf<double> : DTypeIs<DType::kFloat64> {};
template <>
struct DTypeOf<Float16> : DTypeIs<DType::kFloat16> {};
template <>
struct DTypeOf<BFloat16> : DTypeIs<DType::kBFloat16> {};
template <>
struct DTypeOf<int8_t> : DTypeIs<DType::kInt8> {};
template <>
struct DTypeOf<uint8_t> : DTypeIs<DType::kUint8> {};
template <>
struct DTypeOf<int16_t> : DTypeIs<DType::kInt16> {};
template <>
struct DTypeOf<int32_t> : DTypeIs<DType::kInt32> {};
template <>
struct DTypeOf<int64_t> : DTypeIs<DType::kInt64> {};

// A C++ type of elements. Not const, since operations write to the memory of a view.
template <typename T>
concept ElementType = requires {
  DTypeOf<T>::value;
};

struct Device {
  enum class Kind : uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int16_t index = 0;  // The number of the GPU; 0 on the CPU.

  static constexpr Device Cpu() { return {}; }
  static constexpr Device Cuda(int index) { return {Kind::kCuda, static_cast<int16_t>(index)}; }
  bool is_cpu() const { return kind == Kind::kCpu; }
  friend bool operator==(const Device&, const Device&) = default;
};
std::string ToString(Device device);  // "cpu", "cuda:1"

// A queue of device work that an operation may be ordered after or before. On CUDA `handle` is a
// cudaStream_t, which must live until the operation ends; on the CPU it is null.
struct StreamRef {
  void* handle = nullptr;
  Device device;
};

// A contiguous piece of memory with an element type and a device.
struct TensorView {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  Device device;

  TensorView() = default;
  TensorView(void* memory, int64_t elements, DType type, Device place = Device::Cpu())
      : data(memory), count(elements), dtype(type), device(place) {}
  // A view of any contiguous range of a supported element type in the CPU's memory.
  template <ElementType T>
  TensorView(absl::Span<T> span)  // NOLINT: a view is what a span is
      : TensorView(span.data(), static_cast<int64_t>(span.size()), DTypeOf<T>::value) {}
  template <ElementType T>
  TensorView(std::span<T> span)  // NOLINT: as above
      : TensorView(span.data(), static_cast<int64_t>(span.size()), DTypeOf<T>::value) {}

  int64_t bytes() const { return count * SizeOf(dtype); }
  // Returns the elements [begin, begin + length), which must lie inside.
  TensorView Slice(int64_t begin, int64_t length) const {
    return {static_cast<char*>(data) + begin * SizeOf(dtype), length, dtype, device};
  }
  // Returns the elements as a span. T must be the type of `dtype`, and the memory the CPU's.
  template <ElementType T>
  std::span<T> as() const {
    return {static_cast<T*>(data), static_cast<size_t>(count)};
  }
  friend bool operator==(const TensorView&, const TensorView&) = default;
};
// Returns "float32[1000]", or "float32[1000] on cuda:1".
std::string ToString(const TensorView& view);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TYPES_H_
