// An impossible set-up is refused at creation, on all ranks, with a message, and the group goes on.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

struct Memory {
  std::vector<float> value = std::vector<float>(4), grad = std::vector<float>(4),
                     other = std::vector<float>(4);
  std::vector<double> wide = std::vector<double>(4);
  std::vector<int32_t> ints = std::vector<int32_t>(4), int_grad = std::vector<int32_t>(4);
};

TensorView View(std::vector<float>& floats) { return TensorView(absl::MakeSpan(floats)); }

struct Wrong {
  std::string message;
  // Runs on one rank before it creates.
  std::function<void(Memory&, ParameterSet&, std::vector<TensorView>&, DataParallelOptions&)> make;
};

const Wrong kWrong[] = {
    {"the parameter list is empty",
     [](Memory&, ParameterSet& params, auto&, auto&) { params = ParameterSet(); }},
    {"parameter \"far\" lies on cuda:1, the group's tensors on cpu",
     [](Memory& m, ParameterSet& params, auto&, auto&) {
       params.Add("far", TensorView(m.other.data(), 4, DType::kFloat32, Device::Cuda(1)),
                  TensorView(m.wide.data(), 4, DType::kFloat32, Device::Cuda(1)));
     }},
    {"parameter \"lazy\" has no memory for float32[4]",
     [](Memory&, ParameterSet& params, auto&, auto&) {
       params.Add("lazy", {nullptr, 4, DType::kFloat32});
     }},
    {"parameter \"mixed\" is float32[4], its gradient float64[4]",
     [](Memory& m, ParameterSet& params, auto&, auto&) {
       params.Add("mixed", View(m.other), TensorView(absl::MakeSpan(m.wide)));
     }},
    {"parameter \"ids\" is int32[4]: gradients are floats",
     [](Memory& m, ParameterSet& params, auto&, auto&) {
       params.Add("ids", TensorView(absl::MakeSpan(m.ints)),
                  TensorView(absl::MakeSpan(m.int_grad)));
     }},
    {"parameter \"bare\" is float32[4] and its gradient has no memory",
     [](Memory& m, ParameterSet& params, auto&, auto&) { params.Add("bare", View(m.other)); }},
    {"parameters 0 and 1 are both named \"w\"",
     [](Memory& m, ParameterSet& params, auto&, auto&) { params.Add("w", View(m.other)); }},
    {"the value of \"inside\" (float32[2]) without being the same",
     [](Memory& m, ParameterSet& params, auto&, auto&) {
       params.Add("inside", View(m.value).Slice(1, 2));
     }},
    {"no bucket caps", [](Memory&, ParameterSet&, auto&,
                          DataParallelOptions& options) { options.reducer.caps = {}; }},
    {"the bucket cap 1 is -5 bytes, but must be at least 0",
     [](Memory&, ParameterSet&, auto&, DataParallelOptions& options) {
       options.reducer.caps = {Bytes{0}, Bytes{-5}};
     }},
    {"trainability.every is 0, not at least 1",
     [](Memory&, ParameterSet&, auto&, DataParallelOptions& options) {
       options.trainability.every = 0;
     }},
    {"buffer 0 has no memory for float32[3]",
     [](Memory&, ParameterSet&, std::vector<TensorView>& buffers, auto&) {
       buffers.push_back({nullptr, 3, DType::kFloat32});
     }},
    {"buffer 0 lies on cuda:0, the group's tensors on cpu",
     [](Memory& m, ParameterSet&, std::vector<TensorView>& buffers, auto&) {
       buffers.push_back({m.other.data(), 3, DType::kFloat32, Device::Cuda(0)});
     }},
};

class ConstructionTest : public testing::TestWithParam<int> {};

