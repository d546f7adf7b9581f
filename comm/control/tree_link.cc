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

void TreeLink::Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) {
  receive_ = std::move(receive);
  edges_->Start([this](int child, ToHub message) { OnChild(child, std::move(message)); },
                [this](ToRank message) { PassOn(std::move(message)); },
                [this](int neighbour, const absl::Status& why) { OnEdgeLost(neighbour, why); });
  direct_->Start([this](ToRank message) { OnDirect(std::move(message)); },
                 [this, lost = std::move(lost)](absl::Status why) {
                   absl::MutexLock lock(&deliver_);
                   lost(std::move(why));
                 });
  if (!edges_->HasAddress()) return;
  if (!children_.empty())
    direct_->Send(to_hub::Put{.key = AddressKey(rank_), .value = edges_->Address()});
  if (parent_ != kHub)
    direct_->Send(to_hub::Get{.request = kWhereIsParent, .key = AddressKey(parent_)});
}

void TreeLink::Stop() {
  edges_->Stop();
  direct_->Stop();
}

ControlCounters TreeLink::Counters() const { return direct_->Counters() + edges_->Counters(); }

void TreeLink::Send(ToHub message) {
  if (auto* part = std::get_if<to_hub::Exchange>(&message)) {
    {
      absl::MutexLock lock(&mutex_);
      int64_t& begun = begun_[part->id.topic];
      begun = std::max(begun, part->id.sequence + 1);
      open_.insert(part->id);
    }
    return Gather(rank_, std::move(*part));
  }
  if (auto* beat = std::get_if<to_hub::Beat>(&message)) {
    absl::MutexLock lock(&mutex_);
    beat->unended.assign(open_.begin(), open_.end());
  } else if (auto* question = std::get_if<to_hub::WhoIsMissing>(&message)) {
    question->fanout = shape_.fanout;
  } else if (std::holds_alternative<to_hub::Leave>(message) && parent_ != kHub) {
    edges_->SendToParent(message);
  }
  direct_->Send(std::move(message));
}

void TreeLink::Gather(int from, to_hub::Exchange part) {
  absl::StatusOr<std::optional<to_hub::Exchange>> up;
  absl::Status parent_lost;
  {
    absl::MutexLock lock(&mutex_);
    up = relay_.OnExchange(from, std::move(part));
    parent_lost = parent_lost_;
  }
  if (!up.ok()) return Fail(up.status());
  // Nor do the children's parts come where this rank's edges do not work.
  if (!parent_lost.ok() && (from == rank_ || up->has_value())) return Fail(parent_lost);
  if (!up->has_value()) return;
  if (parent_ == kHub) return direct_->Send(**std::move(up));
  edges_->SendToParent(**std::move(up));
}

void TreeLink::OnDirect(ToRank message) {
  if (std::holds_alternative<to_rank::Exchanged>(message)) return PassOn(std::move(message));
  if (const auto* poll = std::get_if<to_rank::Poll>(&message)) return Reply(*poll);
  const auto* value = std::get_if<to_rank::Value>(&message);
  if (value != nullptr && value->request == kWhereIsParent)
    return edges_->AttachParent(value->value);
  absl::MutexLock lock(&deliver_);
  receive_(std::move(message));
}

void TreeLink::Reply(const to_rank::Poll& poll) {
  bool has_begun = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto begun = begun_.find(poll.id.topic);
    has_begun = begun != begun_.end() && begun->second > poll.id.sequence;
  }
  direct_->Send(to_hub::PollReply{.number = poll.number, .has_begun = has_begun});
}

void TreeLink::OnChild(int child, ToHub message) {
  if (auto* part = std::get_if<to_hub::Exchange>(&message)) return Gather(child, std::move(*part));
  if (!std::holds_alternative<to_hub::Leave>(message)) return;
  absl::Status left;
  {
    absl::MutexLock lock(&mutex_);
    left = relay_.OnLeave(child);
  }
  if (!left.ok()) Fail(left);
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

void TreeLink::PassOn(ToRank message) {
  const auto* result = std::get_if<to_rank::Exchanged>(&message);
  if (result == nullptr) return;
  if (!children_.empty()) edges_->SendToChildren(children_, message);
  {
    absl::MutexLock lock(&mutex_);
    open_.erase(result->id);
  }
  absl::MutexLock lock(&deliver_);
  receive_(std::move(message));
}

void TreeLink::Fail(const absl::Status& why) { direct_->Send(to_hub::Failed{.why = why}); }

}  // namespace evenkeel::internal
