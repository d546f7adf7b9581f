#include "evenkeel/comm/tcp/messages.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

using Kind = MessageHeader::Kind;

template <typename Container>
auto TakeFrom(Container& container, typename Container::iterator at) {
  auto taken = std::move(*at);
  container.erase(at);
  return taken;
}

void FailOperation(OperationState* operation, const absl::Status& why) {
  if (operation == nullptr) return;
  if (operation->error.ok()) operation->error = why;
  operation->Notify();
}

void Finish(OperationState* operation) {
  if (operation == nullptr) return;
  operation->is_done = true;
  operation->Notify();
}

void ForgetOperation(PostedReceive& receive, OperationState* operation) {
  if (receive.operation != operation) return;
  receive.operation = nullptr;
  receive.data = nullptr;
}

}  // namespace

void MessageTable::Write(int to, Kind kind, uint64_t slot, uint64_t value) {
  peers_[to].outgoing.push_back({.header = MessageHeader{kind, slot, value}.Serialize()});
}

void MessageTable::Send(OperationState* operation, int to, uint64_t slot, const char* data,
                        size_t bytes) {
  Peer& peer = peers_[to];
  Flow& flow = peer.flows[slot];
  const auto write = [&](Kind kind, int64_t small) {
    peer.outgoing.push_back({.header = MessageHeader{kind, slot, bytes}.Serialize(),
                             .data = data,
                             .bytes = bytes,
                             .operation = operation,
                             .small = small});
  };
  if (bytes <= kMaxSmall && peer.credit >= CostOf(bytes) && flow.waiting.empty()) {
    peer.credit -= CostOf(bytes);
    flow.untaken.push_back({operation, data, bytes, ++peer.small_sent});
    return write(Kind::kSmall, peer.small_sent);
  }
  if (flow.asked_here > 0) {
    --flow.asked_here;
    write(Kind::kDirect, 0);
    return Drop(to, slot);
  }
  Write(to, Kind::kAnnounce, slot, bytes);
  flow.waiting.push_back({operation, data, bytes});
}

absl::Status MessageTable::Receive(PostedReceive receive) {
  auto owner = std::make_unique<PostedReceive>(std::move(receive));
  Peer& peer = peers_[owner->from];
  Flow& flow = peer.flows[owner->slot];
  if (flow.arrivals.empty()) {
    if (owner->bytes > kMaxSmall) Ask(flow, owner->from, owner->slot);
    flow.posted.push_back(std::move(owner));
    return absl::OkStatus();
  }
  const Arrival arrival = TakeFrom(flow.arrivals, flow.arrivals.begin());
  EK_RETURN_IF_ERROR(CheckSize(*owner, arrival.bytes));
  if (arrival.is_announced) {
    Expect(flow, std::move(owner));
    return absl::OkStatus();
  }
  if (arrival.bytes > 0) std::memcpy(owner->data, arrival.data.get(), arrival.bytes);
  peer.held -= CostOf(arrival.bytes);
  Write(owner->from, Kind::kTaken, owner->slot, 0);
  FinishReceive(*owner);
  Drop(owner->from, owner->slot);
  return absl::OkStatus();
}

