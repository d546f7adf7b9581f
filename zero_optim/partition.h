// Which rank keeps the optimizer state of which parameter: whole tensors, spread by size.
//
//   OwnerTable owners({1000, 10, 600, 500}, /*world_size=*/2);      // elements of each parameter
//   EK_RETURN_IF_ERROR(owners.Assign(std::vector<int>{0, 2, 3}));   // what is trained; 1 is frozen
//   // owners.owner(0) == 0, owners.owner(2) == 1, owners.owner(3) == 1, owners.owner(1) == kNoOwner
//
// Assign() gives each parameter, largest first, to the rank that owns the fewest elements so far. Owners stay: what is
// trained for the first time later comes with a later Assign(). Parameter groups are assigned one after the other.
// Rebalanced() deals out anew what is trained.
//
// Order:   the same table for the same calls, on every rank, build and machine.
// Threads: thread-compatible value.
// Errors:  InvalidArgument for an index that is unknown or has an owner already; nothing is assigned then.
// Source:  ZeroRedundancyOptimizer._partition_parameters of PyTorch, except that what is not trained does not count.

#ifndef EVENKEEL_ZERO_OPTIM_PARTITION_H_
#define EVENKEEL_ZERO_OPTIM_PARTITION_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/trainable_mask.h"

namespace evenkeel {

inline constexpr int kNoOwner = -1;

class OwnerTable {
 public:
  OwnerTable() = default;
  // No parameter has an owner yet. `world_size` is at least 1.
  OwnerTable(std::vector<int64_t> sizes, int world_size);

  // Only what `counted` trains counts as owned so far; null: everything.
  absl::Status Assign(std::span<const int> params, const TrainableMask* counted = nullptr);

  // The largest number of trained elements that a rank owns, over the mean; 1 if nothing is trained.
  double Imbalance(const TrainableMask& trained) const;
  // Other owners for what is trained and owned, as if it were assigned for the first time, group by group; the rest
  // stays where it is. Nothing if the rank with the most would not have less.
  std::optional<OwnerTable> Rebalanced(const TrainableMask& trained, const std::vector<std::vector<int>>& groups) const;

  int params() const { return static_cast<int>(owners_.size()); }
  int world_size() const { return static_cast<int>(loads_.size()); }
  int owner(int param) const { return owners_[param]; }
  const std::vector<int>& owners() const { return owners_; }    // By parameter.
  const std::vector<int64_t>& loads() const { return loads_; }  // By rank: elements that it owns.

  // Who owns what, to send to a rank that is behind; InvalidArgument for anything that Serialize() of a table of the
  // same parameters and world size can't have made.
  std::string Serialize() const;
  absl::Status Restore(absl::string_view bytes);

  friend bool operator==(const OwnerTable&, const OwnerTable&) = default;

 private:
  std::vector<int64_t> LoadsOf(const TrainableMask& trained) const;

  std::vector<int64_t> sizes_;
  std::vector<int> owners_;
  std::vector<int64_t> loads_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_PARTITION_H_