TEST_P(ConstructionTest, WhatOneRankCannotHaveIsRefusedOnAll) {
  const int world = GetParam(), wrong_rank = world - 1;
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(wrong.message);
    absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Memory memory;
      memory.value.assign(4, static_cast<float>(comm.rank()));
      ParameterSet params;
      params.Add("w", View(memory.value), View(memory.grad));
      std::vector<TensorView> buffers;
      DataParallelOptions options;
      if (comm.rank() == wrong_rank) wrong.make(memory, params, buffers, options);
      const absl::Status made = DataParallel::Create(&comm, &params, buffers, options).status();
      EXPECT_FALSE(made.ok());
      EXPECT_THAT(std::string(made.message()),
                  HasSubstr(comm.world_size() == 1 ? "" : absl::StrCat("rank ", wrong_rank, ": ")));
      EXPECT_THAT(std::string(made.message()), HasSubstr(wrong.message));
      EXPECT_EQ(memory.value[0], comm.rank()) << "Nothing was broadcast.";
      EXPECT_TRUE(params.CheckDetached().ok());
      return comm.Barrier();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(ConstructionTest, SettingsThatDifferAreNamed) {
  const int world = GetParam();
  if (world == 1) return;
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    ToyModel model({3, 2});
    const bool is_last = comm.rank() == world - 1;
    const auto message = [&](const DataParallelOptions& options) {
      return std::string(DataParallel::Create(&comm, &model.params(), model.buffers(), options)
                             .status()
                             .message());
    };
    const auto names = [&](absl::string_view what, absl::string_view usual,
                           absl::string_view last) {
      return HasSubstr(LastRankDiffers(world, what, usual, last));
    };
    EXPECT_THAT(message({.buffers = {.every = is_last ? 2 : 0}}), names("buffers.every", "0", "2"));
    EXPECT_THAT(
        message({.buffers = {.how = is_last ? BufferSync::kAverage : BufferSync::kBroadcast}}),
        names("buffers.how", "broadcast", "average"));
    EXPECT_THAT(message({.broadcast_initial_state = !is_last}),
                names("broadcast_initial_state", "true", "false"));
    EXPECT_THAT(message({.reducer = {.caps = {Bytes{8}, Bytes{is_last ? 9 : 10}}}}),
                names("the bucket caps", "{8, 10} bytes", "{8, 9} bytes"));
    const CapOrder order = is_last ? CapOrder::kFromLastReady : CapOrder::kFromFirstReady;
    EXPECT_THAT(message({.reducer = {.cap_order = order}}),
                names("cap_order", "kFromFirstReady", "kFromLastReady"));
    EXPECT_THAT(message({.reducer = {.gradient_as_bucket_view = is_last}}),
                names("gradient_as_bucket_view", "false", "true"));
    EXPECT_THAT(message({.reducer = {.fusion = is_last ? Fusion::kCoalesced : Fusion::kFlat}}),
                names("fusion", "kFlat", "kCoalesced"));
    EXPECT_THAT(message({.reducer = {.find_unused = true, .skip_unused_buckets = is_last}}),
                names("skip_unused_buckets", "false", "true"));
    EXPECT_THAT(message({.trainability = {.policy = is_last ? TrainabilityPolicy::kEveryN
                                                            : TrainabilityPolicy::kAlways,
                                          .every = 3}}),
                names("the trainability policy", "always, every 3 steps, verified every 1000 steps",
                      "every_n, every 3 steps, verified every 1000 steps"));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Nothing trained is allowed: it may change.
TEST_P(ConstructionTest, AModelThatIsFrozenWhollyMayBeTrainedLater) {
  for (bool views : {false, true}) {
    absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
      ToyModel model({3, 5});
      model.params().SetTrainable("", false);
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params(), {},
                                               {.reducer = {.gradient_as_bucket_view = views}}));
      EXPECT_TRUE(ddp->buckets().empty());
      for (int step = 0; step < 5; ++step) {
        if (step == 2) model.params().SetTrainable(1, true);
        if (step == 4) model.params().SetTrainable("", false);
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(model.Backward(comm.rank(), step,
                                          [&](int param) { return ddp->GradientReady(param); }));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        const bool is_trained = step == 2 || step == 3;
        EXPECT_EQ(model.params().grad_state(1), is_trained ? GradState::kReduced : GradState::kNone)
            << step;
        EXPECT_EQ(model.params().grad_state(0), GradState::kNone);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(ConstructionTest, ParametersAddedAfterwardsAreNoticed) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model({3, 2});
    std::vector<float> late(3);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    model.params().Add("late", View(late));
    const absl::Status begun = ddp->BeginStep();
    EXPECT_EQ(begun.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(begun.message()),
                HasSubstr("data_parallel#0 was made for 2 parameters, now there are 3: add all "
                          "before it is made"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A gradient that moved to another type or device, or lost its memory, after construction.
TEST_P(ConstructionTest, AGradientThatNoLongerFitsItsValueIsRefusedWhenItIsAnnounced) {
  std::vector<double> wide(3);
  std::vector<float> two(2), three(3);
  const std::pair<TensorView, std::string> cases[] = {
      {TensorView(absl::MakeSpan(wide)), "parameter \"p0\" is float32[3], its gradient float64[3]"},
      {View(two), "parameter \"p0\" is float32[3], its gradient float32[2]"},
      {TensorView(three.data(), 3, DType::kFloat32, Device::Cuda(0)),
       "its gradient float32[3] on cuda:0"},
      {TensorView(nullptr, 3, DType::kFloat32), "parameter \"p0\" has a gradient without memory"},
  };
  for (const auto& [grad, message] : cases) {
    SCOPED_TRACE(message);
    std::vector<absl::Status> results(GetParam());
    const auto run = [&, &grad = grad, &message = message](Communicator& comm) -> absl::Status {
      ToyModel model({3, 2});
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
      const auto announce = [&](int param) { return ddp->GradientReady(param); };
      results[comm.rank()] = [&]() -> absl::Status {
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        if (comm.rank() == 0) {
          model.params().SetGradMemory(0, grad);
          model.params().SetGradState(0, GradState::kLocal);
          EXPECT_THAT(std::string(announce(0).message()), HasSubstr(message));
        } else {
          EK_RETURN_IF_ERROR(model.BackwardOf(0, comm.rank(), 0, announce));
        }
        EK_RETURN_IF_ERROR(model.BackwardOf(1, comm.rank(), 0, announce));
        return ddp->FinishStep();
      }();
      return results[comm.rank()];
    };
    (void)RunTestRanks(GetParam(), run);
    for (const absl::Status& result : results)
      EXPECT_THAT(std::string(result.message()), HasSubstr(message));
  }
}

TEST(ConstructionsTest, BuffersThatOverlapParametersOrGradientsAreRefused) {
  std::vector<float> value(6), grad(6), buffer(4), ignored(2);
  const auto at = [](std::vector<float>& memory, int begin, int count) {
    return TensorView(absl::MakeSpan(memory).subspan(begin, count));
  };
  const std::pair<std::vector<TensorView>, std::string> cases[] = {
      {{at(value, 0, 6)},
       "the memory of the value of \"p0\" (float32[6]) overlaps that of buffer 0"},
      {{at(buffer, 0, 2), at(value, 5, 1)},
       "the value of \"p0\" (float32[6]) overlaps that of buffer 1"},
      {{at(grad, 2, 2)},
       "the gradient of \"p0\" (float32[6]) overlaps that of buffer 0 (float32[2])"},
      {{at(buffer, 0, 3), at(buffer, 2, 2)}, ""},
      {{at(buffer, 0, 4), at(buffer, 0, 4), at(buffer, 0, 0), at(ignored, 0, 2)}, ""},
  };
  for (const auto& [buffers, message] : cases) {
    SCOPED_TRACE(message);
    ParameterSet params;
    params.Add("p0", at(value, 0, 6), at(grad, 0, 6));
    params.Add("running", at(ignored, 0, 2), TensorView(nullptr, 2, DType::kFloat32));
    ASSERT_TRUE(params.Ignore("running").ok());
    const absl::Status status = RunTestRanks(1, [&, &buffers = buffers](Communicator& comm) {
      return DataParallel::Create(&comm, &params, buffers).status();
    });
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    EXPECT_EQ(status.code(),
              message.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument);
  }
}

// Each model uses what the one before it has used of the group.
TEST(ConstructionsTest, HundredsOfModelsComeAndGoInOneGroup) {
  absl::Status status = RunTestRanks(4, [](Communicator& comm) -> absl::Status {
    for (int i = 0; i < 300; ++i) {
      SCOPED_TRACE(i);
      ToyModel model({3, 2}, /*seed=*/4 * i + comm.rank());
      const ToyModel first({3, 2}, 4 * i);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), model.buffers()));
      EXPECT_EQ(model.values(), first.values());
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(
          model.Backward(comm.rank(), i, [&](int param) { return ddp->GradientReady(param); }));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      float mean = 0;
      for (int rank = 0; rank < 4; ++rank) mean += model.GradientAt(0, 0, rank, i) / 4;
      EXPECT_NEAR(model.params()[0].grad.as<float>()[0], mean, 1e-5);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, ConstructionTest, testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace evenkeel
