#include "evenkeel/comm/nccl.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/local_link.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

absl::StatusOr<std::unique_ptr<Communicator>> CreateAlone(const NcclOptions& options = {}) {
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(1);
  return CreateNcclGroup(0, 1, std::move(links[0]), options);
}

TEST(NcclWithoutDeviceTest, SaysThatThereIsNone) {
  const absl::StatusOr<int> devices = CudaDeviceCount();
  if (devices.ok()) GTEST_SKIP() << "there are " << *devices << " CUDA devices";
  for (const absl::Status& status : {devices.status(), CreateAlone().status(), MakeNcclUniqueId().status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "no CUDA device: ")) << status;
  }
}

TEST(NcclWithoutDeviceTest, RefusesARankThatIsNotInTheGroup) {
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(1);
  EXPECT_EQ(CreateNcclGroup(1, 1, std::move(links[0])).status().code(), absl::StatusCode::kInvalidArgument);
}

// A group of one rank; more need a GPU each.
class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<int> devices = CudaDeviceCount();
    if (!devices.ok()) GTEST_SKIP() << devices.status().message();
    absl::StatusOr<std::unique_ptr<Communicator>> comm = CreateAlone();
    ASSERT_TRUE(comm.ok()) << comm.status();
    comm_ = *std::move(comm);
    absl::StatusOr<Memory> memory = comm_->Allocate(4 * sizeof(float));
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    view_ = TensorView(memory_.data.get(), 4, DType::kFloat32, comm_->device());
    ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  void Write(const std::vector<float>& values) {
    ASSERT_EQ(cudaMemcpyAsync(view_.data, values.data(), view_.bytes(), cudaMemcpyHostToDevice, stream_), cudaSuccess);
  }
  std::vector<float> Read() {
    std::vector<float> values(4);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), view_.data, view_.bytes(), cudaMemcpyDeviceToHost, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return values;
  }
  StreamRef stream() const { return {stream_, comm_->device()}; }

  std::unique_ptr<Communicator> comm_;
  Memory memory_;
  TensorView view_;
  cudaStream_t stream_ = nullptr;
};

TEST_F(NcclTest, AllReduceIsOrderedBetweenWorkOnAStream) {
  Write({1, 2, 3, 4});
  Work work = comm_->user().AllReduce(view_, ReduceOp::kSum, {.scale = 0.5, .after = stream()});
  ASSERT_TRUE(work.OrderBefore(stream()).ok());
  EXPECT_EQ(Read(), (std::vector<float>{0.5, 1, 1.5, 2}));
  EXPECT_TRUE(work.Wait().ok()) << work.Wait();
  EXPECT_TRUE(comm_->Finalize().ok());
}

TEST_F(NcclTest, ARankThatDoesNotContributeGetsTheIdentity) {
  Write({1, 2, 3, 4});
  Work work = comm_->user().AllReduce(view_, ReduceOp::kSum, {.contributes = false, .after = stream()});
  ASSERT_TRUE(work.Wait().ok()) << work.Wait();
  EXPECT_EQ(Read(), std::vector<float>(4, 0.0f));
}

TEST_F(NcclTest, BroadcastInParts) {
  Write({1, 2, 3, 4});
  Work work = comm_->user().Broadcast({view_.Slice(0, 1), view_.Slice(1, 3)}, 0, {.after = stream()});
  ASSERT_TRUE(work.Wait().ok()) << work.Wait();
  EXPECT_EQ(Read(), (std::vector<float>{1, 2, 3, 4}));
}

TEST_F(NcclTest, AnswersUnimplementedForWhatItLacks) {
  EXPECT_EQ(comm_->Barrier().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(comm_->user().Reduce(view_, ReduceOp::kSum, 0).Wait().code(), absl::StatusCode::kUnimplemented);
  TensorView shorts(view_.data, 2, DType::kInt16, view_.device);
  EXPECT_EQ(comm_->AllReduce(shorts, ReduceOp::kSum).code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(comm_->AllReduce(view_, ReduceOp::kMax).ok());
}

TEST_F(NcclTest, AbortEndsTheGroup) {
  comm_->Abort(absl::CancelledError("enough"));
  EXPECT_EQ(comm_->AllReduce(view_, ReduceOp::kSum), absl::CancelledError("enough"));
}

TEST(NcclDeviceTest, RefusesADeviceThatIsNotThere) {
  const absl::StatusOr<int> devices = CudaDeviceCount();
  if (!devices.ok()) GTEST_SKIP() << devices.status().message();
  EXPECT_EQ(CreateAlone({.device = *devices}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
