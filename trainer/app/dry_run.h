// Describes the buckets, memory and time of a run after a few of its steps (--dry_run).
//
//   std::cout << DescribeDryRun({.whole = plan, .plans = run.plans(), .ranks = records});
//
//   4 buckets: 1.01 MiB, 1.02 MiB, 1.02 MiB, 160 KiB; one all-reduce or reduce-scatter each
//   rank 0 holds 38.1 MiB: parameters 3.21 MiB, gradients 3.21 MiB, ...; its process used at most
//     71.3 MiB
//   a step takes 33.1 ms: batch 0.1, forward 10.4, backward 20.9, waiting for gradients 0.8,
//     optimizer 0.9
//   a step takes 4.8 ms on the device: batch 0.0, ...; the host enqueues it in 1.2
//     (instead, on a device)
//   4692 steps in 6 epochs take about 2 min 35 s, without evaluation
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_APP_DRY_RUN_H_
#define EVENKEEL_TRAINER_APP_DRY_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// Steps of a dry run. More than a few, since the first ones are not typical.
inline constexpr int64_t kDrySteps = 10;

struct DryRun {
  StepPlan whole;                 // The plan of the estimated run.
  std::vector<PlanRecord> plans;  // Plans of the buckets; the last one is used.
  std::vector<RankRecord> ranks;
};

std::string DescribeDryRun(const DryRun& run);

// Returns "rank 0 holds 38.1 MiB: parameters 3.21 MiB, ...".
std::string DescribeMemory(int rank, const RankMemory& memory);

// Returns "cuda:0, NVIDIA H100, has 61.2 GiB free of 79.1 GiB".
std::string DescribeDevice(Device device, const DeviceFacts& facts);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_DRY_RUN_H_
