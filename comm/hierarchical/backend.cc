#include "evenkeel/comm/hierarchical/backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/worker_thread.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The parts of a channel's id in the transports: its collectives' steps are counted there on their
// own, its messages as the channel counts them.
constexpr uint64_t kSteps = 1;
constexpr uint64_t kMessages = 2;

}  // namespace

// The collectives of a channel, one after the other.
class HierarchicalBackend::Lane {
 public:
  Lane(HierarchicalBackend* backend, uint64_t channel)
      : backend_(backend),
        collectives_(*backend->map_, backend->rank_, backend->transports_,
                     StableHash(channel, kSteps),
                     [backend](const absl::Status& why) { backend->Break(why); }) {}

  absl::Status Push(Operation operation, std::shared_ptr<WorkState> work) {
    return thread_.Post([this, operation = std::move(operation), work = std::move(work)] {
      work->Finish(Execute(operation));
    });
  }

 private:
  absl::Status Execute(const Operation& operation) {
    EK_RETURN_IF_ERROR(backend_->Enter());
    const absl::Status status = collectives_.Run(operation);
    backend_->Leave();
    // A failure has ended the backend, unless it had ended before with a more precise cause.
    return status.ok() ? status : backend_->ended();
  }

  HierarchicalBackend* const backend_;
  HierarchicalCollectives collectives_;
  WorkerThread thread_;  // Last. When it goes the group has ended, so nothing takes long.
};

HierarchicalBackend::HierarchicalBackend(int rank) : rank_(rank) {}

HierarchicalBackend::~HierarchicalBackend() {
  Abort(absl::CancelledError("the communicator is gone"));
  std::map<uint64_t, std::unique_ptr<Lane>> lanes;
  {
    absl::MutexLock lock(&mutex_);
    lanes.swap(lanes_);
  }
}

absl::Status HierarchicalBackend::Compose(const HostMap& map, HierarchicalTransports transports) {
  map_.emplace(map);
  transports_ = std::move(transports);
  const int peers = static_cast<int>(map.ranks_of(map.host_of(rank_)).size());
  const bool leads = map.leader_of(map.host_of(rank_)) == rank_;
  const bool needs_inside = peers > 1 || map.hosts() == 1;
  const bool needs_between = map.hosts() > 1 && map.largest() > 1 && leads;
  if ((transports_.inside != nullptr) != needs_inside ||
      (transports_.between != nullptr) != needs_between ||
      (transports_.all != nullptr) != (map.hosts() > 1)) {
    return absl::InternalError(
        absl::StrCat("rank ", rank_, " lacks a required transport: ", map.Describe()));
  }
  absl::Status ended;
  {
    absl::MutexLock lock(&mutex_);
    is_composed_ = true;
    ended = ended_;
  }
  if (!ended.ok()) AbortTransports(ended);
  return ended;
}

Backend* HierarchicalBackend::only() const {
  if (transports_.all == nullptr) return transports_.inside.get();
  return map_->largest() == 1 ? transports_.all.get() : nullptr;
}

absl::string_view HierarchicalBackend::name() const {
  {
    absl::MutexLock lock(&mutex_);
    if (!is_composed_) return "hierarchical";
  }
  return only() != nullptr ? only()->name() : "hierarchical";
}

absl::Status HierarchicalBackend::Supports(const Collective& what) const {
  for (const Backend* backend : AllTransports()) {
    if (backend != nullptr) EK_RETURN_IF_ERROR(backend->Supports(what));
  }
  return absl::OkStatus();
}

bool HierarchicalBackend::checks_pairs() const {
  for (const Backend* backend : AllTransports()) {
    if (backend != nullptr && !backend->checks_pairs()) return false;
  }
  return true;
}

absl::StatusOr<Memory> HierarchicalBackend::Allocate(int64_t bytes) {
  Backend* const backend =
      transports_.inside != nullptr ? transports_.inside.get() : transports_.all.get();
  return backend != nullptr ? backend->Allocate(bytes) : Backend::Allocate(bytes);
}

void HierarchicalBackend::Start(Operation operation, std::shared_ptr<WorkState> work) {
  if (Backend* const backend = only(); backend != nullptr)
    return backend->Start(std::move(operation), std::move(work));
  if (!IsPair(operation.what.kind)) {
    absl::Status posted;
    {
      absl::MutexLock lock(&mutex_);
      std::unique_ptr<Lane>& lane = lanes_[operation.channel];
      if (lane == nullptr) lane = std::make_unique<Lane>(this, operation.channel);
      posted = lane->Push(std::move(operation), work);
    }
    if (!posted.ok()) work->Finish(posted);
    return;
  }
  operation.channel = StableHash(operation.channel, kMessages);
  if (map_->host_of(operation.what.root) != map_->host_of(rank_)) {
    return transports_.all->Start(std::move(operation), std::move(work));
  }
  operation.what.root = map_->place_of(operation.what.root);
  transports_.inside->Start(std::move(operation), std::move(work));
}

void HierarchicalBackend::Abort(const absl::Status& why) {
  const auto nothing_runs = [this]()
                                ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return running_ == 0; };
  Break(why);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&nothing_runs));
}

void HierarchicalBackend::Break(const absl::Status& why) {
  bool is_composed = false;
  absl::Status first;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_.ok()) ended_ = why;
    first = ended_;
    is_composed = is_composed_;
  }
  if (is_composed) AbortTransports(first);
}

void HierarchicalBackend::Flush(absl::Time deadline) {
  for (Backend* backend : AllTransports()) {
    if (backend != nullptr) backend->Flush(deadline);
  }
}

void HierarchicalBackend::AbortTransports(const absl::Status& why) {
  for (Backend* backend : AllTransports()) {
    if (backend != nullptr) backend->Abort(why);
  }
}

absl::Status HierarchicalBackend::Enter() {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) ++running_;
  return ended_;
}

void HierarchicalBackend::Leave() {
  absl::MutexLock lock(&mutex_);
  --running_;
}

absl::Status HierarchicalBackend::ended() const {
  absl::MutexLock lock(&mutex_);
  return ended_;
}

}  // namespace evenkeel::internal
