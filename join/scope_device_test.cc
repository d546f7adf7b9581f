// The scope's calls on simulated devices: they give the bits of the same calls on the CPU, and the
// host waits for none.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/scope.h"
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

// Whether calls get the stream on which their tensors are computed.
enum class Calls { kOnStream, kWaiting };

// A rank's copies of its tensors.
struct Outcome {
  std::vector<std::string> bits;
  std::vector<std::vector<float>> averages;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// A rank's tensors. On a device they are written and read on a stream that runs behind the host.
class Tensors {
 public:
  static absl::StatusOr<std::unique_ptr<Tensors>> Create(Communicator& comm, Calls calls) {
    auto tensors = std::unique_ptr<Tensors>(new Tensors(comm, calls));
    if (comm.runtime() == nullptr) return tensors;
    EK_ASSIGN_OR_RETURN(tensors->stream_, comm.runtime()->CreateStream(comm.device()));
    return tensors;
  }

  // For the scope's calls.
  StreamRef stream() const { return calls_ == Calls::kOnStream ? stream_.ref() : StreamRef(); }

  template <typename T>
  absl::StatusOr<TensorView> Make(const std::vector<T>& values) {
    std::string& host = host_.emplace_back(values.size() * sizeof(T), '\0');
    if (!values.empty()) std::memcpy(host.data(), values.data(), host.size());
    const TensorView view(host.data(), static_cast<int64_t>(values.size()), DTypeOf<T>::value,
                          comm_.device());
    return comm_.runtime() == nullptr ? view : Upload(view);
  }

  // Reads it, behind what is on the stream, and clears it, so that what comes too late shows.
  absl::Status Save(const TensorView& view, bool is_average = false) {
    std::string& host = host_.emplace_back(view.bytes(), '\0');
    saved_.push_back({&host, is_average});
    DeviceRuntime* const runtime = comm_.runtime();
    if (runtime == nullptr) {
      std::memcpy(host.data(), view.data, host.size());
      std::memset(view.data, 0, host.size());
      return absl::OkStatus();
    }
    EK_RETURN_IF_ERROR(runtime->Copy(host.data(), view.data, view.bytes(), stream_.ref()));
    EK_RETURN_IF_ERROR(runtime->Zero(view.data, view.bytes(), stream_.ref()));
    return WaitIfWaiting();
  }

  absl::StatusOr<Outcome> Read() const {
    if (comm_.runtime() != nullptr) EK_RETURN_IF_ERROR(Wait());
    Outcome outcome;
    for (const auto& [host, is_average] : saved_) {
      if (!is_average) {
        outcome.bits.push_back(*host);
        continue;
      }
      std::vector<float>& values = outcome.averages.emplace_back(host->size() / sizeof(float));
      std::memcpy(values.data(), host->data(), host->size());
    }
    return outcome;
  }

  ~Tensors() {
    if (comm_.runtime() != nullptr) (void)Wait();
  }

 private:
  Tensors(Communicator& comm, Calls calls) : comm_(comm), calls_(calls) {}

  absl::StatusOr<TensorView> Upload(const TensorView& host) {
    EK_ASSIGN_OR_RETURN(const Memory memory,
                        comm_.runtime()->Allocate(comm_.device(), host.bytes()));
    memories_.push_back(memory);
    EK_RETURN_IF_ERROR(
        comm_.runtime()->Copy(memory.data.get(), host.data, host.bytes(), stream_.ref()));
    EK_RETURN_IF_ERROR(WaitIfWaiting());
    return TensorView(memory.data.get(), host.count, host.dtype, comm_.device());
  }
  absl::Status WaitIfWaiting() const {
    return calls_ == Calls::kWaiting ? Wait() : absl::OkStatus();
  }
  absl::Status Wait() const {
    return comm_.runtime()->Synchronize(stream_.ref(), absl::Now() + absl::Minutes(1));
  }

