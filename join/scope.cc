#include "evenkeel/join/scope.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/internal/device_calls.h"

namespace evenkeel {
namespace {

constexpr char kChannel[] = "join scope";

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

}  // namespace

JoinScope::JoinScope(Communicator* comm, bool is_followed, bool can_leave)
    : comm_(comm), is_followed_(is_followed), can_leave_(can_leave), here_(comm) {}

JoinScope::~JoinScope() = default;

absl::Status JoinScope::AddSamples(int64_t samples) {
  if (samples < 0) return absl::InvalidArgumentError(absl::StrCat("AddSamples: ", samples, " samples"));
  here_->steps().AddSamples(samples);
  return absl::OkStatus();
}

std::vector<int> JoinScope::active_ranks() const {
  std::vector<int> ranks = here_->steps().active_ranks();
  for (int& rank : ranks) rank = members_.empty() ? rank : members_[rank];
  return ranks;
}

absl::Status JoinScope::AllReduce(TensorView data, ReduceOp op, const ScopeOptions& options) {
  return IssueHere(CollectiveKind::kAllReduce, op, -1, data, data, options);
}

absl::Status JoinScope::Reduce(TensorView data, ReduceOp op, int root, const ScopeOptions& options) {
  return Issue(CollectiveKind::kReduce, op, root, data, data, options);
}

absl::Status JoinScope::Broadcast(TensorView data, int root, const ScopeOptions& options) {
  return Issue(CollectiveKind::kBroadcast, ReduceOp::kSum, root, data, data, options);
}

absl::Status JoinScope::AllGather(TensorView input, TensorView output, const ScopeOptions& options) {
  return Issue(CollectiveKind::kAllGather, ReduceOp::kSum, -1, input, output, options);
}

absl::Status JoinScope::ReduceScatter(TensorView input, TensorView output, ReduceOp op, const ScopeOptions& options) {
  return Issue(CollectiveKind::kReduceScatter, op, -1, input, output, options);
}

absl::Status JoinScope::Barrier() { return IssueHere(CollectiveKind::kBarrier, ReduceOp::kSum, -1, {}, {}, {}); }

absl::Status JoinScope::GoOnIn(Communicator& here, const std::vector<int>& members) {
  EK_RETURN_IF_ERROR(Drain());
  here_ = &here;
  members_ = members;
  channel_ = nullptr;
  return absl::OkStatus();
}

absl::Status JoinScope::Drain() { return on_device_ == nullptr ? absl::OkStatus() : on_device_->Drain(); }

absl::StatusOr<internal::DeviceCalls*> JoinScope::OnDevice() {
  if (on_device_ == nullptr && comm_->runtime() != nullptr) {
    EK_ASSIGN_OR_RETURN(on_device_, internal::DeviceCalls::Create(*comm_));
  }
  return on_device_.get();
}

// The caller sees the shapes and ranks of the whole group, whoever has left.
absl::Status JoinScope::Issue(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                              const ScopeOptions& options) {
  if (members_.empty()) return IssueHere(kind, op, root, in, out, options);
  if (root >= 0) {
    const auto found = std::find(members_.begin(), members_.end(), root);
    if (found == members_.end() && root < comm_->world_size()) {
      return absl::FailedPreconditionError(
          absl::StrCat(ToString(kind), " in the join scope: its root, rank ", root, ", has no inputs and has left"));
    }
    root = found == members_.end() ? root : static_cast<int>(found - members_.begin());
  }
  const bool is_gather = kind == CollectiveKind::kAllGather;
  if (!is_gather && kind != CollectiveKind::kReduceScatter) return IssueHere(kind, op, root, in, out, options);
  // One slice per rank, of which those that have left have none.
  const TensorView whole = is_gather ? out : in;
  const int64_t slice = whole.count / comm_->world_size();
  if (whole.count % comm_->world_size() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(kind), " in the join scope: ", whole.count,
                                                   " elements for ", comm_->world_size(), " ranks"));
  }
  if (comm_->runtime() != nullptr) return IssueSlicesOnDevice(kind, op, in, out, options);
  std::vector<char> memory(slice * members_.size() * SizeOf(whole.dtype));
  const TensorView packed(memory.data(), slice * static_cast<int64_t>(members_.size()), whole.dtype);
  const auto bytes = static_cast<size_t>(slice * SizeOf(whole.dtype));
  auto slice_of = [&](const TensorView& all, size_t index) { return static_cast<char*>(all.data) + index * bytes; };
  for (size_t i = 0; i < members_.size() && !is_gather; ++i) {
    std::memcpy(slice_of(packed, i), slice_of(whole, members_[i]), bytes);
  }
  EK_RETURN_IF_ERROR(IssueHere(kind, op, root, is_gather ? in : packed, is_gather ? packed : out, options));
  if (!is_gather) return absl::OkStatus();
  std::memset(whole.data, 0, static_cast<size_t>(whole.bytes()));
  for (size_t i = 0; i < members_.size(); ++i) std::memcpy(slice_of(whole, members_[i]), slice_of(packed, i), bytes);
  return absl::OkStatus();
}

