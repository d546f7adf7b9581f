// Parameters whose gradients travel last, and not before another's has been announced.

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8, 2};

class DelayedParametersTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(world(), body);
    EXPECT_TRUE(status.ok()) << status;
  }
  DataParallelOptions Options(std::vector<std::string> delayed, std::string until) const {
    return {.reducer = {.caps = {Bytes{8}, Bytes{24}},
                        .gradient_as_bucket_view = std::get<1>(GetParam()),
                        .delayed = std::move(delayed),
                        .delay_until = std::move(until)}};
  }
};

absl::Status TrainStep(DataParallel& ddp, ToyModel& model, absl::Span<const int> order, int rank,
                       int step) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  for (int p : order) {
    EK_RETURN_IF_ERROR(
        model.BackwardOf(p, rank, step, [&](int param) { return ddp.GradientReady(param); }));
  }
  return ddp.FinishStep();
}

std::vector<std::vector<float>> Gradients(ToyModel& model) {
  std::vector<std::vector<float>> gradients;
  for (int p = 0; p < model.params().size(); ++p) {
    const bool is_none =
        model.params().grad_state(p) == GradState::kNone;  // Then its memory says nothing.
    gradients.push_back(is_none ? std::vector<float>() : model.Gradient(p));
  }
  return gradients;
}

// The same gradients as without, through rebuild and freezing of some, of the trigger, and of all.
TEST_P(DelayedParametersTest, GradientsAreTheSameAndTheirBucketsLast) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), plain(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options({"p4", "p2"}, "p0")));
    EK_ASSIGN_OR_RETURN(auto reference,
                        DataParallel::Create(&comm, &plain.params(), {}, Options({}, "")));
    const auto step = [&](int number) -> absl::Status {
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, {4, 3, 2, 1, 0}, comm.rank(), number));
      EK_RETURN_IF_ERROR(TrainStep(*reference, plain, {4, 3, 2, 1, 0}, comm.rank(), number));
      EXPECT_THAT(Gradients(model), SameSums(Gradients(plain))) << "step " << number;
      return absl::OkStatus();
    };
    const auto freeze = [&](int param, bool frozen) {
      model.params().SetTrainable(param, !frozen);
      plain.params().SetTrainable(param, !frozen);
    };
    const auto buckets = [&] { return ddp->reducer().plan().buckets; };
    EK_RETURN_IF_ERROR(step(0));
    EXPECT_THAT(buckets(), ElementsAre(ElementsAre(3, 1, 0), ElementsAre(4, 2)));
    EK_RETURN_IF_ERROR(step(1));
    EXPECT_THAT(buckets(), ElementsAre(ElementsAre(3), ElementsAre(1, 0), ElementsAre(4, 2)));
    freeze(4, true);
    EK_RETURN_IF_ERROR(step(2));
    EXPECT_THAT(buckets().back(), ElementsAre(2));
    freeze(0, true);
    EK_RETURN_IF_ERROR(step(3));
    EXPECT_THAT(buckets().back(), ElementsAre(2));
    freeze(2, true);
    EK_RETURN_IF_ERROR(step(4));
    freeze(4, false);
    freeze(0, false);
    EK_RETURN_IF_ERROR(step(5));
    EXPECT_THAT(buckets().back(), ElementsAre(4));
    // Another's plan brings no other idea of what is delayed.
    EXPECT_TRUE(PlanState::Parse(ddp->reducer().plan_state().Serialize(), 5).ok());
    return absl::OkStatus();
  });
}

