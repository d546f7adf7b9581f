#include "evenkeel/comm/nccl/collectives.h"

#include <algorithm>
#include <string>

#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/nccl/fill.cuh"
#include "evenkeel/comm/nccl/fill_image.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

const auto kFill = MakeKernel<&ek_nccl_fill>("ek_nccl_fill", fill_image);

}  // namespace

absl::Status NcclCollectives::Put(const Operation& operation, bool is_alike, StreamRef stream,
                                  std::vector<Memory>& kept) {
  const Collective& what = operation.what;
  if (what.count == 0 && what.kind != CollectiveKind::kBarrier) return absl::OkStatus();
  const NcclPlan plan = PlanForNccl(operation, seat_.rank, seat_.world_size, is_alike);
  EK_ASSIGN_OR_RETURN(const Calls calls, Prepare(operation, plan, stream, kept));
  EK_RETURN_IF_ERROR(PutCalls(calls.list, operation, plan, stream));
  return Finish(operation, plan, calls.staged, stream);
}

absl::StatusOr<NcclCollectives::Calls> NcclCollectives::Prepare(const Operation& operation,
                                                                const NcclPlan& plan,
                                                                StreamRef stream,
                                                                std::vector<Memory>& kept) {
  const Collective& what = operation.what;
  if (what.kind == CollectiveKind::kBarrier) return PrepareBarrier();
  if (IsInPlace(what.kind)) return PrepareInPlace(operation, plan, stream, kept);
  Calls calls;
  NcclCall call{.kind = what.kind, .count = what.count, .dtype = what.dtype, .root = what.root};
  if (plan.stages_in) {
    EK_ASSIGN_OR_RETURN(const TensorView in, Stage(kIn, operation.in, what.dtype, kept));
    if (plan.fills_identity) {
      EK_RETURN_IF_ERROR(FillIdentity(what, {in}, stream));
    } else {
      EK_RETURN_IF_ERROR(Copy(operation.in, {in}, plan.before, stream));
    }
    call.in = in.data;
  } else if (!operation.in.empty()) {
    call.in = operation.in[0].data;
  }
  if (plan.stages_out) {
    EK_ASSIGN_OR_RETURN(calls.staged, Stage(kOut, operation.out, what.dtype, kept));
    call.out = calls.staged.data;
  } else if (!operation.out.empty()) {
    call.out = operation.out[0].data;
  }
  calls.list.push_back(call);
  return calls;
}

absl::StatusOr<NcclCollectives::Calls> NcclCollectives::PrepareInPlace(const Operation& operation,
                                                                       const NcclPlan& plan,
                                                                       StreamRef stream,
                                                                       std::vector<Memory>& kept) {
  const Collective& what = operation.what;
  TensorList views = operation.out;
  Calls calls;
  if (plan.stages_in) {
    EK_ASSIGN_OR_RETURN(calls.staged, Stage(kIn, operation.in, what.dtype, kept));
    views = {calls.staged};
  }
  if (plan.fills_identity) {
    EK_RETURN_IF_ERROR(FillIdentity(what, views, stream));
  } else if (plan.before != 1.0 || (plan.stages_in && (what.kind != CollectiveKind::kBroadcast ||
                                                       what.root == seat_.rank))) {
    EK_RETURN_IF_ERROR(Copy(operation.in, views, plan.before, stream));
  }
  for (const TensorView& view : views) {
    if (view.count == 0) continue;
    calls.list.push_back({.kind = what.kind,
                          .in = view.data,
                          .out = view.data,
                          .count = view.count,
                          .dtype = what.dtype,
                          .root = what.root});
  }
  return calls;
}

absl::StatusOr<NcclCollectives::Calls> NcclCollectives::PrepareBarrier() {
  if (barrier_.data == nullptr) {
    EK_ASSIGN_OR_RETURN(barrier_, Allocate(SizeOf(DType::kInt32)));
  }
  Calls calls;
  calls.list.push_back({.kind = CollectiveKind::kAllReduce,
                        .in = barrier_.data.get(),
                        .out = barrier_.data.get(),
                        .count = 1,
                        .dtype = DType::kInt32});
  return calls;
}

