// One rank's membership of a group, and the channels on which its collectives run.
//
//   absl::Status Train(Communicator& comm) {
//     std::vector<float> data(1000, comm.rank());
//     EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));        // blocking, on the user channel
//
//     EK_ASSIGN_OR_RETURN(Channel* channel, comm.OpenChannel("gradients"));
//     Work work = channel->AllReduce(absl::MakeSpan(data), ReduceOp::kAverage);         // asynchronous
//     return work.Wait();
//   }
//
// A Communicator is made by comm/factory.h, or by one backend's own (comm/shm.h, comm/gloo.h, ...), and is the same type
// for all of them.
//
// Order:   Within a channel every rank issues the same collectives in the same order. Channels are independent: ranks
//          may interleave them differently. Channels are told apart by name; opening is local and costs nothing.
// Threads: Communicator is thread-safe. A Channel is thread-safe too, but the order that ranks must agree on is the
//          order of calls, so one thread at a time normally uses it.
// Errors:  InvalidArgument or Unimplemented for a call that is wrong in itself: nothing was issued, the channel goes
//          on. Everything else ends the communicator (an operation alone cannot be undone): a missed deadline, a lost
//          rank, a contradiction between ranks, Abort(). From then on every call, on every rank, answers the first
//          cause.
// Watched: each rank tells the others that it lives and where it is (WatchOptions), so a rank that has fallen silent,
//          and ranks that wait for each other, end the group with a sentence within seconds; a wait for a rank that is
//          only slow is warned of. What was issued is recorded (FlightOptions, comm/flight_recorder.h).
//          Ranks wait for each other for good where every thread that has used the group waits in one of its calls:
//          so a thread that is to help the others out later has to use the group before (any call will do), or to be
//          waited for by one that does not wait in the group itself.
// Ending:  Finalize() is the clean leave. Destruction without it is an abort to the peers.

#ifndef EVENKEEL_COMM_COMMUNICATOR_H_
#define EVENKEEL_COMM_COMMUNICATOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {

namespace internal {
class Waits;
class Watchdog;
struct Wait;
struct Whereabouts;
}  // namespace internal

class Communicator;
class StepControl;

// For Communicator::Split(): in none of the new groups.
inline constexpr int kNoColor = -1;

inline constexpr absl::Duration kDefaultTimeout = absl::Minutes(10);

// What a caller may say about one operation beside its tensors.
struct CallOptions {
  Role role = Role::kUser;
  int index = -1;
  int index_count = 0;
  double scale = 1.0;       // Float reductions: the result is multiplied by it. Must be equal on all ranks.
  bool contributes = true;  // False: this rank only receives the reduction's result.
  StreamRef after;          // Device work that must end first: what is on that stream at the call,
  Event after_event;        // and all until that moment.
  absl::Duration timeout = absl::ZeroDuration();  // Zero: the communicator's.
};

class Channel {
 public:
  Channel(Communicator* communicator, std::string name);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const std::string& name() const { return name_; }
  uint64_t id() const { return id_; }

  // Shapes: w = world size. `parts` of a coalesced call have one dtype. Tensors lie on the backend's device.
  Work AllReduce(TensorView data, ReduceOp op, const CallOptions& options = {});
  Work AllReduce(absl::Span<const TensorView> parts, ReduceOp op, const CallOptions& options = {});
  Work Reduce(TensorView data, ReduceOp op, int root, const CallOptions& options = {});
  Work Broadcast(TensorView data, int root, const CallOptions& options = {});
  Work Broadcast(absl::Span<const TensorView> parts, int root, const CallOptions& options = {});
  Work AllGather(TensorView input /*[n]*/, TensorView output /*[w * n]*/, const CallOptions& options = {});
  Work ReduceScatter(TensorView input /*[w * n]*/, TensorView output /*[n]*/, ReduceOp op,
                     const CallOptions& options = {});
  Work AllToAll(TensorView input /*[w * n]*/, TensorView output /*[w * n]*/, const CallOptions& options = {});
  Work Send(TensorView data, int to, const CallOptions& options = {});
  Work Recv(TensorView data, int from, const CallOptions& options = {});
  Work Barrier(const CallOptions& options = {});

  // The general form: `what` says it all, `in` and `out` as in Operation. What a schedule's entries are issued with.
  Work Issue(const Collective& what, TensorList in, TensorList out, const CallOptions& options = {});