// With buffers a step begins with the ranks' agreement, so the gate is open: a bucket that is not
// held leaves at once.
TEST_P(DelayedParametersTest, NoneLeavesBeforeTheOneTheyWaitFor) {
  Run([&](Communicator& comm) -> absl::Status {
    std::vector<float> a(2), da(2), b(3), db(3);
    std::vector<double> c(2), dc(2);
    ParameterSet params;
    params.Add("a", absl::MakeSpan(a), absl::MakeSpan(da));
    params.Add("b", absl::MakeSpan(b), absl::MakeSpan(db));
    params.Add("c", absl::MakeSpan(c), absl::MakeSpan(dc));
    std::vector<float> buffer(1);
    const std::vector<TensorView> buffers = {TensorView(absl::MakeSpan(buffer))};
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &params, buffers, Options({"a", "b", "c"}, "c")));
    for (int step = 0; step < 4; ++step) {
      if (step == 3) params.SetTrainable(2, false);
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int param : {0, 1, 2}) {
        if (!params.trainable(param)) continue;
        params.SetGradState(param, GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(param));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      const std::vector<BucketTimes>& times = ddp->reducer().last_step().buckets;
      // The first bucket of all, though complete with the second gradient, waited for the third.
      EXPECT_EQ(times[0].gradients_at_launch, step == 3 ? 2 : 3) << "step " << step;
      EXPECT_EQ(times.size(), step == 3 ? 1u : 2u);
    }
    return absl::OkStatus();
  });
}

TEST_P(DelayedParametersTest, AnUnusedOneToWaitForIsAnnouncedAsSuch) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    DataParallelOptions options = Options({"p3", "p0"}, "p0");
    options.reducer.find_unused = true;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options));
    for (int step = 0; step < 3; ++step) {
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, {4, 3, 2, 1}, comm.rank(), step));
      EXPECT_EQ(model.params().grad_state(3), GradState::kReduced);
      EXPECT_EQ(model.params().grad_state(0), GradState::kNone);
    }
    return absl::OkStatus();
  });
}

TEST_P(DelayedParametersTest, RanksThatRanDryReduceThemLastToo) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options({"p4"}, "p0")));
    ddp->SetOptimizerState({});
    return RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 2 + comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, {4, 3, 2, 1, 0}, comm.rank(), step));
      }
      return absl::OkStatus();
    });
  });
}

TEST_P(DelayedParametersTest, BothAreGivenOrNeitherAndTheyMustBeThere) {
  struct Case {
    std::vector<std::string> delayed;
    std::string until;
    std::string message;
  };
  const Case cases[] = {
      {{"p1"},
       "",
       "`delayed` and `delay_until` need each other: got 1 delayed parameters, and they wait for "
       "\"\""},
      {{},
       "p1",
       "`delayed` and `delay_until` need each other: got 0 delayed parameters, and they wait for "
       "\"p1\""},
      {{"p1", "q"}, "p0", "`delayed`: \"q\" is not a parameter"},
      {{"p1"}, "q", "`delay_until`: \"q\" is not a parameter"},
      {{"p2"}, "p1", "`delayed`: \"p2\" is an ignored parameter"},
      {{"p1"}, "p2", "`delay_until`: \"p2\" is an ignored parameter"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    Run([&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes);
      EK_RETURN_IF_ERROR(model.params().Ignore(2));
      const absl::Status made =
          DataParallel::Create(&comm, &model.params(), {}, Options(c.delayed, c.until)).status();
      EXPECT_EQ(made.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(made.message()), HasSubstr(c.message));
      return absl::OkStatus();
    });
  }
}

TEST_P(DelayedParametersTest, RanksThatDelayDifferentOnesLearnIt) {
  if (world() == 1) return;
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    const bool is_last = comm.rank() == world() - 1;
    const absl::Status made =
        DataParallel::Create(&comm, &model.params(), {}, Options({is_last ? "p1" : "p2"}, "p0"))
            .status();
    EXPECT_THAT(std::string(made.message()),
                HasSubstr(LastRankDiffers(world(), "the list of delayed parameters",
                                          "{p2} until \"p0\"", "{p1} until \"p0\"")));
    return comm.Barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, DelayedParametersTest,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Bool()));

}  // namespace
}  // namespace evenkeel
