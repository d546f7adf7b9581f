#include "evenkeel/bucket/data_parallel.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8, 2};
const std::vector<Bytes> kSmallCaps = {Bytes{8}, Bytes{24}};

DataParallelOptions Options(bool views = false) {
  return {.reducer = {.caps = kSmallCaps, .gradient_as_bucket_view = views}};
}

auto Announcer(DataParallel& ddp) {
  return [&ddp](int param) { return ddp.GradientReady(param); };
}

// One step of plain gradient descent, as a user's loop has it.
absl::Status TrainStep(DataParallel& ddp, ToyModel& model, int rank, int batch) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  model.Forward(rank, batch);
  EK_RETURN_IF_ERROR(model.Backward(rank, batch, Announcer(ddp)));
  return ddp.FinishStep();
}

void Descend(ToyModel& model) {
  for (int p = 0; p < model.params().size(); ++p) {
    if (model.params().grad_state(p) == GradState::kNone) continue;
    float* value = static_cast<float*>(model.params()[p].value.data);
    const float* grad = static_cast<const float*>(model.params()[p].grad.data);
    for (int64_t j = 0; j < model.params()[p].value.count; ++j) value[j] -= 0.5f * grad[j];
  }
}

class DataParallelTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  bool views() const { return std::get<1>(GetParam()); }
  // Runs `body(comm)` on every rank and expects OK.
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(world(), body);
    EXPECT_TRUE(status.ok()) << status;
  }
};

TEST_P(DataParallelTest, GradientsAreTheSumInRankOrderTimesOneOverWorld) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    for (int step = 0; step < 4; ++step) {  // Before and after the rebuild.
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
      for (size_t p = 0; p < kSizes.size(); ++p) {
        EXPECT_EQ(model.params().grad_state(p), GradState::kReduced);
        std::vector<testing::Matcher<float>> expected;
        for (int j = 0; j < kSizes[p]; ++j) {
          // No descent here: weights are the initial ones; buffers follow each rank's own.
          float sum = 0;
          for (int r = 0; r < comm.world_size(); ++r) {
            ToyModel replica(kSizes);
            for (int s = 0; s <= step; ++s) replica.Forward(r, s);
            const float gradient = replica.GradientAt(p, j, r, step);
            sum = r == 0 ? gradient : sum + gradient;
          }
          expected.push_back(SameSum(sum * (1.0f / comm.world_size())));
        }
        EXPECT_THAT(model.Gradient(p), testing::ElementsAreArray(expected)) << "p" << p;
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, StartsFromRankZerosState) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes, /*seed=*/comm.rank()), first(kSizes, 0);
    model.buffer()[0] = comm.rank();
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), model.buffers(), Options(views())));
    EXPECT_EQ(model.values(), first.values());
    EXPECT_EQ(model.buffer()[0], 0.0f);
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, AdoptsTheOrderInWhichGradientsArrived) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    EXPECT_THAT(ddp->reducer().plan().buckets, ElementsAre(ElementsAre(4, 3, 2, 1, 0)));
    const std::vector<int> arrival = {1, 3, 0, 4, 2};
    for (int step = 0; step < 3; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int p : arrival)
        EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), step, Announcer(*ddp)));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
    }
    EXPECT_EQ(ddp->reducer().generation(), 1u);
    EXPECT_THAT(ddp->reducer().plan().buckets,
                ElementsAre(ElementsAre(1), ElementsAre(3), ElementsAre(0, 4, 2)));
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, ARankZeroWithoutInputsDoesNotSpoilTheOrder) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    ddp->SetOptimizerState({});
    const int steps = comm.rank() == 0 && comm.world_size() > 1 ? 0 : 3;
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < steps; ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        for (int p : {1, 3, 0, 4, 2})
          EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), step, Announcer(*ddp)));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
      }
      return absl::OkStatus();
    }));
    EXPECT_THAT(ddp->reducer().plan_state().order, ElementsAre(1, 3, 0, 4, 2))
        << "rank " << comm.rank();
    EXPECT_EQ(ddp->reducer().plan().buckets.size(), 3u);
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, AccumulatedGradientsAreReducedOnce) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    for (int round = 0; round < 2; ++round) {
      model.params().ClearGradients();
      for (int batch = 0; batch < 3; ++batch) {
        EK_RETURN_IF_ERROR(ddp->BeginStep(batch < 2 ? StepMode::kAccumulate : StepMode::kSync));
        EK_RETURN_IF_ERROR(model.Backward(comm.rank(), batch, Announcer(*ddp)));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
      }
      for (size_t p = 0; p < kSizes.size(); ++p) {
        const std::vector<float> reduced = model.Gradient(p);
        for (int j = 0; j < kSizes[p]; ++j) {
          double expected = 0;
          for (int r = 0; r < comm.world_size(); ++r) {
            for (int batch = 0; batch < 3; ++batch) expected += model.GradientAt(p, j, r, batch);
          }
          EXPECT_NEAR(reduced[j], expected / comm.world_size(), 1e-5);
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, BuffersFollowRankZeroAndSkipTheStepAfterAnAccumulatingOne) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), first(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), model.buffers(), Options(views())));
    EXPECT_TRUE(ddp->WillSyncBuffers());
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
    first.Forward(0, 0);
    EXPECT_TRUE(ddp->WillSyncBuffers());
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep(StepMode::kAccumulate));
    EXPECT_EQ(model.buffer(), first.buffer());
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EXPECT_FALSE(ddp->WillSyncBuffers());
    model.buffer()[0] = 5.0f + comm.rank();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    EXPECT_EQ(model.buffer()[0], 5.0f + comm.rank());
    EK_RETURN_IF_ERROR(model.Backward(comm.rank(), 1, Announcer(*ddp)));
    return ddp->FinishStep();
  });
}

