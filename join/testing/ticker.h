// For tests: something that has steps and does nothing in them.
//
//   Ticker ticker(&comm);
//   RunJoined({&ticker}, {}, [&](JoinScope& scope) { ...; return ticker.Tick(); });

#ifndef EVENKEEL_JOIN_TESTING_TICKER_H_
#define EVENKEEL_JOIN_TESTING_TICKER_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel::internal {

class Ticker : public Joinable {
 public:
  // `waits`: each step until all ranks have begun it, as one that reduces gradients does.
  explicit Ticker(Communicator* comm, bool waits = false)
      : Joinable(comm, "ticker"), waits_(waits) {}
  absl::Status Tick() {
    EK_ASSIGN_OR_RETURN(const std::shared_ptr<StepTicket> ticket, Notify());
    return waits_ ? ticket->Wait().status() : absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }

 private:
  const bool waits_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_JOIN_TESTING_TICKER_H_