absl::Status JoinScope::IssueSlicesOnDevice(CollectiveKind kind, ReduceOp op, TensorView in, TensorView out,
                                            const ScopeOptions& options) {
  const bool is_gather = kind == CollectiveKind::kAllGather;
  const TensorView whole = is_gather ? out : in;
  const bool is_elsewhere = options.stream.handle != nullptr && options.stream.device != comm_->device();
  if (whole.device != comm_->device() || whole.data == nullptr || is_elsewhere) {
    return IssueHere(kind, op, -1, in, out, options);  // Which says what is wrong.
  }
  EK_ASSIGN_OR_RETURN(internal::DeviceCalls* const device, OnDevice());
  const StreamRef stream = options.stream.handle != nullptr ? options.stream : device->stream();
  const internal::DeviceCalls::Use use(*device, stream);
  const int world_size = comm_->world_size();
  EK_ASSIGN_OR_RETURN(
      const TensorView packed,
      device->Scratch(internal::DeviceCalls::kIn, whole.count / world_size * static_cast<int64_t>(members_.size()),
                      whole.dtype, stream));
  if (is_gather) {
    EK_RETURN_IF_ERROR(IssueHere(kind, op, -1, in, packed, options));
    EK_RETURN_IF_ERROR(device->Copy(internal::UnpackedSlices(whole, packed, members_, world_size), stream));
    if (options.stream.handle != nullptr) return absl::OkStatus();
    return device->runtime().Synchronize(stream, absl::Now() + comm_->timeout());
  }
  EK_RETURN_IF_ERROR(device->Copy(internal::PackedSlices(whole, packed, members_, world_size), stream));
  return IssueHere(kind, op, -1, packed, out, options);
}

absl::Status JoinScope::IssueHere(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                                  const ScopeOptions& options) {
  Call call{.what = {.kind = kind, .op = op, .root = root, .joined = options.joined}, .tensor = options.tensor};
  Part part;
  if (kind != CollectiveKind::kBarrier) {
    call.what.dtype = in.dtype;
    call.what.count = kind == CollectiveKind::kReduceScatter ? out.count : in.count;
    part = {.in = {in}, .out = {out}, .stream = options.stream};
  } else {
    call.what.dtype = DType::kInt8;
  }
  const std::string here = absl::StrCat(ToString(call.what), " in the join scope, rank ", comm_->rank());
  if ((options.joined == Contribution::kIdentity) != options.tensor.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(here, ": kOwned and kReceive need the name of a tensor, kIdentity has none"));
  }
  if (Reduces(kind) && op == ReduceOp::kAverage && !IsFloat(call.what.dtype)) {
    return absl::UnimplementedError(absl::StrCat(here, ": averages are of floats; use kSum and divide"));
  }
  if (root == kHighestActive && kind != CollectiveKind::kBroadcast) {
    return absl::UnimplementedError(absl::StrCat(here, ": kHighestActive is for broadcasts"));
  }
  if (options.stream.handle != nullptr && options.stream.device != comm_->device()) {
    return absl::InvalidArgumentError(
        absl::StrCat(here, ": a stream of ", ToString(options.stream.device), ", on ", ToString(comm_->device())));
  }
  if (can_leave_ && options.joined != Contribution::kIdentity) {
    return absl::InvalidArgumentError(
        absl::StrCat(here, ": ranks may leave this loop, and with them what they own: only kIdentity"));
  }
  EK_RETURN_IF_ERROR(CheckPart(call, part));
  EK_ASSIGN_OR_RETURN(internal::DeviceCalls* const device, OnDevice());
  if (device != nullptr && part.stream.handle == nullptr) {
    part.stream = device->stream();
    part.is_async = false;
  }
  if (device != nullptr) EK_RETURN_IF_ERROR(device->Confirm());
  if (is_followed_) here_->steps().AnnounceCall(call.Serialize());
  return Run(call, part);
}

