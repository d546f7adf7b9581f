#include "evenkeel/trainer/app/run_recorder.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/version.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/describe_options.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/step_facts.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/report/chrome_trace.h"
#include "evenkeel/trainer/report/gather_records.h"
#include "evenkeel/trainer/report/html_report.h"
#include "evenkeel/trainer/report/trace_settings.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

constexpr size_t kMostCostPoints = 400;
constexpr size_t kMostTests = 1000;
constexpr int kMostSamples = 20;

// Drops every other point, from the first one on, once there are `most`.
template <typename Point>
void HalveIfFull(std::vector<Point>& points, size_t most) {
  if (points.size() < most) return;
  for (size_t i = 0; i < most / 2; ++i) points[i] = std::move(points[2 * i + 1]);
  points.resize(most / 2);
}

// The last part of a path: "fashion-mnist".
absl::string_view LastPart(absl::string_view path) {
  while (absl::ConsumeSuffix(&path, "/")) {
  }
  return path.substr(path.rfind('/') + 1);
}

std::string Megabytes(const std::vector<Bytes>& caps) {
  return absl::StrJoin(caps, ", then ", [](std::string* out, Bytes cap) {
    absl::StrAppendFormat(out, "%.3g MiB", static_cast<double>(cap.value) / (1 << 20));
  });
}

std::vector<RunSetting> SettingsOf(const TrainingRun& run) {
  const TrainOptions& options = run.options();
  const auto yes_or_no = [](bool is_on) { return std::string(is_on ? "yes" : "no"); };
  std::vector<RunSetting> settings = {
      {"model", std::string(NameOf(options.model))},
      {"parameters", absl::StrCat(CountElements(run.model()))},
      {"training samples", absl::StrCat(run.data().train->size())},
      {"test samples", absl::StrCat(run.data().test->size())},
      {"data", options.data.path},
      {"shuffled", yes_or_no(options.flags.shuffle)},
      {"seed", absl::StrCat(options.flags.seed)},
      {"epochs", absl::StrCat(options.epochs)},
      {"samples per rank and pass", absl::StrCat(options.batch_size)},
      {"passes per step", absl::StrCat(options.flags.accumulate)},
      {"optimizer", absl::StrCat(ToString(options.rule), DescribeDecay(options.decay))},
      {TraceSettings::kState, std::string(DescribeSharding(options.sharding))},
      {TraceSettings::kRanks, absl::StrCat(run.communicator().world_size())},
      {TraceSettings::kBackend, std::string(run.communicator().backend_name())},
      {"inputs", DescribeJoin(options, run.plan())},
      {"bucket sizes", Megabytes(options.bucket_caps)},
      {TraceSettings::kSentAs, std::string(NameOf(options.comm_hook))},
      {"gradients lie in buckets", yes_or_no(options.flags.grad_view)},
      {"when a rank is lost", options.replaces  ? "another process takes its place"
                              : options.goes_on ? "the other ranks continue"
                                                : "stop"},
      {"host of rank 0", HostName()},
      {"evenkeel", std::string(kBuild)},
  };
  if (options.model == ModelKind::kGpt) {
    settings.push_back({"layers, width, heads, context",
                        absl::StrCat(options.gpt.layers, ", ", options.gpt.width, ", ",
                                     options.gpt.heads, ", ", options.gpt.context)});
  }
  int64_t buffers = 0;
  for (const NamedBuffer& buffer : run.model().buffers()) buffers += buffer.value.bytes();
  if (buffers > 0) settings.push_back({TraceSettings::kBufferBytes, absl::StrCat(buffers)});
  if (options.warmup > 0) settings.push_back({"warm-up steps", absl::StrCat(options.warmup)});
  if (options.clip > 0)
    settings.push_back({"clip gradients to the norm", absl::StrCat(options.clip)});
  if (options.flags.max_steps > 0)
    settings.push_back({"limit of steps", absl::StrCat(options.flags.max_steps)});
  return settings;
}

std::string Summary(const TrainingRun& run) {
  const TrainOptions& options = run.options();
  const std::string rule = ToString(options.rule);
  return absl::StrCat(rule.substr(0, rule.find('(')), ", learning rate ",
                      LearningRate(options.rule), DescribeDecay(options.decay), ", ",
                      DescribeSharding(options.sharding), ", over ",
                      run.communicator().backend_name());
}