  // See Communicator::CompareIssued().
  Work CompareIssued();

  // Collectives issued so far, and the rolling hash of them; send and recv are not counted.
  int64_t position() const;
  uint64_t issued_hash() const;

 private:
  friend class Communicator;

  Communicator* const communicator_;
  const std::string name_;
  const uint64_t id_;
  // Held while an operation is handed to the backend, so that sequence order is start order.
  mutable absl::Mutex mutex_;
  int64_t position_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t issued_hash_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Collective> last_issued_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, CollectiveKind>, int64_t> pair_positions_ ABSL_GUARDED_BY(mutex_);  // Of send and recv.
};

// How ranks watch each other. Give all ranks the same: whichever gives up first ends the group for all. A rank in a
// debugger is silent too, so debug with a longer `silence`.
struct WatchOptions {
  // How often a rank says that it lives, and where it is. Infinite: never, and it watches over nothing.
  absl::Duration beat = absl::Seconds(1);
  // A rank whose heartbeat is overdue for so long is lost. Zero: silence is borne for ever.
  absl::Duration silence = absl::Seconds(5);
  absl::Duration stall_warning = absl::Seconds(10);  // A wait that is longer than this is warned of, once.
  // Gets the warning, on a thread of the communicator's, and must not call it; null: it goes to stderr.
  std::function<void(const std::string& text)> warn;
};

struct FlightOptions {
  size_t capacity = 1024;  // Operations that are remembered beside the open ones.
  // When the group ends by a failure, or without Finalize(), each rank writes <folder>/<group>.rank<r>.json in place
  // of an earlier one; empty: nowhere. The folder is made if need be.
  std::string folder;
};

struct CommunicatorOptions {
  absl::Duration timeout = kDefaultTimeout;  // Deadline of an operation and of a control exchange.
  // Equal on all ranks, or the group ends as soon as it is there. Unset: what the environment says where a factory
  // reads one, else kPositions.
  std::optional<VerifyLevel> verify;
  WatchOptions watch;
  FlightOptions flight;
};

// This rank's half of another group, over that link, within that time: what Split() and Shrink() need of the factory
// that made this one.
using GroupMaker = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    absl::string_view group, int rank, int world_size, std::unique_ptr<ControlLink> link, absl::Duration timeout)>;

class Communicator {
 public:
  // For factories. `control` must be connected; rank and world size are its. Without `make_group` there is no Split(),
  // and no Shrink().
  Communicator(std::unique_ptr<Backend> backend, std::unique_ptr<ControlChannel> control,
               CommunicatorOptions options = {}, absl::string_view group = "world", GroupMaker make_group = nullptr);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // The group's name, equal on all ranks, and which rank of the job's first group each of its ranks was.
  const std::string& group() const { return group_; }
  const std::vector<int>& members() const { return members_; }
  Device device() const { return backend_->device(); }
  // What runs that device: memory, streams, copies, kernels. Null on the CPU.
  DeviceRuntime* runtime() const { return backend_->runtime(); }
  absl::string_view backend_name() const { return backend_->name(); }
  absl::Duration timeout() const { return options_.timeout; }

  // The channel of that name, opened by the first call. Lives as long as the communicator. Library parts take names of
  // the form "part#n" (see UniqueName), "user" is the user channel.
  absl::StatusOr<Channel*> OpenChannel(absl::string_view name);
  Channel& user() { return *user_; }
  // "base#0", "base#1", ...: equal on ranks that ask in the same order.
  std::string UniqueName(absl::string_view base);

  // Blocking calls on the user channel.
  absl::Status AllReduce(TensorView data, ReduceOp op) { return user_->AllReduce(data, op).Wait(); }
  absl::Status Broadcast(TensorView data, int root) { return user_->Broadcast(data, root).Wait(); }
  absl::Status AllGather(TensorView input, TensorView output) { return user_->AllGather(input, output).Wait(); }
  absl::Status ReduceScatter(TensorView input, TensorView output, ReduceOp op) {
    return user_->ReduceScatter(input, output, op).Wait();
  }
  absl::Status Barrier() { return user_->Barrier().Wait(); }

  // Collectives over the control plane, on the host; every rank calls them in the same order, each kind by itself.
  // True on all ranks if it is on one of them.
  absl::StatusOr<bool> AgreeAny(bool mine);
  // Waits for all ranks. At the deadline every rank that has come gets DeadlineExceeded that names all those that have
  // not, and the group ends, so that late ones learn of it.
  absl::Status MonitoredBarrier(absl::Duration timeout);

