// Every rank's record on the rank that writes the report.
//
//   RankRecord mine{.rank = comm.members()[comm.rank()], .host = HostName(), ...};
//   EK_ASSIGN_OR_RETURN(std::vector<RankRecord> all, GatherRecords(comm, mine));      // on rank 0; empty elsewhere
//
// All ranks together. Bytes go over the control plane, and to rank 0 only.
//
// Threads: thread-compatible.
// Errors:  whatever ends the group; Internal for a record that can't be read.

#ifndef EVENKEEL_TRAINER_REPORT_GATHER_RECORDS_H_
#define EVENKEEL_TRAINER_REPORT_GATHER_RECORDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// In the order of the ranks.
absl::StatusOr<std::vector<RankRecord>> GatherRecords(Communicator& comm, const RankRecord& mine);

// Of this process.
std::string HostName();
int64_t PeakResidentBytes();  // The most memory that this program has had at a time; 0: not known.

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_GATHER_RECORDS_H_
