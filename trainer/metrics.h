// Numbers of a training run as JSON lines: one object per line, for scripts and plots.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<MetricsWriter> metrics, MetricsWriter::Create("metrics.jsonl"));
//   EK_RETURN_IF_ERROR(metrics->Write({{"step", 12}, {"loss", 0.42}, {"split", "test"}}));
//
// Fields keep their order. NaN and infinities, which JSON lacks, become null. Each line is handed to the system at
// once: what was written before a crash can be read.
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path; the next line can be written all the same. An existing file is
// overwritten, unless lines are to be appended.

#ifndef EVENKEEL_TRAINER_METRICS_H_
#define EVENKEEL_TRAINER_METRICS_H_

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

struct MetricsField {
  using Value = std::variant<int64_t, double, bool, std::string>;

  MetricsField(absl::string_view name, std::integral auto value) : name(name), value(static_cast<int64_t>(value)) {}
  MetricsField(absl::string_view name, bool value) : name(name), value(value) {}
  MetricsField(absl::string_view name, double value) : name(name), value(value) {}
  MetricsField(absl::string_view name, const char* value) : name(name), value(std::string(value)) {}
  MetricsField(absl::string_view name, std::string value) : name(name), value(std::move(value)) {}

  std::string name;
  Value value;
};

enum class MetricsMode { kNew, kAppend };

class MetricsWriter {
 public:
  static absl::StatusOr<std::unique_ptr<MetricsWriter>> Create(const std::string& path,
                                                               MetricsMode mode = MetricsMode::kNew);

  absl::Status Write(std::span<const MetricsField> fields);
  absl::Status Write(std::initializer_list<MetricsField> fields) {
    return Write(std::span(fields.begin(), fields.size()));
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  MetricsWriter(std::string path, std::FILE* file, bool is_torn)
      : path_(std::move(path)), file_(file), is_torn_(is_torn) {}

  const std::string path_;
  const std::unique_ptr<std::FILE, Close> file_;
  bool is_torn_;  // The file ends within a line.
};

// The line for `fields`, without the newline.
std::string MetricsLine(std::span<const MetricsField> fields);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_METRICS_H_
