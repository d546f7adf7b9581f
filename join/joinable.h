// What a part of training must be, so that RunJoined() can keep it going on ranks that have run out of inputs.
//
//   class Counter : public Joinable {
//    public:
//     explicit Counter(Communicator* comm) : Joinable(comm, "counter") {}
//     absl::Status Count() {                                       // used in each step of the loop
//       EK_RETURN_IF_ERROR(Notify().status());
//       return channel_->AllReduce(ones_, ReduceOp::kSum).Wait();
//     }
//     absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override;   // its MainHook adds zeros
//   };
//
// Ownership: the communicator outlives the Joinable; a Joinable outlives the RunJoined() it is given to.
// Threads:   thread-compatible.
// Source:    the generic Join of PyTorch (#61555), with one control record per step instead of its small all-reduces.

#ifndef EVENKEEL_JOIN_JOINABLE_H_
#define EVENKEEL_JOIN_JOINABLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"

namespace evenkeel {

struct JoinOptions {
  // False: inputs are known to be even. No records, no checks; gradients are divided by the full world size.
  bool enable = true;
  // All ranks stop at the first step that one of them has no input for: RunJoined() answers OutOfRange on every rank.
  bool throw_on_early_termination = false;
  // Divide gradients by the group's size, so that every sample weighs the same; false: by the ranks that are active.
  bool divide_by_initial_world_size = true;
  // A rank that shadows this many steps is warned about once.
  int64_t skew_warning_steps = 1000;
  // Where warnings go; null: standard error.
  std::function<void(absl::string_view)> warn;
  // Called once on a rank when it has run dry while others have not, with the number of steps that it did.
  std::function<void(int64_t steps)> on_dry;
  // For the hooks of your own Joinables; RunJoined() does not look at it.
  std::map<std::string, std::string> hook_args;
};

// What a joined rank does in place of the loop.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  // This rank's loop has ended and it is about to follow the others; an error ends the group.
  virtual absl::Status OnDry() { return absl::OkStatus(); }
  // Once in each step in which the lowest active rank called this Joinable's Notify(), in the order of those calls:
  // issue what active ranks issue. `step` tells who is active.
  virtual absl::Status MainHook(const StepAnswer& /*step*/) { return absl::OkStatus(); }
  // The lowest active rank announced `payload` in this step (StepControl::Announce): do the same.
  virtual absl::Status OnAction(const StepAnswer& /*step*/, absl::string_view /*payload*/) { return absl::OkStatus(); }
  // Once when all ranks have run dry, on all of them. `is_last_joiner`: this rank was active to the end.
  virtual absl::Status PostHook(bool /*is_last_joiner*/) { return absl::OkStatus(); }
};

// Where in a step it acts. A step ends when somebody of an earlier phase begins the next one.
enum class JoinPhase { kGradients, kDefault, kOptimizer };

// How a Joinable takes part at the moment; the default outside of RunJoined(), to which it goes back.
struct JoinConfig {
  bool enable = false;
  bool throw_on_early_termination = false;
  bool divide_by_initial_world_size = true;
  bool is_first = false;          // First of the list.
  bool has_optimizer = false;     // The list has a Joinable of phase kOptimizer.
  const void* scope = nullptr;    // The RunJoined() that it is in.
  bool* stopped_early = nullptr;  // There: whether this rank was told that all ranks stop.
};

class Joinable {
 public:
  // `kind` names it in messages: "data_parallel" becomes "data_parallel#0", equal on all ranks.
  Joinable(Communicator* comm, absl::string_view kind);
  virtual ~Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  virtual absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) = 0;
  virtual JoinPhase join_phase() const { return JoinPhase::kDefault; }
  // Where hooks that issue collectives of their own keep their tensors.
  virtual Device join_device() const { return comm_->device(); }

  Communicator& communicator() const { return *comm_; }
  const std::string& join_name() const { return name_; }
  const JoinConfig& join_config() const { return config_; }

 protected:
  // Call before this object's first collective of a step. Tells the other ranks that this one is active (the first
  // caller of a step does; the others share its ticket) and returns at once, except with throw_on_early_termination:
  // then it waits for all ranks' records and answers OutOfRange if one has run dry.
  absl::StatusOr<std::shared_ptr<StepTicket>> Notify();

 private:
  friend class JoinRun;

  Communicator* const comm_;
  const std::string name_;
  JoinConfig config_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_JOINABLE_H_
