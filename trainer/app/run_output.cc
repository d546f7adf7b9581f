#include "evenkeel/trainer/app/run_output.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/app/describe_options.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/memory_plan.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

constexpr size_t kRanksToList = 8;

// A running mean, which begins with the first value: values of single steps vary too much.
double Follow(double mean, double value) {
  constexpr double kMemory = 0.95;  // Per step.
  return std::isnan(mean) ? value : kMemory * mean + (1 - kMemory) * value;
}

// "rank 0: 313 batches, rank 1: 312".
std::string DescribeBatches(const std::vector<int64_t>& batches) {
  std::string text;
  for (size_t rank = 0; rank < std::min(batches.size(), kRanksToList); ++rank) {
    absl::StrAppend(&text, rank == 0 ? "" : ", ", "rank ", rank, ": ", batches[rank],
                    rank == 0 ? " batches" : "");
  }
  if (batches.size() <= kRanksToList) return text;
  const auto [fewest, most] = std::minmax_element(batches.begin(), batches.end());
  return absl::StrCat(text, ", ...; ", *fewest, " to ", *most);
}

}  // namespace

RunOutput::RunOutput(const TrainStreams& streams, const TrainingRun& run,
                     const RunRecorder& recorder, OutputFailures& failures, const RunPast& past)
    : out_(streams.out),
      run_(run),
      recorder_(recorder),
      counts_tokens_(run.data().vocabulary > 0),
      predictions_per_sample_(run.data().train->predictions_per_sample()),
      failures_(failures),
      sinks_(run.options(), counts_tokens_, failures_),
      epochs_reported_(run.first_epoch()) {
  progress_.emplace(out_, HowToShow());
  if (const std::string& path = run.options().flags.metrics; !path.empty()) {
    absl::StatusOr<std::unique_ptr<MetricsWriter>> metrics =
        MetricsWriter::Create(path, !past.lost.empty()      ? MetricsMode::kTakeOver
                                    : run.first_step() == 0 ? MetricsMode::kNew
                                                            : MetricsMode::kAppend);
    failures_.Note("--metrics", metrics.status());
    if (metrics.ok()) metrics_ = *std::move(metrics);
  }
  past.lost.empty() ? OnStart() : TakeOver(past);
}

void RunOutput::TakeOver(const RunPast& past) {
  const int64_t step = past.lost.back().step;
  frozen_ = FrozenAt(run_.options().freeze, step - 1, run_.model().parameters());
  // The other ranks had finished this step, and rank 0 was lost before it wrote the line.
  for (const StepFacts& facts : past.steps) {
    if (facts.step != step - 1 || metrics_ == nullptr || !metrics_->Lacks(facts.step)) continue;
    StepFacts shared = facts;
    shared.own.reset();
    shared.took = absl::ZeroDuration();
    WriteStep(shared, NumbersOf(shared, predictions_per_sample_));
  }
  // The last rank 0 may have written more lines than steps.
  const int written = std::max(past.lost_written, metrics_ == nullptr ? 0 : metrics_->lost());
  lost_.assign(past.lost.begin(),
               past.lost.begin() + std::min(written, static_cast<int>(past.lost.size())));
  OnLost(past.lost);
}

void RunOutput::OnStart() {
  const TrainOptions& options = run_.options();
  const StepPlan& plan = run_.plan();
  const int64_t elements = CountElements(run_.model());
  const absl::string_view backend = run_.communicator().backend_name();
  const size_t ranks = plan.batches.size();
  absl::FPrintF(out_, "%s with %d parameters on %d rank%s over %s\n", NameOf(options.model),
                elements, ranks, ranks == 1 ? "" : "s", backend);
  absl::FPrintF(out_, "%s%s, %s\n", ToString(options.rule), DescribeDecay(options.decay),
                DescribeSharding(options.sharding));
  absl::FPrintF(out_, "batches of %d per epoch: %s (%s)\n", options.batch_size,
                DescribeBatches(plan.batches), DescribeJoin(options, plan));
  std::fflush(out_);
  if (LearningRate(options.rule) == 0) {
    absl::FPrintF(out_, "--lr=0: the weights will not change\n");
  }
  // Invalidates what an earlier attempt has written about the steps from here on.
  sinks_.OnGoBack(run_.first_step(), absl::Now());
  WriteMetrics({{"event", "run"},
                {"model", std::string(NameOf(options.model))},
                {"parameters", elements},
                {"world_size", ranks},
                {"backend", std::string(backend)},
                {"optimizer", ToString(options.rule)},
                {"zero", options.sharding != Sharding::kNone},
                {"join", options.flags.join},
                {"batch_size", options.batch_size},
                {"first_step", run_.first_step()},
                {"total_steps", plan.total_steps}});
}

