// A rank's membership in a group, and the channels on which its collectives run.
//
//   absl::Status Train(Communicator& comm) {
//     std::vector<float> data(1000, comm.rank());
//     // blocking, on the user channel
//     EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
//
//     EK_ASSIGN_OR_RETURN(Channel* channel, comm.OpenChannel("gradients"));
//     Work work = channel->AllReduce(absl::MakeSpan(data), ReduceOp::kAverage);  // asynchronous
//     return work.Wait();
//   }
//
// comm/factory.h makes a Communicator over any backend; comm/shm/shm.h, comm/tcp/tcp.h and others
// make one over their own. The type is the same for all.
//
// Order:   Within a channel every rank issues the same collectives in the same order. Channels are
//          independent: ranks may interleave them differently. A channel is identified by its name;
//          opening it is local and costs nothing.
// Threads: Communicator and Channel are thread-safe. The order that ranks must agree on is the
//          order of calls on a channel, so usually one thread at a time uses it.
// Errors:  InvalidArgument or Unimplemented for a call that is wrong by itself: nothing was issued,
//          and the channel remains usable. All other errors end the communicator, since a single
//          operation cannot be undone: a missed deadline, a lost rank, ranks that disagree,
//          Abort(). From then on every call returns the first cause, with a FailureInfo: the same
//          on every rank, except that a rank whose own error ended the group keeps that error
//          (comm/failure_info.h).
// Watch:   Each rank sends heartbeats with its position (WatchOptions). A silent rank, and ranks
//          that wait for each other, end the group within seconds; a wait for a slow rank logs a
//          warning. Operations are recorded (FlightOptions, comm/flight_recorder.h). The ranks are
//          reported as deadlocked when all threads that have used the group wait in its calls, and
//          none of these waits can end. If a thread that has not used the group yet will end a
//          wait, let it make any call of the group first, or let another thread wait for it outside
//          of the group's calls.
// Ending:  Finalize() leaves the group cleanly. Peers see destruction without it as an abort.

#ifndef EVENKEEL_COMM_COMMUNICATOR_H_
#define EVENKEEL_COMM_COMMUNICATOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group_extension.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {

namespace internal {
class Waits;
class Watchdog;
struct Wait;
struct RankStatus;
}  // namespace internal

class Communicator;
struct FailureInfo;

// For Communicator::Split(): the rank is in no new group.
inline constexpr int kNoColor = -1;

inline constexpr absl::Duration kDefaultTimeout = absl::Minutes(10);

// Options of a single operation.
struct CallOptions {
  Role role = Role::kUser;
  int index = -1;
  int index_count = 0;
  double scale =
      1.0;  // Float reductions: the result is multiplied by it. Must be equal on all ranks.
  bool contributes = true;  // False: this rank only receives the reduction's result.
  StreamRef after;          // Device work that must end first: all that is on this stream now,
  Event after_event;        // and all before this event.
  absl::Duration timeout = absl::ZeroDuration();  // 0: the communicator's timeout.
  // A message's tag, 0 or more: a send meets the receive with its tag, in the order of their issue,
  // and messages with different tags do not wait for each other. There may be thousands of tags;
  // each used one keeps a counter of about 100 bytes.
  int64_t tag = 0;
};

class Channel {
 public:
  Channel(Communicator* communicator, std::string name);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const std::string& name() const { return name_; }
  uint64_t id() const { return id_; }

