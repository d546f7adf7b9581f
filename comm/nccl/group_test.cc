// Tests of a group over NCCL, with NCCL and its devices simulated.

#include "evenkeel/comm/nccl/group.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

// A rank's floats on its device, and a stream of its own.
class Floats {
 public:
  static absl::StatusOr<Floats> Create(Communicator& comm, int64_t count, bool registered = false) {
    Floats floats;
    floats.comm_ = &comm;
    EK_ASSIGN_OR_RETURN(floats.stream_, comm.runtime()->CreateStream(comm.device()));
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
    if (registered) {
      EK_ASSIGN_OR_RETURN(floats.memory_, comm.Allocate(bytes));
    } else {
      EK_ASSIGN_OR_RETURN(floats.memory_, comm.runtime()->Allocate(comm.device(), bytes));
    }
    floats.view_ = TensorView(floats.memory_.data.get(), count, DType::kFloat32, comm.device());
    return floats;
  }

  TensorView view() const { return view_; }
  StreamRef stream() const { return stream_.ref(); }
  // On the stream; `values` stay until it has run.
  absl::Status Write(const std::vector<float>& values) {
    return comm_->runtime()->Copy(view_.data, values.data(), view_.bytes(), stream());
  }
  absl::Status Read(std::vector<float>& values) {
    values.resize(view_.count);
    return comm_->runtime()->Copy(values.data(), view_.data, view_.bytes(), stream());
  }
  absl::Status Synchronize() { return comm_->runtime()->Synchronize(stream(), Soon()); }

 private:
  Communicator* comm_ = nullptr;
  Stream stream_;
  Memory memory_;
  TensorView view_;
};

absl::Status RunSimulated(SimulatedDevices& devices, SimulatedNccl& nccl, int world_size,
                          const std::function<absl::Status(Communicator&)>& body,
                          const NcclGroupOptions& options = {}) {
  EK_ASSIGN_OR_RETURN(auto group, CreateSimulatedNcclGroup(devices, nccl, world_size, options));
  return RunGroup(group, body);
}

class NcclGroupTest : public testing::TestWithParam<int> {  // World size.
 protected:
  void TearDown() override { EXPECT_THAT(nccl_.mistakes(), testing::IsEmpty()); }

  SimulatedDevices devices_{{.count = 8}};
  SimulatedNccl nccl_{devices_};
};

