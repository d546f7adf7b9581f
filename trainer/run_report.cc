#include "evenkeel/trainer/run_report.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/describe_options.h"
#include "evenkeel/trainer/dry_run.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/training_data.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

constexpr size_t kRanksToList = 8;
constexpr size_t kNamesToList = 6;

// A running mean, which begins with the first value: those of single steps jump too much to read.
double Follow(double mean, double value) {
  constexpr double kMemory = 0.95;  // Per step.
  return std::isnan(mean) ? value : kMemory * mean + (1 - kMemory) * value;
}

bool CountsTokens(const TrainingData& data) { return data.vocabulary > 0; }

// "rank 0: 313 batches, rank 1: 312".
std::string DescribeBatches(const std::vector<int64_t>& batches) {
  std::string text;
  for (size_t rank = 0; rank < std::min(batches.size(), kRanksToList); ++rank) {
    absl::StrAppend(&text, rank == 0 ? "" : ", ", "rank ", rank, ": ", batches[rank], rank == 0 ? " batches" : "");
  }
  if (batches.size() <= kRanksToList) return text;
  const auto [fewest, most] = std::minmax_element(batches.begin(), batches.end());
  return absl::StrCat(text, ", ...; ", *fewest, " to ", *most);
}

std::vector<int> Without(const std::vector<int>& these, const std::vector<int>& those) {  // Both in order.
  std::vector<int> rest;
  std::set_difference(these.begin(), these.end(), those.begin(), those.end(), std::back_inserter(rest));
  return rest;
}

// "fc1.weight, fc1.bias".
std::string Describe(const std::vector<int>& indices, const ParameterSet& parameters) {
  std::string text;
  for (size_t i = 0; i < std::min(indices.size(), kNamesToList); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", parameters[indices[i]].name);
  }
  if (indices.size() > kNamesToList) absl::StrAppend(&text, " and ", indices.size() - kNamesToList, " more");
  return text;
}

}  // namespace

RunReport::RunReport(std::FILE* out, const TrainOptions& options, const TrainingRun& run,
                     std::unique_ptr<MetricsWriter> metrics, RunSinks sinks)
    : out_(out),
      freeze_(options.freeze),
      run_(run),
      counts_tokens_(CountsTokens(run.data())),
      are_bytes_(counts_tokens_ && run.data().vocabulary == TextDataset::kVocabulary),
      predictions_per_sample_(run.data().train->predictions_per_sample()),
      plan_(run.plan()),
      metrics_(std::move(metrics)),
      sinks_(std::move(sinks)),
      start_(absl::Now()),
      epochs_reported_(run.first_epoch()) {
  progress_.emplace(out, HowToShow());
  if (options.wants_record()) recorder_.emplace(options, run);
}

absl::StatusOr<std::unique_ptr<RunReport>> RunReport::Create(std::FILE* out, const TrainOptions& options,
                                                             const TrainingRun& run,
                                                             const std::vector<LostRank>& lost) {
  std::unique_ptr<MetricsWriter> metrics;
  if (!options.metrics_file.empty()) {
    EK_ASSIGN_OR_RETURN(metrics, MetricsWriter::Create(options.metrics_file, lost.empty() && run.first_step() == 0
                                                                                 ? MetricsMode::kNew
                                                                                 : MetricsMode::kAppend));
  }
  EK_ASSIGN_OR_RETURN(RunSinks sinks,
                      RunSinks::Open(options, std::string(NameOf(options.model)), CountsTokens(run.data())));
  std::unique_ptr<RunReport> report(new RunReport(out, options, run, std::move(metrics), std::move(sinks)));
  EK_RETURN_IF_ERROR(lost.empty() ? report->OnStart(options) : report->OnLost(lost));
  return report;
}

absl::Status RunReport::OnStart(const TrainOptions& options) {
  const int64_t elements = CountElements(run_.model());
  const absl::string_view backend = run_.communicator().backend_name();
  const size_t ranks = plan_.batches.size();
  absl::FPrintF(out_, "%s with %d parameters on %d rank%s over %s\n", NameOf(options.model), elements, ranks,
                ranks == 1 ? "" : "s", backend);
  absl::FPrintF(out_, "%s%s, %s\n", ToString(options.rule), DescribeDecay(options.decay),
                DescribeSharding(options.sharding));
  absl::FPrintF(out_, "batches of %d per epoch: %s (%s)\n", options.batch_size, DescribeBatches(plan_.batches),
                DescribeJoin(options, plan_));
  std::fflush(out_);
  // What an earlier attempt has written of the steps that come now is no longer so.
  EK_RETURN_IF_ERROR(sinks_.OnGoBack(run_.first_step(), absl::Now()));
  return WriteMetrics({{"event", "run"},
                       {"model", std::string(NameOf(options.model))},
                       {"parameters", elements},
                       {"world_size", ranks},
                       {"backend", std::string(backend)},
                       {"optimizer", ToString(options.rule)},
                       {"zero", options.sharding != Sharding::kNone},
                       {"join", options.joins},
                       {"batch_size", options.batch_size},
                       {"total_steps", plan_.total_steps}});
}

