#include "evenkeel/comm/hierarchical/backend.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/hierarchical/host_map.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/hosts.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

const CommunicatorOptions kOptions = {.timeout = absl::Seconds(60)};

const std::vector<Hosts>& Layouts() {
  static const auto& layouts = *new std::vector<Hosts>{
      {"a"},
      {"a", "a"},
      {"a", "b"},
      {"a", "a", "b"},
      {"a", "b", "b"},
      {"a", "b", "a"},
      {"a", "b", "c"},
      {"a", "a", "b", "b"},
      {"a", "b", "a", "b"},
      {"a", "b", "b", "a", "c"},
      {"a", "a", "a", "b", "b"},
      {"a", "a", "a", "a", "b", "b", "b", "b"},
      {"d", "a", "b", "b", "a", "c", "b", "b"},
  };
  return layouts;
}

absl::Status RunOn(const Hosts& hosts, absl::FunctionRef<absl::Status(Communicator&)> body,
                   const CommunicatorOptions& options = kOptions) {
  return RunGroup(CreateGroupOnHosts(hosts, options), body);
}

class LayoutTest : public testing::TestWithParam<Hosts> {};

int64_t ValueAt(int rank, int64_t i) { return static_cast<int64_t>(StableHash(rank + 1, i) >> 44); }
std::vector<int64_t> Values(int rank, int64_t n) {
  std::vector<int64_t> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = ValueAt(rank, i);
  return values;
}
std::vector<int64_t> Sums(int ranks, int64_t n) {
  std::vector<int64_t> sums(n);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t i = 0; i < n; ++i) sums[i] += ValueAt(rank, i);
  }
  return sums;
}

