#include "evenkeel/bucket/plan/planner.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

// The parameters are walked once. Each (dtype, device) has one open bucket and a cursor into the
// caps; a parameter goes into its group's open bucket, which closes when it has reached the cap,
// and the cursor moves on. What is open at the end closes then. PyTorch leaves those in the order
// of a hash map; here they are ordered, because every rank must come to the same plan.

namespace evenkeel {
namespace {

absl::Status CheckParams(std::span<const ParamSpec> params) {
  if (params.size() > static_cast<size_t>(std::numeric_limits<int>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat(params.size(), " parameters are more than an index can count"));
  }
  int64_t total = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const int64_t count = params[i].count;
    const int64_t element = SizeOf(params[i].dtype);
    if (count < 0) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", i, " has ", count, " elements"));
    }
    if (count > (std::numeric_limits<int64_t>::max() - total) / element) {
      return absl::InvalidArgumentError(absl::StrCat(
          "with the ", count, " ", ToString(params[i].dtype), " elements of parameter ", i,
          " the parameters have more bytes than 63 bits can count"));
    }
    total += count * element;
  }
  return absl::OkStatus();
}

absl::Status CheckKnown(int index, size_t param_count) {
  if (index >= 0 && static_cast<size_t>(index) < param_count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the order names parameter ", index,
                                                 ", but there are ", param_count, " parameters"));
}

absl::Status CheckOrder(std::span<const int> order, size_t param_count) {
  std::vector<bool> is_named(param_count);
  for (int index : order) {
    EK_RETURN_IF_ERROR(CheckKnown(index, param_count));
    if (is_named[index]) {
      return absl::InvalidArgumentError(
          absl::StrCat("the order names parameter ", index, " twice"));
    }
    is_named[index] = true;
  }
  return absl::OkStatus();
}

absl::Status CheckAscending(std::span<const int> indices, size_t param_count) {
  for (size_t i = 0; i < indices.size(); ++i) {
    EK_RETURN_IF_ERROR(CheckKnown(indices[i], param_count));
    if (i > 0 && indices[i] <= indices[i - 1]) {
      return absl::InvalidArgumentError(absl::StrCat("the parameters to plan must ascend, but ",
                                                     indices[i], " follows ", indices[i - 1]));
    }
  }
  return absl::OkStatus();
}

// Gives each (dtype, device) a number, from 0 in order of appearance.
class GroupNumbers {
 public:
  int Of(const ParamSpec& param) {
    const uint32_t key = static_cast<uint32_t>(param.dtype) |
                         static_cast<uint32_t>(param.device.kind) << 8 |
                         static_cast<uint32_t>(static_cast<uint16_t>(param.device.index)) << 16;
    if (numbers_.empty() || key != last_key_) {  // Neighbours are mostly of one group.
      last_key_ = key;
      last_number_ = numbers_.try_emplace(key, static_cast<int>(numbers_.size())).first->second;
    }
    return last_number_;
  }

 private:
  uint32_t last_key_ = 0;
  int last_number_ = 0;
  absl::flat_hash_map<uint32_t, int> numbers_;
};

// The open bucket of one (dtype, device).
struct Group {
  std::vector<int> members;
  int64_t bytes = 0;
  size_t cap_index = 0;
};

void AddBucket(std::vector<int> members, Bytes limit, BucketPlan* plan) {
  plan->buckets.push_back(std::move(members));
  plan->limits.push_back(limit);
}

// Puts one parameter where it belongs, and closes what is full.
class BucketFiller {
 public:
  BucketFiller(std::span<const ParamSpec> params, std::span<const Bytes> caps, BucketPlan* plan)
      : params_(params), caps_(caps), plan_(*plan) {}

  void Put(int index) {
    const ParamSpec& param = params_[index];
    if (param.sparse) return AddBucket({index}, Bytes{0}, &plan_);

    const size_t number = static_cast<size_t>(numbers_.Of(param));
    if (number == groups_.size()) groups_.emplace_back();
    Group& group = groups_[number];
    group.members.push_back(index);
    group.bytes += param.bytes();
    if (group.bytes < caps_[group.cap_index].value) return;
    AddBucket(std::exchange(group.members, {}), caps_[group.cap_index], &plan_);
    group.bytes = 0;
    if (group.cap_index + 1 < caps_.size()) ++group.cap_index;
  }

  // Closes what is open, ordered by first index.
  void Finish() {
    std::erase_if(groups_, [](const Group& group) { return group.members.empty(); });
    std::sort(groups_.begin(), groups_.end(),
              [](const Group& a, const Group& b) { return a.members.front() < b.members.front(); });
    for (Group& group : groups_)
      AddBucket(std::move(group.members), caps_[group.cap_index], &plan_);
    groups_.clear();
  }

 private:
  const std::span<const ParamSpec> params_;
  const std::span<const Bytes> caps_;
  BucketPlan& plan_;
  GroupNumbers numbers_;
  std::vector<Group> groups_;
};

