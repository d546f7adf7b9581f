// The middle of some numbers: what outliers do not move.

#ifndef EVENKEEL_BUCKET_INTERNAL_MEDIAN_H_
#define EVENKEEL_BUCKET_INTERNAL_MEDIAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace evenkeel {

// Of an even number the upper one; 0 of none.
inline int64_t MedianOf(std::vector<int64_t> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_MEDIAN_H_
