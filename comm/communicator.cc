#include "evenkeel/comm/communicator.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/integer_average.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/positions.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/flight_dump.h"
#include "evenkeel/comm/internal/communicator_core.h"
#include "evenkeel/comm/living_groups.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

using internal::GroupCore;

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
                         const GroupCore& group) {
  if (what.count != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("count is ", what.count, ", expected 0: the tensors have the sizes"));
  }
  const size_t inputs = what.kind == CollectiveKind::kAllGatherV ? 1 : group.world_size;
  const size_t outputs = group.world_size;
  if (in.size() != inputs || out.size() != outputs) {
    return absl::InvalidArgumentError(absl::StrCat(
        in.size(), " inputs and ", out.size(), " outputs, expected ", inputs, " and ", outputs));
  }
  const int64_t own = in[inputs == 1 ? 0 : group.rank].count;
  if (out[group.rank].count != own) {
    return absl::InvalidArgumentError(absl::StrCat("the output for the rank's own elements has ",
                                                   out[group.rank].count, ", expected ", own));
  }
  return absl::OkStatus();
}

absl::Status CheckOp(const Collective& what) {
  if (!Reduces(what.kind) || !IsBitwise(what.op) || !IsFloat(what.dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(ToString(what.op), " needs an integer type, not ", ToString(what.dtype)));
}

enum class Peer { kNamed, kAny };

absl::Status Validate(const Collective& what, const TensorList& in, const TensorList& out,
                      const GroupCore& group, Peer peer = Peer::kNamed) {
  if (what.count < 0) return absl::InvalidArgumentError(absl::StrCat("count is ", what.count));
  if (what.tag < 0 || (what.tag != 0 && !IsPair(what.kind))) {
    return absl::InvalidArgumentError(
        absl::StrCat("tag is ", what.tag, ", expected ", IsPair(what.kind) ? "0 or more" : "0"));
  }
  if (peer == Peer::kAny) {
    if (group.world_size == 1) {
      return absl::InvalidArgumentError(
          "the group has no other rank (receive only in groups of two or more)");
    }
  } else if (HasRoot(what.kind)) {
    if (what.root < 0 || what.root >= group.world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", what.root, " is not in a group of ", group.world_size));
    }
    if (IsPair(what.kind) && what.root == group.rank) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", group.rank, " named itself as the peer"));
    }
  }
  EK_RETURN_IF_ERROR(CheckOp(what));
  EK_RETURN_IF_ERROR(CheckTensors(what, in, group.backend->device(), "input"));
  EK_RETURN_IF_ERROR(CheckTensors(what, out, group.backend->device(), "output"));
  if (IsUneven(what.kind)) {
    EK_RETURN_IF_ERROR(CheckUneven(what, in, out, group));
  } else {
    const Elements elements = ElementsOf(what, group.world_size);
    EK_RETURN_IF_ERROR(CheckTotal(in, elements.in, "input"));
    EK_RETURN_IF_ERROR(CheckTotal(out, elements.out, "output"));
  }
  return group.Supports(what);
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

const std::string& Channel::name() const { return record_.name; }

uint64_t Channel::id() const { return record_.id; }

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
  const int world_size = group_.world_size;
  if (input.count % world_size != 0) {
    return Work(absl::InvalidArgumentError(
        absl::StrCat("all_to_all on channel ", record_.name, ": ", input.count,
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
                      const CallOptions& options, uint64_t channel) {
  Operation operation;
  operation.what = what;
  operation.channel = channel;
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
  if (absl::Status ended = group_.end.status(); !ended.ok()) return Work(std::move(ended));
  const Peer peer = from == nullptr ? Peer::kNamed : Peer::kAny;
  if (absl::Status wrong = Validate(what, in, out, group_, peer); !wrong.ok()) {
    return Work(Annotate(
        wrong, absl::StrCat(ToString(what.kind), peer == Peer::kAny ? " from any rank" : "",
                            " on channel ", record_.name, ", rank ", group_.rank)));
  }
  Operation operation = OperationOf(what, std::move(in), std::move(out), options, record_.id);
  const absl::Duration timeout =
      options.timeout > absl::ZeroDuration() ? options.timeout : group_.options.timeout;
  const absl::Time now = SteadyNow();
  operation.deadline = now + timeout;
  std::function<void()> conclude;
  if (AveragesIntegers(what)) {
    absl::StatusOr<std::function<void()>> wide =
        internal::WidenAverage(operation, group_.world_size);
    if (!wide.ok()) {
      group_.end.OnBackendFailure(wide.status());
      return Work(group_.end.status());
    }
    conclude = *std::move(wide);
  } else if (Reduces(what.kind) && what.op == ReduceOp::kAverage) {
    operation.scale /= group_.world_size;
  }

  group_.control->waits()->Use();

  // Held across Start(), so that operations reach the backend in the order of their sequence
  // numbers.
  absl::MutexLock lock(&record_.mutex);
  if (IsPair(what.kind)) {
    operation.sequence = record_.pair_positions[{what.root, what.kind, what.tag}]++;
    if (record_.any != nullptr)
      group_.receives_from_any.OnPair(record_, what, operation.sequence + 1);
  } else {
    if (group_.watch.any_left()) {
      absl::Status left =
          group_.watch.CheckAgainstLeft(record_.name, record_.position, ToString(what));
      if (!left.ok()) return Work(std::move(left));
    }
    operation.sequence = record_.position++;
    record_.issued_hash = HashOf(what, record_.issued_hash);
    record_.last_issued = what;
  }
  auto [number, work] = Record(operation, what, now);
  if (from != nullptr) {
    if (absl::Status ended = group_.end.status(); ended.ok()) {
      group_.receives_from_any.Receive(record_, std::move(operation), number, work, from);
    } else {
      work->Finish(std::move(ended));
    }
    return Work(std::move(work));
  }
  if (conclude != nullptr) {
    work->on_end = [conclude, end = std::move(work->on_end)](absl::Status status) {
      if (status.ok()) conclude();
      return end(std::move(status));
    };
  }
  const bool is_compared = group_.agreements.level() == VerifyLevel::kEvery && !IsPair(what.kind) &&
                           group_.world_size > 1;
  const auto moves =
      is_compared ? group_.agreements.CompareBeside(record_.name, what, operation, work) : work;
  group_.backend->Start(std::move(operation), moves);
  if (is_compared)
    work->order_before = moves->order_before;  // Streams do not wait for comparisons on the host.
  return Work(std::move(work));
}

std::pair<int64_t, std::shared_ptr<WorkState>> Channel::Record(const Operation& operation,
                                                               const Collective& what,
                                                               absl::Time issued) {
  const int64_t number = group_.flight.Begin({.channel = record_.id,
                                              .sequence = operation.sequence,
                                              .what = what,
                                              .issued = issued,
                                              .deadline = operation.deadline});
  auto work = std::make_shared<WorkState>(
      operation.deadline, [this, number] { group_.watch.OnOperationDeadline(record_, number); },
      group_.control->waits(), [this, number] { return group_.watch.WaitFor(record_, number); });
  work->on_end = [&group = group_, number](absl::Status status) {
    group.flight.End(number, status);
    if (status.ok()) return status;
    group.end.OnBackendFailure(status);
    return AtLeastIn(group.flight.Get(number), std::move(status));
  };
  return {number, std::move(work)};
}

Work Channel::CompareIssued() { return group_.agreements.CompareIssued(record_); }

int64_t Channel::position() const {
  absl::MutexLock lock(&record_.mutex);
  return record_.position;
}

// Communicator ------------------------------------------------------------------------------------

namespace {

// For data that is on its way to ranks that do not read it.
constexpr absl::Duration kFlush = absl::Seconds(5);

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

internal::GroupCore::GroupCore(std::unique_ptr<Backend> own_backend,
                               std::unique_ptr<ControlChannel> own_control,
                               CommunicatorOptions group_options, absl::string_view name,
                               GroupMaker maker, NewcomerLink newcomer)
    : control(std::move(own_control)),
      options(std::move(group_options)),
      rank(control->rank()),
      world_size(control->world_size()),
      group(name),
      members(world_size),
      flight(options.flight.capacity),
      watchdog([this] { return watch.Look(); }),
      receives_from_any(*control, *own_backend, flight, channels),
      kept_flight(flight, *control->waits(), channels,
                  {.group = group,
                   .rank = rank,
                   .world_size = world_size,
                   .backend = std::string(own_backend->name())},
                  options.flight.folder),
      end(*control, *own_backend, receives_from_any, kept_flight, watchdog, extension,
          options.watch),
      agreements(*control, end, *own_backend, flight, options),
      watch(*control, end, kept_flight, flight, channels, extension, agreements, options.watch),
      make_group(std::move(maker)),
      newcomer_link(std::move(newcomer)),
      backend(std::move(own_backend)) {
  std::iota(members.begin(), members.end(), 0);
}

void internal::GroupCore::OnNotice(int from, absl::string_view topic, absl::string_view notice) {
  if (topic == Watch::kFinalizes) return watch.OnAnnouncedEnd(from, notice);
  if (!ReceivesFromAny::IsTopic(topic)) return extension.OnNotice(from, topic, notice);
  if (const absl::Status status = receives_from_any.OnNotice(from, topic, notice); !status.ok())
    end.OnBackendFailure(status);
}

absl::Status internal::GroupCore::Supports(const Collective& what) const {
  EK_RETURN_IF_ERROR(CheckOp(what));
  if (AveragesIntegers(what) && !backend->device().is_cpu()) {
    return absl::UnimplementedError(absl::StrCat(
        backend->name(), ": no average of ", ToString(what.dtype),
        ", whose sum may not fit into the type. Sum up int64, and divide the sum by ", world_size));
  }
  return backend->Supports(what);
}

const std::shared_ptr<internal::Waits>& internal::GroupExtension::waits() const {
  return comm_->core_->control->waits();
}

void internal::GroupExtension::OnDeadline(const Wait& wait) {
  comm_->core_->end.OnDeadline(wait, comm_->timeout());
}

void internal::GroupExtension::FailWithAll(const absl::Status& why) {
  comm_->core_->end.FailWithAll(why);
}

absl::Status internal::GroupExtension::CheckAgainstLeft(int64_t position) {
  return comm_->core_->watch.CheckAgainstLeft(kStepsChannel, position, "");
}

Communicator::Communicator(std::unique_ptr<Backend> backend,
                           std::unique_ptr<ControlChannel> control, CommunicatorOptions options,
                           absl::string_view group, GroupMaker make_group, NewcomerLink newcomer)
    : core_(std::make_unique<GroupCore>(std::move(backend), std::move(control), std::move(options),
                                        group, std::move(make_group), std::move(newcomer))) {
  GroupCore& core = *core_;
  core.control->SetEndless(core.options.timeout);
  core.user = *OpenChannel("user");
  core.control->SetHandlers([&core](int, const absl::Status& why) { core.end.Fail(why); },
                            [&core](int from, absl::string_view topic, absl::string_view payload) {
                              core.OnNotice(from, topic, payload);
                            });
  // Comes before the exchange that reports the arrival of the ranks: from then on the hub expects
  // heartbeats from each rank, so that a rank that falls silent immediately is detected like any
  // other.
  if (core.watch.is_on()) core.watch.Beat();
  core.agreements.CompareLevels();
  if (core.watch.is_on()) {
    if (const absl::Status started = core.watchdog.Start(); !started.ok()) Abort(started);
  }
  internal::AddLiving(this);
}

Communicator::~Communicator() {
  internal::RemoveLiving(this);
  core_->end.ReportProvisional(absl::InfiniteFuture());
  core_->end.Fail(WithFailureInfo(
      absl::CancelledError(absl::StrCat("rank ", rank(), " destroyed its communicator")),
      {.ranks = {rank()}}));
  core_->watchdog.Stop();  // It, and the control channel's handlers, use the other members.
  core_->control->Stop();
  core_->kept_flight.Write(status());
  // The backend is destroyed first, as the last member of `core_`; its threads may still call this
  // object.
}

int Communicator::rank() const { return core_->rank; }
int Communicator::world_size() const { return core_->world_size; }
const std::string& Communicator::group() const { return core_->group; }
const std::vector<int>& Communicator::members() const { return core_->members; }
Device Communicator::device() const { return core_->backend->device(); }
DeviceRuntime* Communicator::runtime() const { return core_->backend->runtime(); }
absl::string_view Communicator::backend_name() const { return core_->backend->name(); }
absl::Duration Communicator::timeout() const { return core_->options.timeout; }
bool Communicator::waiting() const { return core_->newcomer_link != nullptr; }
VerifyLevel Communicator::verify_level() const { return core_->agreements.level(); }
Channel& Communicator::user() { return *core_->user; }
FlightRecorder& Communicator::flight() { return core_->flight; }
ControlChannel& Communicator::control() { return *core_->control; }

absl::StatusOr<Memory> Communicator::Allocate(int64_t bytes) {
  return core_->backend->Allocate(bytes);
}

internal::GroupExtension& Communicator::ExtensionOf(
    const std::type_info& type,
    absl::FunctionRef<std::unique_ptr<internal::GroupExtension>()> make) {
  return core_->extension.Get(type, make);
}

absl::StatusOr<Channel*> Communicator::OpenChannel(absl::string_view name) {
  EK_ASSIGN_OR_RETURN(internal::ChannelRecord* const record, core_->channels.Open(name));
  absl::MutexLock lock(&core_->mutex);
  std::unique_ptr<Channel>& channel = core_->handles[record->name];
  if (channel == nullptr) channel.reset(new Channel(core_.get(), record));
  return channel.get();
}

std::string Communicator::UniqueName(absl::string_view base) {
  absl::MutexLock lock(&core_->mutex);
  return absl::StrCat(base, "#", core_->name_counts[std::string(base)]++);
}

absl::Status Communicator::Supports(const Collective& what) const { return core_->Supports(what); }

absl::Status Communicator::Check(const Collective& what, const TensorList& in,
                                 const TensorList& out) const {
  return Annotate(Validate(what, in, out, *core_),
                  absl::StrCat(ToString(what.kind), ", rank ", rank()));
}

absl::StatusOr<bool> Communicator::AgreeAny(bool mine) {
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      core_->agreements.Agree("agree any", mine ? "1" : "0", timeout(), "AgreeAny()"));
  for (const std::string& part : parts) {
    if (part == "1") return true;
  }
  return false;
}

absl::Status Communicator::MonitoredBarrier(absl::Duration timeout) {
  return core_->agreements.Agree("monitored barrier", "", timeout, "monitored_barrier").status();
}

absl::Status Communicator::SetVerifyLevel(VerifyLevel level) {
  return core_->agreements.SetLevel(level, core_->watch.Positions());
}

Work Communicator::CompareIssued(Channel& channel) { return channel.CompareIssued(); }

std::string Communicator::FlightJson() const {
  return core_->kept_flight.Json([this] { return status(); });
}

absl::Status Communicator::DumpFlight(const std::string& path) const {
  return WriteFlight(path, FlightJson());
}

std::string Communicator::FlightPath(absl::string_view folder) const {
  return core_->kept_flight.Path(folder);
}

absl::Status Communicator::status() const { return core_->end.status(); }

void Communicator::Abort(const absl::Status& why, absl::string_view did) {
  core_->end.Abort(why, did);
}

void Communicator::AbortProvisionally(const absl::Status& why, absl::string_view did) {
  core_->end.AbortProvisionally(why, did);
}

absl::Status Communicator::Finalize(absl::Duration timeout) {
  EK_RETURN_IF_ERROR(status());
  const absl::Time deadline = SteadyNow() + timeout;
  const internal::GroupExtension* const extension = core_->extension.in_use();
  const std::string positions = core_->watch.Positions();
  core_->watch.AnnounceEnd(positions);
  std::string end = internal::ByteWriter()
                        .Bytes(positions)
                        .Bytes(extension == nullptr ? "" : extension->FinalState())
                        .Take();
  absl::StatusOr<ControlChannel::Parts> parts =
      core_->agreements.Agree("finalize", std::move(end), timeout, kFinalization);
  if (!parts.ok()) return status();
  const absl::StatusOr<Ends> ends = ParseEnds(*parts);
  absl::Status same = ends.status();
  if (same.ok() && extension != nullptr)
    same = Annotate(extension->CompareFinalStates(ends->states), kFinalization);
  const auto is_empty = [](const std::string& state) { return state.empty(); };
  if (ends.ok() && std::ranges::any_of(ends->states, is_empty) &&
      !std::ranges::all_of(ends->states, is_empty)) {
    // A rank without an extension cannot compare states: it gets the error of the others.
    const absl::Duration rest = std::max(deadline - SteadyNow(), absl::Seconds(1));
    if (!core_->agreements
             .Agree("final states", internal::ByteWriter().Status(same).Take(), rest, kFinalization,
                    LowestError)
             .ok())
      return status();
  }
  if (same.ok()) same = internal::ComparePositions(kFinalization, ends->positions);
  if (!same.ok()) {
    core_->end.FailWithAll(same);
    return status();
  }
  core_->end.EndCleanly();
  return absl::OkStatus();
}

absl::Status Communicator::Leave() {
  EK_RETURN_IF_ERROR(status());
  core_->backend->Flush(SteadyNow() + kFlush);
  core_->watch.AnnounceEnd(core_->watch.Positions());
  // The last report: it shows the hub that others who still wait in the last collectives can go on.
  core_->watch.Report();
  core_->end.EndCleanly();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Split(int color, int key,
                                                                  absl::Duration timeout) {
  return core_->Split(color, key, timeout);
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Shrink(absl::Duration timeout) {
  EK_ASSIGN_OR_RETURN(Regrouped regrouped, core_->Regroup({.timeout = timeout}));
  return std::move(regrouped.comm);
}

absl::StatusOr<Regrouped> Communicator::Regroup(const RegroupOptions& options) {
  return core_->Regroup(options);
}

}  // namespace evenkeel
