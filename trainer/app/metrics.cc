#include "evenkeel/trainer/app/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

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
  const bool is_torn = mode == MetricsMode::kAppend && EndsWithinALine(path);
  // Lines are appended to the current end of the file: another process of the job may have written
  // more.
  const int begin = mode == MetricsMode::kNew ? O_TRUNC : 0;
  const int descriptor =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | begin, 0666);
  std::FILE* const file = descriptor < 0 ? nullptr : fdopen(descriptor, "a");
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  std::setvbuf(file, nullptr, _IONBF, 0);  // A line that cannot be written is not buffered.
  return std::unique_ptr<MetricsWriter>(new MetricsWriter(path, file, is_torn));
}

absl::Status MetricsWriter::Write(const MetricsFields& fields) {
  const std::string line = absl::StrCat(is_torn_ ? "\n" : "", MetricsLine(fields), "\n");
  errno = 0;
  const size_t written = std::fwrite(line.data(), 1, line.size(), file_.get());
  const int error = errno == 0 ? EIO : errno;  // A short write need not set it.
  if (written > 0) is_torn_ = written < line.size();
  if (written == line.size()) return absl::OkStatus();
  return absl::ErrnoToStatus(error, absl::StrCat("cannot write ", path_));
}

}  // namespace evenkeel
