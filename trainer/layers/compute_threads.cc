#include "evenkeel/trainer/layers/compute_threads.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <thread>

#include "absl/strings/numbers.h"

// oneDNN's threads are OpenMP's. Declared here because not every compiler brings <omp.h>.
extern "C" {
void omp_set_num_threads(int threads);
int omp_get_max_threads();
}

namespace evenkeel {
namespace {

int LimitOf(const std::string& cgroup_folder) {
  std::string quota, period;
  if (std::ifstream(cgroup_folder + "/cpu.max") >> quota >> period)
    return CoresOfQuota(quota, period);
  if (!(std::ifstream(cgroup_folder + "/cpu/cpu.cfs_quota_us") >> quota)) return 0;
  if (!(std::ifstream(cgroup_folder + "/cpu/cpu.cfs_period_us") >> period)) return 0;
  return CoresOfQuota(quota, period);
}

}  // namespace

void SetComputeThreads(int threads) { omp_set_num_threads(std::max(1, threads)); }
int ComputeThreads() { return omp_get_max_threads(); }

int CoresOfQuota(absl::string_view quota, absl::string_view period) {
  int64_t time = 0, per = 0;  // "max" and -1 mean no limit.
  if (!absl::SimpleAtoi(quota, &time) || !absl::SimpleAtoi(period, &per) || time <= 0 || per <= 0)
    return 0;
  return static_cast<int>(std::min<int64_t>(time / per + (time % per != 0 ? 1 : 0), INT32_MAX));
}

int UsableCores(int affinity, const std::string& cgroup_folder) {
  const int limit = LimitOf(cgroup_folder);
  return std::max(1, limit > 0 ? std::min(affinity, limit) : affinity);
}

int UsableCores() {
  // In glibc, the processors in this process's affinity mask.
  return UsableCores(static_cast<int>(std::thread::hardware_concurrency()), "/sys/fs/cgroup");
}

}  // namespace evenkeel
