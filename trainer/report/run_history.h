// What a run's record says of the attempts before this one, put together with what this one says.
//
//   MoveBegin(history, begin_ns);                                    // as if there had been no pause
//   record.ranks = Continued(history.ranks, std::move(ranks));
//   record.plans = Continued(history.plans, plans);
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_RUN_HISTORY_H_
#define EVENKEEL_TRAINER_REPORT_RUN_HISTORY_H_

#include <cstdint>
#include <vector>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// Moves the run's beginning, and all times that count from another moment, to `begin_ns` (Unix time).
void MoveBegin(RunRecord& record, int64_t begin_ns);

// The ranks of `now`: their steps, means and traces with those that a rank of the same number had `before`.
std::vector<RankRecord> Continued(const std::vector<RankRecord>& before, std::vector<RankRecord> now);
// The first plan of `now` is dropped if it has the buckets of the last one `before`.
std::vector<PlanRecord> Continued(const std::vector<PlanRecord>& before, const std::vector<PlanRecord>& now);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_RUN_HISTORY_H_
