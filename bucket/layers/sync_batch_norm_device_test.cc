// Batch normalisation on simulated devices: within rounding what the same ranks compute on the CPU.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/layers/sync_batch_norm.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/testing/guarded_group.h"
#include "evenkeel/join/testing/ticker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::RunSimulatedRanks;
using internal::Ticker;
using testing::HasSubstr;

using Body = std::function<absl::Status(Communicator&)>;

struct Layer {
  int64_t channels = 3, spatial = 4;
  int64_t samples = 1;  // Times what SamplesOf() says.
};

// The values do not centre around zero, so that a careless variance would lose digits.
double Value(int what, int rank, int step, int64_t i) {
  return 3.0 +
         std::sin(0.7 * what + 12.9898 * rank + 78.233 * step + 0.317 * static_cast<double>(i));
}
int StepsOf(int rank, int world) { return rank == 0 && world > 1 ? 0 : 2 + (2 * rank) % 5; }
// Sometimes none; of all ranks together always some.
int64_t SamplesOf(int rank, int step) { return (rank + 2 * step) % 4 + (rank == 1 ? 0 : 1); }

// A rank's tensors, on the CPU or on a device, where they are written and read on a stream.
template <typename T>
class Tensors {
 public:
  static absl::StatusOr<std::unique_ptr<Tensors>> Create(Communicator& comm) {
    auto tensors = std::unique_ptr<Tensors>(new Tensors(comm));
    if (comm.runtime() == nullptr) return tensors;
    EK_ASSIGN_OR_RETURN(tensors->stream_, comm.runtime()->CreateStream(comm.device()));
    return tensors;
  }
  ~Tensors() {
    if (comm_.runtime() != nullptr) (void)Wait();
  }

  StreamRef stream() const { return stream_.ref(); }

  absl::StatusOr<TensorView> Make(int64_t count, const std::function<double(int64_t)>& value) {
    std::vector<T>& host = host_.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) host[i] = static_cast<T>(value(i));
    if (comm_.runtime() == nullptr) return TensorView(absl::MakeSpan(host));
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    EK_ASSIGN_OR_RETURN(const Memory memory, comm_.runtime()->Allocate(comm_.device(), bytes));
    memories_.push_back(memory);
    EK_RETURN_IF_ERROR(comm_.runtime()->Copy(memory.data.get(), host.data(), bytes, stream_.ref()));
    return TensorView(memory.data.get(), count, DTypeOf<T>::value, comm_.device());
  }
  absl::StatusOr<TensorView> Make(int64_t count, double value) {
    return Make(count, [value](int64_t) { return value; });
  }

  absl::Status Save(const TensorView& view) {
    std::vector<T>& host = host_.emplace_back(view.count);
    saved_.push_back(&host);
    if (comm_.runtime() != nullptr) {
      return comm_.runtime()->Copy(host.data(), view.data, view.bytes(), stream_.ref());
    }
    if (view.count > 0) std::memcpy(host.data(), view.data, view.bytes());
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::vector<T>>> Read() const {
    if (comm_.runtime() != nullptr) EK_RETURN_IF_ERROR(Wait());
    std::vector<std::vector<T>> all;
    for (const std::vector<T>* host : saved_) all.push_back(*host);
    return all;
  }

 private:
  explicit Tensors(Communicator& comm) : comm_(comm) {}
  absl::Status Wait() const {
    return comm_.runtime()->Synchronize(stream_.ref(), absl::Now() + absl::Minutes(1));
  }

  Communicator& comm_;
  Stream stream_;
  std::deque<std::vector<T>> host_;
  std::vector<Memory> memories_;
  std::vector<const std::vector<T>*> saved_;
};

struct Case {
  Layer layer;
  JoinOptions options;
  std::function<void()> at_end;  // Runs at the end of the loop.
};

template <typename T>
using Outcome = std::vector<std::vector<T>>;

