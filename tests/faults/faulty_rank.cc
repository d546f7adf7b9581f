#include "evenkeel/tests/faults/faulty_rank.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {
namespace {

// Far beyond what any report may take.
constexpr absl::Duration kTimeout = absl::Seconds(12);
// Where a thread blocks, nobody can see that it does not just think: the deadline is what ends it.
constexpr absl::Duration kTimeoutOfBlocked = absl::Seconds(2);
// So that hundreds of scenarios take minutes.
constexpr absl::Duration kBeat = absl::Milliseconds(250), kStallWarning = absl::Milliseconds(300);
constexpr absl::Duration kSlowness = absl::Milliseconds(900);

constexpr int kElements = 100;

class FaultyRank {
 public:
  FaultyRank(const Scenario& scenario, Communicator& comm, const FaultSite& site)
      : scenario_(scenario), comm_(comm), site_(site), is_victim_(comm.rank() == scenario.victim) {
    report_.rank = comm.rank();
  }

  RankReport Run() {
    ToySettings settings{.batches = scenario_.batches()[comm_.rank()],
                         .joins = scenario_.joins(),
                         .is_sharded = scenario_.is_sharded};
    if (is_victim_ && scenario_.fault == Fault::kOtherSync)
      settings.accumulating_step = scenario_.step;
    if (is_victim_ && scenario_.fault == Fault::kOtherPlan) {
      Diverge();
      settings.caps = {Bytes{16}, Bytes{1000}};
    }
    steps_ = static_cast<int>(settings.batches.size());
    settings.at = [this](StepPoint point, int step, int gradients) {
      return At(point, step, gradients);
    };
    report_.result = TrainToy(comm_, settings);
    absl::Status& status = report_.result.status;
    if (striker_.joinable()) striker_.join();
    if (status.ok()) status = comm_.Finalize(comm_.timeout());
    report_.ended = MonotonicNanos();
    if (!status.ok()) comm_.Abort(status);
    if (work_.has_value()) (void)work_->Wait();  // Until then the memory is in use.
    return std::move(report_);
  }

 private:
  absl::Status At(StepPoint point, int step, int gradients) {
    if (is_victim_ && DeviatesAt(point, step)) Diverge();
    // Actions due within the part after the point have happened once that part is over.
    if (point == StepPoint::kStepped && striker_.joinable()) striker_.join();
    if (point == StepPoint::kStepped && work_.has_value()) EK_RETURN_IF_ERROR(CheckCollective());
    const bool is_here = point == scenario_.point && step == scenario_.step &&
                         (point != StepPoint::kBackward || gradients == scenario_.gradients);
    if (!is_here) return absl::OkStatus();
    if (scenario_.has_collective()) return CallCollective();
    return is_victim_ && !scenario_.disagrees() ? Strike() : absl::OkStatus();
  }

  // Where the training of the victim stops being the others'.
  bool DeviatesAt(StepPoint point, int step) const {
    switch (scenario_.fault) {
      case Fault::kOtherSync:
        return point == StepPoint::kBeforeRecord && step == scenario_.step;
      case Fault::kExtraStep:
        return point == StepPoint::kBeforeRecord && step == steps_ - 1;
      case Fault::kSkipsStep:  // Until the others have one step more, nobody can know.
        return point == StepPoint::kLoopEnd;
      default:
        return false;
    }
  }

  void Diverge() {
    report_.diverged = MonotonicNanos();
    site_.say(report_);
  }

  absl::Status Strike() {
    Diverge();
    if (scenario_.delay_micros < 0) return StrikeNow();
    striker_ = std::thread([this] {
      std::this_thread::sleep_for(std::chrono::microseconds(scenario_.delay_micros));
      (void)StrikeNow();
    });
    return absl::OkStatus();
  }

  absl::Status StrikeNow() {
    switch (scenario_.fault) {
      case Fault::kKilled:
        site_.die();
        break;
      case Fault::kStopped:
        site_.stop();
        break;
      case Fault::kError:
        return absl::DataLossError(kBodyError);
      case Fault::kSlow:
        absl::SleepFor(kSlowness);
        break;
      default:
        site_.cut();
    }
    return absl::OkStatus();
  }

  absl::Status CallCollective() {
    if (is_victim_) Diverge();
    Issue(is_victim_);
    return scenario_.waits_later ? absl::OkStatus() : CheckCollective();
  }

  void Issue(bool deviates) {
    Channel& user = comm_.user();
    const int root = scenario_.variant % comm_.world_size();
    floats_.assign(kElements, comm_.rank() + 1.0f);
    may_succeed_ = false;
    if (scenario_.fault == Fault::kOtherRoot) {
      Broadcast(deviates ? (root + 1) % comm_.world_size() : root);
    } else if (!deviates && scenario_.fault == Fault::kOtherDType) {
      integers_.assign(kElements, 1);
      work_ = user.AllReduce(absl::MakeSpan(integers_), ReduceOp::kSum);
    } else if (!deviates || scenario_.fault == Fault::kOtherDType) {
      work_ = user.AllReduce(absl::MakeSpan(floats_), ReduceOp::kSum);
    } else if (scenario_.fault == Fault::kOtherSize) {
      doubles_.assign(kElements / 2, 1.0);
      work_ = user.AllReduce(absl::MakeSpan(doubles_), ReduceOp::kSum);
    } else if (scenario_.variant == 0) {
      work_ = user.Barrier();
    } else if (scenario_.variant == 1) {
      Broadcast(root);
    } else {
      gathered_.assign(kElements * comm_.world_size(), 0.0f);
      work_ = user.AllGather(absl::MakeSpan(floats_), absl::MakeSpan(gathered_));
    }
  }

  // A rank that sends what it has may have nothing to wait for, and one that gets what it asked for
  // has it.
  void Broadcast(int root) {
    may_succeed_ = true;
    expected_ = root + 1.0f;
    work_ = comm_.user().Broadcast(absl::MakeSpan(floats_), root);
  }

  // Where ranks give different things, no sum can be right.
  absl::Status CheckCollective() {
    const absl::Status status = work_->Wait();
    work_.reset();
    if (status.ok() && !(may_succeed_ && floats_ == std::vector<float>(kElements, expected_))) {
      report_.has_wrong_data = true;
    }
    return status;
  }

  const Scenario& scenario_;
  Communicator& comm_;
  const FaultSite& site_;
  const bool is_victim_;
  int steps_ = 0;
  RankReport report_;
  std::thread striker_;
  std::optional<Work> work_;  // The user's collective, and its memory.
  bool may_succeed_ = false;
  float expected_ = 0;
  std::vector<float> floats_, gathered_;
  std::vector<double> doubles_;
  std::vector<int32_t> integers_;
};

}  // namespace

CommunicatorOptions OptionsOf(const Scenario& scenario) {
  const bool is_blocked = scenario.fault == Fault::kStopped && !scenario.as_processes;
  return {.timeout = is_blocked ? kTimeoutOfBlocked : kTimeout,
          .verify = scenario.verifies_every ? VerifyLevel::kEvery : VerifyLevel::kPositions,
          .watch = {.beat = kBeat, .silence = kSilence, .stall_warning = kStallWarning}};
}

RankReport RunFaultyRank(const Scenario& scenario, Communicator& comm, const FaultSite& site) {
  return FaultyRank(scenario, comm, site).Run();
}

}  // namespace evenkeel
