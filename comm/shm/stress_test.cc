// Everything at once: threads of all ranks issue collectives that were drawn, of all kinds, types
// and sizes, in memory of all kinds, on one of more channels than a rank keeps lanes for, and wait
// for them in all ways. All bytes must then be those that the local backend leaves.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kThreads = 3;
constexpr int kChannels = 50;    // Per thread.
constexpr int kOperations = 40;  // Per thread.
constexpr int64_t kMargin = 5000;
constexpr int64_t kMaxBytes = 2 << 20;

using Random = std::mt19937_64;

int64_t Draw(Random& random, int64_t below) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(below));
}

// The random choices that are equal on all ranks.
struct Drawn {
  CollectiveKind kind;
  DType dtype;
  ReduceOp op;
  int64_t count = 0;  // As in Collective.
  int root = 0;
  int parts = 1;
  int place =
      0;  // Input and output: 0 apart, 1 one is the rank's share of the other, 2 overlapping.
  double scale = 1;
  int silent_rank = -1;  // Contributes nothing.
  int channel = 0;
  int64_t tag = 0;
};

constexpr DType kTypes[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                            DType::kBFloat16, DType::kInt8,    DType::kUint8,
                            DType::kInt16,    DType::kInt32,   DType::kInt64};
constexpr CollectiveKind kKinds[] = {CollectiveKind::kAllReduce, CollectiveKind::kAllReduce,
                                     CollectiveKind::kAllReduce, CollectiveKind::kReduce,
                                     CollectiveKind::kBroadcast, CollectiveKind::kReduceScatter,
                                     CollectiveKind::kAllGather, CollectiveKind::kAllToAll,
                                     CollectiveKind::kSend,      CollectiveKind::kBarrier};

Drawn DrawOne(Random& random, int world) {
  Drawn drawn;
  drawn.kind = kKinds[Draw(random, std::size(kKinds))];
  drawn.dtype = kTypes[Draw(random, std::size(kTypes))];
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                               ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kBitOr};
  drawn.op = kOps[Draw(random, std::size(kOps) - (IsFloat(drawn.dtype) ? 1 : 0))];
  const bool has_blocks = drawn.kind == CollectiveKind::kReduceScatter ||
                          drawn.kind == CollectiveKind::kAllGather ||
                          drawn.kind == CollectiveKind::kAllToAll;
  const int64_t bytes = std::min(kMaxBytes, Draw(random, int64_t{1} << (1 + Draw(random, 21))));
  drawn.count = bytes / SizeOf(drawn.dtype) / (has_blocks ? world : 1);
  drawn.root = static_cast<int>(Draw(random, world));
  if (drawn.kind == CollectiveKind::kAllReduce || drawn.kind == CollectiveKind::kBroadcast) {
    drawn.parts = Draw(random, 3) == 0 ? static_cast<int>(1 + Draw(random, 5)) : 1;
  }
  drawn.place = static_cast<int>(Draw(random, 3));
  if (drawn.kind == CollectiveKind::kAllToAll && drawn.place == 1) drawn.place = 2;
  if (IsFloat(drawn.dtype) && Draw(random, 3) == 0) drawn.scale = 0.37;
  if (Draw(random, 4) == 0) drawn.silent_rank = static_cast<int>(Draw(random, world));
  // Some are used often, others seldom.
  drawn.channel = static_cast<int>(Draw(random, 1 + Draw(random, kChannels)));
  drawn.tag = Draw(random, 3);
  return drawn;
}

// Numbers that are not special: what becomes of a NaN's bits is nobody's promise.
void Fill(std::byte* data, int64_t bytes, DType dtype, Random& random) {
  for (int64_t at = 0; at + 8 <= bytes; at += 8) {
    uint64_t word = random();
    if (dtype == DType::kFloat32) word &= 0xbfffffffbfffffff;
    if (dtype == DType::kFloat64) word &= 0xbfffffffffffffff;
    if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) word &= 0xbfffbfffbfffbfff;
    // Not so small that a product or a scale makes it a subnormal.
    if (dtype == DType::kFloat32) word |= 0x3800000038000000;
    if (dtype == DType::kFloat64) word |= 0x3800000000000000;
    if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) word |= 0x3800380038003800;
    std::memcpy(data + at, &word, 8);
  }
}