TEST_P(DataParallelTest, FreezingAndUnfreezingMakesNewPlansAndKeepsContents) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    ParameterSet& params = model.params();
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}, Options(views())));
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
    const std::vector<float> kept = model.Gradient(3);
    params.SetTrainable("p1", false);
    EK_RETURN_IF_ERROR(
        ddp->BeginStep());  // Replans; reduced gradients of other parameters move along.
    EXPECT_EQ(model.Gradient(3), kept);
    EXPECT_EQ(ddp->reducer().plan_state().mask[1], false);
    params.ClearGradients();
    EK_RETURN_IF_ERROR(model.Backward(comm.rank(), 1, Announcer(*ddp)));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EXPECT_EQ(params.grad_state(1), GradState::kNone);
    EXPECT_EQ(params.grad_state(0), GradState::kReduced);
    params.SetTrainable("p1", true);
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 2));
    EXPECT_EQ(params.grad_state(1), GradState::kReduced);
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 3));
    EXPECT_TRUE(ddp->reducer().plan_state().order_final);
    const uint64_t generation = ddp->reducer().generation();
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 4));
    EXPECT_EQ(ddp->reducer().generation(), generation);  // Nothing changed, nothing is planned.
    params.SetTrainable("p", false);                     // Everything.
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 5));
    EXPECT_TRUE(ddp->buckets().empty());
    params.SetTrainable("p", true);
    return TrainStep(*ddp, model, comm.rank(), 6);
  });
}

TEST_P(DataParallelTest, RefusesToLoseAnAccumulatedGradient) {
  absl::Status status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    EK_RETURN_IF_ERROR(ddp->BeginStep(StepMode::kAccumulate));
    EK_RETURN_IF_ERROR(model.Backward(comm.rank(), 0, Announcer(*ddp)));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    model.params().SetTrainable("p3", false);
    return ddp->BeginStep();
  });
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("\"p3\" (3) was frozen while it holds a gradient"));
}