absl::Status RunReport::OnLost(const std::vector<LostRank>& lost) {
  plan_ = run_.plan();
  progress_->Finish();
  progress_.emplace(out_, HowToShow());
  for (size_t i = lost_.size(); i < lost.size(); ++i) {
    if (recorder_.has_value()) {
      recorder_->OnEvent(lost[i].step, "lost", absl::StrCat("rank ", lost[i].rank, "; the others go on from here"));
    }
    EK_RETURN_IF_ERROR(WriteMetrics({{"event", "lost"},
                                     {"rank", lost[i].rank},
                                     {"step", lost[i].step},
                                     {"world_size", run_.communicator().world_size()},
                                     {"total_steps", plan_.total_steps},
                                     {"seconds", absl::ToDoubleSeconds(Elapsed())}}));
    EK_RETURN_IF_ERROR(sinks_.OnGoBack(lost[i].step, absl::Now()));
  }
  lost_ = lost;
  return absl::OkStatus();
}

ProgressOptions RunReport::HowToShow() const {
  ProgressOptions options{.total_steps = plan_.total_steps, .epochs = plan_.epochs()};
  if (counts_tokens_) {
    options.unit = "tokens";
    options.quality = are_bytes_ ? ProgressQuality::kBitsPerByte : ProgressQuality::kPerplexity;
  }
  return options;
}

absl::Status RunReport::ReportFreezing(int64_t step) {
  const ParameterSet& parameters = run_.model().parameters();
  std::vector<int> frozen = FrozenAt(freeze_, step, parameters);
  if (frozen == frozen_) return absl::OkStatus();
  progress_->Finish();
  const std::string begun = Describe(Without(frozen, frozen_), parameters);
  const std::string ended = Describe(Without(frozen_, frozen), parameters);
  if (recorder_.has_value()) {
    if (!begun.empty()) recorder_->OnEvent(step, "frozen", begun);
    if (!ended.empty()) recorder_->OnEvent(step, "trained", ended);
  }
  if (!begun.empty()) absl::FPrintF(out_, "frozen from step %d on: %s\n", step, begun);
  if (!ended.empty()) absl::FPrintF(out_, "trained from step %d on: %s\n", step, ended);
  std::fflush(out_);
  frozen_ = std::move(frozen);
  return WriteMetrics(
      {{"event", "freeze"}, {"step", step}, {"frozen", frozen_.size()}, {"parameters", Describe(frozen_, parameters)}});
}

absl::Status RunReport::OnStep(const StepFacts& facts) {
  EK_RETURN_IF_ERROR(ReportFreezing(facts.step));
  const StepNumbers numbers = NumbersOf(facts, predictions_per_sample_);
  ShowProgress(facts, numbers);
  if (recorder_.has_value()) recorder_->OnStep(facts);
  EK_RETURN_IF_ERROR(sinks_.OnStep(facts, numbers, absl::Now()));
  return metrics_ == nullptr ? absl::OkStatus() : WriteStep(facts, numbers);
}

void RunReport::ShowProgress(const StepFacts& facts, const StepNumbers& numbers) {
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
  if (!std::isnan(numbers.exposed_ratio)) state_.exposed = Follow(state_.exposed, numbers.exposed_ratio);
  progress_->Update(state_, absl::Now());
}

absl::Status RunReport::WriteStep(const StepFacts& facts, const StepNumbers& numbers) {
  std::vector<MetricsField> fields = {{"event", "step"},
                                      {"epoch", facts.epoch},
                                      {"step", facts.step},
                                      {"active", facts.active},
                                      {"samples", facts.samples},
                                      {"learning_rate", facts.learning_rate},
                                      {"loss", numbers.loss},
                                      {"accuracy", numbers.accuracy},
                                      {"exposed_ms", numbers.exposed_ms},
                                      {"step_ms", numbers.step_ms},
                                      {"clock", NameOf(facts.clock)}};
  fields.emplace_back(counts_tokens_ ? "tokens_per_second" : "samples_per_second", numbers.predictions_per_second);
  fields.emplace_back("seconds", absl::ToDoubleSeconds(Elapsed()));
  return WriteMetrics(WithBits("bits_per_token", numbers.loss, std::move(fields)));
}

absl::Status RunReport::ReportDryRanks(int epoch, const EpochResult& result) {
  const auto [fewest, most] = std::minmax_element(result.batches_done.begin(), result.batches_done.end());
  for (size_t rank = 0; rank < result.batches_done.size(); ++rank) {
    const bool is_dry = result.stopped_early
                            ? result.batches_done[rank] == plan_.BatchesOf(static_cast<int>(rank), epoch)
                            : *fewest < *most && result.batches_done[rank] < *most;
    if (!is_dry) continue;
    EK_RETURN_IF_ERROR(
        WriteMetrics({{"event", "dry"}, {"epoch", epoch}, {"rank", rank}, {"batches", result.batches_done[rank]}}));
    if (!result.stopped_early) continue;
    absl::FPrintF(out_, "rank %d has run out of batches after %d: all ranks stop (--stop_early)\n", rank,
                  result.batches_done[rank]);
  }
  return absl::OkStatus();
}

