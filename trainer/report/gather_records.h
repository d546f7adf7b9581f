// Collects the ranks' records on the rank that writes the report.
//
//   RankRecord mine{.rank = comm.members()[comm.rank()], .host = HostName(), ...};
//   // on rank 0; empty elsewhere
//   EK_ASSIGN_OR_RETURN(std::vector<RankRecord> all, GatherRecords(comm, mine));
//
// Bytes are sent over the control plane, to rank 0 only.
//
// Order:   all ranks call it together.
// Threads: thread-compatible.
// Errors:  those that end the group; Internal for a malformed record.

#ifndef EVENKEEL_TRAINER_REPORT_GATHER_RECORDS_H_
#define EVENKEEL_TRAINER_REPORT_GATHER_RECORDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// Returns the records in the order of the ranks.
absl::StatusOr<std::vector<RankRecord>> GatherRecords(Communicator& comm, const RankRecord& mine);

// Return facts of this process.
std::string HostName();
int64_t PeakResidentBytes();  // Largest memory of the process so far; 0: unknown.

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_GATHER_RECORDS_H_
