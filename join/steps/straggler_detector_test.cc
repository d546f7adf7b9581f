#include "evenkeel/join/steps/straggler_detector.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "evenkeel/join/steps/step_status.h"

namespace evenkeel {
namespace {

using RankTimes = StragglerDetector::RankTimes;

constexpr int kSteps = 600;

// Steps of ranks that take 8 ms forward, 12 ms backward, with noise of `noise` of that, and leave
// each reduction together.
class Job {
 public:
  explicit Job(int world_size, double noise = 0.05)
      : detector(world_size), world_size_(world_size), noise_(noise) {}

  // `disturb` changes the times of a rank in a step.
  void Run(int steps, const std::function<void(int step, int rank, PhaseTimes&)>& disturb = {}) {
    for (int i = 0; i < steps; ++i) {
      std::vector<RankTimes> ranks(world_size_);
      int64_t longest = 0;
      for (int rank = 0; rank < world_size_; ++rank) {
        PhaseTimes& times = ranks[rank].times.emplace();
        times.busy(StepPhase::kForward) = Noisy(8000);
        times.busy(StepPhase::kBackward) = Noisy(12'000);
        if (disturb) disturb(step_, rank, times);
        longest = std::max(longest, times.all_busy_us());
      }
      for (RankTimes& rank : ranks)
        rank.times->waited_us = longest - rank.times->all_busy_us() + 1000;
      detector.Add(ranks);
      ++step_;
    }
  }

  StragglerDetector detector;

 private:
  int64_t Noisy(double mean) {
    return static_cast<int64_t>(mean *
                                std::max(0.0, 1 + noise_ * std::normal_distribution()(random_)));
  }

  const int world_size_;
  const double noise_;
  int step_ = 0;
  std::mt19937_64 random_{17};
};

std::function<void(int, int, PhaseTimes&)> Delay(std::vector<int> ranks, StepPhase phase,
                                                 int64_t us) {
  return [=](int, int rank, PhaseTimes& times) {
    if (std::ranges::count(ranks, rank) > 0) times.busy(phase) += us;
  };
}

TEST(StragglerDetectorTest, NamesTheRankThePhaseAndTheCost) {
  Job job(4);
  job.Run(kSteps, Delay({3}, StepPhase::kInput, 4000));
  const StragglerReport report = job.detector.Recent();
  EXPECT_EQ(report.steps, 500);
  EXPECT_EQ(report.Stragglers(), "rank 3 cost the group 14 % of the last 500 steps: input");
  EXPECT_EQ(report.Stragglers([](int rank) { return "host " + std::to_string(rank); }),
            "rank 3 (host 3) cost the group 14 % of the last 500 steps: input");
  EXPECT_LT(report.ranks[3].waited_for_others, absl::Microseconds(600));
  EXPECT_GT(report.ranks[0].waited_for_others, absl::Microseconds(3000));
  EXPECT_EQ(job.detector.All().steps, kSteps);
}

TEST(StragglerDetectorTest, SamplesAreMeansOfTheStepsWithInputs) {
  const PhaseTimes times{.busy_us = {0, 0, 8000, 12'000, 0, 0}};
  StragglerDetector detector(2);
  for (const int64_t samples : {60, 40, 50}) {
    detector.Add(
        {{RankTimes{.times = times, .samples = samples}, RankTimes{.times = times, .samples = 1}}});
  }
  detector.Add({{RankTimes{.times = times, .samples = 50},
                 RankTimes{.times = times, .is_exhausted = true, .samples = 1}}});
  detector.Add({{RankTimes{.times = times, .samples = 100}, RankTimes{.is_exhausted = true}}});
  const StragglerReport report = detector.All();
  EXPECT_EQ(report.ranks[0].samples, 60);
  EXPECT_EQ(report.ranks[1].samples, 1);
  EXPECT_NE(report.Table().find("   samples\n"), std::string::npos);
  EXPECT_NE(report.Table().find("      60.0\n"), std::string::npos);
  EXPECT_NE(ToJson({.step = 5}, report, 0).find(",\"samples\":60.0,"), std::string::npos);
  EXPECT_EQ(StragglerDetector(2).All().Table().find("samples"), std::string::npos);
}

TEST(StragglerDetectorTest, SmallWorldsAndSmallDelays) {
  for (const int world_size : {2, 3, 5, 8}) {
    for (const int slow : {0, world_size - 1}) {
      Job job(world_size, 0.02);
      job.Run(kSteps, Delay({slow}, StepPhase::kBackward, 1200));
      const StragglerReport report = job.detector.Recent();
      for (int rank = 0; rank < world_size; ++rank)
        EXPECT_EQ(report.ranks[rank].is_straggler, rank == slow) << world_size << " " << rank;
      EXPECT_EQ(report.ranks[slow].phase, StepPhase::kBackward);
    }
  }
}

TEST(StragglerDetectorTest, EqualStragglersShareTheCost) {
  Job job(8);
  job.Run(kSteps, Delay({5, 7}, StepPhase::kOptimizer, 5000));
  EXPECT_EQ(job.detector.Recent().Stragglers(),
            "ranks 5,7 cost the group 19 % of the last 500 steps: optimizer");
}

TEST(StragglerDetectorTest, TwoCausesAreTwoParts) {
  Job job(4);
  job.Run(kSteps, [](int, int rank, PhaseTimes& times) {
    if (rank == 1) times.busy(StepPhase::kInput) += 6000;
    if (rank == 2) times.busy(StepPhase::kSaving) += 6000;
  });
  const std::string text = job.detector.Recent().Stragglers();
  EXPECT_NE(text.find("rank 1 cost"), std::string::npos) << text;
  EXPECT_NE(text.find(": input; rank 2 cost"), std::string::npos) << text;
}

TEST(StragglerDetectorTest, NoiseAccusesNoRank) {
  for (const int world_size : {1, 2, 3, 8}) {
    for (const double noise : {0.01, 0.1, 0.5}) {
      Job job(world_size, noise);
      job.Run(100'000);
      EXPECT_FALSE(job.detector.TakeNews()) << world_size << " " << noise;  // After any block.
    }
  }
}

TEST(StragglerDetectorTest, OneHiccupMakesNoStraggler) {
  Job job(4);
  job.Run(kSteps, [](int step, int rank, PhaseTimes& times) {
    if (rank == 2 && step == 300) times.busy(StepPhase::kOutside) += 10'000'000;
  });
  const StragglerReport report = job.detector.Recent();
  EXPECT_GT(report.ranks[2].cost, 0.4);
  EXPECT_EQ(report.Stragglers(), "");
}

// Other programs take a core, or a host's memory, for that long, and not for good.
TEST(StragglerDetectorTest, DelaysOfAFewSecondsMakeNoStraggler) {
  Job job(2);
  int delayed_steps = 750;  // For 4 s.
  const auto disturb = [&](int step, int rank, PhaseTimes& times) {
    for (const StepPhase phase : {StepPhase::kForward, StepPhase::kBackward})
      times.busy(phase) /= 5;  // Steps of 5 ms.
    if (step % 15'000 < delayed_steps && rank == 1) times.busy(StepPhase::kForward) += 800;
  };
  job.Run(30'000, disturb);
  EXPECT_FALSE(job.detector.TakeNews()) << job.detector.Recent().Stragglers();
  EXPECT_NEAR(job.detector.Recent().steps, 2000, 250);  // 10 s.
  delayed_steps = 1500;                                 // For 9 s.
  job.Run(15'000, disturb);
  EXPECT_TRUE(job.detector.TakeNews());
}

// A core may wake its processes late for minutes.
TEST(StragglerDetectorTest, LateWakeUpsInShortStepsMakeNoStraggler) {
  Job job(3, 0.02);
  int64_t late_us = 90;
  const auto disturb = [&](int, int rank, PhaseTimes& times) {
    for (const StepPhase phase : {StepPhase::kForward, StepPhase::kBackward})
      times.busy(phase) /= 20;  // Steps of 1 ms.
    if (rank == 1) times.busy(StepPhase::kForward) += late_us;
  };
  job.Run(30'000, disturb);
  EXPECT_GT(job.detector.Recent().ranks[1].cost, 0.03);
  EXPECT_FALSE(job.detector.TakeNews()) << job.detector.Recent().Stragglers();
  late_us = 150;
  job.Run(30'000, disturb);
  EXPECT_TRUE(job.detector.TakeNews());
}

TEST(StragglerDetectorTest, ARankThatSavesAtIntervalsIsAStraggler) {
  Job job(4);
  job.Run(kSteps, [](int step, int rank, PhaseTimes& times) {
    if (rank == 0 && step % 40 == 39) times.busy(StepPhase::kSaving) += 80'000;
  });
  EXPECT_EQ(job.detector.Recent().Stragglers(),
            "rank 0 cost the group 9 % of the last 500 steps: saving");
}

TEST(StragglerDetectorTest, NewsComesOnceForEachCause) {
  Job job(4);
  job.Run(kSteps);
  EXPECT_FALSE(job.detector.TakeNews());
  job.Run(kSteps, Delay({1}, StepPhase::kInput, 4000));
  EXPECT_TRUE(job.detector.TakeNews());
  job.Run(5 * kSteps, Delay({1}, StepPhase::kInput, 4000));
  EXPECT_FALSE(job.detector.TakeNews());
  job.Run(kSteps, Delay({1}, StepPhase::kForward, 4000));
  EXPECT_TRUE(job.detector.TakeNews());
  job.Run(kSteps);
  EXPECT_FALSE(job.detector.TakeNews());
  job.Run(kSteps, Delay({1}, StepPhase::kForward, 4000));
  EXPECT_TRUE(job.detector.TakeNews());
}

TEST(StragglerDetectorTest, LongStepsNeedFewer) {
  Job job(2);
  job.Run(70, [](int, int rank, PhaseTimes& times) {
    times.busy(StepPhase::kForward) *= 500;
    times.busy(StepPhase::kBackward) *= 500;
    if (rank == 1) times.busy(StepPhase::kInput) += 1'000'000;
  });
  EXPECT_EQ(job.detector.Recent().Stragglers(),
            "rank 1 cost the group 9 % of the last 60 steps: input");
}

TEST(StragglerDetectorTest, ExhaustedRanksAreNotCompared) {
  StragglerDetector detector(3);
  std::mt19937_64 random(3);
  for (int step = 0; step < 2000; ++step) {
    std::vector<RankTimes> ranks(3);
    for (int rank = 0; rank < 3; ++rank) {
      const bool had_input = rank < 2 || step < 1500;
      ranks[rank].is_exhausted = rank == 2 && step >= 1499;
      if (!had_input) continue;
      const auto busy = static_cast<int64_t>(13'000 + random() % 6500);
      ranks[rank].times.emplace().busy(StepPhase::kForward) = busy;
      ranks[rank].times->waited_us = 20'800 - busy;
    }
    detector.Add(ranks);
    EXPECT_FALSE(detector.TakeNews());
  }
  const StragglerReport all = detector.All();
  EXPECT_EQ(all.steps, 2000);
  EXPECT_EQ(all.RanksWithoutInput(),
            "rank 2 had no input for 25 % of the time of 2000 measured steps");
  EXPECT_NEAR(all.ranks[2].mean.busy(StepPhase::kForward), 16'250, 260);
}

// A loop's first step has no times. In the others a rank may have had no input at all.
TEST(StragglerDetectorTest, AFewStepsAreNotAllOfTheTime) {
  for (const int measured : {1, 9, 10}) {
    StragglerDetector detector(2);
    std::vector<RankTimes> ranks(2);
    ranks[1].is_exhausted = true;
    detector.Add(ranks);
    ranks[0].times.emplace().busy(StepPhase::kForward) = 1000;
    for (int step = 0; step < measured; ++step) detector.Add(ranks);
    EXPECT_EQ(detector.All().steps, measured);
    EXPECT_EQ(
        detector.All().RanksWithoutInput(),
        measured < 10 ? "" : "rank 1 had no input for 100 % of the time of 10 measured steps");
  }
}

TEST(StragglerDetectorTest, StepsWithoutTimesOfAllRanksDoNotCount) {
  StragglerDetector detector(2);
  std::vector<RankTimes> ranks(2);
  detector.Add(ranks);
  ranks[0].times.emplace().busy(StepPhase::kInput) = 1000;
  detector.Add(ranks);
  EXPECT_EQ(detector.All().steps, 0);
  ranks[1].times.emplace();
  detector.Add(ranks);
  EXPECT_EQ(detector.All().steps, 1);
}

}  // namespace
}  // namespace evenkeel