uint64_t HashOfBytes(const std::byte* data, int64_t bytes) {
  uint64_t hash = 1;
  for (int64_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min<int64_t>(8, bytes - at));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

// One operation's memory, with all that is around it.
struct Buffer {
  std::vector<std::byte> plain;
  Memory memory;
  std::byte* data = nullptr;
  int64_t bytes = 0;

  absl::Status Make(Communicator& comm, int64_t size, bool is_registered) {
    bytes = size;
    if (!is_registered) {
      plain.resize(size + 64);
      data = plain.data() + (64 - reinterpret_cast<uintptr_t>(plain.data()) % 64);
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(memory, comm.Allocate(size));
    data = static_cast<std::byte*>(memory.data.get());
    return absl::OkStatus();
  }
};

struct Issued {
  std::vector<Work> works;
  std::unique_ptr<absl::Notification> called;
  std::unique_ptr<Buffer> buffer;
  bool is_specified = true;
};

// The bytes after each operation, as a hash; 0 where they are not specified.
using Trace = std::vector<uint64_t>;

absl::StatusOr<Issued> Issue(Communicator& comm, Channel& channel, const Drawn& drawn,
                             Random& mine) {
  const int world = comm.world_size(), rank = comm.rank();
  const int64_t element = SizeOf(drawn.dtype);
  const int64_t margin = kMargin / element;
  // Registered memory whose page is the operation's own, or not.
  const bool is_registered = Draw(mine, 8) > 0;
  const int64_t front = is_registered && Draw(mine, 8) > 0 ? 0 : margin;
  const int64_t back = front == 0 && Draw(mine, 8) > 0 ? 0 : margin;
  const int64_t blocks = drawn.count * world;
  Issued issued{.buffer = std::make_unique<Buffer>()};
  // Nothing follows a buffer that others may write to.
  const bool ends_there = back == 0 && (drawn.kind == CollectiveKind::kAllReduce ||
                                        drawn.kind == CollectiveKind::kReduce);
  const int64_t behind = ends_there ? drawn.parts - 1 : 2 * blocks + drawn.count + 64 + back;
  EK_RETURN_IF_ERROR(
      issued.buffer->Make(comm, (front + drawn.count + behind) * element, is_registered));
  Buffer& buffer = *issued.buffer;
  const auto view = [&](int64_t begin, int64_t count) {
    return TensorView(buffer.data + (front + begin) * element, count, drawn.dtype);
  };
  const CallOptions reduces{.scale = drawn.scale, .contributes = rank != drawn.silent_rank};
  TensorList parts;
  for (int i = 0; i < drawn.parts; ++i) {  // With a gap of one element between them.
    const int64_t begin = drawn.count * i / drawn.parts, end = drawn.count * (i + 1) / drawn.parts;
    parts.push_back(view(begin + i, end - begin));
  }
  Fill(buffer.data, buffer.bytes, drawn.dtype, mine);
  int64_t in = 0, out = 0;
  const bool gathers = drawn.kind == CollectiveKind::kAllGather;
  if (drawn.place == 0) (gathers ? in : out) = blocks + 3;
  if (drawn.place == 1) (gathers ? in : out) = rank * drawn.count;
  if (drawn.place == 2) out = drawn.count / 2;
  const auto add = [&](Work work) { issued.works.push_back(std::move(work)); };
  switch (drawn.kind) {
    case CollectiveKind::kAllReduce:
      add(channel.AllReduce(parts, drawn.op, reduces));
      break;
    case CollectiveKind::kReduce:
      add(channel.Reduce(view(0, drawn.count), drawn.op, drawn.root, reduces));
      issued.is_specified = rank == drawn.root;
      break;
    case CollectiveKind::kBroadcast:
      add(channel.Broadcast(parts, drawn.root));
      break;
    case CollectiveKind::kReduceScatter:
      add(channel.ReduceScatter(view(in, blocks), view(out, drawn.count), drawn.op, reduces));
      break;
    case CollectiveKind::kAllGather:
      add(channel.AllGather(view(in, drawn.count), view(out, blocks)));
      break;
    case CollectiveKind::kAllToAll:
      add(channel.AllToAll(view(in, blocks), view(out, blocks)));
      break;
    case CollectiveKind::kSend:
      if (world == 1) break;
      add(channel.Send(view(0, drawn.count), (rank + 1) % world, {.tag = drawn.tag}));
      add(channel.Recv(view(drawn.count + 5, drawn.count), (rank + world - 1) % world,
                       {.tag = drawn.tag}));
      break;
    default:
      add(channel.Barrier());
  }
  if (Draw(mine, 3) == 0 && !issued.works.empty()) {
    issued.called = std::make_unique<absl::Notification>();
    issued.works.back().OnDone(
        [called = issued.called.get()](const absl::Status&) { called->Notify(); });
  }
  return issued;
}

absl::Status End(Issued issued, Trace& trace) {
  for (const Work& work : issued.works) EK_RETURN_IF_ERROR(work.Wait());
  if (issued.called != nullptr) issued.called->WaitForNotification();
  trace.push_back(issued.is_specified ? HashOfBytes(issued.buffer->data, issued.buffer->bytes) : 0);
  return absl::OkStatus();
}

// One thread's operations on one rank.
absl::Status RunThread(Communicator& comm, int which, uint64_t seed, Trace& trace) {
  Random common(StableHash(seed, static_cast<uint64_t>(which)));
  Random mine(StableHash(StableHash(seed, static_cast<uint64_t>(which)),
                         static_cast<uint64_t>(comm.rank() + 1)));
  std::deque<Issued> open;
  absl::Status status;
  for (int i = 0; i < kOperations && status.ok(); ++i) {
    const Drawn drawn = DrawOne(common, comm.world_size());
    EK_ASSIGN_OR_RETURN(Channel * channel,
                        comm.OpenChannel(absl::StrCat("c", which, ".", drawn.channel)));
    absl::StatusOr<Issued> issued = Issue(comm, *channel, drawn, mine);
    if (!issued.ok()) return issued.status();
    open.push_back(*std::move(issued));
    if (Draw(mine, 16) == 0) absl::SleepFor(absl::Microseconds(Draw(mine, 3000)));
    for (int64_t most = Draw(mine, 5); static_cast<int64_t>(open.size()) > most && status.ok();
         open.pop_front()) {
      status =
          Annotate(End(std::move(open.front()), trace), absl::StrCat("operation ", trace.size()));
    }
  }
  for (; !open.empty() && status.ok(); open.pop_front())
    status = End(std::move(open.front()), trace);
  for (Issued& issued : open) {  // After a failure: until then the memory is in use.
    for (const Work& work : issued.works) (void)work.Wait();
    if (issued.called != nullptr) issued.called->WaitForNotification();
  }
  return status;
}

using Traces = std::vector<std::vector<Trace>>;  // By rank and thread.

absl::StatusOr<Traces> RunAll(std::vector<std::unique_ptr<Communicator>> group, uint64_t seed) {
  Traces traces(group.size(), std::vector<Trace>(kThreads));
  EK_RETURN_IF_ERROR(internal::RunGroup(group, [&](Communicator& comm) -> absl::Status {
    absl::Status statuses[kThreads];
    std::vector<std::thread> threads;
    for (int which = 0; which < kThreads; ++which) {
      threads.emplace_back([&, which] {
        statuses[which] = RunThread(comm, which, seed, traces[comm.rank()][which]);
        if (!statuses[which].ok()) comm.Abort(statuses[which]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) EK_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }));
  return traces;
}

class ShmStressTest : public testing::TestWithParam<int> {};

TEST_P(ShmStressTest, LeavesTheBytesThatLocalLeaves) {
  const int world = GetParam();
  const CommunicatorOptions options{.timeout = absl::Seconds(100)};
  // Another one each time that the test is repeated.
  const char* const run = std::getenv("TEST_RUN_NUMBER");
  const uint64_t seed =
      StableHash(static_cast<uint64_t>(world), static_cast<uint64_t>(run ? std::atoi(run) : 0));
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  auto local = CreateLocalGroup(world, options);
  ASSERT_TRUE(local.ok()) << local.status();
  const absl::StatusOr<Traces> expected = RunAll(*std::move(local), seed);
  ASSERT_TRUE(expected.ok()) << expected.status();
  auto shm = CreateShmGroupInProcess(world, options);
  ASSERT_TRUE(shm.ok()) << shm.status();
  const absl::StatusOr<Traces> got = RunAll(*std::move(shm), seed);
  ASSERT_TRUE(got.ok()) << got.status();
  for (int which = 0; which < kThreads; ++which) {
    Random common(StableHash(seed, static_cast<uint64_t>(which)));
    for (int i = 0; i < kOperations; ++i) {
      const Drawn drawn = DrawOne(common, world);
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_EQ((*got)[rank][which][i], (*expected)[rank][which][i])
            << "rank " << rank << ", thread " << which << ", operation " << i << ": kind "
            << static_cast<int>(drawn.kind) << ", " << drawn.count << " of "
            << ToString(drawn.dtype) << ", op " << static_cast<int>(drawn.op) << ", parts "
            << drawn.parts << ", place " << drawn.place;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ShmStressTest, testing::Values(1, 2, 3, 5, 8));

}  // namespace
}  // namespace evenkeel
