#include "evenkeel/join/scope.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/internal/device_calls.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {
namespace {

constexpr char kChannel[] = "join scope";

// Returns whether each rank passes, or gets, one part for each rank.
bool HasSlices(CollectiveKind kind) { return SlicesInput(kind) || SlicesOutput(kind); }

}  // namespace

JoinScope::JoinScope(Communicator* comm, bool is_followed)
    : comm_(comm), is_followed_(is_followed) {}

JoinScope::~JoinScope() = default;

absl::Status JoinScope::AddSamples(int64_t samples) {
  if (samples < 0)
    return absl::InvalidArgumentError(absl::StrCat("AddSamples: ", samples, " samples"));
  StepControl::Of(*comm_).AddSamples(samples);
  return absl::OkStatus();
}

std::vector<int> JoinScope::active_ranks() const { return StepControl::Of(*comm_).active_ranks(); }

absl::Status JoinScope::AllReduce(TensorView data, ReduceOp op, const ScopeOptions& options) {
  return Issue(CollectiveKind::kAllReduce, op, -1, data, data, options);
}

absl::Status JoinScope::Reduce(TensorView data, ReduceOp op, int root,
                               const ScopeOptions& options) {
  return Issue(CollectiveKind::kReduce, op, root, data, data, options);
}

absl::Status JoinScope::Broadcast(TensorView data, int root, const ScopeOptions& options) {
  return Issue(CollectiveKind::kBroadcast, ReduceOp::kSum, root, data, data, options);
}

absl::Status JoinScope::AllGather(TensorView input, TensorView output,
                                  const ScopeOptions& options) {
  return Issue(CollectiveKind::kAllGather, ReduceOp::kSum, -1, input, output, options);
}

absl::Status JoinScope::ReduceScatter(TensorView input, TensorView output, ReduceOp op,
                                      const ScopeOptions& options) {
  return Issue(CollectiveKind::kReduceScatter, op, -1, input, output, options);
}

absl::Status JoinScope::AllToAll(TensorView input, TensorView output, const ScopeOptions& options) {
  return Issue(CollectiveKind::kAllToAll, ReduceOp::kSum, -1, input, output, options);
}

absl::Status JoinScope::Barrier() {
  return Issue(CollectiveKind::kBarrier, ReduceOp::kSum, -1, {}, {}, {});
}

absl::Status JoinScope::Drain() {
  return on_device_ == nullptr ? absl::OkStatus() : on_device_->Drain();
}

absl::StatusOr<internal::DeviceCalls*> JoinScope::OnDevice() {
  if (on_device_ == nullptr && comm_->runtime() != nullptr) {
    EK_ASSIGN_OR_RETURN(on_device_, internal::DeviceCalls::Create(*comm_));
  }
  if (on_device_ != nullptr) EK_RETURN_IF_ERROR(on_device_->Confirm());
  return on_device_.get();
}

// Memory for one call, where the group's tensors lie, and what is done to it behind the call's
// stream.
class JoinScope::CallMemory {
 public:
  using Slot = internal::DeviceCalls::Slot;

  // `device`: as OnDevice() returns it.
  CallMemory(JoinScope& scope, internal::DeviceCalls* device, StreamRef stream)
      : scope_(scope), device_(device), stream_(stream) {
    if (device != nullptr) use_.emplace(*device, stream);
  }

  // Calls before have left something in it.
  absl::StatusOr<TensorView> Take(Slot slot, int64_t count, DType dtype) {
    if (device_ != nullptr) return device_->Scratch(slot, count, dtype, stream_);
    Memory& memory = scope_.on_host_[slot];
    if (memory.bytes < count * SizeOf(dtype)) {
      EK_ASSIGN_OR_RETURN(memory, scope_.comm_->Allocate(count * SizeOf(dtype)));
    }
    return TensorView(memory.data.get(), count, dtype);
  }

