#include "evenkeel/comm/communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/integer_average.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/positions.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/control/watchdog.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/living_groups.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// The elements of a rank's input and output in a collective.
struct Elements {
  int64_t in = 0;
  int64_t out = 0;
};

Elements ElementsOf(const Collective& what, int world_size) {
  switch (what.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kBroadcast:
      return {what.count, what.count};
    case CollectiveKind::kAllGather:
      return {what.count, what.count * world_size};
    case CollectiveKind::kReduceScatter:
      return {what.count * world_size, what.count};
    case CollectiveKind::kAllToAll:
      return {what.count * world_size, what.count * world_size};
    case CollectiveKind::kSend:
      return {what.count, 0};
    case CollectiveKind::kRecv:
      return {0, what.count};
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllGatherV:
    case CollectiveKind::kAllToAllV:
      return {0, 0};
  }
  return {};
}

absl::Status CheckTensors(const Collective& what, const TensorList& tensors, Device device,
                          absl::string_view side) {
  for (const TensorView& tensor : tensors) {
    if (tensor.dtype != what.dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat(side, " has ", ToString(tensor), ", expected ", ToString(what.dtype)));
    }
    if (!(tensor.device == device)) {
      return absl::InvalidArgumentError(absl::StrCat(side, " lies on ", ToString(tensor.device),
                                                     ", the group's tensors on ",
                                                     ToString(device)));
    }
    if (tensor.count < 0 || (tensor.data == nullptr && tensor.count > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat(side, " has no memory for ", ToString(tensor)));
    }
  }
  return absl::OkStatus();
}

int64_t TotalCount(absl::Span<const TensorView> parts) {
  int64_t total = 0;
  for (const TensorView& part : parts) total += part.count;
  return total;
}

absl::Status CheckTotal(const TensorList& tensors, int64_t expected, absl::string_view side) {
  const int64_t total = TotalCount(tensors);
  if (total == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(side, " has ", total, " elements, expected ", expected));
}

bool AveragesIntegers(const Collective& what) {
  return Reduces(what.kind) && what.op == ReduceOp::kAverage && !IsFloat(what.dtype);
}

// The sizes of an uneven collective, as far as this rank knows them.
absl::Status CheckUneven(const Collective& what, const TensorList& in, const TensorList& out,
                         const Communicator& comm) {
  if (what.count != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("count is ", what.count, ", expected 0: the tensors have the sizes"));
  }
  const size_t inputs = what.kind == CollectiveKind::kAllGatherV ? 1 : comm.world_size();
  const size_t outputs = comm.world_size();
  if (in.size() != inputs || out.size() != outputs) {
    return absl::InvalidArgumentError(absl::StrCat(
        in.size(), " inputs and ", out.size(), " outputs, expected ", inputs, " and ", outputs));
  }
  const int64_t own = in[inputs == 1 ? 0 : comm.rank()].count;
  if (out[comm.rank()].count != own) {
    return absl::InvalidArgumentError(absl::StrCat("the output for the rank's own elements has ",
                                                   out[comm.rank()].count, ", expected ", own));
  }
  return absl::OkStatus();
}

enum class Peer { kNamed, kAny };

