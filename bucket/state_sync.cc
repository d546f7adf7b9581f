#include "evenkeel/bucket/state_sync.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel {
namespace {

constexpr int64_t kGroupBytes = int64_t{250} << 20;

using Groups = std::vector<std::vector<TensorView>>;

// Groups of one dtype and at most kGroupBytes (or one tensor), in order of first appearance.
Groups GroupOf(absl::Span<const TensorView> tensors) {
  struct Open {
    DType dtype;
    size_t group;
    int64_t bytes;
  };
  Groups groups;
  std::vector<Open> open;
  for (const TensorView& tensor : tensors) {
    Open* found = nullptr;
    for (Open& candidate : open) {
      if (candidate.dtype == tensor.dtype) found = &candidate;
    }
    if (found == nullptr) {
      found = &open.emplace_back(Open{tensor.dtype, groups.size(), 0});
      groups.emplace_back();
    } else if (found->bytes + tensor.bytes() > kGroupBytes) {
      *found = {tensor.dtype, groups.size(), 0};
      groups.emplace_back();
    }
    groups[found->group].push_back(tensor);
    found->bytes += tensor.bytes();
  }
  return groups;
}

std::vector<Collective> PlanGroups(const Groups& groups, BufferSync how, Role role) {
  std::vector<Collective> plan;
  for (const std::vector<TensorView>& group : groups) {
    const bool is_mean = how == BufferSync::kAverage && IsFloat(group[0].dtype);
    Collective what{.kind = is_mean ? CollectiveKind::kAllReduce : CollectiveKind::kBroadcast,
                    .dtype = group[0].dtype,
                    .role = role,
                    .index = static_cast<int>(plan.size()),
                    .index_count = static_cast<int>(groups.size()),
                    .joined = is_mean ? Contribution::kIdentity : Contribution::kOwned};
    for (const TensorView& part : group) what.count += part.count;
    plan.push_back(what);
  }
  return plan;
}

std::vector<Work> Issue(Channel& channel, absl::Span<const TensorView> tensors, BufferSync how,
                        const StateSource& source, Role role, StreamRef stream) {
  const Groups groups = GroupOf(tensors);
  std::vector<Work> works;
  for (Collective what : PlanGroups(groups, how, role)) {
    const TensorList parts(groups[what.index].begin(), groups[what.index].end());
    const bool is_mean = what.kind == CollectiveKind::kAllReduce;
    if (!is_mean) what.root = source.root;
    works.push_back(channel.Issue(what, parts, parts,
                                  {.scale = is_mean ? 1.0 / source.contributors : 1.0,
                                   .contributes = !is_mean || source.contributes,
                                   .after = stream}));
  }
  return works;
}

}  // namespace

std::vector<Collective> PlanStateSync(absl::Span<const TensorView> tensors, BufferSync how,
                                      Role role) {
  return PlanGroups(GroupOf(tensors), how, role);
}

absl::Status SyncState(Channel& channel, absl::Span<const TensorView> tensors, BufferSync how,
                       const StateSource& source, Role role, StreamRef stream) {
  absl::Status status;
  for (const Work& work : Issue(channel, tensors, how, source, role, stream))
    status.Update(work.Wait());
  return status;
}

absl::StatusOr<std::vector<Work>> BeginSyncState(Channel& channel,
                                                 absl::Span<const TensorView> tensors,
                                                 BufferSync how, const StateSource& source,
                                                 Role role, StreamRef stream) {
  std::vector<Work> works = Issue(channel, tensors, how, source, role, stream);
  absl::Status status;
  for (const Work& work : works) status.Update(work.OrderBefore(stream));
  if (!status.ok()) return status;
  return works;
}

absl::Status BroadcastState(Channel& channel, absl::Span<const TensorView> tensors, int root,
                            Role role, StreamRef stream) {
  return SyncState(channel, tensors, BufferSync::kBroadcast, {.root = root}, role, stream);
}

std::vector<TensorView> ValuesOf(const ParameterSet& params) {
  std::vector<TensorView> values;
  for (int i = 0; i < params.size(); ++i) {
    if (!params.is_ignored(i)) values.push_back(params[i].value);
  }
  return values;
}

}  // namespace evenkeel
