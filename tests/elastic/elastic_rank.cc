#include "evenkeel/tests/elastic/elastic_rank.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/tests/rank_report.h"

namespace evenkeel {
namespace {

std::vector<int> Batches(int inputs) {
  std::vector<int> batches(inputs);
  std::iota(batches.begin(), batches.end(), 0);
  return batches;
}

absl::Status Malformed(absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat("malformed: ", text));
}

absl::StatusOr<std::vector<int>> Numbers(absl::string_view text, char separator) {
  std::vector<int> numbers;
  for (absl::string_view part : absl::StrSplit(text, separator, absl::SkipEmpty())) {
    numbers.emplace_back();
    if (!absl::SimpleAtoi(part, &numbers.back())) return Malformed(text);
  }
  return numbers;
}

// From which steps survivors may go on. A rank that is in a step has all contributions to the one
// before, but the others may still be about to get its result; one that has reduced a step has
// begun it together with all others.
std::pair<int, int> PossibleSteps(const Loss& loss) {
  const bool has_reduced = loss.point == StepPoint::kReduced || loss.point == StepPoint::kStepped;
  return has_reduced ? std::pair(loss.step, loss.step + 1)
                     : std::pair(std::max(loss.step - 1, 0), loss.step);
}

// "3,0 5,1,2": from step 3 without rank 0, and from step 5 without ranks 1 and 2.
std::string ToText(const std::vector<Continuation>& continuations) {
  return absl::StrJoin(continuations, " ", [](std::string* out, const Continuation& each) {
    absl::StrAppend(out, each.step, each.lost.empty() ? "" : ",", absl::StrJoin(each.lost, ","));
  });
}

// The model of a rank, with what trains it.
class Trainee {
 public:
  virtual ~Trainee() = default;
  virtual std::vector<Joinable*> joinables() = 0;
  virtual absl::Status Train(int first_step) = 0;
  virtual int64_t steps() const = 0;  // Finished ones.
  virtual ToyState state() const = 0;
};

using StepFunction = decltype(ToySettings::at);

class ToyTrainee : public Trainee {
 public:
  explicit ToyTrainee(std::unique_ptr<ToyTrainer> trainer) : trainer_(std::move(trainer)) {}
  std::vector<Joinable*> joinables() override { return trainer_->joinables(); }
  absl::Status Train(int first_step) override { return trainer_->Train(first_step); }
  int64_t steps() const override { return trainer_->joinables()[1]->steps_finished(); }
  ToyState state() const override { return trainer_->state(); }

 private:
  const std::unique_ptr<ToyTrainer> trainer_;
};

// Adds up numbers of all ranks, over the control plane.
class Counter : public Joinable, public Trainee {
 public:
  static constexpr int kNumbers = 3;

  Counter(Communicator& comm, const ElasticTraining& training, StepFunction at)
      : Joinable(&comm, training.is_misfit ? "teller" : "counter"),
        place_(comm.rank()),
        inputs_(training.inputs[place_]),
        at_(std::move(at)),
        state_(kNumbers) {}
  std::vector<Joinable*> joinables() override { return {this}; }
  absl::Status Train(int first_step) override {
    for (int step = first_step; step < inputs_; ++step) {
      EK_RETURN_IF_ERROR(at_(StepPoint::kBeforeRecord, step, 0));
      EK_RETURN_IF_ERROR(at_(StepPoint::kForward, step, 0));
      EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                          Exchange("count", absl::StrCat(place_)));
      EK_RETURN_IF_ERROR(at_(StepPoint::kReduced, step, 0));
      std::vector<int> places;
      for (const std::string& part : parts) {
        places.emplace_back();
        if (!absl::SimpleAtoi(part, &places.back())) return Malformed(part);
      }
      Add(step, places, state_);
      SetStepsFinished(step + 1);
      EK_RETURN_IF_ERROR(at_(StepPoint::kStepped, step, 0));
    }
    return absl::OkStatus();
  }
  int64_t steps() const override { return steps_finished(); }
  ToyState state() const override { return {.weights = state_, .momentum = {}}; }
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }

  // The numbers are small integers, so sums have the same bits in any order.
  static void Add(int step, const std::vector<int>& places, std::vector<float>& state) {
    constexpr int kModulus = 65521;
    for (int i = 0; i < kNumbers; ++i) {
      int64_t number = static_cast<int64_t>(state[i]) * (step + 3) + i;
      for (const int place : places) number += (place + 1) * (place + 7 + i) * (step + 1);
      state[i] = static_cast<float>(number % kModulus);
    }
  }

 protected:
  absl::Status TakeOver(StateTransfer& transfer) override {
    const bool is_source = communicator().rank() == transfer.source;
    EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                        Exchange("state", is_source ? absl::StrJoin(state_, ",") : ""));
    const std::vector<std::string> numbers = absl::StrSplit(parts[transfer.source], ',');
    if (numbers.size() != kNumbers) return Malformed(parts[transfer.source]);
    for (int i = 0; i < kNumbers; ++i) {
      if (!absl::SimpleAtof(numbers[i], &state_[i])) return Malformed(parts[transfer.source]);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<Restore> KeepState(std::set<const void*>&) override {
    return [this, kept = state_] {
      state_ = kept;
      return absl::OkStatus();
    };
  }

 private:
  const int place_;
  const int inputs_;
  const StepFunction at_;
  std::vector<float> state_;
};

