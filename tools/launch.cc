// Starts N ranks of a program on this host. See tools/launcher.h.

#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/tools/launcher.h"
#include "gflags/gflags.h"

DEFINE_int32(nproc, 2, "How many ranks to start.");
DEFINE_string(on_failure, "stop", "What happens to the others when a rank fails: stop.");
DEFINE_double(patience_s, 5,
              "Seconds that the other ranks have when one has failed: before SIGTERM, and before SIGKILL.");

namespace {

constexpr char kUsage[] =
    R"(Starts ranks of a program on this host, and ends all of them when one fails.

  launch [--nproc=2] [--on_failure=stop] [--patience_s=5] -- PROGRAM [ARGUMENT...]

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, and
what evenkeel's ranks need to find and to trust each other. The exit code is the first failed rank's, or 128 + its signal.
)";

int Fail(const std::string& sentence) {
  std::cerr << "launch: " << sentence << "\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc && std::string(argv[i]) != "--"; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help" || argument == "-h" || argument == "-help") {
      std::cout << kUsage;
      return 0;
    }
  }
  gflags::SetUsageMessage(kUsage);
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  if (argc < 2) return Fail("there is no program to start; usage: launch --nproc=2 -- PROGRAM [ARGUMENT...]");
  if (FLAGS_nproc < 1) return Fail("--nproc must be at least 1");
  if (FLAGS_on_failure != "stop") return Fail("--on_failure=" + FLAGS_on_failure + " is not known: it is stop");
  if (!(FLAGS_patience_s >= 0)) return Fail("--patience_s must not be negative");
  // Under `bazel run` the program's path means the folder in which the user stands.
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY"); folder != nullptr && chdir(folder) != 0) {
    return Fail(std::string("can't change to ") + folder);
  }
  absl::StatusOr<evenkeel::LaunchResult> result = evenkeel::Launch(
      {.ranks = FLAGS_nproc, .command = {argv + 1, argv + argc}, .patience = absl::Seconds(FLAGS_patience_s)});
  if (!result.ok()) return Fail(std::string(result.status().message()));
  if (!result->message.empty()) std::cerr << "launch: " << result->message << "\n";
  return result->exit_code;
}
