// For tests: what PyTorch recorded in tests/testdata/gpt, and values to begin with.
//
//   const Recorded recorded("layers");
//   // float64 in the file, rounded
//   const std::vector<float> input = recorded.Get<float>("gelu.input");
//   EXPECT_LT(Difference<float>(output, recorded.Get<double>("gelu.output")), 1e-6);
//
// Errors: a missing file, or a missing tensor, fails the test.

#ifndef EVENKEEL_TRAINER_GPT_TESTING_RECORDED_H_
#define EVENKEEL_TRAINER_GPT_TESTING_RECORDED_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {

class Recorded {
 public:
  explicit Recorded(const std::string& name)
      : file_(SafetensorsFile::Read("tests/testdata/gpt/" + name + ".safetensors")) {
    EXPECT_TRUE(file_.ok()) << file_.status();
  }

  // float and double from float64, int32_t from int32.
  template <typename T>
  std::vector<T> Get(const std::string& name) const {
    using Stored = std::conditional_t<std::is_same_v<T, int32_t>, int32_t, double>;
    const auto* tensor = file_.ok() ? file_->Find(name) : nullptr;
    EXPECT_TRUE(tensor != nullptr && tensor->dtype == DTypeOf<Stored>::value) << name;
    if (tensor == nullptr || tensor->dtype != DTypeOf<Stored>::value) return {};
    std::vector<Stored> stored(tensor->count());
    std::memcpy(stored.data(), tensor->bytes.data(), tensor->bytes.size());
    return std::vector<T>(stored.begin(), stored.end());
  }

  std::string Metadata(const std::string& name) const {
    return file_.ok() ? file_->metadata().at(name) : "{}";
  }

 private:
  const absl::StatusOr<SafetensorsFile> file_;
};

// The largest difference, in units of the largest element of `expected`.
template <typename T>
double Difference(std::span<const T> actual, std::span<const double> expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double difference = 0, scale = 1e-300;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double own = std::abs(static_cast<double>(actual[i]) - expected[i]);
    if (std::isnan(own)) return INFINITY;
    difference = std::max(difference, own);
    scale = std::max(scale, std::abs(expected[i]));
  }
  return difference / scale;
}

// Evenly from [-size, size).
template <typename T>
std::vector<T> RandomValues(int64_t count, uint64_t seed, double size = 1) {
  StableRandom random(seed);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(size * (2 * random.Uniform() - 1));
  return values;
}

// Bounds for a result of few roundings in T, relative to its largest element: 1e-12, or 2e-6 (16
// units of float's precision).
template <typename T>
inline constexpr double kRounding = std::is_same_v<T, double> ? 1e-12 : 2e-6;

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_TESTING_RECORDED_H_
