#include "evenkeel/trainer/report/gather_records.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::vector<RankRecord>> GatherRecords(Communicator& comm, const RankRecord& mine) {
  constexpr char kTopic[] = "run record";
  std::vector<RankRecord> records;
  if (comm.rank() != 0) {
    comm.control().Send(0, kTopic, internal::ToBytes(mine));
    return records;
  }
  records.push_back(mine);
  for (int rank = 1; rank < comm.world_size(); ++rank) {
    EK_ASSIGN_OR_RETURN(const std::string bytes, comm.control().Receive(kTopic, comm.timeout()));
    const auto record = internal::FromBytes<RankRecord>(bytes, "a rank's record");
    if (!record.ok()) return absl::InternalError(record.status().message());
    records.push_back(*record);
  }
  std::ranges::sort(records, {}, &RankRecord::rank);
  return records;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

// Not ru_maxrss: that value survives exec, so that a rank would report the peak of the program that
// started it.
int64_t PeakResidentBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    absl::string_view rest = line;
    int64_t kib = 0;
    if (!absl::ConsumePrefix(&rest, "VmHWM:")) continue;
    return absl::SimpleAtoi(absl::StripSuffix(rest, "kB"), &kib) ? kib * 1024 : 0;
  }
  return 0;
}

}  // namespace evenkeel
