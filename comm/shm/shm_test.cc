// Tests of shared memory's own behaviour; tests/conformance tests all backends.

#include "evenkeel/comm/shm/shm.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

absl::Status RunShmRanks(int world_size, const std::function<absl::Status(Communicator&)>& body,
                         const CommunicatorOptions& options = {.timeout = absl::Seconds(60)}) {
  EK_ASSIGN_OR_RETURN(auto group, CreateShmGroupInProcess(world_size, options));
  return internal::RunGroup(group, body);
}

float InputAt(int rank, int64_t i) {
  return 1.0f / static_cast<float>(1 + (i * 7 + rank * 13) % 1001);
}

std::vector<float> Input(int rank, int64_t count) {
  std::vector<float> input(count);
  for (int64_t i = 0; i < count; ++i) input[i] = InputAt(rank, i);
  return input;
}

// Returns the sum that one rank computes in plain memory, with the same order of addition.
std::vector<float> Summed(int world_size, int64_t count) {
  std::vector<float> sum(count);
  for (int64_t i = 0; i < count; ++i) {
    sum[i] = InputAt(0, i);
    for (int rank = 1; rank < world_size; ++rank) sum[i] += InputAt(rank, i);
  }
  return sum;
}

absl::Status Expect(bool is_so, absl::string_view what) {
  return is_so ? absl::OkStatus() : absl::InternalError(what);
}
// Builds no text for the millions of elements that are right.
absl::Status Expect(bool is_so, absl::string_view what, int64_t at) {
  return is_so ? absl::OkStatus() : absl::InternalError(absl::StrCat(what, " ", at));
}

TEST(ShmTest, RegisteredAndPlainMemoryGiveTheSameBits) {
  std::vector<std::vector<float>> inputs;  // By rank: those of the largest count.
  for (int rank = 0; rank < 8; ++rank) inputs.push_back(Input(rank, 1 << 20));
  for (const int world : {1, 2, 3, 5, 8}) {
    for (const int64_t count : {1, 1000, 4095, 16384, 20000, 65536 + 16, 300001, 1 << 20}) {
      const std::vector<float> expected = Summed(world, count);
      for (int registered = 0; registered <= world; registered = registered * 2 + 1) {
        const absl::Status status = RunShmRanks(world, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(count * sizeof(float)));
          std::vector<float> plain(count);
          float* const data =
              comm.rank() < registered ? static_cast<float*>(memory.data.get()) : plain.data();
          for (int round = 0; round < 3; ++round) {
            std::copy_n(inputs[comm.rank()].begin(), count, data);
            EK_RETURN_IF_ERROR(comm.AllReduce({data, count, DType::kFloat32}, ReduceOp::kSum));
            EK_RETURN_IF_ERROR(Expect(
                std::memcmp(data, expected.data(), count * sizeof(float)) == 0, "wrong sum"));
          }
          return absl::OkStatus();
        });
        ASSERT_TRUE(status.ok()) << world << " ranks, " << count << " elements, " << registered
                                 << " registered: " << status;
      }
    }
  }
}

