// A whole training step on a GPU: model, reducer over NCCL, optimizer. By CUPTI's account of what
// came to the driver, the host puts work on streams and waits for none of it.

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/gpu/driver_trace.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr ImageShape kImage{.side = 12};

// The parts of a training; the last is destroyed first.
struct Training {
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Model> host, model;
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;
};

absl::StatusOr<Training> StartTraining(const DevicePlace& place) {
  Training training;
  Environment environment;
  environment.store_folder = testing::TempDir();
  environment.secret = "the secret of this test";
  EK_ASSIGN_OR_RETURN(training.comm, CreateCommunicator(environment, {.backend = "nccl"}));
  const CnnOptions options{.image = kImage, .widths = {4, 6}, .seed = 5};
  EK_ASSIGN_OR_RETURN(training.host, MakeCnn(options));
  EK_ASSIGN_OR_RETURN(training.model, MakeDeviceCnn(options, *training.host, place));
  std::vector<TensorView> buffers;
  for (const NamedBuffer& buffer : training.model->buffers()) buffers.push_back(buffer.value);
  ParameterSet* const params = &training.model->parameters();
  EK_ASSIGN_OR_RETURN(training.ddp, DataParallel::Create(training.comm.get(), params, buffers));
  EK_ASSIGN_OR_RETURN(training.optimizer, Optimizer::Create(*training.comm, *params, AdamW{}));
  return training;
}

absl::Status Step(Training& training, const TestBatch& batch) {
  training.model->parameters().ClearGradients();
  EK_RETURN_IF_ERROR(training.ddp->BeginStep());
  EK_RETURN_IF_ERROR(
      training.model->StartForward(ImageBatch{batch.images, batch.labels}, Mode::kTraining)
          .status());
  EK_RETURN_IF_ERROR(
      training.model->Backward([&](int index) { return training.ddp->GradientReady(index); }));
  EK_RETURN_IF_ERROR(training.ddp->FinishStep());
  return training.optimizer->Step({.clip = ClipOptions{.max_norm = 1.0}});
}

TEST(StepTraceTest, TheHostWaitsForNothingInAStep) {
  EK_SKIP_WITHOUT_GPUS(1);
  DeviceRuntime& cuda = CudaDevices();
  const absl::StatusOr<DevicePlace> place = MakeDevicePlace(cuda, Device::Cuda(0));
  ASSERT_TRUE(place.ok()) << place.status();
  absl::StatusOr<Training> training = StartTraining(*place);
  ASSERT_TRUE(training.ok()) << training.status();
  const TestBatch batch = StripedImages(16, 1, kImage);
  // Kernels are loaded, memory is taken, and the order of the buckets is agreed in the first.
  for (int step = 0; step < 4; ++step) ASSERT_EQ(Step(*training, batch), absl::OkStatus());
  ASSERT_TRUE(cuda.Synchronize(place->stream.ref(), absl::Now() + absl::Minutes(1)).ok());

  const int64_t waits = cuda.host_waits();
  absl::StatusOr<std::unique_ptr<DriverTrace>> trace = DriverTrace::Start();
  ASSERT_TRUE(trace.ok()) << trace.status();
  for (int step = 0; step < 2; ++step) ASSERT_EQ(Step(*training, batch), absl::OkStatus());
  EXPECT_THAT((*trace)->Waits(), testing::IsEmpty());
  EXPECT_GT((*trace)->calls("cuLaunchKernel"), 20) << "nothing was traced";
  EXPECT_EQ(cuda.host_waits(), waits);
  trace->reset();
  EXPECT_TRUE(training->comm->Finalize().ok());
}

}  // namespace
}  // namespace evenkeel
