// Numbers of a training run as JSON lines: one object per line, for scripts and plots.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<MetricsWriter> metrics,
//                       MetricsWriter::Create("metrics.jsonl"));
//   EK_RETURN_IF_ERROR(metrics->Write({{"step", 12}, {"loss", 0.42}, {"split", "test"}}));
//
// Fields keep their order. NaN and infinities, which JSON lacks, become null. Each line is passed
// to the system at once, so that a crash loses no earlier line.
//
// Each line of a step, an evaluation, a sample, an epoch and the test is there once, also where a
// rank was lost: one that was written already is not repeated. A process that takes over from rank
// 0 finds the last lines in the file, unless that is a pipe.
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path; later lines can still be written. An existing
//          file is overwritten, unless the mode is another one than kNew.

#ifndef EVENKEEL_TRAINER_APP_METRICS_H_
#define EVENKEEL_TRAINER_APP_METRICS_H_

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace evenkeel {

// A JSON object, whose fields keep their order.
using MetricsFields = nlohmann::ordered_json;

enum class MetricsMode {
  kNew,
  kAppend,    // For a resumed run, which repeats steps.
  kTakeOver,  // Another process of this run has written the file until now.
};

class MetricsWriter {
 public:
  static absl::StatusOr<std::unique_ptr<MetricsWriter>> Create(
      const std::string& path, MetricsMode mode = MetricsMode::kNew);

  absl::Status Write(const MetricsFields& fields);
  // The lines of steps from `step` on are written again, since they are those of other ranks.
  void GoBack(int64_t step);
  // Returns true if the line of `step` is missing and the one before it is there.
  bool Lacks(int64_t step) const;
  // Returns the number of `lost` lines of this run that were there when the writer was made.
  int lost() const { return lost_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  MetricsWriter(std::string path, std::FILE* file, bool is_torn)
      : path_(std::move(path)), file_(file), is_torn_(is_torn) {}
  // Reads the last lines.
  void FindLast();
  // Notes the line; returns false if it was noted before.
  bool Note(const MetricsFields& fields);

  const std::string path_;
  const std::unique_ptr<std::FILE, Close> file_;
  bool is_torn_;                         // The file ends within a line.
  std::map<std::string, int64_t> last_;  // By event: the last step or epoch with a line.
  int lost_ = 0;
};

// Returns the line for `fields`, without the newline.
std::string MetricsLine(const MetricsFields& fields);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_METRICS_H_
