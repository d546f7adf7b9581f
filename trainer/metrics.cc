#include "evenkeel/trainer/metrics.h"

#include <errno.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace evenkeel {

std::string MetricsLine(std::span<const MetricsField> fields) {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  for (const MetricsField& field : fields) {
    std::visit([&](const auto& value) { line[field.name] = value; }, field.value);
  }
  return line.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::ordered_json::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> MetricsWriter::Create(const std::string& path, MetricsMode mode) {
  std::FILE* file = std::fopen(path.c_str(), mode == MetricsMode::kNew ? "we" : "ae");
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
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
