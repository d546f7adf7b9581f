// Checks that a run of the trainer has used each sample once in each epoch.
//
//   bazel run //trainer:train -- --nproc=4 --nozero --on_failure=replace --sample_log=/tmp/ledger
//   bazel run //tools:samples -- /tmp/ledger

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/trainer/report/sample_account.h"
#include "gflags/gflags.h"

DEFINE_bool(
    partial, false,
    "samples may be missing, and only repeated ones are an error: of runs with --max_steps, "
    "--rank_steps or --stop_early, and of those that have not ended");

namespace evenkeel {
namespace {

constexpr char kUsage[] =
    R"($0: checks that a run of the trainer has used each sample once in each epoch.

  $0 [--partial] FOLDER

FOLDER is that of the trainer's --sample_log, with the files of all hosts. Prints a line for each
epoch, with the samples that are missing or repeated, and the steps, ranks and groups in which they
were used.

Exit code: 0 if each sample was used once; 1 if not, or if there is no such log.
)";

absl::StatusOr<int> Run(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const SampleAccount account, ReadSampleLogs(folder));
  EK_RETURN_IF_ERROR(Print(Describe(account)));
  return account.is_once(FLAGS_partial) ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (evenkeel::PrintsHelp(evenkeel::kUsage, argc, argv)) return EXIT_SUCCESS;
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return evenkeel::RunProgram([&]() -> absl::StatusOr<int> {
    if (argc != 2)
      return absl::InvalidArgumentError(
          absl::StrCat("expected one folder, got ", argc - 1, " arguments"));
    EK_RETURN_IF_ERROR(evenkeel::EnterUserFolder());
    return evenkeel::Run(argv[1]);
  });
}