  // How much is checked, see comm/verify.h. Setting it is a collective call on all ranks, with nothing in flight: all
  // give the same level at the same positions, else all get FailedPrecondition that names ranks and levels.
  VerifyLevel verify_level() const { return verify_.load(); }
  absl::Status SetVerifyLevel(VerifyLevel level);
  // Where the transport can pair different collectives (Backend::checks_pairs() is false) and the level is kPositions:
  // compares with all ranks what was issued on the channel so far. All ranks call it at the same position; results of
  // what was issued before may be used once it has ended well. Otherwise it has ended already.
  Work CompareIssued(Channel& channel);

  // What this rank has issued, and its dump: comm/flight_dump.h says what the JSON looks like. After a failure a dump
  // shows the moment of it.
  FlightRecorder& flight() { return flight_; }
  std::string FlightJson() const;
  absl::Status DumpFlight(const std::string& path) const;
  // <folder>/<group>.rank<r>.json
  std::string FlightPath(absl::string_view folder) const;

  // The control plane: small messages on the host, beside the data. Steps are agreed through steps().
  ControlChannel& control() { return *control_; }
  StepControl& steps() { return *steps_; }

  // Memory that the transport uses without a copy: zeroed, at a multiple of 64 bytes, freed with the last handle, also
  // after the group is gone. `static_cast<float*>(memory.data.get())`. Any other pointer works as well.
  absl::StatusOr<Memory> Allocate(int64_t bytes) { return backend_->Allocate(bytes); }
  // OK, or why this backend cannot do that.
  absl::Status Supports(const Collective& what) const { return backend_->Supports(what); }
  // OK, or what Channel::Issue() would refuse.
  absl::Status Check(const Collective& what, const TensorList& in, const TensorList& out) const;

  // OK while the group works; then the first cause of its end.
  absl::Status status() const;
  // Ends the group on every rank: peers see "rank <r> <did>: <why>". From any thread; only the first call counts.
  void Abort(const absl::Status& why, absl::string_view did = "aborted the group");
  // The clean leave: waits until every rank has come here with the same collectives behind it, else fails on all of
  // them with a message that says who is where. Nothing may be in flight. Afterwards only destruction is allowed.
  absl::Status Finalize(absl::Duration timeout = kDefaultTimeout);

