// Where each token of a batch stands, so that a device sums a token's gradients without two threads
// that meet.
//
//   TokenBuckets buckets(vocabulary);
//   const int64_t count = buckets.Fill(inputs, {tokens, ends, order});
//   // bucket b is of tokens[b]; it stands at order[ends[b - 1]], ... order[ends[b] - 1], ascending
//
// Tokens ascend. Each takes O(inputs + vocabulary).
//
// Shapes:  tokens, ends and order have room for as many elements as there are inputs, each from 0
//          to below vocabulary.
// Threads: thread-compatible.

#ifndef EVENKEEL_TRAINER_DEVICE_TOKEN_BUCKETS_H_
#define EVENKEEL_TRAINER_DEVICE_TOKEN_BUCKETS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace evenkeel {

struct TokenBucketMemory {
  int32_t* tokens = nullptr;
  int32_t* ends = nullptr;
  int32_t* order = nullptr;
};

class TokenBuckets {
 public:
  explicit TokenBuckets(int64_t vocabulary) : next_(vocabulary) {}

  // How many buckets there are.
  int64_t Fill(std::span<const int32_t> inputs, TokenBucketMemory to) {
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
    for (size_t i = 0; i < inputs.size(); ++i)
      to.order[next_[inputs[i]]++] = static_cast<int32_t>(i);
    return count;
  }

 private:
  std::vector<int32_t> next_;  // By token: how many there are; then where its next one goes.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_TOKEN_BUCKETS_H_