absl::Status Validate(const Collective& what, const TensorList& in, const TensorList& out,
                      const Communicator& comm, Peer peer = Peer::kNamed) {
  if (what.count < 0) return absl::InvalidArgumentError(absl::StrCat("count is ", what.count));
  if (what.tag < 0 || (what.tag != 0 && !IsPair(what.kind))) {
    return absl::InvalidArgumentError(
        absl::StrCat("tag is ", what.tag, ", expected ", IsPair(what.kind) ? "0 or more" : "0"));
  }
  if (peer == Peer::kAny) {
    if (comm.world_size() == 1) {
      return absl::InvalidArgumentError(
          "the group has no other rank (receive only in groups of two or more)");
    }
  } else if (HasRoot(what.kind)) {
    if (what.root < 0 || what.root >= comm.world_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", what.root, " is not in a group of ", comm.world_size()));
    }
    if (IsPair(what.kind) && what.root == comm.rank()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", comm.rank(), " named itself as the peer"));
    }
  }
  if (Reduces(what.kind) && IsBitwise(what.op) && IsFloat(what.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToString(what.op), " needs an integer type, not ", ToString(what.dtype)));
  }
  EK_RETURN_IF_ERROR(CheckTensors(what, in, comm.device(), "input"));
  EK_RETURN_IF_ERROR(CheckTensors(what, out, comm.device(), "output"));
  if (IsUneven(what.kind)) {
    EK_RETURN_IF_ERROR(CheckUneven(what, in, out, comm));
  } else {
    const Elements elements = ElementsOf(what, comm.world_size());
    EK_RETURN_IF_ERROR(CheckTotal(in, elements.in, "input"));
    EK_RETURN_IF_ERROR(CheckTotal(out, elements.out, "output"));
  }
  return comm.Supports(what);
}

Collective Describe(CollectiveKind kind, DType dtype, int64_t count, const CallOptions& options) {
  return {.kind = kind,
          .dtype = dtype,
          .count = count,
          .role = options.role,
          .index = options.index,
          .index_count = options.index_count,
          .tag = options.tag};
}

}  // namespace

// Channel -----------------------------------------------------------------------------------------

Channel::Channel(Communicator* communicator, std::string name)
    : communicator_(communicator), name_(std::move(name)), id_(StableHash(0, name_)) {}

Work Channel::AllReduce(TensorView data, ReduceOp op, const CallOptions& options) {
  return AllReduce(absl::MakeConstSpan(&data, 1), op, options);
}

Work Channel::AllReduce(absl::Span<const TensorView> parts, ReduceOp op,
                        const CallOptions& options) {
  const DType dtype = parts.empty() ? DType::kFloat32 : parts[0].dtype;
  Collective what = Describe(CollectiveKind::kAllReduce, dtype, TotalCount(parts), options);
  what.op = op;
  const TensorList list(parts.begin(), parts.end());
  return Issue(what, list, list, options);
}

Work Channel::Reduce(TensorView data, ReduceOp op, int root, const CallOptions& options) {
  Collective what = Describe(CollectiveKind::kReduce, data.dtype, data.count, options);
  what.op = op;
  what.root = root;
  return Issue(what, {data}, {data}, options);
}

Work Channel::Broadcast(TensorView data, int root, const CallOptions& options) {
  return Broadcast(absl::MakeConstSpan(&data, 1), root, options);
}

Work Channel::Broadcast(absl::Span<const TensorView> parts, int root, const CallOptions& options) {
  const DType dtype = parts.empty() ? DType::kFloat32 : parts[0].dtype;
  Collective what = Describe(CollectiveKind::kBroadcast, dtype, TotalCount(parts), options);
  what.root = root;
  const TensorList list(parts.begin(), parts.end());
  return Issue(what, list, list, options);
}

Work Channel::AllGather(TensorView input, TensorView output, const CallOptions& options) {
  return Issue(Describe(CollectiveKind::kAllGather, input.dtype, input.count, options), {input},
               {output}, options);
}

Work Channel::ReduceScatter(TensorView input, TensorView output, ReduceOp op,
                            const CallOptions& options) {
  Collective what = Describe(CollectiveKind::kReduceScatter, output.dtype, output.count, options);
  what.op = op;
  return Issue(what, {input}, {output}, options);
}

Work Channel::AllToAll(TensorView input, TensorView output, const CallOptions& options) {
  const int world_size = communicator_->world_size();
  if (input.count % world_size != 0) {
    return Work(absl::InvalidArgumentError(
        absl::StrCat("all_to_all on channel ", name_, ": ", input.count,
                     " elements cannot be split over ", world_size, " ranks")));
  }
  return Issue(Describe(CollectiveKind::kAllToAll, input.dtype, input.count / world_size, options),
               {input}, {output}, options);
}