template <typename T>
absl::StatusOr<Outcome<T>> RunCase(Communicator& comm, const Case& test) {
  EK_ASSIGN_OR_RETURN(const auto tensors, Tensors<T>::Create(comm));
  const int64_t channels = test.layer.channels, spatial = test.layer.spatial;
  SyncBatchNorm norm({.channels = channels, .stream = tensors->stream()});
  const auto per_channel = [&](int what) {
    return tensors->Make(channels,
                         [what](int64_t c) { return std::cos(what + static_cast<double>(c)); });
  };
  EK_ASSIGN_OR_RETURN(const TensorView gamma, per_channel(1));
  EK_ASSIGN_OR_RETURN(const TensorView beta, per_channel(2));
  EK_ASSIGN_OR_RETURN(const TensorView mean, tensors->Make(channels, 0.0));
  EK_ASSIGN_OR_RETURN(const TensorView variance, tensors->Make(channels, 1.0));
  EK_ASSIGN_OR_RETURN(const TensorView grad_gamma, tensors->Make(channels, 0.0));
  EK_ASSIGN_OR_RETURN(const TensorView grad_beta, tensors->Make(channels, 0.0));
  Ticker ticker(&comm);
  EK_RETURN_IF_ERROR(RunJoined({&ticker}, test.options, [&](JoinScope& scope) -> absl::Status {
    for (int step = 0; step < StepsOf(comm.rank(), comm.world_size()); ++step) {
      const int64_t samples = test.layer.samples * SamplesOf(comm.rank(), step),
                    count = samples * channels * spatial;
      const auto values = [&](int what) {
        return tensors->Make(count,
                             [&, what](int64_t i) { return Value(what, comm.rank(), step, i); });
      };
      EK_ASSIGN_OR_RETURN(const TensorView input, values(0));
      EK_ASSIGN_OR_RETURN(const TensorView grad_output, values(1));
      EK_ASSIGN_OR_RETURN(const TensorView output, tensors->Make(count, -1.0));
      EK_ASSIGN_OR_RETURN(const TensorView grad_input, tensors->Make(count, -1.0));
      EK_RETURN_IF_ERROR(norm.Forward(scope, {.samples = samples, .spatial = spatial}, input,
                                      {gamma, beta}, {mean, variance}, output));
      EK_RETURN_IF_ERROR(
          norm.Backward(scope, grad_output, gamma, {grad_input, grad_gamma, grad_beta}));
      for (const TensorView& view : {output, grad_input, grad_gamma, grad_beta, mean, variance}) {
        EK_RETURN_IF_ERROR(tensors->Save(view));
      }
      EK_RETURN_IF_ERROR(ticker.Tick());
    }
    if (test.at_end) test.at_end();
    return absl::OkStatus();
  }));
  return tensors->Read();
}

template <typename T>
std::vector<Outcome<T>> OutcomesOf(int world, const Case& test,
                                   const std::function<absl::Status(const Body&)>& run) {
  std::vector<Outcome<T>> outcomes(world);
  const absl::Status status = run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(outcomes[comm.rank()], RunCase<T>(comm, test));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return outcomes;
}

// Sums of up to 2^14 doubles below 4 in another order are off by at most 2^14 * 4 * 2^14 * 2^-53 in
// all, and by much less as they are added in blocks; what is made of them is divided by deviations
// of about 0.7 and by the count. So 1e-10 is ample for doubles, and floats are those doubles
// rounded: a last bit, of numbers whose size says how much that is.
template <typename T>
void ExpectClose(const std::vector<Outcome<T>>& mine, const std::vector<Outcome<T>>& expected) {
  constexpr double kRelative =
      std::is_same_v<T, float> ? 2 * std::numeric_limits<float>::epsilon() : 1e-10;
  ASSERT_EQ(mine.size(), expected.size());
  for (size_t rank = 0; rank < mine.size(); ++rank) {
    ASSERT_EQ(mine[rank].size(), expected[rank].size()) << "rank " << rank;
    for (size_t t = 0; t < mine[rank].size(); ++t) {
      ASSERT_EQ(mine[rank][t].size(), expected[rank][t].size());
      for (size_t i = 0; i < mine[rank][t].size(); ++i) {
        const double value = expected[rank][t][i];
        ASSERT_NEAR(mine[rank][t][i], value, kRelative * std::max(1.0, std::abs(value)))
            << "rank " << rank << " tensor " << t << " at " << i;
      }
    }
  }
}

class SyncBatchNormOnDevicesTest : public testing::TestWithParam<int> {
 protected:
  template <typename T>
  void ExpectAsOnTheCpu(const Case& test) {
    const int world = GetParam();
    const auto expected =
        OutcomesOf<T>(world, test, [&](const Body& body) { return RunRanks(world, body); });
    SimulatedDevices devices({.count = world, .delay = absl::Microseconds(50)});
    ExpectClose(
        OutcomesOf<T>(world, test,
                      [&](const Body& body) { return RunSimulatedRanks(devices, world, body); }),
        expected);
  }
};

TEST_P(SyncBatchNormOnDevicesTest, UnevenRanksComputeWhatTheyDoOnTheCpu) {
  ExpectAsOnTheCpu<double>({});
  ExpectAsOnTheCpu<float>({});
}

// Without space; more values than a block has threads, which are added up in parts; a channel
// alone.
TEST_P(SyncBatchNormOnDevicesTest, AnyShape) {
  for (const Layer& layer : {Layer{40, 1, 2}, Layer{2, 700, 3}, Layer{1, 3, 2}}) {
    SCOPED_TRACE(testing::Message() << layer.channels << " channels of " << layer.spatial);
    ExpectAsOnTheCpu<double>({.layer = layer});
  }
}

