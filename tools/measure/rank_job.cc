#include "evenkeel/tools/measure/rank_job.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status RunRankProcesses(absl::string_view name, const LaunchOptions& options) {
  EK_ASSIGN_OR_RETURN(const LaunchResult result, Launch(options));
  if (result.exit_code == 0) return absl::OkStatus();
  absl::string_view message = result.message;
  if (options.ranks == 1 && absl::ConsumePrefix(&message, "rank 0 "))
    return absl::UnavailableError(absl::StrCat(name, " ", message));
  return absl::UnavailableError(absl::StrCat(name, ": ", message));
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

std::string ShellCommand(const std::vector<std::string>& words, absl::Duration limit) {
  // In the foreground, so that Ctrl-C at a terminal ends the program too.
  std::string line = absl::StrCat("exec timeout --foreground -k 5 ", absl::ToInt64Seconds(limit));
  for (const std::string& word : words)
    absl::StrAppend(&line, " '", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
  return line;
}

absl::Status WriteJson(const std::string& path, const nlohmann::json& json) {
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

}  // namespace evenkeel
