#include "evenkeel/bucket/internal/fusion_trial.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/internal/median.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int64_t kClearlyBetter = 50;  // By a fiftieth: otherwise what is simpler stays.

}  // namespace

void FusionTrial::OnPlan(const PlanState& state) {
  next_.reset();
  counted_steps_ = 0;
  now_ = state.fusion;
  runs_ = state.order_final && (!waits_for_caps_ || !state.caps.empty()) &&
          (now_ == MeasuredFusion::kUnknown || now_ == MeasuredFusion::kTrying);
  if (now_ == MeasuredFusion::kUnknown) flat_ns_.clear();
  if (now_ != MeasuredFusion::kFlat && now_ != MeasuredFusion::kCoalesced) coalesced_ns_.clear();
}

void FusionTrial::EndStep(const StepTimes* times) {
  if (!runs_ || next_.has_value()) return;
  ++counted_steps_;
  const bool is_flat = now_ == MeasuredFusion::kUnknown;
  if (times != nullptr && counted_steps_ > 1) {
    (is_flat ? flat_ns_ : coalesced_ns_).push_back(absl::ToInt64Nanoseconds(times->end - times->first_gradient));
  }
  if (is_flat && counted_steps_ > steps_) next_ = MeasuredFusion::kTrying;
}

absl::Status FusionTrial::Choose(Communicator& comm) {
  std::string mine;
  if (!flat_ns_.empty() && !coalesced_ns_.empty()) {
    mine = internal::ByteWriter().I64(MedianOf(flat_ns_)).I64(MedianOf(coalesced_ns_)).Take();
  }
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange(absl::StrCat("fusion/", name_), mine, comm.timeout()));
  // The slowest rank holds up the others.
  int64_t flat = 0, coalesced = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].empty()) continue;
    internal::ByteReader reader(parts[rank]);
    flat = std::max(flat, reader.I64());
    coalesced = std::max(coalesced, reader.I64());
    EK_RETURN_IF_ERROR(Annotate(reader.Finish("a trial of fusion"), absl::StrCat(name_, ": rank ", rank)));
  }
  next_ = coalesced < flat - flat / kClearlyBetter ? MeasuredFusion::kCoalesced : MeasuredFusion::kFlat;
  stats_.flat_us = static_cast<double>(flat) / 1e3;
  stats_.coalesced_us = static_cast<double>(coalesced) / 1e3;
  return absl::OkStatus();
}

FusionStats FusionTrial::stats() const {
  FusionStats stats = stats_;
  stats.is_on = true;
  stats.is_done = now_ == MeasuredFusion::kFlat || now_ == MeasuredFusion::kCoalesced;
  return stats;
}

}  // namespace evenkeel