Work Channel::AllGather(TensorView input, absl::Span<const TensorView> outputs,
                        const CallOptions& options) {
  return Issue(Describe(CollectiveKind::kAllGatherV, input.dtype, 0, options), {input},
               TensorList(outputs.begin(), outputs.end()), options);
}

Work Channel::AllToAll(absl::Span<const TensorView> inputs, absl::Span<const TensorView> outputs,
                       const CallOptions& options) {
  const DType dtype = inputs.empty() ? DType::kFloat32 : inputs[0].dtype;
  return Issue(Describe(CollectiveKind::kAllToAllV, dtype, 0, options),
               TensorList(inputs.begin(), inputs.end()), TensorList(outputs.begin(), outputs.end()),
               options);
}

Work Channel::Send(TensorView data, int to, const CallOptions& options) {
  Collective what = Describe(CollectiveKind::kSend, data.dtype, data.count, options);
  what.root = to;
  return Issue(what, {data}, {}, options);
}

Work Channel::Recv(TensorView data, int from, const CallOptions& options) {
  Collective what = Describe(CollectiveKind::kRecv, data.dtype, data.count, options);
  what.root = from;
  return Issue(what, {}, {data}, options);
}

Work Channel::RecvAny(TensorView data, int* from, const CallOptions& options) {
  return Issue(Describe(CollectiveKind::kRecv, data.dtype, data.count, options), {}, {data},
               options, from);
}

Work Channel::Barrier(const CallOptions& options) {
  return Issue(Describe(CollectiveKind::kBarrier, DType::kInt8, 0, options), {}, {}, options);
}

namespace {

// Adds to the error that has ended an operation in which operation this rank was, unless it says
// where it happened.
absl::Status AtLeastIn(const std::optional<FlightEntry>& entry, absl::Status status) {
  std::optional<FailureInfo> info = FailureInfoOf(status);
  if (!info.has_value() || !info->operation.empty() || !entry.has_value()) return status;
  info->operation = ToString(entry->what);
  info->position = entry->sequence;
  return WithFailureInfo(std::move(status), *info);
}

Operation OperationOf(const Collective& what, TensorList in, TensorList out,
                      const CallOptions& options) {
  Operation operation;
  operation.what = what;
  operation.in = std::move(in);
  operation.out = std::move(out);
  operation.scale = options.scale;
  operation.contributes = options.contributes;
  operation.after = options.after;
  operation.after_event = options.after_event;
  return operation;
}

}  // namespace

Work Channel::Issue(const Collective& what, TensorList in, TensorList out,
                    const CallOptions& options) {
  return Issue(what, std::move(in), std::move(out), options, nullptr);
}