  // New groups beside this one, over the same backend: one for each color, of the ranks that give it, in the order of
  // their keys, of equal keys in their order here. A rank that says kNoColor gets null. This group goes on as it was;
  // the new ones are as independent of it, and of each other, as any two groups: each can fail by itself. All ranks
  // call it, in the same order as other agreements; it is OK on all of them or on none.
  // Errors: InvalidArgument, and this group goes on: a rank gives another negative color. This group ends if a rank
  //         does not come in time, or if one of the new groups could not be made: the sentence says which.
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key, absl::Duration timeout = absl::Minutes(2));

  // After the group has failed: a new one of the ranks that are still there, in their order. Every survivor calls it;
  // waits until each rank of the old group has, or is lost, or has left, and those that are left have met in the new
  // one. Each attempt of them to meet has a third of the time left, at least a second; then, or when one of them is
  // lost meanwhile, they begin anew without it. The old group stays as it is, and may go.
  // Errors: FailedPrecondition: the group has not failed. DeadlineExceeded names the ranks that neither came nor went.
  //         Unavailable: the hub, which held the group together, is gone. Aborted: the other ranks have declared this
  //         one lost, and go on without it.
  absl::StatusOr<std::unique_ptr<Communicator>> Shrink(absl::Duration timeout = absl::Minutes(2));

 private:
  friend class Channel;
  friend class StepControl;
  friend class StepTicket;
  struct FlightMoment;

  // Keeps the first cause; false if there was one.
  bool SetStatus(const absl::Status& why);
  // Ends the group on this rank: the peers know, or have been told.
  enum class End { kFailure, kClean };
  void Fail(const absl::Status& why, End end = End::kFailure);
  // An operation failed: ends the group on every rank. May be called with locks held.
  void OnBackendFailure(const absl::Status& why);
  // The same on a thread that waits and holds no locks; afterwards nothing is in flight here.
  void OnDeadline(const absl::Status& why);
  void OnFinalizeNotice(int peer, absl::string_view positions);
  // This rank's half of a group of ranks of this one, handed out when it can be used; `who` makes it.
  absl::StatusOr<std::unique_ptr<Communicator>> MakeGroup(const std::string& name, const std::vector<int>& ranks,
                                                          absl::Time deadline, absl::string_view who);
  // One attempt of Shrink().
  absl::StatusOr<std::unique_ptr<Communicator>> MakeNext(const ControlChannel::Survivors& survivors,
                                                         absl::Duration left);
  std::string SerializePositions() const;
  // An error, which also ends the group, if a peer that is leaving will never come to `position` of `channel`.
  absl::Status CheckAgainstLeft(absl::string_view channel, int64_t position, absl::string_view next);

  // Verification and agreement (communicator_agreement.cc).
  // An exchange whose end is the end of a work, and its parts. `text` says what for. `judge` is asked on each rank; if
  // it does not answer OK, the group ends with its answer.
  struct Agreement;
  std::shared_ptr<Agreement> Agree(absl::string_view topic, std::string payload, absl::Duration timeout,
                                   std::string text,
                                   std::function<absl::Status(const ControlChannel::Parts&)> judge = nullptr);
  absl::StatusOr<ControlChannel::Parts> AgreeAndWait(
      absl::string_view topic, std::string payload, absl::Duration timeout, std::string text,
      std::function<absl::Status(const ControlChannel::Parts&)> judge = nullptr);
  void CompareLevels();
  // Begins to compare the operation with the other ranks'. `whole` ends with both that and the operation; the answer is
  // the work for the operation alone.
  std::shared_ptr<WorkState> CompareBeside(const std::string& channel, const Operation& operation,
                                           std::shared_ptr<WorkState> whole);

  // Watching (communicator_watch.cc). Look() runs on the watchdog's thread: says that this rank lives, ends what has
  // missed its deadline, warns.
  absl::Duration Look();
  internal::Whereabouts WhereaboutsNow() const;
  void CheckHub();
  void CheckDeadlines();
  void WarnOfStalls();
  std::vector<Channel*> channels() const;
  // What waiting for an operation is, and what its deadline does.
  internal::Wait WaitFor(const Channel& channel, const FlightEntry& entry) const;
  void OnOperationDeadline(const Channel& channel, int64_t number);
  absl::Status DeadlineStatus(const internal::Wait& wait, absl::Duration waited);
  // " for ranks 2,3 (rank 2 runs, ...; ...)"; empty if the hub does not say.
  std::string ForWhom(const internal::Wait& wait);
  void KeepFlight();
  void WriteKeptFlight();
  FlightMoment FlightNow() const;

  const std::unique_ptr<ControlChannel> control_;
  const CommunicatorOptions options_;
  const int rank_;
  const int world_size_;
  const std::string group_;
  const GroupMaker make_group_;
  std::atomic<int> splits_ = 0;  // Equal on all ranks: they agree on each.
  std::vector<int> members_;     // Constant once it has been handed out.
  const std::shared_ptr<internal::Waits> waits_;
  FlightRecorder flight_;
  std::atomic<VerifyLevel> verify_;
  std::unique_ptr<StepControl> steps_;
  Channel* user_ = nullptr;

  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;  // Nothing is in flight any more.
  std::map<std::string, std::unique_ptr<Channel>, std::less<>> channels_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int> name_counts_ ABSL_GUARDED_BY(mutex_);
  // Where peers were when they said that they leave: rank -> channel -> position.
  std::atomic<bool> somebody_left_ = false;
  std::map<int, std::map<std::string, int64_t>> left_ ABSL_GUARDED_BY(mutex_);
  bool has_finalized_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const FlightMoment> kept_flight_ ABSL_GUARDED_BY(mutex_);  // Of the failure.
  bool flight_is_written_ ABSL_GUARDED_BY(mutex_) = false;

  absl::Mutex agreement_mutex_;  // Held across ControlChannel::Exchange(), which counts as these do.
  std::map<std::string, int64_t, std::less<>> agreements_ ABSL_GUARDED_BY(agreement_mutex_);

  std::set<int64_t> warned_;  // Waits; the watchdog's thread only.
  const std::unique_ptr<internal::Watchdog> watchdog_;
  const std::unique_ptr<Backend> backend_;  // Last, so that its threads, which call back, end before the rest.
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_COMMUNICATOR_H_