  Communicator& comm_;
  const Calls calls_;
  Stream stream_;
  std::deque<std::string> host_;
  std::vector<Memory> memories_;
  std::vector<std::pair<const std::string*, bool>> saved_;
};

// Returns a rank's number of steps; rank 0 has none if there is another rank.
int StepsOf(int rank, int world) { return rank == 0 && world > 1 ? 0 : 1 + (3 * rank) % 7; }
int RankWithMostSteps(int world) {
  int most = 0;
  for (int rank = 0; rank < world; ++rank)
    most = StepsOf(rank, world) > StepsOf(most, world) ? rank : most;
  return most;
}

template <typename T>
std::vector<T> Values(int rank, int step, int what, int64_t count) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t hash = StableHash(StableHash(StableHash(StableHash(1, rank), step), what), i);
    values.push_back(static_cast<T>(static_cast<float>(static_cast<int32_t>(hash)) / 65536.0f));
  }
  return values;
}

// Each kind of call to which exhausted ranks contribute the identity.
absl::Status EachCall(JoinScope& scope, Tensors& tensors, int step) {
  const int rank = scope.communicator().rank(), world = scope.communicator().world_size();
  const int root = RankWithMostSteps(world);
  const ScopeOptions options{.stream = tensors.stream()};
  const int64_t n = step % 2 == 0 ? 3 : 100 * step + 1;  // Grows and shrinks.
  int what = 0;
  const auto floats = [&](int64_t count) {
    return tensors.Make(Values<float>(rank, step, ++what, count));
  };
  const auto ints = [&](int64_t count) {
    return tensors.Make(Values<int32_t>(rank, step, ++what, count));
  };

  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
    EK_ASSIGN_OR_RETURN(const TensorView data, floats(n));
    EK_RETURN_IF_ERROR(scope.AllReduce(data, op, options));
    EK_RETURN_IF_ERROR(tensors.Save(data, op == ReduceOp::kAverage));
  }
  EK_ASSIGN_OR_RETURN(const TensorView whole, ints(n));
  EK_RETURN_IF_ERROR(scope.Reduce(whole, ReduceOp::kSum, root, options));
  if (rank == root) EK_RETURN_IF_ERROR(tensors.Save(whole));

  EK_ASSIGN_OR_RETURN(const TensorView slice, floats(n));
  EK_ASSIGN_OR_RETURN(const TensorView all, floats(n * world));
  EK_RETURN_IF_ERROR(scope.AllGather(slice, all, options));
  EK_RETURN_IF_ERROR(tensors.Save(all));
  for (const int from : {root, kHighestActive}) {
    EK_ASSIGN_OR_RETURN(const TensorView data, ints(n));
    EK_RETURN_IF_ERROR(scope.Broadcast(data, from, options));
    EK_RETURN_IF_ERROR(tensors.Save(data));
  }
  for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin}) {
    EK_ASSIGN_OR_RETURN(const TensorView in,
                        op == ReduceOp::kMin ? ints(n * world) : floats(n * world));
    EK_ASSIGN_OR_RETURN(const TensorView out, op == ReduceOp::kMin ? ints(n) : floats(n));
    EK_RETURN_IF_ERROR(scope.ReduceScatter(in, out, op, options));
    EK_RETURN_IF_ERROR(tensors.Save(out, op == ReduceOp::kAverage));
    EK_RETURN_IF_ERROR(tensors.Save(in));  // Is still what it was.
  }
  EK_ASSIGN_OR_RETURN(const TensorView sent, ints(n * world));
  EK_ASSIGN_OR_RETURN(const TensorView received, ints(n * world));
  EK_RETURN_IF_ERROR(scope.AllToAll(sent, received, options));
  return tensors.Save(received);
}