Work Channel::Issue(const Collective& what, TensorList in, TensorList out,
                    const CallOptions& options, int* from) {
  Communicator& comm = *communicator_;
  if (absl::Status ended = comm.status(); !ended.ok()) return Work(std::move(ended));
  const Peer peer = from == nullptr ? Peer::kNamed : Peer::kAny;
  if (absl::Status wrong = Validate(what, in, out, comm, peer); !wrong.ok()) {
    return Work(Annotate(
        wrong, absl::StrCat(ToString(what.kind), peer == Peer::kAny ? " from any rank" : "",
                            " on channel ", name_, ", rank ", comm.rank())));
  }
  Operation operation = OperationOf(what, std::move(in), std::move(out), options);
  operation.channel = id_;
  const absl::Duration timeout =
      options.timeout > absl::ZeroDuration() ? options.timeout : comm.timeout();
  const absl::Time now = SteadyNow();
  operation.deadline = now + timeout;
  std::function<void()> conclude;
  if (AveragesIntegers(what)) {
    absl::StatusOr<std::function<void()>> wide =
        internal::WidenAverage(operation, comm.world_size());
    if (!wide.ok()) {
      comm.OnBackendFailure(wide.status());
      return Work(comm.status());
    }
    conclude = *std::move(wide);
  } else if (Reduces(what.kind) && what.op == ReduceOp::kAverage) {
    operation.scale /= comm.world_size();
  }

  comm.waits_->Use();

  // Held across Start(), so that operations reach the backend in the order of their sequence
  // numbers.
  absl::MutexLock lock(&mutex_);
  if (IsPair(what.kind)) {
    operation.sequence = pair_positions_[{what.root, what.kind, what.tag}]++;
    if (any_ != nullptr) OnPair(what, operation.sequence + 1);
  } else {
    if (comm.a_peer_left_) {
      absl::Status left = comm.CheckAgainstLeft(name_, position_, ToString(what));
      if (!left.ok()) return Work(std::move(left));
    }
    operation.sequence = position_++;
    issued_hash_ = HashOf(what, issued_hash_);
    last_issued_ = what;
  }
  auto [number, work] = Record(operation, what, now);
  if (from != nullptr) {
    ReceiveFromAny(std::move(operation), number, work, from);
    return Work(std::move(work));
  }
  if (conclude != nullptr) {
    work->on_end = [conclude, end = std::move(work->on_end)](absl::Status status) {
      if (status.ok()) conclude();
      return end(std::move(status));
    };
  }
  const bool is_compared =
      comm.verify_level() == VerifyLevel::kEvery && !IsPair(what.kind) && comm.world_size() > 1;
  const auto moves = is_compared ? comm.CompareBeside(name_, what, operation, work) : work;
  comm.backend_->Start(std::move(operation), moves);
  if (is_compared)
    work->order_before = moves->order_before;  // Streams do not wait for comparisons on the host.
  return Work(std::move(work));
}

std::pair<int64_t, std::shared_ptr<WorkState>> Channel::Record(const Operation& operation,
                                                               const Collective& what,
                                                               absl::Time issued) {
  Communicator& comm = *communicator_;
  const int64_t number = comm.flight_.Begin({.channel = id_,
                                             .sequence = operation.sequence,
                                             .what = what,
                                             .issued = issued,
                                             .deadline = operation.deadline});
  auto work = std::make_shared<WorkState>(
      operation.deadline, [this, number] { communicator_->OnOperationDeadline(*this, number); },
      comm.waits_,
      [this, number] {
        const std::optional<FlightEntry> entry = communicator_->flight_.Get(number);
        return entry.has_value() ? communicator_->WaitFor(*this, *entry) : internal::Wait{};
      });
  work->on_end = [&comm, number](absl::Status status) {
    comm.flight_.End(number, status);
    if (status.ok()) return status;
    comm.OnBackendFailure(status);
    return AtLeastIn(comm.flight_.Get(number), std::move(status));
  };
  return {number, std::move(work)};
}

int64_t Channel::position() const {
  absl::MutexLock lock(&mutex_);
  return position_;
}

// Communicator ------------------------------------------------------------------------------------

namespace {

// For data that is on its way to ranks that do not read it.
constexpr absl::Duration kFlush = absl::Seconds(5);
constexpr absl::Duration kHubGrace = absl::Seconds(2);
// How long peers wait for the reason of a rank whose destructors have ended the group. A transport
// that notices the end by itself waits for longer (comm/tcp/backend.cc).
constexpr absl::Duration kTimeForReason = absl::Seconds(2);

// Which rank caused an error without a FailureInfo is not known from its code.
FailureInfo KindAndNoRanks(const absl::Status& why) {
  if (absl::IsFailedPrecondition(why)) return {.kind = FailureKind::kDisagreement};
  if (absl::IsDeadlineExceeded(why)) return {.kind = FailureKind::kDeadline};
  return {};
}

}  // namespace

const std::shared_ptr<internal::Waits>& internal::GroupExtension::waits() const {
  return comm_->waits_;
}

void internal::GroupExtension::OnDeadline(const Wait& wait) {
  comm_->OnDeadline(comm_->DeadlineStatus(wait, comm_->timeout()));
}

void internal::GroupExtension::FailWithAll(const absl::Status& why) { comm_->FailWithAll(why); }

absl::Status internal::GroupExtension::CheckAgainstLeft(int64_t position) {
  return comm_->CheckAgainstLeft(kStepsChannel, position, "");
}

