#include "evenkeel/comm/nccl/backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/nccl/peers.h"
#include "evenkeel/comm/nccl/plan.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kShortestPause = absl::Microseconds(5);
constexpr absl::Duration kLongestPause = absl::Microseconds(500);
// How often errors are looked for when nothing is in flight.
constexpr absl::Duration kIdleLook = absl::Milliseconds(200);

// Returns the wait of a thread for a launch: it waits until the other ranks issue the operation.
Wait LaunchWait(const Operation& operation) {
  const Collective& what = operation.what;
  return {.kind = IsPair(what.kind) ? Wait::Kind::kPair : Wait::Kind::kCollective,
          .channel = operation.channel,
          .sequence = operation.sequence,
          .peer = IsPair(what.kind) ? what.root : -1,
          .is_send = what.kind == CollectiveKind::kSend,
          .text = absl::StrCat("the launch of #", operation.sequence, " ", ToString(what))};
}

absl::Status Both(const absl::Status& first, const absl::Status& second) {
  if (first.ok() || second.ok()) return first.ok() ? second : first;
  return Annotate(second, first.message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclBackend>> NcclBackend::Create(DeviceRuntime& runtime,
                                                                 absl::StatusOr<NcclApi*> api,
                                                                 int rank, int world_size,
                                                                 const NcclGroupOptions& options) {
  const Device device = Device::Cuda(options.device);
  EK_ASSIGN_OR_RETURN(const int devices, runtime.DeviceCount());
  if (device.index < 0 || device.index >= devices) {
    return WithFailureInfo(absl::InvalidArgumentError(
                               absl::StrCat("rank ", rank, " wants CUDA device ", device.index,
                                            ", there ", devices == 1 ? "is " : "are ", devices)),
                           {.ranks = {rank}});
  }
  EK_ASSIGN_OR_RETURN(NcclApi* const nccl, api);
  EK_ASSIGN_OR_RETURN(Stream stream, runtime.CreateStream(device, StreamPriority::kHigh));
  return std::unique_ptr<NcclBackend>(
      new NcclBackend(runtime, *nccl, rank, world_size, options, std::move(stream)));
}

NcclBackend::NcclBackend(DeviceRuntime& runtime, NcclApi& api, int rank, int world_size,
                         const NcclGroupOptions& options, Stream stream)
    : runtime_(runtime),
      api_(api),
      rank_(rank),
      world_size_(world_size),
      options_(options),
      device_(Device::Cuda(options.device)),
      connection_(std::make_shared<NcclConnection>(api, device_, options.abort_patience)),
      memory_(runtime, api, connection_,
              {.device = device_,
               .rank = rank,
               .least_registered = options.least_registered,
               .warn = options.communicator.watch.warn}),
      collectives_(runtime, api, connection_, {device_, rank, world_size}),
      stream_(std::move(stream)) {}

NcclBackend::~NcclBackend() {
  Abort(absl::CancelledError(absl::StrCat("rank ", rank_, " left the group")));
  queue_.reset();
  {
    absl::MutexLock lock(&mutex_);
    is_leaving_ = true;
  }
  if (completions_.joinable()) completions_.join();
  if (!connection_->MayFree()) KeepForever(stream_.handle);
}

// Connecting --------------------------------------------------------------------------------------

absl::Status NcclBackend::Connect(ControlChannel& control) {
  const absl::Time deadline = SteadyNow() + options_.connect_timeout;
  control_ = &control;
  NcclPeer mine{.version = api_.version(), .device = device_.index};
  EK_ASSIGN_OR_RETURN(mine.place, api_.PlaceOf(device_));
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      AwaitArrival(control, "nccl peers", ToBytes(mine),
                   {options_.group, options_.connect_timeout, options_.communicator.watch.warn}));
  std::vector<NcclPeer> peers;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(NcclPeer peer,
                        FromBytes<NcclPeer>(part, "a rank's NCCL version and device"));
    peers.push_back(std::move(peer));
  }
  EK_RETURN_IF_ERROR(CheckPeers(peers));
  EK_ASSIGN_OR_RETURN(const std::string id, AgreeOnId(control, deadline - SteadyNow()));
  EK_RETURN_IF_ERROR(connection_->Open(id, rank_, world_size_, deadline));
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  queue_ = std::make_unique<LaunchQueue>(control, "nccl");
  EK_ASSIGN_OR_RETURN(completions_, StartThread("NCCL", [this] { WatchCompletions(); }));
  return absl::OkStatus();
}

