#include "evenkeel/tests/stragglers/slow_core.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/stragglers/delayed_training.h"

namespace evenkeel {
namespace {

constexpr int64_t kPeriodUs = 10'000;
constexpr int64_t kMostShares = 262'144;
constexpr absl::Duration kBurst = absl::Milliseconds(1);

absl::Status WriteTo(const std::string& path, int64_t number) {
  std::ofstream file(path);
  file << number << std::flush;
  if (file.good()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", number, " to ", path));
}

// Returns the folder of this process's group of the controller `cpu`.
std::string CpuGroup() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // 4:cpu,cpuacct:/path
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    for (const absl::string_view controller : absl::StrSplit(parts[1], ','))
      if (controller == "cpu") return absl::StrCat("/sys/fs/cgroup/", parts[1], parts[2], "/");
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Throttle>> Throttle::Create() {
  const std::string parent = CpuGroup();
  if (parent.empty()) return absl::UnavailableError("no control group of version 1 for `cpu`");
  auto throttle = std::unique_ptr<Throttle>(new Throttle(parent));
  if (mkdir(throttle->own_.c_str(), 0755) != 0)
    return absl::UnavailableError(absl::StrCat(throttle->own_, ": ", std::strerror(errno)));
  EK_RETURN_IF_ERROR(WriteTo(throttle->own_ + "cpu.cfs_period_us", kPeriodUs));
  // Beside other groups nothing but the quota limits it.
  EK_RETURN_IF_ERROR(WriteTo(throttle->own_ + "cpu.shares", kMostShares));
  EK_RETURN_IF_ERROR(WriteTo(throttle->own_ + "cgroup.procs", getpid()));
  return throttle;
}

Throttle::Throttle(std::string parent)
    : parent_(std::move(parent)), own_(absl::StrCat(parent_, "evenkeel-", getpid(), "/")) {}

Throttle::~Throttle() {
  WriteTo(parent_ + "cgroup.procs", getpid()).IgnoreError();
  rmdir(own_.c_str());
}

absl::Status Throttle::SetShare(double share) {
  return WriteTo(own_ + "cpu.cfs_quota_us", static_cast<int64_t>(share * kPeriodUs));
}

void PinTo(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof(cores), &cores);
}

void BeBusyNeighbour(double fraction) {
  for (absl::Time next = absl::Now();; next += kBurst * (1 + 1 / fraction)) {
    absl::SleepFor(next - absl::Now());
    for (const absl::Duration end = CpuTime() + kBurst; CpuTime() < end;) {
    }
  }
}

}  // namespace evenkeel
