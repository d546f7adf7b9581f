#include "evenkeel/trainer/metrics.h"

#include <errno.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

// Whether who wrote there last was ended within a line.
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
  const bool needs_newline = mode == MetricsMode::kAppend && EndsWithinALine(path);
  std::FILE* file = std::fopen(path.c_str(), mode == MetricsMode::kNew ? "we" : "ae");
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  if (needs_newline) std::fputc('\n', file);  // Leaves with the first line, which tells if it can't be written.
  return std::unique_ptr<MetricsWriter>(new MetricsWriter(path, file));
}

absl::Status MetricsWriter::Write(std::span<const MetricsField> fields) {
  const std::string line = MetricsLine(fields) + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_.get()) == line.size() && std::fflush(file_.get()) == 0) {
    return absl::OkStatus();
  }
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path_));
}

}  // namespace evenkeel