absl::StatusOr<std::string> NcclBackend::AgreeOnId(ControlChannel& control,
                                                   absl::Duration timeout) {
  if (!options_.unique_id.empty()) return options_.unique_id;
  if (rank_ != 0) return control.Get("nccl unique id", timeout);
  std::string id;
  EK_RETURN_IF_ERROR(ToStatus("ncclGetUniqueId", api_.GetUniqueId(&id)));
  if (world_size_ > 1) control.Put("nccl unique id", id);
  return id;
}

// From the call to the stream ---------------------------------------------------------------------

void NcclBackend::Start(Operation operation, std::shared_ptr<WorkState> work) {
  auto flight = std::make_shared<Flight>();
  flight->operation = std::move(operation);
  flight->work = std::move(work);
  const Operation& op = flight->operation;
  if (op.after.handle != nullptr) {
    absl::StatusOr<Event> ready = runtime_.Record(op.after);
    if (!ready.ok()) return flight->work->Finish(ready.status());
    flight->ready = *std::move(ready);
  }
  flight->work->order_before = [this, mark = flight->mark, op,
                                deadline = flight->work->deadline()](StreamRef stream) {
    return OrderBefore(op, *mark, stream, deadline);
  };
  const NcclPlan plan = PlanForNccl(op, rank_, world_size_, /*is_alike=*/true);
  queue_->Push(RequestOf(op, rank_, memory_.LayoutOf(op, plan)),
               [this, flight](const LaunchQueue::Turn& turn) {
                 if (turn.status.ok()) return Launch(flight, turn.is_alike);
                 flight->mark->is_decided.Notify();
                 flight->work->Finish(turn.status);
               });
}

absl::Status NcclBackend::OrderBefore(const Operation& operation, const Mark& mark,
                                      StreamRef stream, absl::Time deadline) {
  if (!mark.is_decided.HasBeenNotified()) {
    const Waits::Scope scope(
        control_->waits(), [&operation] { return LaunchWait(operation); },
        [&mark] { return mark.is_decided.HasBeenNotified(); });
    if (!mark.is_decided.WaitUntil(deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("nccl: ", ToString(operation.what),
                       " was not launched in time: a rank has not issued it"));
    }
  }
  if (!mark.done) return absl::UnavailableError("nccl: the operation was not launched; see Wait()");
  return runtime_.Wait(stream, mark.done);
}

void NcclBackend::Launch(const std::shared_ptr<Flight>& flight, bool is_alike) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = ended_;
    is_launching_ = status.ok();
  }
  if (!status.ok()) {
    flight->mark->is_decided.Notify();
    return flight->work->Finish(status);
  }
  status = PutOnStream(*flight, is_alike);
  if (!status.ok()) flight->mark->done = Event();
  flight->mark->is_decided.Notify();
  bool is_late = false;
  {
    absl::MutexLock lock(&mutex_);
    is_launching_ = false;
    is_late = has_drained_;
    // The stream may use the buffers of what has failed, too: it ends when the stream has been
    // drained.
    if (!is_late) (status.ok() ? flights_ : broken_).push_back(flight);
    if (is_late) status = ended_;
  }
  if (is_late) return flight->work->Finish(status);
  if (!status.ok()) EndGroup(status);
}

absl::Status NcclBackend::PutOnStream(Flight& flight, bool is_alike) {
  const StreamRef stream = stream_.ref();
  EK_RETURN_IF_ERROR(runtime_.Wait(stream, flight.ready));
  EK_RETURN_IF_ERROR(runtime_.Wait(stream, flight.operation.after_event));
  EK_RETURN_IF_ERROR(collectives_.Put(flight.operation, is_alike, stream, flight.kept));
  EK_ASSIGN_OR_RETURN(flight.mark->done, runtime_.Record(stream));
  return absl::OkStatus();
}