absl::Status NcclCollectives::PutCalls(const std::vector<NcclCall>& calls,
                                       const Operation& operation, const NcclPlan& plan,
                                       StreamRef stream) {
  const std::string text = ToString(operation.what);
  const bool makes_reduction = plan.inside != 1.0;
  int op = plan.op;
  EK_RETURN_IF_ERROR(connection_->Call(text, operation.deadline, [&](NcclComm comm) {
    NcclAnswer answer;
    if (makes_reduction) answer = api_.MakeScaledSum(plan.inside, operation.what.dtype, comm, &op);
    if (!answer.is_failure()) answer = api_.GroupStart();
    if (answer.is_failure()) return answer;
    for (NcclCall call : calls) {
      call.op = op;
      answer = api_.Enqueue(call, comm, stream);
      // An abort that has come into a call may have taken the communicator away. Nothing else comes
      // on this thread, so the group of calls need not end.
      if (connection_->has_ended()) return NcclAnswer{NcclCode::kInvalidUsage, "aborted"};
      if (answer.is_failure()) break;
    }
    const NcclAnswer ended = api_.GroupEnd(comm);
    return answer.is_failure() ? answer : ended;
  }));
  EK_RETURN_IF_ERROR(connection_->AwaitProgress(text, operation.deadline));
  if (!makes_reduction) return absl::OkStatus();
  return connection_->Call("ncclRedOpDestroy", operation.deadline,
                           [&](NcclComm comm) { return api_.DropReduction(op, comm); });
}

absl::Status NcclCollectives::Finish(const Operation& operation, const NcclPlan& plan,
                                     const TensorView& staged, StreamRef stream) {
  if (staged.data != nullptr) return Copy({staged}, operation.out, plan.after, stream);
  if (plan.after != 1.0) return Copy(operation.out, operation.out, plan.after, stream);
  return absl::OkStatus();
}

absl::StatusOr<TensorView> NcclCollectives::Stage(Side side, const TensorList& views, DType dtype,
                                                  std::vector<Memory>& kept) {
  const TensorView whole(nullptr, CountOf(views), dtype, seat_.device);
  Memory& memory = staging_[side];
  if (memory.bytes < whole.bytes()) {
    // Smaller memory lives on in `kept` of the operations that use it.
    EK_ASSIGN_OR_RETURN(memory, Allocate(std::max(whole.bytes(), 2 * memory.bytes)));
  }
  kept.push_back(memory);
  return TensorView(memory.data.get(), whole.count, dtype, seat_.device);
}

absl::StatusOr<Memory> NcclCollectives::Allocate(int64_t bytes) {
  EK_ASSIGN_OR_RETURN(Memory memory, runtime_.Allocate(seat_.device, bytes));
  return FreedByLeaveOf(connection_, std::move(memory));
}

absl::Status NcclCollectives::FillIdentity(const Collective& what,
                                           absl::Span<const TensorView> views, StreamRef stream) {
  uint64_t pattern = 0;
  internal::FillIdentity(what.op, what.dtype, &pattern, 1);
  for (const TensorView& view : views) {
    EK_RETURN_IF_ERROR(Launch(runtime_, kFill, ShapeFor(view.count, 4), stream, view.data,
                              view.count, static_cast<int>(SizeOf(what.dtype)), pattern));
  }
  return absl::OkStatus();
}

absl::Status NcclCollectives::Copy(const TensorList& from, const TensorList& to, double scale,
                                   StreamRef stream) {
  std::vector<CopySegment> segments;
  ViewCursor source(from, 0), target(to, 0);
  while (target.contiguous() > 0) {
    const int64_t n = std::min(source.contiguous(), target.contiguous());
    const DType dtype = to[0].dtype;
    segments.push_back({.to = TensorView(target.data(), n, dtype, seat_.device),
                        .from = TensorView(source.data(), n, dtype, seat_.device)});
    source.Advance(n);
    target.Advance(n);
  }
  for (size_t begin = 0; begin < segments.size(); begin += kMostInlineSegments) {
    const size_t count = std::min<size_t>(segments.size() - begin, kMostInlineSegments);
    EK_RETURN_IF_ERROR(CopySegmentsOnce(
        runtime_, absl::MakeConstSpan(segments).subspan(begin, count), stream, {.scale = scale}));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