  absl::Status Zero(const TensorView& view) {
    if (device_ != nullptr) return device_->runtime().Zero(view.data, view.bytes(), stream_);
    if (view.count > 0) std::memset(view.data, 0, static_cast<size_t>(view.bytes()));
    return absl::OkStatus();
  }

 private:
  JoinScope& scope_;
  internal::DeviceCalls* const device_;  // Null on the CPU.
  const StreamRef stream_;
  std::optional<internal::DeviceCalls::Use> use_;
};

absl::Status JoinScope::Issue(CollectiveKind kind, ReduceOp op, int root, TensorView in,
                              TensorView out, const ScopeOptions& options) {
  Call call{.what = {.kind = kind, .op = op, .root = root, .joined = options.joined},
            .tensor = options.tensor};
  Part part;
  if (kind != CollectiveKind::kBarrier) {
    call.what.dtype = in.dtype;
    call.what.count = kind == CollectiveKind::kReduceScatter ? out.count : in.count;
    if (kind == CollectiveKind::kAllToAll) call.what.count /= comm_->world_size();
    part = {.in = {in}, .out = {out}, .stream = options.stream};
  } else {
    call.what.dtype = DType::kInt8;
  }
  const std::string here =
      absl::StrCat(ToString(call.what), " in the join scope, rank ", comm_->rank());
  if ((options.joined == Contribution::kIdentity) != options.tensor.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(here, ": kOwned and kReceive need the name of a tensor, kIdentity has none"));
  }
  if (Reduces(kind) && op == ReduceOp::kAverage && !IsFloat(call.what.dtype)) {
    return absl::UnimplementedError(
        absl::StrCat(here, ": averages are of floats; use kSum and divide"));
  }
  if (root == kHighestActive && kind != CollectiveKind::kBroadcast) {
    return absl::UnimplementedError(absl::StrCat(here, ": kHighestActive is for broadcasts"));
  }
  if (options.stream.handle != nullptr && options.stream.device != comm_->device()) {
    return absl::InvalidArgumentError(absl::StrCat(here, ": a stream of ",
                                                   ToString(options.stream.device), ", on ",
                                                   ToString(comm_->device())));
  }
  Collective checked = call.what;
  if (root == kHighestActive) checked.root = 0;
  EK_RETURN_IF_ERROR(comm_->Check(checked, part.in, part.out));
  EK_ASSIGN_OR_RETURN(internal::DeviceCalls* const device, OnDevice());
  if (device != nullptr && part.stream.handle == nullptr) {
    part.stream = device->stream();
    part.is_async = false;
  }
  if (is_followed_) StepControl::Of(*comm_).AnnounceCall(internal::ToBytes(call));
  return Run(call, part);
}

absl::Status JoinScope::Follow(absl::string_view bytes) {
  constexpr absl::string_view kCall = "a call of the join scope";
  EK_ASSIGN_OR_RETURN(const Call call, internal::FromBytes<Call>(bytes, kCall));
  const Collective& what = call.what;
  // So that a count of all ranks' elements is one of bytes, too.
  const int64_t most = std::numeric_limits<int64_t>::max() / (comm_->world_size() * int64_t{8});
  if (what.count < 0 || what.count > most)
    return absl::InvalidArgumentError(absl::StrCat(kCall, ": value out of range"));
  EK_RETURN_IF_ERROR(CheckRoot(call));
  EK_ASSIGN_OR_RETURN(internal::DeviceCalls* const device, OnDevice());
  const int64_t in_count = what.count * (SlicesInput(what.kind) ? comm_->world_size() : 1);
  const int64_t out_count = what.count * (SlicesOutput(what.kind) ? comm_->world_size() : 1);
  Part part{.contributes = what.joined == Contribution::kOwned, .is_followed = true};
  if (device != nullptr) part.stream = device->stream();
  if (what.kind == CollectiveKind::kBarrier) return Run(call, part);

  TensorView in, out;
  const bool gives = what.joined == Contribution::kOwned,
             takes = what.joined == Contribution::kReceive;
  if (gives || takes) {
    EK_ASSIGN_OR_RETURN(const Tensor owned, Owned(call, gives ? in_count : out_count));
    (gives ? in : out) = owned.view;
    if (device != nullptr && owned.stream.handle != nullptr) part.stream = owned.stream;
  }
  CallMemory memory(*this, device, part.stream);  // Until Run() has ended.
  const bool is_in_place = !HasSlices(what.kind);
  if (!gives && !(is_in_place && takes)) {
    EK_ASSIGN_OR_RETURN(in, memory.Take(internal::DeviceCalls::kIn, in_count, what.dtype));
    // A reduction does not read it.
    if (SlicesOutput(what.kind)) EK_RETURN_IF_ERROR(memory.Zero(in));
  }
  if (!takes && !is_in_place) {
    EK_ASSIGN_OR_RETURN(out, memory.Take(internal::DeviceCalls::kOut, out_count, what.dtype));
  }
  if (is_in_place) (takes ? in : out) = takes ? out : in;
  part.in = {in};
  part.out = {out};
  return Run(call, part);
}

