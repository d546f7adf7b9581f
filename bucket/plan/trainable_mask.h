// The set of trained parameters: one bit per parameter, cheap to compare in each step and small
// enough to send.
//
//   TrainableMask mask(3);          // all trained
//   mask.Set(1, false);             // true: it changed
//   mask.Hash();                    // equal on all ranks with the same mask, on every machine
//
// Threads: thread-compatible value.

#ifndef EVENKEEL_BUCKET_PLAN_TRAINABLE_MASK_H_
#define EVENKEEL_BUCKET_PLAN_TRAINABLE_MASK_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel {

class TrainableMask {
 public:
  TrainableMask() = default;
  explicit TrainableMask(int size, bool trained = true);

  int size() const { return size_; }
  bool operator[](int index) const { return (words_[index >> 6] >> (index & 63)) & 1; }
  int CountTrained() const;
  uint64_t Hash() const;

  // Both return whether a bit changed. `flags` has one byte per parameter, 0 for frozen.
  bool Set(int index, bool trained);
  bool Set(std::span<const uint8_t> flags);
  void Append(bool trained);

  // The mask as bytes. InvalidArgument for bytes that Serialize() cannot have made.
  std::string Serialize() const;
  static absl::StatusOr<TrainableMask> Parse(absl::string_view bytes);

  friend bool operator==(const TrainableMask&, const TrainableMask&) = default;

 private:
  int size_ = 0;
  std::vector<uint64_t> words_;  // Bits past `size_` are zero.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PLAN_TRAINABLE_MASK_H_
