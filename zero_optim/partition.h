// The assignment of whole tensors of optimizer state to ranks, balanced by size.
//
//   OwnerTable owners({1000, 10, 600, 500}, /*world_size=*/2);      // elements of each parameter
//   EK_RETURN_IF_ERROR(owners.Assign(std::vector<int>{0, 2, 3}));   // trained ones; 1 is frozen
//   // owners.owner(0) == 0; owner(2) == owner(3) == 1; owner(1) == kNoOwner
//
// Assign() gives each parameter, largest first, to the rank that owns the fewest elements so far.
// Owners do not change: later calls assign parameters that are trained for the first time.
// Parameter groups are assigned one after the other. Rebalanced() assigns all trained parameters
// again.
//
// Order:   the same table for the same calls, on every rank, build and machine.
// Threads: thread-compatible value.
// Errors:  InvalidArgument, without a change, for an index that is unknown or has an owner already.
// Source:  ZeroRedundancyOptimizer._partition_parameters of PyTorch, except that frozen parameters
//          do not count.

#ifndef EVENKEEL_ZERO_OPTIM_PARTITION_H_
#define EVENKEEL_ZERO_OPTIM_PARTITION_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/trainable_mask.h"

namespace evenkeel {

inline constexpr int kNoOwner = -1;

class OwnerTable {
 public:
  OwnerTable() = default;
  // No parameter has an owner yet. `world_size` is at least 1.
  OwnerTable(std::vector<int64_t> sizes, int world_size);

  // Only parameters that `counted` trains count as owned so far; null: all.
  absl::Status Assign(std::span<const int> params, const TrainableMask* counted = nullptr);

  // Returns the largest number of trained elements that a rank owns, divided by the mean; 1 if no
  // parameter is trained.
  double Imbalance(const TrainableMask& trained) const;
  // Returns a table in which all trained and owned parameters are assigned again, group by group;
  // the others keep their owners. Returns nothing if the rank with the most would not have less.
  std::optional<OwnerTable> Rebalanced(const TrainableMask& trained,
                                       const std::vector<std::vector<int>>& groups) const;

  int params() const { return static_cast<int>(owners_.size()); }
  int world_size() const { return static_cast<int>(loads_.size()); }
  int owner(int param) const { return owners_[param]; }
  const std::vector<int>& owners() const { return owners_; }    // By parameter.
  const std::vector<int64_t>& loads() const { return loads_; }  // By rank: elements that it owns.

  // The owners as bytes, to send to a rank that is behind. InvalidArgument for bytes that
  // Serialize() of a table of the same parameters and world size cannot have made.
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
