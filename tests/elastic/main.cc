// A rank of elastic_test, as a process: elastic_rank "4,4,4,4 plain 0:2:2"

#include <signal.h>
#include <unistd.h>

#include <iostream>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/elastic/elastic_rank.h"

namespace evenkeel {
namespace {

absl::Status Main(absl::string_view text) {
  EK_ASSIGN_OR_RETURN(const ElasticTraining training, TrainingFromText(text));
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = BackendOfProcesses()}));
  EK_ASSIGN_OR_RETURN(
      const ElasticReport report,
      TrainElastically(std::move(comm), training, {.die = [] { kill(getpid(), SIGKILL); }}));
  const std::string line = ToLine(report);
  (void)!write(STDOUT_FILENO, line.data(), line.size());  // In one piece: all ranks write there.
  return absl::OkStatus();
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  const absl::Status status = argc == 2
                                  ? evenkeel::Main(argv[1])
                                  : absl::InvalidArgumentError("usage: elastic_rank TRAINING");
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
