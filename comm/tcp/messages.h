// Matches the messages of one rank's transport with its receives, without sockets and threads.
//
//   messages.Send(&send, /*to=*/1, slot, data, bytes);  // bytes to write: outgoing(1)
//   messages.Receive({.operation = &receive, .from = 1, .slot = slot, .data = place,
//                     .bytes = bytes});
//   ... headers that were received from rank 1: OnSmall(), OnHeader(), OnBody() ...
//
// Small messages are written at once, and the receiver keeps them until a receive meets them,
// within a budget for each peer. Larger ones, and small ones beyond the budget, are written when
// the receiver has asked for them. A receive of a larger message asks for it at once, without
// waiting for the announcement. So each message in flight has a place, and no slot can block
// another one on the same connection.
//
// A send does not end before it has met its receive: a message without a receive is never done.
//
// Order:   the messages of a slot and a peer meet the receives in the order of both, and end in
//          that order.
// Threads: thread-compatible.
// Errors:  a violation by a peer returns a status that names the peer: FailedPrecondition for a
//          message whose size differs from that of its receive, InvalidArgument for a breach of the
//          protocol. Only Forget() may be called after that.

#ifndef EVENKEEL_COMM_TCP_MESSAGES_H_
#define EVENKEEL_COMM_TCP_MESSAGES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/tcp/wire.h"

namespace evenkeel::internal {

// The state of one send or receive, for which its owner waits.
struct OperationState {
  void Notify() {
    changed.SignalAll();
    if (on_end != nullptr) on_end();
  }

  bool is_done = false;
  absl::Status error;  // Not OK: the operation will never be done.
  absl::CondVar changed;
  std::function<void()> on_end;  // May be null.
};

// Something to be written to a peer. `data` is the memory of the operation's owner.
struct OutgoingMessage {
  std::array<char, MessageHeader::kSize> header;
  const char* data = nullptr;
  size_t bytes = 0;
  OperationState* operation = nullptr;  // Null: a header alone, for which no operation waits.
  int64_t small =
      0;  // Not 0: the number of a small message, which has to be taken before the send ends.
};

// A place for a message.
struct PostedReceive {
  OperationState* operation = nullptr;  // Null: its owner is gone; the message is dropped.
  int from = -1;
  uint64_t slot = 0;
  char* data = nullptr;
  size_t bytes = 0;
};

class MessageTable {
 public:
  MessageTable(int rank, int world_size, RankNames names)
      : rank_(rank), names_(std::move(names)), peers_(world_size) {}

  // This rank's operations. The operation must live until it has ended, or Forget().
  void Send(OperationState* operation, int to, uint64_t slot, const char* data, size_t bytes);
  absl::Status Receive(PostedReceive receive);

  // A received part of a message. A small message is received as a whole.
  absl::Status OnSmall(int from, uint64_t slot, absl::string_view bytes);
  // kTaken, kAnnounce, kAsk.
  absl::Status OnHeader(int from, const MessageHeader& header);
  // kBody, kDirect: returns the receive to which the bytes belong, for FinishReceive().
  absl::StatusOr<std::unique_ptr<PostedReceive>> OnBody(int from, const MessageHeader& header);

  // A body is in its place.
  static void FinishReceive(const PostedReceive& receive);
  // The oldest outgoing message is written.
  void FinishWrite(int to);

  // Returns the messages to be written to that peer, in this order. Its elements stay where they
  // are while others are added.
  std::deque<OutgoingMessage>& outgoing(int to) { return peers_[to].outgoing; }

  // Fail() ends the operations with that peer with the error `why`, except for messages whose bytes
  // are being written, which may still be done; FailOutgoing() ends those.
  void Fail(int peer, const absl::Status& why);
  void FailOutgoing(int peer, const absl::Status& why);
  // Removes the operation. Returns the peers that still wait for a message of it.
  std::vector<int> Forget(OperationState* operation);

 private:
  struct WaitingSend {
    OperationState* operation = nullptr;
    const char* data = nullptr;
    size_t bytes = 0;
    int64_t small = 0;
  };
  // A message that no receive has met yet.
  struct Arrival {
    size_t bytes = 0;
    std::unique_ptr<char[]> data;  // Null if it was only announced.
    bool is_announced = false;
  };
  // The messages in flight with one peer on one slot.
  struct Flow {
    absl::InlinedVector<WaitingSend, 1> waiting;  // Announced, not asked for yet.
    absl::InlinedVector<WaitingSend, 1>
        untaken;         // Small, not taken yet; the operation is null if it is gone.
    int asked_here = 0;  // Asked for by the peer, not sent yet. Then nothing is waiting.
    absl::InlinedVector<std::unique_ptr<PostedReceive>, 1>
        expected;         // Announced by the peer, still to come.
    int asked_there = 0;  // Asked for, and has not come.
    absl::InlinedVector<std::unique_ptr<PostedReceive>, 1> posted;  // Have met no message yet.
    absl::InlinedVector<Arrival, 1> arrivals;

    bool IsEmpty() const {
      return waiting.empty() && untaken.empty() && asked_here == 0 && expected.empty() &&
             asked_there == 0 && posted.empty() && arrivals.empty();
    }
  };
  struct Peer {
    std::map<uint64_t, Flow> flows;  // Ordered, so that all runs fail its operations in one order.
    std::deque<OutgoingMessage> outgoing;
    int64_t credit = kSmallBudget;  // The budget left for small messages to the peer.
    int64_t held = 0;               // The budget used here by the peer's small messages.
    int64_t small_sent = 0;         // The number of the last small message,
    int64_t small_written = 0;      // and of the last one that is written.
  };

  void Write(int to, MessageHeader::Kind kind, uint64_t slot, uint64_t value);
  void Ask(Flow& flow, int from, uint64_t slot);
  void Drop(int peer, uint64_t slot);  // The flow, if nothing is under way any more.
  // Removes the receive that the next message meets from the flow, and returns it; null if there
  // is none.
  absl::StatusOr<std::unique_ptr<PostedReceive>> Match(Flow& flow, size_t bytes);
  absl::Status CheckSize(const PostedReceive& receive, size_t bytes) const;
  // Keeps the receive until its announced message comes.
  void Expect(Flow& flow, std::unique_ptr<PostedReceive> receive);

  const int rank_;
  const RankNames names_;
  std::vector<Peer> peers_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_MESSAGES_H_
