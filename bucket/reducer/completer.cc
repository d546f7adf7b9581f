#include "evenkeel/bucket/reducer/completer.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/bucket/reducer/sparse_reduction.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

Completer::Completer(const ReducerCore* core, Launcher* launcher)
    : core_(*core),
      launcher_(*launcher),
      averages_(std::max<int64_t>(1, core->options.stats_every)) {
  const ReducerOptions& options = core->options;
  if (options.tune) {
    tuner_ = std::make_unique<PlanTuner>(
        core->name, PlanOptions{.caps = options.caps, .cap_order = options.cap_order},
        options.tuning_steps);
  }
}

void Completer::OnPlan() {
  if (tuner_ != nullptr)
    tuner_->OnPlan(core_.plan->state, core_.plan->storage->plan(), core_.specs);
}

std::optional<PlanState> Completer::MeasuredPlan() const {
  PlanState next = core_.plan->state;
  if (tuner_ != nullptr && tuner_->choice().has_value()) {  // The plan's order is known.
    AdoptCaps(next, tuner_->choice()->caps, tuner_->choice()->cap_order);
    return next;
  }
  return std::nullopt;
}

bool Completer::IsMeasured() const {
  if (core_.device != nullptr) return false;  // The host does not see when a device has ended what.
  return averages_.IsMeasured(counted_.steps) || (tuner_ != nullptr && tuner_->is_recording());
}

bool Completer::BeginStep() {
  begin_ = SteadyNow();
  return IsMeasured();
}

absl::Status Completer::Complete(double scale) {
  EK_RETURN_IF_ERROR(launcher_.pipeline()->Wait());
  if (core_.device != nullptr) {
    // Before OnStepEnd(), which may use the parameters' stream.
    for (const BucketInfo& bucket : core_.plan->storage->buckets())
      EK_RETURN_IF_ERROR(launcher_.pipeline()->FollowBucket(bucket.index, core_.device->stream()));
  }
  EK_RETURN_IF_ERROR(core_.reduction->OnStepEnd());
  ++reductions_;
  if (core_.device == nullptr) {
    WriteBack();
  } else {
    EK_RETURN_IF_ERROR(WriteBackOnDevice());
  }
  return ReduceSparse(*core_.params, core_.plan->sparse, *core_.plan->channels[0],
                      core_.comm->world_size(), scale);
}

void Completer::WriteBack() {
  ParameterSet& params = *core_.params;
  const BucketStorage& storage = *core_.plan->storage;
  for (const BucketInfo& bucket : storage.buckets()) {
    const GradFate fate = launcher_.pipeline()->fate(bucket.index);
    for (int param : bucket.params) {
      if (fate == GradFate::kNone || !storage.IsUsed(param)) {
        params.SetGradState(param, GradState::kNone);
        continue;
      }
      storage.CopyOut(params, param);
      params.SetGradState(param, GradState::kReduced);
    }
  }
}

absl::Status Completer::WriteBackOnDevice() {
  ParameterSet& params = *core_.params;
  BucketStorage& storage = *core_.plan->storage;
  const BucketPipeline& pipeline = *launcher_.pipeline();
  const StreamRef stream = core_.device->stream();
  std::vector<int> unclear;  // Buckets for which this rank lacks the other ranks' flags.
  for (const BucketInfo& bucket : storage.buckets()) {
    const bool is_reduced = pipeline.fate(bucket.index) == GradFate::kReduced;
    for (int param : bucket.params)
      params.SetGradState(param, is_reduced ? GradState::kReduced : GradState::kNone);
    if (is_reduced && !pipeline.has_all(bucket.index)) {
      unclear.push_back(bucket.index);
    } else if (is_reduced) {
      EK_RETURN_IF_ERROR(storage.Unpack(params, bucket.index, stream));
    }
  }
  EK_RETURN_IF_ERROR(pipeline.FollowUsed(stream));
  if (!unclear.empty()) EK_RETURN_IF_ERROR(SetUsed(unclear));
  for (const int bucket : unclear) EK_RETURN_IF_ERROR(storage.Unpack(params, bucket, stream));
  core_.device->Keep(pipeline.works());
  core_.device->EndStep();
  return absl::OkStatus();
}