Communicator::Communicator(std::unique_ptr<Backend> backend,
                           std::unique_ptr<ControlChannel> control, CommunicatorOptions options,
                           absl::string_view group, GroupMaker make_group)
    : control_(std::move(control)),
      options_(options),
      rank_(control_->rank()),
      world_size_(control_->world_size()),
      group_(group),
      make_group_(std::move(make_group)),
      members_(world_size_),
      waits_(control_->waits()),
      flight_(options_.flight.capacity),
      verify_(options_.verify.value_or(VerifyLevel::kPositions)),
      watchdog_(std::make_unique<internal::Watchdog>([this] { return Look(); })),
      backend_(std::move(backend)) {
  std::iota(members_.begin(), members_.end(), 0);
  control_->SetEndless(options_.timeout);
  user_ = *OpenChannel("user");
  control_->SetHandlers([this](int, const absl::Status& why) { Fail(why); },
                        [this](int from, absl::string_view topic, absl::string_view payload) {
                          OnNotice(from, topic, payload);
                        });
  // Comes before the exchange that reports the arrival of the ranks: from then on the hub expects
  // heartbeats from each rank, so that a rank that falls silent immediately is detected like any
  // other.
  const bool beats = options_.watch.beat < absl::InfiniteDuration();
  if (beats) control_->Beat("", LongestSilence());
  CompareLevels();
  if (beats) {
    if (const absl::Status started = watchdog_->Start(); !started.ok()) Abort(started);
  }
  internal::AddLiving(this);
}

Communicator::~Communicator() {
  internal::RemoveLiving(this);
  ReportProvisional(absl::InfiniteFuture());
  Fail(WithFailureInfo(
      absl::CancelledError(absl::StrCat("rank ", rank_, " destroyed its communicator")),
      {.ranks = {rank_}}));
  watchdog_->Stop();  // It, and the control channel's handlers, use the other members.
  control_->Stop();
  WriteKeptFlight();
}

void Communicator::OnNotice(int from, absl::string_view topic, absl::string_view notice) {
  if (topic == "finalize") return OnFinalizeNotice(from, notice);
  if (topic == Channel::kAskForSends || topic == Channel::kAnnounceSends)
    return OnAnySourceNotice(from, topic, notice);
  if (extension_in_use_ == nullptr) {
    absl::MutexLock lock(&extension_mutex_);
    if (extension_in_use_ == nullptr) {
      early_notices_.push_back({from, std::string(topic), std::string(notice)});
      return;
    }
  }
  extension_in_use_.load()->OnNotice(from, topic, notice);
}

internal::GroupExtension& Communicator::Extension(
    absl::FunctionRef<std::unique_ptr<internal::GroupExtension>(Communicator*)> make) {
  if (extension_in_use_ == nullptr) {
    absl::MutexLock lock(&extension_mutex_);
    if (extension_ == nullptr) {
      extension_ = make(this);
      // Without the lock: a notice may end the group, whose callbacks may call this function. One
      // that arrives meanwhile is appended, so the order is kept.
      while (!early_notices_.empty()) {
        const EarlyNotice early = std::move(early_notices_.front());
        early_notices_.pop_front();
        extension_mutex_.Unlock();
        extension_->OnNotice(early.from, early.topic, early.notice);
        extension_mutex_.Lock();
      }
      extension_in_use_ = extension_.get();
    }
    return *extension_;
  }
  return *extension_in_use_;
}

absl::StatusOr<Channel*> Communicator::OpenChannel(absl::string_view name) {
  if (name.empty() || name == internal::kStepsChannel || absl::StrContains(name, '\t') ||
      absl::StrContains(name, '\n')) {
    return absl::InvalidArgumentError(
        absl::StrCat("OpenChannel: \"", name, "\" cannot name a channel"));
  }
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<Channel>& channel = channels_[std::string(name)];
  if (channel == nullptr) channel = std::make_unique<Channel>(this, std::string(name));
  return channel.get();
}

