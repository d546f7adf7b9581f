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
// make one over one backend. The type is the same for all.
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

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator_options.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group_extension.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {

namespace internal {
struct ChannelRecord;
struct GroupCore;
}  // namespace internal

class Communicator;

// For Communicator::Split(): the rank is in no new group.
inline constexpr int kNoColor = -1;

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
  // A message's tag, 0 or more. Sends and receives with one tag meet in the order of their issue;
  // messages with different tags do not wait for each other. There may be thousands of tags; each
  // used one keeps a counter of about 100 bytes.
  int64_t tag = 0;
};

class Channel {
 public:
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const std::string& name() const;
  uint64_t id() const;

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
  // Uneven: inputs[r] goes to rank r, outputs[r] comes from rank r, and a rank needs to know the
  // sizes of its own tensors only, which may be 0. A sender and a receiver with different sizes end
  // the group with an error. All tensors have one dtype. Exhausted ranks (join/scope.h) do not
  // shadow these.
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

  Channel(internal::GroupCore* group, internal::ChannelRecord* record)
      : group_(*group), record_(*record) {}

  // `from` receives the sender; null if `what` names the ranks.
  Work Issue(const Collective& what, TensorList in, TensorList out, const CallOptions& options,
             int* from);
  // Makes an operation's work and its entry in the flight record; returns the entry's number first.
  // `what` is what the program issued: an average of integers travels in another type.
  std::pair<int64_t, std::shared_ptr<WorkState>> Record(const Operation& operation,
                                                        const Collective& what, absl::Time issued);

  internal::GroupCore& group_;
  internal::ChannelRecord& record_;
};

// Makes this rank's half of another group over the given link. Split() and Shrink() need it from
// the factory that made this group.
using GroupMaker = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    absl::string_view group, int rank, int world_size, std::unique_ptr<ControlLink> link,
    absl::Duration timeout)>;

// Opens a newcomer's link to the job.
using NewcomerLink = std::function<absl::StatusOr<std::unique_ptr<ControlLink>>(absl::Duration)>;

struct RegroupOptions {
  absl::Duration timeout = absl::Minutes(2);  // Of the whole call, the wait not included.
  // For how long the survivors wait for newcomers in the places of lost ranks, counted from the
  // arrival of the last survivor; a further loss begins the wait once again. The longest wait of
  // all ranks counts. 0: no newcomer enters.
  absl::Duration wait_for_replacement = absl::ZeroDuration();
};

struct Regrouped {
  std::unique_ptr<Communicator> comm;
  std::vector<int> lost;     // Places (ranks in the job's first group) of lost processes.
  std::vector<int> entered;  // Ranks of the new group that are newcomers, in these places.
};

class Communicator {
 public:
  // For factories. `control` must be connected, and has the rank and the world size. Split(),
  // Shrink() and Regroup() need `make_group`. With `newcomer`, it is waiting().
  Communicator(std::unique_ptr<Backend> backend, std::unique_ptr<ControlChannel> control,
               CommunicatorOptions options = {}, absl::string_view group = "world",
               GroupMaker make_group = nullptr, NewcomerLink newcomer = nullptr);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int world_size() const;
  // The group's name, equal on all ranks; and, by rank, the rank in the job's first group.
  const std::string& group() const;
  const std::vector<int>& members() const;
  Device device() const;
  // The memory, streams, copies and kernels of that device. Null on the CPU.
  DeviceRuntime* runtime() const;
  absl::string_view backend_name() const;
  absl::Duration timeout() const;
  // Returns whether this process takes the place of a lost rank (EVENKEEL_NEWCOMER), and is not in
  // the group yet: Enter() (join/recovery.h) or Regroup() make the communicator with which it is.
  // Until then this one has the rank and the size of the job's first group, and may be used only to
  // create Joinables: agreements and broadcasts end at once, as if all ranks had passed what this
  // one passes; results of reductions are unspecified; a step is an error. Such a process must not
  // open the job's files, or print for it.
  bool waiting() const;