TEST_P(DataParallelTest, ChecksOnlyWhenTold) {
  absl::Status status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    DataParallelOptions options = Options(views());
    options.trainability.policy = TrainabilityPolicy::kNever;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options));
    model.params().SetTrainable("p1", false);
    EK_RETURN_IF_ERROR(ddp->RefreshTrainable());
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
    model.params().SetTrainable("p2", false);
    return TrainStep(*ddp, model, comm.rank(), 1);  // Not told: an error, never a wrong gradient.
  });
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"p2\" (2)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("RefreshTrainable()"));
}

TEST_P(DataParallelTest, ADryRankFollowsWhatIsTrained) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    ddp->SetOptimizerState({});
    const int last = comm.world_size() - 1;
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (comm.rank() == last ? 5 : 1); ++step) {
        if (step == 2) model.params().SetTrainable("p4", false);
        if (step == 3) model.params().SetTrainable("p0", false);
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
      }
      return absl::OkStatus();
    }));
    EXPECT_FALSE(model.params().trainable(0)) << "rank " << comm.rank();
    EXPECT_FALSE(model.params().trainable(4)) << "rank " << comm.rank();
    // And all go on together.
    return TrainStep(*ddp, model, comm.rank(), 9);
  });
}

TEST_P(DataParallelTest, DestructionLeavesGradientsWhereTheyWere) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    std::vector<void*> own;
    for (int p = 0; p < model.params().size(); ++p) own.push_back(model.params()[p].grad.data);
    std::vector<float> reduced;
    for (int life = 0; life < 2; ++life) {  // And another may take over.
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params(), {}, Options(views())));
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
      EXPECT_EQ(model.params()[1].grad.data == own[1], !views());
      reduced = model.Gradient(1);
    }
    for (int p = 0; p < model.params().size(); ++p) EXPECT_EQ(model.params()[p].grad.data, own[p]);
    EXPECT_EQ(model.Gradient(1), reduced);
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, AnAddressIsStableWithinAGenerationAndAForeignOneIsTakenBack) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views())));
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 1));
    const void* address = model.params()[3].grad.data;
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 2));
    EXPECT_EQ(model.params()[3].grad.data, address);
    model.buffer().assign(3, 1.0f);
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 2));
    model.buffer().assign(3, 1.0f);
    const std::vector<float> before = model.Gradient(3);
    // Backward writes into a tensor of its own, as some libraries do.
    std::vector<float> foreign(kSizes[3]);
    const TensorView slot = model.params()[3].grad;
    if (views()) model.params().SetGradMemory(3, absl::MakeSpan(foreign));
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 2));
    EXPECT_EQ(model.Gradient(3), before);
    EXPECT_EQ(model.params()[3].grad.data, slot.data);
    return absl::OkStatus();
  });
}

TEST_P(DataParallelTest, ReducesEachElementTypeInBucketsOfItsOwn) {
  Run([&](Communicator& comm) -> absl::Status {
    std::vector<float> a(5), da(5);
    std::vector<double> b(3), db(3);
    std::vector<BFloat16> c(4), dc(4);
    ParameterSet params;
    params.Add("a", absl::MakeSpan(a), absl::MakeSpan(da));
    params.Add("b", absl::MakeSpan(b), absl::MakeSpan(db));
    params.Add("c", absl::MakeSpan(c), absl::MakeSpan(dc));
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}, Options(views())));
    EXPECT_EQ(ddp->buckets().size(), 3u);
    for (int step = 0; step < 3; ++step) {
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      const double gradient = comm.rank() + 1;
      for (float& g : params[0].grad.as<float>()) g = static_cast<float>(gradient);
      for (double& g : params[1].grad.as<double>()) g = gradient;
      for (BFloat16& g : params[2].grad.as<BFloat16>()) g = BFloat16(static_cast<float>(gradient));
      for (int p = 0; p < 3; ++p) {
        params.SetGradState(p, GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(p));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      const double mean = (comm.world_size() + 1) / 2.0;
      EXPECT_FLOAT_EQ(params[0].grad.as<float>()[4], static_cast<float>(mean));
      EXPECT_DOUBLE_EQ(params[1].grad.as<double>()[2], mean);
      EXPECT_NEAR(static_cast<float>(params[2].grad.as<BFloat16>()[3]), mean, mean / 128);
    }
    return absl::OkStatus();
  });
}

