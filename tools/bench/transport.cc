#include "evenkeel/tools/bench/transport.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tools/measure/rank_job.h"

namespace evenkeel::bench {
namespace {

constexpr unsigned kMostSecondsOfABlock = 120;

double Since(absl::Time start) { return absl::ToDoubleSeconds(SteadyNow() - start); }

class CommunicatorTransport : public Transport {
 public:
  explicit CommunicatorTransport(Communicator& communicator) : communicator_(communicator) {}

  absl::Status Supports(const Case& what) const override {
    return communicator_.Supports({.kind = what.op, .count = what.count()});
  }
  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override {
    EK_ASSIGN_OR_RETURN(Memory memory, communicator_.Allocate(bytes));
    return std::move(memory.data);
  }
  absl::Status Run(const Case& what, float* in, float* out) override {
    const TensorView input(in, what.in_count(), DType::kFloat32),
        output(out, what.out_count(), DType::kFloat32);
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
      case Op::kSend: {
        const int rank = communicator_.rank(), world = communicator_.world_size();
        const Work receive = channel.Recv(output, (rank + world - 1) % world);
        absl::Status sent = channel.Send(input, (rank + 1) % world).Wait();
        sent.Update(receive.Wait());
        return sent;
      }
      default:
        return absl::InternalError("unknown operation (internal error)");
    }
  }

 private:
  Communicator& communicator_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<void>> Transport::Allocate(int64_t) {
  return absl::UnimplementedError("it has no memory of its own");
}

std::unique_ptr<Transport> OverCommunicator(Communicator& communicator) {
  return std::make_unique<CommunicatorTransport>(communicator);
}

absl::Status OnlyAllReduce(const Case& what, absl::string_view library) {
  if (what.op == Op::kAllReduce) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("only all_reduce is measured with ", library));
}

void SharedBarrier::Wait(int world) {
  constexpr int kSpins = 2000;  // Some microseconds; then others may have the core.
  const uint32_t mine = generation.load(std::memory_order_acquire);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(world)) {
    arrived.store(0, std::memory_order_relaxed);
    generation.store(mine + 1, std::memory_order_release);
    return;
  }
  for (int64_t spins = 0; generation.load(std::memory_order_acquire) == mine; ++spins) {
    if (spins > kSpins) sched_yield();
  }
}

absl::StatusOr<Meeting> Meeting::Create(Communicator* comm, const std::string& folder) {
  static_assert(
      std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
      "processes share them");
  const std::string path = folder + "/barrier";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(SharedBarrier)) != 0)
    return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", strerror(errno)));
  void* const data =
      mmap(nullptr, sizeof(SharedBarrier), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (data == MAP_FAILED)
    return absl::UnavailableError(absl::StrCat("cannot map ", path, ": ", strerror(errno)));
  return Meeting{.comm = comm, .barrier = static_cast<SharedBarrier*>(data)};
}

absl::StatusOr<std::vector<double>> RankContender::Time(const Case& what, const Block& block) {
  EK_RETURN_IF_ERROR(Prepare(what));
  alarm(kMostSecondsOfABlock);
  const bool is_loop = block.timing == Timing::kLoop;
  std::vector<double> seconds;
  absl::Time begin;
  for (int i = -block.warmups; i < block.repetitions; ++i) {
    if (!is_loop || i == 0) {
      meeting_.barrier->Wait(what.world);
      begin = SteadyNow();
    }
    EK_RETURN_IF_ERROR(Run(what));
    if (!is_loop && i >= 0) seconds.push_back(Since(begin));
  }
  if (is_loop) seconds.push_back(Since(begin) / block.repetitions);
  alarm(0);
  return LargestOf(*meeting_.comm, seconds);
}

absl::Status RankContender::Check(const Case& what) {
  EK_RETURN_IF_ERROR(Prepare(what));
  alarm(kMostSecondsOfABlock);
  EK_ASSIGN_OR_RETURN(const std::string wrong,
                      what.op == Op::kBarrier ? RunBarriers(what) : RunAndFindWrong(what));
  alarm(0);
  if (wrong.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(name_, " computed a wrong result: ", NameOf(what.op),
                                          " of ", what.bytes, " bytes, rank ", rank(), ": ",
                                          wrong));
}

absl::Status RankContender::Prepare(const Case& what) {
  absl::Status status = transport_->Supports(what);
  if (status.ok() && buffers_->what != what) status = Allocate(what);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(name_, ": ", status.message()));
}

absl::Status RankContender::Allocate(const Case& what) {
  *buffers_ = {};
  EK_ASSIGN_OR_RETURN(buffers_->in, Zeros(what.in_count() * sizeof(float)));
  EK_ASSIGN_OR_RETURN(buffers_->out, Zeros(what.out_count() * sizeof(float)));
  buffers_->what = what;  // Last: after an error the next call must allocate again.
  return absl::OkStatus();
}

// Zeroed, so that its pages are there.
absl::StatusOr<std::shared_ptr<void>> RankContender::Zeros(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  if (bytes == 0) return nullptr;
  std::shared_ptr<void> memory;
  if (registered_) {
    EK_ASSIGN_OR_RETURN(memory, transport_->Allocate(bytes));
  } else {
    const auto whole = static_cast<size_t>((bytes / kAlignment + 1) * kAlignment);
    memory.reset(std::aligned_alloc(kAlignment, whole), std::free);
  }
  if (memory == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  std::memset(memory.get(), 0, static_cast<size_t>(bytes));
  return memory;
}

absl::Status RankContender::Run(const Case& what) {
  const absl::Status status = transport_->Run(what, in(), out());
  if (status.ok()) return status;
  return absl::InternalError(absl::StrCat(name_, " failed: ", NameOf(what.op), " of ", what.bytes,
                                          " bytes, rank ", rank(), ": ", status.message()));
}

absl::StatusOr<std::string> RankContender::RunAndFindWrong(const Case& what) {
  Fill(what, rank(), in(), out());
  meeting_.barrier->Wait(what.world);
  EK_RETURN_IF_ERROR(Run(what));
  std::string wrong = FindWrong(what, rank(), out());
  // Zeros again: sums of sums would end in infinities.
  meeting_.barrier->Wait(what.world);
  *buffers_ = {};
  return wrong;
}

// No rank leaves before all have arrived; each rank is late once.
absl::StatusOr<std::string> RankContender::RunBarriers(const Case& what) {
  std::string wrong;
  for (int late = 0; late < what.world; ++late) {
    meeting_.barrier->Wait(what.world);
    const uint64_t before = meeting_.barrier->entered.load();
    meeting_.barrier->Wait(what.world);
    if (late == rank()) absl::SleepFor(absl::Milliseconds(2));
    meeting_.barrier->entered.fetch_add(1);
    EK_RETURN_IF_ERROR(Run(what));
    const uint64_t entered = meeting_.barrier->entered.load() - before;
    if (entered == static_cast<uint64_t>(what.world)) continue;
    wrong =
        absl::StrCat("a rank left it when ", entered, " of ", what.world, " ranks had entered it");
  }
  return wrong;
}

}  // namespace evenkeel::bench