absl::Status JoinScope::Follow(absl::string_view bytes) {
  EK_ASSIGN_OR_RETURN(const Call call, Call::Parse(bytes));
  const Collective& what = call.what;
  EK_RETURN_IF_ERROR(CheckRoot(call));
  EK_ASSIGN_OR_RETURN(internal::DeviceCalls* const device, OnDevice());
  const int64_t world_size = here_->world_size();
  const bool is_gather = what.kind == CollectiveKind::kAllGather;
  const bool is_scatter = what.kind == CollectiveKind::kReduceScatter;
  const int64_t in_count = what.count * (is_scatter ? world_size : 1);
  const int64_t out_count = what.count * (is_gather ? world_size : 1);
  Part part{.contributes = what.joined == Contribution::kOwned, .is_followed = true};
  if (device != nullptr) {
    EK_RETURN_IF_ERROR(device->Confirm());
    part.stream = device->stream();
  }
  if (what.kind == CollectiveKind::kBarrier) return Run(call, part);

  TensorView in, out;
  if (what.joined != Contribution::kIdentity) {
    const bool gives = what.joined == Contribution::kOwned;
    EK_ASSIGN_OR_RETURN(const Tensor owned, Owned(call, gives ? in_count : out_count));
    (gives ? in : out) = owned.view;
    if (device != nullptr && owned.stream.handle != nullptr) part.stream = owned.stream;
  }
  std::optional<internal::DeviceCalls::Use> use;
  if (device != nullptr) use.emplace(*device, part.stream);
  Memory in_memory, out_memory;  // Until Run() has ended.
  auto scratch = [&](bool is_in, int64_t count) -> absl::StatusOr<TensorView> {
    if (device != nullptr) {
      return device->Scratch(is_in ? internal::DeviceCalls::kIn : internal::DeviceCalls::kOut, count, what.dtype,
                             part.stream);
    }
    Memory& memory = is_in ? in_memory : out_memory;
    EK_ASSIGN_OR_RETURN(memory, comm_->Allocate(count * SizeOf(what.dtype)));
    return TensorView(memory.data.get(), count, what.dtype);
  };
  if (is_gather || is_scatter) {
    if (what.joined != Contribution::kOwned) {
      EK_ASSIGN_OR_RETURN(in, scratch(/*is_in=*/true, in_count));
    }
    if (what.joined != Contribution::kReceive) {
      EK_ASSIGN_OR_RETURN(out, scratch(/*is_in=*/false, out_count));
    }
  } else if (what.joined == Contribution::kIdentity) {
    EK_ASSIGN_OR_RETURN(in, scratch(/*is_in=*/true, in_count));
    out = in;
  } else {  // In place.
    (what.joined == Contribution::kOwned ? out : in) = what.joined == Contribution::kOwned ? in : out;
  }
  // A gather takes what is there; calls before have left something else.
  if (device != nullptr && is_gather && what.joined != Contribution::kOwned) {
    EK_RETURN_IF_ERROR(device->runtime().Zero(in.data, in.bytes(), part.stream));
  }
  part.in = {in};
  part.out = {out};
  return Run(call, part);
}

absl::Status JoinScope::CheckRoot(const Call& call) const {
  if (call.what.root != here_->rank()) return absl::OkStatus();
  if (call.what.joined == Contribution::kOwned) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      ToString(call.what), " in the join scope: its root, rank ", comm_->rank(), ", has no inputs any more, and so ",
      call.what.kind == CollectiveKind::kBroadcast ? "nothing to send: broadcast from kHighestActive, or kOwned with a "
                                                     "tensor that dry ranks own"
                                                   : "nobody would use the result: use all_reduce"));
}

