#include "evenkeel/tools/measure/rank_job.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status RunRankProcesses(absl::string_view name, const LaunchOptions& options) {
  EK_ASSIGN_OR_RETURN(const LaunchResult result, Launch(options));
  if (result.exit_code == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(name, ": ", result.message));
}

absl::StatusOr<std::vector<Numbers>> GatherNumbers(Communicator& comm, const Numbers& mine) {
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange("numbers", bytes, comm.timeout()));
  std::vector<Numbers> all;
  for (const std::string& part : parts) {
    all.emplace_back(part.size() / sizeof(double));
    if (!part.empty()) std::memcpy(all.back().data(), part.data(), part.size());
  }
  return all;
}

absl::StatusOr<Numbers> LargestOf(Communicator& comm, const Numbers& mine) {
  EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all, GatherNumbers(comm, mine));
  Numbers largest = mine;
  for (const Numbers& numbers : all) {
    if (numbers.size() != mine.size())
      return absl::InternalError(absl::StrCat("ranks measured ", numbers.size(), " and ",
                                              mine.size(), " numbers (internal error)"));
    for (size_t i = 0; i < mine.size(); ++i) largest[i] = std::max(largest[i], numbers[i]);
  }
  return largest;
}

absl::Status WriteJson(const std::string& path, const nlohmann::json& json) {
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

}  // namespace evenkeel
