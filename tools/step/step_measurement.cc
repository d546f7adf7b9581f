#include "evenkeel/tools/step/step_measurement.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rank_job.h"
#include "evenkeel/tools/measure/rounds.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// Past the rebuild of the buckets, and the optimizers' first steps.
constexpr int kWarmUpSteps = 4;

// The numbers of a row's blocks, by round: step, update, and the exposed time of each bucket.
enum { kStep, kUpdate, kExposed };

// All rows of a plan over one group.
class Measurement {
 public:
  Measurement(Communicator& comm, const PlanSettings& settings)
      : comm_(comm), settings_(settings), rows_(settings.rows.size()) {}

  absl::StatusOr<Json> Run() {
    for (const StepRow& row : settings_.rows) EK_RETURN_IF_ERROR(Prepare(row));
    EK_RETURN_IF_ERROR(RunRounds(rows_.size(), settings_.rounds,
                                 [&](size_t index, int) { return RunBlock(index); }));
    Json rows = Json::array();
    for (size_t index = 0; index < rows_.size(); ++index) {
      EK_RETURN_IF_ERROR(CheckReplicas(settings_.rows[index]));
      rows.push_back(ResultOf(index));
    }
    return Json{{"parameters", trainings_.begin()->second->CountOfParameters()},
                {"rows", std::move(rows)}};
  }

 private:
  struct Measured {
    std::vector<Numbers> columns;
    int64_t collectives = 0;
  };

  absl::Status Prepare(const StepRow& row) {
    std::unique_ptr<StepTraining>& training = trainings_[row.way];
    if (training != nullptr) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(training, StepTraining::Create(&comm_, row.way, settings_.training));
    StepSamples unused;
    return training->RunBlock(/*joins=*/false, kWarmUpSteps, unused);
  }

  absl::Status RunBlock(size_t index) {
    const StepRow& row = settings_.rows[index];
    Measured& measured = rows_[index];
    const int64_t issued = comm_.flight().issued();
    StepSamples samples;
    EK_RETURN_IF_ERROR(trainings_[row.way]->RunBlock(row.joins, settings_.steps, samples));
    measured.collectives += comm_.flight().issued() - issued;
    Numbers mine = {MedianOf(samples.step), MedianOf(samples.update)};
    for (const std::vector<double>& bucket : samples.exposed) mine.push_back(MedianOf(bucket));
    EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all, GatherNumbers(comm_, mine));
    measured.columns.resize(mine.size());
    for (size_t column = 0; column < mine.size(); ++column) {
      double mean = 0;
      for (const Numbers& rank : all) mean += rank[column] / static_cast<double>(all.size());
      measured.columns[column].push_back(mean);
    }
    return absl::OkStatus();
  }

  Json ResultOf(size_t index) const {
    const StepRow& row = settings_.rows[index];
    const Measured& measured = rows_[index];
    Json result = {{"name", row.name},
                   {"step_ms", 1e3 * MedianOf(measured.columns[kStep])},
                   {"update_ms", 1e3 * MedianOf(measured.columns[kUpdate])},
                   {"step_to_local", Compare(index, SyncWay::kLocal, kStep)},
                   {"step_to_reducer", Compare(index, SyncWay::kReducer, kStep)},
                   {"update_to_reducer", Compare(index, SyncWay::kReducer, kUpdate)},
                   {"bucket_bytes", Json::array()},
                   {"exposed_us", Json::array()},
                   {"collectives", static_cast<double>(measured.collectives) /
                                       (settings_.rounds * settings_.steps)}};
    for (const BucketInfo& bucket : trainings_.at(row.way)->buckets())
      result["bucket_bytes"].push_back(bucket.wire.bytes());
    for (size_t column = kExposed; column < measured.columns.size(); ++column)
      result["exposed_us"].push_back(1e6 * MedianOf(measured.columns[column]));
    return result;
  }

  // With the first row of that way that does not join, if there is one and it is another.
  Json Compare(size_t index, SyncWay way, int column) const {
    const std::vector<StepRow>& rows = settings_.rows;
    const auto base = std::ranges::find_if(
        rows, [way](const StepRow& row) { return row.way == way && !row.joins; });
    const size_t at = base - rows.begin();
    if (base == rows.end() || at == index || rows[index].way == SyncWay::kLocal) return Json();
    const PairedRatio ratio = RatioOf(rows_[index].columns[column], rows_[at].columns[column]);
    return {
        {"median", ratio.median}, {"low", ratio.low}, {"high", ratio.high}, {"pairs", ratio.pairs}};
  }

  absl::Status CheckReplicas(const StepRow& row) {
    if (row.way == SyncWay::kLocal) return absl::OkStatus();
    const std::string hash = absl::StrCat(trainings_[row.way]->HashOfParameters());
    EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                        comm_.control().Exchange("hash", hash, comm_.timeout()));
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      if (parts[rank] == parts[0]) continue;
      return absl::InternalError(
          absl::StrCat(row.name, ": ranks 0 and ", rank,
                       " have trained different parameters, so the times are not comparable"));
    }
    return absl::OkStatus();
  }

  Communicator& comm_;
  const PlanSettings& settings_;
  std::map<SyncWay, std::unique_ptr<StepTraining>> trainings_;
  std::vector<Measured> rows_;
};

}  // namespace

absl::StatusOr<nlohmann::json> MeasurePlan(Communicator& comm, const PlanSettings& settings) {
  if (settings.rows.empty() || settings.rounds < 1 || settings.steps < 1)
    return absl::InvalidArgumentError("at least one row, one round and one step are required");
  return Measurement(comm, settings).Run();
}

}  // namespace evenkeel