absl::StatusOr<JoinScope::Tensor> JoinScope::Owned(const Call& call, int64_t count) const {
  const auto found = owned_.find(call.tensor);
  if (found != owned_.end() && found->second.view.count == count && found->second.view.dtype == call.what.dtype) {
    return found->second;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      ToString(call.what), " in the join scope: rank ", comm_->rank(), ", without inputs, ",
      found == owned_.end() ? "owns no tensor" : absl::StrCat("owns ", ToString(found->second.view), " as"), " \"",
      call.tensor, "\", and ", count, " elements of ", ToString(call.what.dtype), " are asked for"));
}

absl::Status JoinScope::CheckPart(const Call& call, const Part& part) const {
  Collective what = call.what;
  if (what.root == kHighestActive) what.root = 0;
  return here_->Check(what, part.in, part.out);
}

absl::Status JoinScope::Agree(int64_t& value, ReduceOp op) {
  if (comm_->runtime() == nullptr) return channel_->AllReduce(TensorView(&value, 1, DType::kInt64), op).Wait();
  // The value is the host's, and so is what it decides on.
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      here_->control().Exchange(kChannel, absl::StrCat(value), here_->timeout()));
  int64_t sum = 0, most = std::numeric_limits<int64_t>::min();
  for (const std::string& part : parts) {
    int64_t theirs = 0;
    if (!absl::SimpleAtoi(part, &theirs)) return absl::InternalError("what a rank says of a call is malformed");
    sum += theirs;
    most = std::max(most, theirs);
  }
  value = op == ReduceOp::kMax ? most : sum;
  return absl::OkStatus();
}

absl::Status JoinScope::Run(const Call& call, const Part& part) {
  if (channel_ == nullptr) {
    EK_ASSIGN_OR_RETURN(channel_, here_->OpenChannel(kChannel));
  }
  Collective what = call.what;
  CallOptions options{.contributes = part.contributes, .after = part.stream};
  if (Reduces(what.kind) && what.op == ReduceOp::kAverage) {
    int64_t contributors = part.contributes ? 1 : 0;
    EK_RETURN_IF_ERROR(Agree(contributors, ReduceOp::kSum));
    what.op = ReduceOp::kSum;
    options.scale = 1.0 / static_cast<double>(contributors);
  }
  if (what.root == kHighestActive) {
    int64_t highest = part.is_followed ? -1 : here_->rank();
    EK_RETURN_IF_ERROR(Agree(highest, ReduceOp::kMax));
    what.root = static_cast<int>(highest);
  }
  if (on_device_ != nullptr) return RunOnDevice(what, part, options);
  return channel_->Issue(what, part.in, part.out, options).Wait();
}

absl::Status JoinScope::RunOnDevice(const Collective& what, const Part& part, const CallOptions& options) {
  const Work work = channel_->Issue(what, part.in, part.out, options);
  EK_RETURN_IF_ERROR(on_device_->Follow(work, part.stream));
  return part.is_async ? absl::OkStatus() : work.Wait();
}

std::string JoinScope::Call::Serialize() const {
  return internal::ByteWriter()
      .U8(static_cast<uint8_t>(what.kind))
      .U8(static_cast<uint8_t>(what.dtype))
      .I64(what.count)
      .U8(static_cast<uint8_t>(what.op))
      .I32(what.root)
      .U8(static_cast<uint8_t>(what.joined))
      .Bytes(tensor)
      .Take();
}

absl::StatusOr<JoinScope::Call> JoinScope::Call::Parse(absl::string_view bytes) {
  internal::ByteReader reader(bytes);
  Call call;
  call.what.kind = static_cast<CollectiveKind>(reader.U8());
  call.what.dtype = static_cast<DType>(reader.U8());
  call.what.count = reader.I64();
  call.what.op = static_cast<ReduceOp>(reader.U8());
  call.what.root = reader.I32();
  call.what.joined = static_cast<Contribution>(reader.U8());
  call.tensor = std::string(reader.Bytes());
  if (call.what.kind > CollectiveKind::kBarrier || call.what.joined > Contribution::kReceive || call.what.count < 0 ||
      call.what.dtype > DType::kInt64 || call.what.op > ReduceOp::kBitOr) {
    reader.Refuse();
  }
  EK_RETURN_IF_ERROR(reader.Finish("a call of the join scope"));
  return call;
}

}  // namespace evenkeel
