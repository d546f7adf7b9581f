// A training that loses one or two ranks; the others finish it (tests/elastic/).

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/tests/elastic/elastic_rank.h"
#include "evenkeel/tests/simulation/play.h"

namespace evenkeel::simulation {
namespace {

class ElasticPlay : public Play {
 public:
  explicit ElasticPlay(ElasticTraining training)
      : training_(std::move(training)),
        reports_(training_.inputs.size(), absl::CancelledError("has not ended")) {}

  std::string Describe() const override {
    return absl::StrCat("continues after losses: ", ToText(training_));
  }
  int world_size() const override { return static_cast<int>(training_.inputs.size()); }
  bool rank0_hosts() const override { return false; }
  CommunicatorOptions options() const override {
    return {.timeout = absl::Seconds(12),
            .watch = {.beat = absl::Milliseconds(250), .silence = absl::Milliseconds(1500)}};
  }

  std::vector<std::unique_ptr<Play>> Simpler() const override {
    std::vector<std::unique_ptr<Play>> simpler;
    if (training_.losses.size() > 1) {
      ElasticTraining next = training_;
      next.losses.pop_back();
      simpler.push_back(std::make_unique<ElasticPlay>(std::move(next)));
    }
    // Removes the last rank, unless it is a lost one.
    const int last = world_size() - 1;
    const bool is_lost = std::any_of(training_.losses.begin(), training_.losses.end(),
                                     [&](const Loss& loss) { return loss.rank == last; });
    if (is_lost || last < 3) return simpler;
    ElasticTraining next = training_;
    next.inputs.pop_back();
    simpler.push_back(std::make_unique<ElasticPlay>(std::move(next)));
    return simpler;
  }

  void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) override {
    reports_[rank] =
        TrainElastically(std::move(comm), training_, [&] { stage.world.Kill(stage.ranks[rank]); });
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
      const bool is_lost = std::any_of(training_.losses.begin(), training_.losses.end(),
                                       [&](const Loss& loss) { return loss.rank == rank; });
      if (is_lost || !is_over) continue;
      if (reports_[rank].ok()) {
        survivors.push_back(*reports_[rank]);
      } else {
        verdict.is_other = true;
        verdict.complaints.push_back(
            absl::StrCat("rank ", rank, ": ", reports_[rank].status().ToString()));
      }
    }
    for (std::string& complaint : WrongIn(training_, survivors)) {
      verdict.is_wrong = true;
      verdict.complaints.push_back(std::move(complaint));
    }
    return verdict;
  }

 private:
  const ElasticTraining training_;
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
  training.losses.push_back(draw_loss(first, 0, training.inputs[first]));
  // A second loss must come after the first: at least two steps later, in a step that its rank has.
  const int second = (first + 1 + draws.Below(world_size - 1)) % world_size;
  const int from = training.losses[0].step + 2;
  if (world_size > 3 && draws.OneIn(2) && from < training.inputs[second])
    training.losses.push_back(draw_loss(second, from, training.inputs[second]));
  return std::make_unique<ElasticPlay>(std::move(training));
}

}  // namespace evenkeel::simulation