// Adds one bucket per (dtype, device), and one for each sparse parameter, in the order of their
// first parameter.
void AddOneEach(std::span<const ParamSpec> params, std::span<const int> order, BucketPlan* plan) {
  GroupNumbers numbers;
  std::vector<size_t> bucket_of_group;
  for (int index : order) {
    if (params[index].sparse) {
      AddBucket({index}, Bytes{0}, plan);
      continue;
    }
    const size_t number = static_cast<size_t>(numbers.Of(params[index]));
    if (number == bucket_of_group.size()) {
      bucket_of_group.push_back(plan->buckets.size());
      AddBucket({}, kNoCap, plan);
    }
    plan->buckets[bucket_of_group[number]].push_back(index);
  }
}

// Orders the buckets by a key of theirs, which is below `end` and no other's, in linear time.
template <typename Key>
BucketPlan SortedBy(Key key_of, size_t end, BucketPlan plan) {
  auto is_less = [&](const auto& a, const auto& b) { return key_of(a) < key_of(b); };
  if (std::is_sorted(plan.buckets.begin(), plan.buckets.end(), is_less)) return plan;

  constexpr int kNone = -1;
  std::vector<int> bucket_at(end, kNone);
  for (size_t b = 0; b < plan.buckets.size(); ++b)
    bucket_at[key_of(plan.buckets[b])] = static_cast<int>(b);
  BucketPlan sorted;
  sorted.buckets.reserve(plan.buckets.size());
  sorted.limits.reserve(plan.limits.size());
  for (int b : bucket_at) {
    if (b != kNone) AddBucket(std::move(plan.buckets[b]), plan.limits[b], &sorted);
  }
  return sorted;
}

BucketPlan FillFromFirst(std::span<const ParamSpec> params, const PlanOptions& options,
                         std::span<const int> order) {
  BucketPlan plan;
  BucketFiller filler(params, options.caps, &plan);
  for (int index : order) filler.Put(index);
  filler.Finish();
  if (!options.order.empty()) return plan;
  return SortedBy([](const std::vector<int>& bucket) { return bucket.front(); }, params.size(),
                  std::move(plan));
}

BucketPlan FillFromLast(std::span<const ParamSpec> params, const PlanOptions& options,
                        std::span<const int> order) {
  BucketPlan plan;
  BucketFiller filler(params, options.caps, &plan);
  std::vector<int> position(params.size());
  for (size_t i = order.size(); i-- > 0;) {
    position[order[i]] = static_cast<int>(i);
    filler.Put(order[i]);
  }
  filler.Finish();
  for (std::vector<int>& bucket : plan.buckets) std::reverse(bucket.begin(), bucket.end());
  return SortedBy([&](const std::vector<int>& bucket) { return position[bucket.back()]; },
                  order.size(), std::move(plan));
}

}  // namespace

absl::Status CheckCaps(std::span<const Bytes> caps) {
  if (caps.empty()) return absl::InvalidArgumentError("no bucket caps");
  for (size_t i = 0; i < caps.size(); ++i) {
    if (caps[i].value < 0) {
      return absl::InvalidArgumentError(absl::StrCat("the bucket cap ", i, " is ", caps[i].value,
                                                     " bytes, but must be at least 0"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BucketPlan> PlanBuckets(std::span<const ParamSpec> params,
                                       const PlanOptions& options) {
  if (params.empty()) return absl::InvalidArgumentError("no parameters to plan");
  EK_RETURN_IF_ERROR(CheckParams(params));
  EK_RETURN_IF_ERROR(CheckCaps(options.caps));
  EK_RETURN_IF_ERROR(CheckOrder(options.order, params.size()));

  std::vector<int> all;
  if (options.order.empty()) {
    all.resize(params.size());
    std::iota(all.begin(), all.end(), 0);
  }
  std::span<const int> order = options.order.empty() ? all : options.order;
  std::vector<int> prompt, delayed;
  if (std::ranges::any_of(params, &ParamSpec::delayed)) {
    for (int index : order) (params[index].delayed ? delayed : prompt).push_back(index);
    order = prompt;
  }
  BucketPlan plan = options.cap_order == CapOrder::kFromFirstReady
                        ? FillFromFirst(params, options, order)
                        : FillFromLast(params, options, order);
  AddOneEach(params, delayed, &plan);
  return plan;
}

absl::StatusOr<BucketPlan> PlanFirstStep(std::span<const ParamSpec> params,
                                         std::span<const int> trained) {
  EK_RETURN_IF_ERROR(CheckParams(params));
  EK_RETURN_IF_ERROR(CheckAscending(trained, params.size()));

  std::vector<int> prompt, delayed;
  for (auto index = trained.rbegin(); index != trained.rend(); ++index) {
    (params[*index].delayed ? delayed : prompt).push_back(*index);
  }
  BucketPlan plan;
  AddOneEach(params, prompt, &plan);
  AddOneEach(params, delayed, &plan);
  return plan;
}

}  // namespace evenkeel
