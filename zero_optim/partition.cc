#include "evenkeel/zero_optim/partition.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

OwnerTable::OwnerTable(std::vector<int64_t> sizes, int world_size)
    : sizes_(std::move(sizes)), owners_(sizes_.size(), kNoOwner), loads_(world_size, 0) {}

absl::Status OwnerTable::Assign(std::span<const int> params, const TrainableMask* counted) {
  std::vector<int> by_size(params.begin(), params.end());
  std::vector<bool> named(owners_.size(), false);
  for (int param : by_size) {
    if (param < 0 || param >= this->params()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", param, " is not one of the ", this->params()));
    }
    if (named[param])
      return absl::InvalidArgumentError(absl::StrCat("parameter ", param, " is named twice"));
    if (owners_[param] != kNoOwner) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", param, " is owned by rank ", owners_[param]));
    }
    named[param] = true;
  }
  std::stable_sort(by_size.begin(), by_size.end(),
                   [this](int a, int b) { return sizes_[a] > sizes_[b]; });

  using Load = std::pair<int64_t, int>;  // Elements, rank: the smallest rank wins a tie.
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> ranks;
  const std::vector<int64_t> so_far = counted != nullptr ? LoadsOf(*counted) : loads_;
  for (int rank = 0; rank < world_size(); ++rank) ranks.push({so_far[rank], rank});
  for (int param : by_size) {
    const auto [load, rank] = ranks.top();
    ranks.pop();
    owners_[param] = rank;
    loads_[rank] += sizes_[param];
    ranks.push({load + sizes_[param], rank});
  }
  return absl::OkStatus();
}

std::vector<int64_t> OwnerTable::LoadsOf(const TrainableMask& trained) const {
  std::vector<int64_t> loads(world_size(), 0);
  for (int param = 0; param < params(); ++param) {
    if (trained[param] && owners_[param] != kNoOwner) loads[owners_[param]] += sizes_[param];
  }
  return loads;
}

double OwnerTable::Imbalance(const TrainableMask& trained) const {
  const std::vector<int64_t> loads = LoadsOf(trained);
  const double total = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
  return total == 0 ? 1
                    : static_cast<double>(*std::ranges::max_element(loads)) * world_size() / total;
}

std::optional<OwnerTable> OwnerTable::Rebalanced(
    const TrainableMask& trained, const std::vector<std::vector<int>>& groups) const {
  OwnerTable dealt(sizes_, world_size());
  for (const std::vector<int>& group : groups) {
    std::vector<int> anew;
    for (const int param : group) {
      if (trained[param] && owners_[param] != kNoOwner) anew.push_back(param);
    }
    if (!dealt.Assign(anew).ok()) return std::nullopt;  // A parameter in two groups.
  }
  if (std::ranges::max(dealt.loads_) >= std::ranges::max(LoadsOf(trained))) return std::nullopt;
  for (int param = 0; param < params(); ++param) {
    if (dealt.owners_[param] != kNoOwner || owners_[param] == kNoOwner) continue;
    dealt.owners_[param] = owners_[param];
    dealt.loads_[owners_[param]] += sizes_[param];
  }
  return dealt;
}

std::string OwnerTable::Serialize() const {
  internal::ByteWriter writer;
  for (const int owner : owners_) writer.I32(owner);
  return writer.Take();
}

absl::Status OwnerTable::Restore(absl::string_view bytes) {
  std::vector<int> owners(owners_.size());
  internal::ByteReader reader(bytes);
  for (int& owner : owners) owner = reader.I32();
  EK_RETURN_IF_ERROR(
      reader.Finish(absl::StrCat("an owner table for ", owners.size(), " parameters")));
  std::vector<int64_t> loads(world_size(), 0);
  for (size_t param = 0; param < owners.size(); ++param) {
    if (owners[param] == kNoOwner) continue;
    if (owners[param] < 0 || owners[param] >= world_size()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", param, " is owned by rank ",
                                                     owners[param], " of ", world_size()));
    }
    loads[owners[param]] += sizes_[param];
  }
  owners_ = std::move(owners);
  loads_ = std::move(loads);
  return absl::OkStatus();
}

}  // namespace evenkeel
