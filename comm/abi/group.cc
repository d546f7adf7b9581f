#include "evenkeel/comm/abi/group.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/abi/connect.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/names.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/rendezvous/rendezvous.h"
#include "evenkeel/comm/rendezvous/store.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/version.h"

namespace evenkeel::abi {

Failure FailureOf(const absl::Status& status) {
  Failure failure{.code = static_cast<Code>(status.code()),
                  .message = std::string(status.message())};
  if (const std::optional<FailureInfo> info = FailureInfoOf(status); info.has_value()) {
    failure.kind = std::string(ToString(info->kind));
    failure.ranks = info->ranks;
    failure.operation = info->operation;
    failure.position = info->position;
  }
  return failure;
}

namespace {

absl::Duration ToAbsl(std::chrono::milliseconds time) { return absl::Milliseconds(time.count()); }

// The works in flight, for which Leave() waits. Without a callback per work: a thread that waits
// for one would have to leave its end to another thread.
class Flight {
 public:
  void Add(const evenkeel::Work& work) {
    if (work.IsDone()) return;
    absl::MutexLock lock(&mutex_);
    if (works_.size() >= forget_at_) {
      Forget();
      forget_at_ = std::max<size_t>(kFew, 2 * works_.size());
    }
    works_.push_back(work);
  }
  // Returns the number of works that are still in flight at the timeout.
  size_t AwaitNone(absl::Duration timeout) {
    const absl::Time deadline = SteadyNow() + timeout;
    while (true) {
      evenkeel::Work next;
      {
        absl::MutexLock lock(&mutex_);
        Forget();
        if (works_.empty() || SteadyNow() >= deadline) return works_.size();
        next = works_.back();
      }
      next.AwaitDone(deadline);
    }
  }

 private:
  static constexpr size_t kFew = 64;
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::erase_if(works_, [](const evenkeel::Work& work) { return work.IsDone(); });
  }

  absl::Mutex mutex_;
  std::vector<evenkeel::Work> works_ ABSL_GUARDED_BY(mutex_);
  size_t forget_at_ ABSL_GUARDED_BY(mutex_) = kFew;
};

class WorkOfGroup final : public Work {
 public:
  // `refused_at`: where the call would have been, if the group had ended before.
  WorkOfGroup(evenkeel::Work work, std::shared_ptr<internal::Waits> waits, FailureInfo refused_at)
      : work_(std::move(work)), waits_(std::move(waits)), refused_at_(std::move(refused_at)) {}

  bool IsDone() const override { return work_.IsDone(); }
  bool Wait() override { return work_.Wait().ok(); }
  Failure failure() const override {
    Failure failure = FailureOf(work_.Wait());
    if (!failure.kind.empty() && failure.operation.empty()) {
      failure.operation = refused_at_.operation;
      failure.position = refused_at_.position;
    }
    return failure;
  }
  void OnDone(std::function<void(std::shared_ptr<void>)> callback) override {
    work_.OnDone([callback = std::move(callback), waits = waits_](const absl::Status&) {
      callback(std::make_shared<internal::Waits::Callbacks>(waits));
    });
  }

 private:
  const evenkeel::Work work_;
  const std::shared_ptr<internal::Waits> waits_;
  const FailureInfo refused_at_;
};

std::vector<TensorView> Views(const std::vector<Buffer>& buffers) {
  std::vector<TensorView> views;
  for (const Buffer& buffer : buffers) views.emplace_back(buffer.data, buffer.count, buffer.dtype);
  return views;
}

constexpr absl::string_view kKindNames[] = {"all_reduce", "reduce",         "broadcast",
                                            "all_gather", "reduce_scatter", "all_to_all",
                                            "barrier",    "send",           "recv"};

bool SameCounts(const std::vector<TensorView>& views) {
  for (const TensorView& view : views)
    if (view.count != views.front().count) return false;
  return true;
}

class GroupOverCommunicator final : public Group {
 public:
  explicit GroupOverCommunicator(std::unique_ptr<Communicator> comm)
      : rank_(comm->rank()),
        world_size_(comm->world_size()),
        backend_(comm->backend_name()),
        left_(absl::FailedPreconditionError(
            absl::StrCat("rank ", rank_, " has left the group ", comm->group()))),
        comm_(std::move(comm)) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string backend() const override { return backend_; }