TEST_P(NcclGroupTest, CollectivesAreOrderedBetweenWorkOnStreamsWithoutTheHost) {
  SimulatedDevices slow({.count = GetParam(), .delay = absl::Milliseconds(1)});
  SimulatedNccl nccl(slow);
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> group =
      CreateSimulatedNcclGroup(slow, nccl, GetParam());
  ASSERT_TRUE(group.ok()) << group.status();
  const absl::Status status = RunGroup(*group, [&](Communicator& comm) -> absl::Status {
    EXPECT_EQ(comm.backend_name(), "nccl");
    EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(comm, 100));
    EK_ASSIGN_OR_RETURN(Floats doubled, Floats::Create(comm, 100));
    std::vector<float> mine(100, static_cast<float>(comm.rank() + 1)), sum, twice;
    EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
    const int64_t waits = slow.host_waits();
    EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
    std::vector<Work> works;
    EK_RETURN_IF_ERROR(floats.Write(mine));
    works.push_back(
        comm.user().AllReduce(floats.view(), ReduceOp::kSum, {.after = floats.stream()}));
    EK_RETURN_IF_ERROR(works.back().OrderBefore(floats.stream()));
    EK_RETURN_IF_ERROR(floats.Read(sum));
    // Another stream, which goes on from a moment of this one.
    EK_ASSIGN_OR_RETURN(const Event read, comm.runtime()->Record(floats.stream()));
    works.push_back(
        comm.user().AllReduce(floats.view(), ReduceOp::kMax, {.scale = 2.0, .after_event = read}));
    EK_RETURN_IF_ERROR(works.back().OrderBefore(doubled.stream()));
    EK_RETURN_IF_ERROR(
        comm.runtime()->Copy(doubled.view().data, floats.view().data, 400, doubled.stream()));
    EK_RETURN_IF_ERROR(doubled.Read(twice));
    EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
    EXPECT_EQ(slow.host_waits(), waits);
    EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
    EK_RETURN_IF_ERROR(doubled.Synchronize());
    const auto w = static_cast<float>(comm.world_size());
    EXPECT_EQ(sum, std::vector<float>(100, w * (w + 1) / 2));
    EXPECT_EQ(twice, std::vector<float>(100, w * (w + 1)));
    for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(NcclGroupTest, AnOperationThatIsLaunchedWaitsForItsMoment) {
  absl::Notification go_on;
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(comm, 100));
        EK_ASSIGN_OR_RETURN(const Stream other, comm.runtime()->CreateStream(comm.device()));
        const std::vector<float> ones(100, 1.0f);
        std::vector<float> sum;
        EK_RETURN_IF_ERROR(devices_.Put(floats.stream(), [&] {
          (void)go_on.WaitForNotificationWithTimeout(absl::Minutes(1));
        }));
        EK_RETURN_IF_ERROR(floats.Write(ones));
        EK_ASSIGN_OR_RETURN(const Event written, comm.runtime()->Record(floats.stream()));
        const Work work =
            comm.user().AllReduce(floats.view(), ReduceOp::kSum, {.after_event = written});
        EK_RETURN_IF_ERROR(work.OrderBefore(other.ref()));
        EK_RETURN_IF_ERROR(
            comm.AgreeAny(true).status());  // Launched on all ranks, so nothing else holds it up.
        EXPECT_FALSE(work.IsDone());
        EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
        if (comm.rank() == 0) go_on.Notify();
        EK_RETURN_IF_ERROR(work.Wait());
        EK_RETURN_IF_ERROR(floats.Read(sum));
        EK_RETURN_IF_ERROR(floats.Synchronize());
        EXPECT_EQ(sum, std::vector<float>(100, static_cast<float>(comm.world_size())));
        return absl::OkStatus();
      });
  if (!go_on.HasBeenNotified()) go_on.Notify();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(NcclGroupTest, PartsAreOneKernel) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(comm, 100));
        const std::vector<float> ones(100, 1.0f);
        std::vector<float> sum;
        EK_RETURN_IF_ERROR(floats.Write(ones));
        std::vector<TensorView> parts;
        for (int64_t i = 0; i < 100; ++i) parts.push_back(floats.view().Slice(99 - i, 1));
        const Work work = comm.user().AllReduce(parts, ReduceOp::kSum, {.after = floats.stream()});
        EK_RETURN_IF_ERROR(work.Wait());
        EK_RETURN_IF_ERROR(floats.Read(sum));
        EK_RETURN_IF_ERROR(floats.Synchronize());
        EXPECT_EQ(sum, std::vector<float>(100, static_cast<float>(comm.world_size())));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.kernels(), GetParam());
}

// A joined rank's stand-in need not be cut as the others' bucket is.
TEST_P(NcclGroupTest, RanksMayCutATensorDifferently) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(comm, 12));
        std::vector<float> mine(12), result;
        for (int i = 0; i < 12; ++i) mine[i] = static_cast<float>(i);
        EK_RETURN_IF_ERROR(floats.Write(mine));
        const int64_t cut = 1 + comm.rank();
        const std::vector<TensorView> parts = {floats.view().Slice(0, cut),
                                               floats.view().Slice(cut, 12 - cut)};
        EK_RETURN_IF_ERROR(
            comm.user().AllReduce(parts, ReduceOp::kSum, {.after = floats.stream()}).Wait());
        EK_RETURN_IF_ERROR(comm.user().Broadcast(parts, comm.world_size() - 1).Wait());
        // Without a contribution from rank 0.
        EK_RETURN_IF_ERROR(
            comm.user()
                .AllReduce(parts, ReduceOp::kSum, {.scale = 0.5, .contributes = comm.rank() > 0})
                .Wait());
        EK_RETURN_IF_ERROR(floats.Read(result));
        EK_RETURN_IF_ERROR(floats.Synchronize());
        const int w = comm.world_size();
        for (int i = 0; i < 12; ++i)
          EXPECT_EQ(result[i], static_cast<float>(i * w * (w - 1)) / 2) << i;
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.garbage(), 0);
}

