// The samples on which a rank trains, in a file. sample_account.h adds up the files of all ranks.
//
//   SampleLog log("ledger", {.attempt = 0, .rank = 2, .incarnation = 0});
//   EK_RETURN_IF_ERROR(log.EnterGroup({.number = 1, .from = 17, .ranks = {0, 1, 2, 3},
//                                      .samples = 60000, .epochs = 4}));
//   EK_RETURN_IF_ERROR(log.Write(/*step=*/17, /*epoch=*/0, {5, 812, 33}));
//   EK_RETURN_IF_ERROR(log.End(/*steps=*/2500));
//
// A process writes the line of a step before it contributes to that step, and passes each line to
// the system at once. So a step that any rank finishes has the lines of all ranks, also of one that
// was killed in it. Lines of the last seconds may be missing after a stop of the machine.
//
// A line may be of a step that is repeated, and does not count then:
//   - A group goes on from a step at which all its members begin. Lines of this step and of later
//     ones do not count in groups before it: in those with a lower number, and in earlier attempts.
//   - In the newest group, the last step counts only if a process has written the end of the run.
//
// A file has JSON lines:
//
//   {"attempt":0,"rank":2,"incarnation":0,"group":1,"from":17,"ranks":[0,1,2,3],"samples":60000,
//    "epochs":4}                                   one line; the group of the lines below it
//   {"step":17,"epoch":0,"samples":[5,812,33]}     by their numbers in the data
//   {"end":2500}                                   the run has ended after that many steps
//
// Units:   ranks are numbers in the job's first group; steps count over all epochs, from 0.
// Threads: thread-compatible.
// Errors:  those of the file system, with the path.

#ifndef EVENKEEL_TRAINER_REPORT_SAMPLE_LOG_H_
#define EVENKEEL_TRAINER_REPORT_SAMPLE_LOG_H_

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel {

// A process of a run.
struct SampleWriter {
  int attempt = 0;  // Of starts of the run that write to the folder; equal on all ranks.
  int rank = 0;
  int incarnation = 0;  // Not 0: a newcomer in the place of that rank.
  friend auto operator<=>(const SampleWriter&, const SampleWriter&) = default;
};

// The part of a run that the same ranks make.
struct SampleGroup {
  int number = 0;          // It is the first, or the n-th after it.
  int64_t from = 0;        // Steps that all its members had finished when it began.
  std::vector<int> ranks;  // Its members.
  int64_t samples = 0;     // In the data.
  int epochs = 0;          // Of the whole run.
  friend bool operator==(const SampleGroup&, const SampleGroup&) = default;
};

inline constexpr char kSampleLogSuffix[] = ".samples.jsonl";

// Returns the number of a group by its name: 0 for "world", 2 for "world+2".
int GroupNumber(absl::string_view name);

// Returns the lowest number of an attempt that has no file in `folder`, which is made if it does
// not exist.
absl::StatusOr<int> NextSampleAttempt(const std::string& folder);

class SampleLog {
 public:
  SampleLog(const std::string& folder, const SampleWriter& writer)
      : folder_(folder), writer_(writer) {}

  // Makes the file. Without this call the first line does it.
  absl::Status Open();
  int attempt() const { return writer_.attempt; }
  // Called before the file is made: a newcomer learns the number when it enters.
  void SetAttempt(int attempt) { writer_.attempt = attempt; }

  // Does nothing if the process is in that group already.
  absl::Status EnterGroup(const SampleGroup& group);
  absl::Status Write(int64_t step, int epoch, std::span<const int32_t> samples);
  absl::Status End(int64_t steps);

 private:
  absl::Status Append(absl::string_view line);

  std::string path() const;

  const std::string folder_;
  SampleWriter writer_;
  int group_ = -1;  // -1: none yet.
  internal::UniqueFd file_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_SAMPLE_LOG_H_
