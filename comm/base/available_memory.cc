#include "evenkeel/comm/base/available_memory.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/read_file.h"

namespace evenkeel::internal {
namespace {

// The names of a hierarchy's files and fields.
struct Names {
  absl::string_view limit, used, active_file, inactive_file;
};
constexpr Names kV2 = {"memory.max", "memory.current", "active_file", "inactive_file"};
constexpr Names kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file",
                       "total_inactive_file"};

// Returns nothing for a file without a number, such as the limit "max".
std::optional<int64_t> ReadNumber(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, Links::kFollow);
  int64_t number = 0;
  if (!text.ok() || !absl::SimpleAtoi(*text, &number)) return std::nullopt;
  return number;
}

// Returns the number in the line "<key> <number> ...".
std::optional<int64_t> NumberAfter(absl::string_view text, absl::string_view key) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t number = 0;
    if (words.size() >= 2 && words[0] == key && absl::SimpleAtoi(words[1], &number)) return number;
  }
  return std::nullopt;
}

std::optional<int64_t> LeftIn(const std::string& folder, const Names& names) {
  const std::optional<int64_t> limit = ReadNumber(absl::StrCat(folder, "/", names.limit));
  const std::optional<int64_t> used = ReadNumber(absl::StrCat(folder, "/", names.used));
  if (!limit || !used) return std::nullopt;
  int64_t cached = 0;
  if (const absl::StatusOr<std::string> stat = ReadFile(folder + "/memory.stat", Links::kFollow);
      stat.ok()) {
    cached = NumberAfter(*stat, names.active_file).value_or(0) +
             NumberAfter(*stat, names.inactive_file).value_or(0);
  }
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - cached));
}

void Lower(AvailableMemory& left, int64_t bytes, std::string of) {
  if (bytes >= left.bytes) return;
  left.bytes = bytes;
  left.of = std::move(of);
}

// Applies the limits of a control group and of all groups around it. In a container the path may be
// the host's; then only the root exists, which is the container's own group.
void LowerByGroups(AvailableMemory& left, const std::string& mount, std::string group,
                   const Names& names) {
  while (true) {
    while (absl::EndsWith(group, "/")) group.pop_back();
    if (const std::optional<int64_t> bytes = LeftIn(mount + group, names)) {
      Lower(left, *bytes, absl::StrCat("the control group ", group.empty() ? "/" : group));
    }
    if (group.empty()) return;
    group.resize(std::min(group.rfind('/'), group.size()));
  }
}

}  // namespace

AvailableMemory ReadAvailableMemory(const std::string& root) {
  AvailableMemory left;
  if (const absl::StatusOr<std::string> info = ReadFile(root + "/proc/meminfo", Links::kFollow);
      info.ok()) {
    if (const std::optional<int64_t> kib = NumberAfter(*info, "MemAvailable:"))
      Lower(left, *kib * 1024, "the host");
    left.swap_bytes = NumberAfter(*info, "SwapFree:").value_or(0) * 1024;
  }
  const absl::StatusOr<std::string> groups = ReadFile(root + "/proc/self/cgroup", Links::kFollow);
  if (!groups.ok()) return left;
  // Lines are "0::/path" in version 2 and "9:cpu,memory:/path" in version 1.
  for (const absl::string_view line : absl::StrSplit(*groups, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    if (parts[1].empty()) {
      LowerByGroups(left, root + "/sys/fs/cgroup", parts[2], kV2);
      LowerByGroups(left, root + "/sys/fs/cgroup/unified", parts[2], kV2);
      continue;
    }
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      LowerByGroups(left, root + "/sys/fs/cgroup/memory", parts[2], kV1);
    }
  }
  return left;
}

}  // namespace evenkeel::internal