absl::Status MessageTable::OnSmall(int from, uint64_t slot, absl::string_view bytes) {
  Peer& peer = peers_[from];
  Flow& flow = peer.flows[slot];
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<PostedReceive> receive, Match(flow, bytes.size()));
  if (receive != nullptr) {
    if (receive->operation != nullptr && !bytes.empty())
      std::memcpy(receive->data, bytes.data(), bytes.size());
    Write(from, Kind::kTaken, slot, 0);
    FinishReceive(*receive);
    Drop(from, slot);
    return absl::OkStatus();
  }
  peer.held += CostOf(bytes.size());
  if (peer.held > kSmallBudget) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", names_[from], " sent rank ", names_[rank_],
                     " more unrequested data than the limit of ", kSmallBudget, " bytes"));
  }
  Arrival& arrival = flow.arrivals.emplace_back(Arrival{.bytes = bytes.size()});
  if (bytes.empty()) return absl::OkStatus();
  arrival.data = std::make_unique_for_overwrite<char[]>(bytes.size());
  std::memcpy(arrival.data.get(), bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::Status MessageTable::OnHeader(int from, const MessageHeader& header) {
  Peer& peer = peers_[from];
  if (header.kind == Kind::kTaken) {
    const auto found = peer.flows.find(header.slot);
    if (found == peer.flows.end() || found->second.untaken.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", names_[from], " took a message that rank ", names_[rank_], " did not send"));
    }
    const WaitingSend send = TakeFrom(found->second.untaken, found->second.untaken.begin());
    peer.credit += CostOf(send.bytes);
    Drop(from, header.slot);
    if (send.small <= peer.small_written) {
      Finish(send.operation);
      return absl::OkStatus();
    }
    // Its answer was faster than the call that writes it: the send ends with the call, as those of
    // large ones do.
    for (OutgoingMessage& message : peer.outgoing) {
      if (message.small == send.small) message.small = 0;
    }
    return absl::OkStatus();
  }
  Flow& flow = peer.flows[header.slot];
  if (header.kind == Kind::kAsk) {
    if (flow.waiting.empty()) {
      ++flow.asked_here;
      return absl::OkStatus();
    }
    const WaitingSend send = TakeFrom(flow.waiting, flow.waiting.begin());
    peer.outgoing.push_back(
        {.header = MessageHeader{Kind::kBody, header.slot, send.bytes}.Serialize(),
         .data = send.data,
         .bytes = send.bytes,
         .operation = send.operation});
    Drop(from, header.slot);
    return absl::OkStatus();
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<PostedReceive> receive, Match(flow, header.bytes));
  if (receive == nullptr) {
    flow.arrivals.push_back(Arrival{.bytes = header.bytes, .is_announced = true});
  } else {
    Expect(flow, std::move(receive));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PostedReceive>> MessageTable::OnBody(int from,
                                                                    const MessageHeader& header) {
  Peer& peer = peers_[from];
  const auto found = peer.flows.find(header.slot);
  std::unique_ptr<PostedReceive> receive;
  if (found != peer.flows.end() && found->second.asked_there > 0) {
    Flow& flow = found->second;
    if (header.kind == Kind::kDirect) {
      EK_ASSIGN_OR_RETURN(receive, Match(flow, header.bytes));
    } else if (!flow.expected.empty()) {
      receive = TakeFrom(flow.expected, flow.expected.begin());
      EK_RETURN_IF_ERROR(CheckSize(*receive, header.bytes));
    }
    if (receive != nullptr) {
      --flow.asked_there;
      Drop(from, header.slot);
      return receive;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("rank ", names_[from], " sent ", header.bytes,
                                                 " bytes that rank ", names_[rank_],
                                                 " did not ask for"));
}

void MessageTable::FinishReceive(const PostedReceive& receive) { Finish(receive.operation); }

void MessageTable::FinishWrite(int to) {
  Peer& peer = peers_[to];
  const OutgoingMessage& written = peer.outgoing.front();
  if (written.small == 0) {
    Finish(written.operation);
  } else {
    peer.small_written = written.small;
  }
  peer.outgoing.pop_front();
}

void MessageTable::Fail(int peer, const absl::Status& why) {
  for (auto& [id, flow] : peers_[peer].flows) {
    for (const WaitingSend& send : flow.waiting) FailOperation(send.operation, why);
    for (const WaitingSend& send : flow.untaken) FailOperation(send.operation, why);
    for (const auto& receive : flow.expected) FailOperation(receive->operation, why);
    for (const auto& receive : flow.posted) FailOperation(receive->operation, why);
  }
}

void MessageTable::FailOutgoing(int peer, const absl::Status& why) {
  for (const OutgoingMessage& message : peers_[peer].outgoing)
    FailOperation(message.operation, why);
}

std::vector<int> MessageTable::Forget(OperationState* operation) {
  std::vector<int> cheated;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    bool is_cheated = false;
    for (auto& [id, flow] : peer.flows) {
      for (const auto& receive : flow.expected) ForgetOperation(*receive, operation);
      for (const auto& receive : flow.posted) ForgetOperation(*receive, operation);
      for (WaitingSend& send : flow.untaken) {
        if (send.operation == operation) send.operation = nullptr;
      }
      const auto end =
          std::remove_if(flow.waiting.begin(), flow.waiting.end(),
                         [&](const WaitingSend& send) { return send.operation == operation; });
      is_cheated |= end != flow.waiting.end();
      flow.waiting.erase(end, flow.waiting.end());
    }
    const auto end = std::remove_if(
        peer.outgoing.begin(), peer.outgoing.end(),
        [&](const OutgoingMessage& message) { return message.operation == operation; });
    is_cheated |= end != peer.outgoing.end();
    peer.outgoing.erase(end, peer.outgoing.end());
    if (is_cheated) cheated.push_back(static_cast<int>(i));
  }
  return cheated;
}

void MessageTable::Ask(Flow& flow, int from, uint64_t slot) {
  ++flow.asked_there;
  Write(from, Kind::kAsk, slot, 0);
}

void MessageTable::Drop(int peer, uint64_t slot) {
  auto& flows = peers_[peer].flows;
  if (const auto found = flows.find(slot); found != flows.end() && found->second.IsEmpty())
    flows.erase(found);
}

absl::StatusOr<std::unique_ptr<PostedReceive>> MessageTable::Match(Flow& flow, size_t bytes) {
  if (flow.posted.empty()) return nullptr;
  EK_RETURN_IF_ERROR(CheckSize(*flow.posted.front(), bytes));
  return TakeFrom(flow.posted, flow.posted.begin());
}

absl::Status MessageTable::CheckSize(const PostedReceive& receive, size_t bytes) const {
  if (receive.bytes == bytes) return absl::OkStatus();
  const int sender = names_[receive.from], receiver = names_[rank_];
  return WithFailureInfo(absl::FailedPreconditionError(absl::StrCat(
                             "rank ", sender, " sent ", bytes, " bytes where rank ", receiver,
                             " expects ", receive.bytes, ": the ranks disagree")),
                         {.kind = FailureKind::kDisagreement,
                          .ranks = {std::min(sender, receiver), std::max(sender, receiver)}});
}

void MessageTable::Expect(Flow& flow, std::unique_ptr<PostedReceive> receive) {
  const int from = receive->from;
  const uint64_t slot = receive->slot;
  flow.expected.push_back(std::move(receive));
  if (flow.asked_there < static_cast<int>(flow.expected.size())) Ask(flow, from, slot);
}

}  // namespace evenkeel::internal
