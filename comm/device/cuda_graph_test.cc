// Work on a stream may be captured into a CUDA graph and replayed.

#include <cuda_runtime.h>

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(CudaGraphTest, ACapturedCopyAndAHandOverBetweenStreamsAreReplayed) {
  EK_SKIP_WITHOUT_GPUS(1);
  DeviceRuntime& cuda = CudaDevices();
  constexpr Device kDevice = Device::Cuda(0);
  constexpr int64_t kCount = 10000;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const absl::StatusOr<Stream> stream = cuda.CreateStream(kDevice),
                               other = cuda.CreateStream(kDevice);
  const absl::StatusOr<Memory> memory = cuda.Allocate(kDevice, kCount * 4);
  ASSERT_TRUE(stream.ok() && other.ok() && memory.ok());
  const TensorView data(memory->data.get(), kCount, DType::kFloat32, kDevice);
  const absl::StatusOr<SegmentCopy> twice =
      SegmentCopy::Create(cuda, kDevice, {{.to = data, .from = data}});
  ASSERT_TRUE(twice.ok()) << twice.status();
  ASSERT_TRUE(CopySegmentsOnce(cuda, {{.to = data, .fill = 0.25}}, stream->ref()).ok());
  ASSERT_TRUE(twice->Run(stream->ref(), {.scale = 2}).ok());  // Loads the kernel: 0.5

  auto* const captured = static_cast<cudaStream_t>(stream->ref().handle);
  ASSERT_EQ(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_TRUE(twice->Run(stream->ref(), {.scale = 2}).ok());
  absl::StatusOr<Event> done = cuda.Record(stream->ref());
  ASSERT_TRUE(done.ok() && cuda.Wait(other->ref(), *done).ok());
  ASSERT_TRUE(twice->Run(other->ref(), {.scale = 2}).ok());
  done = cuda.Record(other->ref());
  ASSERT_TRUE(done.ok() && cuda.Wait(stream->ref(), *done).ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(replay, captured), cudaSuccess);

  std::vector<float> host(kCount);
  ASSERT_TRUE(cuda.Copy(host.data(), data.data, data.bytes(), stream->ref()).ok());
  ASSERT_TRUE(cuda.Synchronize(stream->ref(), absl::Now() + absl::Seconds(60)).ok());
  EXPECT_EQ(host, std::vector<float>(kCount, 32.0f));  // Four times as much, three times.
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace evenkeel