// A reduction as a sharded optimizer may provide it: each bucket goes to one rank only, which is
// told when it arrives.
class ToOwner : public BucketReduction {
 public:
  ToOwner(const Communicator& comm, std::vector<int>* arrived)
      : rank_(comm.rank()), world_size_(comm.world_size()), arrived_(arrived) {}
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {{.kind = CollectiveKind::kReduce,
             .dtype = bucket.data.dtype,
             .count = bucket.data.count,
             .root = bucket.index % world_size_}};
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep&) override {
    if (bucket.index % world_size_ != rank_) return GradFate::kNone;
    arrived_->push_back(bucket.index);
    return GradFate::kReduced;
  }

 private:
  const int rank_;
  const int world_size_;
  std::vector<int>* const arrived_;
};

TEST_P(DataParallelTest, AReductionOfOnesOwnTakesThePlaceOfAllReduce) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    std::vector<int> arrived;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(views()),
                                                       std::make_unique<ToOwner>(comm, &arrived)));
    for (int step = 0; step < 3; ++step)
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
    for (const BucketInfo& bucket : ddp->buckets()) {
      const bool is_owner = bucket.index % comm.world_size() == comm.rank();
      for (int param : bucket.params) {
        EXPECT_EQ(model.params().grad_state(param),
                  is_owner ? GradState::kReduced : GradState::kNone);
      }
      EXPECT_EQ(
          std::count(arrived.begin() + (comm.rank() == 0 ? 1 : 0), arrived.end(), bucket.index),
          is_owner ? 2 : 0);
    }
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, DataParallelTest,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<int, bool>>& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param) ? "Views" : "Copies");
                         });

// Failures ----------------------------------------------------------------------------------------

// Runs `body` on two ranks, and answers what each of them got.
std::vector<absl::Status> OnTwoRanks(
    absl::FunctionRef<absl::Status(Communicator&, ToyModel&, DataParallel&)> body) {
  std::vector<absl::Status> results(2);
  (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), model.buffers(), Options()));
    results[comm.rank()] = body(comm, model, *ddp);
    return results[comm.rank()];
  });
  return results;
}

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) EXPECT_THAT(std::string(status.message()), HasSubstr(part));
}

TEST(DataParallelErrorsTest, AMissingGradientIsAnErrorInTheSameStepOnAllRanks) {
  const std::vector<absl::Status> results =
      OnTwoRanks([](Communicator& comm, ToyModel& model, DataParallel& ddp) -> absl::Status {
        EK_RETURN_IF_ERROR(ddp.BeginStep());
        for (int p : {4, 3, 2, 1, 0}) {
          if (comm.rank() == 1 && (p == 2 || p == 0)) continue;
          EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), 0, Announcer(ddp)));
        }
        return ddp.FinishStep();
      });
  ExpectError(results[1], absl::StatusCode::kFailedPrecondition,
              {"data_parallel#0", "2 trained parameters", "\"p0\" (0), \"p2\" (2)"});
  ExpectError(results[0], absl::StatusCode::kUnavailable, {"rank 1", "\"p0\" (0), \"p2\" (2)"});
}

TEST(DataParallelErrorsTest, AGradientThatComesTwiceIsNamed) {
  const std::vector<absl::Status> results =
      OnTwoRanks([](Communicator& comm, ToyModel& model, DataParallel& ddp) -> absl::Status {
        EK_RETURN_IF_ERROR(ddp.BeginStep());
        EK_RETURN_IF_ERROR(model.BackwardOf(3, comm.rank(), 0, Announcer(ddp)));
        return model.BackwardOf(3, comm.rank(), 0, Announcer(ddp));
      });
  for (const absl::Status& result : results) {
    if (!absl::IsUnavailable(result))
      ExpectError(result, absl::StatusCode::kFailedPrecondition, {"\"p3\" (3)", "twice"});
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(results[0]) || absl::IsFailedPrecondition(results[1]));
}