double LossOf(const Evaluation& evaluation) {
  return evaluation.predictions > 0 ? evaluation.loss_mean() : kUnknown;
}
double AccuracyOf(const Evaluation& evaluation) {
  return evaluation.predictions > 0 ? evaluation.accuracy() : kUnknown;
}

}  // namespace

RunRecorder::RunRecorder(const TrainingRun& run, RunRecord history)
    : run_(run),
      start_(SteadyNow()),
      record_(std::move(history)),
      steps_(std::move(record_.steps)) {
  const TrainOptions& options = run.options();
  const int ranks = run.communicator().world_size();
  const bool goes_on = record_.total_steps > 0;
  record_.title = absl::StrCat(NameOf(options.model), " on ", LastPart(options.data.path), ", ",
                               ranks, ranks == 1 ? " rank" : " ranks");
  record_.summary = Summary(run);
  if (!goes_on) record_.date = absl::FormatTime("%Y-%m-%d %H:%M UTC", start_, absl::UTCTimeZone());
  record_.unit_name = run.data().vocabulary > 0 ? "tokens" : "images";
  if (const double bytes = run.data().test->bytes_per_prediction(); bytes > 0)
    record_.bytes_per_prediction = bytes;
  record_.units_per_sample = static_cast<double>(run.data().train->predictions_per_sample());
  record_.world_size = ranks;
  record_.parameters = CountElements(run.model());
  record_.settings = SettingsOf(run);
  MoveBegin(record_, absl::ToUnixNanos(start_ - absl::Seconds(record_.seconds)));
  if (!goes_on) return;
  frozen_ = FrozenAt(options.freeze, run.first_step() - 1, run.model().parameters());
  OnEvent(run.first_step(), "resumed",
          absl::StrCat("with ", ranks, ranks == 1 ? " rank" : " ranks"));
}

void RunRecorder::TakeOver(RunRecord record) {
  start_ = SteadyNow();
  record_ = std::move(record);
  steps_ = StepSeries(std::move(record_.steps));
  frozen_ = FrozenAt(run_.options().freeze, record_.total_steps - 1, run_.model().parameters());
}

double RunRecorder::Seconds() const {
  return record_.seconds + absl::ToDoubleSeconds(SteadyNow() - start_);
}

void RunRecorder::NoteFreezing(int64_t step) {
  FreezeChange change =
      UpdateFrozen(run_.options().freeze, step, run_.model().parameters(), frozen_);
  if (!change.begun.empty()) OnEvent(step, "frozen", std::move(change.begun));
  if (!change.ended.empty()) OnEvent(step, "trained", std::move(change.ended));
}

void RunRecorder::OnStep(const StepFacts& facts) {
  NoteFreezing(facts.step);
  const StepNumbers numbers = NumbersOf(facts, /*predictions_per_sample=*/1);
  steps_.Add(
      {.step = facts.step,
       .seconds = Seconds(),
       .loss = numbers.loss,
       .accuracy = numbers.accuracy,
       .learning_rate = facts.learning_rate,
       .took = absl::ToDoubleSeconds(facts.took),
       .exposed = std::isfinite(numbers.exposed_ms) ? absl::ToDoubleSeconds(facts.sync) : kUnknown,
       .gradient_norm = facts.gradient_norm,
       .samples = static_cast<double>(facts.samples)});
  record_.total_steps = facts.step + 1;
  if (facts.active < run_.communicator().world_size()) record_.samples_of_tail += facts.samples;
}

void RunRecorder::OnEpoch(int epoch, const EpochResult& result, const TestResult& tested) {
  const auto& [steps, test, is_best] = tested;
  if (!record_.epochs.empty() && record_.epochs.back().epoch >= epoch) return;
  // With --eval_batches the other points of the curve are losses of a part of the data.
  if (run_.options().flags.eval_batches == 0) OnTest(steps, test);
  record_.epochs.push_back({.epoch = epoch,
                            .step = std::max<int64_t>(0, steps - 1),
                            .train_loss = LossOf(result.training),
                            .test_loss = LossOf(test),
                            .test_accuracy = AccuracyOf(test),
                            .first_step = run_.plan().FirstStep(epoch),
                            .batches = result.batches_done,
                            .ranks = run_.communicator().members()});
}

