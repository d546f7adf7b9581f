// One rank of a job that adds numbers for ever. It says how that ended, and when.
//
//   rank VICTIM SECONDS     VICTIM: the rank that kills itself in the middle of its sixth step; -1:
//     none, and all ranks
//                           leave after that step. SECONDS: how long to wait for the other ranks.

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int kLastStep = 5;
constexpr size_t kElements =
    4 << 20;  // Takes milliseconds, so that the signal comes while data is on its way.

void Say(int rank, absl::string_view what) {
  std::cout << absl::StrCat(absl::ToUnixMillis(absl::Now()), " rank ", rank, " ", what, "\n")
            << std::flush;
}

absl::Status AddForEver(Communicator& comm, int victim) {
  std::vector<float> data(kElements, 1);
  for (int step = 0;; ++step) {
    Work work = comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kAverage);
    if (step == kLastStep && comm.rank() == victim) {
      Say(comm.rank(), "dies");
      kill(getpid(), SIGKILL);
    }
    EK_RETURN_IF_ERROR(work.Wait());
    if (step == kLastStep && victim < 0) return comm.Finalize();
  }
}

absl::Status Main(int victim, absl::Duration patience) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  absl::StatusOr<std::unique_ptr<Communicator>> comm =
      CreateCommunicator(environment, {.backend = "tcp", .connect_timeout = patience});
  const absl::Status status = comm.ok() ? AddForEver(**comm, victim) : comm.status();
  Say(environment.rank, absl::StrCat("ends: ", status.ToString()));
  return status;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (argc != 3) return EXIT_FAILURE;
  return evenkeel::Main(std::atoi(argv[1]), absl::Seconds(std::atof(argv[2]))).ok() ? EXIT_SUCCESS
                                                                                    : EXIT_FAILURE;
}