// Whose neighbours on a page belong to somebody else is not reduced in place, because it could not
// be fenced.
TEST(ShmTest, NeighboursOfARegisteredSliceStayAsTheyAre) {
  const int64_t count = 50000, margin = 1000;
  const absl::Status status = RunShmRanks(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate((count + 2 * margin) * sizeof(float)));
    float* const data = static_cast<float*>(memory.data.get());
    for (int64_t i = 0; i < count + 2 * margin; ++i) data[i] = 100 + comm.rank();
    EK_RETURN_IF_ERROR(comm.AllReduce({data + margin, count, DType::kFloat32}, ReduceOp::kSum));
    for (int64_t i = 0; i < count + 2 * margin; ++i) {
      const bool is_reduced = i >= margin && i < margin + count;
      EK_RETURN_IF_ERROR(Expect(data[i] == (is_reduced ? 201 : 100 + comm.rank()), "wrong at", i));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShmTest, OtherCollectivesReadRegisteredInputs) {
  for (const int world : {2, 3, 5}) {
    const int64_t count = 30000;
    const absl::Status status = RunShmRanks(world, [&](Communicator& comm) -> absl::Status {
      const int rank = comm.rank();
      EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(world * count * sizeof(float)));
      const TensorView in(memory.data.get(), world * count, DType::kFloat32);
      const auto fill = [&] {
        for (int64_t i = 0; i < in.count; ++i) in.as<float>()[i] = rank * 1000 + i % 997;
      };
      std::vector<float> out(world * count), block(count);
      for (int round = 0; round < 3; ++round) {
        fill();
        EK_RETURN_IF_ERROR(comm.AllGather(in.Slice(0, count), absl::MakeSpan(out)));
        // Who has its result may write to its input.
        std::memset(in.data, 0xff, in.bytes());
        for (int64_t i = 0; i < world * count; ++i) {
          EK_RETURN_IF_ERROR(Expect(out[i] == i / count * 1000 + i % count % 997, "all_gather"));
        }
        fill();
        EK_RETURN_IF_ERROR(comm.ReduceScatter(in, absl::MakeSpan(block), ReduceOp::kSum));
        std::memset(in.data, 0xff, in.bytes());
        for (int64_t i = 0; i < count; ++i) {
          const float one = static_cast<float>((rank * count + i) % 997);
          EK_RETURN_IF_ERROR(Expect(block[i] == one * world + 1000 * (world - 1) * world / 2,
                                    "reduce_scatter", i));
        }
        fill();
        EK_RETURN_IF_ERROR(comm.user().AllToAll(in, absl::MakeSpan(out)).Wait());
        std::memset(in.data, 0xff, in.bytes());
        for (int64_t i = 0; i < world * count; ++i) {
          EK_RETURN_IF_ERROR(Expect(out[i] == i / count * 1000 + (rank * count + i % count) % 997,
                                    "all_to_all", i));
        }
        fill();
        const int root = round % world;
        EK_RETURN_IF_ERROR(comm.Broadcast(in.Slice(0, count), root));
        for (int64_t i = 0; i < count; ++i) {
          EK_RETURN_IF_ERROR(Expect(in.as<float>()[i] == root * 1000 + i % 997, "broadcast"));
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << world << " ranks: " << status;
  }
}

// As a step of another backend does: the input is nobody's to write to, wherever it lies.
TEST(ShmTest, AReductionMayHaveAnotherOutputThanInput) {
  constexpr int64_t kCount = 1 << 18;
  for (const int64_t count : {int64_t{100}, kCount}) {
    const std::vector<float> expected = Summed(3, count);
    const absl::Status status = RunShmRanks(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const Memory in_memory, comm.Allocate(count * sizeof(float)));
      EK_ASSIGN_OR_RETURN(const Memory out_memory, comm.Allocate(count * sizeof(float)));
      const TensorView in(in_memory.data.get(), count, DType::kFloat32);
      const TensorView out(out_memory.data.get(), count, DType::kFloat32);
      for (int64_t i = 0; i < count; ++i) in.as<float>()[i] = InputAt(comm.rank(), i);
      const bool is_root = comm.rank() == 1;
      EK_RETURN_IF_ERROR(comm.user()
                             .Issue({.kind = CollectiveKind::kReduce, .count = count, .root = 1},
                                    {in}, {is_root ? out : in})
                             .Wait());
      for (int64_t i = 0; i < count; ++i) {
        EK_RETURN_IF_ERROR(
            Expect(in.as<float>()[i] == InputAt(comm.rank(), i), "the input was written"));
        EK_RETURN_IF_ERROR(Expect(!is_root || out.as<float>()[i] == expected[i], "wrong sum"));
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Own slices inside the output, as an optimizer that updates slices of many parameters has them.
TEST(ShmTest, GathersInPlaceFromListsOfViews) {
  const int64_t parts = 7, part = 3000;  // Per rank.
  for (const int world : {2, 3}) {
    for (const bool is_registered : {false, true}) {
      const absl::Status status = RunShmRanks(world, [&](Communicator& comm) -> absl::Status {
        const int64_t count = world * parts * part;
        // The last view lies in a piece of its own, as an optimizer's padding does.
        EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(count * sizeof(float)));
        EK_ASSIGN_OR_RETURN(const Memory last, comm.Allocate(part * sizeof(float)));
        std::vector<float> plain(count);
        float* const data = is_registered ? static_cast<float*>(memory.data.get()) : plain.data();
        // Rank 0's parts, then rank 1's, ...; laid out the other way round in memory.
        TensorList all, own;
        for (int64_t i = 0; i < world * parts; ++i) {
          all.push_back({data + (world * parts - 1 - i) * part, part, DType::kFloat32});
          if (i == world * parts - 1) all.back().data = last.data.get();
          if (i / parts == comm.rank()) own.push_back(all.back());
        }
        Collective what{
            .kind = CollectiveKind::kAllGather, .dtype = DType::kFloat32, .count = parts * part};
        for (int round = 0; round < 3; ++round) {
          for (const TensorView& view : all) std::fill_n(view.as<float>().data(), part, -1.0f);
          for (size_t i = 0; i < own.size(); ++i) {
            for (float& value : own[i].as<float>()) value = comm.rank() * 100 + i + round;
          }
          EK_RETURN_IF_ERROR(comm.user().Issue(what, own, all).Wait());
          for (int64_t i = 0; i < world * parts; ++i) {
            for (const float value : all[i].as<float>()) {
              EK_RETURN_IF_ERROR(Expect(value == i / parts * 100 + i % parts + round, "part", i));
            }
          }
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << world << " ranks: " << status;
    }
  }
}

// In a reduce nobody but the root waits for the root: its ring of slots must not go round before it
// has reduced its part.
TEST(ShmTest, ARootThatIsLateReducesWhatIsLongerThanItsRing) {
  const absl::Status status = RunShmRanks(5, [](Communicator& comm) -> absl::Status {
    std::vector<int8_t> data(1457532);
    for (int round = 0; round < 10; ++round) {
      const int root = round % 5;
      // Inputs and results recur after kPeriod elements, which divides no size of a slot.
      constexpr size_t kPeriod = 101;
      int8_t own[kPeriod], most[kPeriod];
      for (size_t i = 0; i < kPeriod; ++i) {
        own[i] = most[i] = static_cast<int8_t>((i * 7 + comm.rank() * 31 + round) % kPeriod);
        for (int rank = 0; rank < 5; ++rank) {
          most[i] = std::max(most[i], static_cast<int8_t>((i * 7 + rank * 31 + round) % kPeriod));
        }
      }
      for (size_t i = 0; i < data.size(); ++i) data[i] = own[i % kPeriod];
      if (comm.rank() == root) absl::SleepFor(absl::Milliseconds(5));  // Surely late.
      EK_RETURN_IF_ERROR(comm.user().Reduce(absl::MakeSpan(data), ReduceOp::kMax, root).Wait());
      for (size_t i = 0; i < data.size() && comm.rank() == root; ++i) {
        EK_RETURN_IF_ERROR(Expect(data[i] == most[i % kPeriod], "wrong at", i));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShmTest, MemoryIsFreedAndAllocatedWhileTheGroupGoesOn) {
  const absl::Status status = RunShmRanks(3, [](Communicator& comm) -> absl::Status {
    for (int round = 0; round < 200; ++round) {
      const int64_t count = 20000 + round;
      EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(count * sizeof(float)));
      const TensorView data(memory.data.get(), count, DType::kFloat32);
      for (float& value : data.as<float>()) value = 1;
      EK_RETURN_IF_ERROR(comm.AllReduce(data, ReduceOp::kSum));
      EK_RETURN_IF_ERROR(
          Expect(data.as<float>()[count - 1] == 3 && data.as<float>()[0] == 3, "wrong sum"));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShmTest, TooMuchMemoryIsAStatus) {
  const absl::Status status = RunShmRanks(2, [](Communicator& comm) -> absl::Status {
    const absl::StatusOr<Memory> memory = comm.Allocate(int64_t{1} << 50);
    EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted) << memory.status();
    EXPECT_FALSE(comm.Allocate(-1).ok());
    return comm.Barrier();  // The group goes on.
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A buffer serves the next group as well.
TEST(ShmTest, MemoryOutlivesItsGroup) {
  Memory memories[2];
  for (int round = 0; round < 3; ++round) {
    const absl::Status status = RunShmRanks(2, [&](Communicator& comm) -> absl::Status {
      Memory& memory = memories[comm.rank()];
      if (memory.data == nullptr) {
        EK_ASSIGN_OR_RETURN(memory, comm.Allocate(1 << 20));
      }
      const TensorView data(memory.data.get(), (1 << 20) / 4, DType::kFloat32);
      for (float& value : data.as<float>()) value = 1;
      EK_RETURN_IF_ERROR(comm.AllReduce(data, ReduceOp::kSum));
      return Expect(data.as<float>()[0] == 2 && data.as<float>()[data.count - 1] == 2, "wrong sum");
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

int OpenFiles() {
  DIR* const folder = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(ShmTest, LeavesNoFilesOpen) {
  const auto once = [] {
    const absl::Status status = RunShmRanks(3, [](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(1 << 20));
      EK_RETURN_IF_ERROR(
          comm.AllReduce({memory.data.get(), 1 << 18, DType::kFloat32}, ReduceOp::kSum));
      std::vector<float> plain(100000);
      return comm.AllReduce(absl::MakeSpan(plain), ReduceOp::kSum);
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  once();
  const int before = OpenFiles();
  for (int i = 0; i < 5; ++i) once();
  EXPECT_EQ(OpenFiles(), before);
}

// Channels that ranks use in different order do not wait for each other.
TEST(ShmTest, ChannelsAreIndependent) {
  const int kChannels = 6;
  const absl::Status status = RunShmRanks(3, [&](Communicator& comm) -> absl::Status {
    std::vector<std::vector<float>> data(kChannels, std::vector<float>(200000, 1));
    for (int round = 0; round < 10; ++round) {
      for (auto& values : data) values.assign(values.size(), 1);
      std::vector<Work> works(kChannels);
      for (int i = 0; i < kChannels; ++i) {
        const int which = comm.rank() % 2 == 0 ? i : kChannels - 1 - i;
        EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel(absl::StrCat("c", which)));
        works[which] = channel->AllReduce(absl::MakeSpan(data[which]), ReduceOp::kSum);
      }
      for (int i = 0; i < kChannels; ++i) {
        EK_RETURN_IF_ERROR(works[i].Wait());
        EK_RETURN_IF_ERROR(Expect(data[i].front() == 3 && data[i].back() == 3, "wrong sum"));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An operation ends even if no thread waits for it, on the rank that comes first and on the one
// that comes last.
TEST(ShmTest, WorksEndThoughNobodyWaits) {
  for (const int64_t count : {10, 100000, 3000000}) {
    const absl::Status status = RunShmRanks(2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(count * sizeof(float)));
      for (int late = 0; late < 2; ++late) {
        if (comm.rank() == late) absl::SleepFor(absl::Milliseconds(20));
        const Work work =
            comm.user().AllReduce({memory.data.get(), count, DType::kFloat32}, ReduceOp::kSum);
        const absl::Time deadline = absl::Now() + absl::Seconds(20);
        while (!work.IsDone() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
        EK_RETURN_IF_ERROR(
            Expect(work.IsDone(), absl::StrCat("rank ", comm.rank(), " has not ended")));
        EK_RETURN_IF_ERROR(work.Wait());
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << count << ": " << status;
  }
}

// Who waits may hold what a callback wants.
TEST(ShmTest, CallbacksDoNotRunOnTheThreadThatWaits) {
  const absl::Status status = RunShmRanks(2, [](Communicator& comm) -> absl::Status {
    absl::Mutex mutex;
    std::vector<float> data(10, 1);
    for (int round = 0; round < 200; ++round) {
      absl::Notification called;
      Work work;
      {
        absl::MutexLock lock(&mutex);
        work = comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kMax);
        const auto caller = std::this_thread::get_id();
        // One that is called at once, because the work has ended, may not lock.
        work.OnDone([&, caller](const absl::Status&) {
          if (std::this_thread::get_id() != caller) absl::MutexLock wants(&mutex);
          called.Notify();
        });
        EK_RETURN_IF_ERROR(work.Wait());
      }
      called.WaitForNotification();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

absl::Duration ProcessorTime() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return absl::DurationFromTimeval(usage.ru_utime) + absl::DurationFromTimeval(usage.ru_stime);
}

// Neither a thread that waits for long, nor one that has an operation on its way, burns a
// processor.
TEST(ShmTest, LongWaitsSleep) {
  const absl::Duration kLate = absl::Milliseconds(1500);
  for (const bool waits : {true, false}) {
    absl::Duration used;
    const absl::Status status = RunShmRanks(2, [&](Communicator& comm) -> absl::Status {
      std::vector<float> data(1000, 1);
      EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
      const absl::Duration before = ProcessorTime();
      if (comm.rank() == 1) absl::SleepFor(kLate);
      const Work work = comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
      if (comm.rank() == 0 && !waits) absl::SleepFor(kLate);
      EK_RETURN_IF_ERROR(work.Wait());
      if (comm.rank() == 1) used = ProcessorTime() - before;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_LT(used, kLate / 5) << (waits ? "waiting" : "computing");
  }
}

TEST(ShmTest, AbortEndsWhatIsInFlightAndMemoryStaysWhatItIs) {
  for (int round = 0; round < 20; ++round) {
    auto group = CreateShmGroupInProcess(2, {.timeout = absl::Seconds(60)});
    ASSERT_TRUE(group.ok()) << group.status();
    const int64_t count = 1 << 20;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        Communicator& comm = *(*group)[rank];
        absl::StatusOr<Memory> memory = comm.Allocate(count * sizeof(float));
        ASSERT_TRUE(memory.ok()) << memory.status();
        const TensorView data(memory->data.get(), count, DType::kFloat32);
        absl::Status status;
        std::thread aborts;
        if (rank == 0) {
          aborts = std::thread([&] {
            absl::SleepFor(absl::Microseconds(500 + 700 * round));
            comm.Abort(absl::CancelledError("enough"));
          });
        }
        while (status.ok()) status = comm.AllReduce(data, ReduceOp::kSum);
        if (rank == 0) aborts.join();
        EXPECT_THAT(status.message(), HasSubstr("enough"));
        std::ranges::fill(data.as<float>(), 7.0f);
        absl::SleepFor(absl::Milliseconds(5));
        EXPECT_EQ(std::ranges::count(data.as<float>(), 7.0f), count);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Returns the lock of the memory in which the ranks of a group publish their progress. This process
// has only one group.
std::atomic<uint32_t>* LockOfTheGroup() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {  // from-to access offset device inode path
    const std::vector<std::string> parts = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (parts.size() > 5 && parts[5] == "/memfd:evenkeel" && parts[2] == "00000000")
      return reinterpret_cast<std::atomic<uint32_t>*>(std::stoull(parts[0], nullptr, 16));
  }
  return nullptr;
}

// As if a rank were stopped while it begins to use a channel. The others begin operations, and so
// can report that they wait, and be told that the group has ended.
TEST(ShmTest, ARankThatHoldsTheLockOfChannelsHoldsNoThread) {
  for (const bool goes_on : {true, false}) {
    auto group = CreateShmGroupInProcess(2, {.timeout = absl::Seconds(20)});
    ASSERT_TRUE(group.ok()) << group.status();
    std::atomic<uint32_t>* const lock = LockOfTheGroup();
    ASSERT_NE(lock, nullptr);
    lock->store(1);
    const absl::Time begin = absl::Now();
    std::vector<float> first[2], next[2], message(10);
    std::vector<Work> works;
    for (int rank = 0; rank < 2; ++rank) {
      Communicator& comm = *(*group)[rank];
      first[rank] = Input(rank, 1000);
      next[rank] = Input(rank, 100);
      works.push_back(comm.user().AllReduce(absl::MakeSpan(first[rank]), ReduceOp::kSum));
      works.push_back(comm.user().AllReduce(absl::MakeSpan(next[rank]), ReduceOp::kSum));
      works.push_back(rank == 0 ? comm.user().Send(absl::MakeSpan(first[0]).first(10), 1)
                                : comm.user().Recv(absl::MakeSpan(message), 0));
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
    absl::SleepFor(absl::Milliseconds(20));
    for (const Work& work : works) EXPECT_FALSE(work.IsDone());
    if (goes_on) {
      lock->store(0);
      for (const Work& work : works) EXPECT_TRUE(work.Wait().ok()) << work.Wait();
      EXPECT_EQ(first[0], Summed(2, 1000));
      EXPECT_EQ(next[1], Summed(2, 100));
    } else {
      for (const auto& comm : *group) comm->Abort(absl::CancelledError("enough"));
      for (const Work& work : works) EXPECT_THAT(work.Wait().message(), HasSubstr("enough"));
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(15));
  }
}

// The next operation may wait for an effect of an ended operation's callbacks.
TEST(ShmTest, CallbacksRunWhileAThreadWaitsForTheNextOperation) {
  absl::Duration longest;
  const absl::Status status = RunShmRanks(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Channel * answers, comm.OpenChannel("answers"));
    std::vector<float> first(10, 1), next(10, 1), answer(1, 1);
    for (int round = 0; round < 5; ++round) {
      const Work work = comm.user().AllReduce(absl::MakeSpan(first), ReduceOp::kMax);
      if (comm.rank() == 0) {
        work.OnDone([&](const absl::Status&) { (void)answers->Send(absl::MakeSpan(answer), 1); });
      } else {
        absl::SleepFor(absl::Milliseconds(20));  // So that the other waits by now.
        const absl::Time start = absl::Now();
        EK_RETURN_IF_ERROR(answers->Recv(absl::MakeSpan(answer), 0).Wait());
        longest = std::max(longest, absl::Now() - start);
      }
      EK_RETURN_IF_ERROR(comm.user().AllReduce(absl::MakeSpan(next), ReduceOp::kMax).Wait());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_LT(longest, absl::Milliseconds(400));
}

TEST(ShmTest, AnAbortInFlightLeavesNoFilesOpen) {
  const auto once = [] {
    auto group = CreateShmGroupInProcess(2);
    ASSERT_TRUE(group.ok()) << group.status();
    absl::StatusOr<Memory> memory = (*group)[0]->Allocate(1 << 20);
    ASSERT_TRUE(memory.ok()) << memory.status();
    Work work = (*group)[0]->user().AllReduce({memory->data.get(), 1 << 18, DType::kFloat32},
                                              ReduceOp::kSum);
    (*group)[0]->Abort(absl::CancelledError("enough"));
    EXPECT_FALSE(work.Wait().ok());
  };
  once();
  const int before = OpenFiles();
  for (int i = 0; i < 5; ++i) once();
  EXPECT_EQ(OpenFiles(), before);
}

// Returns the shared memory that this process has mapped; each rank's counts.
int64_t SharedBytes() {
  int64_t kib = 0;
  std::string word;
  for (std::ifstream status("/proc/self/status"); status >> word;) {
    if (word == "RssShmem:") status >> kib;
  }
  return kib << 10;
}

TEST(ShmTest, ChannelsThatAreNoLongerUsedCostNothing) {
  const absl::Status status = RunShmRanks(3, [](Communicator& comm) -> absl::Status {
    // Only rank 0 counts, because counting opens a file.
    const auto count_files = [&]() -> absl::StatusOr<int> {
      EK_RETURN_IF_ERROR(comm.Barrier());
      const int count = comm.rank() == 0 ? OpenFiles() : 0;
      EK_RETURN_IF_ERROR(comm.Barrier());
      return count;
    };
    EK_ASSIGN_OR_RETURN(const int before, count_files());
    for (int i = 0; i < 300; ++i) {
      EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel(absl::StrCat("c", i)));
      std::vector<float> data = {1.0f + i};
      EK_RETURN_IF_ERROR(channel->AllReduce(absl::MakeSpan(data), ReduceOp::kSum).Wait());
      EK_RETURN_IF_ERROR(Expect(data[0] == 3 * (1.0f + i), "wrong sum in channel", i));
      const int to = (comm.rank() + 1) % 3, from = (comm.rank() + 2) % 3;
      const CallOptions options{.tag = i % 3};
      std::vector<float> out = {100.0f * comm.rank() + i}, in = {-1};
      Work receive = channel->Recv(absl::MakeSpan(in), from, options);
      EK_RETURN_IF_ERROR(channel->Send(absl::MakeSpan(out), to, options).Wait());
      EK_RETURN_IF_ERROR(receive.Wait());
      EK_RETURN_IF_ERROR(Expect(in[0] == 100.0f * from + i, "wrong message in channel", i));
    }
    EK_ASSIGN_OR_RETURN(const int after, count_files());
    EXPECT_EQ(after, before);
    EXPECT_LT(SharedBytes(), int64_t{1} << 30);  // 300 channels would have 4.4 GiB.
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Two ranks need places for other lanes, the third one does not.
TEST(ShmTest, AChannelThatSomeRanksHaveLeftGoesOn) {
  const absl::Status status = RunShmRanks(3, [](Communicator& comm) -> absl::Status {
    std::vector<float> data = {1};
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < 3; ++i)
        EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
      for (int i = 0; i < 100 && comm.rank() < 2; ++i) {
        EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel(absl::StrCat("c", i)));
        const TensorView message = absl::MakeSpan(data);
        EK_RETURN_IF_ERROR(
            (comm.rank() == 0 ? channel->Send(message, 1) : channel->Recv(message, 0)).Wait());
      }
      EK_RETURN_IF_ERROR(Expect(data[0] == 27, "wrong sum in round", round));
      data = {1};
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShmTest, EveryRankSendsToEveryOther) {
  for (const int world : {14, 16, 20}) {
    const absl::Status status = RunShmRanks(world, [&](Communicator& comm) -> absl::Status {
      std::vector<int32_t> out(world), in(world, -1);
      std::vector<Work> works;
      for (int peer = 0; peer < world; ++peer) {
        if (peer == comm.rank()) continue;
        const CallOptions options{.tag = (comm.rank() + peer) % 2};
        out[peer] = comm.rank() * world + peer;
        works.push_back(comm.user().Send({&out[peer], 1, DType::kInt32}, peer, options));
        works.push_back(comm.user().Recv({&in[peer], 1, DType::kInt32}, peer, options));
      }
      for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
      for (int peer = 0; peer < world; ++peer) {
        const int expected = peer == comm.rank() ? -1 : peer * world + comm.rank();
        EK_RETURN_IF_ERROR(Expect(in[peer] == expected, "wrong message from", peer));
      }
      return comm.Barrier();
    });
    EXPECT_TRUE(status.ok()) << world << " ranks: " << status;
  }
}

// Nothing that rank 0 has begun can end before rank 1 comes, so all lanes are in use at a time.
TEST(ShmTest, HundredsOfChannelsAreInFlight) {
  absl::Notification all_begun;
  const absl::Status status = RunShmRanks(2, [&](Communicator& comm) -> absl::Status {
    constexpr int kChannels = 300;
    std::vector<float> data(kChannels, 1.0f - comm.rank());
    std::vector<Work> works;
    if (comm.rank() == 1) all_begun.WaitForNotification();
    for (int i = 0; i < kChannels; ++i) {
      EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel(absl::StrCat("c", i)));
      works.push_back(channel->Broadcast({&data[i], 1, DType::kFloat32}, 0));
    }
    if (comm.rank() == 0) all_begun.Notify();
    for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    for (int i = 0; i < kChannels; ++i)
      EK_RETURN_IF_ERROR(Expect(data[i] == 1, "wrong value in channel", i));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShmTest, RefusesAWrongRank) {
  EXPECT_FALSE(CreateShmGroupInProcess(0).ok());
  EXPECT_FALSE(CreateShmGroup(2, 2, nullptr).ok());
}

// Who takes part in none of it does not look at what the others are told of their memory, and its
// socket fills up.
TEST(ShmTest, MemoryThatComesAndGoesBetweenTwoRanksHoldsUpNobody) {
  const absl::Status status = RunShmRanks(3, [](Communicator& comm) -> absl::Status {
    constexpr int64_t kCount = 8192;
    for (int i = 0; i < 1000 && comm.rank() < 2; ++i) {
      EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(kCount * sizeof(float)));
      const TensorView data(memory.data.get(), kCount, DType::kFloat32);
      EK_RETURN_IF_ERROR(
          (comm.rank() == 0 ? comm.user().Send(data, 1) : comm.user().Recv(data, 0)).Wait());
    }
    std::vector<float> sum(1 << 20, 1.0f);
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(sum), ReduceOp::kSum));
    return Expect(sum.front() == 3 && sum.back() == 3, "wrong sum");
  });
  EXPECT_TRUE(status.ok()) << status;
}

// It can't be reduced in place, because the other rank's is plain.
TEST(ShmTest, MemoryThatComesAndGoesBesidePlainMemoryHoldsUpNobody) {
  const absl::Status status = RunShmRanks(2, [](Communicator& comm) -> absl::Status {
    constexpr int64_t kCount = 1 << 16;
    std::vector<float> plain(kCount);
    for (int i = 0; i < 300; ++i) {
      EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(kCount * sizeof(float)));
      const TensorView data(comm.rank() == 0 ? memory.data.get() : plain.data(), kCount,
                            DType::kFloat32);
      EK_RETURN_IF_ERROR(comm.AllReduce(data, ReduceOp::kSum));
    }
    EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel("other"));
    std::vector<float> sum(1 << 20, 1.0f);
    EK_RETURN_IF_ERROR(channel->AllReduce(absl::MakeSpan(sum), ReduceOp::kSum).Wait());
    return Expect(sum.front() == 2 && sum.back() == 2, "wrong sum");
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