  // Shapes:   w = world size. `parts` of a coalesced call have one dtype. Tensors lie on the
  //           backend's device.
  // Sums:     integers wrap around. Elements of 16-bit floats are added in float32, and the sum is
  //           rounded to 16 bits once over local and shm; over tcp up to w times, at each hop from
  //           rank to rank, and over several hosts once per host and then as over tcp.
  // Averages: of floats, the sum with the scale 1/w; of integers, the exact mean rounded toward
  //           zero, the same bits on every backend. Integers of 8 and 16 bits travel as 4 bytes
  //           each (for up to 65,536 ranks), int32 as 8, int64 as 16. nccl has no average of
  //           integers: Unimplemented.
  Work AllReduce(TensorView data, ReduceOp op, const CallOptions& options = {});
  Work AllReduce(absl::Span<const TensorView> parts, ReduceOp op, const CallOptions& options = {});
  Work Reduce(TensorView data, ReduceOp op, int root, const CallOptions& options = {});
  Work Broadcast(TensorView data, int root, const CallOptions& options = {});
  Work Broadcast(absl::Span<const TensorView> parts, int root, const CallOptions& options = {});
  Work AllGather(TensorView input /*[n]*/, TensorView output /*[w * n]*/,
                 const CallOptions& options = {});
  // Uneven: inputs[r] goes to rank r, outputs[r] comes from rank r, and a rank knows the sizes of
  // its own tensors only, which may be 0. A sender and a receiver with different sizes end the
  // group with an error. All tensors have one dtype. Exhausted ranks (join/scope.h) do not shadow
  // these.
  Work AllGather(TensorView input, absl::Span<const TensorView> outputs /*[w]*/,
                 const CallOptions& options = {});
  Work AllToAll(absl::Span<const TensorView> inputs /*[w]*/,
                absl::Span<const TensorView> outputs /*[w]*/, const CallOptions& options = {});
  Work ReduceScatter(TensorView input /*[w * n]*/, TensorView output /*[n]*/, ReduceOp op,
                     const CallOptions& options = {});
  Work AllToAll(TensorView input /*[w * n]*/, TensorView output /*[w * n]*/,
                const CallOptions& options = {});
  Work Send(TensorView data, int to, const CallOptions& options = {});
  Work Recv(TensorView data, int from, const CallOptions& options = {});
  // Receives a message of any other rank, the first that is announced. `*from` must live as long as
  // `data`, and is the sender once the operation has ended with OK. Messages of one sender arrive
  // in their order. A receive from a named rank takes that rank's next message, also if it is
  // issued later than this one. The first call for a tag asks the other ranks for announcements.
  // From then on, as long as the channel lives, each message to this rank with that tag costs a
  // control message of its sender, and the tag costs each rank some hundred bytes, this one 50 more
  // for each sender. On a device `options.after` is recorded when the receive gets its message, not
  // at the call, so pass `after_event`; and Work::OrderBefore() waits on the host.
  Work RecvAny(TensorView data, int* from, const CallOptions& options = {});
  Work Barrier(const CallOptions& options = {});

  // The general form, used for the entries of a schedule. `in` and `out` are those of Operation.
  Work Issue(const Collective& what, TensorList in, TensorList out,
             const CallOptions& options = {});

  // See Communicator::CompareIssued().
  Work CompareIssued();

  // The number of collectives issued so far. Sends and receives do not count.
  int64_t position() const;

 private:
  friend class Communicator;

  // `from`: the place for the sender; null if `what` names the ranks.
  Work Issue(const Collective& what, TensorList in, TensorList out, const CallOptions& options,
             int* from);
  // Makes the work of an operation, and the entry of the flight record with this number. `what`: as
  // the program has called it; averages of integers travel in another type.
  std::pair<int64_t, std::shared_ptr<WorkState>> Record(const Operation& operation,
                                                        const Collective& what, absl::Time issued);