ToyState CountAlone(const std::vector<ToyStep>& steps) {
  ToyState state{.weights = std::vector<float>(Counter::kNumbers), .momentum = {}};
  for (const ToyStep& step : steps) {
    std::vector<int> places;
    for (const auto& [place, batch] : step.inputs) places.push_back(place);
    Counter::Add(step.inputs[0].second, places, state.weights);
  }
  return state;
}

absl::StatusOr<std::unique_ptr<Trainee>> MakeTrainee(Communicator& comm,
                                                     const ElasticTraining& training,
                                                     StepFunction at) {
  if (training.is_counted) return std::make_unique<Counter>(comm, training, std::move(at));
  ToySettings settings{.batches = Batches(training.inputs[comm.rank()]),
                       .joins = training.joins,
                       .is_exact = training.is_exact,
                       .is_misfit = training.is_misfit};
  settings.at = std::move(at);
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ToyTrainer> trainer, ToyTrainer::Create(&comm, settings));
  return std::make_unique<ToyTrainee>(std::move(trainer));
}

}  // namespace

std::string ToText(const ElasticTraining& training) {
  std::string text =
      absl::StrCat(absl::StrJoin(training.inputs, ","), training.joins ? " join" : " plain");
  for (const Loss& loss : training.losses) {
    absl::StrAppend(&text, " ", loss.rank, ":", loss.step, ":", static_cast<int>(loss.point));
  }
  return text;
}

absl::StatusOr<ElasticTraining> TrainingFromText(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ' ');
  if (parts.size() < 2) return Malformed(text);
  ElasticTraining training{.joins = parts[1] == "join"};
  EK_ASSIGN_OR_RETURN(training.inputs, Numbers(parts[0], ','));
  for (size_t i = 2; i < parts.size(); ++i) {
    EK_ASSIGN_OR_RETURN(const std::vector<int> loss, Numbers(parts[i], ':'));
    if (loss.size() != 3) return Malformed(text);
    training.losses.push_back({loss[0], loss[1], static_cast<StepPoint>(loss[2])});
  }
  return training;
}

std::string ToLine(const ElasticReport& report) {
  RankReport carrier{.rank = report.rank,
                     .diverged = static_cast<int64_t>(report.seconds_without_group * 1e9)};
  carrier.result.ended = report.ended;
  carrier.result.status = absl::UnknownError(ToText(report.continuations));
  return ToLine(carrier);
}

absl::StatusOr<ElasticReport> ElasticReportFromLine(absl::string_view line) {
  EK_ASSIGN_OR_RETURN(RankReport carrier, ReportFromLine(line));
  std::vector<Continuation> continuations;
  for (const absl::string_view part :
       absl::StrSplit(carrier.result.status.message(), ' ', absl::SkipEmpty())) {
    EK_ASSIGN_OR_RETURN(std::vector<int> numbers, Numbers(part, ','));
    if (numbers.empty()) return Malformed(part);
    continuations.push_back({.step = numbers[0], .lost = {numbers.begin() + 1, numbers.end()}});
  }
  return ElasticReport{.rank = carrier.rank,
                       .continuations = std::move(continuations),
                       .seconds_without_group = carrier.diverged * 1e-9,
                       .ended = std::move(carrier.result.ended)};
}

