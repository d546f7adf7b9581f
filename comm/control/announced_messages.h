// The messages of one tag that other ranks have announced, and that no receive has taken yet.
//
//   AnnouncedMessages messages;
//   messages.Announce(2, 3, 1);  // rank 2 has sent 3 messages; a receive from rank 2 has taken one
//   messages.TakeFrom(2);        // another receive from rank 2 takes the second one
//   messages.TakeFirst();        // returns 2, for a receive from any rank; then std::nullopt
//
// Numbers of sends and receives only grow, so it makes no difference whether a message's
// announcement or a receive from its named rank comes first.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_CONTROL_ANNOUNCED_MESSAGES_H_
#define EVENKEEL_COMM_CONTROL_ANNOUNCED_MESSAGES_H_

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <optional>

namespace evenkeel::internal {

class AnnouncedMessages {
 public:
  // Rank `from` has sent `sends` messages so far, of which receives have taken `received` or will.
  void Announce(int from, int64_t sends, int64_t received) {
    int64_t& announced = announced_[from];
    for (int64_t i = std::max(announced, received); i < sends; ++i) untaken_.push_back(from);
    announced = std::max(announced, sends);
  }
  // Takes a message for a receive from rank `from`. If none is announced yet, the receive takes a
  // later one, which the next Announce() omits.
  void TakeFrom(int from) {
    const auto first = std::find(untaken_.begin(), untaken_.end(), from);
    if (first != untaken_.end()) untaken_.erase(first);
  }
  // Takes the message that was announced first, and returns its sender.
  std::optional<int> TakeFirst() {
    if (untaken_.empty()) return std::nullopt;
    const int from = untaken_.front();
    untaken_.pop_front();
    return from;
  }

 private:
  std::map<int, int64_t> announced_;  // Sends, by sender.
  std::list<int> untaken_;  // Senders. Tags are many, and an empty deque takes half a kilobyte.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_ANNOUNCED_MESSAGES_H_