  // Receives from any rank (communicator_any.cc).
  static constexpr char kAskForSends[] = "any source: ask";  // Topics of notices.
  static constexpr char kAnnounceSends[] = "any source: sends";
  struct AnySource;
  struct AnySourceDeleter {
    void operator()(AnySource* any) const;
  };
  AnySource& Any() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReceiveFromAny(Operation operation, int64_t number, std::shared_ptr<WorkState> work,
                      int* from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A send, or a receive from a named rank, was counted: `count` with its peer and tag by now.
  void OnPair(const Collective& what, int64_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Another rank asks for announcements of the sends to it with the tag.
  void OnAsked(int from, int64_t tag);
  // Another rank has issued so many sends with the tag to this one.
  void OnAnnouncement(int from, int64_t tag, int64_t sends);
  void EndAnySource(const absl::Status& why);

  Communicator* const communicator_;
  const std::string name_;
  const uint64_t id_;
  // Held while an operation is handed to the backend, so that sequence order is start order.
  mutable absl::Mutex mutex_;
  int64_t position_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t issued_hash_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Collective> last_issued_ ABSL_GUARDED_BY(mutex_);
  std::map<std::tuple<int, CollectiveKind, int64_t>, int64_t> pair_positions_
      ABSL_GUARDED_BY(mutex_);  // For send and recv: by peer (-1: any), direction and tag.
  // Null until a rank receives from any other.
  std::unique_ptr<AnySource, AnySourceDeleter> any_ ABSL_GUARDED_BY(mutex_);
};

// How ranks watch each other. Equal on all ranks, since the first rank that gives up ends the
// group. A rank in a debugger is silent, too: debug with a longer `silence`.
struct WatchOptions {
  // Interval of the heartbeats. Infinite: no heartbeats, and no watching.
  absl::Duration beat = absl::Seconds(1);
  // A rank whose heartbeat is overdue for this long is lost. 0 disables the check.
  absl::Duration silence = absl::Seconds(5);
  absl::Duration stall_warning = absl::Seconds(10);  // A longer wait logs one warning.
  // Receives warnings on a thread of the communicator, and must not call it. Null: warnings go to
  // stderr.
  std::function<void(const std::string& text)> warn;
};

struct FlightOptions {
  size_t capacity = 1024;  // Finished operations that are kept.
  // When the group fails, or ends without Finalize(), each rank writes
  // <folder>/<group>.rank<r>.json, and replaces an earlier one. The folder is created if needed.
  // Empty: no file.
  std::string folder;
};

struct CommunicatorOptions {
  absl::Duration timeout = kDefaultTimeout;  // Deadline of an operation and of a control exchange.
  // Equal on all ranks, or the group ends at once. Unset: EVENKEEL_VERIFY if a factory has read the
  // environment, else kPositions.
  std::optional<VerifyLevel> verify;
  // Each gradient on the CPU is tested before a DataParallel reduces it
  // (ReducerOptions::check_finite). A factory that reads the environment sets it for
  // EVENKEEL_CHECK_FINITE=1.
  bool check_finite = false;
  // DataParallel and Optimizer compare their replicas every so many steps; 0: only if their own
  // options say so (bucket/replica_check.h). Equal on all ranks. A factory that reads the
  // environment sets it for EVENKEEL_CHECK_REPLICAS.
  int64_t check_replicas_every = 0;
  WatchOptions watch;
  FlightOptions flight;
};

// Makes this rank's half of another group over the given link. Split() and Shrink() need it from
// the factory that made this group.
using GroupMaker = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    absl::string_view group, int rank, int world_size, std::unique_ptr<ControlLink> link,
    absl::Duration timeout)>;

class Communicator {
 public:
  // For factories. `control` must be connected, and has the rank and the world size. Split() and
  // Shrink() need `make_group`.
  Communicator(std::unique_ptr<Backend> backend, std::unique_ptr<ControlChannel> control,
               CommunicatorOptions options = {}, absl::string_view group = "world",
               GroupMaker make_group = nullptr);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // The group's name, equal on all ranks; and, by rank, the rank in the job's first group.
  const std::string& group() const { return group_; }
  const std::vector<int>& members() const { return members_; }
  Device device() const { return backend_->device(); }
  // Memory, streams, copies and kernels of that device. Null on the CPU.
  DeviceRuntime* runtime() const { return backend_->runtime(); }
  absl::string_view backend_name() const { return backend_->name(); }
  absl::Duration timeout() const { return options_.timeout; }
  bool check_finite() const { return options_.check_finite; }
  int64_t check_replicas_every() const { return options_.check_replicas_every; }

  // Returns the channel with that name; the first call opens it. It lives as long as the
  // communicator. Parts of the library use names of the form "part#n" (see UniqueName), and "user"
  // is the user channel.
  absl::StatusOr<Channel*> OpenChannel(absl::string_view name);
  Channel& user() { return *user_; }
  // Returns "base#0", then "base#1", ...: equal on ranks that call it in the same order.
  std::string UniqueName(absl::string_view base);

