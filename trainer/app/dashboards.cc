#include "evenkeel/trainer/app/dashboards.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/report/prometheus.h"
#include "evenkeel/trainer/report/tensorboard.h"

namespace evenkeel {
namespace {

void AddIfKnown(std::vector<Scalar>& scalars, const Scalar& scalar, bool is_known) {
  if (is_known) scalars.push_back(scalar);
}

}  // namespace

Dashboards::Dashboards(const TrainOptions& options, const std::string& model, bool counts_tokens,
                       OutputFailures& failures)
    : failures_(failures), counts_tokens_(counts_tokens) {
  if (!options.tensorboard_folder.empty()) {
    absl::StatusOr<std::unique_ptr<MetricsSink>> events =
        OpenTensorboard(options.tensorboard_folder);
    failures_.Note("--tensorboard", events.status());
    if (events.ok()) sinks_["--tensorboard"] = *std::move(events);
  }
  if (!options.prometheus_file.empty()) {
    const std::string run = std::filesystem::path(options.prometheus_file).stem().string();
    sinks_["--prometheus"] = OpenPrometheus(
        {.path = options.prometheus_file, .labels = {{"model", model}, {"run", run}}});
  }
}

void Dashboards::Each(absl::FunctionRef<absl::Status(MetricsSink&)> call) {
  for (const auto& [flag, sink] : sinks_) failures_.Note(flag, call(*sink));
}

void Dashboards::OnStep(const StepFacts& facts, const StepNumbers& numbers, absl::Time now) {
  if (sinks_.empty()) return;
  // A loss that is not finite is also written.
  const bool has_own = facts.own.has_value();
  std::vector<Scalar> scalars = {
      {"train/learning_rate", facts.learning_rate, "Learning rate of the last step"}};
  AddIfKnown(
      scalars,
      {"train/loss_scale", facts.loss_scale, "Factor by which the last step's loss was multiplied"},
      facts.loss_scale > 0);
  AddIfKnown(scalars, {"train/loss", numbers.loss, "Mean loss of the last batch of rank 0"},
             has_own);
  AddIfKnown(
      scalars,
      {"train/accuracy", numbers.accuracy, "Accuracy on the last batch of rank 0, from 0 to 1"},
      has_own);
  AddIfKnown(scalars,
             {"train/bits_per_token", BitsOf(numbers.loss),
              "Mean loss of the last batch of rank 0, in bits for each token"},
             has_own && counts_tokens_);
  AddIfKnown(scalars,
             {counts_tokens_ ? "train/tokens_per_second" : "train/samples_per_second",
              numbers.predictions_per_second,
              counts_tokens_ ? "Tokens that all ranks trained on in a second, in the last step"
                             : "Samples that all ranks trained on in a second, in the last step"},
             !std::isnan(numbers.predictions_per_second));
  AddIfKnown(scalars,
             {"train/gradient_norm", facts.gradient_norm,
              "Norm of all gradients of the last step, before clipping"},
             !std::isnan(facts.gradient_norm));
  AddIfKnown(scalars,
             {"train/step_seconds", numbers.step_ms / 1000, "Duration of the last step on rank 0"},
             !std::isnan(numbers.step_ms));
  AddIfKnown(scalars,
             {"train/exposed_communication_ratio", numbers.exposed_ratio,
              "Fraction of the last step in which rank 0 waited for gradients after backward"},
             !std::isnan(numbers.exposed_ratio));
  Each([&](MetricsSink& sink) {
    return sink.Write({.step = facts.step, .time = now, .scalars = scalars});
  });
}

void Dashboards::OnStragglers(int64_t step, const StragglerReport& recent, absl::Time now) {
  const auto slowest = std::ranges::max_element(recent.ranks, {}, &StragglerReport::Rank::cost);
  if (slowest == recent.ranks.end() || slowest->cost == 0) return;
  const Scalar scalars[] = {
      {"train/straggler_cost_ratio", slowest->cost,
       "Fraction of the recent steps' time that the slowest rank cost the group"},
      {"train/straggler_rank", static_cast<double>(slowest->rank), "The slowest rank"}};
  Each([&](MetricsSink& sink) {
    return sink.Write({.step = step, .time = now, .scalars = scalars});
  });
}

void Dashboards::OnTest(int64_t step, const Evaluation& test, absl::Time now, bool is_part) {
  const std::string prefix = is_part ? "test_part/" : "test/";
  const std::string loss = prefix + "loss", accuracy = prefix + "accuracy",
                    bits = prefix + "bits_per_token";
  std::vector<Scalar> scalars = {
      {loss, test.loss_mean(), "Mean loss over the test data"},
      {accuracy, test.accuracy(), "Accuracy over the test data, from 0 to 1"}};
  AddIfKnown(
      scalars,
      {bits, BitsOf(test.loss_mean()), "Mean loss over the test data, in bits for each token"},
      counts_tokens_);
  Each([&](MetricsSink& sink) {
    return sink.Write({.step = step, .time = now, .scalars = scalars});
  });
}

void Dashboards::OnSample(int64_t step, absl::string_view text, absl::Time now) {
  Each([&](MetricsSink& sink) {
    return sink.WriteText({.step = step, .time = now, .name = "sample", .text = text});
  });
}

void Dashboards::OnGoBack(int64_t step, absl::Time now) {
  Each([&](MetricsSink& sink) { return sink.GoBackTo(step, now); });
}

void Dashboards::OnEnd(absl::Time now) {
  Each([&](MetricsSink& sink) { return sink.Finish(now); });
}

}  // namespace evenkeel