TEST_P(SyncBatchNormOnDevicesTest, NoHostWaitsForADevice) {
  const int world = GetParam();
  SimulatedDevices devices({.count = world, .delay = absl::Microseconds(100)});
  std::atomic<int64_t> work_waits = 0;
  Case test;
  test.at_end = [&] {
    EXPECT_EQ(devices.host_waits(), 0);
    EXPECT_EQ(work_waits, 0);
  };
  OutcomesOf<float>(world, test, [&](const Body& body) {
    return RunSimulatedRanks(devices, world, body, {.work_waits = &work_waits});
  });
}

TEST_P(SyncBatchNormOnDevicesTest, TheHostTouchesNoMemoryOfADevice) {
  const int world = GetParam();
  const Case test;
  const auto expected =
      OutcomesOf<double>(world, test, [&](const Body& body) { return RunRanks(world, body); });
  ExpectClose(OutcomesOf<double>(world, test,
                                 [&](const Body& body) { return RunGuardedRanks(world, body); }),
              expected);
}

INSTANTIATE_TEST_SUITE_P(Worlds, SyncBatchNormOnDevicesTest, testing::Values(1, 2, 3, 5));

// Nobody knows before the device does.
TEST(SyncBatchNormOnDevicesErrorTest, TooFewValuesShowLaterAndRunningStatisticsStay) {
  SimulatedDevices devices;
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        JoinScope scope(&comm, /*is_followed=*/false);
        EK_ASSIGN_OR_RETURN(const auto tensors, Tensors<float>::Create(comm));
        SyncBatchNorm norm({.channels = 2, .stream = tensors->stream()});
        EK_ASSIGN_OR_RETURN(const TensorView numbers, tensors->Make(2, 0.5));
        EK_ASSIGN_OR_RETURN(const TensorView running, tensors->Make(2, 0.25));
        const auto forward = [&](int64_t samples) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const TensorView input, tensors->Make(2 * samples, 1.0));
          EK_ASSIGN_OR_RETURN(const TensorView output, tensors->Make(2 * samples, -1.0));
          EK_RETURN_IF_ERROR(norm.Forward(scope, {.samples = samples}, input, {numbers, numbers},
                                          {running, running}, output));
          EK_RETURN_IF_ERROR(tensors->Save(output));
          return tensors->Save(running);
        };
        for (int i = 0; i < 2; ++i) {  // Without a sample the layer does nothing.
          EK_RETURN_IF_ERROR(forward(0));
          EK_ASSIGN_OR_RETURN(const auto untouched, tensors->Read());
          EXPECT_THAT(untouched.back(), testing::Each(0.25f));
        }
        EK_RETURN_IF_ERROR(forward(1));
        EK_ASSIGN_OR_RETURN(const auto saved, tensors->Read());  // Waits.
        EXPECT_THAT(saved[4], testing::Each(0.5f));  // beta, and nothing that is not a number.
        EXPECT_THAT(saved[5], testing::Each(0.25f));
        const absl::Status known = forward(4);
        EXPECT_EQ(known.code(), absl::StatusCode::kFailedPrecondition) << known;
        EXPECT_THAT(std::string(known.message()), HasSubstr("together had 1 values per channel"));
        EK_RETURN_IF_ERROR(forward(4));
        EK_RETURN_IF_ERROR(tensors->Read().status());
        EK_RETURN_IF_ERROR(forward(4));  // That was said.
        return tensors->Read().status();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SyncBatchNormOnDevicesErrorTest, RefusesWhatLiesElsewhere) {
  SimulatedDevices devices({.count = 2});
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        JoinScope scope(&comm, /*is_followed=*/false);
        EK_ASSIGN_OR_RETURN(const auto tensors, Tensors<float>::Create(comm));
        EK_ASSIGN_OR_RETURN(const TensorView view, tensors->Make(4, 1.0));
        EK_ASSIGN_OR_RETURN(const Stream other, devices.CreateStream(Device::Cuda(1)));
        std::vector<float> host(4);
        const auto forward = [&](StreamRef stream, TensorView input) {
          SyncBatchNorm norm({.channels = 4, .stream = stream});
          const absl::Status refused =
              norm.Forward(scope, {.samples = 1}, input, {view, view}, {view, view}, view);
          EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
          return std::string(refused.message());
        };
        EXPECT_THAT(forward({}, view), HasSubstr("on cuda:0: no stream"));
        EXPECT_THAT(forward(other.ref(), view), HasSubstr("a stream of cuda:1"));
        EXPECT_THAT(forward(tensors->stream(), absl::MakeSpan(host)),
                    HasSubstr("expected float32[4] on cuda:0"));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
