// Finds TCP connections that deliver nothing. The kernel retransmits for a quarter of an hour what
// the peer's kernel does not acknowledge, and reports no error meanwhile; so its counters are read.
//
//   DeliveryWatch watch;
//   const std::optional<Delivery> now = ReadDelivery(fd);  // about once a second
//   if (now.has_value() && watch.Look(*now, elapsed) == DeliveryWatch::Found::kLost) ...
//
// A peer that is slow, stopped, or in a debugger is not lost: its kernel acknowledges, or closes
// the window and answers the probes. Neither is one behind a slow link, over which some bytes
// always arrive.
//
// Units:   bytes.
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_TCP_DELIVERY_H_
#define EVENKEEL_COMM_TCP_DELIVERY_H_

#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

struct Delivery {
  bool is_due = false;        // Something that has left, or a probe, is unacknowledged.
  uint64_t acknowledged = 0;  // Since the connection was made.
  int64_t waiting = 0;        // Handed to the kernel, and not acknowledged.
};
// Empty where the system does not say.
std::optional<Delivery> ReadDelivery(const UniqueFd& fd);

struct DeliveryLimits {
  absl::Duration look = absl::Seconds(1);  // The time between two readings of the counters.
  // Without an acknowledgement, from the first look that finds one due. An outage of 8 seconds does
  // not reach the end: after it the kernel repeats at the 13th second at the latest, in a network
  // with a round trip of up to 10 ms, and at the 15th with one of 35 ms.
  absl::Duration warn = absl::Seconds(5);
  absl::Duration end = absl::Seconds(15);
};

class DeliveryWatch {
 public:
  explicit DeliveryWatch(const DeliveryLimits& limits = {}) : limits_(limits) {}

  enum class Found {
    kNothing,
    kLate,  // For longer than `warn`; once.
    kLost,  // For longer than `end`.
  };
  // `elapsed`: since the last look. What exceeds two looks does not count: this process did not
  // run.
  Found Look(const Delivery& now, absl::Duration elapsed);
  // The time since which an acknowledgement has been due.
  absl::Duration overdue() const { return overdue_; }

 private:
  const DeliveryLimits limits_;
  bool was_due_ = false;  // At the last look.
  uint64_t acknowledged_ = 0;
  absl::Duration overdue_;
  bool has_warned_ = false;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_DELIVERY_H_
