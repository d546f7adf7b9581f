// Tests of the behaviour on several hosts; tests/conformance tests all backends, and
// backend_test.cc the order of the steps.

#include "evenkeel/comm/hierarchical/hierarchical.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"
#include "evenkeel/comm/testing/connections.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ContainsRegex;
using testing::Each;
using testing::HasSubstr;

using Hosts = std::vector<std::string>;

absl::Status RunOn(const Hosts& hosts, const std::function<absl::Status(Communicator&)>& body,
                   const CommunicatorOptions& options = {.timeout = absl::Seconds(60)}) {
  EK_ASSIGN_OR_RETURN(auto group, CreateHierarchicalGroupInProcess(hosts, options));
  return internal::RunGroup(group, body);
}

absl::Status ExpectSumOfOnes(Communicator& comm, int64_t count = 100) {
  std::vector<float> data(count, 1.0f);
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
  EXPECT_THAT(data, Each(static_cast<float>(comm.world_size()))) << "rank " << comm.rank();
  return absl::OkStatus();
}

TEST(HierarchicalTest, IsWhatTheHostsAskFor) {
  const auto name_on = [](const Hosts& hosts) -> std::string {
    const auto group = CreateHierarchicalGroupInProcess(hosts);
    return group.ok() ? std::string((*group)[0]->backend_name()) : group.status().ToString();
  };
  EXPECT_EQ(name_on({"a"}), "shm");
  EXPECT_EQ(name_on({"a", "a", "a"}), "shm");
  EXPECT_EQ(name_on({"a", "b", "c"}), "tcp");
  EXPECT_EQ(name_on({"a", "b", "a"}), "hierarchical");
}

