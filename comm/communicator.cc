#include "evenkeel/comm/communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/step_control.h"

namespace evenkeel {
namespace {

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

bool IsPointToPoint(CollectiveKind kind) { return kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv; }

bool HasRoot(CollectiveKind kind) {
  return kind == CollectiveKind::kReduce || kind == CollectiveKind::kBroadcast || IsPointToPoint(kind);
}

// Elements that this collective takes from and gives to each rank.
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
      return {0, 0};
  }
  return {};
}

absl::Status CheckTensors(const Collective& what, const TensorList& tensors, int64_t expected, Device device,
                          absl::string_view side) {
  int64_t total = 0;
  for (const TensorView& tensor : tensors) {
    if (tensor.dtype != what.dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat(side, " has ", ToString(tensor), ", expected ", ToString(what.dtype)));
    }
    if (!(tensor.device == device)) {
      return absl::InvalidArgumentError(
          absl::StrCat(side, " lies on ", ToString(tensor.device), ", the group's tensors on ", ToString(device)));
    }
    if (tensor.count < 0 || (tensor.data == nullptr && tensor.count > 0)) {
      return absl::InvalidArgumentError(absl::StrCat(side, " has no memory for ", ToString(tensor)));
    }
    total += tensor.count;
  }
  if (total != expected) {
    return absl::InvalidArgumentError(absl::StrCat(side, " has ", total, " elements, expected ", expected));
  }
  return absl::OkStatus();
}

absl::Status Validate(const Collective& what, const TensorList& in, const TensorList& out, const Communicator& comm) {
  if (what.count < 0) return absl::InvalidArgumentError(absl::StrCat("count is ", what.count));
  if (HasRoot(what.kind)) {
    if (what.root < 0 || what.root >= comm.world_size()) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", what.root, " is not in a group of ", comm.world_size()));
    }
    if (IsPointToPoint(what.kind) && what.root == comm.rank()) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", comm.rank(), " named itself as the peer"));
    }
  }
  if (Reduces(what.kind) && what.op == ReduceOp::kBitOr && IsFloat(what.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("bit_or needs an integer type, not ", ToString(what.dtype)));
  }
  const Elements elements = ElementsOf(what, comm.world_size());
  EK_RETURN_IF_ERROR(CheckTensors(what, in, elements.in, comm.device(), "input"));
  EK_RETURN_IF_ERROR(CheckTensors(what, out, elements.out, comm.device(), "output"));
  return comm.Supports(what);
}

Collective Describe(CollectiveKind kind, DType dtype, int64_t count, const CallOptions& options) {
  return {.kind = kind,
          .dtype = dtype,
          .count = count,
          .role = options.role,
          .index = options.index,
          .index_count = options.index_count};
}

int64_t TotalCount(absl::Span<const TensorView> parts) {
  int64_t total = 0;
  for (const TensorView& part : parts) total += part.count;
  return total;
}

}  // namespace

// Channel ------------------------------------------------------------------------------------------------------------

Channel::Channel(Communicator* communicator, std::string name)
    : communicator_(communicator), name_(std::move(name)), id_(StableHash(0, name_)) {}

Work Channel::AllReduce(TensorView data, ReduceOp op, const CallOptions& options) {
  return AllReduce(absl::MakeConstSpan(&data, 1), op, options);
}

Work Channel::AllReduce(absl::Span<const TensorView> parts, ReduceOp op, const CallOptions& options) {
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
  return Issue(Describe(CollectiveKind::kAllGather, input.dtype, input.count, options), {input}, {output}, options);
}

Work Channel::ReduceScatter(TensorView input, TensorView output, ReduceOp op, const CallOptions& options) {
  Collective what = Describe(CollectiveKind::kReduceScatter, output.dtype, output.count, options);
  what.op = op;
  return Issue(what, {input}, {output}, options);
}