TEST(DataParallelErrorsTest, CallsInTheWrongOrderAreRefused) {
  absl::Status status = RunTestRanks(1, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    ExpectError(ddp->GradientReady(0), absl::StatusCode::kFailedPrecondition,
                {"outside of a step"});
    ExpectError(ddp->FinishStep(), absl::StatusCode::kFailedPrecondition,
                {"FinishStep() without BeginStep()"});
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.params().SetGradState(0, GradState::kLocal);
    ExpectError(ddp->NoGradient(0), absl::StatusCode::kFailedPrecondition,
                {"\"p0\" (0)", "has a gradient"});
    ExpectError(ddp->GradientReady(17), absl::StatusCode::kInvalidArgument,
                {"17", "the number of parameters is 5"});
    return ddp->BeginStep();
  });
  ExpectError(status, absl::StatusCode::kFailedPrecondition, {"before FinishStep()"});
}

TEST(DataParallelErrorsTest, AnAnnouncedGradientThatIsNoneIsNotSilentlyZero) {
  absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    return ddp->GradientReady(4);  // Written, perhaps, but its state was forgotten.
  });
  ExpectError(status, absl::StatusCode::kFailedPrecondition,
              {"\"p4\" (4) was announced without a gradient", "kLocal"});
}

// Cases from a hostile review of the loop: each of these hung, or went on with wrong numbers.
TEST(DataParallelErrorsTest, DestructionInsideAStepEndsTheGroupBeforeItsMemoryGoes) {
  for (int round = 0; round < 20; ++round) {
    std::vector<absl::Status> results(2);
    (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      auto step = [&]() -> absl::Status {
        ToyModel model({100000, 100000});
        EK_ASSIGN_OR_RETURN(auto ddp,
                            DataParallel::Create(&comm, &model.params(), {}, Options(true)));
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(model.BackwardOf(1, comm.rank(), 0, Announcer(*ddp)));
        if (comm.rank() == 0) return absl::InternalError("loss is not a number");
        EK_RETURN_IF_ERROR(model.BackwardOf(0, comm.rank(), 0, Announcer(*ddp)));
        return ddp->FinishStep();
      };
      return results[comm.rank()] = step();
    });
    ExpectError(results[0], absl::StatusCode::kInternal, {"loss is not a number"});
    // The group's owner aborts it with this reason once the DataParallel is gone.
    ExpectError(results[1], absl::StatusCode::kUnavailable,
                {"rank 0 aborted the group: loss is not a number"});
  }
}

// Rank 0 destroys its DataParallel inside a step, and never says why.
TEST(DataParallelErrorsTest, PeersLearnTheDestructorsReasonIfThereIsNoOther) {
  struct Case {
    bool announces_twice;
    bool keeps_group;  // Otherwise it destroys its communicator at once.
    const char* reason;
  };
  for (const Case& test :
       {Case{true, false, "announced twice"}, Case{false, false, "inside a step"},
        Case{false, true, "inside a step"}}) {
    SCOPED_TRACE(absl::StrCat(test.announces_twice, test.keeps_group));
    absl::StatusOr<TestGroup> group = CreateTestGroup(2);
    ASSERT_TRUE(group.ok()) << group.status();
    const auto step = [&](int rank) -> absl::Status {
      ToyModel model(kSizes);
      EK_ASSIGN_OR_RETURN(
          auto ddp, DataParallel::Create((*group)[rank].get(), &model.params(), {}, Options()));
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, rank, 0));
      if (rank == 1) return TrainStep(*ddp, model, rank, 1);
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(model.BackwardOf(1, rank, 0, Announcer(*ddp)));
      if (test.announces_twice) EK_RETURN_IF_ERROR(ddp->GradientReady(1));
      return absl::InternalError("its own secret");
    };
    absl::Notification is_told;
    std::thread silent([&] {
      EXPECT_FALSE(step(0).ok());
      if (!test.keeps_group) (*group)[0].reset();
      is_told.WaitForNotification();
    });
    const absl::Time start = SteadyNow();
    ExpectError(step(1), absl::StatusCode::kUnavailable,
                {"rank 0 aborted the group: data_parallel#0", test.reason});
    EXPECT_LT(SteadyNow() - start, absl::Seconds(5));
    is_told.Notify();
    silent.join();
  }
}

