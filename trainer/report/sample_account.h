// Adds up the samples that the ranks of a run have logged (sample_log.h): in each epoch each sample
// of the data is to be used once, also where ranks are lost, replaced, or resumed.
//
//   EK_ASSIGN_OR_RETURN(const SampleAccount account, ReadSampleLogs("ledger"));
//   if (!account.is_once()) std::cerr << Describe(account);
//
// Threads: pure functions.
// Errors:  those of the file system; NotFound without a file of a log. InvalidArgument, with the
//          file, for a damaged line, or where files differ in what all members of a group know. A
//          last line without an end is ignored: the process was killed before it contributed to
//          that step.

#ifndef EVENKEEL_TRAINER_REPORT_SAMPLE_ACCOUNT_H_
#define EVENKEEL_TRAINER_REPORT_SAMPLE_ACCOUNT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/report/sample_log.h"

namespace evenkeel {

// A line of a log that names a sample.
struct SampleUse {
  SampleWriter writer;
  int group = 0;
  int64_t step = 0;
};

struct EpochAccount {
  int64_t missing = 0;   // Samples of the data that were not used,
  int64_t repeated = 0;  // or more than once.
  // The first ones of each, with their uses in the order of steps. Those of a missing one do not
  // count.
  static constexpr size_t kListed = 10;
  std::map<int32_t, std::vector<SampleUse>> first_missing, first_repeated;
};

struct SampleAccount {
  int64_t samples = 0;     // In the data.
  int64_t steps = 0;       // Steps that count.
  bool has_ended = false;  // The last one was the end of the run.
  std::map<int, EpochAccount> epochs;
  std::map<std::pair<int, int>, SampleGroup> groups;  // By attempt and number.

  // Returns whether each sample was used once in each epoch. With `may_miss` some may be unused:
  // the run was shortened, or goes on.
  bool is_once(bool may_miss = false) const;
};

absl::StatusOr<SampleAccount> ReadSampleLogs(const std::string& folder);
// Does the same with the contents of files, by their names.
absl::StatusOr<SampleAccount> AddUpSamples(const std::map<std::string, std::string>& files);

// Returns a line for each epoch, with the first samples that were not used once.
std::string Describe(const SampleAccount& account);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_SAMPLE_ACCOUNT_H_
