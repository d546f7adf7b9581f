#include "evenkeel/comm/arith/integer_average.h"

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

template <typename T>
using Wide = std::conditional_t<sizeof(T) <= 2, int32_t, int64_t>;
template <typename T>
constexpr int64_t kParts = sizeof(T) == sizeof(Wide<T>) ? 2 : 1;

template <typename T>
void Widen(const TensorList& values, Wide<T>* wide) {
  for (const TensorView& view : values) {
    for (const T value : view.as<T>()) {
      if constexpr (kParts<T> == 1) {
        *wide++ = value;
      } else {
        *wide++ = value >> 32;
        *wide++ = value & 0xffff'ffff;
      }
    }
  }
}

template <typename T>
void Divide(const Wide<T>* sums, int world_size, const TensorList& averages) {
  for (const TensorView& view : averages) {
    for (T& average : view.as<T>()) {
      if constexpr (kParts<T> == 1) {
        average = static_cast<T>(*sums++ / world_size);
      } else {
        const absl::int128 sum = absl::int128(sums[0]) * (int64_t{1} << 32) + sums[1];
        average = static_cast<T>(sum / world_size);
        sums += 2;
      }
    }
  }
}

template <typename T>
absl::StatusOr<std::function<void()>> WidenElements(Operation& operation, int world_size) {
  constexpr DType kWide = DTypeOf<Wide<T>>::value;
  const int64_t ins = kParts<T> * CountOf(operation.in), outs = kParts<T> * CountOf(operation.out);
  const int64_t begin_of_out = IsInPlace(operation.what.kind) ? 0 : ins;
  const std::shared_ptr<Wide<T>[]> memory(new (std::nothrow) Wide<T>[begin_of_out + outs]());
  if (memory == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", ToString(operation.what)));
  if (operation.contributes) Widen<T>(operation.in, memory.get());

  Wide<T>* const sums = memory.get() + begin_of_out;
  std::function<void()> conclude = [memory, sums, world_size, averages = operation.out] {
    Divide<T>(sums, world_size, averages);
  };
  operation.step_of = HashOfCommonPart(operation);
  operation.what.dtype = kWide;
  operation.what.count *= kParts<T>;
  operation.in = {TensorView(memory.get(), ins, kWide)};
  operation.out = {TensorView(sums, outs, kWide)};
  return conclude;
}

}  // namespace

absl::StatusOr<std::function<void()>> WidenAverage(Operation& operation, int world_size) {
  switch (operation.what.dtype) {
    case DType::kInt8:
      return WidenElements<int8_t>(operation, world_size);
    case DType::kUint8:
      return WidenElements<uint8_t>(operation, world_size);
    case DType::kInt16:
      return WidenElements<int16_t>(operation, world_size);
    case DType::kInt32:
      return WidenElements<int32_t>(operation, world_size);
    default:
      return WidenElements<int64_t>(operation, world_size);
  }
}

}  // namespace evenkeel::internal