// By the bits of their flags, which are those of +0 where no rank has set one.
absl::Status Completer::SetUsed(absl::Span<const int> buckets) {
  const BucketStorage& storage = *core_.plan->storage;
  std::vector<int> params;
  std::vector<TensorView> flags;
  for (const int bucket : buckets) {
    for (const int param : storage.bucket(bucket).params) {
      params.push_back(param);
      flags.push_back(storage.flag(param));
    }
  }
  EK_ASSIGN_OR_RETURN(absl::Span<const std::byte> bytes, core_.device->Read(flags));
  for (size_t i = 0; i < params.size(); ++i) {
    const auto is_set = [](std::byte byte) { return byte != std::byte{0}; };
    const auto flag = bytes.subspan(0, flags[i].bytes());
    bytes.remove_prefix(flag.size());
    if (!std::ranges::any_of(flag, is_set)) core_.params->SetGradState(params[i], GradState::kNone);
  }
  return absl::OkStatus();
}

absl::Status Completer::Account(const Announcer* announcer) {
  counted_.is_joined = announcer == nullptr;
  if (announcer != nullptr) {
    times_ = {.begin = begin_,
              .end = SteadyNow(),
              .gradients = static_cast<int>(announcer->order().size()),
              .buckets = launcher_.pipeline()->times(),
              .is_measured = IsMeasured()};
    if (times_.gradients > 0) {
      times_.first_gradient = announcer->arrivals().front();
      times_.last_gradient = announcer->arrivals().back();
    }
    const bool is_the_same = announcer->unused_hash() == last_unused_hash_;
    counted_.same_unused_steps = is_the_same ? counted_.same_unused_steps + 1 : 1;
    last_unused_hash_ = announcer->unused_hash();
    if (core_.device == nullptr && averages_.IsMeasured(counted_.steps))
      averages_.Add(Durations(times_));
    if (tuner_ != nullptr)
      tuner_->Record(times_, announcer->order(), announcer->arrivals(),
                     announcer->longest_launch());
  } else {
    ++counted_.shadowed_steps;
  }
  ++counted_.steps;
  if (tuner_ == nullptr) return absl::OkStatus();
  tuner_->EndStep();
  if (!tuner_->IsDue()) return absl::OkStatus();
  return tuner_->Choose(*core_.comm, *core_.plan->channels[0],
                        /*has_inputs=*/announcer != nullptr);
}

ReducerStats Completer::stats() const {
  const ReducerOptions& options = core_.options;
  const PlanState& state = core_.plan->state;
  const BucketStorage& storage = *core_.plan->storage;
  ReducerStats stats = counted_;
  stats.name = core_.name;
  if (core_.HasLivingGroup()) {
    stats.backend = std::string(core_.comm->backend_name());
    stats.rank = core_.comm->rank();
    stats.world_size = core_.comm->world_size();
  }
  stats.parameters = core_.params->size();
  for (const ParamSpec& spec : core_.specs) stats.parameter_bytes += spec.bytes();
  stats.caps = options.caps;
  stats.small_last_bucket = options.cap_order == CapOrder::kFromLastReady;
  stats.gradient_as_bucket_view = options.gradient_as_bucket_view;
  stats.coalesced = storage.layout().fusion == Fusion::kCoalesced;
  stats.find_unused = options.find_unused;
  stats.skip_unused_buckets = options.skip_unused_buckets;
  stats.static_graph = options.static_graph;

  stats.generation = state.generation;
  stats.mask_hash = state.mask.Hash();
  stats.trained_parameters = state.mask.CountTrained();
  stats.order_is_final = state.order_final;
  stats.ready_order = state.order;
  const BucketPlan& plan = storage.plan();
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    BucketStats bucket{.limit = plan.limits[b], .params = plan.buckets[b]};
    for (int param : bucket.params) bucket.bytes += core_.specs[param].bytes();
    stats.buckets.push_back(std::move(bucket));
  }

  // One step alone says nothing.
  stats.static_graph_would_do = options.find_unused && !options.static_graph &&
                                counted_.shadowed_steps == 0 && counted_.steps > 1 &&
                                counted_.same_unused_steps == counted_.steps;
  stats.means = averages_.means();
  if (tuner_ != nullptr) stats.tuning = tuner_->stats();
  return stats;
}

}  // namespace evenkeel
