#include "evenkeel/bucket/sparse_rows.h"

#include <algorithm>
#include <numeric>

namespace evenkeel {
namespace {

template <typename T, typename Sum>
SparseRows Coalesced(const SparseRows& given, int64_t row_size, double scale) {
  const T* const elements = reinterpret_cast<const T*>(given.values.data());
  std::vector<size_t> order(given.rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](size_t i) { return given.rows[i]; });
  SparseRows result;
  std::vector<Sum> sum(row_size);
  for (size_t i = 0; i < order.size();) {
    const int64_t row = given.rows[order[i]];
    const T* first = elements + static_cast<int64_t>(order[i]) * row_size;
    for (int64_t j = 0; j < row_size; ++j) sum[j] = static_cast<Sum>(first[j]);
    for (++i; i < order.size() && given.rows[order[i]] == row; ++i) {
      const T* next = elements + static_cast<int64_t>(order[i]) * row_size;
      for (int64_t j = 0; j < row_size; ++j) sum[j] += static_cast<Sum>(next[j]);
    }
    result.rows.push_back(row);
    const size_t begin = result.values.size();
    result.values.resize(begin + row_size * sizeof(T));
    T* const out = reinterpret_cast<T*>(result.values.data() + begin);
    for (int64_t j = 0; j < row_size; ++j)
      out[j] = static_cast<T>(scale == 1.0 ? sum[j] : sum[j] * static_cast<Sum>(scale));
  }
  return result;
}

}  // namespace

SparseRows CoalesceRows(DType dtype, const SparseRows& given, int64_t row_size, double scale) {
  switch (dtype) {
    case DType::kFloat64:
      return Coalesced<double, double>(given, row_size, scale);
    case DType::kFloat16:
      return Coalesced<Float16, float>(given, row_size, scale);
    case DType::kBFloat16:
      return Coalesced<BFloat16, float>(given, row_size, scale);
    default:
      return Coalesced<float, float>(given, row_size, scale);
  }
}

}  // namespace evenkeel