  // Blocking calls on the user channel.
  absl::Status AllReduce(TensorView data, ReduceOp op) { return user_->AllReduce(data, op).Wait(); }
  absl::Status Broadcast(TensorView data, int root) { return user_->Broadcast(data, root).Wait(); }
  absl::Status AllGather(TensorView input, TensorView output) {
    return user_->AllGather(input, output).Wait();
  }
  absl::Status ReduceScatter(TensorView input, TensorView output, ReduceOp op) {
    return user_->ReduceScatter(input, output, op).Wait();
  }
  absl::Status Barrier() { return user_->Barrier().Wait(); }

  // Collectives over the control plane, on the host. Every rank calls each of them in the same
  // order.
  // Returns true on all ranks if `mine` is true on any rank.
  absl::StatusOr<bool> AgreeAny(bool mine);
  // Waits for all ranks. At the deadline, the ranks that wait in it return DeadlineExceeded with
  // all missing ranks, and the group ends, so that late ranks learn of it.
  absl::Status MonitoredBarrier(absl::Duration timeout);

  // The level of checks, see comm/verify.h. Setting it is a collective, with nothing in flight. If
  // the ranks differ in the level or in their positions, all return FailedPrecondition with the
  // ranks and their levels.
  VerifyLevel verify_level() const { return verify_.load(); }
  absl::Status SetVerifyLevel(VerifyLevel level);
  // Compares with all ranks the collectives issued on the channel so far, if the transport can pair
  // different ones (Backend::checks_pairs() is false) and the level is kPositions; else returns a
  // finished Work. All ranks call it at the same position. After its success, the results of the
  // earlier collectives may be used.
  Work CompareIssued(Channel& channel);

  // The operations of this rank, and their dump in the JSON format of comm/flight_dump.h. After a
  // failure the dump shows the moment of the failure.
  FlightRecorder& flight() { return flight_; }
  std::string FlightJson() const;
  absl::Status DumpFlight(const std::string& path) const;
  // <folder>/<group>.rank<r>.json
  std::string FlightPath(absl::string_view folder) const;

  // The control plane: small messages on the host, beside the data.
  ControlChannel& control() { return *control_; }

  // Returns the state that a layer above keeps for this group; the first call makes it. From any
  // thread. Used by StepControl::Of() (join/steps/step_control.h).
  internal::GroupExtension& Extension(
      absl::FunctionRef<std::unique_ptr<internal::GroupExtension>(Communicator*)> make);

  // Returns memory that the transport uses without a copy: zeroed, aligned to 64 bytes, freed with
  // the last handle, also after the group has ended: `static_cast<float*>(memory.data.get())`. Any
  // other memory works, too.
  absl::StatusOr<Memory> Allocate(int64_t bytes) { return backend_->Allocate(bytes); }
  // Returns OK, or the reason why this backend lacks the collective.
  absl::Status Supports(const Collective& what) const;
  // Returns OK, or the error that Channel::Issue() would return.
  absl::Status Check(const Collective& what, const TensorList& in, const TensorList& out) const;

  // OK while the group works; then the first cause of its end.
  absl::Status status() const;
  // Ends the group on every rank: peers see "rank <r> <did>: <why>". From any thread; later calls
  // have no effect.
  void Abort(const absl::Status& why, absl::string_view did = "aborted the group");
  // The Abort() of destructors, which run before the program can pass its reason. Ends the group on
  // this rank at once. The other ranks receive the reason of the Abort() that follows; without one
  // they receive `why` after 2 s, or when this object is destroyed.
  void AbortProvisionally(const absl::Status& why, absl::string_view did = "aborted the group");
  // Leaves the group cleanly: waits until every rank has called it after the same collectives, else
  // fails on all ranks with their positions. Nothing may be in flight. Afterwards only destruction
  // is allowed.
  absl::Status Finalize(absl::Duration timeout = kDefaultTimeout);