Work Channel::AllToAll(TensorView input, TensorView output, const CallOptions& options) {
  const int world_size = communicator_->world_size();
  if (input.count % world_size != 0) {
    return Work(absl::InvalidArgumentError(absl::StrCat("all_to_all on channel ", name_, ": ", input.count,
                                                        " elements can't be split over ", world_size, " ranks")));
  }
  return Issue(Describe(CollectiveKind::kAllToAll, input.dtype, input.count / world_size, options), {input}, {output},
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

Work Channel::Barrier(const CallOptions& options) {
  return Issue(Describe(CollectiveKind::kBarrier, DType::kInt8, 0, options), {}, {}, options);
}

Work Channel::Issue(const Collective& what, TensorList in, TensorList out, const CallOptions& options) {
  Communicator& comm = *communicator_;
  if (absl::Status ended = comm.status(); !ended.ok()) return Work(std::move(ended));
  if (absl::Status wrong = Validate(what, in, out, comm); !wrong.ok()) {
    return Work(Annotate(wrong, absl::StrCat(ToString(what.kind), " on channel ", name_, ", rank ", comm.rank())));
  }
  Operation operation;
  operation.what = what;
  operation.channel = id_;
  operation.in = std::move(in);
  operation.out = std::move(out);
  operation.scale = options.scale;
  if (Reduces(what.kind) && what.op == ReduceOp::kAverage && IsFloat(what.dtype)) {
    operation.scale /= comm.world_size();
  }
  operation.contributes = options.contributes;
  operation.after = options.after;
  const absl::Duration timeout = options.timeout > absl::ZeroDuration() ? options.timeout : comm.timeout();
  operation.deadline = absl::Now() + timeout;

  // Held across Start(), so that operations reach the backend in the order of their sequence numbers.
  absl::MutexLock lock(&mutex_);
  if (IsPointToPoint(what.kind)) {
    operation.sequence = pair_positions_[{what.root, what.kind}]++;
  } else {
    const std::string here = ToString(what);
    if (absl::Status left = comm.CheckAgainstLeft(name_, position_, here); !left.ok()) return Work(std::move(left));
    operation.sequence = position_++;
    issued_hash_ = HashOf(what, issued_hash_);
    last_issued_ = here;
  }
  auto work = std::make_shared<WorkState>(
      operation.deadline,
      [&comm, timeout, at = absl::StrCat("#", operation.sequence, " ", ToString(what), " on channel ", name_)] {
        comm.OnDeadline(absl::DeadlineExceededError(
            absl::StrCat("rank ", comm.rank(), " waited ", absl::FormatDuration(timeout), " in ", at)));
      });
  work->OnDone([&comm](const absl::Status& status) {
    if (!status.ok()) comm.OnBackendFailure(status);
  });
  comm.backend_->Start(std::move(operation), work);
  return Work(std::move(work));
}

int64_t Channel::position() const {
  absl::MutexLock lock(&mutex_);
  return position_;
}

uint64_t Channel::issued_hash() const {
  absl::MutexLock lock(&mutex_);
  return issued_hash_;
}

// Communicator -------------------------------------------------------------------------------------------------------

namespace {

// What a rank says of its channels when it leaves: "name \t position \t hash \t last collective" per line.
struct ChannelPosition {
  int64_t position = 0;
  uint64_t hash = 0;
  std::string last;
};
using Positions = std::map<std::string, ChannelPosition>;

constexpr char kStepsChannel[] = "training steps";
constexpr absl::Duration kHubGrace = absl::Seconds(2);

Positions ParsePositions(absl::string_view text) {
  Positions positions;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, '\t');
    ChannelPosition at;
    if (fields.size() != 4 || !absl::SimpleAtoi(fields[1], &at.position) || !absl::SimpleAtoi(fields[2], &at.hash)) {
      continue;
    }
    at.last = std::string(fields[3]);
    positions.emplace(fields[0], std::move(at));
  }
  return positions;
}

std::string AtPosition(int rank, const ChannelPosition& at) {
  return absl::StrCat("rank ", rank, " ended after ", at.position,
                      at.last.empty() ? "" : absl::StrCat(" (", at.last, ")"));
}

// All ranks compute this from the same parts, so all get the same answer.
absl::Status ComparePositions(const std::vector<std::string>& parts) {
  const Positions first = ParsePositions(parts[0]);
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    const Positions other = ParsePositions(parts[rank]);
    Positions all = first;
    all.insert(other.begin(), other.end());
    for (const auto& [name, unused] : all) {
      const auto a = first.find(name), b = other.find(name);
      const ChannelPosition mine = a == first.end() ? ChannelPosition{} : a->second;
      const ChannelPosition theirs = b == other.end() ? ChannelPosition{} : b->second;
      if (mine.position != theirs.position) {
        return absl::FailedPreconditionError(absl::StrCat("Finalize: channel \"", name, "\": ", AtPosition(0, mine),
                                                          ", ", AtPosition(rank, theirs), ": the ranks disagree"));
      }
      if (mine.hash != theirs.hash) {
        return absl::FailedPreconditionError(absl::StrCat("Finalize: channel \"", name, "\": ranks 0 and ", rank,
                                                          " issued ", mine.position,
                                                          " collectives each, but not the same: the ranks disagree"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Backend> backend, std::unique_ptr<ControlChannel> control,
                           CommunicatorOptions options, absl::string_view group, GroupMaker make_group)
    : control_(std::move(control)),
      options_(options),
      rank_(control_->rank()),
      world_size_(control_->world_size()),
      group_(group),
      make_group_(std::move(make_group)),
      members_(world_size_),
      steps_(std::make_unique<StepControl>(this)),
      backend_(std::move(backend)) {
  std::iota(members_.begin(), members_.end(), 0);
  user_ = *OpenChannel("user");
  control_->SetHandlers([this](int, const absl::Status& why) { Fail(why); },
                        [this](int from, absl::string_view topic, absl::string_view payload) {
                          if (topic == "finalize") OnFinalizeNotice(from, payload);
                        });
}

Communicator::~Communicator() {
  Fail(absl::CancelledError(absl::StrCat("rank ", rank_, " destroyed its communicator")));
  control_->Stop();  // Its handlers use the other members.
}

absl::StatusOr<Channel*> Communicator::OpenChannel(absl::string_view name) {
  if (name.empty() || name == kStepsChannel || absl::StrContains(name, '\t') || absl::StrContains(name, '\n')) {
    return absl::InvalidArgumentError(absl::StrCat("OpenChannel: \"", name, "\" can't name a channel"));
  }
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<Channel>& channel = channels_[std::string(name)];
  if (channel == nullptr) channel = std::make_unique<Channel>(this, std::string(name));
  return channel.get();
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

void Communicator::Fail(const absl::Status& why) {
  SetStatus(why);
  const absl::Status first = status();
  backend_->Abort(first);
  control_->Close(first);
  absl::MutexLock lock(&mutex_);
  has_ended_ = true;
}

void Communicator::Abort(const absl::Status& why) {
  if (why.ok()) return Abort(absl::CancelledError("aborted without a reason"));
  if (SetStatus(why)) {
    control_->Fail(absl::UnavailableError(absl::StrCat(
        "rank ", rank_, " aborted the group: ", absl::StatusCodeToString(why.code()), ": ", why.message())));
  }
  Fail(why);  // Whoever was first: after it nothing is in flight here, whether the hub answers or not.
}

void Communicator::OnDeadline(const absl::Status& why) {
  OnBackendFailure(why);
  // The hub's answer ends everything here, as on the other ranks; a hub that is silent must not keep the waiter.
  absl::MutexLock lock(&mutex_);
  if (mutex_.AwaitWithTimeout(absl::Condition(&has_ended_), kHubGrace)) return;
  mutex_.Unlock();
  Fail(why);
  mutex_.Lock();
}

void Communicator::OnBackendFailure(const absl::Status& why) {
  if (!SetStatus(why)) return;
  // The hub sends it back to this rank too, and Fail() then runs on the control thread: here the caller may hold locks
  // that the callbacks of ended operations want.
  const bool of_the_group = why.code() == absl::StatusCode::kFailedPrecondition;
  control_->Fail(
      of_the_group || absl::StartsWith(why.message(), "rank ") ? why : Annotate(why, absl::StrCat("rank ", rank_)));
}

std::string Communicator::SerializePositions() const {
  std::vector<Channel*> channels;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, channel] : channels_) channels.push_back(channel.get());
  }
  std::string text = absl::StrCat(kStepsChannel, "\t", steps_->records_sent(), "\t0\t\n");
  for (const Channel* channel : channels) {
    absl::MutexLock lock(&channel->mutex_);
    absl::StrAppend(&text, channel->name_, "\t", channel->position_, "\t", channel->issued_hash_, "\t",
                    channel->last_issued_, "\n");
  }
  return text;
}

absl::Status Communicator::Finalize(absl::Duration timeout) {
  EK_RETURN_IF_ERROR(status());
  const std::string positions = SerializePositions();
  // Told at once to all, so that a rank that waits for a collective which this one will never join learns of it.
  control_->Notify("finalize", positions);
  absl::StatusOr<ControlChannel::Parts> parts = control_->Exchange("finalize", positions, timeout);
  if (!parts.ok()) {
    if (status().ok()) Abort(Annotate(parts.status(), "Finalize"));
    return status();
  }
  if (absl::Status same = ComparePositions(*parts); !same.ok()) {
    Fail(same);
    return status();
  }
  control_->Leave();
  Fail(absl::FailedPreconditionError(absl::StrCat("rank ", rank_, " has finalized its communicator")));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Shrink(absl::Duration timeout) {
  const std::string here = absl::StrCat("Shrink, rank ", rank_, " of the group ", group_);
  if (status().ok()) return absl::FailedPreconditionError(absl::StrCat(here, ": the group has not failed"));
  if (make_group_ == nullptr) return absl::UnimplementedError(absl::StrCat(here, ": its backend makes no other group"));
  absl::StatusOr<ControlChannel::Survivors> survivors = control_->Regroup(timeout);
  if (!survivors.ok()) return Annotate(survivors.status(), here);
  const auto me = std::find(survivors->ranks.begin(), survivors->ranks.end(), rank_);
  if (me == survivors->ranks.end()) {
    return absl::UnavailableError(absl::StrCat(here, ": the other ranks have taken it for lost and go on without it"));
  }
  const int rank = static_cast<int>(me - survivors->ranks.begin());
  const int world_size = static_cast<int>(survivors->ranks.size());
  const std::string name = absl::StrCat(group_, "+", survivors->round);
  absl::StatusOr<std::unique_ptr<ControlLink>> link = control_->link().Open(name, rank, world_size);
  if (!link.ok()) return Annotate(link.status(), here);
  absl::StatusOr<std::unique_ptr<Communicator>> next = make_group_(name, rank, world_size, *std::move(link));
  if (!next.ok()) return Annotate(next.status(), here);
  for (int i = 0; i < world_size; ++i) (*next)->members_[i] = members_[survivors->ranks[i]];
  return next;
}

void Communicator::OnFinalizeNotice(int peer, absl::string_view text) {
  std::map<std::string, int64_t> theirs;
  for (auto& [name, at] : ParsePositions(text)) theirs[name] = at.position;
  {
    absl::MutexLock lock(&mutex_);
    left_[peer] = theirs;
  }
  for (const auto& [name, mine] : ParsePositions(SerializePositions())) {
    if (mine.position == 0) continue;
    if (!CheckAgainstLeft(name, mine.position - 1, mine.last).ok()) return;
  }
}

absl::Status Communicator::CheckAgainstLeft(absl::string_view channel, int64_t position, absl::string_view next) {
  absl::Status contradiction;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [peer, positions] : left_) {
      auto at = positions.find(std::string(channel));
      const int64_t theirs = at == positions.end() ? 0 : at->second;
      if (position < theirs) continue;
      contradiction = absl::FailedPreconditionError(
          absl::StrCat("rank ", rank_, " is at #", position, next.empty() ? "" : " ", next, " on channel \"", channel,
                       "\"; rank ", peer, " has ended (Finalize) after ", theirs, " there: the ranks disagree"));
      break;
    }
  }
  if (!contradiction.ok()) OnBackendFailure(contradiction);
  return contradiction;
}

}  // namespace evenkeel
