#include "evenkeel/join/abi/step_monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "evenkeel/comm/testing/shared_store.h"

namespace evenkeel::abi {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// Runs ranks as threads, each with a monitor; leaves the group at the end of `body`.
void RunRanks(int world_size, const std::function<void(StepMonitor&)>& body) {
  SharedStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Failure failure;
      const std::unique_ptr<StepMonitor> monitor = CreateStepMonitor(
          store, {.rank = rank, .world_size = world_size, .name = "watch"}, &failure);
      ASSERT_NE(monitor, nullptr) << failure.message;
      body(*monitor);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// All threads wait here for the last one, as ranks do for a reduction.
class Barrier {
 public:
  explicit Barrier(int parties) : parties_(parties) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++arrived_ == parties_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
  }

 private:
  const int parties_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  int round_ = 0;
};

void Step(StepMonitor& monitor, Barrier& reduction, milliseconds input) {
  const Phase before = monitor.Enter(Phase::kInput);
  std::this_thread::sleep_for(input);
  monitor.Enter(before);
  monitor.Enter(Phase::kForward);
  std::this_thread::sleep_for(milliseconds(1));
  monitor.BeginBackward();
  std::this_thread::sleep_for(milliseconds(1));
  monitor.BeginWait();
  reduction.Wait();
  monitor.EndWait();
  monitor.EndReduction();
}

// Waits, for seconds at most, until `done`.
void Await(const std::function<bool()>& done) {
  for (int i = 0; i < 1000 && !done(); ++i) std::this_thread::sleep_for(milliseconds(10));
}

TEST(StepMonitorTest, NamesTheRankThatMakesTheOthersWait) {
  for (const int world_size : {2, 5}) {
    Barrier reduction(world_size);
    RunRanks(world_size, [&](StepMonitor& monitor) {
      const bool is_slow = monitor.rank() == 1;
      for (int i = 0; i < 560; ++i) Step(monitor, reduction, milliseconds(is_slow ? 18 : 0));
      EXPECT_EQ(monitor.steps(), 560);
      Await([&] { return !monitor.Stragglers().empty(); });
      const std::vector<StepMonitor::Straggler> stragglers = monitor.Stragglers();
      ASSERT_EQ(stragglers.size(), 1u) << monitor.Table();
      EXPECT_EQ(stragglers[0].rank, 1);
      EXPECT_EQ(stragglers[0].phase, Phase::kInput);
      EXPECT_GT(stragglers[0].cost, 0.3);
      EXPECT_THAT(monitor.TakeNews(),
                  AllOf(HasSubstr("rank 1 cost the group"), HasSubstr("steps: input")));
      EXPECT_EQ(monitor.TakeNews(), "");
      monitor.Leave();
    });
  }
}

// The mean input of rank 1 by a table, in milliseconds.
double InputOfRank1(const std::string& table) {
  std::istringstream line(table.substr(table.rfind('\n', table.size() - 2) + 1));
  int rank = -1;
  std::string cost, percent;
  double outside = 0, input = 0;
  line >> rank >> cost >> percent >> outside >> input;
  EXPECT_EQ(rank, 1) << table;
  return input;
}

TEST(StepMonitorTest, TheLastStepsReachTheOthersBeforeARankLeaves) {
  Barrier reduction(2);
  RunRanks(2, [&](StepMonitor& monitor) {
    // All within the time of one message, the first of which was sent before the slow step.
    for (int i = 0; i < 11; ++i)
      Step(monitor, reduction, milliseconds(i == 2 && monitor.rank() == 1 ? 200 : 0));
    if (monitor.rank() == 1) return monitor.Leave();
    Await([&] { return InputOfRank1(monitor.Table()) > 15; });
    EXPECT_GT(InputOfRank1(monitor.Table()), 15);
    monitor.Leave();
    EXPECT_EQ(monitor.failure().code, Code::kFailedPrecondition);
    monitor.EndReduction();  // Nothing happens.
    monitor.Tell("no rank receives it");
  });
}

TEST(StepMonitorTest, TextsArriveInOrder) {
  RunRanks(3, [&](StepMonitor& monitor) {
    if (monitor.rank() != 0) {
      monitor.Tell("a");
      monitor.Tell("b");
    } else {
      std::vector<std::string> texts[3];
      Await([&] {
        for (const StepMonitor::Message& message : monitor.TakeMessages())
          texts[message.from].push_back(message.text);
        return texts[1].size() + texts[2].size() == 4;
      });
      EXPECT_THAT(texts[0], IsEmpty());
      EXPECT_THAT(texts[1], ElementsAre("a", "b"));
      EXPECT_THAT(texts[2], ElementsAre("a", "b"));
    }
    monitor.Leave();
  });
}

TEST(StepMonitorTest, ARankThatAbortsIsNamed) {
  RunRanks(2, [&](StepMonitor& monitor) {
    if (monitor.rank() == 1) return monitor.Abort("the loop raised an exception");
    Await([&] { return monitor.failure().code != Code::kOk; });
    EXPECT_THAT(monitor.failure().ranks, ElementsAre(1));
    EXPECT_THAT(monitor.failure().message, HasSubstr("the loop raised an exception"));
    monitor.Leave();
  });
}

// A step whose forward pass takes that long.
void Compute(StepMonitor& monitor, Barrier& reduction, milliseconds forward) {
  monitor.Enter(Phase::kForward);
  std::this_thread::sleep_for(forward);
  monitor.BeginBackward();
  monitor.BeginWait();
  reduction.Wait();
  monitor.EndWait();
  monitor.EndReduction();
}

TEST(StepMonitorTest, DividesBatchesBySpeed) {
  constexpr int kRanks = 3;
  constexpr int64_t kLag = 4, kSteps = 120;
  constexpr auto kTimes = StepMonitor::kTimesPerRank;
  Barrier reduction(kRanks), exchange(kRanks);
  std::vector<int64_t> times[2];  // Of all ranks, in even steps and in odd ones.
  for (std::vector<int64_t>& of_step : times) of_step.resize(kRanks * kTimes);
  std::vector<std::vector<int64_t>> divisions[kRanks];
  RunRanks(kRanks, [&](StepMonitor& monitor) {
    Compute(monitor, reduction, milliseconds(1));
    const std::vector<int64_t> zeros(kRanks);
    ASSERT_EQ(monitor.BeginSharing({.batch = 24, .least = zeros, .most = zeros, .lag = kLag}).code,
              Code::kOk);
    for (int64_t step = 2; step < kSteps + kLag; ++step) {
      std::vector<int64_t> boundaries;
      Failure failure = monitor.Divide(step, 24, &boundaries);
      ASSERT_EQ(failure.code, Code::kOk) << failure.message;
      std::vector<std::vector<int64_t>>& own = divisions[monitor.rank()];
      own.push_back(boundaries);
      if (step < kLag) continue;  // Batches are loaded in advance.
      const std::vector<int64_t>& trained = own[step - kLag];
      const int64_t samples = trained[monitor.rank() + 1] - trained[monitor.rank()];
      if (const std::vector<int64_t> mine = monitor.LastTimes(); !mine.empty()) {
        std::vector<int64_t>& of_all = times[step % 2];
        std::ranges::copy(mine, of_all.begin() + monitor.rank() * kTimes);
        exchange.Wait();
        failure = monitor.AddTimes(monitor.steps(), of_all);
        ASSERT_EQ(failure.code, Code::kOk) << failure.message;
      }
      Compute(monitor, reduction, milliseconds((monitor.rank() == 1 ? 3 : 1) * samples));
    }
    Await([&] { return !monitor.TakeShareNews().empty(); });
    EXPECT_LT(monitor.Shares()[1], 6) << testing::PrintToString(monitor.Shares());
    EXPECT_THAT(monitor.Table(), HasSubstr("samples"));
    monitor.Leave();
  });
  EXPECT_EQ(divisions[0], divisions[1]);
  EXPECT_EQ(divisions[0], divisions[2]);
}

TEST(StepMonitorTest, RefusesToDivideWhatItCannot) {
  RunRanks(3, [&](StepMonitor& monitor) {
    const auto divide = [&](int64_t step, int64_t samples) {
      std::vector<int64_t> boundaries;
      return monitor.Divide(step, samples, &boundaries);
    };
    const std::vector<int64_t> nothing(3 * StepMonitor::kTimesPerRank);
    EXPECT_EQ(divide(1, 16).code, Code::kFailedPrecondition);
    EXPECT_EQ(monitor.AddTimes(1, nothing).code, Code::kFailedPrecondition);
    const std::vector<int64_t> zeros = {0, 0, 0};
    for (const StepMonitor::Sharing& wrong :
         {StepMonitor::Sharing{.batch = 1, .least = zeros, .most = zeros},
          StepMonitor::Sharing{.batch = 16, .quantum = -1, .least = zeros, .most = zeros},
          StepMonitor::Sharing{.batch = 16, .least = {0}, .most = zeros},
          StepMonitor::Sharing{.batch = 16, .least = {0, 9, 0}, .most = zeros},
          StepMonitor::Sharing{.batch = 16, .least = zeros, .most = zeros, .lag = 1}}) {
      EXPECT_EQ(monitor.BeginSharing(wrong).code, Code::kInvalidArgument);
    }
    ASSERT_EQ(monitor.BeginSharing({.batch = 16, .least = zeros, .most = zeros}).code, Code::kOk);
    EXPECT_EQ(divide(1, 0).code, Code::kInvalidArgument);
    EXPECT_EQ(divide(1, 17).code, Code::kInvalidArgument);
    EXPECT_EQ(divide(3, 16).code, Code::kOk);
    const Failure ahead = divide(4, 16);
    EXPECT_EQ(ahead.code, Code::kInvalidArgument);
    EXPECT_THAT(ahead.message, HasSubstr("use the times of step 2, and this rank has ended 0"));
    std::vector<int64_t> negative = nothing;
    negative.back() = -1;
    for (const std::vector<int64_t>& wrong : {std::vector<int64_t>(5), negative})
      EXPECT_EQ(monitor.AddTimes(2, wrong).code, Code::kInvalidArgument);
    EXPECT_THAT(monitor.LastTimes(), IsEmpty());
    monitor.EndReduction();
    EXPECT_THAT(monitor.LastTimes(), IsEmpty());  // No reduction came before.
    monitor.EndReduction();
    EXPECT_THAT(monitor.LastTimes(), SizeIs(StepMonitor::kTimesPerRank));
    EXPECT_EQ(divide(4, 16).code, Code::kInvalidArgument);
    EXPECT_EQ(monitor.AddTimes(2, nothing).code, Code::kOk);
    EXPECT_EQ(divide(4, 16).code, Code::kOk);
    monitor.Leave();
  });
}

TEST(StepMonitorTest, OneRankWaitsForNoOther) {
  Barrier reduction(1);
  RunRanks(1, [&](StepMonitor& monitor) {
    for (int i = 0; i < 30; ++i) Step(monitor, reduction, milliseconds(1));
    EXPECT_THAT(monitor.Stragglers(), IsEmpty());
    EXPECT_EQ(monitor.TakeNews(), "");
    monitor.Leave();
  });
}

}  // namespace
}  // namespace evenkeel::abi
