// A training that loses ranks; the others finish it (tests/elastic/). The losses are either
// planned, at points of steps, or of any kind at any time: then the next one often comes while the
// survivors of the last one make their group.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/tests/elastic/elastic_rank.h"
#include "evenkeel/tests/simulation/loss.h"
#include "evenkeel/tests/simulation/play.h"

namespace evenkeel::simulation {
namespace {

struct LossAtTime {
  int rank = 0;
  LossKind kind = LossKind::kKilled;
  Nanos when = 0;
};

class ElasticPlay : public Play {
 public:
  ElasticPlay(ElasticTraining training, std::vector<LossAtTime> losses)
      : training_(std::move(training)),
        losses_(std::move(losses)),
        has_ended_(training_.inputs.size()),
        reports_(training_.inputs.size(), absl::CancelledError("has not ended")) {}

  std::string Describe() const override {
    std::string text = absl::StrCat("continues after losses: ", ToText(training_));
    for (const LossAtTime& loss : losses_) {
      absl::StrAppend(&text, "; rank ", loss.rank, " ", TextOf(loss.kind), " at ",
                      absl::FormatDuration(absl::Nanoseconds(loss.when)));
    }
    return text;
  }
  int world_size() const override { return static_cast<int>(training_.inputs.size()); }
  bool rank0_hosts() const override { return false; }
  CommunicatorOptions options() const override {
    return {.timeout = absl::Seconds(12),
            .watch = {.beat = absl::Milliseconds(250), .silence = absl::Milliseconds(1500)}};
  }

  std::vector<std::unique_ptr<Play>> Simpler() const override {
    std::vector<std::unique_ptr<Play>> simpler;
    const auto add = [&](ElasticTraining training, std::vector<LossAtTime> losses) {
      simpler.push_back(std::make_unique<ElasticPlay>(std::move(training), std::move(losses)));
    };
    if (training_.losses.size() > 1) {
      ElasticTraining next = training_;
      next.losses.pop_back();
      add(std::move(next), losses_);
    }
    for (size_t i = 0; i < losses_.size(); ++i) {
      std::vector<LossAtTime> fewer = losses_;
      fewer.erase(fewer.begin() + static_cast<int>(i));
      add(training_, std::move(fewer));
    }
    // Removes the last rank, unless it is a lost one.
    const int last = world_size() - 1;
    const auto is_last = [&](const auto& loss) { return loss.rank == last; };
    if (last < 3 || std::any_of(training_.losses.begin(), training_.losses.end(), is_last) ||
        std::any_of(losses_.begin(), losses_.end(), is_last)) {
      return simpler;
    }
    ElasticTraining next = training_;
    next.inputs.pop_back();
    add(std::move(next), losses_);
    return simpler;
  }

  void Prepare(Stage& stage) override {
    for (const LossAtTime& loss : losses_) {
      Schedule(stage, loss.rank, loss.when, [this, loss, &stage] {
        if (begun_ < world_size() || has_ended_[loss.rank]) return;
        std::set<int> lost = LostRanks(loss.kind, loss.rank, stage);
        lost.insert(lost_.begin(), lost_.end());
        if (static_cast<int>(lost.size()) == world_size()) return;  // One must survive.
        lost_ = std::move(lost);
        Inflict(loss.kind, loss.rank, stage);
      });
    }
  }

  void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) override {
    const auto die = [&] {
      lost_.insert(rank);
      stage.world.Kill(stage.ranks[rank]);
    };
    reports_[rank] =
        TrainElastically(std::move(comm), training_, {.die = die, .begin = [this] { ++begun_; }});
    has_ended_[rank] = true;
  }

