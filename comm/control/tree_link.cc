#include "evenkeel/comm/control/tree_link.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"

namespace evenkeel::internal {
namespace {

// The id of the request for the parent's address; a channel's own requests count from 0.
constexpr int64_t kWhereIsParent = -1;

std::string AddressKey(int rank) {
  return absl::StrCat("\ttree/", rank);
}  // With a tab, so no other value has this name.

}  // namespace

TreeLink::TreeLink(TreeShape shape, int rank, std::unique_ptr<ControlLink> direct,
                   std::unique_ptr<TreeEdges> edges)
    : shape_(shape),
      rank_(rank),
      parent_(shape.ParentOf(rank)),
      children_(shape.ChildrenOf(rank)),
      direct_(std::move(direct)),
      edges_(std::move(edges)),
      relay_(shape, rank) {}

void TreeLink::Start(std::function<void(ControlMessage)> receive,
                     std::function<void(absl::Status)> lost) {
  receive_ = std::move(receive);
  edges_->Start([this](int from, ControlMessage message) { OnEdge(from, std::move(message)); },
                [this](int neighbour, const absl::Status& why) { OnEdgeLost(neighbour, why); });
  direct_->Start([this](ControlMessage message) { OnDirect(std::move(message)); },
                 [this, lost = std::move(lost)](absl::Status why) {
                   absl::MutexLock lock(&deliver_);
                   lost(std::move(why));
                 });
  if (!edges_->HasAddress()) return;
  if (!children_.empty()) {
    direct_->Send({.type = ControlMessage::Type::kPut,
                   .topic = AddressKey(rank_),
                   .payload = edges_->Address()});
  }
  if (parent_ != kHub) {
    direct_->Send({.type = ControlMessage::Type::kGet,
                   .request = kWhereIsParent,
                   .topic = AddressKey(parent_)});
  }
}

void TreeLink::Stop() {
  edges_->Stop();
  direct_->Stop();
}

ControlCounters TreeLink::Counters() const { return direct_->Counters() + edges_->Counters(); }

void TreeLink::Send(ControlMessage message) {
  switch (message.type) {
    case ControlMessage::Type::kExchange: {
      {
        absl::MutexLock lock(&mutex_);
        int64_t& begun = begun_[message.topic];
        begun = std::max(begun, message.sequence + 1);
        open_.emplace(message.topic, message.sequence);
      }
      return Gather(rank_, std::move(message));
    }
    case ControlMessage::Type::kLeave:
      if (parent_ != kHub) edges_->Send({parent_}, message);
      return direct_->Send(std::move(message));
    case ControlMessage::Type::kBeat: {
      absl::MutexLock lock(&mutex_);
      for (const auto& [topic, sequence] : open_) message.parts.push_back({sequence, topic});
      break;
    }
    case ControlMessage::Type::kMissing:
      message.rank = shape_.fanout;
      break;
    default:
      break;
  }
  direct_->Send(std::move(message));
}

void TreeLink::Gather(int from, ControlMessage message) {
  absl::StatusOr<std::optional<ControlMessage>> up;
  absl::Status parent_lost;
  {
    absl::MutexLock lock(&mutex_);
    up = relay_.OnExchange(from, std::move(message));
    parent_lost = parent_lost_;
  }
  if (!up.ok()) return Fail(up.status());
  // Nor do the children's parts come where this rank's edges do not work.
  if (!parent_lost.ok() && (from == rank_ || up->has_value())) return Fail(parent_lost);
  if (!up->has_value()) return;
  if (parent_ == kHub) return direct_->Send(**std::move(up));
  edges_->Send({parent_}, **up);
}

void TreeLink::OnDirect(ControlMessage message) {
  switch (message.type) {
    case ControlMessage::Type::kExchanged:
      return PassOn(std::move(message));
    case ControlMessage::Type::kHaveCome: {
      bool has_come = false;
      {
        absl::MutexLock lock(&mutex_);
        const auto begun = begun_.find(message.topic);
        has_come = begun != begun_.end() && begun->second > message.sequence;
      }
      return direct_->Send(
          {.type = message.type, .sequence = has_come, .request = message.request});
    }
    case ControlMessage::Type::kValue:
      if (message.request == kWhereIsParent) return edges_->AttachParent(message.payload);
      break;
    default:
      break;
  }
  absl::MutexLock lock(&deliver_);
  receive_(std::move(message));
}

void TreeLink::OnEdge(int from, ControlMessage message) {
  if (from == parent_) {
    if (message.type == ControlMessage::Type::kExchanged) PassOn(std::move(message));
  } else if (message.type == ControlMessage::Type::kExchange) {
    Gather(from, std::move(message));
  } else if (message.type == ControlMessage::Type::kLeave) {
    absl::Status left;
    {
      absl::MutexLock lock(&mutex_);
      left = relay_.OnLeave(from);
    }
    if (!left.ok()) Fail(left);
  }
}

// The hub detects a child that is gone, and a living child reports the loss itself. The only loss
// that the hub cannot detect is the connection to the parent; a parent that has left is not needed
// any more.
void TreeLink::OnEdgeLost(int neighbour, const absl::Status& why) {
  if (neighbour != parent_ && neighbour != kHub) return;
  const absl::Status lost = neighbour == kHub
                                ? why
                                : absl::UnavailableError(absl::StrCat(
                                      "rank ", rank_, " has lost its connection to rank ", parent_,
                                      ", which forwards its parts of exchanges: ", why.message()));
  bool is_needed = false;
  {
    absl::MutexLock lock(&mutex_);
    parent_lost_ = lost;
    is_needed = !open_.empty();
  }
  if (is_needed) Fail(lost);
}

void TreeLink::PassOn(ControlMessage message) {
  if (!children_.empty()) edges_->Send(children_, message);
  {
    absl::MutexLock lock(&mutex_);
    open_.erase({message.topic, message.sequence});
  }
  absl::MutexLock lock(&deliver_);
  receive_(std::move(message));
}

void TreeLink::Fail(const absl::Status& why) {
  direct_->Send({.type = ControlMessage::Type::kFailed, .status = why});
}

}  // namespace evenkeel::internal
