// The order of the messages with tags from one rank to another, which share a lane.
//
//   tags.Add(operation.what.tag);                        // when a send, or a receive, is issued
//   const std::optional<int64_t> tag = tags.Next(lane);  // when the lane is free
//   if (tag.has_value()) ... the oldest call with that tag comes next ...
//
// The receiver posts the tags of its receives in its seat, and the sender begins a message only
// when its receive is posted. The receiver joins the message that the sender has begun. So no
// message waits for one with another tag, however many there are. What does not fit into the seat
// is posted later, when the sender has read it; the sender reads whenever it has messages.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_SHM_TAGS_H_
#define EVENKEEL_COMM_SHM_TAGS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "evenkeel/comm/shm/lane.h"

namespace evenkeel::internal {

class ShmTags {
 public:
  // A call with that tag was issued. The first one of each tag meets the other side's first one.
  void Add(int64_t tag);
  // Returns the tag of the message that comes next, which the caller begins; empty: none can yet.
  std::optional<int64_t> Next(ShmLane& lane);

 private:
  std::optional<int64_t> NextToSend(ShmLane& lane);
  std::optional<int64_t> NextToReceive(ShmLane& lane);

  std::deque<int64_t> issued_;     // In order: sends that have not begun, receives not posted yet.
  std::map<int64_t, int> wanted_;  // By the sender: posted receives by tag.
  uint64_t known_ = 0;             // The tags that this side has read, or posted.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_TAGS_H_