  Verdict Judge(bool is_over, const Stage& stage) override {
    Verdict verdict{.hangs = !is_over};
    if (!is_over) verdict.complaints.push_back("it was not over in time");
    if (!stage.crash.empty()) {
      verdict.is_other = true;
      verdict.complaints.push_back(stage.crash);
    }
    std::vector<ElasticReport> survivors;
    for (int rank = 0; rank < world_size(); ++rank) {
      // A rank that was lost and succeeds nevertheless must not have trained without the others.
      if (!is_over || (lost_.contains(rank) && !reports_[rank].ok())) continue;
      if (reports_[rank].ok()) {
        survivors.push_back(*reports_[rank]);
      } else {
        verdict.is_other = true;
        verdict.complaints.push_back(
            absl::StrCat("rank ", rank, ": ", reports_[rank].status().ToString()));
      }
    }
    std::vector<std::string> wrong = WrongIn(training_, survivors);
    if (wrong.empty())
      wrong = losses_.empty() ? UnlikePlanned(training_, survivors[0]) : Accused(survivors[0]);
    for (std::string& complaint : wrong) {
      verdict.is_wrong = true;
      verdict.complaints.push_back(std::move(complaint));
    }
    return verdict;
  }

 private:
  std::vector<std::string> Accused(const ElasticReport& survivor) const {
    std::vector<std::string> accused;
    for (const Continuation& continuation : survivor.continuations) {
      for (const int rank : continuation.lost) {
        if (!lost_.contains(rank)) accused.push_back(absl::StrCat("rank ", rank, " is not lost"));
      }
    }
    return accused;
  }

  const ElasticTraining training_;
  const std::vector<LossAtTime> losses_;
  int begun_ = 0;  // Ranks that train.
  std::set<int> lost_;
  std::vector<bool> has_ended_;  // By rank.
  std::vector<absl::StatusOr<ElasticReport>> reports_;
};

}  // namespace

std::unique_ptr<Play> MakeElasticPlay(uint64_t seed, const PlayOptions& options) {
  Draws draws(seed ^ 0xe1a571c);
  const int sizes = static_cast<int>(options.world_sizes.size());
  const int world_size = std::max(3, options.world_sizes[draws.Below(sizes)]);
  ElasticTraining training{.joins = draws.OneIn(2)};
  training.inputs.assign(world_size, 3 + draws.Below(4));
  if (training.joins) {
    for (int& inputs : training.inputs) inputs = 2 + draws.Below(5);
  }
  const auto draw_loss = [&](int rank, int first_step, int steps) {
    const StepPoint points[] = {StepPoint::kBeforeRecord, StepPoint::kForward, StepPoint::kBackward,
                                StepPoint::kReduced, StepPoint::kStepped};
    return Loss{rank, first_step + draws.Below(std::max(1, steps - first_step)),
                points[draws.Below(5)]};
  };
  const int first = draws.Below(world_size);
  if (draws.OneIn(2)) {
    std::vector<LossAtTime> losses;
    const int count = 1 + draws.Below(std::min(3, world_size - 1));
    Nanos when = draws.Magnitude(10 * kMillisecond, 2 * kSecond);
    for (int i = 0; i < count; ++i) {
      losses.push_back(
          {(first + i) % world_size, static_cast<LossKind>(draws.Below(kLossKinds - 1)), when});
      when += draws.Magnitude(kMillisecond, 4 * kSecond);
    }
    return std::make_unique<ElasticPlay>(std::move(training), std::move(losses));
  }
  // With a tree of exchanges, a rank may be in its first step while others still make their parts.
  const int earliest = world_size > internal::kDefaultFanout ? 1 : 0;
  training.losses.push_back(draw_loss(first, earliest, training.inputs[first]));
  // A second loss must come after the first: at least two steps later, in a step that its rank has.
  const int second = (first + 1 + draws.Below(world_size - 1)) % world_size;
  const int from = training.losses[0].step + 2;
  if (world_size > 3 && draws.OneIn(2) && from < training.inputs[second])
    training.losses.push_back(draw_loss(second, from, training.inputs[second]));
  return std::make_unique<ElasticPlay>(std::move(training), std::vector<LossAtTime>());
}

}  // namespace evenkeel::simulation