TEST_P(NcclGroupTest, APartMayBeEmptyOnARankThatDoesNotContribute) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(comm, 12));
        const std::vector<float> ones(12, 1.0f);
        std::vector<float> result;
        EK_RETURN_IF_ERROR(floats.Write(ones));
        const TensorView all = floats.view();
        const std::vector<TensorView> parts = {all.Slice(0, 5), all.Slice(5, 0), all.Slice(5, 7)};
        EK_RETURN_IF_ERROR(
            comm.user()
                .AllReduce(parts, ReduceOp::kSum,
                           {.contributes = comm.rank() > 0, .after = floats.stream()})
                .Wait());
        EK_RETURN_IF_ERROR(floats.Read(result));
        EK_RETURN_IF_ERROR(floats.Synchronize());
        EXPECT_EQ(result, std::vector<float>(12, static_cast<float>(comm.world_size() - 1)));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(NcclGroupTest, SeveralViewsOfOneSideGoThroughOnePiece) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        const int w = comm.world_size();
        EK_ASSIGN_OR_RETURN(Floats in, Floats::Create(comm, 4));
        EK_ASSIGN_OR_RETURN(Floats out, Floats::Create(comm, 4 * w));
        const auto r = static_cast<float>(comm.rank());
        const std::vector<float> mine = {r, r + 10, r + 20, r + 30};
        std::vector<float> all;
        EK_RETURN_IF_ERROR(in.Write(mine));
        EK_RETURN_IF_ERROR(in.Synchronize());
        const Collective what{.kind = CollectiveKind::kAllGather, .count = 4};
        const TensorList ins = {in.view().Slice(0, 1), in.view().Slice(1, 3)};
        const TensorList outs = {out.view().Slice(0, 4 * w - 1), out.view().Slice(4 * w - 1, 1)};
        EK_RETURN_IF_ERROR(
            comm.user().Issue(what, ins, comm.rank() == 0 ? outs : TensorList{out.view()}).Wait());
        EK_RETURN_IF_ERROR(out.Read(all));
        EK_RETURN_IF_ERROR(out.Synchronize());
        for (int i = 0; i < 4 * w; ++i)
          EXPECT_EQ(all[i], static_cast<float>(i / 4 + i % 4 * 10)) << i;
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(NcclGroupTest, RegisteredMemoryIsUsedAsItIsAndMixesWithOther) {
  const NcclGroupOptions options{.least_registered = 0};
  const absl::Status status = RunSimulated(
      devices_, nccl_, GetParam(),
      [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Floats bucket, Floats::Create(comm, 64, /*registered=*/true));
        EK_ASSIGN_OR_RETURN(Floats other, Floats::Create(comm, 64));
        EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
        EXPECT_EQ(nccl_.registered(), comm.world_size());
        const std::vector<float> ones(64, 1.0f);
        std::vector<float> sum, zeros;
        EK_RETURN_IF_ERROR(bucket.Read(zeros));
        EK_RETURN_IF_ERROR(bucket.Write(ones));
        EK_RETURN_IF_ERROR(other.Write(ones));
        EK_RETURN_IF_ERROR(other.Synchronize());
        EK_RETURN_IF_ERROR(comm.user()
                               .AllReduce(bucket.view(), ReduceOp::kSum, {.after = bucket.stream()})
                               .Wait());
        EK_RETURN_IF_ERROR(bucket.Read(sum));
        EK_RETURN_IF_ERROR(bucket.Synchronize());
        EXPECT_EQ(zeros, std::vector<float>(64, 0.0f));
        EXPECT_EQ(sum, std::vector<float>(64, static_cast<float>(comm.world_size())));
        // NCCL would give garbage: rank 0's is not registered.
        Floats& mixed = comm.rank() == 0 ? other : bucket;
        EK_RETURN_IF_ERROR(mixed.Write(ones));
        EK_RETURN_IF_ERROR(
            comm.user().AllReduce(mixed.view(), ReduceOp::kSum, {.after = mixed.stream()}).Wait());
        EK_RETURN_IF_ERROR(mixed.Read(sum));
        EK_RETURN_IF_ERROR(mixed.Synchronize());
        EXPECT_EQ(sum, std::vector<float>(64, static_cast<float>(comm.world_size())));
        return absl::OkStatus();
      },
      options);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.garbage(), 0);
  EXPECT_EQ(nccl_.registered(), 0);
  EXPECT_EQ(nccl_.allocated(), 0);
}

