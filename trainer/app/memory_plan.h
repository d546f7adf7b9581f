// Computes the memory that a run will take, and compares it with the memory that is left.
//
//   EK_ASSIGN_OR_RETURN(RankSetup setup, CheckRank(options, data, rank, world_size));
//   EK_ASSIGN_OR_RETURN(const RankMemory memory, PlanMemory(options, rank, world_size, setup));
//   DescribeMemory(0, memory, "needs")   // "rank 0 needs 38.1 MiB: parameters 3.21 MiB, ..."
//
//   const MemoryVerdict verdict = JudgeMemory(needs_of_all_ranks);
//   // kTooMuch: "2 ranks need 54.1 GiB, and host a has 22.1 GiB left"
//
// The figures are those of TrainingRun::MemoryHeld() within 5 %. On devices the figure
// of activations is that of the host's model, an estimate.
//
// Threads: pure functions.
// Errors:  those of oneDNN, which chooses the layouts of the cnn.

#ifndef EVENKEEL_TRAINER_APP_MEMORY_PLAN_H_
#define EVENKEEL_TRAINER_APP_MEMORY_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// Returns "rank 0 holds 38.1 MiB: parameters 3.21 MiB, ...".
std::string DescribeMemory(int rank, const RankMemory& memory, absl::string_view verb = "holds");

// Returns the memory that a rank will hold. `setup` comes from CheckRank() and serves for one call,
// since its plan counts the passes.
absl::StatusOr<RankMemory> PlanMemory(const TrainOptions& options, int rank, int world_size,
                                      RankSetup& setup);

// The memory from which a rank takes its part: a host's or a device's.
struct MemoryPlace {
  std::string name;       // "the host a", "cuda:0 of a"
  int64_t available = 0;  // Bytes. Negative: unknown.
  int64_t swap = 0;       // Further bytes, which are slow.
  std::string boot;       // Ranks share the memory if name and boot are equal.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.name, self.available, self.swap, self.boot);
  }
};

// The memory that a rank needs, and its place as it was before any rank took memory.
struct MemoryNeeds {
  MemoryPlace place;
  int64_t bytes = 0;
  int64_t certain_bytes = 0;  // The part of `bytes` that is no estimate.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.place, self.bytes, self.certain_bytes);
  }
};

// Returns the part of a place that a rank needs: of the device's memory, or of the host's.
MemoryNeeds NeedsOf(const RankMemory& memory, const MemoryPlace& place, bool is_device);

// Return the memory of this host that this process may use, and that of a device, which is unknown
// if `facts` is an error.
MemoryPlace HostMemory();
MemoryPlace DeviceMemory(Device device, const absl::StatusOr<DeviceFacts>& facts);

struct MemoryVerdict {
  enum Kind { kFits, kClose, kTooMuch };
  Kind kind = kFits;
  std::string text;  // About the place with the least left for its ranks.
  int64_t ranks = 1;
  int64_t available = 0;
};
// Compares the sums of needs with the places. `needs`: those of all ranks, or of one place's ranks.
MemoryVerdict JudgeMemory(const std::vector<MemoryNeeds>& needs);

// Returns OK, or for a verdict of kTooMuch ResourceExhausted, which proposes a smaller batch if
// there is one that fits.
absl::Status RefuseTooMuch(const MemoryVerdict& verdict, const RankMemory& memory,
                           const TrainOptions& options,
                           const std::shared_ptr<const TrainingData>& data, int rank,
                           int world_size);

// Returns the text of --dry_run, for `ranks` of all ranks on a place; or the error of CheckRank()
// or RefuseTooMuch().
absl::StatusOr<std::string> DescribeDryRun(const TrainOptions& options,
                                           const std::shared_ptr<const TrainingData>& data,
                                           int world_size, int ranks, const MemoryPlace& place);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_MEMORY_PLAN_H_