absl::Status Communicator::Supports(const Collective& what) const {
  if (AveragesIntegers(what) && !device().is_cpu()) {
    return absl::UnimplementedError(
        absl::StrCat(backend_name(), ": no average of ", ToString(what.dtype),
                     ", whose sum may not fit into the type. Sum up int64, and divide the sum by ",
                     world_size_));
  }
  return backend_->Supports(what);
}

absl::Status Communicator::Check(const Collective& what, const TensorList& in,
                                 const TensorList& out) const {
  return Annotate(Validate(what, in, out, *this),
                  absl::StrCat(ToString(what.kind), ", rank ", rank_));
}

std::string Communicator::UniqueName(absl::string_view base) {
  absl::MutexLock lock(&mutex_);
  return absl::StrCat(base, "#", name_counts_[std::string(base)]++);
}

absl::Status Communicator::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

bool Communicator::SetStatus(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (!status_.ok()) return false;
  status_ = why;
  return true;
}

void Communicator::Fail(const absl::Status& why, End end) {
  SetStatus(end == End::kFailure ? Informed(why, KindAndNoRanks(why)) : why);
  const absl::Status first = status();
  if (end == End::kFailure) KeepFlight();  // Before the operations in flight end.
  backend_->Abort(first);
  for (Channel* channel : channels()) channel->EndAnySource(first);
  control_->Close(first);
  {
    absl::MutexLock lock(&mutex_);
    has_ended_ = true;
  }
  watchdog_->Wake();
}

void Communicator::Report(const absl::Status& why) {
  const std::optional<FailureInfo> info = FailureInfoOf(why);
  const bool is_hubs = info.has_value() && info->kind == FailureKind::kRankLost &&
                       (info->ranks.empty() || info->ranks == control_->HubLost().ranks);
  // The error of another group of this process comes before this group has been without messages
  // for as long: their heartbeats are not sent at the same time.
  const WatchOptions& watch = options_.watch;
  const absl::Duration limit = std::max(watch.silence / 2, watch.silence - 2 * watch.beat);
  const absl::Duration silence = absl::Trunc(control_->link().Silence(), absl::Milliseconds(1));
  const bool is_unheard = watch.silence > absl::ZeroDuration() && silence > limit;
  control_->Fail(why, is_hubs && is_unheard ? silence : absl::ZeroDuration());
}

void Communicator::FailWithAll(const absl::Status& why) {
  Report(Informed(why, KindAndNoRanks(why)));
  Fail(why);
}

absl::Status Communicator::AsOthersSee(const absl::Status& why, absl::string_view did) const {
  const std::string code = absl::StatusCodeToString(why.code());
  return WithFailureInfo(
      absl::UnavailableError(absl::StrCat("rank ", rank_, " ", did, ": ",
                                          why.message().empty() ? code : why.message())),
      *FailureInfoOf(why));
}

void Communicator::Abort(const absl::Status& why, absl::string_view did) {
  if (why.ok()) return Abort(absl::CancelledError("aborted without a reason"), did);
  // The caller ends the group, whatever the code of its reason is.
  const absl::Status informed = Informed(why, {.ranks = {rank_}});
  bool is_first = false;
  {
    absl::MutexLock lock(&mutex_);
    is_first = status_.ok() || provisional_.has_value();
    if (is_first) status_ = informed;
    provisional_.reset();
  }
  if (is_first) Report(AsOthersSee(informed, did));
  // Also if another rank was first: afterwards nothing is in flight on this rank, with or without a
  // reply of the hub.
  Fail(informed);
}

void Communicator::AbortProvisionally(const absl::Status& why, absl::string_view did) {
  const absl::Status informed = Informed(why, {.ranks = {rank_}});
  const absl::Time now = SteadyNow();
  {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) {
      status_ = informed;
      const bool is_watched = options_.watch.beat < absl::InfiniteDuration();
      provisional_ = {.why = AsOthersSee(informed, did),
                      .report_at = now + (is_watched ? kTimeForReason : absl::ZeroDuration())};
    }
  }
  ReportProvisional(now);
  Fail(informed);  // Wakes the watchdog, which reports it in time.
}

