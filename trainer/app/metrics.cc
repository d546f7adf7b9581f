#include "evenkeel/trainer/app/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

constexpr int64_t kTail = 64 << 10;  // Many lines of steps.

// The events that have one line for each value of a field, in order. The test has no number.
constexpr std::pair<const char*, const char*> kOnce[] = {{"step", "step"},
                                                         {"evaluation", "step"},
                                                         {"sample", "step"},
                                                         {"epoch", "epoch"},
                                                         {"test", "step"}};

bool Is(const MetricsFields& fields, const char* name, const MetricsFields& value) {
  const auto found = fields.find(name);
  return found != fields.end() && *found == value;
}

int64_t NumberOf(const MetricsFields& fields, const char* name) {
  const auto found = fields.find(name);
  return found != fields.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

// Returns whether the last writer ended within a line.
bool EndsWithinALine(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  std::ifstream file(path, std::ios::binary);
  file.seekg(-1, std::ios::end);
  return file && file.get() != '\n';
}

}  // namespace

std::string MetricsLine(const MetricsFields& fields) {
  return fields.dump(-1, ' ', /*ensure_ascii=*/false, MetricsFields::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> MetricsWriter::Create(const std::string& path,
                                                                     MetricsMode mode) {
  const bool is_torn = mode != MetricsMode::kNew && EndsWithinALine(path);
  // Lines are appended to the current end of the file: another process of the job may have written
  // more.
  const int begin = mode == MetricsMode::kNew ? O_TRUNC : 0;
  const int descriptor =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | begin, 0666);
  std::FILE* const file = descriptor < 0 ? nullptr : fdopen(descriptor, "a");
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  std::setvbuf(file, nullptr, _IONBF, 0);  // A line that cannot be written is not buffered.
  std::unique_ptr<MetricsWriter> writer(new MetricsWriter(path, file, is_torn));
  if (mode == MetricsMode::kTakeOver) writer->FindLast();
  return writer;
}

void MetricsWriter::FindLast() {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path_, error)) return;
  std::ifstream file(path_, std::ios::binary);
  file.seekg(0, std::ios::end);
  file.seekg(std::max<int64_t>(0, file.tellg() - kTail));
  for (std::string line; std::getline(file, line);) {
    const MetricsFields fields =
        MetricsFields::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
    if (!fields.is_object()) continue;  // A part of a line.
    if (Is(fields, "event", "run")) {
      last_ = {{"step", NumberOf(fields, "first_step") - 1}};
      lost_ = 0;
    }
    lost_ += Is(fields, "event", "lost");
    if (Is(fields, "event", "lost") && Is(fields, "replaced", false))
      GoBack(NumberOf(fields, "step"));
    Note(fields);
  }
}

bool MetricsWriter::Note(const MetricsFields& fields) {
  for (const auto& [event, counted] : kOnce) {
    if (!Is(fields, "event", event)) continue;
    const int64_t at = NumberOf(fields, counted);
    const auto [last, is_first] = last_.try_emplace(event, at);
    if (!is_first && at <= last->second) return false;
    last->second = at;
  }
  return true;
}

void MetricsWriter::GoBack(int64_t step) {
  for (auto& [event, last] : last_) {
    if (event != "epoch") last = std::min(last, step - 1);
  }
}

bool MetricsWriter::Lacks(int64_t step) const {
  const auto last = last_.find("step");
  return last != last_.end() && last->second == step - 1;
}

absl::Status MetricsWriter::Write(const MetricsFields& fields) {
  if (!Note(fields)) return absl::OkStatus();
  const std::string line = absl::StrCat(is_torn_ ? "\n" : "", MetricsLine(fields), "\n");
  errno = 0;
  const size_t written = std::fwrite(line.data(), 1, line.size(), file_.get());
  const int error = errno == 0 ? EIO : errno;  // A short write need not set it.
  if (written > 0) is_torn_ = written < line.size();
  if (written == line.size()) return absl::OkStatus();
  return absl::ErrnoToStatus(error, absl::StrCat("cannot write ", path_));
}

}  // namespace evenkeel