  // Returns the channel with that name; the first call opens it. It lives as long as the
  // communicator. Parts of the library use names of the form "part#n" (see UniqueName), and "user"
  // is the user channel.
  absl::StatusOr<Channel*> OpenChannel(absl::string_view name);
  Channel& user();
  // Returns "base#0", then "base#1", ...: equal on ranks that call it in the same order.
  std::string UniqueName(absl::string_view base);

  // Blocking calls on the user channel.
  absl::Status AllReduce(TensorView data, ReduceOp op) { return user().AllReduce(data, op).Wait(); }
  absl::Status Broadcast(TensorView data, int root) { return user().Broadcast(data, root).Wait(); }
  absl::Status AllGather(TensorView input, TensorView output) {
    return user().AllGather(input, output).Wait();
  }
  absl::Status ReduceScatter(TensorView input, TensorView output, ReduceOp op) {
    return user().ReduceScatter(input, output, op).Wait();
  }
  absl::Status Barrier() { return user().Barrier().Wait(); }

  // Collectives over the control plane, on the host. Every rank calls each of them in the same
  // order.
  // Returns true on all ranks if `mine` is true on any rank.
  absl::StatusOr<bool> AgreeAny(bool mine);
  // Waits for all ranks. At the deadline, the ranks that wait in it return DeadlineExceeded with
  // all missing ranks, and the group ends, so that late ranks learn of it.
  absl::Status MonitoredBarrier(absl::Duration timeout);

  // The level of checks (comm/verify.h). Setting it is a collective; nothing may be in flight. If
  // the ranks differ in the level or in their positions, all return FailedPrecondition with the
  // ranks and their levels.
  VerifyLevel verify_level() const;
  absl::Status SetVerifyLevel(VerifyLevel level);
  // Compares with all ranks the collectives issued on the channel so far, if the transport can pair
  // different ones (Backend::checks_pairs() is false) and the level is kPositions; else returns a
  // finished Work. All ranks call it at the same position. After its success, the results of the
  // earlier collectives may be used.
  Work CompareIssued(Channel& channel);

  // The operations of this rank, and their dump in the JSON format of comm/flight_dump.h. After a
  // failure the dump shows the moment of the failure.
  FlightRecorder& flight();
  std::string FlightJson() const;
  absl::Status DumpFlight(const std::string& path) const;
  // Returns "<folder>/<group>.rank<r>.json".
  std::string FlightPath(absl::string_view folder) const;

  // The control plane: small messages on the host, beside the data.
  ControlChannel& control();

  // Returns the state that a layer above keeps for this group (comm/group_extension.h); the first
  // call makes it as T(this, args...). All calls name one type. From any thread. Used by
  // StepControl::Of() (join/steps/step_control.h).
  template <std::derived_from<internal::GroupExtension> T, typename... Args>
  T& Extension(Args&&... args) {
    return static_cast<T&>(
        ExtensionOf(typeid(T), [&]() -> std::unique_ptr<internal::GroupExtension> {
          return std::make_unique<T>(this, std::forward<Args>(args)...);
        }));
  }

  // Returns memory that the transport uses without a copy: zeroed, aligned to 64 bytes, freed with
  // the last handle, also after the group has ended: `static_cast<float*>(memory.data.get())`. Any
  // other memory works, too.
  absl::StatusOr<Memory> Allocate(int64_t bytes);
  // Returns OK, or the reason why this backend lacks the collective. InvalidArgument for a bitwise
  // reduction of floats.
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
  // key, and by rank for equal keys. A rank that passes kNoColor gets null. All groups, this one
  // included, are independent: each can fail alone. All ranks call it, in the same order as other
  // agreements; it succeeds on all of them or on none.
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
  // Like Shrink(), but newcomers take the places of lost ranks. On a communicator that is
  // waiting(), waits for the loss of its rank. Errors in addition: FailedPrecondition: this
  // newcomer is refused.
  absl::StatusOr<Regrouped> Regroup(const RegroupOptions& options);

 private:
  friend class internal::GroupExtension;
  friend struct internal::GroupCore;

  internal::GroupExtension& ExtensionOf(
      const std::type_info& type,
      absl::FunctionRef<std::unique_ptr<internal::GroupExtension>()> make);

  const std::unique_ptr<internal::GroupCore> core_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_COMMUNICATOR_H_
