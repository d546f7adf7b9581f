#include "evenkeel/trainer/report/run_record.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr char kFormat[] = "evenkeel run record 4";

}  // namespace

absl::string_view NameOf(SpanKind kind) {
  static constexpr absl::string_view kNames[kSpanKinds] = {
      "data", "begin", "forward", "backward", "wait", "optimizer", "shadows active ranks"};
  return kNames[static_cast<int>(kind)];
}

std::map<int, CostCurve> CurvesByRank(const std::vector<CostPoint>& costs,
                                      std::map<int, double> CostPoint::*values) {
  std::map<int, CostCurve> curves;
  for (const CostPoint& point : costs) {
    for (const auto& [rank, value] : point.*values) {
      curves[rank].points.emplace_back(point.step, value);
      curves[rank].peak = std::max(curves[rank].peak, value);
    }
  }
  return curves;
}

std::string Serialize(const RunRecord& record) {
  internal::FieldWriter writer;
  writer(std::string(kFormat), record);
  return writer.Take();
}

absl::StatusOr<RunRecord> ParseRunRecord(absl::string_view bytes) {
  internal::FieldReader reader(bytes);
  std::string format;
  reader(format);
  if (format != kFormat)
    return absl::InvalidArgumentError(absl::StrCat("this is not an ", kFormat));
  RunRecord record;
  reader(record);
  EK_RETURN_IF_ERROR(reader.Finish("a run's record"));
  for (const auto* const points : {&record.epochs, &record.parts}) {
    for (const EpochPoint& point : *points) {
      if (point.ranks.size() == point.batches.size()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("epoch ", point.epoch, " of the record has ", point.ranks.size(),
                       " ranks and the batches of ", point.batches.size()));
    }
  }
  return record;
}

void MoveTimes(RankRecord& rank, int64_t ns) {
  for (StepTrace& trace : rank.traces) {
    if (trace.last_gradient_ns > 0) trace.last_gradient_ns += ns;
    for (TraceSpan& span : trace.spans) span.begin_ns += ns, span.end_ns += ns;
    for (BucketTrace& bucket : trace.buckets)
      bucket.ready_ns += ns, bucket.start_ns += ns, bucket.reduced_ns += ns;
  }
}

void MoveBegin(RunRecord& record, int64_t begin_ns) {
  const int64_t by = begin_ns - std::exchange(record.begin_ns, begin_ns);
  for (RankRecord& rank : record.ranks) MoveTimes(rank, by);
}

std::vector<RankRecord> Continued(const std::vector<RankRecord>& before,
                                  std::vector<RankRecord> now) {
  for (RankRecord& rank : now) {
    const auto old = std::ranges::find(before, rank.rank, &RankRecord::rank);
    if (old == before.end()) continue;
    rank.memory.peak_resident = std::max(rank.memory.peak_resident, old->memory.peak_resident);
    rank.traces.insert(rank.traces.begin(), old->traces.begin(), old->traces.end());
  }
  return now;
}

std::vector<PlanRecord> Continued(const std::vector<PlanRecord>& before,
                                  const std::vector<PlanRecord>& now) {
  std::vector<PlanRecord> plans = before;
  const bool is_same =
      !before.empty() && !now.empty() && before.back().buckets == now.front().buckets;
  plans.insert(plans.end(), now.begin() + (is_same ? 1 : 0), now.end());
  return plans;
}

}  // namespace evenkeel