absl::Status RunReport::OnEpoch(int epoch, const EpochResult& result, const Evaluation& test) {
  if (epoch < epochs_reported_) return absl::OkStatus();  // Evaluated again because a rank was lost in it.
  epochs_reported_ = epoch + 1;
  if (recorder_.has_value()) recorder_->OnEpoch(epoch, result, test);
  progress_->Finish();
  EK_RETURN_IF_ERROR(ReportDryRanks(epoch, result));
  absl::FPrintF(out_, "epoch %d/%d  training %s  test %s  after %.1f s\n", epoch + 1, plan_.epochs(),
                DescribeQuality(result.training), DescribeQuality(test), absl::ToDoubleSeconds(Elapsed()));
  std::fflush(out_);
  EK_RETURN_IF_ERROR(sinks_.OnEpoch(std::max<int64_t>(0, state_.step - 1), test, absl::Now()));
  return WriteMetrics(WithBits("test_bits_per_token", test.loss_mean(),
                               {{"event", "epoch"},
                                {"epoch", epoch},
                                {"train_samples", result.training.predictions},
                                {"train_loss", result.training.loss_mean()},
                                {"train_accuracy", result.training.accuracy()},
                                {"test_loss", test.loss_mean()},
                                {"test_accuracy", test.accuracy()},
                                {"stopped_early", result.stopped_early},
                                {"seconds", absl::ToDoubleSeconds(Elapsed())}}));
}

absl::Status RunReport::OnSaved(absl::string_view path) {
  absl::FPrintF(out_, "saved %s\n", path);
  return absl::OkStatus();
}

absl::Status RunReport::OnStopped() {
  progress_->Finish();
  return sinks_.OnEnd(absl::Now());
}

absl::Status RunReport::WriteRecord(std::vector<RankRecord> ranks, absl::string_view ending) {
  return recorder_.has_value() ? recorder_->Write(std::move(ranks), ending) : absl::OkStatus();
}

absl::Status RunReport::OnEnd(const Evaluation& test, uint64_t state_hash) {
  EK_RETURN_IF_ERROR(sinks_.OnEnd(absl::Now()));
  EK_RETURN_IF_ERROR(WriteMetrics(WithBits("bits_per_token", test.loss_mean(),
                                           {{"event", "test"},
                                            {"samples", test.predictions},
                                            {"correct", test.correct},
                                            {"loss", test.loss_mean()},
                                            {"accuracy", test.accuracy()},
                                            {"ranks", run_.communicator().world_size()},
                                            {"ranks_lost", lost_.size()},
                                            {"state_hash", absl::StrCat(absl::Hex(state_hash, absl::kZeroPad16))},
                                            {"seconds", absl::ToDoubleSeconds(Elapsed())}})));
  absl::FPrintF(out_, "%s\n", DescribeMemory(run_.communicator().members()[0], run_.MemoryHeld()));
  for (const LostRank& lost : lost_) {
    absl::FPrintF(out_, "rank %d was lost; the others went on from step %d\n", lost.rank, lost.step);
  }
  if (!counts_tokens_) {
    absl::FPrintF(out_, "test_accuracy=%.4f\n", test.accuracy());
  } else if (are_bytes_) {
    absl::FPrintF(out_, "test_bits_per_byte=%.4f\n", BitsOf(test.loss_mean()));
  } else {
    absl::FPrintF(out_, "test_loss=%.4f\n", test.loss_mean());
  }
  if (std::fflush(out_) == 0) return absl::OkStatus();
  return absl::UnavailableError("cannot write to standard output");
}

absl::Status RunReport::WriteMetrics(const std::vector<MetricsField>& fields) {
  return metrics_ == nullptr ? absl::OkStatus() : metrics_->Write(fields);
}

std::string RunReport::DescribeQuality(const Evaluation& evaluation) const {
  const double loss = evaluation.loss_mean();
  if (are_bytes_) return absl::StrFormat("loss %.4f %.3f bits/byte", loss, BitsOf(loss));
  if (counts_tokens_) return absl::StrFormat("loss %.4f perplexity %.1f", loss, std::exp(loss));
  return absl::StrFormat("loss %.4f accuracy %.4f", loss, evaluation.accuracy());
}

std::vector<MetricsField> RunReport::WithBits(absl::string_view name, double loss,
                                              std::vector<MetricsField> fields) const {
  if (counts_tokens_) fields.emplace_back(name, BitsOf(loss));
  return fields;
}

absl::Duration RunReport::Elapsed() const { return absl::Now() - start_; }

}  // namespace evenkeel
