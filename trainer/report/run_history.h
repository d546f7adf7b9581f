// Merges the record of a run's earlier attempts with the record of the current one.
//
//   MoveBegin(history, begin_ns);  // as if there had been no pause
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

// Adds `ns` to the absolute times of the rank.
void MoveTimes(RankRecord& rank, int64_t ns);

// Moves the run's beginning to `begin_ns` (Unix time), and with it all absolute times.
void MoveBegin(RunRecord& record, int64_t begin_ns);

// Returns the ranks of `now`, with the traces and the peaks of ranks of the same number in
// `before`.
std::vector<RankRecord> Continued(const std::vector<RankRecord>& before,
                                  std::vector<RankRecord> now);
// Returns the plans of `before` and `now`, without the first one of `now` if it has the buckets of
// the last one of `before`.
std::vector<PlanRecord> Continued(const std::vector<PlanRecord>& before,
                                  const std::vector<PlanRecord>& now);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_RUN_HISTORY_H_
