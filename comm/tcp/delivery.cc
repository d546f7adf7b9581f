#include "evenkeel/comm/tcp/delivery.h"

#include <linux/sockios.h>
#include <linux/tcp.h>  // <netinet/tcp.h> lacks the newer counters.
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace evenkeel::internal {

std::optional<Delivery> ReadDelivery(const UniqueFd& fd) {
  tcp_info info = {};
  socklen_t size = sizeof(info);
  constexpr size_t kNeeded = offsetof(tcp_info, tcpi_bytes_acked) + sizeof(info.tcpi_bytes_acked);
  if (getsockopt(fd.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || size < kNeeded)
    return std::nullopt;
  int waiting = 0;
  if (ioctl(fd.get(), SIOCOUTQ, &waiting) != 0) return std::nullopt;
  return Delivery{.is_due = info.tcpi_unacked > 0 || info.tcpi_probes > 0,
                  .acknowledged = info.tcpi_bytes_acked,
                  .waiting = waiting};
}

DeliveryWatch::Found DeliveryWatch::Look(const Delivery& now, absl::Duration elapsed) {
  const bool was_due =
      std::exchange(was_due_, now.is_due);  // The time since which it was due is unknown.
  if (!was_due || !now.is_due || now.acknowledged != acknowledged_) {
    acknowledged_ = now.acknowledged;
    overdue_ = absl::ZeroDuration();
    has_warned_ = false;
    return Found::kNothing;
  }
  overdue_ += std::min(elapsed, 2 * limits_.look);
  if (overdue_ >= limits_.end) return Found::kLost;
  if (has_warned_ || overdue_ < limits_.warn) return Found::kNothing;
  has_warned_ = true;
  return Found::kLate;
}

}  // namespace evenkeel::internal
