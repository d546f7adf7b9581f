// Sharded optimizers over shared memory with values in registered memory, against threads with
// values anywhere.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/value_memory.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// The second list leaves padding at the end of each bucket.
const std::vector<int64_t> kSizeLists[] = {{65536, 32768, 64000, 9600},
                                           {70001, 30, 65537, 9, 20003}};

// The values after some steps.
absl::StatusOr<std::vector<std::vector<float>>> Train(Communicator& comm, bool slices, bool moves,
                                                      const std::vector<int64_t>& sizes) {
  std::vector<std::vector<float>> values, gradients;
  ParameterSet params;
  for (const int64_t size : sizes) {
    values.emplace_back(size, 0.5f);
    gradients.emplace_back(size);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    params.Add(std::to_string(i), absl::MakeSpan(values[i]), absl::MakeSpan(gradients[i]));
  }
  Memory memory;
  if (moves) {
    EK_ASSIGN_OR_RETURN(memory, MoveValues(comm, params));
  }
  EK_ASSIGN_OR_RETURN(
      const auto ddp,
      DataParallel::Create(&comm, &params, {}, {.reducer = {.caps = {Bytes{300'000}}}}));
  const Placement placement = slices ? Placement(Slices{}) : Placement(WholeTensors{});
  EK_ASSIGN_OR_RETURN(const auto optimizer,
                      Optimizer::Create(*ddp, AdamW{}, {.placement = placement}));
  for (int step = 0; step < 5; ++step) {
    params.ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    for (int i = params.size() - 1; i >= 0; --i) {
      const auto value = params[i].value.as<float>(), gradient = params[i].grad.as<float>();
      for (size_t k = 0; k < gradient.size(); ++k) {
        gradient[k] =
            value[k] *
            static_cast<float>(static_cast<int>((k * 7 + comm.rank() * 13 + step) % 101) - 50);
      }
      params.SetGradState(i, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp->GradientReady(i));
    }
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EK_RETURN_IF_ERROR(optimizer->Step());
  }
  std::vector<std::vector<float>> trained;
  for (int i = 0; i < params.size(); ++i) {
    const auto value = params[i].value.as<float>();
    trained.emplace_back(value.begin(), value.end());
  }
  return trained;
}

TEST(RegisteredValuesTest, GiveTheBitsOfPlainOnes) {
  for (const bool slices : {false, true}) {
    for (const std::vector<int64_t>& sizes : kSizeLists) {
      for (const int world_size : {2, 3}) {
        SCOPED_TRACE(testing::Message()
                     << "slices " << slices << ", " << sizes[0] << ", world " << world_size);
        std::vector<std::vector<float>> expected;
        const absl::Status plain = RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto trained, Train(comm, slices, /*moves=*/false, sizes));
          if (comm.rank() == 0) expected = std::move(trained);
          return absl::OkStatus();
        });
        ASSERT_TRUE(plain.ok()) << plain;
        EXPECT_NE(expected[0][0], 0.5f);
        auto group = *CreateShmGroupInProcess(world_size, {});
        const absl::Status status =
            internal::RunGroup(group, [&](Communicator& comm) -> absl::Status {
              EK_ASSIGN_OR_RETURN(const auto trained, Train(comm, slices, /*moves=*/true, sizes));
              EXPECT_TRUE(trained == expected) << "rank " << comm.rank();
              return absl::OkStatus();
            });
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel
