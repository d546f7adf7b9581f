#include "evenkeel/tools/bench/communicator_rank.h"

#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {
namespace bench {
namespace {

DType DTypeOfScalar(Scalar scalar) {
  switch (scalar) {
    case Scalar::kFloat32:
      return DType::kFloat32;
    case Scalar::kFloat64:
      return DType::kFloat64;
    case Scalar::kFloat16:
      return DType::kFloat16;
    case Scalar::kBFloat16:
      return DType::kBFloat16;
    case Scalar::kInt32:
      return DType::kInt32;
    case Scalar::kInt64:
      return DType::kInt64;
  }
  return DType::kFloat32;
}

CollectiveKind KindOf(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return CollectiveKind::kAllReduce;
    case Op::kReduceScatter:
      return CollectiveKind::kReduceScatter;
    case Op::kAllGather:
      return CollectiveKind::kAllGather;
    case Op::kBroadcast:
      return CollectiveKind::kBroadcast;
    case Op::kReduce:
      return CollectiveKind::kReduce;
    case Op::kAllToAll:
      return CollectiveKind::kAllToAll;
    case Op::kBarrier:
      return CollectiveKind::kBarrier;
    case Op::kSendRecv:
      return CollectiveKind::kSend;
  }
  return CollectiveKind::kBarrier;
}

}  // namespace

std::string CommunicatorCollectives::WhyNot(const Case& what) {
  const Collective collective{.kind = KindOf(what.op), .dtype = DTypeOfScalar(what.scalar), .count = what.count()};
  return std::string(communicator_.Supports(collective).message());
}

std::shared_ptr<void> CommunicatorCollectives::AllocateRegistered(int64_t bytes) {
  const absl::StatusOr<Memory> memory = communicator_.Allocate(bytes);
  return memory.ok() ? memory->data : nullptr;
}

std::string CommunicatorCollectives::Run(const Case& what, void* in, void* out) {
  return std::string(Call(what, in, out).message());
}

absl::Status CommunicatorCollectives::Call(const Case& what, void* in, void* out) {
  const DType dtype = DTypeOfScalar(what.scalar);
  const int64_t element = bench::SizeOf(what.scalar);
  const TensorView input(in, what.in_bytes() / element, dtype), output(out, what.out_bytes() / element, dtype);
  Channel& channel = communicator_.user();
  switch (what.op) {
    case Op::kAllReduce:
      return channel.AllReduce(output, ReduceOp::kSum).Wait();
    case Op::kReduceScatter:
      return channel.ReduceScatter(input, output, ReduceOp::kSum).Wait();
    case Op::kAllGather:
      return channel.AllGather(input, output).Wait();
    case Op::kBroadcast:
      return channel.Broadcast(output, kRoot).Wait();
    case Op::kReduce:
      return channel.Reduce(output, ReduceOp::kSum, kRoot).Wait();
    case Op::kAllToAll:
      return channel.AllToAll(input, output).Wait();
    case Op::kBarrier:
      return channel.Barrier().Wait();
    case Op::kSendRecv: {
      const int rank = communicator_.rank(), world = communicator_.world_size();
      const Work receive = channel.Recv(output, (rank + world - 1) % world);
      absl::Status sent = channel.Send(input, (rank + 1) % world).Wait();
      sent.Update(receive.Wait());
      return sent;
    }
  }
  return absl::InternalError("an operation that nobody knows");
}

}  // namespace bench
}  // namespace evenkeel