TEST(DataParallelErrorsTest, ALoopThatEndsInsideAStepIsNamed) {
  std::vector<absl::Status> results(2);
  (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    results[comm.rank()] = RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
      if (comm.rank() == 1) return TrainStep(*ddp, model, comm.rank(), 1);
      return ddp->BeginStep();  // And then it finds that there is no more data.
    });
    return results[comm.rank()];
  });
  ExpectError(results[0], absl::StatusCode::kFailedPrecondition,
              {"data_parallel#0", "the loop ended inside a step"});
  ExpectError(results[1], absl::StatusCode::kUnavailable,
              {"rank 0", "the loop ended inside a step"});
}

TEST(DataParallelErrorsTest, ADryRankLeavesNoReducedGradientBehind) {
  absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    ddp->SetOptimizerState({});
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 1 + 2 * comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(model.Backward(comm.rank(), step, Announcer(*ddp)));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        Descend(model);
        model.params().ClearGradients();  // After the step, as some programs do.
      }
      return absl::OkStatus();
    }));
    for (int p = 0; p < model.params().size(); ++p)
      EXPECT_EQ(model.params().grad_state(p), GradState::kNone);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The two parameters share a bucket. Rank 1 accumulates for one of them alone, and then has no more
// inputs.
TEST(AccumulatedJoinTest, WhatAnEarlierStepLeftReducedIsNotContributedAgain) {
  for (const bool views : {false, true}) {
    SCOPED_TRACE(views);
    absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      ToyModel model({3, 5});
      const DataParallelOptions options{
          .reducer = {.caps = {Bytes{1000}}, .gradient_as_bucket_view = views}};
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options));
      ddp->SetOptimizerState({});
      return RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(model.Backward(comm.rank(), 0, Announcer(*ddp)));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        model.params().SetGradState(1, GradState::kNone);
        if (comm.rank() == 0) model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep(StepMode::kAccumulate));
        EK_RETURN_IF_ERROR(model.BackwardOf(1, comm.rank(), 1, Announcer(*ddp)));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        if (comm.rank() == 1) return absl::OkStatus();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(model.Backward(0, 2, Announcer(*ddp)));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        for (int j = 0; j < 3; ++j)
          EXPECT_NEAR(model.Gradient(0)[j], model.GradientAt(0, j, 0, 2) / 2, 1e-5);
        for (int j = 0; j < 5; ++j) {
          const float sum = model.GradientAt(1, j, 0, 1) + model.GradientAt(1, j, 0, 2) +
                            model.GradientAt(1, j, 1, 1);
          EXPECT_NEAR(model.Gradient(1)[j], sum / 2, 1e-5);
        }
        return absl::OkStatus();
      });
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(DataParallelErrorsTest, AFrozenParameterHasNoGradientToAnnounce) {
  absl::Status status = RunTestRanks(1, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    model.params().SetTrainable("p1", false);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.params().SetGradState(1, GradState::kLocal);
    return ddp->GradientReady(1);
  });
  ExpectError(status, absl::StatusCode::kFailedPrecondition, {"\"p1\" (1)", "frozen"});
}

