// One DataParallel after the other on the same parameters: only the one that lives moves gradients.

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8, 2};

DataParallelOptions Options(bool views) {
  return {.reducer = {.caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = views}};
}

std::vector<void*> GradMemory(ToyModel& model) {
  std::vector<void*> memory;
  for (int p = 0; p < model.params().size(); ++p) memory.push_back(model.params()[p].grad.data);
  return memory;
}

std::vector<std::vector<float>> Gradients(ToyModel& model) {
  std::vector<std::vector<float>> gradients;
  for (int p = 0; p < model.params().size(); ++p) gradients.push_back(model.Gradient(p));
  return gradients;
}

absl::Status TrainStep(DataParallel& ddp, ToyModel& model, int rank, int step) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(
      model.Backward(rank, step, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

// World, views in the first, views in the second.
class ReattachTest : public testing::TestWithParam<std::tuple<int, bool, bool>> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  bool first_views() const { return std::get<1>(GetParam()); }
  bool second_views() const { return std::get<2>(GetParam()); }
};

TEST_P(ReattachTest, InTheSameGroup) {
  absl::Status status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), fresh(kSizes);
    const std::vector<void*> own = GradMemory(model);
    EK_ASSIGN_OR_RETURN(auto reference,
                        DataParallel::Create(&comm, &fresh.params(), {}, Options(second_views())));
    EK_ASSIGN_OR_RETURN(auto first,
                        DataParallel::Create(&comm, &model.params(), {}, Options(first_views())));
    for (int step = 0; step < 3; ++step)
      EK_RETURN_IF_ERROR(TrainStep(*first, model, comm.rank(), step));
    const std::vector<std::vector<float>> reduced = Gradients(model);
    first.reset();
    EXPECT_EQ(GradMemory(model), own);
    EXPECT_EQ(Gradients(model), reduced) << "What was reduced is still there.";

    EK_ASSIGN_OR_RETURN(auto second,
                        DataParallel::Create(&comm, &model.params(), {}, Options(second_views())));
    for (int step = 3; step < 6; ++step) {
      EK_RETURN_IF_ERROR(TrainStep(*second, model, comm.rank(), step));
      EK_RETURN_IF_ERROR(TrainStep(*reference, fresh, comm.rank(), step));
      EXPECT_EQ(Gradients(model), Gradients(fresh)) << "step " << step;
    }
    EXPECT_EQ(second->reducer().generation(), 1u) << "It records an order of its own.";
    EXPECT_EQ(GradMemory(model) == own, !second_views());
    second.reset();
    EXPECT_EQ(GradMemory(model), own);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Accumulated gradients move along, as the parameters do.
TEST_P(ReattachTest, InAnotherGroupWithWhatWasAccumulated) {
  std::vector<std::unique_ptr<ToyModel>> models;
  std::vector<std::vector<void*>> own;
  for (int rank = 0; rank < world(); ++rank) {
    models.push_back(std::make_unique<ToyModel>(kSizes));
    own.push_back(GradMemory(*models.back()));
  }
  absl::Status status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
    ToyModel& model = *models[comm.rank()];
    EK_ASSIGN_OR_RETURN(auto first,
                        DataParallel::Create(&comm, &model.params(), {}, Options(first_views())));
    for (int step = 0; step < 2; ++step)
      EK_RETURN_IF_ERROR(TrainStep(*first, model, comm.rank(), step));
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(first->BeginStep(StepMode::kAccumulate));
    EK_RETURN_IF_ERROR(
        model.Backward(comm.rank(), 7, [&](int param) { return first->GradientReady(param); }));
    return first->FinishStep();
  });
  EXPECT_TRUE(status.ok()) << status;

  std::vector<std::vector<std::vector<float>>> local;
  for (auto& model : models) {
    EXPECT_EQ(GradMemory(*model), own[local.size()]);
    EXPECT_EQ(model->params().grad_state(0), GradState::kLocal);
    local.push_back(Gradients(*model));
  }
  status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
    ToyModel& model = *models[comm.rank()];
    EK_ASSIGN_OR_RETURN(auto second,
                        DataParallel::Create(&comm, &model.params(), {}, Options(second_views())));
    EK_RETURN_IF_ERROR(second->BeginStep());
    for (int param = 0; param < model.params().size(); ++param)
      EK_RETURN_IF_ERROR(second->GradientReady(param));
    EK_RETURN_IF_ERROR(second->FinishStep());
    for (size_t p = 0; p < kSizes.size(); ++p) {
      for (int j = 0; j < kSizes[p]; ++j) {
        float sum = 0;
        for (int rank = 0; rank < world(); ++rank) sum += local[rank][p][j];
        EXPECT_THAT(model.Gradient(static_cast<int>(p))[j], SameSum(sum * (1.0f / world())));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  for (int rank = 0; rank < world(); ++rank) EXPECT_EQ(GradMemory(*models[rank]), own[rank]);
}

TEST_P(ReattachTest, ASecondOneBesideTheFirstIsRefusedOnAllRanks) {
  absl::Status status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), spare(kSizes);
    EK_ASSIGN_OR_RETURN(auto first,
                        DataParallel::Create(&comm, &model.params(), {}, Options(first_views())));
    // One rank alone takes the wrong model.
    const int wrong = world() - 1;
    ToyModel& chosen = comm.rank() == wrong ? model : spare;
    const absl::Status made =
        DataParallel::Create(&comm, &chosen.params(), {}, Options(second_views())).status();
    EXPECT_EQ(made.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(
        std::string(made.message()),
        HasSubstr(absl::StrCat(comm.world_size() == 1 ? "" : absl::StrCat("rank ", wrong, ": "),
                               "the parameters belong to data_parallel#0, which is alive")));
    const absl::Status reducer = Reducer::Create(&comm, &chosen.params(), "another", {}).status();
    EXPECT_THAT(std::string(reducer.message()),
                HasSubstr("the parameters belong to data_parallel#0"));
    // The first is as it was, and what was refused is attached nowhere.
    EXPECT_TRUE(spare.params().CheckDetached().ok());
    return TrainStep(*first, model, comm.rank(), 0);
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReattachTest,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Bool(),
                                          testing::Bool()));

}  // namespace
}  // namespace evenkeel
