#include "evenkeel/tests/six_cases/cases.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {
namespace {

std::vector<int> Batches(int inputs) {
  std::vector<int> batches(inputs);
  std::iota(batches.begin(), batches.end(), 0);
  return batches;
}

// Whether a part of the message says of this rank where it is: "rank 0 waits in #5 barrier (user)",
// "... step 3 ...", "rank 0 has left the group after 5 there".
bool SaysWhereIs(int rank, absl::string_view message) {
  for (absl::string_view part : absl::StrSplit(message, ';')) {
    if (!NamedRanks(part).contains(rank)) continue;
    for (absl::string_view mark : {"#", "step ", "after "}) {
      for (size_t at = part.find(mark); at != absl::string_view::npos;
           at = part.find(mark, at + 1)) {
        const size_t next = at + mark.size();
        if (next < part.size() && absl::ascii_isdigit(static_cast<unsigned char>(part[next])))
          return true;
      }
    }
  }
  return false;
}

bool AreEqual(const ToyState& a, const ToyState& b) {
  return a.weights == b.weights && a.momentum == b.momentum;
}

}  // namespace

RankReport RunCase(const UnevenCase& uneven, int inputs, Communicator& comm) {
  RankReport report{.rank = comm.rank()};
  auto barrier_if = [&](bool is_here) { return is_here ? comm.Barrier() : absl::OkStatus(); };
  ToySettings settings{.batches = Batches(inputs), .joins = uneven.joins};
  settings.at = [&](StepPoint point, int, int) -> absl::Status {
    if (point == StepPoint::kLoopEnd) report.diverged = MonotonicNanos();
    return barrier_if(
        (point == StepPoint::kBeforeRecord && uneven.barrier == BarrierAt::kBeginOfBody) ||
        (point == StepPoint::kStepped && uneven.barrier == BarrierAt::kEndOfBody));
  };
  report.result = TrainToy(comm, settings);
  absl::Status& status = report.result.status;
  if (status.ok()) status = barrier_if(uneven.barrier == BarrierAt::kAfterLoop);
  if (status.ok()) status = comm.Finalize(comm.timeout());
  report.ended = MonotonicNanos();
  if (!status.ok()) comm.Abort(status);
  return report;
}

double SecondsSinceDivergence(const std::vector<RankReport>& reports, int rank) {
  int64_t first = 0;
  for (const RankReport& report : reports) {
    if (report.diverged != 0 && (first == 0 || report.diverged < first)) first = report.diverged;
  }
  return first == 0 ? 0 : (reports[rank].ended - first) * 1e-9;
}

std::vector<std::string> Judge(const UnevenCase& uneven, const std::vector<int>& inputs,
                               const std::vector<RankReport>& reports) {
  std::vector<std::vector<int>> batches;
  for (int n : inputs) batches.push_back(Batches(n));
  const std::vector<ToyState> alone = TrainToyAlone(GroupSteps(batches));

  std::vector<std::string> broken;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    auto complain = [&, rank = rank](absl::string_view what) {
      broken.push_back(absl::StrCat(uneven.name, ": rank ", rank, " ", what));
    };
    const RankReport& report = reports[rank];
    const ToyResult& result = report.result;
    const std::string said = absl::StrCat("says \"", result.status.ToString(), "\", ");
    if (report.ended == 0) {
      complain("has not ended");
      continue;
    }
    if (SecondsSinceDivergence(reports, static_cast<int>(rank)) > absl::ToDoubleSeconds(kAtOnce)) {
      complain(absl::StrCat("ended ", SecondsSinceDivergence(reports, static_cast<int>(rank)),
                            " s after the divergence"));
    }
    // Whatever its end: no step may have used a wrong gradient. A step without join in which not
    //                   all take part fails.
    if (result.steps >= static_cast<int>(alone.size()) ||
        !IsClose(result.last.weights, alone[result.steps].weights)) {
      complain(absl::StrCat("has wrong weights after ", result.steps, " steps"));
    }
    if (uneven.is_right) {
      if (!result.status.ok()) complain(absl::StrCat(said, "but the program is right"));
      if (result.status.ok() && !IsClose(result.ended.weights, alone.back().weights))
        complain("ends with wrong weights");
      if (result.status.ok() && !IsClose(result.ended.momentum, alone.back().momentum)) {
        complain("ends with a wrong momentum");
      }
      if (!AreEqual(result.ended, reports[0].result.ended)) complain("does not end as rank 0 does");
      continue;
    }
    if (result.status.ok()) {
      complain("reports success, but the program is wrong");
      continue;
    }
    // Two who contradict each other are enough: that a third one would too, nobody has to wait for.
    const auto located = std::count_if(
        reports.begin(), reports.end(),
        [&](const RankReport& other) { return SaysWhereIs(other.rank, result.status.message()); });
    if (located < 2) complain(absl::StrCat(said, "which does not say of two ranks where they are"));
    if (!absl::StrContains(result.status.message(), uneven.must_say)) {
      complain(absl::StrCat(said, "without the operation (", uneven.must_say, ")"));
    }
  }
  return broken;
}

}  // namespace evenkeel
