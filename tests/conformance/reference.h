// The expected results of collectives: made-up inputs, and the plain loop over the ranks that
// computes the result.
//
//   ForEachType([](auto type) {
//     using T = typename decltype(type)::type;
//     std::vector<T> mine = Inputs<T>(ReduceOp::kSum, rank, n);
//     std::vector<T> sum = Reduced<T>(ReduceOp::kSum, AllRanks(world_size), n);
//   });
//
// The floats are such that no partial result needs rounding, in any type, up to 8 ranks, and in any
// order: sums are of integers from -3 to 3 (at most 24; bfloat16 has all integers up to 256),
// products are of 1, -1, 2 and -2. So a test of equality holds for every backend. Integers have all
// their bits random, and wrap around; those of an average are the ends of the type's range, too,
// and their sum does not fit into the type.

#ifndef EVENKEEL_TESTS_CONFORMANCE_REFERENCE_H_
#define EVENKEEL_TESTS_CONFORMANCE_REFERENCE_H_

#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

// Calls f(std::type_identity<T>()) for each element type until one fails.
template <typename F>
absl::Status ForEachType(F f) {
  EK_RETURN_IF_ERROR(f(std::type_identity<float>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<double>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<Float16>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<BFloat16>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<int8_t>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<uint8_t>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<int16_t>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<int32_t>()));
  EK_RETURN_IF_ERROR(f(std::type_identity<int64_t>()));
  return absl::OkStatus();
}

template <typename T>
inline constexpr bool kIsFloat = IsFloat(DTypeOf<T>::value);
template <typename T>
inline constexpr bool kIsHalf = kIsFloat<T> && sizeof(T) == 2;

// The type in which T is calculated: 64 bits for integers, of which T keeps the lower ones.
template <typename T>
using WideOf = std::conditional_t<kIsHalf<T>, float, std::conditional_t<kIsFloat<T>, T, int64_t>>;

template <typename T>
T InputAt(ReduceOp op, int rank, int64_t i) {
  const uint64_t random = StableHash(static_cast<uint64_t>(rank) + 1, static_cast<uint64_t>(i));
  const int small = static_cast<int>(random >> 40);
  if constexpr (kIsFloat<T>) {
    switch (op) {
      case ReduceOp::kProduct:
        return T(static_cast<float>((1 + small % 2) * (small % 4 < 2 ? 1 : -1)));
      case ReduceOp::kMin:
      case ReduceOp::kMax:
        return T(static_cast<float>(small % 201 - 100));
      default:
        return T(static_cast<float>(small % 7 - 3));
    }
  } else {
    using Limits = std::numeric_limits<T>;
    if (op == ReduceOp::kAverage && i % 4 < 2) {  // An end of the range on all ranks but one.
      const T end = i % 4 == 0 ? Limits::max() : Limits::min();
      return rank == i / 4 % 8 ? static_cast<T>(end + (i % 4 == 0 ? -1 : 1)) : end;
    }
    return static_cast<T>(random);
  }
}

template <typename T>
std::vector<T> Inputs(ReduceOp op, int rank, int64_t n) {
  std::vector<T> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = InputAt<T>(op, rank, i);
  return values;
}

template <typename Wide>
Wide Combine(ReduceOp op, Wide a, Wide b) {
  const auto add = [](Wide x, Wide y) {
    if constexpr (std::is_integral_v<Wide>)
      return static_cast<Wide>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
    return x + y;
  };
  const auto multiply = [](Wide x, Wide y) {
    if constexpr (std::is_integral_v<Wide>)
      return static_cast<Wide>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
    return x * y;
  };
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return add(a, b);
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return a < b ? b : a;
    case ReduceOp::kProduct:
      return multiply(a, b);
    case ReduceOp::kBitOr:
      if constexpr (std::is_integral_v<Wide>) return a | b;
      break;
    case ReduceOp::kBitAnd:
      if constexpr (std::is_integral_v<Wide>) return a & b;
      break;
    case ReduceOp::kBitXor:
      if constexpr (std::is_integral_v<Wide>) return a ^ b;
      break;
  }
  return a;
}

inline std::vector<int> AllRanks(int world_size) {
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The inputs of `ranks`, combined in that order and scaled; an average is over `world_size`, and of
// integers exact, rounded toward zero.
template <typename T>
std::vector<T> Reduced(ReduceOp op, const std::vector<int>& ranks, int world_size, int64_t n,
                       double scale = 1.0) {
  using Wide = WideOf<T>;
  std::vector<T> results(n);
  if (op == ReduceOp::kAverage && kIsFloat<T>) scale /= world_size;
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (!kIsFloat<T>) {
      if (op == ReduceOp::kAverage) {
        absl::int128 sum = 0;
        for (int rank : ranks) sum += InputAt<T>(op, rank, i);
        results[i] = static_cast<T>(sum / world_size);
        continue;
      }
    }
    Wide wide = static_cast<Wide>(InputAt<T>(op, ranks[0], i));
    for (size_t r = 1; r < ranks.size(); ++r)
      wide = Combine(op, wide, static_cast<Wide>(InputAt<T>(op, ranks[r], i)));
    if constexpr (kIsFloat<T>) {
      if (scale != 1.0) wide *= static_cast<Wide>(scale);
    }
    results[i] = static_cast<T>(wide);
  }
  return results;
}

// OK, or what the first element is that differs by more than `bound`.
template <typename T>
absl::Status ExpectNear(absl::string_view what, const std::vector<T>& got,
                        const std::vector<T>& want, double bound) {
  using Wide = WideOf<T>;
  if (got.size() != want.size()) return absl::DataLossError(absl::StrCat(what, ": another size"));
  for (size_t i = 0; i < got.size(); ++i) {
    const Wide a = static_cast<Wide>(got[i]), b = static_cast<Wide>(want[i]);
    if (a == b) continue;
    const double difference = static_cast<double>(a) - static_cast<double>(b);
    if (bound > 0 && difference <= bound && -difference <= bound) continue;
    return absl::DataLossError(
        absl::StrCat(what, ": element ", i, " of ", got.size(), " is ", a, ", expected ", b));
  }
  return absl::OkStatus();
}
template <typename T>
absl::Status ExpectEqual(absl::string_view what, const std::vector<T>& got,
                         const std::vector<T>& want) {
  return ExpectNear(what, got, want, 0.0);
}

// Half the distance from 1 to the next larger number: the largest relative error of one rounding.
template <typename T>
constexpr double Rounding() {
  switch (DTypeOf<T>::value) {
    case DType::kFloat32:
      return 1.0 / (1 << 24);
    case DType::kFloat64:
      return 1.0 / (int64_t{1} << 53);
    case DType::kFloat16:
      return 1.0 / (1 << 11);
    case DType::kBFloat16:
      return 1.0 / (1 << 8);
    default:
      return 0.0;
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CONFORMANCE_REFERENCE_H_
