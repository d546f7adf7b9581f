#include "evenkeel/bucket/reducer/plan_in_force.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/reducer/reducer_core.h"
#include "evenkeel/bucket/reducer/sparse_reduction.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

void PlaceParameters(const ReducerCore& core, PlanInForce& plan) {
  plan.bucket_of.assign(core.params->size(), PlanInForce::kNotPlanned);
  plan.planned = static_cast<int>(plan.sparse.size());
  for (const int param : plan.sparse) plan.bucket_of[param] = PlanInForce::kGathered;
  for (const BucketInfo& bucket : plan.storage->buckets()) {
    for (const int param : bucket.params) plan.bucket_of[param] = bucket.index;
    plan.announcements.push_back(static_cast<int>(bucket.params.size()));
    plan.planned += plan.announcements.back();
  }
}

void DelayBuckets(const ReducerCore& core, PlanInForce& plan) {
  if (core.options.delay_until.empty()) return;
  plan.delay_until = core.params->Find(core.options.delay_until);
  if (plan.delay_until < 0 || !plan.is_planned(plan.delay_until)) return;
  for (const BucketInfo& bucket : plan.storage->buckets()) {
    if (!core.specs[bucket.params[0]].delayed) continue;
    if (bucket.index == plan.bucket_of[plan.delay_until]) return;
    plan.delayed_bucket = bucket.index;
    ++plan.announcements[bucket.index];
    return;
  }
}

absl::Status AddBuckets(const BucketReduction& reduction, PlanInForce& plan) {
  size_t rounds = 1;
  for (const BucketInfo& bucket : plan.storage->buckets()) {
    std::vector<Collective> collectives = reduction.CollectivesFor(bucket);
    if (bucket.index == 0) rounds = collectives.size();
    if (collectives.empty() || collectives.size() != rounds ||
        (rounds > 1 && !reduction.HasThread())) {
      return absl::InvalidArgumentError(
          absl::StrCat("the reduction has for bucket ", bucket.index, " ", collectives.size(),
                       " collectives, bucket 0 ", rounds,
                       ": a reduction needs the same number for each bucket, at least one, and a "
                       "thread for more than one"));
    }
    for (Collective& what : collectives) {
      what.role = Role::kBucket;
      what.index = bucket.index;
      what.index_count = bucket.bucket_count;
      what.joined = Contribution::kIdentity;
      plan.schedule.entries.push_back(what);
    }
    plan.buckets.push_back({bucket, std::move(collectives)});
  }
  plan.channels.resize(rounds);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PlanInForce>> MakePlanInForce(
    const ReducerCore& core, PlanState state, std::vector<int> sparse, BucketStorage& storage,
    std::optional<Collective> unused) {
  auto plan = std::make_shared<PlanInForce>();
  plan->state = std::move(state);
  plan->sparse = std::move(sparse);
  plan->storage = &storage;
  plan->reduction = core.reduction.get();
  PlaceParameters(core, *plan);
  DelayBuckets(core, *plan);
  plan->schedule = {.generation = plan->state.generation};
  if (unused.has_value()) plan->schedule.entries.push_back(*unused);
  EK_RETURN_IF_ERROR(AddBuckets(*core.reduction, *plan));
  plan->used_data = storage.separate_flags();
  if (const int64_t count = plan->used_data.count; count > 0) {
    plan->used = {.kind = CollectiveKind::kAllReduce, .count = count, .role = Role::kState};
    plan->schedule.entries.push_back(plan->used);
  }
  for (const Collective& what : SparseCollectives(*core.params, plan->sparse))
    plan->schedule.entries.push_back(what);
  const size_t rounds = plan->channels.size();
  if (core.device != nullptr) {
    plan->runtime = &core.device->runtime();
    if (core.has_own_reduction) {
      EK_ASSIGN_OR_RETURN(plan->streams, core.device->SideStreams(static_cast<int>(rounds) + 1));
    }
  }
  for (size_t round = 0; round < rounds; ++round) {
    EK_ASSIGN_OR_RETURN(
        plan->channels[round],
        core.comm->OpenChannel(round == 0 ? core.name : absl::StrCat(core.name, ".round", round)));
  }
  plan->collectives_version = core.reduction->CollectivesVersion();
  return plan;
}

}  // namespace evenkeel