TEST_P(NcclGroupTest, ARankOnWhichNcclRegistersNothingMixesWithOthers) {
  (void)nccl_.Library(0, {.registers = false});
  const absl::Status status = RunSimulated(
      devices_, nccl_, GetParam(),
      [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Floats bucket, Floats::Create(comm, 64, /*registered=*/true));
        const std::vector<float> ones(64, 1.0f);
        std::vector<float> sum;
        EK_RETURN_IF_ERROR(bucket.Write(ones));
        EK_RETURN_IF_ERROR(comm.user()
                               .AllReduce(bucket.view(), ReduceOp::kSum, {.after = bucket.stream()})
                               .Wait());
        EK_RETURN_IF_ERROR(bucket.Read(sum));
        EK_RETURN_IF_ERROR(bucket.Synchronize());
        EXPECT_EQ(sum, std::vector<float>(64, static_cast<float>(comm.world_size())));
        return absl::OkStatus();
      },
      {.least_registered = 0});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.garbage(), 0);
  EXPECT_EQ(nccl_.allocated(), 0);
}

TEST_P(NcclGroupTest, MemoryOutlivesTheGroup) {
  std::vector<Memory> kept(GetParam());
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(),
                   [&](Communicator& comm) -> absl::Status {
                     EK_ASSIGN_OR_RETURN(kept[comm.rank()], comm.Allocate(1000));
                     return absl::OkStatus();
                   },
                   {.least_registered = 0});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.registered(), 0);
  EXPECT_EQ(nccl_.allocated(), GetParam());
  kept.clear();
  EXPECT_EQ(nccl_.allocated(), 0);
}

TEST_P(NcclGroupTest, MemoryComesAndGoesWhileOperationsAreLaunched) {
  const absl::Status status = RunSimulated(devices_, nccl_, GetParam(),
                                           [&](Communicator& comm) -> absl::Status {
                                             std::thread allocates([&comm] {
                                               for (int i = 0; i < 50; ++i)
                                                 EXPECT_TRUE(comm.Allocate(100).ok());
                                             });
                                             absl::Status ended;
                                             for (int i = 0; i < 50 && ended.ok(); ++i)
                                               ended = comm.Barrier();
                                             allocates.join();
                                             return ended;
                                           },
                                           {.least_registered = 0});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.registered(), 0);
  EXPECT_EQ(nccl_.allocated(), 0);
}

TEST_P(NcclGroupTest, MemoryIsPlainWhereNcclHasNone) {
  for (int rank = 0; rank < GetParam(); ++rank) {
    nccl_.FailNext(rank, rank % 2 == 0 ? "AllocateMemory" : "Register",
                   {NcclCode::kUnimplemented, "too old"});
  }
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(),
                   [&](Communicator& comm) -> absl::Status {
                     EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(1000));
                     EXPECT_EQ(memory.bytes, 1000);
                     // A rank whose memory is refused only by Register has some until then.
                     EK_RETURN_IF_ERROR(comm.Barrier());
                     EXPECT_EQ(nccl_.allocated(), 0);
                     return absl::OkStatus();
                   },
                   {.least_registered = 0});
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(NcclGroupTest, MemoryThatIsNotRegisteredIsWarnedOfOnce) {
  absl::Mutex mutex;
  std::vector<std::string> warnings;
  NcclGroupOptions options{.least_registered = 1000};
  options.communicator.watch.warn = [&](const std::string& text) {
    absl::MutexLock lock(&mutex);
    warnings.push_back(text);
  };
  const absl::Status status = RunSimulated(
      devices_, nccl_, GetParam(),
      [&](Communicator& comm) -> absl::Status {
        for (const char* call : {"AllocateMemory", "Register", "Register"}) {
          if (comm.rank() == 0)
            nccl_.FailNext(0, call, {NcclCode::kSystemError, "out of mappings"});
          EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(1000));
          EXPECT_EQ(memory.bytes, 1000);
        }
        return comm.Barrier();
      },
      options);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(warnings,
              testing::ElementsAre(
                  "rank 0: 1000 bytes on cuda:0 are not registered with NCCL, which copies them "
                  "once more (this is logged once): nccl: ncclMemAlloc: out of mappings"));
}

TEST_P(NcclGroupTest, MemoryThatCantBeDeregisteredStays) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(),
                   [&](Communicator& comm) -> absl::Status {
                     EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(1000));
                     EK_RETURN_IF_ERROR(comm.Barrier());
                     if (comm.rank() == 0) {
                       nccl_.FailNext(0, "Deregister", {NcclCode::kSystemError, "no"});
                     }
                     memory = Memory();
                     return comm.Barrier();
                   },
                   {.least_registered = 0});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(nccl_.allocated(), 1);
}

