#include "evenkeel/trainer/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
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

std::string MetricsLine(std::span<const MetricsField> fields) {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  for (const MetricsField& field : fields) {
    std::visit([&](const auto& value) { line[field.name] = value; }, field.value);
  }
  return line.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::ordered_json::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> MetricsWriter::Create(const std::string& path, MetricsMode mode) {
  const bool is_torn = mode == MetricsMode::kAppend && EndsWithinALine(path);
  // Lines go to the file's end, wherever that is: another process of the job may have written more.
  const int begin = mode == MetricsMode::kNew ? O_TRUNC : 0;
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | begin, 0666);
  std::FILE* const file = descriptor < 0 ? nullptr : fdopen(descriptor, "a");
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  std::setvbuf(file, nullptr, _IONBF, 0);  // A line that can't be written is not kept for later.
  return std::unique_ptr<MetricsWriter>(new MetricsWriter(path, file, is_torn));
}

absl::Status MetricsWriter::Write(std::span<const MetricsField> fields) {
  const std::string line = absl::StrCat(is_torn_ ? "\n" : "", MetricsLine(fields), "\n");
  errno = 0;
  const size_t written = std::fwrite(line.data(), 1, line.size(), file_.get());
  const int error = errno == 0 ? EIO : errno;  // A short write need not set it.
  if (written > 0) is_torn_ = written < line.size();
  if (written == line.size()) return absl::OkStatus();
  return absl::ErrnoToStatus(error, absl::StrCat("cannot write ", path_));
}

}  // namespace evenkeel
