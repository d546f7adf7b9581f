// Agreement on the parameters that no rank uses in a step, before buckets are sent, so that a
// bucket with no others can be skipped: a small all-reduce on a channel of its own. Exhausted ranks
// take part, and so skip the same buckets as the others. In a group on a device the control plane
// carries it: the host needs the answer, and waits for no device.
//
//   agreement->Begin(uses, /*contributes=*/true, [](absl::Span<const uint8_t> used) { ... });
//   EK_RETURN_IF_ERROR(agreement->Wait());
//
// Threads: thread-compatible. The callback comes on the thread that ends the collective, or at
//          once; not after a failure.

#ifndef EVENKEEL_BUCKET_REDUCER_UNUSED_AGREEMENT_H_
#define EVENKEEL_BUCKET_REDUCER_UNUSED_AGREEMENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

class UnusedAgreement {
 public:
  static absl::StatusOr<std::unique_ptr<UnusedAgreement>> Create(Communicator* comm,
                                                                 absl::string_view reducer,
                                                                 int params);

  // The same reducer in another group.
  absl::Status ReplaceGroup(Communicator* comm);

  // The collective, for a schedule; none on a device.
  std::optional<Collective> what() const;
  // `uses`: by parameter, not zero where this rank has a gradient, or will have one.
  void Begin(absl::Span<const uint8_t> uses, bool contributes,
             std::function<void(absl::Span<const uint8_t>)> done);
  bool has_begun() const { return work_.has_value(); }
  // Waits for what was begun, and is ready for another step.
  absl::Status Wait();
  void Forget() { work_.reset(); }

 private:
  using Done = std::function<void(absl::Span<const uint8_t>)>;

  UnusedAgreement(std::string channel_name, int params)
      : channel_name_(std::move(channel_name)), params_(params) {}
  Collective AllReduce() const;
  Work Exchange(absl::Span<const uint8_t> uses, Done done);

  const std::string channel_name_;
  const int params_;
  Communicator* comm_ = nullptr;
  Channel* channel_ = nullptr;
  std::shared_ptr<Memory> flags_;  // Shared with a callback that is late.
  TensorView view_;
  std::optional<Work> work_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_UNUSED_AGREEMENT_H_