absl::Duration Communicator::ReportProvisional(absl::Time now) {
  absl::Status why;
  {
    absl::MutexLock lock(&mutex_);
    if (!provisional_.has_value()) return absl::InfiniteDuration();
    if (now < provisional_->report_at) return provisional_->report_at - now;
    why = std::move(provisional_->why);
    provisional_.reset();
  }
  Report(why);
  return absl::InfiniteDuration();
}

void Communicator::OnDeadline(const absl::Status& why) {
  OnBackendFailure(why);
  // The hub's message ends everything on this rank, as on the others. If the hub is silent, the
  // waiting thread must not be delayed for long.
  absl::MutexLock lock(&mutex_);
  if (AwaitFor(mutex_, absl::Condition(&has_ended_), kHubGrace)) return;
  mutex_.Unlock();
  Fail(why);
  mutex_.Lock();
}

void Communicator::OnBackendFailure(const absl::Status& why) {
  FailureInfo otherwise = KindAndNoRanks(why);
  if (otherwise.kind == FailureKind::kRankFailed) otherwise.ranks = {rank_};
  const absl::Status informed = Informed(why, otherwise);
  if (!SetStatus(informed)) return;
  // The hub sends it back to this rank, too, and Fail() then runs on the control thread: the caller
  // of this function may hold locks that the callbacks of ended operations need.
  const bool names_ranks = absl::IsFailedPrecondition(why) || FailureInfoOf(why).has_value();
  Report(names_ranks ? informed : Annotate(informed, absl::StrCat("rank ", rank_)));
}

absl::Status Communicator::Informed(const absl::Status& why, const FailureInfo& otherwise) const {
  FailureInfo info = FailureInfoOf(why).value_or(otherwise);
  const internal::GroupExtension* extension = extension_in_use_;
  if (info.step < 0 && extension != nullptr && extension->position() > 0)
    info.step = extension->position();
  return WithFailureInfo(why, info);
}

std::vector<Channel*> Communicator::channels() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Channel*> channels;
  for (const auto& [name, channel] : channels_) channels.push_back(channel.get());
  return channels;
}

std::string Communicator::SerializePositions() const {
  internal::Positions positions;
  const internal::GroupExtension* extension = extension_in_use_;
  positions[internal::kStepsChannel].position = extension == nullptr ? 0 : extension->position();
  for (const Channel* channel : channels()) {
    absl::MutexLock lock(&channel->mutex_);
    if (!channel->last_issued_.has_value()) continue;  // Not all ranks may have opened it.
    positions[channel->name_] = {channel->position_, channel->issued_hash_,
                                 ToString(*channel->last_issued_)};
  }
  return internal::Serialize(positions);
}

