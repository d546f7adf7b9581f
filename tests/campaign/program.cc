// Kills ranks of training runs at random moments, and prints a row of a table.
//
//   bazel run //tests/campaign -- --model=cnn --backend=tcp --kills=500 --seed=1
//
// --backend=hierarchical has two hosts, which are network namespaces: run it as root.

#include "evenkeel/tools/program.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/campaign/campaign.h"
#include "gflags/gflags.h"

DEFINE_string(model, "mlp", "mlp, cnn or gpt");
DEFINE_string(backend, "shm", "shm, tcp, or hierarchical: two hosts, as root");
DEFINE_string(
    play, "replace",
    "replace: a process takes the place of each lost rank; or continue: the others go on");
DEFINE_int32(runs, 0, "number of runs, at least");
DEFINE_int32(kills, 0, "number of kills, at least");
DEFINE_uint64(seed, 0, "seed of the moments and the ranks");
DEFINE_string(folder, "", "for the files of wrong runs (default: a temporary one)");

namespace evenkeel {
namespace {

constexpr char kUsage[] =
    R"($0: kills ranks of training runs, and compares their ends with the undisturbed run.

  $0 [--model=M] [--backend=B] [--play=P] [--kills=N] [--runs=N] [--seed=S] [--folder=DIR]

Prints a row of a table. Exit code: 0 if all runs were right.
)";

absl::StatusOr<int> Run() {
  CampaignOptions options{.train = "trainer/train",
                          .network = "tests/hosts/network.sh",
                          .model = FLAGS_model,
                          .backend = FLAGS_backend,
                          .runs = FLAGS_runs,
                          .kills = FLAGS_kills,
                          .seed = FLAGS_seed};
  if (FLAGS_play != "replace" && FLAGS_play != "continue")
    return absl::InvalidArgumentError("--play is replace or continue, not " + FLAGS_play);
  if (FLAGS_play == "continue") options.play = CampaignOptions::Play::kContinue;
  if (options.runs + options.kills == 0) options.runs = 1;
  std::unique_ptr<TemporaryFolder> temporary;
  options.folder = FLAGS_folder;
  if (options.folder.empty()) {
    EK_ASSIGN_OR_RETURN(temporary, TemporaryFolder::Create("campaign"));
    options.folder = temporary->path();
  }
  setenv("TEST_TMPDIR", options.folder.c_str(), /*overwrite=*/1);
  EK_ASSIGN_OR_RETURN(const CampaignResult result, RunCampaign(options));
  EK_RETURN_IF_ERROR(Print(TableHead() + TableRow(options, result)));
  return result.wrong + result.hangs == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (evenkeel::PrintsHelp(evenkeel::kUsage, argc, argv)) return EXIT_SUCCESS;
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return evenkeel::RunProgram([] { return evenkeel::Run(); });
}