absl::Status JoinScope::CheckRoot(const Call& call) const {
  if (call.what.root != comm_->rank()) return absl::OkStatus();
  if (call.what.joined == Contribution::kOwned) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(call.what), " in the join scope: its root, rank ", comm_->rank(),
                   ", has no inputs any more, and so ",
                   call.what.kind == CollectiveKind::kBroadcast
                       ? "nothing to send: broadcast from kHighestActive, or kOwned with a tensor "
                         "that exhausted ranks own"
                       : "no rank would use the result: use all_reduce"));
}

absl::StatusOr<JoinScope::Tensor> JoinScope::Owned(const Call& call, int64_t count) const {
  const auto found = owned_.find(call.tensor);
  if (found != owned_.end() && found->second.view.count == count &&
      found->second.view.dtype == call.what.dtype) {
    return found->second;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      ToString(call.what), " in the join scope: rank ", comm_->rank(), ", without inputs, ",
      found == owned_.end() ? "owns no tensor"
                            : absl::StrCat("owns ", ToString(found->second.view), " as"),
      " \"", call.tensor, "\", and ", count, " elements of ", ToString(call.what.dtype),
      " are asked for"));
}

absl::Status JoinScope::Agree(int64_t& value, ReduceOp op) {
  if (comm_->runtime() == nullptr)
    return channel_->AllReduce(TensorView(&value, 1, DType::kInt64), op).Wait();
  // The value is the host's, and so is what it decides on.
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm_->control().Exchange(kChannel, absl::StrCat(value), comm_->timeout()));
  int64_t sum = 0, most = std::numeric_limits<int64_t>::min();
  for (const std::string& part : parts) {
    int64_t theirs = 0;
    if (!absl::SimpleAtoi(part, &theirs))
      return absl::InternalError("the message of a rank about a call is malformed");
    sum += theirs;
    most = std::max(most, theirs);
  }
  value = op == ReduceOp::kMax ? most : sum;
  return absl::OkStatus();
}

absl::Status JoinScope::Run(const Call& call, const Part& part) {
  if (channel_ == nullptr) {
    EK_ASSIGN_OR_RETURN(channel_, comm_->OpenChannel(kChannel));
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
    int64_t highest = part.is_followed ? -1 : comm_->rank();
    EK_RETURN_IF_ERROR(Agree(highest, ReduceOp::kMax));
    what.root = static_cast<int>(highest);
  }
  const Work work = channel_->Issue(what, part.in, part.out, options);
  if (on_device_ == nullptr) return work.Wait();
  EK_RETURN_IF_ERROR(on_device_->Follow(work, part.stream));
  return part.is_async ? absl::OkStatus() : work.Wait();
}

}  // namespace evenkeel
