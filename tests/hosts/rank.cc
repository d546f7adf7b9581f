// One rank of a job on several hosts.
//
//   rank lose VICTIMS kill|stop     adds numbers until the ranks in VICTIMS ("2,3"; none: "-") kill
//     or stop themselves in
//                                   the middle of a step; all others say how that ended, and when
//   rank measure MIB ROUNDS         rank 0 says how long an all-reduce takes over the hierarchical
//     backend and over tcp,
//                                   in blocks by turns

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/rendezvous/rendezvous.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int kLastStep = 5;
constexpr size_t kElements =
    4 << 20;  // Several chunks, so that the signal comes while data is on its way.
constexpr int kPerBlock = 3;
constexpr absl::Duration kSilence = absl::Seconds(3);  // hosts_test.cc has it, too.

void Say(int rank, absl::string_view what) {
  std::cout << absl::StrCat(absl::ToUnixMillis(absl::Now()), " rank ", rank, " ", what, "\n")
            << std::flush;
}

absl::Status AddUntilLost(Communicator& comm, bool is_victim, bool has_victims, int signal) {
  std::vector<float> data(kElements, 1);
  for (int step = 0;; ++step) {
    Work work = comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kAverage);
    if (step == kLastStep && is_victim) {
      Say(comm.rank(), "is lost");
      kill(getpid(), signal);
    }
    EK_RETURN_IF_ERROR(work.Wait());
    if (data.front() != 1 || data.back() != 1) return absl::DataLossError("wrong average");
    if (step == kLastStep && !has_victims) return comm.Finalize();
  }
}

absl::Status Lose(const Environment& environment, absl::string_view victims, int signal) {
  const std::vector<std::string> lost = absl::StrSplit(victims, ',');
  const bool is_victim =
      std::find(lost.begin(), lost.end(), absl::StrCat(environment.rank)) != lost.end();
  absl::StatusOr<std::unique_ptr<Communicator>> comm = CreateCommunicator(
      environment, {.connect_timeout = absl::Seconds(20),
                    .communicator = {.watch = {.beat = kSilence / 5, .silence = kSilence}}});
  if (comm.ok()) Say(environment.rank, absl::StrCat("is on ", (*comm)->backend_name()));
  const absl::Status status =
      comm.ok() ? AddUntilLost(**comm, is_victim, victims != "-", signal) : comm.status();
  Say(environment.rank, absl::StrCat("ends: ", status.ToString()));
  return status;
}

absl::StatusOr<double> BlockMillis(Communicator& comm, std::vector<float>& data) {
  EK_RETURN_IF_ERROR(comm.Barrier());
  const absl::Time start = absl::Now();
  for (int i = 0; i < kPerBlock; ++i)
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kAverage));
  return absl::ToDoubleMilliseconds(absl::Now() - start) / kPerBlock;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::Status Measure(const Environment& environment, double mebibytes, int rounds) {
  EK_ASSIGN_OR_RETURN(std::shared_ptr<Rendezvous> rendezvous,
                      Rendezvous::Join(environment, absl::Seconds(20)));
  const auto create = [&](const char* backend) {
    return CreateCommunicator(environment,
                              {.backend = backend, .group = backend, .rendezvous = rendezvous});
  };
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> hierarchical, create("hierarchical"));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> tcp, create("tcp"));
  std::vector<float> data(static_cast<size_t>(mebibytes * (1 << 20) / sizeof(float)), 1.0f);
  std::vector<double> a, b, ratios;
  for (int round = -1; round < rounds; ++round) {
    EK_ASSIGN_OR_RETURN(const double one, BlockMillis(*hierarchical, data));
    EK_ASSIGN_OR_RETURN(const double other, BlockMillis(*tcp, data));
    if (round < 0) continue;  // The first ones warm up.
    a.push_back(one);
    b.push_back(other);
    ratios.push_back(other / one);
  }
  if (environment.rank == 0) {
    std::sort(ratios.begin(), ratios.end());
    Say(0, absl::StrCat("all_reduce of ", mebibytes, " MiB: hierarchical ", Median(a), " ms, tcp ",
                        Median(b), " ms, tcp / hierarchical ", Median(ratios), " (",
                        ratios[ratios.size() / 20], " to ",
                        ratios[ratios.size() - 1 - ratios.size() / 20], ") in ", rounds,
                        " pairs of blocks"));
  }
  EK_RETURN_IF_ERROR(hierarchical->Finalize());
  return tcp->Finalize();
}

absl::Status Main(const std::vector<std::string>& arguments) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  if (arguments.size() == 3 && arguments[0] == "lose") {
    return Lose(environment, arguments[1], arguments[2] == "stop" ? SIGSTOP : SIGKILL);
  }
  double mebibytes = 0;
  int rounds = 0;
  if (arguments.size() == 3 && arguments[0] == "measure" &&
      absl::SimpleAtod(arguments[1], &mebibytes) && absl::SimpleAtoi(arguments[2], &rounds)) {
    return Measure(environment, mebibytes, rounds);
  }
  return absl::InvalidArgumentError("lose VICTIMS kill|stop, or measure MIB ROUNDS");
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  const absl::Status status = evenkeel::Main(std::vector<std::string>(argv + 1, argv + argc));
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}
