#include "evenkeel/tools/step/step_measurement.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/measure/heap_counter.h"

namespace evenkeel {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PairedRatio, median, low, high, pairs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepCounts, collectives, copied_bytes, allocations,
                                   control_messages, control_bytes, control_cpu_us, cpu_us, waits)

namespace {

constexpr int kSkewedSteps = 14;
constexpr int kCountedSteps = 20;
constexpr int kWarmUpSteps =
    4;  // Past the rebuild of the buckets, and the optimizers' first steps.

// A block of a row: medians over its steps, then means over the ranks that had any.
struct Block {
  double seconds = 0;  // The whole block, on the slowest rank.
  double step = 0, backward = 0, update = 0;
  std::vector<double> exposed;
};

using Numbers = std::vector<double>;

absl::StatusOr<std::vector<Numbers>> GatherNumbers(Communicator& comm, const Numbers& mine) {
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange("numbers", bytes, comm.timeout()));
  std::vector<Numbers> all;
  for (const std::string& part : parts) {
    all.emplace_back(part.size() / sizeof(double));
    if (!part.empty()) std::memcpy(all.back().data(), part.data(), part.size());
  }
  return all;
}

// Over the ranks, element by element; those that have none are left out.
Numbers MeansOf(const std::vector<Numbers>& of_ranks) {
  Numbers means;
  int ranks = 0;
  for (const Numbers& numbers : of_ranks) {
    if (numbers.empty()) continue;
    means.resize(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) means[i] += numbers[i];
    ++ranks;
  }
  for (double& mean : means) mean /= ranks;
  return means;
}

absl::StatusOr<Block> BlockOf(Communicator& comm, double seconds, const StepSamples& samples) {
  Numbers mine;
  if (!samples.step.empty()) {
    mine = {MedianOf(samples.step), MedianOf(samples.backward), MedianOf(samples.update)};
    for (const std::vector<double>& bucket : samples.exposed) mine.push_back(MedianOf(bucket));
  }
  EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all, GatherNumbers(comm, mine));
  EK_ASSIGN_OR_RETURN(const std::vector<Numbers> times, GatherNumbers(comm, {seconds}));
  Block block;
  for (const Numbers& time : times) block.seconds = std::max(block.seconds, time[0]);
  const Numbers means = MeansOf(all);
  block.step = means[0];
  block.backward = means[1];
  block.update = means[2];
  block.exposed.assign(means.begin() + 3, means.end());
  return block;
}

struct Usage {
  ControlCounters control;
  HeapCounts heap;
  int64_t issued = 0;
  double cpu_us = 0;
  double waits = 0;
};

double Microseconds(const timeval& time) {
  return 1e6 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec);
}

// Returns this process's resource use, once all of its threads have finished the last step's work.
absl::StatusOr<Usage> UsageNow(Communicator& comm) {
  EK_RETURN_IF_ERROR(comm.control().Exchange("usage", "", comm.timeout()).status());
  absl::SleepFor(absl::Milliseconds(20));
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  return Usage{.control = comm.control().link().Counters(),
               .heap = HeapCountsOfProcess(),
               .issued = comm.flight().issued(),
               .cpu_us = Microseconds(used.ru_utime) + Microseconds(used.ru_stime),
               .waits = static_cast<double>(used.ru_nvcsw)};
}

// All rows of a plan over one group.
class Measurement {
 public:
  Measurement(Communicator& comm, const PlanSettings& settings)
      : comm_(comm), settings_(settings) {}

  absl::StatusOr<PlanResult> Run() {
    for (const Row& row : settings_.rows) EK_RETURN_IF_ERROR(Prepare(row));
    blocks_.resize(settings_.rows.size());
    const int rows = static_cast<int>(settings_.rows.size());
    for (int round = 0; round < settings_.rounds; ++round) {
      for (int i = 0; i < rows; ++i) {
        const int turn = (i + round) % rows;
        const int row = round % 2 == 0 ? turn : rows - 1 - turn;
        const bool is_skewed = settings_.rows[row].block.skew != Skew::kNone;
        if (is_skewed && round >= settings_.skewed_rounds) continue;
        EK_ASSIGN_OR_RETURN(const Block block, RunBlock(settings_.rows[row]));
        blocks_[row].push_back(block);
      }
    }
    PlanResult result;
    for (int row = 0; row < rows; ++row) {
      EK_ASSIGN_OR_RETURN(RowResult one, ResultOf(row));
      result.rows.push_back(std::move(one));
    }
    result.parameters = trainings_.begin()->second->CountOfParameters();
    return result;
  }

 private:
  absl::Status Prepare(const Row& row) {
    std::unique_ptr<StepTraining>& training = trainings_[row.way];
    if (training != nullptr) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(training, StepTraining::Create(&comm_, row.way, settings_.training));
    StepSamples unused;
    return training->RunBlock({}, kWarmUpSteps, unused);
  }

  int StepsOf(const Row& row) const {
    return row.block.skew == Skew::kNone ? settings_.steps
                                         : std::max(kSkewedSteps, settings_.steps);
  }

  absl::StatusOr<Block> RunBlock(const Row& row) {
    StepSamples samples;
    EK_RETURN_IF_ERROR(comm_.control().Exchange("row", row.name, comm_.timeout()).status());
    const absl::Time start = SteadyNow();
    EK_RETURN_IF_ERROR(trainings_[row.way]->RunBlock(row.block, StepsOf(row), samples));
    return BlockOf(comm_, absl::ToDoubleSeconds(SteadyNow() - start), samples);
  }