void RunOutput::OnLost(const std::vector<LostRank>& lost) {
  progress_->Finish();
  progress_.emplace(out_, HowToShow());
  for (size_t i = lost_.size(); i < lost.size(); ++i) {
    WriteMetrics({{"event", "lost"},
                  {"rank", lost[i].rank},
                  {"step", lost[i].step},
                  {"replaced", lost[i].is_replaced},
                  {"cause", lost[i].cause},
                  {"pause_ms", lost[i].pause_ms},
                  {"world_size", run_.communicator().world_size()},
                  {"total_steps", run_.plan().total_steps},
                  {"seconds", recorder_.Seconds()}});
    if (!lost[i].is_replaced && metrics_ != nullptr) metrics_->GoBack(lost[i].step);
    sinks_.OnGoBack(lost[i].step, absl::Now());
  }
  lost_ = lost;
}

ProgressOptions RunOutput::HowToShow() const {
  ProgressOptions options{.total_steps = run_.plan().total_steps, .epochs = run_.plan().epochs()};
  if (counts_tokens_) {
    options.unit = "tokens";
    options.bytes_per_token = run_.data().train->bytes_per_prediction();
    options.quality =
        options.bytes_per_token > 0 ? ProgressQuality::kBitsPerByte : ProgressQuality::kPerplexity;
  }
  return options;
}

void RunOutput::ReportFreezing(int64_t step) {
  const ParameterSet& parameters = run_.model().parameters();
  const FreezeChange change = UpdateFrozen(run_.options().freeze, step, parameters, frozen_);
  if (change.begun.empty() && change.ended.empty()) return;
  if (!change.begun.empty()) Print("frozen after step %d: %s\n", step, change.begun);
  if (!change.ended.empty()) Print("trained after step %d: %s\n", step, change.ended);
  WriteMetrics({{"event", "freeze"},
                {"step", step},
                {"frozen", frozen_.size()},
                {"parameters", NamesOf(frozen_, parameters)}});
}

void RunOutput::OnStep(const StepFacts& facts) {
  ReportFreezing(facts.step);
  const StepNumbers numbers = NumbersOf(facts, predictions_per_sample_);
  ShowProgress(facts, numbers);
  sinks_.OnStep(facts, numbers, absl::Now());
  if (metrics_ != nullptr) WriteStep(facts, numbers);
}

void RunOutput::ShowProgress(const StepFacts& facts, const StepNumbers& numbers) {
  if (state_.epoch != facts.epoch) rank0_predictions_ = rank0_correct_ = 0;
  state_.epoch = facts.epoch;
  state_.step = facts.step + 1;
  state_.count += facts.samples * predictions_per_sample_;
  if (facts.own.has_value()) {
    rank0_predictions_ += facts.own->predictions;
    rank0_correct_ += facts.own->correct;
    state_.loss = Follow(state_.loss.value_or(NAN), facts.own->loss_mean);
    state_.accuracy = static_cast<double>(rank0_correct_) / static_cast<double>(rank0_predictions_);
  }
  if (!std::isnan(numbers.exposed_ratio))
    state_.exposed = Follow(state_.exposed, numbers.exposed_ratio);
  progress_->Update(state_, SteadyNow());
}

