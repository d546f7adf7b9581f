#include "evenkeel/comm/tcp/backend.h"

#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/collectives.h"
#include "evenkeel/comm/tcp/mesh.h"
#include "evenkeel/comm/tcp/transport.h"

namespace evenkeel::internal {
namespace {

// How long a broken connection or a missed deadline waits for the control plane to say what
// happened. It usually takes milliseconds.
constexpr absl::Duration kPatience = absl::Seconds(2);

}  // namespace

// One thread, and the operations that wait for it.
class TcpBackend::Lane {
 public:
  explicit Lane(TcpBackend* backend)
      : backend_(backend),
        collectives_(backend->mesh_ ? backend->mesh_->transport() : nullptr, backend->rank_,
                     backend->world_size_, backend->generation_, backend->names_),
        thread_([this] { Run(); }) {}
  // The group has ended, so nothing takes long.
  ~Lane() {
    {
      absl::MutexLock lock(&mutex_);
      is_closing_ = true;
    }
    thread_.join();
  }

  void Push(Operation operation, std::shared_ptr<WorkState> work) {
    absl::MutexLock lock(&mutex_);
    queue_.push_back({std::move(operation), std::move(work)});
  }

 private:
  struct Entry {
    Operation operation;
    std::shared_ptr<WorkState> work;
  };

  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_closing_ || !queue_.empty();
  }

  void Run() {
    while (true) {
      Entry entry;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &Lane::HasNews));
        if (queue_.empty()) return;
        entry = std::move(queue_.front());
        queue_.pop_front();
      }
      entry.work->Finish(Execute(entry.operation));
    }
  }

  absl::Status Execute(const Operation& operation) {
    EK_RETURN_IF_ERROR(backend_->Enter());
    const absl::Status status = collectives_.Run(operation);
    backend_->Leave();
    if (status.ok()) return status;
    const bool is_late = absl::Now() >= operation.deadline &&
                         (absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status));
    const absl::Status seen = backend_->names_.AtOperation(
        is_late ? absl::DeadlineExceededError("the operation missed its deadline") : status,
        backend_->rank_, operation.sequence, operation.what);
    // A deadline or a broken connection has a cause that others may know better, who are about to
    // tell it.
    return backend_->FirstCause(
        seen, is_late || absl::IsUnavailable(status) ? kPatience : absl::ZeroDuration());
  }

  TcpBackend* const backend_;
  TcpCollectives collectives_;
  absl::Mutex mutex_;
  std::deque<Entry> queue_ ABSL_GUARDED_BY(mutex_);
  bool is_closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

TcpBackend::TcpBackend(int rank, int world_size, std::string group, const RankNames& names,
                       WarnFunction warn)
    : rank_(rank),
      world_size_(world_size),
      group_(std::move(group)),
      names_(names),
      warn_(std::move(warn)),
      generation_(StableHash(0, group_)) {}

TcpBackend::~TcpBackend() {
  Abort(absl::CancelledError("the communicator is gone"));
  std::map<LaneKey, std::unique_ptr<Lane>> lanes;
  {
    absl::MutexLock lock(&mutex_);
    lanes.swap(lanes_);
  }
  lanes.clear();
  mesh_ = nullptr;  // Its thread calls SetEnded().
}

absl::StatusOr<std::string> TcpBackend::Listen(
    const std::string& bind_address, std::string key,
    std::function<void(const absl::Status& why)> on_lost) {
  const auto end = [this, on_lost = std::move(on_lost)](const absl::Status& why) {
    SetEnded(why);
    on_lost(why);
  };
  EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpMesh> mesh,
                      TcpMesh::Create(rank_, {group_, world_size_, std::move(key), names_},
                                      bind_address, {.warn = warn_, .on_lost = end}));
  const std::string address = mesh->address();
  absl::MutexLock lock(&mutex_);
  mesh_ = std::move(mesh);
  return address;
}

absl::Status TcpBackend::Connect(const std::vector<std::string>& addresses,
                                 absl::Duration timeout) {
  EK_RETURN_IF_ERROR(Enter());
  absl::Status status = mesh_->Connect(addresses, absl::Now() + timeout);
  Leave();
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    return ended_;
  }
  // Who has not come may be lost, and the control plane knows why.
  return FirstCause(
      Annotate(status, absl::StrCat("rank ", names_[rank_], " could not connect to all others")),
      absl::IsPermissionDenied(status) ? absl::ZeroDuration() : kPatience);
}

absl::Status TcpBackend::Supports(const Collective& what) const {
  if (Reduces(what.kind)) {
    return CheckReducible(what.op, what.dtype);
  }
  return absl::OkStatus();
}

void TcpBackend::Start(Operation operation, std::shared_ptr<WorkState> work) {
  LaneKey key(operation.channel, CollectiveKind::kBarrier, -1);
  if (IsPair(operation.what.kind))
    key = {operation.channel, operation.what.kind, operation.what.root};
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<Lane>& lane = lanes_[key];
  if (lane == nullptr) lane = std::make_unique<Lane>(this);
  lane->Push(std::move(operation), std::move(work));
}

void TcpBackend::Abort(const absl::Status& why) {
  const auto nobody_inside = [this]()
                                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return inside_ == 0; };
  TcpMesh* mesh = nullptr;
  SetEnded(why);
  {
    absl::MutexLock lock(&mutex_);
    mesh = mesh_.get();
  }
  if (mesh != nullptr) mesh->Abort(why);
  // Who computes at the moment runs into it with the next call.
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&nobody_inside));
}

absl::Status TcpBackend::Enter() {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) ++inside_;
  return ended_;
}

void TcpBackend::Leave() {
  absl::MutexLock lock(&mutex_);
  --inside_;
}

void TcpBackend::SetEnded(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) ended_ = why;
}

absl::Status TcpBackend::FirstCause(const absl::Status& seen, absl::Duration patience) {
  const auto has_ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !ended_.ok(); };
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&has_ended), patience) ? ended_ : seen;
}

}  // namespace evenkeel::internal
