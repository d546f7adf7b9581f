#include "evenkeel/tools/bench/as_rank.h"

#include <sys/prctl.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/communicator_rank.h"
#include "evenkeel/tools/bench/rank_side.h"
#include "evenkeel/tools/bench/raw_gloo_rank.h"

namespace evenkeel {
namespace bench {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Seconds(30);

// The bytes of the case, copied once by each rank.
class Copies : public Collectives {
 public:
  std::string WhyNot(const Case& what) override {
    if (what.op == Op::kBarrier) return "there is nothing to copy";
    return what.registered ? "there is no transport" : "";
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
    return from_ == to_ ? "" : "the copy is not what was copied";
  }

 private:
  std::vector<unsigned char> from_, to_;
};

absl::StatusOr<int> RunThreads(const std::string& folder, int ranks) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<Communicator>> group, CreateLocalGroup(ranks));
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
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Collectives> gloo, ConnectRawGloo(seat));
    return ServeRank(seat, *gloo);
  }
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> communicator,
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

}  // namespace bench
}  // namespace evenkeel
