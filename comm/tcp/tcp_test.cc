// Tests of TCP's own behaviour; tests/conformance tests all backends.

#include "evenkeel/comm/tcp/tcp.h"

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/few_threads.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(20);

// Runs a body per rank, each in a thread. The body's communicator is finalized if it returns OK.
std::vector<absl::Status> RunTcpRanks(int world_size,
                                      const std::function<absl::Status(Communicator&)>& body,
                                      absl::Duration timeout = kSoon) {
  auto group = CreateTcpGroupInProcess(world_size, {.timeout = timeout});
  EXPECT_TRUE(group.ok()) << group.status();
  std::vector<absl::Status> statuses(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator& comm = *(*group)[rank];
      statuses[rank] = body(comm);
      if (statuses[rank].ok()) {
        statuses[rank] = comm.Finalize(kSoon);
      } else {
        comm.Abort(statuses[rank]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

TEST(TcpTest, SumsOverRanks) {
  for (const int world : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(world);
    EXPECT_THAT(
        RunTcpRanks(world,
                    [&](Communicator& comm) -> absl::Status {
                      for (const int64_t n : {1, 2, 7, 1000, 300000}) {
                        std::vector<float> data(n, comm.rank() + 1);
                        EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
                        EXPECT_THAT(data, Each(world * (world + 1) / 2)) << n;
                      }
                      return absl::OkStatus();
                    }),
        Each(absl::OkStatus()));
  }
}

// Every rank gets its own chunk of the sum, for sizes around the pieces in which chunks travel.
TEST(TcpTest, ReduceScatterGivesEachRankItsChunk) {
  for (const int world : {1, 2, 3, 5}) {
    for (const int64_t n : {1, 3, 65535, 65536, 65537, 200001}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, ", n));
      EXPECT_THAT(RunTcpRanks(world,
                              [&](Communicator& comm) -> absl::Status {
                                std::vector<int32_t> input(world * n), output(n);
                                for (size_t i = 0; i < input.size(); ++i)
                                  input[i] = (comm.rank() + 1) * (i % 1009);
                                const std::vector<int32_t> before = input;
                                EK_RETURN_IF_ERROR(comm.ReduceScatter(
                                    absl::MakeSpan(input), absl::MakeSpan(output), ReduceOp::kSum));
                                EXPECT_EQ(input, before);
                                for (int64_t i = 0; i < n; ++i) {
                                  const int64_t at = comm.rank() * n + i;
                                  EXPECT_EQ(output[i], world * (world + 1) / 2 * (at % 1009));
                                  if (testing::Test::HasFailure()) break;
                                }
                                return absl::OkStatus();
                              }),
                  Each(absl::OkStatus()));
    }
  }
}

TEST(TcpTest, ReduceScatterScalesAndLeavesRanksOut) {
  EXPECT_THAT(
      RunTcpRanks(
          3,
          [&](Communicator& comm) -> absl::Status {
            std::vector<float> input(30, 8), output(10);
            CallOptions options{.scale = 0.5, .contributes = comm.rank() != 1};
            EK_RETURN_IF_ERROR(comm.user()
                                   .ReduceScatter(absl::MakeSpan(input), absl::MakeSpan(output),
                                                  ReduceOp::kSum, options)
                                   .Wait());
            EXPECT_THAT(output, Each(8));
            // In place: the output is this rank's chunk of the input.
            const absl::Span<float> mine = absl::MakeSpan(input).subspan(10 * comm.rank(), 10);
            EK_RETURN_IF_ERROR(comm.ReduceScatter(absl::MakeSpan(input), mine, ReduceOp::kAverage));
            EXPECT_THAT(mine, Each(8));
            return absl::OkStatus();
          }),
      Each(absl::OkStatus()));
}

TEST(TcpTest, AverageOfFloat16DoesNotOverflow) {
  EXPECT_THAT(
      RunTcpRanks(4,
                  [&](Communicator& comm) -> absl::Status {
                    std::vector<Float16> data(100, Float16(60000));
                    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kAverage));
                    for (const Float16 x : data) EXPECT_EQ(float(x), 60000);
                    return absl::OkStatus();
                  }),
      Each(absl::OkStatus()));
}

// Ranks that interleave two channels in opposite order.
TEST(TcpTest, ChannelsDoNotWaitForEachOther) {
  EXPECT_THAT(RunTcpRanks(2,
                          [&](Communicator& comm) -> absl::Status {
                            EK_ASSIGN_OR_RETURN(Channel * a, comm.OpenChannel("a"));
                            EK_ASSIGN_OR_RETURN(Channel * b, comm.OpenChannel("b"));
                            if (comm.rank() == 1) std::swap(a, b);
                            for (int i = 0; i < 50; ++i) {
                              std::vector<float> x(1000, 1), y(1000, 1);
                              Work first = a->AllReduce(absl::MakeSpan(x), ReduceOp::kSum);
                              Work second = b->AllReduce(absl::MakeSpan(y), ReduceOp::kSum);
                              EK_RETURN_IF_ERROR(second.Wait());
                              EK_RETURN_IF_ERROR(first.Wait());
                              EXPECT_THAT(x, Each(2));
                              EXPECT_THAT(y, Each(2));
                            }
                            return absl::OkStatus();
                          }),
              Each(absl::OkStatus()));
}

TEST(TcpTest, MessagesCrossWithoutWaitingForEachOther) {
  EXPECT_THAT(RunTcpRanks(3,
                          [&](Communicator& comm) -> absl::Status {
                            const int n = 100000, next = (comm.rank() + 1) % 3,
                                      previous = (comm.rank() + 2) % 3;
                            std::vector<int64_t> out(n, comm.rank()), in(n, -1);
                            for (int i = 0; i < 5; ++i) {
                              Work sent = comm.user().Send(absl::MakeSpan(out), next);
                              Work received = comm.user().Recv(absl::MakeSpan(in), previous);
                              EK_RETURN_IF_ERROR(sent.Wait());
                              EK_RETURN_IF_ERROR(received.Wait());
                              EXPECT_THAT(in, Each(previous));
                            }
                            return absl::OkStatus();
                          }),
              Each(absl::OkStatus()));
}

// Different sizes, kinds, dtypes, reductions or roots at one position: no pair completes, nothing
// is mixed.
TEST(TcpTest, DifferentCollectivesNeverPair) {
  std::vector<float> data[2] = {std::vector<float>(64, 1), std::vector<float>(64, 2)};
  const std::vector<std::function<Work(Channel&, absl::Span<float>)>> calls = {
      [](Channel& c, absl::Span<float> x) { return c.AllReduce(x, ReduceOp::kSum); },
      [](Channel& c, absl::Span<float> x) { return c.AllReduce(x, ReduceOp::kMax); },
      [](Channel& c, absl::Span<float> x) { return c.AllReduce(x.first(32), ReduceOp::kSum); },
      [](Channel& c, absl::Span<float> x) {
        return c.AllReduce(absl::Span<int32_t>(reinterpret_cast<int32_t*>(x.data()), x.size()),
                           ReduceOp::kSum);
      },
      [](Channel& c, absl::Span<float> x) { return c.Broadcast(x, 0); },
      [](Channel& c, absl::Span<float> x) { return c.Broadcast(x, 1); },
      [](Channel& c, absl::Span<float> x) {
        return c.AllReduce(x, ReduceOp::kSum, {.role = Role::kBucket});
      },
      [](Channel& c, absl::Span<float> x) {
        return c.AllReduce(x, ReduceOp::kSum, {.scale = 0.5});
      },
      [](Channel& c, absl::Span<float>) { return c.Barrier(); },
  };
  for (size_t i = 1; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    absl::Status moved[2];  // Statuses of the collectives; the group may end for another reason.
    RunTcpRanks(
        2,
        [&](Communicator& comm) {
          Work work =
              calls[comm.rank() == 0 ? 0 : i](comm.user(), absl::MakeSpan(data[comm.rank()]));
          return moved[comm.rank()] = work.Wait();
        },
        absl::Milliseconds(300));
    for (const absl::Status& status : moved) EXPECT_FALSE(status.ok());
  }
}

TEST(TcpTest, AbortEndsEverythingInFlight) {
  auto group = CreateTcpGroupInProcess(3, {.timeout = absl::Minutes(10)});
  ASSERT_TRUE(group.ok()) << group.status();
  // Rank 2 never comes.
  std::deque<std::vector<float>> buffers;
  const auto buffer = [&] { return absl::MakeSpan(buffers.emplace_back(100000, 1)); };
  std::vector<Work> works;
  for (int rank : {0, 1}) {
    for (const char* name : {"a", "b", "c"}) {
      Channel* const channel = (*group)[rank]->OpenChannel(name).value();
      works.push_back(channel->AllReduce(buffer(), ReduceOp::kSum));
      works.push_back(channel->Barrier());
      works.push_back(channel->Recv(buffer(), 2));
    }
  }
  const absl::Time start = absl::Now();
  (*group)[0]->Abort(absl::CancelledError("enough"));
  for (const Work& work : works)
    EXPECT_THAT(std::string(work.Wait().message()), HasSubstr("enough"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_THAT(std::string((*group)[2]->Barrier().message()), HasSubstr("rank 0 aborted the group"));
}

TEST(TcpTest, AbortInTheMiddleOfTrafficTouchesNoBufferAfterwards) {
  for (int round = 0; round < 10; ++round) {
    const std::vector<absl::Status> statuses =
        RunTcpRanks(2, [&](Communicator& comm) -> absl::Status {
          std::thread killer;
          if (comm.rank() == 0) {
            killer = std::thread([&] {
              absl::SleepFor(absl::Milliseconds(round));
              comm.Abort(absl::CancelledError("stop"));
            });
          }
          absl::Status status;
          while (status.ok()) {
            auto data = std::make_unique<std::vector<float>>(
                50000, 1);  // Freed at once: asan sees who still writes.
            status = comm.AllReduce(absl::MakeSpan(*data), ReduceOp::kSum);
          }
          if (killer.joinable()) killer.join();
          return status;
        });
    for (const absl::Status& status : statuses)
      EXPECT_THAT(std::string(status.message()), HasSubstr("stop"));
  }
}

// A message is half sent, or half received, when the group ends.
TEST(TcpTest, AbortEndsAMessageThatIsHalfWayThrough) {
  std::vector<std::vector<uint8_t>> data(2, std::vector<uint8_t>(size_t{128} << 20));
  for (int aborts : {0, 1}) {
    auto group = CreateTcpGroupInProcess(2, {.timeout = absl::Minutes(10)});
    ASSERT_TRUE(group.ok()) << group.status();
    const Work sent = (*group)[0]->user().Send(absl::MakeSpan(data[0]), 1);
    const Work received = (*group)[1]->user().Recv(absl::MakeSpan(data[1]), 0);
    absl::SleepFor(absl::Milliseconds(5));  // Any moment will do; most of them are in the middle.
    const absl::Time start = absl::Now();
    (*group)[aborts]->Abort(absl::CancelledError("enough"));
    for (const Work& work : {sent, received}) {
      const absl::Status status = work.Wait();
      EXPECT_TRUE(status.ok() || absl::IsCancelled(status) || absl::IsUnavailable(status))
          << status;
    }
    EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  }
}

TEST(TcpTest, ADeadlineEndsTheGroupAndSaysWhere) {
  const std::vector<absl::Status> statuses = RunTcpRanks(
      2,
      [&](Communicator& comm) -> absl::Status {
        if (comm.rank() == 1) {
          while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(5));
          return comm.status();
        }
        return comm.Barrier();
      },
      absl::Milliseconds(100));
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 waited 100ms in #0 barrier"));
  }
}

TEST(TcpTest, ALostRankIsNamed) {
  const std::unique_ptr<TcpStoreServer> server = TcpStoreServer::Create({.secret = "s"}).value();
  std::vector<absl::Status> statuses(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      auto link = TcpControlLink::Connect({.addresses = {server->address()},
                                           .secret = "s",
                                           .rank = rank,
                                           .world_size = 3,
                                           .timeout = kSoon});
      ASSERT_TRUE(link.ok()) << link.status();
      auto comm = CreateTcpGroup(rank, 3, *std::move(link));
      ASSERT_TRUE(comm.ok()) << comm.status();
      for (int step = 0; statuses[rank].ok(); ++step) {
        if (rank == 2 && step == 5) return;  // Its communicator goes without Finalize.
        std::vector<float> data(10000, 1);
        statuses[rank] = (*comm)->AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank : {0, 1}) {
    EXPECT_TRUE(absl::IsUnavailable(statuses[rank])) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 2 of 3 is lost"));
  }
}

TEST(CreateTcpGroupTest, AThreadThatCannotStartIsTheErrorOfAllRanks) {
  const auto run = [] {
    return CreateTcpGroupInProcess(3, {.timeout = absl::Minutes(1)}).status();
  };
  const int threads = ThreadsNeeded(run, [](int threads, const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("cannot start a thread for"))
        << threads << " threads";
  });
  EXPECT_GT(threads, 3 * 3);
  EXPECT_LT(threads, kMostThreads);
}

TEST(CreateTcpGroupTest, NamesTheRankThatDoesNotCome) {
  auto links = internal::CreateLocalLinks(2);
  const absl::Status status =
      CreateTcpGroup(0, 2, std::move(links[0]), {.connect_timeout = absl::Milliseconds(50)})
          .status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST(CreateTcpGroupTest, NamesTheRankThatIsLostMeanwhile) {
  auto links = internal::CreateLocalLinks(3);
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back(
        [&, rank] { statuses[rank] = CreateTcpGroup(rank, 3, std::move(links[rank])).status(); });
  }
  links[2]->Start([](ToRank) {}, [](absl::Status) {});
  links[2]->Stop();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses)
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2 of 3"));
}

TEST(CreateTcpGroupTest, RefusesAnAddressThatIsNotHere) {
  auto links = internal::CreateLocalLinks(2);
  const absl::Status status =
      CreateTcpGroup(0, 2, std::move(links[0]), {.bind_address = "192.0.2.1"})
          .status();  // RFC 5737: nobody's.
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("192.0.2.1"));
  EXPECT_TRUE(absl::IsInvalidArgument(CreateTcpGroup(2, 2, nullptr).status()));
}

}  // namespace
}  // namespace evenkeel