// Calls to which exhausted ranks contribute tensors that they own.
absl::Status OwnedCalls(JoinScope& scope, Tensors& tensors, const TensorView& shard,
                        const TensorView& received, int step) {
  const int rank = scope.communicator().rank(), world = scope.communicator().world_size();
  const StreamRef stream = tensors.stream();
  EK_ASSIGN_OR_RETURN(const TensorView all, tensors.Make(std::vector<float>(shard.count * world)));
  EK_RETURN_IF_ERROR(scope.AllGather(
      shard, all, {.joined = Contribution::kOwned, .tensor = "shard", .stream = stream}));
  EK_RETURN_IF_ERROR(tensors.Save(all));
  EK_ASSIGN_OR_RETURN(const TensorView sent,
                      tensors.Make(Values<float>(rank, step, 77, received.count)));
  EK_RETURN_IF_ERROR(
      scope.Broadcast(sent, kHighestActive,
                      {.joined = Contribution::kReceive, .tensor = "received", .stream = stream}));
  EK_RETURN_IF_ERROR(tensors.Save(sent));
  EK_ASSIGN_OR_RETURN(const TensorView mean,
                      tensors.Make(Values<float>(rank, step, 78, shard.count)));
  EK_RETURN_IF_ERROR(
      scope.AllReduce(mean, ReduceOp::kAverage,
                      {.joined = Contribution::kOwned, .tensor = "mean", .stream = stream}));
  return tensors.Save(mean, /*is_average=*/true);
}

struct Case {
  JoinOptions options;
  Calls calls = Calls::kOnStream;
  std::function<void()> at_end;  // Runs at the end of each loop.
};

absl::StatusOr<Outcome> RunCase(Communicator& comm, const Case& test) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Tensors> tensors, Tensors::Create(comm, test.calls));
  Ticker ticker(&comm);
  for (int epoch = 0; epoch < 2; ++epoch) {
    EK_ASSIGN_OR_RETURN(const TensorView shard,
                        tensors->Make(Values<float>(comm.rank(), epoch, 50, 5)));
    EK_ASSIGN_OR_RETURN(const TensorView mean,
                        tensors->Make(Values<float>(comm.rank(), epoch, 51, 5)));
    EK_ASSIGN_OR_RETURN(const TensorView received, tensors->Make(std::vector<float>(4)));
    EK_RETURN_IF_ERROR(RunJoined({&ticker}, test.options, [&](JoinScope& scope) -> absl::Status {
      scope.Own("shard", shard, tensors->stream());
      scope.Own("mean", mean, tensors->stream());
      scope.Own("received", received, tensors->stream());
      for (int step = 0; step < StepsOf(comm.rank(), comm.world_size()); ++step) {
        EK_RETURN_IF_ERROR(EachCall(scope, *tensors, 10 * epoch + step));
        EK_RETURN_IF_ERROR(OwnedCalls(scope, *tensors, shard, received, 10 * epoch + step));
        EK_RETURN_IF_ERROR(ticker.Tick());
      }
      if (test.at_end && epoch == 0) test.at_end();
      return absl::OkStatus();
    }));
    for (const TensorView& view : {shard, received}) EK_RETURN_IF_ERROR(tensors->Save(view));
    EK_RETURN_IF_ERROR(tensors->Save(mean, /*is_average=*/true));
  }
  return tensors->Read();
}

// Returns the outcomes of all ranks, by rank.
std::vector<Outcome> OutcomesOf(int world, const Case& test,
                                const std::function<absl::Status(const Body&)>& run) {
  std::vector<Outcome> outcomes(world);
  const absl::Status status = run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(outcomes[comm.rank()], RunCase(comm, test));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return outcomes;
}

std::vector<Outcome> OnTheCpu(int world, const Case& test) {
  return OutcomesOf(world, test, [&](const Body& body) { return RunRanks(world, body); });
}