void RunOutput::WriteStep(const StepFacts& facts, const StepNumbers& numbers) {
  MetricsFields fields = {{"event", "step"},
                          {"epoch", facts.epoch},
                          {"step", facts.step},
                          {"active", facts.active},
                          {"samples", facts.samples},
                          {"learning_rate", facts.learning_rate},
                          {"loss", numbers.loss},
                          {"accuracy", numbers.accuracy},
                          {"exposed_ms", numbers.exposed_ms},
                          {"gradient_norm", facts.gradient_norm},
                          {"step_ms", numbers.step_ms},
                          {"clock", NameOf(facts.clock)}};
  fields[counts_tokens_ ? "tokens_per_second" : "samples_per_second"] =
      numbers.predictions_per_second;
  fields["seconds"] = recorder_.Seconds();
  WriteMetrics(WithBits("bits_per_token", numbers.loss, std::move(fields)));
}

void RunOutput::ReportExhaustedRanks(int epoch, const EpochResult& result) {
  const auto [fewest, most] =
      std::minmax_element(result.batches_done.begin(), result.batches_done.end());
  for (size_t rank = 0; rank < result.batches_done.size(); ++rank) {
    const bool is_exhausted =
        result.stopped_early
            ? result.batches_done[rank] == run_.plan().BatchesOf(static_cast<int>(rank), epoch)
            : *fewest < *most && result.batches_done[rank] < *most;
    if (!is_exhausted) continue;
    WriteMetrics({{"event", "exhausted"},
                  {"epoch", epoch},
                  {"rank", rank},
                  {"batches", result.batches_done[rank]}});
    if (!result.stopped_early) continue;
    Print("rank %d has no more input after %d batches: all ranks stop (--stop_early)\n", rank,
          result.batches_done[rank]);
  }
}

void RunOutput::OnStragglers(int64_t step, const std::string& news, const StragglerReport& recent) {
  sinks_.OnStragglers(step, recent, absl::Now());
  if (news.empty()) return;
  Print("%s\n", news);
  for (const StragglerReport::Rank& rank : recent.ranks) {
    if (!rank.is_straggler) continue;
    WriteMetrics({{"event", "straggler"},
                  {"step", step},
                  {"rank", rank.rank},
                  {"cost", rank.cost},
                  {"phase", std::string(NameOf(rank.phase))},
                  {"steps", recent.steps}});
  }
}

void RunOutput::OnEpoch(int epoch, const EpochResult& result, const TestResult& tested) {
  const Evaluation& test = tested.test;
  if (epoch < epochs_reported_) return;  // Evaluated again because a rank was lost in it.
  epochs_reported_ = epoch + 1;
  ReportExhaustedRanks(epoch, result);
  Print("epoch %d/%d  training %s  test %s  after %.1f s\n", epoch + 1, run_.plan().epochs(),
        DescribeQuality(result.training, *run_.data().train),
        DescribeQuality(test, *run_.data().test), recorder_.Seconds());
  sinks_.OnTest(std::max<int64_t>(0, tested.steps - 1), test, absl::Now());
  WriteMetrics(WithBits("test_bits_per_token", test.loss_mean(),
                        {{"event", "epoch"},
                         {"epoch", epoch},
                         {"train_samples", result.training.predictions},
                         {"train_loss", result.training.loss_mean()},
                         {"train_accuracy", result.training.accuracy()},
                         {"test_loss", test.loss_mean()},
                         {"test_accuracy", test.accuracy()},
                         {"stopped_early", result.stopped_early},
                         {"seconds", recorder_.Seconds()}}));
}

void RunOutput::OnTest(const TestResult& result) {
  Print("step %d  test %s%s\n", result.steps, DescribeQuality(result.test, *run_.data().test),
        result.is_best ? "  (best)" : "");
  const bool is_part = run_.options().flags.eval_batches > 0;
  sinks_.OnTest(std::max<int64_t>(0, result.steps - 1), result.test, absl::Now(), is_part);
  WriteMetrics(WithBits("test_bits_per_token", result.test.loss_mean(),
                        {{"event", "evaluation"},
                         {"step", result.steps},
                         {"test_loss", result.test.loss_mean()},
                         {"test_accuracy", result.test.accuracy()},
                         {"is_best", result.is_best},
                         {"seconds", recorder_.Seconds()}}));
}

void RunOutput::OnSample(int64_t steps, const std::string& text) {
  Print("sample after step %d:\n%s\n\n", steps, text);
  sinks_.OnSample(steps - 1, text, absl::Now());
  WriteMetrics({{"event", "sample"}, {"step", steps}, {"text", text}});
}

