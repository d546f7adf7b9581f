#include "evenkeel/trainer/report/sample_log.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {

int GroupNumber(absl::string_view name) {
  const size_t plus = name.rfind('+');
  int number = 0;
  if (plus == absl::string_view::npos || !absl::SimpleAtoi(name.substr(plus + 1), &number))
    return 0;
  return number;
}

absl::StatusOr<int> NextSampleAttempt(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  int next = 0;
  for (const std::string& name : names) {
    int attempt = 0;
    if (std::sscanf(name.c_str(), "attempt%9d-", &attempt) == 1) next = std::max(next, attempt + 1);
  }
  return next;
}

std::string SampleLog::path() const {
  return absl::StrCat(folder_, "/attempt", writer_.attempt, "-rank", writer_.rank, "-",
                      writer_.incarnation, kSampleLogSuffix);
}

absl::Status SampleLog::Open() {
  if (file_) return absl::OkStatus();
  file_ = internal::UniqueFd(
      open(path().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_EXCL, 0666));
  return file_ ? absl::OkStatus() : ErrnoStatus("cannot create", path());
}

absl::Status SampleLog::EnterGroup(const SampleGroup& group) {
  if (group.number == group_) return absl::OkStatus();
  group_ = group.number;
  return Append(absl::StrCat("{\"attempt\":", writer_.attempt, ",\"rank\":", writer_.rank,
                             ",\"incarnation\":", writer_.incarnation, ",\"group\":", group.number,
                             ",\"from\":", group.from, ",\"ranks\":[",
                             absl::StrJoin(group.ranks, ","), "],\"samples\":", group.samples,
                             ",\"epochs\":", group.epochs, "}\n"));
}

absl::Status SampleLog::Write(int64_t step, int epoch, std::span<const int32_t> samples) {
  return Append(absl::StrCat("{\"step\":", step, ",\"epoch\":", epoch, ",\"samples\":[",
                             absl::StrJoin(samples, ","), "]}\n"));
}

absl::Status SampleLog::End(int64_t steps) {
  return Append(absl::StrCat("{\"end\":", steps, "}\n"));
}

absl::Status SampleLog::Append(absl::string_view line) {
  EK_RETURN_IF_ERROR(Open());
  return internal::WriteAll(file_.get(), line) ? absl::OkStatus()
                                               : ErrnoStatus("cannot write", path());
}

}  // namespace evenkeel