  std::shared_ptr<Work> Issue(const Call& call) override {
    const std::shared_ptr<Communicator> comm = Comm();
    if (comm == nullptr)
      return std::make_shared<WorkOfGroup>(evenkeel::Work(left_), nullptr, FailureInfo());
    FailureInfo at;
    if (!comm->status().ok())
      at = {.operation = std::string(internal::NameIn(kKindNames, call.kind, "")),
            .position = comm->user().position()};
    evenkeel::Work work = Start(*comm, call);
    if (call.kind != Kind::kRecv) flight_.Add(work);
    return std::make_shared<WorkOfGroup>(std::move(work), comm->control().waits(), std::move(at));
  }

  Failure MonitoredBarrier(std::chrono::milliseconds timeout) override {
    const std::shared_ptr<Communicator> comm = Comm();
    return FailureOf(comm == nullptr ? left_ : comm->MonitoredBarrier(ToAbsl(timeout)));
  }

  std::shared_ptr<void> Allocate(int64_t bytes) override {
    const std::shared_ptr<Communicator> comm = Comm();
    if (comm == nullptr) return nullptr;
    absl::StatusOr<Memory> memory = comm->Allocate(bytes);
    return memory.ok() ? memory->data : nullptr;
  }

  Failure failure() const override {
    const std::shared_ptr<Communicator> comm = Comm();
    return FailureOf(comm == nullptr ? left_ : comm->status());
  }

  void Abort(const std::string& why) override {
    const std::shared_ptr<Communicator> comm = Comm();
    if (comm != nullptr) comm->Abort(absl::CancelledError(why));
  }

  Failure Leave(std::chrono::milliseconds timeout) override {
    const size_t works = flight_.AwaitNone(ToAbsl(timeout));
    std::shared_ptr<Communicator> comm;
    {
      absl::MutexLock lock(&mutex_);
      comm.swap(comm_);
    }
    if (comm == nullptr) return FailureOf(left_);
    if (works == 0) return FailureOf(comm->Leave());
    const absl::Status late = absl::DeadlineExceededError(
        absl::StrCat("rank ", rank_, " leaves the group ", comm->group(), " with ", works,
                     " operations in flight after ", absl::FormatDuration(ToAbsl(timeout))));
    comm->Abort(late);
    return FailureOf(late);
  }

  std::string FlightJson() const override {
    const std::shared_ptr<Communicator> comm = Comm();
    return comm == nullptr ? "" : comm->FlightJson();
  }

 private:
  // Null once this rank has left. The last user destroys it: on the rank that hosts the group's hub
  // this waits, for seconds at most, for the others.
  std::shared_ptr<Communicator> Comm() const {
    absl::MutexLock lock(&mutex_);
    return comm_;
  }

  static evenkeel::Work Start(Communicator& comm, const Call& call) {
    const CallOptions options{.timeout = ToAbsl(call.timeout), .tag = call.tag};
    Channel& channel = comm.user();
    const std::vector<TensorView> in = Views(call.in), out = Views(call.out);
    const auto fits = [&](size_t ins, size_t outs) {
      return in.size() == ins && out.size() == outs;
    };
    const size_t world = comm.world_size();
    switch (call.kind) {
      case Kind::kAllReduce:
        if (!out.empty()) return channel.AllReduce(out, call.op, options);
        break;
      case Kind::kReduce:
        if (fits(0, 1)) return channel.Reduce(out[0], call.op, call.root, options);
        break;
      case Kind::kBroadcast:
        if (!out.empty()) return channel.Broadcast(out, call.root, options);
        break;
      case Kind::kAllGather:
        if (fits(1, 1)) return channel.AllGather(in[0], out[0], options);
        // All ranks have the same sizes here, so they choose alike.
        if (fits(1, world) && SameCounts(out))
          return Whole(channel, CollectiveKind::kAllGather, in, out, out[0], options);
        if (fits(1, world)) return channel.AllGather(in[0], out, options);
        break;
      case Kind::kReduceScatter:
        if (fits(1, 1)) return channel.ReduceScatter(in[0], out[0], call.op, options);
        if (fits(world, 1) && SameCounts(in))
          return Whole(channel, CollectiveKind::kReduceScatter, in, out, out[0], options, call.op);
        break;
      case Kind::kAllToAll:
        if (fits(world, world)) return channel.AllToAll(in, out, options);
        break;
      case Kind::kBarrier:
        if (fits(0, 0)) return channel.Barrier(options);
        break;
      case Kind::kSend:
        if (fits(1, 0)) return channel.Send(in[0], call.root, options);
        break;
      case Kind::kRecv:
        if (fits(0, 1) && call.from != nullptr) return channel.RecvAny(out[0], call.from, options);
        if (fits(0, 1)) return channel.Recv(out[0], call.root, options);
        break;
    }
    return evenkeel::Work(absl::InvalidArgumentError(absl::StrCat(
        "a call with ", in.size(), " inputs and ", out.size(), " outputs does not fit its kind")));
  }

