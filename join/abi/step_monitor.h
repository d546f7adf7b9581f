// Finds the ranks that make the others wait in a training loop whose data another library moves:
// an interface of libevenkeel.so, as comm/abi/group.h is.
//
//   std::unique_ptr<StepMonitor> monitor = CreateStepMonitor(store, options, &failure);
//   monitor->Enter(Phase::kForward);
//   monitor->BeginBackward();
//   monitor->BeginWait();         // the other library waits for its last reduction
//   monitor->EndWait();
//   monitor->EndReduction();      // all ranks leave it together
//   std::string news = monitor->TakeNews();   // "rank 3 cost the group 18 % of the last ..."
//
// The ranks are connected by a control plane only. Each rank sends the times of its steps to the
// others, several steps in one message, and does not wait for theirs. join/straggler.h defines what
// is concluded from them. Ranks may be a few steps apart in what they know.
//
// Shares:  for loops whose global batches all ranks divide by their measured speed:
//   failure = monitor->BeginSharing({.batch = 64, .least = {0, 0}, .most = {0, 0}, .lag = 2});
//   failure = monitor->Divide(step, 64, &boundaries);    // for each batch, in order
//   own = monitor->LastTimes();            // in each step: the loop exchanges them, ...
//   failure = monitor->AddTimes(step - 1, times_of_all_ranks);   // ... and adds all ranks'
//          join/steps/lagged_shares.h defines them.
//
// Size:    7 to 21 bytes per step, in a message at the first reduction 250 ms or more after the
//          last one. Up to 10,000 steps of a rank are kept until the other ranks' times of them
//          arrive.
// Threads: thread-safe. BeginWait() and EndWait() are called by the thread that waits; waits of
//          the thread that calls EndReduction() are not counted as busy.
// Errors:  never those of the training loop. failure() says whether a rank was lost.

#ifndef EVENKEEL_JOIN_ABI_STEP_MONITOR_H_
#define EVENKEEL_JOIN_ABI_STEP_MONITOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/comm/abi/group.h"

namespace evenkeel::abi {

// The phases of join/steps/step_phase.h.
enum class Phase : int { kOutside, kInput, kForward, kBackward, kOptimizer, kSaving };

class StepMonitor {
 public:
  struct Straggler {
    int rank = 0;
    double cost = 0;  // The fraction of the time that it cost the group.
    Phase phase = Phase::kOutside;
  };
  struct Message {
    int from = 0;
    std::string text;
  };

  // Without Leave(): the other ranks see an abort.
  virtual ~StepMonitor() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Ends the current phase and begins `next`. Returns the phase before.
  virtual Phase Enter(Phase next) = 0;
  // Enters kBackward from kForward; else does nothing.
  virtual void BeginBackward() = 0;
  virtual void BeginWait() = 0;
  virtual void EndWait() = 0;
  virtual void EndReduction() = 0;
  // Returns the number of reductions that this rank has ended.
  virtual int64_t steps() const = 0;

  // Returns a sentence when a rank has become a straggler since the last call, else "".
  virtual std::string TakeNews() = 0;
  // The stragglers of the recent steps.
  virtual std::vector<Straggler> Stragglers() const = 0;
  // All steps, as a table with a line per rank.
  virtual std::string Table() const = 0;

  // The ranks' shares of each global batch. Zeros stand for the defaults of join/balance.h.
  struct Sharing {
    int64_t batch = 0;  // Samples of all ranks together.
    int64_t quantum = 0;
    std::vector<int64_t> least, most;  // By rank.
    // Shares of a step use the times of the steps up to this number before it: 2, and as many more
    // as there are steps for which batches are loaded in advance.
    int64_t lag = 2;
  };
  // All ranks call it after the same step, with equal values. Ends an earlier sharing.
  // Errors: kInvalidArgument: values out of range.
  virtual Failure BeginSharing(const Sharing& sharing) = 0;
  // Sets `boundaries`: in the next batch of the step, which has `samples`, rank r has those from
  // boundaries[r] up to boundaries[r + 1], which is excluded. `step` is the number of the reduction
  // that trains the batch, as steps() counts it. It never decreases, except after RestartSharing().
  // Errors: kInvalidArgument: the step is further ahead than the lag allows; or samples below 1 or
  //         above a whole batch. kFailedPrecondition: BeginSharing() was not called.
  virtual Failure Divide(int64_t step, int64_t samples, std::vector<int64_t>* boundaries) = 0;
  // Returns this rank's times of the step that ended last, kTimesPerRank numbers for AddTimes();
  // empty for its first step, which has none.
  virtual std::vector<int64_t> LastTimes() const = 0;
  // Adds a step's times, in ascending order of the steps: LastTimes() of rank 0, then of rank 1,
  // ... The loop exchanges them, so that all ranks add them before the same call of Divide().
  // Errors: kInvalidArgument: not kTimesPerRank numbers for each rank, or impossible ones.
  //         kFailedPrecondition: as Divide().
  static constexpr int kTimesPerRank = 7;
  virtual Failure AddTimes(int64_t step, const std::vector<int64_t>& times) = 0;
  // The batches of later steps are not trained, and are divided again. All ranks call it after the
  // same step.
  virtual void RestartSharing() = 0;
  // The shares of whole batches that the last Divide() used, by rank; empty without one.
  virtual std::vector<int64_t> Shares() const = 0;
  // Returns a sentence if these differ by a tenth or more from those of the last sentence, else "".
  virtual std::string TakeShareNews() = 0;

  // Sends a text to all other ranks. TakeMessages() returns those that have come, in order.
  virtual void Tell(const std::string& text) = 0;
  virtual std::vector<Message> TakeMessages() = 0;

  // kOk while all ranks are there, else the first cause of the group's end.
  virtual Failure failure() const = 0;
  // Ends the group on all ranks, with this reason.
  virtual void Abort(const std::string& why) = 0;
  // Leaves the group. Only rank 0 waits for the others to leave, for 5 seconds at most. Afterwards
  // nothing is measured or sent.
  virtual void Leave() = 0;
};

// Waits until all ranks have called it. Options::backend has no effect. Null: `failure` says why.
EVENKEEL_EXPORT std::unique_ptr<StepMonitor> CreateStepMonitor(Store& store, const Options& options,
                                                               Failure* failure);

}  // namespace evenkeel::abi

#endif  // EVENKEEL_JOIN_ABI_STEP_MONITOR_H_