// To the end --------------------------------------------------------------------------------------

void NcclBackend::WatchCompletions() {
  ThisThreadIsTheLibrarys();
  absl::Duration pause = kShortestPause;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return is_leaving_ || !flights_.empty();
      };
      (void)AwaitFor(mutex_, absl::Condition(&ready), kIdleLook);
      if (is_leaving_) return;
    }
    const std::shared_ptr<Flight> front = NextFlight();
    const absl::StatusOr<bool> is_over = IsOver(front.get());
    if (!is_over.ok()) EndGroup(is_over.status());
    if (!is_over.ok() || !*is_over) {
      if (front != nullptr) absl::SleepFor(pause);
      pause = std::min(2 * pause, kLongestPause);
      continue;
    }
    pause = kShortestPause;
    {
      absl::MutexLock lock(&mutex_);
      // An abort may have taken it along.
      if (flights_.empty() || flights_.front() != front) continue;
      flights_.pop_front();
    }
    front->work->Finish(absl::OkStatus());
  }
}

std::shared_ptr<NcclBackend::Flight> NcclBackend::NextFlight() {
  absl::MutexLock lock(&mutex_);
  return flights_.empty() ? nullptr : flights_.front();
}

absl::StatusOr<bool> NcclBackend::IsOver(const Flight* flight) {
  bool is_over = false;
  if (flight != nullptr) {
    EK_ASSIGN_OR_RETURN(is_over, runtime_.IsDone(flight->mark->done));
  }
  // After that, because what NCCL has given up is over too.
  EK_RETURN_IF_ERROR(connection_->CheckErrors(
      flight == nullptr ? "nothing in flight" : ToString(flight->operation.what)));
  return is_over;
}

void NcclBackend::EndGroup(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) return;
  }
  const absl::Status named = AsErrorOf(rank_, why);
  control_->Fail(named);
  Abort(named);
}

absl::Status NcclBackend::Drain() {
  EK_ASSIGN_OR_RETURN(const Event end, runtime_.Record(stream_.ref()));
  const absl::Status drained = runtime_.Synchronize(end, SteadyNow() + options_.abort_patience);
  if (!absl::IsDeadlineExceeded(drained)) return drained;
  return absl::DeadlineExceededError(
      absl::StrCat("the stream of ", ToString(device_), " is still not empty ",
                   absl::FormatDuration(options_.abort_patience), " after the abort"));
}

void NcclBackend::Abort(const absl::Status& why) {
  absl::Status first;
  LaunchQueue* queue = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) {
      // Another thread does it; after it nothing touches a buffer.
      (void)AwaitFor(mutex_, absl::Condition(&has_drained_), 5 * options_.abort_patience);
      return;
    }
    first = ended_ = why;
    queue = queue_.get();
  }
  if (queue != nullptr) queue->Abort(first);  // Operations not yet handed to NCCL.
  const absl::Status trouble = LetGo(first);
  if (!trouble.ok()) {
    connection_->LeaveBehind();
    first = WithMessage(first,
                        absl::StrCat(first.message(),
                                     " (and its buffers may still be in use, so what the group has "
                                     "allocated is never freed: ",
                                     trouble.message(), ")"));
  }
  std::deque<std::shared_ptr<Flight>> flights;
  {
    absl::MutexLock lock(&mutex_);
    flights.swap(flights_);
    flights.insert(flights.end(), broken_.begin(), broken_.end());
    broken_.clear();
    has_drained_ = true;
  }
  for (const std::shared_ptr<Flight>& flight : flights) flight->work->Finish(first);
}

absl::Status NcclBackend::LetGo(const absl::Status& why) {
  absl::Status trouble = connection_->Abort(why);
  {
    absl::MutexLock lock(&mutex_);
    const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_launching_; };
    if (!AwaitFor(mutex_, absl::Condition(&is_free), options_.abort_patience)) {
      trouble = Both(trouble, absl::DeadlineExceededError("a launch has not returned"));
    }
  }
  return Both(trouble, Drain());  // From here on nothing touches a buffer.
}

}  // namespace evenkeel::internal
