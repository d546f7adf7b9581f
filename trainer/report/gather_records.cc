#include "evenkeel/trainer/report/gather_records.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/report/step_trace.h"

namespace evenkeel {
namespace {

constexpr char kTopic[] = "run record";

}  // namespace

absl::StatusOr<std::vector<RankRecord>> GatherRecords(Communicator& comm, const RankRecord& mine) {
  std::vector<RankRecord> records;
  if (comm.rank() != 0) {
    comm.control().Send(0, kTopic, Serialize(mine));
    return records;
  }
  records.push_back(mine);
  for (int rank = 1; rank < comm.world_size(); ++rank) {
    EK_ASSIGN_OR_RETURN(const std::string bytes, comm.control().Receive(kTopic, comm.timeout()));
    const absl::StatusOr<RankRecord> record = ParseRankRecord(bytes);
    if (!record.ok()) return absl::InternalError(record.status().message());
    records.push_back(*record);
  }
  std::sort(records.begin(), records.end(), [](const RankRecord& a, const RankRecord& b) { return a.rank < b.rank; });
  return records;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

int64_t PeakResidentBytes() {
  rusage usage;
  return getrusage(RUSAGE_SELF, &usage) == 0 ? int64_t{usage.ru_maxrss} * 1024 : 0;
}

}  // namespace evenkeel