// Every collective with every root, on one channel and without waiting in between, so that a step
// that is out of turn would meet another one.
TEST_P(LayoutTest, CollectivesWithEveryRootFollowEachOther) {
  absl::Status status = RunOn(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    constexpr int64_t kCount = 700;
    struct Buffers {
      std::vector<int64_t> sum, reduced, sent, gathered, scattered, exchanged;
    };
    std::vector<int64_t> mine = Values(comm.rank(), kCount), all = Values(comm.rank(), kCount * w);
    std::vector<Buffers> buffers(w);
    std::vector<Work> works;
    for (int root = 0; root < w; ++root) {
      Buffers& b = buffers[root];
      b = {.sum = mine,
           .reduced = mine,
           .sent = mine,
           .gathered = std::vector<int64_t>(kCount * w),
           .scattered = std::vector<int64_t>(kCount),
           .exchanged = std::vector<int64_t>(kCount * w)};
      Channel& channel = comm.user();
      works.push_back(channel.Reduce(absl::MakeSpan(b.reduced), ReduceOp::kSum, root));
      works.push_back(channel.Broadcast(absl::MakeSpan(b.sent), root));
      works.push_back(channel.Barrier());
      works.push_back(channel.AllReduce(absl::MakeSpan(b.sum), ReduceOp::kSum));
      works.push_back(channel.AllGather(absl::MakeSpan(mine), absl::MakeSpan(b.gathered)));
      works.push_back(
          channel.ReduceScatter(absl::MakeSpan(all), absl::MakeSpan(b.scattered), ReduceOp::kSum));
      works.push_back(channel.AllToAll(absl::MakeSpan(all), absl::MakeSpan(b.exchanged)));
    }
    for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());

    const std::vector<int64_t> sums = Sums(w, kCount * w);
    for (int root = 0; root < w; ++root) {
      const Buffers& b = buffers[root];
      EXPECT_EQ(b.sum, std::vector<int64_t>(sums.begin(), sums.begin() + kCount))
          << "root " << root;
      EXPECT_TRUE(comm.rank() != root || b.reduced == b.sum);
      EXPECT_EQ(b.sent, Values(root, kCount)) << "root " << root;
      std::vector<int64_t> gathered, exchanged;
      for (int rank = 0; rank < w; ++rank) {
        for (int64_t i = 0; i < kCount; ++i) gathered.push_back(ValueAt(rank, i));
        for (int64_t i = 0; i < kCount; ++i)
          exchanged.push_back(ValueAt(rank, comm.rank() * kCount + i));
      }
      EXPECT_EQ(b.gathered, gathered);
      EXPECT_EQ(b.exchanged, exchanged);
      EXPECT_EQ(b.scattered, std::vector<int64_t>(sums.begin() + comm.rank() * kCount,
                                                  sums.begin() + (comm.rank() + 1) * kCount));
    }
    EXPECT_EQ(all, Values(comm.rank(), kCount * w)) << "inputs are not written";
    EXPECT_EQ(mine, Values(comm.rank(), kCount));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(LayoutTest, MessagesFindTheirWayInsideAndBetweenHosts) {
  absl::Status status = RunOn(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    std::vector<std::vector<int64_t>> received(w, std::vector<int64_t>(50));
    std::vector<int64_t> mine = Values(comm.rank(), 50);
    for (int round = 0; round < 3; ++round) {
      std::vector<Work> works;
      for (int peer = 0; peer < w; ++peer) {
        if (peer == comm.rank()) continue;
        works.push_back(comm.user().Send(absl::MakeSpan(mine), peer));
        works.push_back(comm.user().Recv(absl::MakeSpan(received[peer]), peer));
      }
      for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
      for (int peer = 0; peer < w; ++peer) {
        EXPECT_TRUE(peer == comm.rank() || received[peer] == Values(peer, 50))
            << "from rank " << peer;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Sums that need rounding, of more than one chunk: whatever the order, it is one order.
TEST_P(LayoutTest, ResultsAreEqualOnAllRanksBitForBit) {
  constexpr int64_t kCount = (9 << 20) / sizeof(float);
  const auto input = [](int rank, int64_t i) {
    return static_cast<float>(StableHash(rank, i) >> 40) * 1e-7f - 0.3f;
  };
  const int ranks = static_cast<int>(GetParam().size());
  std::vector<std::vector<float>> results(ranks);
  absl::Status status = RunOn(GetParam(), [&](Communicator& comm) -> absl::Status {
    std::vector<float>& data = results[comm.rank()];
    data.resize(kCount);
    for (int64_t i = 0; i < kCount; ++i) data[i] = input(comm.rank(), i);
    const TensorView whole{absl::MakeSpan(data)};
    EK_RETURN_IF_ERROR(
        comm.user()
            .AllReduce({whole.Slice(0, 1000), whole.Slice(1000, kCount - 1000)}, ReduceOp::kAverage)
            .Wait());
    return comm.Broadcast(whole.Slice(10, kCount - 10), comm.world_size() - 1);
  });
  ASSERT_TRUE(status.ok()) << status;
  for (int rank = 1; rank < ranks; ++rank) {
    ASSERT_EQ(std::memcmp(results[0].data(), results[rank].data(), kCount * sizeof(float)), 0)
        << "rank " << rank;
  }
  for (int64_t i = 0; i < kCount; i += 997) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += input(rank, i);
    EXPECT_NEAR(results[0][i], sum / ranks, 1e-6) << i;
  }
}

// The sum of these 16-bit floats is out of range, and their mean is not.
TEST_P(LayoutTest, AnAverageOfLargeFloat16StaysInRange) {
  absl::Status status = RunOn(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<Float16> data(100, Float16(60000.0f));
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kAverage));
    EXPECT_NEAR(static_cast<float>(data[99]), 60000.0f, 60000.0f / 200);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Divided once: in two steps -1 over two ranks of each of two hosts would round twice.
TEST_P(LayoutTest, AnAverageOfIntegersIsDividedOnce) {
  absl::Status status = RunOn(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    for (int32_t sum : {-7, -1, 1, 3 * w - 1, 1 - 3 * w}) {
      const int32_t mine = comm.rank() == 0 ? sum : 0;
      std::vector<int32_t> data(w, mine), in(w * w, mine), share(w);
      EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kAverage));
      EXPECT_EQ(data, std::vector<int32_t>(w, sum / w));
      EK_RETURN_IF_ERROR(
          comm.ReduceScatter(absl::MakeSpan(in), absl::MakeSpan(share), ReduceOp::kAverage));
      EXPECT_EQ(share, std::vector<int32_t>(w, sum / w));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Shares of the output that are some other rank's place: whatever comes first may not destroy what
// is still to be read.
TEST_P(LayoutTest, InputsMayOverlapOutputsAnywhere) {
  absl::Status status = RunOn(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    constexpr int64_t kCount = 300;
    std::vector<int64_t> flat(w * kCount);
    const TensorView whole{absl::MakeSpan(flat)};
    for (int64_t begin : {int64_t{0}, kCount * (w - 1), (w - 1) * kCount / 2}) {
      const std::vector<int64_t> mine = Values(comm.rank(), kCount);
      std::copy(mine.begin(), mine.end(), flat.begin() + begin);
      EK_RETURN_IF_ERROR(comm.AllGather(whole.Slice(begin, kCount), whole));
      for (int rank = 0; rank < w; ++rank) {
        EXPECT_EQ(
            std::vector<int64_t>(flat.begin() + rank * kCount, flat.begin() + (rank + 1) * kCount),
            Values(rank, kCount));
      }
      const std::vector<int64_t> all = Values(comm.rank(), w * kCount);
      std::copy(all.begin(), all.end(), flat.begin());
      EK_RETURN_IF_ERROR(comm.ReduceScatter(whole, whole.Slice(begin, kCount), ReduceOp::kSum));
      const std::vector<int64_t> sums = Sums(w, w * kCount);
      EXPECT_EQ(std::vector<int64_t>(flat.begin() + begin, flat.begin() + begin + kCount),
                std::vector<int64_t>(sums.begin() + comm.rank() * kCount,
                                     sums.begin() + (comm.rank() + 1) * kCount));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Hosts, LayoutTest, testing::ValuesIn(Layouts()),
                         [](const auto& info) { return absl::StrJoin(info.param, ""); });

// Traffic between hosts ---------------------------------------------------------------------------

struct Traffic {
  absl::Mutex mutex;
  std::vector<Collective> seen ABSL_GUARDED_BY(mutex);

  int64_t Elements() {
    absl::MutexLock lock(&mutex);
    int64_t elements = 0;
    for (const Collective& what : seen) elements += what.count;
    seen.clear();
    return elements;
  }
};

class WatchedBackend : public Backend {
 public:
  WatchedBackend(std::unique_ptr<Backend> watched, Traffic* traffic)
      : watched_(std::move(watched)), traffic_(traffic) {}
  absl::string_view name() const override { return watched_->name(); }
  absl::Status Supports(const Collective& what) const override { return watched_->Supports(what); }
  void Abort(const absl::Status& why) override { watched_->Abort(why); }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override {
    {
      absl::MutexLock lock(&traffic_->mutex);
      traffic_->seen.push_back(operation.what);
    }
    watched_->Start(std::move(operation), std::move(work));
  }

 private:
  const std::unique_ptr<Backend> watched_;
  Traffic* const traffic_;
};

TEST(TrafficTest, EachElementCrossesOnceForEachHost) {
  constexpr int kRanks = 6, kLeaders = 2;
  constexpr int64_t kCount = 3 << 20;  // Elements of 4 bytes: several chunks.
  Traffic traffic;
  auto backends =
      CreateBackendsOnHosts({"a", "b", "a", "a", "b", "b"}, [&](std::unique_ptr<Backend> between) {
        return std::make_unique<WatchedBackend>(std::move(between), &traffic);
      });
  const auto elements_of = [&](Communicator& comm, const Work& work) -> int64_t {
    EXPECT_TRUE(work.Wait().ok()) << work.Wait();
    // The barrier's own steps have no elements.
    EXPECT_TRUE(comm.Barrier().ok());
    const int64_t elements = comm.rank() == 0 ? traffic.Elements() : 0;
    EXPECT_TRUE(comm.Barrier().ok());
    return elements;
  };
  absl::Status status =
      RunGroup(CreateGroupOver(std::move(backends), kOptions), [&](Communicator& comm) {
        Channel& channel = comm.user();
        std::vector<float> data(kCount, 1.0f);
        const TensorView whole{absl::MakeSpan(data)};
        const TensorView share = whole.Slice(comm.rank() * kCount / kRanks, kCount / kRanks);
        const auto expect = [&](absl::string_view what, int64_t elements, int64_t expected) {
          EXPECT_EQ(elements, comm.rank() == 0 ? expected : 0) << what;
        };
        // As each of the leaders sees it.
        expect("all_reduce", elements_of(comm, channel.AllReduce(whole, ReduceOp::kSum)),
               kLeaders * kCount);
        expect("broadcast", elements_of(comm, channel.Broadcast(whole, 5)), kLeaders * kCount);
        expect("reduce", elements_of(comm, channel.Reduce(whole, ReduceOp::kMax, 4)),
               kLeaders * kCount);
        // By what each leader gives, or gets: its host's half.
        expect("all_gather", elements_of(comm, channel.AllGather(share, whole)),
               kLeaders * kCount / 2);
        expect("reduce_scatter",
               elements_of(comm, channel.ReduceScatter(whole, share, ReduceOp::kSum)),
               kLeaders * kCount / 2);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Failures ----------------------------------------------------------------------------------------

// An operation started on a backend by itself, with a buffer of its own.
struct Running {
  std::vector<float> data;
  std::shared_ptr<WorkState> work = std::make_shared<WorkState>(absl::InfiniteFuture(), nullptr);
};

std::unique_ptr<Running> StartOn(Backend& backend, Collective what, int64_t sequence,
                                 absl::Time deadline = absl::InfiniteFuture()) {
  auto running = std::make_unique<Running>();
  running->data.assign(what.count, 1.0f);
  Operation operation;
  operation.what = what;
  operation.channel = 1;
  operation.sequence = sequence;
  operation.in = operation.out = {TensorView(absl::MakeSpan(running->data))};
  operation.deadline = deadline;
  backend.Start(std::move(operation), running->work);
  return running;
}

Collective SumOf(int64_t count) { return {.kind = CollectiveKind::kAllReduce, .count = count}; }
Collective BroadcastFrom(int root, int64_t count) {
  return {.kind = CollectiveKind::kBroadcast, .count = count, .root = root};
}

TEST(HierarchicalBackendTest, AbortEndsWhatRunsAndWhatComes) {
  for (const Hosts& hosts :
       {Hosts{"a", "a", "b"}, Hosts{"a", "b", "b"}, Hosts{"a", "a"}, Hosts{"a", "b"}}) {
    auto backends = CreateBackendsOnHosts(hosts);
    std::vector<std::unique_ptr<Running>> running;
    for (int i = 0; i < 3; ++i) running.push_back(StartOn(*backends[0], SumOf(1 << 22), i));
    const absl::Status why = absl::UnavailableError("rank 1 was lost");
    backends[0]->Abort(why);
    running.push_back(StartOn(*backends[0], SumOf(10), 3));
    for (auto& one : running) EXPECT_EQ(one->work->Wait(), why);
  }
}

TEST(HierarchicalBackendTest, AnAbortBeforeTheTransportsAreThereReachesThem) {
  auto local = CreateLocalBackends(2);
  HierarchicalBackend backend(0);
  EXPECT_EQ(backend.name(), "hierarchical");
  const absl::Status why = absl::CancelledError("too late");
  backend.Abort(why);
  EXPECT_EQ(backend.Compose(HostMap({"a", "a"}), {.inside = std::move(local[0])}), why);
  EXPECT_EQ(StartOn(backend, SumOf(10), 0)->work->Wait(), why);
}

TEST(HierarchicalBackendTest, IsCalledWhatItIs) {
  const auto name_on = [](const Hosts& hosts) {
    return std::string(CreateBackendsOnHosts(hosts)[0]->name());
  };
  EXPECT_EQ(name_on({"a", "a"}), "local");
  EXPECT_EQ(name_on({"a", "b"}), "local");
  EXPECT_EQ(name_on({"a", "b", "a"}), "hierarchical");
}

TEST(HierarchicalBackendTest, RefusesTransportsThatDoNotFitTheHosts) {
  HierarchicalBackend backend(1);
  const absl::Status refused =
      backend.Compose(HostMap({"a", "a", "b"}), {.all = std::move(CreateLocalBackends(3)[1])});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "host 0 has ranks 0,1; host 1 has rank 2"))
      << refused;
}

// Steps alone look the same: both ranks of the first host take part in a broadcast from its first
//                            rank.
TEST(HierarchicalBackendTest, DifferentRootsDoNotPairInsideAHost) {
  auto backends = CreateBackendsOnHosts({"b", "b", "a", "a"});
  auto from_two = StartOn(*backends[2], BroadcastFrom(2, 10), 0);
  auto from_zero = StartOn(*backends[3], BroadcastFrom(0, 10), 0);
  auto others = {StartOn(*backends[0], BroadcastFrom(2, 10), 0),
                 StartOn(*backends[1], BroadcastFrom(2, 10), 0)};
  const absl::Status ended = from_zero->work->Wait();
  EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition) << ended;
  // It says which operation, and calls the ranks as the group does.
  for (const char* part :
       {"rank 3 at #0 broadcast (user) float32[10] root 0: rank 2 is at #0 broadcast (user) ",
        "; rank 3 is at #0 broadcast (user) float32[10] root 2 in parts"}) {
    EXPECT_TRUE(absl::StrContains(ended.message(), part)) << ended;
  }
  for (auto& backend : backends) backend->Abort(absl::CancelledError("over"));
  EXPECT_FALSE(from_two->work->Wait().ok());
  for (auto& other : others) other->work->Wait().IgnoreError();
}

// An all_reduce begins as a reduce to the leader does.
TEST(HierarchicalBackendTest, DifferentKindsDoNotPairInsideAHost) {
  auto backends = CreateBackendsOnHosts({"a", "a", "b"});
  auto sum = StartOn(*backends[0], SumOf(10), 0);
  auto reduce =
      StartOn(*backends[1],
              {.kind = CollectiveKind::kReduce, .count = 10, .op = ReduceOp::kSum, .root = 0}, 0);
  EXPECT_EQ(sum->work->Wait().code(), absl::StatusCode::kFailedPrecondition) << sum->work->Wait();
  EXPECT_EQ(reduce->work->Wait().code(), absl::StatusCode::kFailedPrecondition)
      << reduce->work->Wait();
}

TEST(HierarchicalBackendTest, WhatNobodyJoinsEndsSoonAfterItsDeadline) {
  auto backends = CreateBackendsOnHosts({"a", "a", "b"});
  const absl::Time start = absl::Now();
  auto alone = StartOn(*backends[1], SumOf(10), 0, start + absl::Milliseconds(100));
  const absl::Status ended = alone->work->Wait();
  EXPECT_EQ(ended.code(), absl::StatusCode::kDeadlineExceeded) << ended;
  EXPECT_TRUE(absl::StrContains(ended.message(), "rank 1 at #0 all_reduce")) << ended;
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

// A failure of one operation leaves steps of it behind that others must not meet.
TEST(HierarchicalBackendTest, AFailureEndsTheBackend) {
  auto backends = CreateBackendsOnHosts({"a", "a", "b"});
  auto first = StartOn(*backends[1], SumOf(10), 0);
  auto other = StartOn(*backends[0], SumOf(11), 0);
  EXPECT_FALSE(first->work->Wait().ok());
  EXPECT_EQ(StartOn(*backends[1], SumOf(10), 1)->work->Wait(), first->work->Wait());
  EXPECT_FALSE(other->work->Wait().ok());
}

}  // namespace
}  // namespace evenkeel::internal
