#include "evenkeel/trainer/device/token_buckets.h"

#include <algorithm>
#include <cstddef>

namespace evenkeel {

int64_t TokenBuckets::Fill(std::span<const int32_t> inputs, TokenBucketMemory to) {
  std::ranges::fill(next_, 0);
  for (const int32_t token : inputs) ++next_[token];
  int64_t count = 0;
  int32_t end = 0;
  for (size_t token = 0; token < next_.size(); ++token) {
    const int32_t own = next_[token];
    if (own == 0) continue;
    next_[token] = end;
    end += own;
    to.tokens[count] = static_cast<int32_t>(token);
    to.ends[count++] = end;
  }
  for (size_t i = 0; i < inputs.size(); ++i) to.order[next_[inputs[i]]++] = static_cast<int32_t>(i);
  return count;
}

}  // namespace evenkeel
