#include "evenkeel/comm/nccl/nccl.h"

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/nccl/library.h"
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
  for (const absl::Status& status :
       {devices.status(), CreateAlone().status(), MakeNcclUniqueId().status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "no CUDA device: ")) << status;
  }
}

TEST(NcclWithoutDeviceTest, RefusesARankThatIsNotInTheGroup) {
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(1);
  EXPECT_EQ(CreateNcclGroup(1, 1, std::move(links[0])).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(NcclWithoutDeviceTest, MakesNoCommunicatorWhoseWaitsHaveNoDeadline) {
  const absl::StatusOr<internal::NcclApi*> nccl = internal::NcclLibrary();
  if (!nccl.ok()) GTEST_SKIP() << nccl.status();
  setenv("NCCL_COMM_BLOCKING", "1", /*replace=*/1);
  internal::NcclComm comm = nullptr;
  const internal::NcclAnswer answer =
      (*nccl)->Init(Device::Cuda(0), std::string(128, 'x'), 0, 1, &comm);
  unsetenv("NCCL_COMM_BLOCKING");
  EXPECT_EQ(answer.code, internal::NcclCode::kInvalidUsage);
  EXPECT_EQ(answer.text,
            "NCCL_COMM_BLOCKING=1 would leave every wait without a deadline: unset it");
}

// A group of one rank; more are tests/conformance's.
class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    EK_SKIP_WITHOUT_GPUS(1);
    absl::StatusOr<std::unique_ptr<Communicator>> comm = CreateAlone();
    ASSERT_TRUE(comm.ok()) << comm.status();
    comm_ = *std::move(comm);
    absl::StatusOr<Memory> memory = comm_->Allocate(4 * sizeof(float));
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    view_ = TensorView(memory_.data.get(), 4, DType::kFloat32, comm_->device());
    absl::StatusOr<Stream> stream = comm_->runtime()->CreateStream(comm_->device());
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }

  // `values` stay until the stream has copied them.
  void Write(const std::vector<float>& values) {
    const absl::Status status =
        comm_->runtime()->Copy(view_.data, values.data(), view_.bytes(), stream());
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<float> Read() {
    std::vector<float> values(4);
    absl::Status status =
        comm_->runtime()->Copy(values.data(), view_.data, view_.bytes(), stream());
    status.Update(comm_->runtime()->Synchronize(stream(), absl::Now() + absl::Minutes(1)));
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }
  StreamRef stream() const { return stream_.ref(); }

  std::unique_ptr<Communicator> comm_;
  Memory memory_;
  TensorView view_;
  Stream stream_;
  const std::vector<float> numbers_ = {1, 2, 3, 4};
};

TEST_F(NcclTest, AllReduceIsOrderedBetweenWorkOnAStreamWithoutTheHost) {
  Write(numbers_);
  const int64_t waits = comm_->runtime()->host_waits();
  Work work = comm_->user().AllReduce(view_, ReduceOp::kSum, {.scale = 0.5, .after = stream()});
  ASSERT_TRUE(work.OrderBefore(stream()).ok());
  EXPECT_EQ(comm_->runtime()->host_waits(), waits);
  EXPECT_EQ(Read(), (std::vector<float>{0.5, 1, 1.5, 2}));
  EXPECT_TRUE(work.Wait().ok()) << work.Wait();
  EXPECT_TRUE(comm_->Finalize().ok());
}

TEST_F(NcclTest, ARankThatDoesNotContributeGetsTheIdentity) {
  Write(numbers_);
  Work work =
      comm_->user().AllReduce(view_, ReduceOp::kProduct, {.contributes = false, .after = stream()});
  ASSERT_TRUE(work.Wait().ok()) << work.Wait();
  EXPECT_EQ(Read(), std::vector<float>(4, 1.0f));
}

TEST_F(NcclTest, BroadcastInParts) {
  Write(numbers_);
  Work work =
      comm_->user().Broadcast({view_.Slice(0, 1), view_.Slice(1, 3)}, 0, {.after = stream()});
  ASSERT_TRUE(work.Wait().ok()) << work.Wait();
  EXPECT_EQ(Read(), numbers_);
}

TEST_F(NcclTest, LargeMemoryIsRegisteredZeroedAndOutlivesTheGroup) {
  NcclOptions options;
  options.communicator.watch.warn = [](const std::string& text) {
    EXPECT_FALSE(absl::StrContains(text, "not registered")) << text;
  };
  absl::StatusOr<std::unique_ptr<Communicator>> comm = CreateAlone(options);
  ASSERT_TRUE(comm.ok()) << comm.status();
  absl::StatusOr<Memory> memory = (*comm)->Allocate(int64_t{4} << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::vector<float> values(int64_t{1} << 20, 1.0f);
  const TensorView view(memory->data.get(), int64_t{1} << 20, DType::kFloat32, (*comm)->device());
  EXPECT_TRUE((*comm)->AllReduce(view, ReduceOp::kSum).ok());
  absl::Status status = comm_->runtime()->Copy(values.data(), view.data, view.bytes(), stream());
  status.Update(comm_->runtime()->Synchronize(stream(), absl::Now() + absl::Minutes(1)));
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(values, std::vector<float>(int64_t{1} << 20, 0.0f));
  comm->reset();
}

TEST_F(NcclTest, GroupsOnOneDeviceGoOnWhereOneIsPutBehindTheOther) {
  absl::StatusOr<std::unique_ptr<Communicator>> other = comm_->Split(0, 0);
  ASSERT_TRUE(other.ok()) << other.status();
  Write(numbers_);
  for (int i = 0; i < 20; ++i) {
    for (Communicator* const group : {comm_.get(), other->get()}) {
      const Work work = group->user().AllReduce(view_, ReduceOp::kMax, {.after = stream()});
      ASSERT_TRUE(work.OrderBefore(stream()).ok());
    }
  }
  EXPECT_EQ(Read(), numbers_);
  EXPECT_TRUE((*other)->Finalize().ok());
  EXPECT_TRUE(comm_->Finalize().ok());
}

// The operation is in a payload, as comm/failure_info.h describes.
bool IsTheAbort(const absl::Status& status) {
  return absl::IsCancelled(status) && status.message() == "enough" &&
         FailureInfoOf(status).has_value();
}

TEST_F(NcclTest, AnAbortLetsGoOfMemoryThatIsRegistered) {
  absl::StatusOr<Memory> memory = comm_->Allocate(int64_t{4} << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const TensorView view(memory->data.get(), int64_t{1} << 20, DType::kFloat32, comm_->device());
  std::vector<Work> works;
  for (int i = 0; i < 20; ++i)
    works.push_back(comm_->user().AllReduce(view, ReduceOp::kSum, {.scale = 0.5}));
  comm_->Abort(absl::CancelledError("enough"));
  for (const Work& work : works) {
    const absl::Status ended = work.Wait();
    EXPECT_TRUE(ended.ok() || IsTheAbort(ended)) << ended;  // Nothing was left behind.
  }
}

TEST_F(NcclTest, AnswersUnimplementedForWhatItLacks) {
  EXPECT_TRUE(comm_->Barrier().ok());
  TensorView shorts(view_.data, 2, DType::kInt16, view_.device);
  EXPECT_EQ(comm_->AllReduce(shorts, ReduceOp::kSum).code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(comm_->AllReduce(view_, ReduceOp::kMax).ok());
}

TEST_F(NcclTest, AbortEndsTheGroup) {
  comm_->Abort(absl::CancelledError("enough"));
  const absl::Status ended = comm_->AllReduce(view_, ReduceOp::kSum);
  EXPECT_TRUE(IsTheAbort(ended)) << ended;
}

TEST(NcclDeviceTest, RefusesADeviceThatIsNotThere) {
  EK_SKIP_WITHOUT_GPUS(1);
  EXPECT_EQ(CreateAlone({.device = *CudaDeviceCount()}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
