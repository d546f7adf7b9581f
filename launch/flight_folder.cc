#include "evenkeel/launch/flight_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// <group>.rank<r>.json
bool IsRecord(absl::string_view name) {
  if (!absl::ConsumeSuffix(&name, ".json")) return false;
  constexpr absl::string_view kRank = ".rank";
  const size_t at = name.rfind(kRank);
  if (at == absl::string_view::npos) return false;
  const absl::string_view rank = name.substr(at + kRank.size());
  return !rank.empty() &&
         std::all_of(rank.begin(), rank.end(), [](char c) { return absl::ascii_isdigit(c); });
}

}  // namespace

absl::StatusOr<std::string> PrepareFlightFolder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error && access((folder + "/").c_str(), W_OK | X_OK) != 0)
    error.assign(errno, std::generic_category());
  fs::directory_iterator entry;
  if (!error) entry = fs::directory_iterator(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!IsRecord(name)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        folder, " contains records of an earlier job (", name,
        "), which would be merged with this job's; pass another folder, or remove them"));
  }
  const fs::path path = error ? fs::path() : fs::canonical(folder, error);
  if (error)
    return absl::ErrnoToStatus(error.value(),
                               absl::StrCat(folder, ": cannot write to this folder"));
  return path.string();
}

}  // namespace evenkeel
