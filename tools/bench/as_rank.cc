#include "evenkeel/tools/bench/as_rank.h"

#include <sys/prctl.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/rank_side.h"
#include "evenkeel/tools/bench/raw_gloo_rank.h"

namespace evenkeel::bench {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Seconds(30);

// The bytes of the case, copied once by each rank.
class Copies : public Collectives {
 public:
  std::string WhyNot(const Case& what) override {
    if (what.op == Op::kBarrier) return "a barrier copies nothing";
    return what.registered ? "a copy uses no transport" : "";
  }
  std::string Prepare(const Case& what, void*, void*) override {
    from_.resize(what.bytes);
    std::iota(from_.begin(), from_.end(), 1);
    to_.assign(what.bytes, 0);
    return "";
  }
  void Forget() override { from_ = to_ = {}; }
  std::string Run(const Case& what, void*, void*) override {
    std::memcpy(to_.data(), from_.data(), what.bytes);
    // The compiler must believe that somebody reads them.
    asm volatile("" : : "r"(to_.data()) : "memory");
    return "";
  }
  std::string FindWrong(const Case&, int, const void*) override {
    return from_ == to_ ? "" : "the copy differs from its source";
  }

 private:
  std::vector<unsigned char> from_, to_;
};

DType DTypeOf(Scalar scalar) {  // In the order of Scalar, as the next one in that of Op.
  static constexpr DType kTypes[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                     DType::kBFloat16, DType::kInt32,   DType::kInt64};
  return kTypes[static_cast<int>(scalar)];
}

CollectiveKind KindOf(Op op) {
  static constexpr CollectiveKind kKinds[] = {
      CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather,
      CollectiveKind::kBroadcast, CollectiveKind::kReduce,        CollectiveKind::kAllToAll,
      CollectiveKind::kBarrier,   CollectiveKind::kSend};
  return kKinds[static_cast<int>(op)];
}

// evenkeel's own backends: each collective as users call it, issued on the user channel and waited
// for. The communicator must outlive it.
class CommunicatorCollectives : public Collectives {
 public:
  explicit CommunicatorCollectives(Communicator& communicator) : communicator_(communicator) {}

  std::string WhyNot(const Case& what) override {
    const Collective collective{
        .kind = KindOf(what.op), .dtype = DTypeOf(what.scalar), .count = what.count()};
    return std::string(communicator_.Supports(collective).message());
  }
  std::shared_ptr<void> AllocateRegistered(int64_t bytes) override {
    const absl::StatusOr<Memory> memory = communicator_.Allocate(bytes);
    return memory.ok() ? memory->data : nullptr;
  }
  std::string Run(const Case& what, void* in, void* out) override {
    return std::string(Call(what, in, out).message());
  }

 private:
  absl::Status Call(const Case& what, void* in, void* out) {
    const DType dtype = DTypeOf(what.scalar);
    const int64_t element = bench::SizeOf(what.scalar);
    const TensorView input(in, what.in_bytes() / element, dtype),
        output(out, what.out_bytes() / element, dtype);
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
    return absl::InternalError("unknown operation (internal error)");
  }

  Communicator& communicator_;
};

absl::StatusOr<int> RunThreads(const std::string& folder, int ranks) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<Communicator>> group,
                      CreateLocalGroup(ranks));
  std::vector<std::thread> threads;
  std::vector<int> codes(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      CommunicatorCollectives collectives(*group[rank]);
      codes[rank] = ServeRank({folder, rank, ranks}, collectives);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(codes.begin(), codes.end());
}

absl::StatusOr<int> Run(const std::string& backend, const std::string& folder, int threads) {
  if (backend == "local") return RunThreads(folder, threads);
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  const Seat seat{folder, environment.rank, environment.world_size};
  if (backend == "memcpy") {
    Copies copies;
    return ServeRank(seat, copies);
  }
  if (backend == "raw_gloo") {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Collectives> tcp, ConnectRawGloo(seat));
    return ServeRank(seat, *tcp);
  }
  EK_ASSIGN_OR_RETURN(
      const std::unique_ptr<Communicator> communicator,
      CreateCommunicator(environment, {.backend = backend, .connect_timeout = kConnectTimeout}));
  CommunicatorCollectives collectives(*communicator);
  const int code = ServeRank(seat, collectives);
  if (code == 0) EK_RETURN_IF_ERROR(communicator->Finalize(kConnectTimeout));
  return code;
}

}  // namespace

int RunAsRank(const std::string& backend, const std::string& folder, int threads) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const absl::StatusOr<int> code = Run(backend, folder, threads);
  if (code.ok()) return *code;
  std::cerr << code.status().message() << "\n";
  return 1;
}

}  // namespace evenkeel::bench