  // Leaves without waiting for the other ranks, for programs whose ranks end when they are done.
  // Nothing may be in flight. Ranks that need this one later fail, with its name; ranks that only
  // have to finish the collectives that have ended here do so. Afterwards only destruction is
  // allowed.
  absl::Status Leave();

  // Makes one group per color over the same backend, of the ranks that pass this color, ordered by
  // key, and by rank for equal keys. A rank that passes kNoColor gets null. All groups are
  // independent, this one included: each can fail alone. All ranks call it, in the same order as
  // other agreements; it succeeds on all of them or on none.
  // Errors: InvalidArgument for another negative color; this group remains usable. This group ends
  //         if a rank does not call it in time, or if a new group could not be made, which the
  //         message names.
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      absl::Duration timeout = absl::Minutes(2));

  // After the group has failed, makes a new one of the surviving ranks, in their order. Every
  // survivor calls it; it waits until each rank of the old group has called it, is lost, or has
  // left, and the survivors are connected in the new group. An attempt to connect has a third of
  // the remaining time, at least a second; when it fails, or another rank is lost meanwhile, the
  // survivors try again without the missing ranks. The old group is not changed, and may be
  // destroyed.
  // Errors: FailedPrecondition: the group has not failed. DeadlineExceeded names the ranks that
  //         neither called it nor left. Unavailable: the hub, which held the group together, is
  //         gone. Aborted: the other ranks have declared this one lost, and continue without it.
  absl::StatusOr<std::unique_ptr<Communicator>> Shrink(absl::Duration timeout = absl::Minutes(2));

 private:
  friend class Channel;
  friend class internal::GroupExtension;
  struct FlightMoment;

  // Keeps the first cause; returns false if there is one already.
  bool SetStatus(const absl::Status& why);
  // Returns the error that the other ranks receive when this one aborts with `why`.
  absl::Status AsOthersSee(const absl::Status& why, absl::string_view did) const;
  // If there is a provisional reason, and it is due at `now`, reports it to the other ranks.
  // Returns the time until it is due; infinite if there is none.
  absl::Duration ReportProvisional(absl::Time now);
  // Ends the group on this rank only: the peers have been notified.
  enum class End { kFailure, kClean };
  void Fail(const absl::Status& why, End end = End::kFailure);
  // Informs the other ranks through the hub. If this rank receives nothing and takes the hub for
  // lost, the hub judges which of the two is at fault.
  void Report(const absl::Status& why);
  // Ends the group with an error that every rank detects by itself. The hub is notified
  // nevertheless: otherwise a rank that ends its process early would be lost for ranks that have
  // not detected the error yet.
  void FailWithAll(const absl::Status& why);
  // An operation failed: ends the group on every rank. May be called with locks held.
  void OnBackendFailure(const absl::Status& why);
  // Returns `why` with its FailureInfo, or else with `otherwise`, and with the training step.
  absl::Status Informed(const absl::Status& why, const FailureInfo& otherwise) const;
  // The same on a thread that waits and holds no locks; afterwards nothing is in flight here.
  void OnDeadline(const absl::Status& why);
  void OnFinalizeNotice(int peer, absl::string_view positions);
  void OnAnySourceNotice(int from, absl::string_view topic, absl::string_view notice);
  // The end of Finalize() and Leave().
  void EndCleanly();
  void OnNotice(int from, absl::string_view topic, absl::string_view notice);
  // Makes this rank's half of a group of `ranks`, and waits until it is connected. `who` is the
  // calling function, for messages. An error of `status` ends the wait.
  using OriginStatus = std::function<absl::Status()>;
  absl::StatusOr<std::unique_ptr<Communicator>> MakeGroup(const std::string& name,
                                                          const std::vector<int>& ranks,
                                                          absl::Time deadline,
                                                          absl::string_view who,
                                                          OriginStatus status);
  std::string SerializePositions() const;
  // Returns an error, and ends the group, if a peer has left and will never reach `position` of
  // `channel`.
  absl::Status CheckAgainstLeft(absl::string_view channel, int64_t position,
                                absl::string_view next);

