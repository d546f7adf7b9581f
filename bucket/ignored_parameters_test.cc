// Parameters of which data parallelism keeps its hands off.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
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

TensorView View(std::vector<float>& floats) { return TensorView(absl::MakeSpan(floats)); }

TEST(IgnoredParametersTest, NeverCountAsTrained) {
  ToyModel model(kSizes);
  ParameterSet& params = model.params();
  EXPECT_TRUE(params.Ignore(params.Find("p3")).ok());
  EXPECT_TRUE(params.Ignore(3).ok()) << "Twice is once.";
  EXPECT_EQ(params.ignored_count(), 1);
  EXPECT_TRUE(params.is_ignored(3));
  EXPECT_FALSE(params.trainable(3));

  const uint64_t version = params.mask_version();
  params.SetTrainable(3, true);
  EXPECT_EQ(params.SetTrainable("p", true), 4) << "All but the ignored one.";
  EXPECT_TRUE(params.SetTrainable(std::vector<uint8_t>(5, 1)).ok());
  EXPECT_EQ(params.mask_version(), version);
  EXPECT_FALSE(params.trainable(3));
  EXPECT_TRUE(params.SetTrainable(std::vector<uint8_t>{1, 0, 1, 1, 1}).ok());
  EXPECT_EQ(params.mask_version(), version + 1);
  EXPECT_FALSE(params.trainable(1));
  EXPECT_FALSE(params.trainable(3));
  EXPECT_EQ(
      params.SetTrainable(TrainableMask(5)),
      absl::InvalidArgumentError("a trainable mask trains parameter \"p3\" (3), which is ignored"));
}

TEST(IgnoredParametersTest, AreChosenByIndexByNameAndByPrefixOfAnyName) {
  std::vector<float> a(2), b(2), c(2);
  ParameterSet params;
  params.Add("experts.0", View(a));
  params.Add("experts.1", View(b));
  params.Add("head", View(c));
  params.Add("experts.tied", View(c));
  EXPECT_EQ(params.Ignore("conv").value(), 0);
  EXPECT_EQ(params.Ignore("experts.0").value(), 1);
  EXPECT_EQ(params.Ignore("experts.").value(), 2);
  EXPECT_EQ(params.ignored_count(), 3);
  EXPECT_EQ(params.Ignore(3), absl::InvalidArgumentError(
                                  "parameter 3 cannot be ignored: the number of parameters is 3"));
  EXPECT_EQ(
      params.Ignore(params.Find("tail")),
      absl::InvalidArgumentError("parameter -1 cannot be ignored: the number of parameters is 3"));
}

TEST(IgnoredParametersTest, MayBeAnything) {
  std::vector<float> value(4), grad(4);
  std::vector<int32_t> table(3);
  ParameterSet params;
  params.Add("w", View(value), View(grad));
  params.Add("table", absl::MakeSpan(table));  // Not of floats,
  params.Add("far", TensorView(nullptr, 7, DType::kFloat32,
                               Device::Cuda(0)));  // elsewhere, without memory,
  params.Add("part", View(value).Slice(1, 2));     // inside another.
  EXPECT_FALSE(params.Validate().ok());
  for (int i : {1, 2, 3}) EXPECT_TRUE(params.Ignore(i).ok());
  EXPECT_TRUE(params.Validate().ok()) << params.Validate();
  absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    std::vector<float> mine(4), gradient(4);
    ParameterSet own;
    own.Add("w", View(mine), View(gradient));
    own.Add("table", absl::MakeSpan(table));
    own.Add("far", TensorView(nullptr, 7, DType::kFloat32, Device::Cuda(0)));
    for (int i : {1, 2}) EK_RETURN_IF_ERROR(own.Ignore(i));
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &own, {}));
    EXPECT_TRUE(Reducer::CheckGroup(comm, own).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

class IgnoredInDataParallelTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(std::get<0>(GetParam()), body);
    EXPECT_TRUE(status.ok()) << status;
  }
  DataParallelOptions Options() const {
    return {.reducer = {.caps = {Bytes{8}, Bytes{24}},
                        .gradient_as_bucket_view = std::get<1>(GetParam())}};
  }
};

