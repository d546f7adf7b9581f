#include "evenkeel/tests/elastic/elastic_rank.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/tests/rank_report.h"

namespace evenkeel {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

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
                                               absl::FunctionRef<void()> die,
                                               absl::FunctionRef<void()> begin) {
  ElasticReport report{.rank = comm->rank()};
  std::vector<int> ranks(comm->world_size());  // In the first group.
  std::iota(ranks.begin(), ranks.end(), 0);
  ToySettings settings{.batches = Batches(training.inputs[report.rank]), .joins = training.joins};
  settings.at = [&](StepPoint point, int step, int gradients) -> absl::Status {
    for (const Loss& loss : training.losses) {
      if (loss.rank != report.rank || loss.step != step || loss.point != point) continue;
      if (point != StepPoint::kBackward || gradients == 2) die();
    }
    return absl::OkStatus();
  };
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ToyTrainer> trainer,
                      ToyTrainer::Create(comm.get(), settings));
  begin();
  absl::Status status = trainer->Train();
  if (status.ok()) status = comm->Finalize(kPatience);  // A loss after the last step is one, too.
  while (!status.ok()) {
    const int64_t failed = MonotonicNanos();
    EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(trainer->joinables(), *comm,
                                                     {.timeout = kPatience, .why = status}));
    comm = std::move(recovered.comm);
    Continuation& next = report.continuations.emplace_back();
    next.step = static_cast<int>(recovered.steps);
    for (const int lost : recovered.lost) next.lost.push_back(ranks[lost]);
    std::erase_if(ranks, [&](int rank) {
      return std::find(next.lost.begin(), next.lost.end(), rank) != next.lost.end();
    });
    report.seconds_without_group =
        std::max(report.seconds_without_group, (MonotonicNanos() - failed) * 1e-9);
    if (next.lost.empty()) return status;
    status = trainer->Train(static_cast<int>(recovered.steps));
    if (status.ok()) status = comm->Finalize(kPatience);
  }
  report.ended = trainer->result().ended;
  return report;
}

ToyState TrainElasticallyAlone(const std::vector<int>& inputs,
                               const std::vector<Continuation>& continuations) {
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
  return TrainToyAlone(done).back();
}

std::vector<std::string> WrongIn(const ElasticTraining& training,
                                 const std::vector<ElasticReport>& survivors) {
  if (survivors.empty()) return {"no rank has survived"};
  std::vector<std::string> wrong;
  const ElasticReport& first = survivors[0];
  const ToyState expected = TrainElasticallyAlone(training.inputs, first.continuations);
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
