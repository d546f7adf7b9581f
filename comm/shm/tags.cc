#include "evenkeel/comm/shm/tags.h"

#include <algorithm>
#include <atomic>

#include "evenkeel/comm/shm/board.h"

namespace evenkeel::internal {
namespace {

constexpr int kSender = 0, kReceiver = 1;  // Seats.

}  // namespace

void ShmTags::Add(int64_t tag) { issued_.push_back(tag); }

std::optional<int64_t> ShmTags::Next(ShmLane& lane) {
  return lane.me == kSender ? NextToSend(lane) : NextToReceive(lane);
}

std::optional<int64_t> ShmTags::NextToSend(ShmLane& lane) {
  const ShmSeat& receiver = lane.seats[kReceiver];
  const uint64_t posted = receiver.tags_known.load(std::memory_order_acquire);
  if (known_ < posted) {
    for (; known_ < posted; ++known_)
      ++wanted_[receiver.tags[known_ % ShmSeat::kTags].load(std::memory_order_relaxed)];
    lane.seats[kSender].tags_known.store(known_, std::memory_order_release);
    lane.Notify();  // There is room for more.
  }
  const auto send = std::find_if(issued_.begin(), issued_.end(),
                                 [&](int64_t tag) { return wanted_.contains(tag); });
  if (send == issued_.end()) return std::nullopt;
  const int64_t tag = *send;
  issued_.erase(send);
  if (--wanted_[tag] == 0) wanted_.erase(tag);
  return tag;
}

std::optional<int64_t> ShmTags::NextToReceive(ShmLane& lane) {
  const ShmSeat& sender = lane.seats[kSender];
  ShmSeat& receiver = lane.seats[kReceiver];
  const uint64_t before = known_;
  const uint64_t end = sender.tags_known.load(std::memory_order_acquire) + ShmSeat::kTags;
  for (; !issued_.empty() && known_ < end; ++known_) {
    receiver.tags[known_ % ShmSeat::kTags].store(issued_.front(), std::memory_order_relaxed);
    issued_.pop_front();
  }
  if (known_ > before) {
    receiver.tags_known.store(known_, std::memory_order_release);
    lane.Notify();
  }
  if (sender.arrived.load(std::memory_order_acquire) <= lane.operations) return std::nullopt;
  return sender.headers.Of(lane.operations).what.tag;
}

}  // namespace evenkeel::internal