// Rank-local experts: sizes and values differ over the ranks, and stay so, also through an uneven
// loop.
TEST_P(IgnoredInDataParallelTest, AreNeitherBroadcastNorReducedNorCompared) {
  Run([&](Communicator& comm) -> absl::Status {
    const int rank = comm.rank();
    std::vector<int> sizes = kSizes;
    sizes[1] = 2 + rank;
    ToyModel model(sizes, /*seed=*/rank), plain({3, 1, 8, 2});
    const std::vector<float> own = model.values()[1];
    EK_RETURN_IF_ERROR(model.params().Ignore("p1").status());
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    EXPECT_THAT(ddp->reducer().plan().buckets, ElementsAre(ElementsAre(4, 3, 2, 0)));
    EXPECT_EQ(model.values()[1], own);
    const void* const grad = model.params()[1].grad.data;
    ddp->SetOptimizerState({});
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 2 + rank; ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        // The ignored one's gradient is its owner's business, and stays what it was.
        model.params()[1].grad.as<float>()[0] = 100.0f + rank;
        model.params().SetGradState(1, GradState::kLocal);
        EK_RETURN_IF_ERROR(
            model.Backward(rank, step, [&](int param) { return ddp->GradientReady(param); }));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        EXPECT_EQ(model.params().grad_state(1), GradState::kLocal);
        EXPECT_EQ(model.params().grad_state(0), GradState::kReduced);
        EXPECT_EQ(model.params()[1].grad.as<float>()[0], 100.0f + rank);
      }
      return absl::OkStatus();
    }));
    EXPECT_EQ(model.params()[1].grad.data, grad);
    EXPECT_EQ(model.values()[1], own) << "rank " << rank;
    EXPECT_EQ(model.values()[0], ToyModel(kSizes, 0).values()[0]) << "The others are rank 0's.";
    return absl::OkStatus();
  });
}

// One rank that ignores what the others do not: they would wait for each other.
TEST_P(IgnoredInDataParallelTest, RanksThatIgnoreDifferentParametersLearnWhichAndWho) {
  Run([&](Communicator& comm) -> absl::Status {
    if (comm.world_size() == 1) return absl::OkStatus();
    ToyModel model(kSizes);
    EK_RETURN_IF_ERROR(model.params().Ignore(comm.rank() == comm.world_size() - 1 ? 3 : 2));
    const absl::Status made = DataParallel::Create(&comm, &model.params(), {}, Options()).status();
    EXPECT_EQ(made.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(made.message()),
                HasSubstr(LastRankDiffers(comm.world_size(), "parameter 2", "\"p2\" (ignored)",
                                          "\"p2\" float32[1]")));
    return comm.Barrier();  // The group goes on.
  });
}

TEST_P(IgnoredInDataParallelTest, IsDecidedBeforeAReducerIsMade) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_RETURN_IF_ERROR(model.params().Ignore(2));
    std::optional<absl::StatusOr<std::unique_ptr<DataParallel>>> ddp =
        DataParallel::Create(&comm, &model.params(), {}, Options());
    EK_RETURN_IF_ERROR(ddp->status());
    EXPECT_TRUE(model.params().Ignore(2).ok()) << "It is already.";
    EXPECT_EQ(model.params().Ignore(3),
              absl::FailedPreconditionError(
                  "parameter \"p3\" (3) is ignored too late: the parameters belong to "
                  "data_parallel#0, which is alive: destroy it before"));
    EXPECT_TRUE(model.params().trainable(3));
    ddp.reset();
    EXPECT_TRUE(model.params().Ignore(3).ok());
    return absl::OkStatus();
  });
}

TEST_P(IgnoredInDataParallelTest, AllIsNothingLeftToDo) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_RETURN_IF_ERROR(model.params().Ignore("").status());
    const absl::Status made = DataParallel::Create(&comm, &model.params(), {}, Options()).status();
    EXPECT_THAT(std::string(made.message()), HasSubstr("all parameters are ignored"));
    return absl::OkStatus();
  });
}

TEST_P(IgnoredInDataParallelTest, BuffersAreComparedToo) {
  Run([&](Communicator& comm) -> absl::Status {
    if (comm.world_size() == 1) return absl::OkStatus();
    const bool is_last = comm.rank() == comm.world_size() - 1;
    const auto names = [&](absl::string_view what, absl::string_view usual,
                           absl::string_view last) {
      return HasSubstr(LastRankDiffers(comm.world_size(), what, usual, last));
    };
    ToyModel model(kSizes);
    std::vector<float> mean(4), variance(is_last ? 5 : 4);
    std::vector<double> wide(4);
    const auto message = [&](std::vector<TensorView> buffers) {
      return std::string(DataParallel::Create(&comm, &model.params(), std::move(buffers), Options())
                             .status()
                             .message());
    };
    EXPECT_THAT(message({View(mean), View(variance)}),
                names("buffer 1", "float32[4]", "float32[5]"));
    EXPECT_THAT(message({is_last ? TensorView(absl::MakeSpan(wide)) : View(mean)}),
                names("buffer 0", "float32[4]", "float64[4]"));
    EXPECT_THAT(message(is_last ? std::vector<TensorView>() : std::vector<TensorView>{View(mean)}),
                names("the number of buffers", "1", "0"));
    return comm.Barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, IgnoredInDataParallelTest,
                         testing::Combine(testing::Values(1, 2, 3, 5),
                                          testing::Values(false, true)));

}  // namespace
}  // namespace evenkeel
