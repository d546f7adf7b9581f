#include "evenkeel/trainer/train_rank.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/model_file.h"
#include "evenkeel/trainer/rank_setup.h"
#include "evenkeel/trainer/run_report.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {
namespace {

// `report` is null on all ranks but one.
absl::Status Train(TrainingRun& run, const TrainOptions& options, RunReport* report) {
  Evaluation test;
  const auto on_step = [report](const StepFacts& facts) {
    return report == nullptr ? absl::OkStatus() : report->OnStep(facts);
  };
  bool stopped = false;
  for (int epoch = 0; epoch < run.plan().epochs() && !stopped; ++epoch) {
    EK_ASSIGN_OR_RETURN(const EpochResult result, run.TrainEpoch(epoch, on_step));
    EK_ASSIGN_OR_RETURN(test, run.Test());
    if (report != nullptr) EK_RETURN_IF_ERROR(report->OnEpoch(epoch, result, test));
    stopped = result.stopped_early;
  }
  if (report == nullptr) return absl::OkStatus();
  if (!options.save_file.empty()) {
    EK_RETURN_IF_ERROR(SaveModel(run.model(), options.save_file, {{"test_accuracy", absl::StrCat(test.accuracy())}}));
    EK_RETURN_IF_ERROR(report->OnSaved(options.save_file));
  }
  return report->OnEnd(test);
}

absl::Status RunPrepared(Communicator& comm, const TrainOptions& options, RankSetup setup, std::FILE* out) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<TrainingRun> run, TrainingRun::Create(&comm, options, std::move(setup)));
  std::unique_ptr<RunReport> report;
  if (comm.rank() == 0) {
    EK_ASSIGN_OR_RETURN(report, RunReport::Create(out, options, comm.backend_name(), *run));
  }
  return Train(*run, options, report.get());
}

}  // namespace

TrainResult TrainRank(Communicator& comm, const TrainOptions& options,
                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data, std::FILE* out) {
  absl::StatusOr<RankSetup> setup = PrepareRank(options, data, comm.rank(), comm.world_size());
  const absl::Status agreed = AgreeOnSetup(comm, setup.status());
  if (!agreed.ok()) return {.status = agreed, .is_common = comm.status().ok()};
  return {.status = RunPrepared(comm, options, *std::move(setup), out)};
}

}  // namespace evenkeel