TEST(DataParallelErrorsTest, RanksThatDisagreeAboutSynchronisingAreBothNamed) {
  const std::vector<absl::Status> results = OnTwoRanks([](Communicator& comm, ToyModel& model,
                                                          DataParallel& ddp) -> absl::Status {
    EK_RETURN_IF_ERROR(ddp.BeginStep(comm.rank() == 0 ? StepMode::kSync : StepMode::kAccumulate));
    EK_RETURN_IF_ERROR(model.Backward(comm.rank(), 0, Announcer(ddp)));
    EK_RETURN_IF_ERROR(ddp.FinishStep());
    return comm.Finalize();
  });
  for (const absl::Status& result : results) {
    ExpectError(result, absl::StatusCode::kFailedPrecondition,
                {"data_parallel#0", "rank 0: synchronises", "rank 1: accumulates"});
  }
}

TEST(DataParallelErrorsTest, RanksThatTrainDifferentParametersAreNamedWithThem) {
  const std::vector<absl::Status> results =
      OnTwoRanks([](Communicator& comm, ToyModel& model, DataParallel& ddp) -> absl::Status {
        if (comm.rank() == 1) model.params().SetTrainable("p3", false);
        return TrainStep(ddp, model, comm.rank(), 0);
      });
  for (const absl::Status& result : results) {
    ExpectError(result, absl::StatusCode::kFailedPrecondition,
                {"trained parameters", "rank 1: frozen: p3"});
  }
}

TEST(DataParallelErrorsTest, DifferentModelsAreRefusedOnAllRanks) {
  struct Case {
    std::vector<int> sizes;
    std::string expected;
  };
  for (const Case& other :
       {Case{{3, 5, 1, 8},
             "the number of parameters: rank 0 has 5; rank 1 has 4: the ranks disagree"},
        Case{{3, 5, 1, 9, 2},
             "parameter 3: rank 0 has \"p3\" float32[8]; rank 1 has \"p3\" float32[9]"}}) {
    std::vector<absl::Status> results(2);
    (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      ToyModel model(comm.rank() == 0 ? kSizes : other.sizes);
      results[comm.rank()] = DataParallel::Create(&comm, &model.params(), {}, Options()).status();
      return absl::OkStatus();
    });
    for (const absl::Status& result : results) {
      ExpectError(result, absl::StatusCode::kInvalidArgument, {"data_parallel#0", other.expected});
    }
  }
}

TEST(DataParallelErrorsTest, AnUnknownOptimizersStateIsNotSilentlyStale) {
  absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    auto loop = [&](int steps) {
      return RunJoined({ddp.get()}, {}, [&, steps](JoinScope&) -> absl::Status {
        for (int step = 0; step < steps; ++step) {
          EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
          Descend(model);
        }
        return absl::OkStatus();
      });
    };
    EK_RETURN_IF_ERROR(loop(3));  // Even: nothing to refuse.
    EK_RETURN_IF_ERROR(loop(2 + comm.rank()));
    ToyModel last(kSizes);
    std::vector<float> gathered(2 * kSizes[3]);
    std::vector<float> mine = model.values()[3];
    EK_RETURN_IF_ERROR(comm.AllGather(absl::MakeSpan(mine), absl::MakeSpan(gathered)));
    EXPECT_TRUE(
        std::equal(gathered.begin(), gathered.begin() + kSizes[3], gathered.begin() + kSizes[3]));
    ExpectError(loop(2), absl::StatusCode::kFailedPrecondition, {"SetOptimizerState()"});
    // Going round it does not help, doing what it says does: the state becomes that of the last
    // rank that stepped.
    ExpectError(RunJoined({ddp.get()}, {.enable = false},
                          [](JoinScope&) -> absl::Status { return absl::OkStatus(); }),
                absl::StatusCode::kFailedPrecondition, {"SetOptimizerState()"});
    std::vector<float> momentum(3, comm.rank());
    ddp->SetOptimizerState({TensorView(absl::MakeSpan(momentum))});
    EK_RETURN_IF_ERROR(loop(2));
    EXPECT_THAT(momentum, ElementsAre(1, 1, 1));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
