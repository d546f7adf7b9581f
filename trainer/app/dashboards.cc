#include "evenkeel/trainer/app/dashboards.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/report/prometheus.h"
#include "evenkeel/trainer/report/tensorboard.h"

namespace evenkeel {
Dashboards::Dashboards(const TrainOptions& options, bool counts_tokens, OutputFailures& failures)
    : failures_(failures), counts_tokens_(counts_tokens), balances_(options.flags.balance) {
  if (!options.flags.tensorboard.empty()) {
    absl::StatusOr<std::unique_ptr<MetricsSink>> events =
        OpenTensorboard(options.flags.tensorboard);
    failures_.Note("--tensorboard", events.status());
    if (events.ok()) sinks_["--tensorboard"] = *std::move(events);
  }
  if (!options.flags.prometheus.empty())
    sinks_["--prometheus"] = OpenPrometheus(options.flags.prometheus, NameOf(options.model));
}

void Dashboards::Each(absl::FunctionRef<absl::Status(MetricsSink&)> call) {
  for (const auto& [flag, sink] : sinks_) failures_.Note(flag, call(*sink));
}

void Dashboards::Write(int64_t step, absl::Time time, std::span<const Scalar> scalars) {
  Each([&](MetricsSink& sink) { return sink.Write(step, time, scalars); });
}

void Dashboards::OnStep(const StepFacts& facts, const StepNumbers& numbers, absl::Time now) {
  if (sinks_.empty()) return;
  std::vector<Scalar> scalars;
  const auto add = [&](bool is_known, absl::string_view name, double value,
                       absl::string_view help) {
    if (is_known) scalars.push_back({name, value, help});
  };
  // A loss that is not finite is also written.
  const bool has_own = facts.own.has_value();
  add(true, "train/learning_rate", facts.learning_rate, "Learning rate of the last step");
  add(facts.loss_scale > 0, "train/loss_scale", facts.loss_scale,
      "Factor by which the last step's loss was multiplied");
  add(has_own, "train/loss", numbers.loss, "Mean loss of the last batch of rank 0");
  add(has_own, "train/accuracy", numbers.accuracy,
      "Accuracy on the last batch of rank 0, from 0 to 1");
  add(has_own && counts_tokens_, "train/bits_per_token", BitsOf(numbers.loss),
      "Mean loss of the last batch of rank 0, in bits for each token");
  add(!std::isnan(numbers.predictions_per_second),
      counts_tokens_ ? "train/tokens_per_second" : "train/samples_per_second",
      numbers.predictions_per_second,
      counts_tokens_ ? "Tokens that all ranks trained on in a second, in the last step"
                     : "Samples that all ranks trained on in a second, in the last step");
  add(balances_, "train/rank0_samples", static_cast<double>(facts.own_samples),
      "Samples of the last step that rank 0 computed");
  add(!std::isnan(facts.gradient_norm), "train/gradient_norm", facts.gradient_norm,
      "Norm of all gradients of the last step, before clipping");
  add(!std::isnan(numbers.step_ms), "train/step_seconds", numbers.step_ms / 1000,
      "Duration of the last step on rank 0");
  add(!std::isnan(numbers.exposed_ratio), "train/exposed_communication_ratio",
      numbers.exposed_ratio,
      "Fraction of the last step in which rank 0 waited for gradients after backward");
  Write(facts.step, now, scalars);
}

void Dashboards::OnStragglers(int64_t step, const StragglerReport& recent, absl::Time now) {
  const auto slowest = std::ranges::max_element(recent.ranks, {}, &StragglerReport::Rank::cost);
  if (slowest == recent.ranks.end() || slowest->cost == 0) return;
  const Scalar scalars[] = {
      {"train/straggler_cost_ratio", slowest->cost,
       "Fraction of the recent steps' time that the slowest rank cost the group"},
      {"train/straggler_rank", static_cast<double>(slowest->rank), "The slowest rank"}};
  Write(step, now, scalars);
}

void Dashboards::OnTest(int64_t step, const Evaluation& test, absl::Time now, bool is_part) {
  const std::string prefix = is_part ? "test_part/" : "test/";
  const std::string loss = prefix + "loss", accuracy = prefix + "accuracy",
                    bits = prefix + "bits_per_token";
  std::vector<Scalar> scalars = {
      {loss, test.loss_mean(), "Mean loss over the test data"},
      {accuracy, test.accuracy(), "Accuracy over the test data, from 0 to 1"}};
  if (counts_tokens_) {
    scalars.push_back(
        {bits, BitsOf(test.loss_mean()), "Mean loss over the test data, in bits for each token"});
  }
  Write(step, now, scalars);
}

void Dashboards::OnSample(int64_t step, absl::string_view text, absl::Time now) {
  Each([&](MetricsSink& sink) { return sink.WriteText(step, now, "sample", text); });
}

void Dashboards::OnGoBack(int64_t step, absl::Time now) {
  Each([&](MetricsSink& sink) { return sink.GoBackTo(step, now); });
}

void Dashboards::OnEnd(absl::Time now) {
  Each([&](MetricsSink& sink) { return sink.Finish(now); });
}

}  // namespace evenkeel