  // Verification and agreement (communicator_agreement.cc). Begins an exchange that ends a work.
  // `text` describes it in messages. `judge` runs on each rank; if it returns an error, the group
  // ends with it.
  struct Agreement;
  std::shared_ptr<Agreement> Agree(
      absl::string_view topic, std::string payload, absl::Duration timeout, std::string text,
      std::function<absl::Status(const ControlChannel::Parts&)> judge = nullptr);
  absl::StatusOr<ControlChannel::Parts> AgreeAndWait(
      absl::string_view topic, std::string payload, absl::Duration timeout, std::string text,
      std::function<absl::Status(const ControlChannel::Parts&)> judge = nullptr);
  void CompareLevels();
  // Begins to compare the operation, issued as `what`, with the other ranks. `whole` ends when the
  // comparison and the operation have ended; returns the work of the operation alone.
  std::shared_ptr<WorkState> CompareBeside(const std::string& channel, const Collective& what,
                                           const Operation& operation,
                                           std::shared_ptr<WorkState> whole);

  // Watching (communicator_watch.cc). Look() runs on the watchdog's thread: it sends the heartbeat,
  // ends operations that have missed their deadline, and logs warnings.
  absl::Duration Look();
  // Returns the silence after which the hub declares a rank lost; 0: never.
  absl::Duration LongestSilence() const;
  internal::RankStatus RankStatusNow() const;
  void CheckHub();
  void CheckDeadlines();
  void WarnOfStalls();
  std::vector<Channel*> channels() const;
  // Describes the wait for an operation; ends the group at its deadline.
  internal::Wait WaitFor(const Channel& channel, const FlightEntry& entry) const;
  void OnOperationDeadline(const Channel& channel, int64_t number);
  absl::Status DeadlineStatus(const internal::Wait& wait, absl::Duration waited);
  void KeepFlight();
  void WriteKeptFlight();
  FlightMoment FlightNow() const;

  const std::unique_ptr<ControlChannel> control_;
  const CommunicatorOptions options_;
  const int rank_;
  const int world_size_;
  const std::string group_;
  const GroupMaker make_group_;
  std::atomic<int> splits_ = 0;  // Equal on all ranks, which agree on each.
  std::vector<int> members_;     // Constant once it has been handed out.
  const std::shared_ptr<internal::Waits> waits_;
  FlightRecorder flight_;
  std::atomic<VerifyLevel> verify_;
  struct EarlyNotice {
    int from = 0;
    std::string topic, notice;
  };
  absl::Mutex extension_mutex_;
  std::deque<EarlyNotice> early_notices_ ABSL_GUARDED_BY(extension_mutex_);
  std::unique_ptr<internal::GroupExtension> extension_;
  std::atomic<internal::GroupExtension*> extension_in_use_ = nullptr;
  Channel* user_ = nullptr;

  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;  // Nothing is in flight any more.
  // The reason of AbortProvisionally(), until the other ranks are informed.
  struct Provisional {
    absl::Status why;  // For them.
    absl::Time report_at;
  };
  std::optional<Provisional> provisional_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<Channel>, std::less<>> channels_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int> name_counts_ ABSL_GUARDED_BY(mutex_);
  // The positions of peers that have announced their leave: rank -> channel -> position.
  std::atomic<bool> a_peer_left_ = false;
  std::map<int, std::map<std::string, int64_t>> left_ ABSL_GUARDED_BY(mutex_);
  bool has_finalized_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const FlightMoment> kept_flight_ ABSL_GUARDED_BY(mutex_);  // On failure.
  bool flight_is_written_ ABSL_GUARDED_BY(mutex_) = false;

  absl::Mutex agreement_mutex_;  // Held across ControlChannel::Exchange(), for equal numbering.
  std::map<std::string, int64_t, std::less<>> agreements_ ABSL_GUARDED_BY(agreement_mutex_);

  std::set<int64_t> warned_;           // Waits; the watchdog's thread only.
  bool has_reported_silence_ = false;  // The watchdog's thread only.
  const std::unique_ptr<internal::Watchdog> watchdog_;
  const std::unique_ptr<Backend> backend_;  // Last: its threads call back, and must end first.
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_COMMUNICATOR_H_