absl::StatusOr<ElasticReport> TrainElastically(std::unique_ptr<Communicator> comm,
                                               const ElasticTraining& training,
                                               const ElasticHooks& hooks) {
  ElasticReport report{.rank = comm->rank()};
  const bool is_newcomer = comm->waiting();
  std::vector<int> ranks = comm->members();
  std::unique_ptr<Trainee> trainee;
  EK_ASSIGN_OR_RETURN(
      trainee, MakeTrainee(*comm, training, [&](StepPoint point, int step, int gradients) {
        hooks.at(point, step);
        if (point == StepPoint::kStepped) hooks.finished(step + 1, trainee->state());
        for (const Loss& loss : training.losses) {
          if (is_newcomer || loss.rank != report.rank || loss.step != step || loss.point != point)
            continue;
          if (point != StepPoint::kBackward || gradients == 2) hooks.die();
        }
        return absl::OkStatus();
      }));
  Recovered from;
  if (is_newcomer) {
    EK_ASSIGN_OR_RETURN(from, Enter(trainee->joinables(), *comm, {.timeout = training.timeout}));
    comm = std::move(from.comm);
    ranks = comm->members();
  }
  hooks.begin();
  while (true) {
    hooks.goes_on(*comm, from.steps, from.source, trainee->state());
    absl::Status status = trainee->Train(static_cast<int>(from.steps));
    if (status.ok())
      status = comm->Finalize(training.timeout);  // A loss after the last step is one, too.
    if (status.ok()) break;
    const int64_t failed = MonotonicNanos();
    hooks.fails(trainee->steps(), trainee->state());
    EK_ASSIGN_OR_RETURN(from, Recover(trainee->joinables(), *comm,
                                      {.timeout = training.timeout,
                                       .wait_for_replacement = training.wait_for_replacement,
                                       .why = status}));
    comm = std::move(from.comm);
    Continuation& next = report.continuations.emplace_back();
    next.step = static_cast<int>(from.steps);
    std::ranges::set_difference(ranks, comm->members(), std::back_inserter(next.lost));
    ranks = comm->members();
    report.seconds_without_group =
        std::max(report.seconds_without_group, (MonotonicNanos() - failed) * 1e-9);
    if (from.lost.empty()) return status;
  }
  report.ended = trainee->state();
  return report;
}

ToyState TrainElasticallyAlone(const ElasticTraining& training,
                               const std::vector<Continuation>& continuations) {
  const std::vector<int>& inputs = training.inputs;
  std::vector<bool> is_there(inputs.size(), true);
  const int steps = *std::max_element(inputs.begin(), inputs.end());
  std::vector<ToyStep> done;
  auto train = [&](int begin, int end) {
    for (int step = begin; step < end; ++step) {
      ToyStep next{.divisor = static_cast<int>(std::count(is_there.begin(), is_there.end(), true))};
      for (size_t rank = 0; rank < is_there.size(); ++rank) {
        if (is_there[rank] && step < inputs[rank])
          next.inputs.emplace_back(static_cast<int>(rank), step);
      }
      if (!next.inputs.empty()) done.push_back(std::move(next));
    }
  };
  int begin = 0;
  for (const Continuation& continuation : continuations) {
    train(begin, continuation.step);
    begin = continuation.step;
    for (const int lost : continuation.lost) is_there[lost] = false;
  }
  train(begin, steps);
  return training.is_counted ? CountAlone(done) : TrainToyAlone(done, training.is_exact).back();
}

std::vector<std::string> WrongIn(const ElasticTraining& training,
                                 const std::vector<ElasticReport>& survivors) {
  if (survivors.empty()) return {"no rank has survived"};
  std::vector<std::string> wrong;
  const ElasticReport& first = survivors[0];
  const ToyState expected = TrainElasticallyAlone(training, first.continuations);
  for (const ElasticReport& report : survivors) {
    const std::string who = absl::StrCat("rank ", report.rank, " ");
    if (report.continuations != first.continuations) {
      wrong.push_back(absl::StrCat(who, "continued as ", ToText(report.continuations), ", rank ",
                                   first.rank, " as ", ToText(first.continuations)));
    }
    if (report.ended.weights != first.ended.weights ||
        report.ended.momentum != first.ended.momentum) {
      wrong.push_back(absl::StrCat(who, "does not end as rank ", first.rank, " does"));
    }
    if (!IsClose(report.ended.weights, expected.weights) ||
        !IsClose(report.ended.momentum, expected.momentum)) {
      wrong.push_back(absl::StrCat(who, "ends with wrong weights or a wrong momentum"));
    }
  }
  return wrong;
}

std::vector<std::string> UnlikePlanned(const ElasticTraining& training,
                                       const ElasticReport& survivor) {
  const std::vector<Continuation>& continuations = survivor.continuations;
  if (continuations.size() != training.losses.size()) {
    return {absl::StrCat("continued as ", ToText(continuations), " after ", training.losses.size(),
                         " losses")};
  }
  std::vector<std::string> wrong;
  for (size_t i = 0; i < training.losses.size(); ++i) {
    const auto [earliest, latest] = PossibleSteps(training.losses[i]);
    const Continuation& each = continuations[i];
    if (each.step < earliest || each.step > latest ||
        each.lost != std::vector<int>{training.losses[i].rank}) {
      wrong.push_back(absl::StrCat("continued as ", ToText(continuations), ", but without rank ",
                                   training.losses[i].rank, " from a step between ", earliest,
                                   " and ", latest, " was possible"));
    }
  }
  return wrong;
}

}  // namespace evenkeel