  // Issues a collective whose blocks lie in buffers of their own; `block` is one of them.
  static evenkeel::Work Whole(Channel& channel, CollectiveKind kind,
                              const std::vector<TensorView>& in, const std::vector<TensorView>& out,
                              const TensorView& block, const CallOptions& options,
                              ReduceOp op = ReduceOp::kSum) {
    return channel.Issue({.kind = kind, .dtype = block.dtype, .count = block.count, .op = op},
                         TensorList(in.begin(), in.end()), TensorList(out.begin(), out.end()),
                         options);
  }

  const int rank_;
  const int world_size_;
  const std::string backend_;
  const absl::Status left_;
  mutable absl::Mutex mutex_;
  Flight flight_;
  std::shared_ptr<Communicator> comm_ ABSL_GUARDED_BY(mutex_);
};

// Makes the caller's store an evenkeel::Store, with the functions that JoinThrough() needs.
class StoreOfCaller final : public evenkeel::Store {
 public:
  explicit StoreOfCaller(abi::Store& store) : store_(store) {}

  absl::Status Set(absl::string_view key, absl::string_view value) override {
    std::string error;
    if (store_.Set(std::string(key), std::string(value), &error)) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("the store did not take \"", key, "\": ", error));
  }

  absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout) override {
    std::string value, error;
    const auto patience = std::max<int64_t>(absl::ToInt64Milliseconds(timeout), 1);
    if (store_.Get(std::string(key), std::chrono::milliseconds(patience), &value, &error))
      return value;
    return absl::DeadlineExceededError(
        absl::StrCat("rank 0 has not published \"", key, "\" in the store: ", error));
  }

  absl::StatusOr<std::string> GetOrSet(absl::string_view, absl::string_view) override {
    return Lacks("GetOrSet");
  }
  absl::StatusOr<int64_t> Add(absl::string_view, int64_t) override { return Lacks("Add"); }
  absl::StatusOr<bool> Check(absl::string_view) override { return Lacks("Check"); }
  absl::StatusOr<bool> Delete(absl::string_view) override { return Lacks("Delete"); }

 private:
  static absl::Status Lacks(absl::string_view function) {
    return absl::UnimplementedError(absl::StrCat("the caller's store has no ", function, "()"));
  }

  abi::Store& store_;
};

absl::StatusOr<std::unique_ptr<Communicator>> ConnectThrough(const Options& options,
                                                             std::shared_ptr<evenkeel::Store> store,
                                                             FactoryOptions& factory) {
  EK_ASSIGN_OR_RETURN(Environment environment, EnvironmentOfRank(options.rank, options.world_size));
  if (!options.address.empty()) environment.address = options.address;
  if (environment.address.empty() && !options.route_to.empty()) {
    EK_ASSIGN_OR_RETURN(environment.address, internal::AddressOfRouteTo(options.route_to));
  }
  // No other host could reach a loopback address.
  environment.is_one_host =
      environment.address.empty() || internal::IsLoopback(environment.address);
  factory.backend = options.backend;
  factory.group = options.name;
  factory.connect_timeout = ToAbsl(options.connect_timeout);
  factory.members = options.members;
  factory.communicator.timeout = ToAbsl(options.timeout);
  factory.communicator.watch.warn = options.warn;
  if (options.world_size == 1) return CreateCommunicator(environment, factory);
  EK_ASSIGN_OR_RETURN(factory.rendezvous,
                      Rendezvous::JoinThrough(environment, factory.connect_timeout, store));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment, factory));
  comm->control().link().SetOrigin(nullptr);
  return comm;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> Connect(Store& store, const Options& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " is out of range for ", options.world_size, " ranks"));
  }
  auto through = std::make_shared<StoreOfCaller>(store);
  FactoryOptions factory;
  absl::StatusOr<std::unique_ptr<Communicator>> comm = ConnectThrough(options, through, factory);
  // Before the rendezvous in `factory` ends, so that the other ranks see the cause first.
  if (!comm.ok() && options.world_size > 1)
    Rendezvous::GiveUp(options.rank, comm.status(), *through);
  return comm;
}

std::unique_ptr<Group> CreateGroup(Store& store, const Options& options, Failure* failure) {
  absl::StatusOr<std::unique_ptr<Communicator>> comm = Connect(store, options);
  *failure = FailureOf(comm.status());
  if (!comm.ok()) return nullptr;
  return std::make_unique<GroupOverCommunicator>(*std::move(comm));
}

const char* Version() { return kBuild.data(); }

}  // namespace evenkeel::abi