void RunRecorder::OnTest(int64_t steps, const Evaluation& test) {
  const int64_t step = std::max<int64_t>(0, steps - 1);
  std::vector<TestPoint>& tests = record_.tests;
  if (!tests.empty() && tests.back().step >= step) return;
  HalveIfFull(tests, kMostTests);
  tests.push_back({.step = step, .loss = LossOf(test), .accuracy = AccuracyOf(test)});
}

void RunRecorder::OnEvent(int64_t step, absl::string_view kind, std::string text) {
  if (kind == kSampleEvent) DropOldestSample();
  record_.events.push_back(
      {.step = step, .seconds = Seconds(), .kind = std::string(kind), .text = std::move(text)});
}

void RunRecorder::OnLost(const std::vector<int>& members, const GoneOn& gone_on,
                         absl::Duration pause) {
  for (int rank : gone_on.lost) {
    const bool is_replaced = std::ranges::count(gone_on.replaced, rank) > 0;
    OnEvent(gone_on.steps, "lost",
            absl::StrCat("rank ", rank, is_replaced ? ", and replaced" : "",
                         "; the other ranks continue from this step, after a pause of ",
                         absl::ToInt64Milliseconds(pause), " ms"));
  }
  const StepPlan& plan = run_.plan();
  const int epoch = plan.PositionAfter(gone_on.steps).epoch;
  EpochPoint part{.epoch = epoch,
                  .step = gone_on.steps - 1,
                  .first_step = plan.FirstStep(epoch),
                  .ranks = members};
  const int64_t steps = gone_on.steps - part.first_step;
  const bool is_known = !record_.epochs.empty() && record_.epochs.back().epoch >= epoch;
  if (steps <= 0 || is_known) return;
  for (size_t i = 0; i < members.size(); ++i)
    part.batches.push_back(std::min(steps, plan.BatchesOf(static_cast<int>(i), epoch)));
  record_.parts.push_back(std::move(part));
}

void RunRecorder::OnStragglers(int64_t step, const StragglerReport& recent) {
  HalveIfFull(record_.costs, kMostCostPoints);
  CostPoint& point = record_.costs.emplace_back(CostPoint{.step = step});
  for (const StragglerReport::Rank& rank : recent.ranks) {
    point.costs[rank.rank] = rank.cost;
    if (run_.options().flags.balance) point.samples[rank.rank] = rank.samples;
  }
}

void RunRecorder::DropOldestSample() {
  const auto is_sample = [](const RunEvent& event) { return event.kind == kSampleEvent; };
  std::vector<RunEvent>& events = record_.events;
  if (std::ranges::count_if(events, is_sample) < kMostSamples) return;
  events.erase(std::ranges::find_if(events, is_sample));
}

RunRecord WithRanks(RunRecord record, std::vector<RankRecord> ranks) {
  record.ranks = Continued(record.ranks, std::move(ranks));
  return record;
}

RunRecord RunRecorder::Now() const {
  RunRecord record = record_;
  record.plans = Continued(record_.plans, run_.plans());
  record.steps = steps_.points();
  record.seconds = Seconds();
  record.waits = StragglersOf(run_.communicator());
  record.reporter = run_.communicator().members()[run_.communicator().rank()];
  return record;
}

void RunRecorder::Write(std::vector<RankRecord> ranks, std::optional<absl::string_view> ending,
                        OutputFailures& failures) const {
  const TrainFlags& flags = run_.options().flags;
  const bool has_trace = !flags.trace.empty() && ending.has_value();
  if (flags.report.empty() && !has_trace) return;
  RunRecord record = WithRanks(Now(), std::move(ranks));
  record.goes_on = !ending.has_value();
  record.ending = std::string(ending.value_or(""));
  if (!flags.report.empty())
    failures.Note("--report", WriteFileAtomically(flags.report, RenderReport(record)));
  if (has_trace) failures.Note("--trace", WriteFileAtomically(flags.trace, RenderTrace(record)));
}

}  // namespace evenkeel