// Chunks of buckets that all ranks have in shared memory are reduced where they lie.
TEST(HierarchicalTest, ReducesRegisteredMemory) {
  const absl::Status status =
      RunOn({"a", "a", "b", "b", "b"}, [](Communicator& comm) -> absl::Status {
        constexpr int64_t kCount = (9 << 20) / sizeof(int32_t) + 3;
        EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(kCount * sizeof(int32_t)));
        const TensorView data(memory.data.get(), kCount, DType::kInt32);
        for (int round = 0; round < 3; ++round) {
          for (int64_t i = 0; i < kCount; ++i)
            data.as<int32_t>()[i] = static_cast<int32_t>(i) * (comm.rank() + 1);
          EK_RETURN_IF_ERROR(comm.AllReduce(data, ReduceOp::kSum));
          for (int64_t i = 0; i < kCount; ++i) {
            if (data.as<int32_t>()[i] != static_cast<int32_t>(i) * 15)
              return absl::DataLossError(absl::StrCat("at ", i));
          }
          const TensorView flat = data.Slice(0, kCount / 5 * 5),
                           share = flat.Slice(comm.rank() * (kCount / 5), kCount / 5);
          EK_RETURN_IF_ERROR(comm.ReduceScatter(flat, share, ReduceOp::kMax));
          EK_RETURN_IF_ERROR(comm.AllGather(share, flat));
          for (int64_t i = 0; i < flat.count; ++i) {
            if (flat.as<int32_t>()[i] != static_cast<int32_t>(i) * 15)
              return absl::DataLossError(absl::StrCat("at ", i));
          }
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Ranks 0 and 1 share a host, and a broadcast from rank 2 begins there as one from rank 0 does.
TEST(HierarchicalTest, RootsThatDifferEndTheGroupAtOnce) {
  const absl::Time start = SteadyNow();
  const absl::Status status = RunOn({"a", "a", "b", "b"}, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(100, static_cast<float>(comm.rank()));
    const absl::Status ended = comm.Broadcast(absl::MakeSpan(data), comm.rank() == 1 ? 2 : 0);
    if (comm.rank() == 1) {
      EXPECT_FALSE(ended.ok());
      EXPECT_THAT(data, Each(1.0f)) << "it has what rank 2 did not send";
    }
    return ended.ok() ? comm.Barrier() : ended;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the ranks disagree"));
  EXPECT_LT(SteadyNow() - start, absl::Seconds(5));
}

TEST(HierarchicalTest, SplitsInsideAndAcrossHosts) {
  const absl::Status status =
      RunOn({"a", "a", "b", "b", "c"}, [](Communicator& comm) -> absl::Status {
        struct Case {
          std::vector<int> colors;
          std::vector<std::string> names;
        };
        for (const Case& one :
             {Case{{0, 0, 1, 1, 2}, {"shm", "shm", "shm", "shm", "shm"}},
              Case{{0, 1, 0, 1, 1}, {"tcp", "tcp", "tcp", "tcp", "tcp"}},
              Case{{0, 0, 0, 1, 1},
                   {"hierarchical", "hierarchical", "hierarchical", "tcp", "tcp"}}}) {
          EK_ASSIGN_OR_RETURN(auto part,
                              comm.Split(one.colors[comm.rank()], comm.rank(), absl::Seconds(30)));
          EXPECT_EQ(part->backend_name(), one.names[comm.rank()]) << "rank " << comm.rank();
          EK_RETURN_IF_ERROR(ExpectSumOfOnes(*part));
          EK_RETURN_IF_ERROR(part->Finalize());
        }
        return ExpectSumOfOnes(comm);
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Ranks leave without a word: the rest of the group goes on, whoever spoke for the host.
TEST(HierarchicalTest, ShrinksWhenAHostLosesRanks) {
  struct Case {
    const char* what;
    std::vector<int> lost;
    std::string name;
  };
  for (const Case& one :
       {Case{"a leader", {0}, "hierarchical"}, Case{"another rank", {1}, "hierarchical"},
        Case{"a whole host", {0, 1}, "shm"}, Case{"one rank of each host", {1, 2, 4}, "tcp"}}) {
    SCOPED_TRACE(one.what);
    auto group =
        CreateHierarchicalGroupInProcess({"a", "a", "b", "b", "b"}, {.timeout = absl::Seconds(60)});
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<std::thread> threads;
    for (std::unique_ptr<Communicator>& comm : *group) {
      threads.emplace_back([&] {
        const int rank = comm->rank();
        if (std::count(one.lost.begin(), one.lost.end(), rank) > 0) {
          comm.reset();
          return;
        }
        std::vector<float> data(1 << 20, 1.0f);
        absl::Status ended;
        while (ended.ok()) ended = comm->AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
        EXPECT_THAT(std::string(ended.message()), HasSubstr("rank")) << ended;
        auto next = comm->Shrink(absl::Seconds(30));
        ASSERT_TRUE(next.ok()) << "rank " << rank << ": " << next.status();
        EXPECT_EQ((*next)->world_size(), 5 - static_cast<int>(one.lost.size()));
        EXPECT_EQ((*next)->backend_name(), one.name);
        EXPECT_TRUE(ExpectSumOfOnes(**next).ok());
        const absl::Status left = (*next)->Finalize();
        EXPECT_TRUE(left.ok()) << left;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Connections between hosts -----------------------------------------------------------------------

using Group = std::vector<std::unique_ptr<Communicator>>;

// All ranks of two hosts with two ranks each add until that fails; how it did on each.
std::vector<absl::Status> AddUntilTheEnd(Group& group,
                                         absl::Duration at_most = absl::InfiniteDuration()) {
  const absl::Time until = SteadyNow() + at_most;
  std::vector<absl::Status> ended(group.size());
  std::vector<std::thread> threads;
  for (std::unique_ptr<Communicator>& comm : group) {
    threads.emplace_back([&] {
      std::vector<float> data(50'000, 1.0f);
      absl::Status& status = ended[comm->rank()];
      bool is_over = false;
      while (status.ok() && !is_over) {
        status = comm->AllReduce(absl::MakeSpan(data), ReduceOp::kAverage);
        const absl::StatusOr<bool> agreed = comm->AgreeAny(SteadyNow() >= until);
        is_over = !agreed.ok() || *agreed;
      }
      if (status.ok()) status = comm->status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ended;
}

// The leaders are ranks 0 and 2, which count as 0 and 1 in the transport between them.
TEST(HierarchicalTest, AConnectionBetweenHostsThatBreaksIsCalledByTheRanksOfTheGroup) {
  auto group =
      CreateHierarchicalGroupInProcess({"a", "a", "b", "b"}, {.timeout = absl::Seconds(60)});
  ASSERT_TRUE(group.ok()) << group.status();
  for (const int fd : internal::TcpConnections()) shutdown(fd, SHUT_RDWR);
  for (const absl::Status& status : AddUntilTheEnd(*group)) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                ContainsRegex("rank [02] closed its connection to rank [02]"));
  }
}

// A fault of the network on the connections of a group.
struct Network {
  const char* what;
  std::function<void(int fd)> begin, end;
  absl::Duration lasts;
  bool is_warned_of;
  absl::StatusCode ends;
};

class WatchedGroup {
 public:
  explicit WatchedGroup(const Network& network) : network_(network) {
    const std::vector<int> others = internal::TcpConnections();
    CommunicatorOptions options;
    options.watch.stall_warning = absl::InfiniteDuration();  // The ranks wait for the network.
    options.watch.warn = [this](const std::string& text) {
      absl::MutexLock lock(&mutex_);
      warned_.emplace_back(SteadyNow(), text);
    };
    auto group = CreateHierarchicalGroupInProcess({"a", "a", "b", "b"}, options);
    EXPECT_TRUE(group.ok()) << group.status();
    if (group.ok()) group_ = *std::move(group);
    for (const int fd : internal::TcpConnections()) {
      if (std::count(others.begin(), others.end(), fd) == 0) fds_.push_back(fd);
    }
    EXPECT_FALSE(fds_.empty());
  }

  void Run() {
    SCOPED_TRACE(network_.what);
    const absl::Time start = SteadyNow();
    for (const int fd : fds_) network_.begin(fd);
    std::thread network([&] {
      if (network_.end == nullptr) return;
      absl::SleepFor(network_.lasts);
      for (const int fd : fds_) network_.end(fd);
    });
    const std::vector<absl::Status> ended = AddUntilTheEnd(group_, kEnd);
    const absl::Duration took = SteadyNow() - start;
    network.join();
    for (const absl::Status& status : ended) {
      EXPECT_EQ(status.code(), network_.ends) << status;
      if (status.ok()) continue;
      EXPECT_THAT(std::string(status.message()),
                  ContainsRegex("rank [0-3] has acknowledged nothing from rank [0-3] for 15s"));
      EXPECT_GE(took, kEnd);
      EXPECT_LT(took, kEnd + kBusy);
    }
    absl::MutexLock lock(&mutex_);
    EXPECT_EQ(!warned_.empty(), network_.is_warned_of);
    for (const auto& [at, text] : warned_) {
      EXPECT_THAT(text,
                  ContainsRegex("rank [0-3] has acknowledged nothing from rank [0-3] for 5s"));
      EXPECT_GE(at, start + kWarned);
    }
    if (!warned_.empty()) {
      EXPECT_LT(warned_.front().first, start + kWarned + kBusy);
    }
  }

 private:
  static constexpr absl::Duration kWarned = absl::Seconds(5), kEnd = absl::Seconds(15),
                                  kBusy = absl::Seconds(5);

  const Network network_;
  Group group_;
  std::vector<int> fds_;
  absl::Mutex mutex_;
  std::vector<std::pair<absl::Time, std::string>> warned_ ABSL_GUARDED_BY(mutex_);
};

TEST(HierarchicalTest, AConnectionBetweenHostsThatDeliversNothingEndsAfterFifteenSeconds) {
  constexpr int kSlow = 200'000 / 8;
  const std::vector<Network> networks = {
      {"nothing arrives",
       internal::DropIncoming,
       nullptr,
       {},
       true,
       absl::StatusCode::kUnavailable},
      {"nothing for 8 s", internal::DropIncoming, internal::StopDropping, absl::Seconds(8), true,
       absl::StatusCode::kOk},
      {"200 kbit/s",
       [](int fd) { internal::SlowDown(fd, kSlow); },
       nullptr,
       {},
       false,
       absl::StatusCode::kOk}};
  std::vector<std::unique_ptr<WatchedGroup>> groups;
  for (const Network& network : networks) groups.push_back(std::make_unique<WatchedGroup>(network));
  std::vector<std::thread> threads;
  for (auto& group : groups) threads.emplace_back([&] { group->Run(); });
  for (std::thread& thread : threads) thread.join();
}

// Rank 0 has handed its data to the kernel, which can't deliver it: it has nothing in flight, and
// waits for the others by the control plane, while they wait for the data.
TEST(HierarchicalTest, AConnectionThatDeliversNothingEndsRanksThatHaveNothingInFlight) {
  std::vector<Group> groups;
  const std::vector<int> others = internal::TcpConnections();
  groups.push_back(*CreateHierarchicalGroupInProcess({"a", "a", "b", "b"}));
  groups.push_back(*CreateTcpGroupInProcess(2));
  absl::Notification is_asked_for;
  std::vector<std::thread> threads;
  for (const Group& group : groups) {
    for (const std::unique_ptr<Communicator>& comm : group) {
      threads.emplace_back([&, &comm = *comm] {
        if (comm.rank() == 0) is_asked_for.WaitForNotification();
        std::vector<float> data(10'000, 1.0f);
        absl::Status ended = comm.Broadcast(absl::MakeSpan(data), 0);
        EXPECT_TRUE(ended.ok() || comm.rank() != 0) << ended;
        if (ended.ok()) ended = comm.MonitoredBarrier(absl::Minutes(2));
        EXPECT_THAT(std::string(ended.message()),
                    ContainsRegex("rank [12] has acknowledged nothing from rank 0 for 15s"));
      });
    }
  }
  absl::SleepFor(absl::Seconds(1));  // The receivers have asked for the data.
  for (const int fd : internal::TcpConnections()) {
    if (std::count(others.begin(), others.end(), fd) == 0) internal::DropIncoming(fd);
  }
  const absl::Time start = SteadyNow();
  is_asked_for.Notify();
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(SteadyNow() - start, absl::Seconds(30));
}

TEST(HierarchicalTest, RefusesWhatIsNoGroup) {
  EXPECT_EQ(CreateHierarchicalGroup(3, 3, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateHierarchicalGroupInProcess({}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
