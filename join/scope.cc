#include "evenkeel/join/scope.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/step_control.h"

namespace evenkeel {
namespace {

constexpr char kChannel[] = "join scope";

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

}  // namespace

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

void JoinScope::GoOnIn(Communicator& here, const std::vector<int>& members) {
  here_ = &here;
  members_ = members;
  channel_ = nullptr;
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
  if (!comm_->device().is_cpu()) {
    return absl::UnimplementedError(absl::StrCat(ToString(kind), " in the join scope: ranks have left, on a device"));
  }
  if (whole.count % comm_->world_size() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(kind), " in the join scope: ", whole.count,
                                                   " elements for ", comm_->world_size(), " ranks"));
  }
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

absl::Status JoinScope::IssueHere(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                                  const ScopeOptions& options) {
  Call call{.what = {.kind = kind, .op = op, .root = root, .joined = options.joined}, .tensor = options.tensor};
  Part part;
  if (kind != CollectiveKind::kBarrier) {
    call.what.dtype = in.dtype;
    call.what.count = kind == CollectiveKind::kReduceScatter ? out.count : in.count;
    part = {.in = {in}, .out = {out}};
  } else {
    call.what.dtype = DType::kInt8;
  }
  const std::string here = absl::StrCat(ToString(call.what), " in the join scope, rank ", comm_->rank());
  if ((options.joined == Contribution::kIdentity) != options.tensor.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(here, ": kOwned and kReceive need the name of a tensor, kIdentity has none"));
  }
  if (Reduces(kind) && op == ReduceOp::kAverage && (!IsFloat(call.what.dtype) || !comm_->device().is_cpu())) {
    return absl::UnimplementedError(absl::StrCat(here, ": averages are of floats on the CPU; use kSum and divide"));
  }
  if (root == kHighestActive && (kind != CollectiveKind::kBroadcast || !comm_->device().is_cpu())) {
    return absl::UnimplementedError(absl::StrCat(here, ": kHighestActive is for broadcasts on the CPU"));
  }
  if (can_leave_ && options.joined != Contribution::kIdentity) {
    return absl::InvalidArgumentError(
        absl::StrCat(here, ": ranks may leave this loop, and with them what they own: only kIdentity"));
  }
  EK_RETURN_IF_ERROR(CheckPart(call, part));
  if (is_followed_) here_->steps().AnnounceCall(call.Serialize());
  return Run(call, part);
}

absl::Status JoinScope::Follow(absl::string_view bytes) {
  EK_ASSIGN_OR_RETURN(const Call call, Call::Parse(bytes));
  const Collective& what = call.what;
  EK_RETURN_IF_ERROR(CheckRoot(call));
  const int64_t world_size = here_->world_size();
  const bool is_gather = what.kind == CollectiveKind::kAllGather;
  const bool is_scatter = what.kind == CollectiveKind::kReduceScatter;
  const int64_t in_count = what.count * (is_scatter ? world_size : 1);
  const int64_t out_count = what.count * (is_gather ? world_size : 1);
  Part part{.contributes = what.joined == Contribution::kOwned};
  Memory in_memory, out_memory;  // Until Run() has ended.
  if (what.kind == CollectiveKind::kBarrier) return Run(call, part);

  TensorView in, out;
  if (what.joined == Contribution::kOwned) {
    EK_ASSIGN_OR_RETURN(in, Owned(call, in_count));
  }
  if (what.joined == Contribution::kReceive) {
    EK_ASSIGN_OR_RETURN(out, Owned(call, out_count));
  }
  auto scratch = [&](Memory& memory, int64_t count) -> absl::StatusOr<TensorView> {
    EK_ASSIGN_OR_RETURN(memory, comm_->Allocate(count * SizeOf(what.dtype)));
    return TensorView(memory.data.get(), count, what.dtype, comm_->device());
  };
  if (is_gather || is_scatter) {
    if (what.joined != Contribution::kOwned) {
      EK_ASSIGN_OR_RETURN(in, scratch(in_memory, in_count));
    }
    if (what.joined != Contribution::kReceive) {
      EK_ASSIGN_OR_RETURN(out, scratch(out_memory, out_count));
    }
  } else if (what.joined == Contribution::kIdentity) {
    EK_ASSIGN_OR_RETURN(in, scratch(in_memory, in_count));
    out = in;
  } else {  // In place.
    (what.joined == Contribution::kOwned ? out : in) = what.joined == Contribution::kOwned ? in : out;
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

absl::StatusOr<TensorView> JoinScope::Owned(const Call& call, int64_t count) const {
  const auto found = owned_.find(call.tensor);
  if (found != owned_.end() && found->second.count == count && found->second.dtype == call.what.dtype) {
    return found->second;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      ToString(call.what), " in the join scope: rank ", comm_->rank(), ", without inputs, ",
      found == owned_.end() ? "owns no tensor" : absl::StrCat("owns ", ToString(found->second), " as"), " \"",
      call.tensor, "\", and ", count, " elements of ", ToString(call.what.dtype), " are asked for"));
}

absl::Status JoinScope::CheckPart(const Call& call, const Part& part) const {
  Collective what = call.what;
  if (what.root == kHighestActive) what.root = 0;
  return here_->Check(what, part.in, part.out);
}

absl::Status JoinScope::Agree(int64_t& value, ReduceOp op) {
  return channel_->AllReduce(TensorView(&value, 1, DType::kInt64), op).Wait();
}

absl::Status JoinScope::Run(const Call& call, const Part& part) {
  if (channel_ == nullptr) {
    EK_ASSIGN_OR_RETURN(channel_, here_->OpenChannel(kChannel));
  }
  Collective what = call.what;
  CallOptions options{.contributes = part.contributes};
  if (Reduces(what.kind) && what.op == ReduceOp::kAverage) {
    int64_t contributors = part.contributes ? 1 : 0;
    EK_RETURN_IF_ERROR(Agree(contributors, ReduceOp::kSum));
    what.op = ReduceOp::kSum;
    options.scale = 1.0 / static_cast<double>(contributors);
  }
  if (what.root == kHighestActive) {
    int64_t highest = here_->steps().is_dry() ? -1 : here_->rank();
    EK_RETURN_IF_ERROR(Agree(highest, ReduceOp::kMax));
    what.root = static_cast<int>(highest);
  }
  return channel_->Issue(what, part.in, part.out, options).Wait();
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