namespace {

constexpr char kFinalization[] = "the finalization of the group";

// The ranks when they finalize: their positions on the channels, and the states of their
// extensions; "" where there is none.
struct Ends {
  std::vector<std::string> positions, states;
};

absl::StatusOr<Ends> ParseEnds(const ControlChannel::Parts& parts) {
  Ends ends;
  for (const std::string& part : parts) {
    internal::ByteReader reader(part);
    ends.positions.emplace_back(reader.Bytes());
    ends.states.emplace_back(reader.Bytes());
    EK_RETURN_IF_ERROR(reader.Finish(kFinalization));
  }
  return ends;
}

// Returns the error of the lowest rank that has one. `parts` has a status of each.
absl::Status LowestError(const ControlChannel::Parts& parts) {
  for (const std::string& part : parts) {
    internal::ByteReader reader(part);
    const absl::Status status = reader.Status();
    EK_RETURN_IF_ERROR(reader.Finish(kFinalization));
    EK_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Communicator::Finalize(absl::Duration timeout) {
  EK_RETURN_IF_ERROR(status());
  const internal::GroupExtension* const extension = extension_in_use_;
  const std::string positions = SerializePositions();
  // Sent to all ranks at once, so that a rank that waits for a collective which this one will never
  // join is informed. Ranks at the same positions send equal messages, of which one is enough.
  control_->NotifyOnce("finalize", positions);
  std::string end = internal::ByteWriter()
                        .Bytes(positions)
                        .Bytes(extension == nullptr ? "" : extension->FinalState())
                        .Take();
  absl::StatusOr<ControlChannel::Parts> parts =
      AgreeAndWait("finalize", std::move(end), timeout, kFinalization);
  if (!parts.ok()) return status();
  const absl::StatusOr<Ends> ends = ParseEnds(*parts);
  absl::Status same = ends.status();
  if (same.ok() && extension != nullptr)
    same = Annotate(extension->CompareFinalStates(ends->states), kFinalization);
  const auto is_empty = [](const std::string& state) { return state.empty(); };
  if (ends.ok() && std::ranges::any_of(ends->states, is_empty) &&
      !std::ranges::all_of(ends->states, is_empty)) {
    // A rank without an extension cannot compare states: it gets the error of the others.
    if (!AgreeAndWait("final states", internal::ByteWriter().Status(same).Take(), timeout,
                      kFinalization, LowestError)
             .ok())
      return status();
  }
  if (same.ok()) same = internal::ComparePositions(kFinalization, ends->positions);
  if (!same.ok()) {
    FailWithAll(same);
    return status();
  }
  EndCleanly();
  return absl::OkStatus();
}

absl::Status Communicator::Leave() {
  EK_RETURN_IF_ERROR(status());
  backend_->Flush(SteadyNow() + kFlush);
  control_->NotifyOnce("finalize", SerializePositions());
  // The last report: it shows the hub that others who still wait in the last collectives can go on.
  control_->Beat(RankStatusNow().Serialize(), absl::ZeroDuration());
  EndCleanly();
  return absl::OkStatus();
}

void Communicator::EndCleanly() {
  control_->Leave();
  {
    absl::MutexLock lock(&mutex_);
    has_finalized_ = true;
  }
  Fail(absl::FailedPreconditionError(absl::StrCat("rank ", rank_, " has left the group")),
       End::kClean);
}

void Communicator::OnFinalizeNotice(int peer, absl::string_view text) {
  std::map<std::string, int64_t> theirs;
  for (auto& [name, at] : internal::ParsePositions(text)) theirs[name] = at.position;
  {
    absl::MutexLock lock(&mutex_);
    left_[peer] = theirs;
  }
  a_peer_left_ = true;
  for (const auto& [name, mine] : internal::ParsePositions(SerializePositions())) {
    if (mine.position == 0) continue;
    if (!CheckAgainstLeft(name, mine.position - 1, mine.last).ok()) return;
  }
}

absl::Status Communicator::CheckAgainstLeft(absl::string_view channel, int64_t position,
                                            absl::string_view next) {
  absl::Status contradiction;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [peer, positions] : left_) {
      auto at = positions.find(std::string(channel));
      const int64_t theirs = at == positions.end() ? 0 : at->second;
      if (position < theirs) continue;
      const absl::string_view optimizer = internal::OptimizerIn(next, channel);
      const std::string advice = channel == internal::kStepsChannel ? internal::kJoinAdvice
                                 : optimizer.empty()
                                     ? ""
                                     : internal::OmittedStep({peer}, optimizer, {rank_});
      contradiction = WithFailureInfo(
          absl::FailedPreconditionError(absl::StrCat(
              "rank ", rank_, " is at #", position, next.empty() ? "" : " ", next, " on channel \"",
              channel, "\"; rank ", peer, " has left the group after ", theirs,
              " there: the ranks disagree", advice.empty() ? "" : absl::StrCat(" (", advice, ")"))),
          {.kind = FailureKind::kDisagreement,
           .ranks = {peer},
           .operation = std::string(next),
           .position = position});
      break;
    }
  }
  if (!contradiction.ok()) OnBackendFailure(contradiction);
  return contradiction;
}

}  // namespace evenkeel
