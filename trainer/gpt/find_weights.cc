#include "evenkeel/trainer/gpt/find_weights.h"

#include <cstdint>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr char kFile[] = "model.safetensors";
constexpr int64_t kNoStep = -1;

// Returns N for a folder "step-N", else kNoStep.
int64_t StepOf(const fs::path& folder) {
  const std::string name = folder.filename().string();
  absl::string_view digits = name;
  int64_t step;
  const bool is_step = absl::ConsumePrefix(&digits, "step-") && !digits.empty() &&
                       digits.find_first_not_of("0123456789") == digits.npos &&
                       absl::SimpleAtoi(digits, &step);
  return is_step ? step : kNoStep;
}

absl::Status StatusOf(const std::error_code& error, const std::string& path) {
  return absl::ErrnoToStatus(error.value(), path);
}

}  // namespace

absl::StatusOr<std::string> FindWeights(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return StatusOf(error, path);
  if (!fs::is_directory(status)) return path;
  if (fs::exists(fs::path(path) / kFile, error)) return (fs::path(path) / kFile).string();

  int64_t newest = kNoStep;
  fs::path found;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const fs::path file = entry->path() / kFile;
    std::error_code ignored;  // Unreadable entries count as missing.
    const int64_t step = StepOf(entry->path());
    if (step <= newest || !fs::is_regular_file(file, ignored)) continue;
    newest = step;
    found = file;
  }
  if (error) return StatusOf(error, path);
  if (newest != kNoStep) return found.string();
  return absl::NotFoundError(
      absl::StrCat(path, ": contains neither ", kFile, " nor a checkpoint, step-N/", kFile));
}

}  // namespace evenkeel