// The second operation needs more of the group's own memory while the first has not begun to use
// its.
TEST_P(NcclGroupTest, MemoryOfTheGroupsOwnStaysUntilTheStreamHasUsedIt) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        const int w = comm.world_size();
        absl::Notification go_on;
        EK_ASSIGN_OR_RETURN(Floats small, Floats::Create(comm, 2000 * w));
        EK_ASSIGN_OR_RETURN(Floats large, Floats::Create(comm, 9000 * w));
        EK_ASSIGN_OR_RETURN(Floats in, Floats::Create(comm, 9000));
        EK_RETURN_IF_ERROR(devices_.Put(
            in.stream(), [&] { (void)go_on.WaitForNotificationWithTimeout(absl::Minutes(1)); }));
        const int64_t held = devices_.held_bytes(comm.device());
        const auto gather = [&](const TensorView& out,
                                int64_t count) {  // Two parts: they are put together first.
          const Collective what{
              .kind = CollectiveKind::kAllGather, .dtype = DType::kFloat32, .count = count};
          return comm.user().Issue(what, {in.view().Slice(0, count)},
                                   {out.Slice(0, 1), out.Slice(1, out.count - 1)},
                                   {.after = in.stream()});
        };
        const std::vector<Work> works = {gather(small.view(), 2000), gather(large.view(), 9000)};
        absl::Status ended;
        for (const Work& work : works)
          ended.Update(work.OrderBefore(large.stream()));  // They are launched.
        EXPECT_GE(devices_.held_bytes(comm.device()) - held, (2000 + 9000) * w * 4);
        go_on.Notify();
        for (const Work& work : works) ended.Update(work.Wait());
        return ended;
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(NcclGroupTest, SplitMakesIndependentGroups) {
  const absl::Status status =
      RunSimulated(devices_, nccl_, GetParam(), [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> half, comm.Split(comm.rank() % 2, 0));
        EXPECT_EQ(half->device(), comm.device());
        EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(*half, 3));
        const std::vector<float> ones(3, 1.0f);
        std::vector<float> sum;
        EK_RETURN_IF_ERROR(floats.Write(ones));
        EK_RETURN_IF_ERROR(half->user()
                               .AllReduce(floats.view(), ReduceOp::kSum, {.after = floats.stream()})
                               .Wait());
        EK_RETURN_IF_ERROR(floats.Read(sum));
        EK_RETURN_IF_ERROR(floats.Synchronize());
        EXPECT_EQ(sum, std::vector<float>(3, static_cast<float>(half->world_size())));
        EK_RETURN_IF_ERROR(half->Finalize());
        return comm.Barrier();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Devices that have room for one kernel at a time: what comm/nccl/nccl.h asks of those who use
// several groups is enough.
TEST_P(NcclGroupTest, GroupsThatShareDevicesGoOnWhereOneIsPutBehindTheOther) {
  SimulatedNccl nccl(devices_, /*kernels_at_once=*/1);
  const absl::Status status =
      RunSimulated(devices_, nccl, GetParam(), [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> other, comm.Split(0, 0));
        EK_ASSIGN_OR_RETURN(Floats floats, Floats::Create(comm, 100));
        const std::vector<float> mine(100, static_cast<float>(comm.rank() + 1));
        std::vector<float> greatest;
        EK_RETURN_IF_ERROR(floats.Write(mine));
        for (int i = 0; i < 30; ++i) {
          for (Communicator* const group : {&comm, other.get()}) {
            const Work work =
                group->user().AllReduce(floats.view(), ReduceOp::kMax, {.after = floats.stream()});
            EK_RETURN_IF_ERROR(work.OrderBefore(floats.stream()));
            if (i % 3 == 0) EK_RETURN_IF_ERROR(work.Wait());
          }
        }
        EK_RETURN_IF_ERROR(floats.Read(greatest));
        EK_RETURN_IF_ERROR(floats.Synchronize());
        EXPECT_EQ(greatest, std::vector<float>(100, static_cast<float>(comm.world_size())));
        EK_RETURN_IF_ERROR(other->Finalize());
        return comm.Barrier();
      });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, NcclGroupTest, testing::Values(1, 2, 3, 5),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel::internal
