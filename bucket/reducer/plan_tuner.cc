#include "evenkeel/bucket/reducer/plan_tuner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/plan/cost_model.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int64_t kProbeBytes[] = {int64_t{4} << 10, int64_t{256} << 10, int64_t{2} << 20};
constexpr int kProbes = 5;  // Per size; the shortest counts.

double Microseconds(int64_t ns) { return static_cast<double>(ns) / 1e3; }

// Returns samples of the measured buckets: a skipped bucket took no time.
std::vector<LinkSample> Samples(const std::vector<int64_t>& bytes, const std::vector<int64_t>& ns) {
  std::vector<LinkSample> samples;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (ns[i] > 0) samples.push_back({.bytes = bytes[i], .ns = ns[i]});
  }
  return samples;
}

}  // namespace

void PlanTuner::OnPlan(const PlanState& state, const BucketPlan& plan,
                       std::span<const ParamSpec> specs) {
  choice_.reset();
  counted_steps_ = 0;
  if (!state.caps.empty()) {
    phase_ = Phase::kDone;
    stats_.measured_after_us = 0;
    stats_.measured_after_steps = 0;
    return;
  }
  phase_ = state.order_final ? Phase::kRecording : Phase::kWaiting;
  if (phase_ == Phase::kWaiting) return;
  specs_.assign(specs.begin(), specs.end());
  order_ = PlannedOrder(state);
  plan_ = plan;
  stats_.measured_before_us = 0;
  recorded_steps_ = 0;
  recorded_.assign(steps_, {.ready_ns = std::vector<int64_t>(specs.size()),
                            .bucket_ns = std::vector<int64_t>(plan.buckets.size())});
}

void PlanTuner::Record(const StepTimes& times, std::span<const int> order,
                       std::span<const absl::Time> arrivals, absl::Duration longest_launch) {
  const double exposed_us = absl::ToDoubleMicroseconds(Durations(times).exposed);
  if (phase_ == Phase::kDone && counted_steps_ < steps_) {
    ++stats_.measured_after_steps;
    stats_.measured_after_us +=
        (exposed_us - stats_.measured_after_us) / static_cast<double>(stats_.measured_after_steps);
  }
  if (phase_ != Phase::kRecording || recorded_steps_ == steps_) return;
  StepProfile& step = recorded_[recorded_steps_++];
  for (size_t i = 0; i < order.size(); ++i)
    step.ready_ns[order[i]] = absl::ToInt64Nanoseconds(arrivals[i] - times.begin);
  step.launch_ns = absl::ToInt64Nanoseconds(longest_launch);
  for (size_t b = 0; b < times.buckets.size(); ++b) {
    if (times.buckets[b].launched == absl::InfiniteFuture())
      continue;  // Skipped: nothing was measured.
    step.bucket_ns[b] = absl::ToInt64Nanoseconds(times.buckets[b].reduced - StartOf(times, b));
  }
  stats_.measured_before_us += (exposed_us - stats_.measured_before_us) / recorded_steps_;
}

std::vector<int64_t> PlanTuner::BucketBytes() const {
  std::vector<int64_t> bytes;
  for (const std::vector<int>& bucket : plan_.buckets) {
    int64_t sum = 0;
    for (int param : bucket) sum += specs_[param].bytes();
    bytes.push_back(sum);
  }
  return bytes;
}

absl::StatusOr<std::vector<LinkSample>> PlanTuner::Probe(Communicator& comm,
                                                         Channel& channel) const {
  std::vector<LinkSample> samples;
  for (const int64_t bytes : kProbeBytes) {
    EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(bytes));
    const TensorView data(memory.data.get(), bytes / SizeOf(DType::kFloat32), DType::kFloat32,
                          comm.device());
    absl::Duration shortest = absl::InfiniteDuration();
    for (int i = 0; i < kProbes; ++i) {
      const absl::Time start = SteadyNow();
      EK_RETURN_IF_ERROR(channel.AllReduce(data, ReduceOp::kSum).Wait());
      shortest = std::min(shortest, SteadyNow() - start);
    }
    samples.push_back({.bytes = bytes, .ns = absl::ToInt64Nanoseconds(shortest)});
  }
  return samples;
}

absl::Status PlanTuner::Choose(Communicator& comm, Channel& channel, bool has_inputs) {
  std::vector<int64_t> bytes = BucketBytes();
  StepProfile mine = MedianOf(std::span(recorded_).first(std::max(recorded_steps_, 1)));
  // Sizes are of the plan, so all ranks try, or none does.
  if (!order_.empty() && !CanFit(Samples(bytes, std::vector<int64_t>(bytes.size(), 1)))) {
    EK_ASSIGN_OR_RETURN(const std::vector<LinkSample> probed, Probe(comm, channel));
    for (const LinkSample& sample : probed) {
      bytes.push_back(sample.bytes);
      mine.bucket_ns.push_back(sample.ns);
    }
  }
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange(absl::StrCat("tuning/", name_),
                                              has_inputs ? mine.Serialize() : "", comm.timeout()));
  std::vector<StepProfile> profiles;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].empty()) continue;
    absl::StatusOr<StepProfile> profile = StepProfile::Parse(
        parts[rank], static_cast<int>(specs_.size()), static_cast<int>(bytes.size()));
    if (!profile.ok()) return Annotate(profile.status(), absl::StrCat(name_, ": rank ", rank));
    profiles.push_back(*std::move(profile));
  }
  if (profiles.empty())
    return absl::InternalError(
        absl::StrCat(name_, ": no rank sent measured times for the choice of caps"));
  const StepProfile group = Combined(profiles);
  LinkCost link = FitLink(Samples(bytes, group.bucket_ns));
  link.launch_ns = group.launch_ns;
  EK_ASSIGN_OR_RETURN(choice_, ChooseCaps(specs_, order_, now_, group.ready_ns, link));
  phase_ = Phase::kChosen;
  stats_.link_latency_us = Microseconds(link.latency_ns);
  stats_.link_bytes_per_second = link.bytes_per_second();
  stats_.launch_us = Microseconds(link.launch_ns);
  stats_.predicted_before_us = Microseconds(choice_->before.exposed_ns);
  stats_.predicted_after_us = Microseconds(choice_->after.exposed_ns);
  return absl::OkStatus();
}

TuningStats PlanTuner::stats() const {
  TuningStats stats = stats_;
  stats.is_on = true;
  stats.is_done = phase_ == Phase::kDone;
  return stats;
}

}  // namespace evenkeel
