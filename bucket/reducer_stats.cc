// What a reducer counts and measures; reducer.cc and reducer_step.cc have what it does.

#include <algorithm>
#include <string>

#include "evenkeel/bucket/reducer.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

bool Reducer::IsMeasured() const {
  if (device_ != nullptr) return false;  // The host does not see when a device has ended what.
  return averages_.IsMeasured(counted_.steps) || (tuner_ != nullptr && tuner_->is_recording());
}

absl::Status Reducer::Account(const StepTimes* times) {
  const bool is_measured = times != nullptr && device_ == nullptr && averages_.IsMeasured(counted_.steps);
  ++counted_.steps;
  counted_.is_joined = times == nullptr;
  if (counted_.is_joined) ++counted_.shadowed_steps;
  if (is_measured) averages_.Add(Durations(*times));
  absl::Status status;
  if (tuner_ != nullptr) {
    tuner_->EndStep(times);
    if (tuner_->IsDue()) {
      status = tuner_->Choose(*comm_, *pipeline_plan_->channels[0], /*has_inputs=*/times != nullptr);
    }
  }
  if (fusion_trial_ != nullptr && status.ok()) {
    fusion_trial_->EndStep(times);
    if (fusion_trial_->IsDue()) status = fusion_trial_->Choose(*comm_);
  }
  return status.ok() ? status : EndWith(status);
}

ReducerStats Reducer::stats() const {
  ReducerStats stats = counted_;
  stats.name = name_;
  if (HasLivingGroup()) {
    stats.backend = std::string(comm_->backend_name());
    stats.rank = comm_->rank();
    stats.world_size = comm_->world_size();
  }
  stats.parameters = params_->size();
  for (const ParamSpec& spec : specs_) stats.parameter_bytes += spec.count * SizeOf(spec.dtype);
  stats.caps = options_.caps;
  stats.small_last_bucket = options_.cap_order == CapOrder::kFromLastReady;
  stats.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  stats.coalesced = storage_->layout().fusion == Fusion::kCoalesced;
  stats.find_unused = options_.find_unused;
  stats.skip_unused_buckets = options_.skip_unused_buckets;
  stats.static_graph = options_.static_graph;

  stats.generation = state_.generation;
  stats.mask_hash = state_.mask.Hash();
  stats.trained_parameters = state_.mask.CountTrained();
  stats.order_is_final = state_.order_final;
  stats.ready_order = state_.order;
  const BucketPlan& plan = storage_->plan();
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    BucketStats bucket{.limit = plan.limits[b], .params = plan.buckets[b]};
    for (int param : bucket.params) bucket.bytes += specs_[param].count * SizeOf(specs_[param].dtype);
    stats.buckets.push_back(std::move(bucket));
  }

  stats.same_unused_steps = same_unused_steps_;
  // One step alone says nothing.
  stats.static_graph_would_do = options_.find_unused && !options_.static_graph && counted_.shadowed_steps == 0 &&
                                counted_.steps > 1 && same_unused_steps_ == counted_.steps;
  stats.means = averages_.means();
  if (tuner_ != nullptr) stats.tuning = tuner_->stats();
  if (fusion_trial_ != nullptr) stats.fusion = fusion_trial_->stats();
  return stats;
}

}  // namespace evenkeel