void RunOutput::OnConverged(int64_t steps, int64_t patience) {
  Print("stopped after step %d: no lower test loss in %d evaluations\n", steps, patience);
}

void RunOutput::OnSaved(absl::string_view path) { absl::FPrintF(out_, "saved %s\n", path); }

void RunOutput::OnCheckpoint(const EndedCheckpoint& ended) {
  WriteMetrics({{"event", "checkpoint"},
                {"step", ended.step},
                {"complete", ended.status.ok()},
                {"error", std::string(ended.status.message())},
                {"copied_bytes", ended.copied_bytes},
                {"stall_ms", absl::ToDoubleMilliseconds(ended.stall)},
                {"written_ms", absl::ToDoubleMilliseconds(ended.took)},
                {"seconds", recorder_.Seconds()}});
}

void RunOutput::OnStopped() {
  progress_->Finish();
  sinks_.OnEnd(absl::Now());
}

absl::Status RunOutput::OnEnd(const Evaluation& test, uint64_t state_hash) {
  sinks_.OnEnd(absl::Now());
  WriteMetrics(WithBits("bits_per_token", test.loss_mean(),
                        {{"event", "test"},
                         {"samples", test.predictions},
                         {"correct", test.correct},
                         {"loss", test.loss_mean()},
                         {"accuracy", test.accuracy()},
                         {"ranks", run_.communicator().world_size()},
                         {"ranks_lost", lost_.size()},
                         {"state_hash", absl::StrCat(absl::Hex(state_hash, absl::kZeroPad16))},
                         {"seconds", recorder_.Seconds()}}));
  absl::FPrintF(out_, "%s\n", DescribeMemory(run_.communicator().members()[0], run_.MemoryHeld()));
  ShowWaits();
  for (const LostRank& lost : lost_) {
    absl::FPrintF(out_, "rank %d was lost%s; the other ranks continued after step %d\n", lost.rank,
                  lost.is_replaced ? " and replaced" : "", lost.step);
  }
  if (!counts_tokens_) {
    absl::FPrintF(out_, "test_accuracy=%.4f\n", test.accuracy());
  } else if (const double bytes = run_.data().test->bytes_per_prediction(); bytes > 0) {
    absl::FPrintF(out_, "test_bits_per_byte=%.4f\n", BitsOf(test.loss_mean()) / bytes);
  } else {
    absl::FPrintF(out_, "test_loss=%.4f\n", test.loss_mean());
  }
  if (std::fflush(out_) == 0) return absl::OkStatus();
  return absl::UnavailableError("cannot write to standard output");
}

void RunOutput::ShowWaits() {
  const StragglerReport waits = StragglersOf(run_.communicator());
  const bool is_worth_it = std::ranges::any_of(waits.ranks, [](const StragglerReport::Rank& rank) {
    return rank.cost >= StragglerReport::kLeastCost;
  });
  if (is_worth_it) {
    absl::FPrintF(out_, "cost of each rank, and its mean step in milliseconds:\n%s", waits.Table());
  }
  if (const std::string idle = waits.RanksWithoutInput(); !idle.empty())
    absl::FPrintF(out_, "%s\n", idle);
}

void RunOutput::WriteMetrics(const MetricsFields& fields) {
  if (metrics_ != nullptr) failures_.Note("--metrics", metrics_->Write(fields));
}

std::string RunOutput::DescribeQuality(const Evaluation& evaluation, const Dataset& data) const {
  const double loss = evaluation.loss_mean();
  if (const double bytes = data.bytes_per_prediction(); bytes > 0)
    return absl::StrFormat("loss %.4f %.3f bits/byte", loss, BitsOf(loss) / bytes);
  if (counts_tokens_) return absl::StrFormat("loss %.4f perplexity %.1f", loss, std::exp(loss));
  return absl::StrFormat("loss %.4f accuracy %.4f", loss, evaluation.accuracy());
}

MetricsFields RunOutput::WithBits(const char* name, double loss, MetricsFields fields) const {
  if (counts_tokens_) fields[name] = BitsOf(loss);
  return fields;
}

}  // namespace evenkeel
