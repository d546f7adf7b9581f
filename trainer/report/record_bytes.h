// Serializes the records of a run and of a rank: for the rank that writes the report, and for
// checkpoints of the run.
//
//   const std::string bytes = Serialize(record);
//   EK_ASSIGN_OR_RETURN(const RunRecord same, ParseRunRecord(bytes));
//
// Threads: pure functions.
// Errors:  InvalidArgument for bytes that are not a record of this version.

#ifndef EVENKEEL_TRAINER_REPORT_RECORD_BYTES_H_
#define EVENKEEL_TRAINER_REPORT_RECORD_BYTES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string Serialize(const RankRecord& record);
absl::StatusOr<RankRecord> ParseRankRecord(absl::string_view bytes);

std::string Serialize(const RunRecord& record);
absl::StatusOr<RunRecord> ParseRunRecord(absl::string_view bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_RECORD_BYTES_H_