class ScopeOnDevicesTest : public testing::TestWithParam<int> {
 protected:
  void ExpectAsOnTheCpu(const Case& test) {
    const std::vector<Outcome> expected = OnTheCpu(GetParam(), test);
    for (const absl::Duration delay : {absl::ZeroDuration(), absl::Microseconds(200)}) {
      SCOPED_TRACE(absl::FormatDuration(delay));
      SimulatedDevices devices({.count = GetParam(), .delay = delay});
      const std::vector<Outcome> outcomes = OutcomesOf(GetParam(), test, [&](const Body& body) {
        return RunSimulatedRanks(devices, GetParam(), body);
      });
      for (int rank = 0; rank < GetParam(); ++rank) {
        EXPECT_FALSE(expected[rank].bits.empty());
        EXPECT_TRUE(outcomes[rank] == expected[rank]) << "rank " << rank;
      }
    }
  }
};

TEST_P(ScopeOnDevicesTest, GiveTheBitsOfTheCpu) { ExpectAsOnTheCpu({}); }

TEST_P(ScopeOnDevicesTest, GiveThemAtOnceWithoutAStream) {
  ExpectAsOnTheCpu({.calls = Calls::kWaiting});
}

TEST_P(ScopeOnDevicesTest, GiveThemWhereNobodyIsFollowed) {
  const int world = GetParam();
  const auto body = [&](std::vector<Outcome>& outcomes) -> Body {
    return [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const std::unique_ptr<Tensors> tensors,
                          Tensors::Create(comm, Calls::kOnStream));
      Ticker ticker(&comm);
      EK_RETURN_IF_ERROR(RunJoined({&ticker}, {.enable = false}, [&](JoinScope& scope) {
        return EachCall(scope, *tensors, /*step=*/3);
      }));
      EK_ASSIGN_OR_RETURN(outcomes[comm.rank()], tensors->Read());
      return absl::OkStatus();
    };
  };
  std::vector<Outcome> expected(world), outcomes(world);
  SimulatedDevices devices({.count = world, .delay = absl::Microseconds(200)});
  EXPECT_TRUE(RunRanks(world, body(expected)).ok());
  EXPECT_TRUE(RunSimulatedRanks(devices, world, body(outcomes)).ok());
  EXPECT_TRUE(outcomes == expected);
}

// Those that follow wait only when no rank's loop runs any more.
TEST_P(ScopeOnDevicesTest, NoHostWaitsForADeviceInAStep) {
  const int world = GetParam();
  SimulatedDevices devices({.count = world, .delay = absl::Microseconds(100)});
  std::atomic<int64_t> work_waits = 0;
  Case test;
  test.at_end = [&] {
    EXPECT_EQ(devices.host_waits(), 0);
    EXPECT_EQ(work_waits, 0);
  };
  OutcomesOf(world, test, [&](const Body& body) {
    return RunSimulatedRanks(devices, world, body, {.work_waits = &work_waits});
  });
  EXPECT_GT(devices.host_waits(), 0);  // At the end of the loops.
}

