// Backward may have several threads: what they announce at once is reduced to the bits that one
// thread's announcements give.

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kThreads = 4;
constexpr int kSteps = 8;
const std::vector<int> kSizes = {40, 7, 300, 1, 64, 64, 129, 5, 33, 210, 2, 90, 11};

struct Scenario {
  ReducerOptions reducer;
  bool lacks_some = false;  // Some ranks announce that they have no gradient of some parameters.
  int announcements = 1;    // Per parameter and step.
};

// By step and parameter, the gradients of rank 0.
using History = std::vector<std::vector<std::vector<float>>>;

absl::Status Announce(ToyModel& model, DataParallel& ddp, const Scenario& scenario, int param,
                      int rank, int step) {
  if (scenario.lacks_some && (param + rank + step) % 3 == 0) return ddp.NoGradient(param);
  for (int i = 0; i < scenario.announcements; ++i) {
    EK_RETURN_IF_ERROR(model.BackwardOf(param, rank, 10 * step + i,
                                        [&](int ready) { return ddp.GradientReady(ready); }));
  }
  return absl::OkStatus();
}

// Each parameter is announced by one of the threads, in an order of the step's and the rank's own.
absl::Status Backward(ToyModel& model, DataParallel& ddp, const Scenario& scenario, int threads,
                      int rank, int step) {
  std::vector<int> params(kSizes.size());
  std::iota(params.begin(), params.end(), 0);
  std::shuffle(params.begin(), params.end(), std::mt19937(1000 * rank + step));
  std::vector<absl::Status> results(threads);
  const auto run = [&](int thread) {
    for (size_t i = thread; i < params.size(); i += threads)
      results[thread].Update(Announce(model, ddp, scenario, params[i], rank, step));
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
  for (const absl::Status& result : results) EK_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::StatusOr<History> Train(const Scenario& scenario, int threads, int world_size) {
  History history;
  EK_RETURN_IF_ERROR(RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), {}, {.reducer = scenario.reducer}));
    for (int step = 0; step < kSteps; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(Backward(model, *ddp, scenario, threads, comm.rank(), step));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      if (comm.rank() != 0) continue;
      auto& gradients = history.emplace_back();
      for (size_t param = 0; param < kSizes.size(); ++param) {
        const bool is_there = model.params().grad_state(param) != GradState::kNone;
        gradients.push_back(is_there ? model.Gradient(param) : std::vector<float>());
      }
    }
    EXPECT_EQ(ddp->reducer().last_step().gradients, static_cast<int>(kSizes.size()));
    return absl::OkStatus();
  }));
  return history;
}

void ExpectTheBitsOfOneThread(const Scenario& scenario) {
  for (const int world_size : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat("world size ", world_size));
    const absl::StatusOr<History> one = Train(scenario, 1, world_size);
    const absl::StatusOr<History> several = Train(scenario, kThreads, world_size);
    ASSERT_TRUE(one.ok()) << one.status();
    ASSERT_TRUE(several.ok()) << several.status();
    EXPECT_EQ(*one, *several);
  }
}

const std::vector<Bytes> kSmallCaps = {Bytes{512}};

TEST(AnnouncingThreadsTest, GiveTheBitsOfOneThread) {
  for (const bool has_views : {false, true}) {
    SCOPED_TRACE(has_views ? "views" : "copies");
    ExpectTheBitsOfOneThread({{.caps = kSmallCaps, .gradient_as_bucket_view = has_views}});
  }
}

TEST(AnnouncingThreadsTest, MayLackGradientsAndSkipBuckets) {
  ExpectTheBitsOfOneThread(
      {.reducer = {.caps = kSmallCaps, .find_unused = true}, .lacks_some = true});
  ExpectTheBitsOfOneThread(
      {.reducer = {.caps = kSmallCaps, .skip_unused_buckets = true}, .lacks_some = true});
}

TEST(AnnouncingThreadsTest, MayDelayParameters) {
  ExpectTheBitsOfOneThread(
      {{.caps = kSmallCaps, .delayed = {"p1", "p4", "p9"}, .delay_until = "p6"}});
}

TEST(AnnouncingThreadsTest, CountTheAnnouncementsOfAStaticGraph) {
  ExpectTheBitsOfOneThread(
      {.reducer = {.caps = kSmallCaps, .static_graph = true}, .announcements = 2});
}

TEST(AnnouncingThreadsTest, ASecondAnnouncementIsRefusedOnceWhoeverComesFirst) {
  const absl::Status status = RunRanks(1, [](Communicator& comm) -> absl::Status {
    ToyModel model({3, 4});
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    for (int param : {0, 1}) model.params().SetGradState(param, GradState::kLocal);
    EK_RETURN_IF_ERROR(ddp->GradientReady(1));
    std::vector<absl::Status> results(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
      threads.emplace_back([&, i] { results[i] = ddp->GradientReady(0); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(std::ranges::count(results, absl::OkStatus()), 1);
    return ddp->FinishStep();
  });
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("\"p0\" (0) announced twice"));
}

}  // namespace
}  // namespace evenkeel