  absl::StatusOr<RowResult> ResultOf(int index) {
    const Row& row = settings_.rows[index];
    const StepTraining& training = *trainings_[row.way];
    const std::vector<Block>& blocks = blocks_[index];
    RowResult result{.row = row};
    result.step_ms = 1e3 * MedianOf(Column(blocks, &Block::step));
    result.backward_ms = 1e3 * MedianOf(Column(blocks, &Block::backward));
    result.update_ms = 1e3 * MedianOf(Column(blocks, &Block::update));
    int64_t steps = 0;
    for (int rank = 0; rank < comm_.world_size(); ++rank) {
      steps += row.block.StepsOf(rank, comm_.world_size(), StepsOf(row));
    }
    result.samples_per_second = static_cast<double>(steps * training.samples_per_step()) /
                                MedianOf(Column(blocks, &Block::seconds));
    result.step_to_local = Compare(index, SyncWay::kLocal, &Block::step);
    result.backward_to_local = Compare(index, SyncWay::kLocal, &Block::backward);
    result.step_to_reducer = Compare(index, SyncWay::kReducer, &Block::step);
    result.update_to_reducer = Compare(index, SyncWay::kReducer, &Block::update);
    for (const BucketInfo& bucket : training.buckets())
      result.bucket_bytes.push_back(bucket.wire.bytes());
    for (size_t b = 0; b < blocks[0].exposed.size(); ++b) {
      std::vector<double> of_bucket;
      for (const Block& block : blocks) of_bucket.push_back(1e6 * block.exposed[b]);
      result.exposed_us.push_back(MedianOf(of_bucket));
    }
    EK_ASSIGN_OR_RETURN(result.counts, Count(row));
    EK_RETURN_IF_ERROR(CheckReplicas(row));
    return result;
  }

  static std::vector<double> Column(const std::vector<Block>& blocks, double Block::*column) {
    std::vector<double> values;
    for (const Block& block : blocks) values.push_back(block.*column);
    return values;
  }

  // With the first row of that way, if there is one and it is another.
  std::optional<PairedRatio> Compare(int index, SyncWay way, double Block::*column) const {
    const auto base = std::find_if(settings_.rows.begin(), settings_.rows.end(),
                                   [&](const Row& row) { return row.way == way; });
    if (base == settings_.rows.end() || base - settings_.rows.begin() == index) return std::nullopt;
    if (settings_.rows[index].way == SyncWay::kLocal) return std::nullopt;
    std::vector<double> a = Column(blocks_[index], column);
    std::vector<double> b = Column(blocks_[base - settings_.rows.begin()], column);
    b.resize(a.size());
    return RatioOf(a, b);
  }

  absl::StatusOr<StepCounts> Count(const Row& row) {
    EK_ASSIGN_OR_RETURN(const Usage before, UsageNow(comm_));
    StepSamples samples;
    EK_RETURN_IF_ERROR(trainings_[row.way]->RunBlock(row.block, kCountedSteps, samples));
    EK_ASSIGN_OR_RETURN(const Usage after, UsageNow(comm_));
    const double steps = kCountedSteps, steps_here = steps * settings_.ranks_here;
    const ControlCounters &from = before.control, &to = after.control;
    return StepCounts{
        .collectives = static_cast<double>(after.issued - before.issued) / steps,
        .copied_bytes =
            static_cast<double>(after.heap.copied_bytes - before.heap.copied_bytes) / steps_here,
        .allocations =
            static_cast<double>(after.heap.allocations - before.heap.allocations) / steps_here,
        .control_messages = static_cast<double>(to.messages_sent - from.messages_sent +
                                                to.messages_received - from.messages_received) /
                            steps,
        .control_bytes = static_cast<double>(to.bytes_sent - from.bytes_sent + to.bytes_received -
                                             from.bytes_received) /
                         steps,
        .control_cpu_us = absl::ToDoubleMicroseconds(to.cpu_time - from.cpu_time) / steps,
        .cpu_us = (after.cpu_us - before.cpu_us) / steps_here,
        .waits = (after.waits - before.waits) / steps_here};
  }

  absl::Status CheckReplicas(const Row& row) {
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
  std::vector<std::vector<Block>> blocks_;  // By row.
};

nlohmann::json ToJson(const std::optional<PairedRatio>& ratio) {
  return ratio.has_value() ? nlohmann::json(*ratio) : nlohmann::json();
}

}  // namespace

absl::StatusOr<PlanResult> MeasurePlan(Communicator& comm, const PlanSettings& settings) {
  if (settings.rows.empty() || settings.rounds < 1 || settings.skewed_rounds < 1 ||
      settings.steps < 1) {
    return absl::InvalidArgumentError(
        "at least one row, one round, one skewed round and one step are required");
  }
  return Measurement(comm, settings).Run();
}

nlohmann::json ToJson(const PlanResult& result) {
  nlohmann::json rows = nlohmann::json::array();
  for (const RowResult& row : result.rows) {
    rows.push_back({{"name", row.row.name},
                    {"step_ms", row.step_ms},
                    {"backward_ms", row.backward_ms},
                    {"update_ms", row.update_ms},
                    {"samples_per_second", row.samples_per_second},
                    {"step_to_local", ToJson(row.step_to_local)},
                    {"backward_to_local", ToJson(row.backward_to_local)},
                    {"step_to_reducer", ToJson(row.step_to_reducer)},
                    {"update_to_reducer", ToJson(row.update_to_reducer)},
                    {"bucket_bytes", row.bucket_bytes},
                    {"exposed_us", row.exposed_us},
                    {"per_step", row.counts}});
  }
  return {{"parameters", result.parameters}, {"rows", rows}};
}

}  // namespace evenkeel