// A rank can have issued all its calls, and be exhausted, before it knows that another one became
// exhausted before.
TEST_P(ScopeOnDevicesTest, CallsAreFollowedAlsoWhenWhoIssuedThemHasRunDry) {
  const int world = GetParam();
  SimulatedDevices devices({.count = world});
  std::atomic<Communicator*> last = nullptr;  // The one with inputs.
  const auto run = [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Tensors> tensors,
                        Tensors::Create(comm, Calls::kOnStream));
    Ticker ticker(&comm);
    EK_RETURN_IF_ERROR(RunJoined({&ticker}, {}, [&](JoinScope& scope) -> absl::Status {
      if (comm.rank() < world - 1) {
        while (last == nullptr || !StepControl::Of(*last.load()).is_exhausted())
          absl::SleepFor(absl::Milliseconds(1));
        return absl::OkStatus();
      }
      for (int step = 0; step < 3; ++step) {
        EK_ASSIGN_OR_RETURN(const TensorView data, tensors->Make(std::vector<float>{1.0f}));
        EK_RETURN_IF_ERROR(scope.AllReduce(data, ReduceOp::kSum, {.stream = tensors->stream()}));
        EK_RETURN_IF_ERROR(tensors->Save(data));
        if (step == 1) EK_RETURN_IF_ERROR(ticker.Tick());
      }
      last = &comm;
      return absl::OkStatus();
    }));
    EK_ASSIGN_OR_RETURN(const Outcome outcome, tensors->Read());
    const float one = 1;
    EXPECT_THAT(outcome.bits,
                testing::Each(std::string(reinterpret_cast<const char*>(&one), sizeof(one))));
    return absl::OkStatus();
  };
  const absl::Status status =
      RunSimulatedRanks(devices, world, run, {.comm = {.timeout = absl::Seconds(60)}});
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ScopeOnDevicesTest, ABarrierIsTheHosts) {
  const int world = GetParam();
  SimulatedDevices devices({.count = world});
  std::atomic<int> come = 0;
  const absl::Status status =
      RunSimulatedRanks(devices, world, [&](Communicator& comm) -> absl::Status {
        Ticker ticker(&comm);
        return RunJoined({&ticker}, {}, [&](JoinScope& scope) -> absl::Status {
          for (int step = 0; step < StepsOf(comm.rank(), world); ++step) {
            int with_inputs = 0;
            for (int rank = 0; rank < world; ++rank) with_inputs += StepsOf(rank, world) > step;
            const int before = step == 0 ? 0 : come.load();
            ++come;
            EK_RETURN_IF_ERROR(scope.Barrier());
            if (step == 0) {
              EXPECT_GE(come - before, with_inputs);
            }
            EK_RETURN_IF_ERROR(ticker.Tick());
          }
          return absl::OkStatus();
        });
      });
  EXPECT_TRUE(status.ok()) << status;
}

// The host touches no rank's memory, also of ranks that shadow from the beginning.
TEST_P(ScopeOnDevicesTest, TheHostTouchesNoMemoryOfADevice) {
  for (const Calls calls : {Calls::kOnStream, Calls::kWaiting}) {
    const Case test{.calls = calls};
    const auto outcomes = OutcomesOf(
        GetParam(), test, [&](const Body& body) { return RunGuardedRanks(GetParam(), body); });
    EXPECT_TRUE(outcomes == OnTheCpu(GetParam(), test));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, ScopeOnDevicesTest, testing::Values(1, 2, 3, 5));

// As NCCL does it: what a rank issues is launched once all have issued it, and averages are sums of
//                  scaled values.
TEST(ScopeOverNcclTest, GivesTheBitsOfTheCpu) {
  for (const int world : {2, 3}) {
    SCOPED_TRACE(testing::Message() << world << " ranks");
    const Case test;
    const std::vector<Outcome> expected = OnTheCpu(world, test);
    SimulatedDevices devices({.count = world, .delay = absl::Microseconds(100)});
    internal::SimulatedNccl nccl(devices);
    const std::vector<Outcome> outcomes =
        OutcomesOf(world, test, [&](const Body& body) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto group, internal::CreateSimulatedNcclGroup(devices, nccl, world));
          return internal::RunGroup(group, body);
        });
    EXPECT_EQ(nccl.garbage(), 0);
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_TRUE(outcomes[rank].bits == expected[rank].bits) << "rank " << rank;
      ASSERT_EQ(outcomes[rank].averages.size(), expected[rank].averages.size());
      for (size_t i = 0; i < expected[rank].averages.size(); ++i) {
        // An average of up to three values below 2^15, rounded twice each, is off by less than
        // 6 * 2^15 * 2^-24; an exhausted rank's own tensor has gone through seven of them.
        EXPECT_THAT(outcomes[rank].averages[i],
                    testing::Pointwise(testing::FloatNear(0.1f), expected[rank].averages[i]));
      }
    }
  }
}

// Refused calls -----------------------------------------------------------------------------------

