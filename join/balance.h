// Divides each global batch between the ranks by their measured speed, so that they finish
// together.
//
//   EK_ASSIGN_OR_RETURN(const std::unique_ptr<Balance> balance,
//                       Balance::Create(&comm, {.batch = 256}));
//   const auto loop = [&](JoinScope& scope) -> absl::Status {
//     for (int64_t first = 0; first < samples; first += 256) {
//       EK_ASSIGN_OR_RETURN(const Share mine,
//                           balance->Next(first, std::min<int64_t>(256, samples - first)));
//       if (mine.count == 0) break;  // A short last batch had none for this rank.
//       {
//         const PhaseScope input(comm, StepPhase::kInput);  // Unmarked time moves no samples.
//         ... load the samples mine.first, ... mine.first + mine.count - 1 ...
//       }
//       EK_RETURN_IF_ERROR(scope.AddSamples(mine.count));
//       ... the step: gradients are sums over samples ...
//     }
//     return absl::OkStatus();
//   };
//   EK_RETURN_IF_ERROR(
//       RunJoined({ddp.get(), optimizer.get()}, {.divide_by = DivideBy::kSamples}, loop));
//
// A global batch is fixed for the run, whatever the number of ranks, and every sample has the same
// weight. So the result is that of one process on the same batches, whichever rank computes a
// sample.
// Layers that use several samples of a rank are an exception: the statistics of batch norm have to
// be those of all ranks.
//
// With other divisors than DivideBy::kSamples a sample on a rank with a small share would have more
// weight than others, so Next() refuses them.
//
// The ranks' times are those of join/straggler.h, and travel with the records of the steps: no
// message and no collective is added. A record has 8 more bytes: a hash of the shares and of the
// batch's place, and the number of ranks that have a share. A difference is an error before
// gradients are reduced. Shares of a step are decided from times up to the reduction before the
// last one (join/steps/share_planner.h has the model), so they are equal on all ranks without
// waiting for one another.
//
// It helps where ranks differ in speed for at least seconds: mixed processors, shared hosts, a rank
// with more work of its own. It does not where a rank's time does not depend on its samples, or
// where the reduction takes most of the time.
//
// Accumulation: call Next() for the batch of each micro-step. The shares of all micro-steps before
//               a reduction are the same. Shares change only after steps in which all models and
//               optimizers reduce gradients: if one of several models always accumulates, they
//               remain even.
// Groups:  a Balance belongs to one group, and may be destroyed after it. After a loss of ranks,
//          make another one, which begins with even shares.
// Threads: thread-compatible: the thread that runs steps.
// Devices: times are those of the host: a slow device is not seen, and shares remain even.
// Errors:  those of Create() and Next() are named there. BeginStep() or a later call of the step
//          reports on all ranks, with their values, and the group ends: ranks differ in shares,
//          batch or place; a rank's samples are not its share; or an exhausted rank has a share.
// Source:  none that we know does this for data parallelism; asked for since 2019 (PyTorch #31553).

#ifndef EVENKEEL_JOIN_BALANCE_H_
#define EVENKEEL_JOIN_BALANCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel {

class Communicator;

// A rank's part of a global batch.
struct Share {
  int64_t first = 0;
  int64_t count = 0;  // 0: none.
};

// Shares of whole batches, by rank, that are in force from a reduction on.
struct ShareChange {
  int64_t reduction = 0;  // The number of reductions before it, since the Balance was made.
  std::vector<int64_t> shares;
  friend bool operator==(const ShareChange&, const ShareChange&) = default;
};

struct BalanceOptions {
  // Equal on all ranks:
  int64_t batch = 0;    // Samples of a whole global batch, of all ranks together.
  int64_t quantum = 0;  // Shares differ from even ones by multiples of it; 0: an eighth of those.
  // Not empty: instead of measuring, repeats the changes of another run, in their order. Shares are
  // even before the first one.
  std::vector<ShareChange> repeat;

  // This rank's limits, for which its memory counts. Defaults lie nearer to the even share where
  // there would be more than 16 sizes: if both are 0, at most 7 quanta below it and at most 8 above
  // it.
  int64_t least = 0;  // 0: the smallest size from a quantum on, or the even share if smaller.
  int64_t most = 0;   // 0: the largest size up to twice the even share.
  // Called in Next() before shares are used for the first time, beginning with the even ones. If it
  // reports an error, Next() returns it. A log of these calls has the shares of every reduced step.
  std::function<absl::Status(const ShareChange&)> on_change;
};

class Balance {
 public:
  // Collective: exchanges the options over the control plane, before or between steps. `comm` must
  // outlive all calls of the result, except that of its destructor. There is one Balance per
  // communicator at a time.
  // Errors: on all ranks, InvalidArgument: a batch below a sample for each rank or above 2^31 - 1;
  //         limits that do not contain the even share; different values where they must be equal;
  //         more than 16 sizes for a rank. FailedPrecondition: the communicator has one already.
  static absl::StatusOr<std::unique_ptr<Balance>> Create(Communicator* comm,
                                                         const BalanceOptions& options);
  ~Balance();
  Balance(const Balance&) = delete;
  Balance& operator=(const Balance&) = delete;

  // Returns this rank's part of the next step's batch, which has the samples from `first` to
  // `first + samples - 1`, at most a whole batch. Called on every active rank before each step.
  // Waits until the records of all ranks for the last step that reduced gradients are received,
  // usually not at all: a step that reduces has waited for them. A short batch is divided in
  // proportion; a rank that gets none has to end its loop. So only the last batch of a loop may be
  // short: later ones have a share for a rank that has no more input, which is an error.
  // Errors: InvalidArgument: `samples` below 1 or above a whole batch. FailedPrecondition: the
  //         steps have no agreement (JoinOptions::enable is false); they are not in RunJoined(), or
  //         have another divisor than DivideBy::kSamples; or the last share was not used.
  //         The error that has ended the group, or that of on_change.
  absl::StatusOr<Share> Next(int64_t first, int64_t samples);

  // Returns the shares of whole batches that the last Next() used, by rank.
  const std::vector<int64_t>& shares() const;
  // Returns all sizes that this rank's share of a whole batch can have, from the least one on, at
  // most 16: plan memory for the last one. A rank's part of a short batch is never larger than its
  // share.
  std::vector<int64_t> sizes() const;
  // Returns a sentence if the shares differ by a tenth or more from those of the last sentence:
  // "ranks compute 176,80 of 256 samples (128,128 before)"; else "". It lists at most
  // 16 ranks.
  std::string News();

 private:
  class Impl;
  explicit Balance(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_BALANCE_H_