// A loop of one rank, with a tensor that outlives it.
absl::Status RunAlone(
    SimulatedDevices& devices,
    const std::function<absl::Status(JoinScope&, const TensorView& floats, StreamRef)>& body) {
  return RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const Stream stream, devices.CreateStream(comm.device()));
    EK_ASSIGN_OR_RETURN(const Memory memory, devices.Allocate(comm.device(), 16));
    const TensorView floats(memory.data.get(), 4, DType::kFloat32, comm.device());
    Ticker ticker(&comm);
    return RunJoined({&ticker}, {},
                     [&](JoinScope& scope) { return body(scope, floats, stream.ref()); });
  });
}

TEST(ScopeOnDevicesErrorTest, AWrongCallIsRefusedAndTheLoopGoesOn) {
  SimulatedDevices devices({.count = 2, .delay = absl::Milliseconds(1)});
  const absl::Status status = RunAlone(
      devices, [&](JoinScope& scope, const TensorView& floats, StreamRef stream) -> absl::Status {
        const TensorView ints(floats.data, 4, DType::kInt32, floats.device);
        EK_ASSIGN_OR_RETURN(const Stream other, devices.CreateStream(Device::Cuda(1)));
        const absl::Status elsewhere =
            scope.AllReduce(floats, ReduceOp::kSum, {.stream = other.ref()});
        EXPECT_EQ(elsewhere.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(elsewhere.message()), HasSubstr("a stream of cuda:1, on cuda:0"));
        EXPECT_EQ(scope.AllReduce(ints, ReduceOp::kAverage, {.stream = stream}).code(),
                  absl::StatusCode::kUnimplemented);
        EXPECT_EQ(scope.Reduce(floats, ReduceOp::kSum, kHighestActive).code(),
                  absl::StatusCode::kUnimplemented);
        std::vector<float> host(4);
        EXPECT_EQ(scope.AllReduce(absl::MakeSpan(host), ReduceOp::kSum).code(),
                  absl::StatusCode::kInvalidArgument);
        return scope.AllReduce(floats, ReduceOp::kSum, {.stream = stream});
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ScopeOnDevicesErrorTest, ADevicesErrorShowsInACall) {
  SimulatedDevices devices;
  const absl::Status status = RunAlone(
      devices, [&](JoinScope& scope, const TensorView& floats, StreamRef stream) -> absl::Status {
        EK_RETURN_IF_ERROR(scope.AllReduce(floats, ReduceOp::kSum, {.stream = stream}));
        devices.FailNext("Record", absl::InternalError("the device is gone"));
        const absl::Status failed = scope.AllReduce(floats, ReduceOp::kSum, {.stream = stream});
        devices.FailNext("Record", absl::OkStatus());
        return failed;
      });
  EXPECT_THAT(std::string(status.message()), HasSubstr("the device is gone")) << status;
}

// While the other ranks' memory is in use on their devices: nothing may be freed before that
// (asan).
TEST(ScopeOnDevicesErrorTest, ALoopThatFailsLeavesNothingBehindOnADevice) {
  for (int failing = 0; failing < 3; ++failing) {
    SimulatedDevices devices({.count = 3, .delay = absl::Microseconds(200)});
    const absl::Status status =
        RunSimulatedRanks(devices, 3, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const std::unique_ptr<Tensors> tensors,
                              Tensors::Create(comm, Calls::kOnStream));
          Ticker ticker(&comm, /*waits=*/true);
          return RunJoined({&ticker}, {}, [&](JoinScope& scope) -> absl::Status {
            for (int step = 0; step < 2 * comm.rank(); ++step) {
              EK_RETURN_IF_ERROR(EachCall(scope, *tensors, step));
              if (step == failing) return absl::DataLossError("a bad batch");
              EK_RETURN_IF_ERROR(ticker.Tick());
            }
            return absl::OkStatus();
          });
        });
    EXPECT_THAT(std::string(status.message()), HasSubstr("a bad batch")) << status;
    for (int device = 0; device < 3; ++device)
      EXPECT_EQ(devices.held_bytes(Device::Cuda(device)), 0) << device;
  }
}

}  // namespace
}  // namespace evenkeel
