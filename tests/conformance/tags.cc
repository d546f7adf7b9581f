// Messages with tags.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class TagsTest : public WorldTest {};  // World size.

bool HasTags(Communicator& comm) {
  return comm.Supports({.kind = CollectiveKind::kSend, .root = 0, .tag = 1}).ok();
}

// Over several hosts ranks 0 and 1, and the first and the last rank, are a pair on one host and one
// on two hosts.
std::vector<int> Receivers(int world_size) {
  return world_size == 2 ? std::vector<int>{1} : std::vector<int>{1, world_size - 1};
}

TEST_P(TagsTest, MessagesDoNotWaitForOtherTags) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!HasTags(comm)) return absl::OkStatus();
    for (const int receiver : Receivers(comm.world_size())) {
      for (const size_t count : {size_t{1}, size_t{3'000'001}}) {
        Channel& user = comm.user();
        std::vector<float> one(count, 1.0f), two(count, 2.0f), zero(count, 3.0f);
        const TensorView first(absl::MakeSpan(one)), second(absl::MakeSpan(two));
        const TensorView untagged(absl::MakeSpan(zero));
        if (comm.rank() == 0) {
          const Work works[] = {user.Send(first, receiver, {.tag = 1}),
                                user.Send(second, receiver, {.tag = 2}),
                                user.Send(untagged, receiver)};
          for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
        } else if (comm.rank() == receiver) {
          for (auto* data : {&one, &two, &zero}) std::fill(data->begin(), data->end(), 0.0f);
          EK_RETURN_IF_ERROR(user.Recv(untagged, 0).Wait());
          EK_RETURN_IF_ERROR(user.Recv(second, 0, {.tag = 2}).Wait());
          EK_RETURN_IF_ERROR(user.Recv(first, 0, {.tag = 1}).Wait());
          EXPECT_EQ(std::count(one.begin(), one.end(), 1.0f), count);
          EXPECT_EQ(std::count(two.begin(), two.end(), 2.0f), count);
          EXPECT_EQ(std::count(zero.begin(), zero.end(), 3.0f), count);
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// One rank's messages: tag and number, in another order on each side, but in order within a tag.
struct Numbered {
  int64_t tag = 0;
  int32_t number = 0;
};
std::vector<Numbered> Shuffled(int tags, int per_tag, int seed) {
  std::vector<int> order;
  for (int tag = 0; tag < tags; ++tag) order.insert(order.end(), per_tag, tag);
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> used(tags);
  std::vector<Numbered> messages;
  for (int tag : order) messages.push_back({tag * int64_t{1'000'003}, used[tag]++});
  return messages;
}

TEST_P(TagsTest, EachTagKeepsItsOrderAmongOthers) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!HasTags(comm)) return absl::OkStatus();
    constexpr int64_t kCount = 1000;
    const int next = (comm.rank() + 1) % comm.world_size();
    const int previous = (comm.rank() + comm.world_size() - 1) % comm.world_size();
    const std::vector<Numbered> sent = Shuffled(20, 10, 1), expected = Shuffled(20, 10, 2);
    std::vector<std::vector<int64_t>> out, in(expected.size(), std::vector<int64_t>(kCount));
    for (const Numbered& message : sent)
      out.emplace_back(kCount, message.tag * 100 + message.number);
    std::vector<Work> works;
    for (size_t i = 0; i < sent.size(); ++i) {
      works.push_back(comm.user().Recv(absl::MakeSpan(in[i]), previous, {.tag = expected[i].tag}));
      works.push_back(comm.user().Send(absl::MakeSpan(out[i]), next, {.tag = sent[i].tag}));
    }
    std::mt19937 random(comm.rank());
    std::shuffle(works.begin(), works.end(), random);
    for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t value = expected[i].tag * 100 + expected[i].number;
      EXPECT_EQ(std::count(in[i].begin(), in[i].end(), value), kCount) << i;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

int ThreadsOfThisProcess() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    int threads = 0;
    if (absl::ConsumePrefix(&rest, "Threads:") && absl::SimpleAtoi(rest, &threads)) return threads;
  }
  return 0;
}

TEST_P(TagsTest, HundredsAreInFlightWithoutAThreadForEach) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!HasTags(comm)) return absl::OkStatus();
    constexpr int kTags = 500;
    const int receiver = comm.world_size() - 1;
    std::vector<std::vector<int32_t>> data(kTags);
    for (int tag = 0; tag < kTags; ++tag)
      data[tag].assign(tag % 50 == 0 ? 100'000 : 10, comm.rank() == 0 ? tag : -1);
    EK_RETURN_IF_ERROR(comm.Barrier());
    const int before = ThreadsOfThisProcess();
    std::vector<Work> works;
    for (int i = 0; i < kTags; ++i) {
      const int tag = comm.rank() == 0 ? i : kTags - 1 - i;
      if (comm.rank() == 0) {
        works.push_back(comm.user().Send(absl::MakeSpan(data[tag]), receiver, {.tag = tag + 1}));
      } else if (comm.rank() == receiver) {
        works.push_back(comm.user().Recv(absl::MakeSpan(data[tag]), 0, {.tag = tag + 1}));
      }
    }
    EXPECT_LE(ThreadsOfThisProcess() - before, 10);
    for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    for (int tag = 0; comm.rank() == receiver && tag < kTags; ++tag) {
      EXPECT_EQ(std::count(data[tag].begin(), data[tag].end(), tag), data[tag].size()) << tag;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// More receives are open than their rank can announce at a time, and the first send meets the last.
TEST_P(TagsTest, TheLastOfManyReceivesIsMet) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!HasTags(comm)) return absl::OkStatus();
    constexpr int kTags = 100;
    const int receiver = comm.world_size() - 1;
    std::vector<int32_t> numbers(kTags + 1);
    const TensorView view(absl::MakeSpan(numbers));
    std::vector<Work> works;
    for (int tag = 1; comm.rank() == receiver && tag <= kTags; ++tag)
      works.push_back(comm.user().Recv(view.Slice(tag, 1), 0, {.tag = tag}));
    EK_RETURN_IF_ERROR(comm.Barrier());
    for (int tag = kTags; tag >= 1; --tag) {
      if (comm.rank() == 0) {  // The receiver's memory is being written.
        numbers[tag] = tag;
        EK_RETURN_IF_ERROR(comm.user().Send(view.Slice(tag, 1), receiver, {.tag = tag}).Wait());
      }
      if (comm.rank() == receiver) {
        EK_RETURN_IF_ERROR(works[tag - 1].Wait());
        EXPECT_EQ(numbers[tag], tag);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(TagsTest, AWrongTagIsRefusedAndTheFlightRecordNamesTheOthers) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<float> data(4, static_cast<float>(comm.rank()));
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
    const int peer = 1 - comm.rank();
    const absl::StatusCode refused = absl::StatusCode::kInvalidArgument;
    Channel& user = comm.user();
    EXPECT_EQ(user.AllReduce(placed.view(), ReduceOp::kSum, {.tag = 1}).Wait().code(), refused);
    if (comm.rank() > 1) return comm.Barrier();
    EXPECT_EQ(user.Send(placed.view(), peer, {.tag = -1}).Wait().code(), refused);
    if (!HasTags(comm)) {
      EXPECT_EQ(user.Send(placed.view(), peer, {.tag = 1}).Wait().code(),
                absl::StatusCode::kUnimplemented);
      return comm.Barrier();
    }
    const CallOptions options = {.tag = 76543};
    EK_RETURN_IF_ERROR((comm.rank() == 0 ? user.Send(placed.view(), 1, options)
                                         : user.Recv(placed.view(), 0, options))
                           .Wait());
    EXPECT_EQ(data[3], 0.0f);
    EXPECT_TRUE(absl::StrContains(comm.FlightJson(), "\"tag\":76543")) << comm.FlightJson();
    EXPECT_TRUE(absl::StrContains(comm.FlightJson(), "tag 76543\"")) << comm.FlightJson();
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A send of rank 0 and a receive that do not match.
struct Misfit {
  const char* what;
  int64_t sent, received;  // Tags.
  int64_t count;           // The receiver's; the sender has 12.
};

// Ends a group of `world_size` ranks with a misfit.
void ExpectItNamesBothHalves(int world_size, int receiver, const Misfit& misfit) {
  SCOPED_TRACE(absl::StrCat(misfit.what, ", to rank ", receiver));
  const absl::Time start = absl::Now();
  const auto body = [&](Communicator& comm) -> absl::Status {
    if (!HasTags(comm)) return absl::UnimplementedError("");
    std::vector<float> data(12, 1.0f);
    const TensorView view(absl::MakeSpan(data));
    Channel& user = comm.user();
    for (const int64_t tag : {7, 8}) {  // So that each tag is known already.
      if (comm.rank() == 0) EK_RETURN_IF_ERROR(user.Send(view, receiver, {.tag = tag}).Wait());
      if (comm.rank() == receiver) EK_RETURN_IF_ERROR(user.Recv(view, 0, {.tag = tag}).Wait());
    }
    if (comm.rank() == 0) user.Send(view, receiver, {.tag = misfit.sent}).Wait().IgnoreError();
    if (comm.rank() == receiver) {
      user.Recv(view.Slice(0, misfit.count), 0, {.tag = misfit.received}).Wait().IgnoreError();
    }
    const absl::Status ended = comm.Barrier();
    EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
    const std::string places[] = {
        absl::StrCat("#1 send (user) float32[12] to rank ", receiver, " tag ", misfit.sent),
        absl::StrCat("#1 recv (user) float32[", misfit.count, "] from rank 0 tag ",
                     misfit.received)};
    for (const std::string& place : places)
      EXPECT_TRUE(absl::StrContains(ended.message(), place)) << place << ": " << ended;
    return ended;
  };
  EXPECT_FALSE(
      RunTested(world_size, body, {.timeout = kPatience, .watch = {.beat = absl::Milliseconds(50)}})
          .ok());
  EXPECT_LT(absl::Now() - start, kAtOnce) << "not at a deadline, which is later";
}

TEST_P(TagsTest, HalvesThatDoNotFitEndTheGroupOnEveryRankWithTheirTags) {
  constexpr Misfit kMisfits[] = {{"another size", 7, 7, 11}, {"another tag", 7, 8, 12}};
  for (const int receiver : Receivers(GetParam())) {
    for (const Misfit& misfit : kMisfits) ExpectItNamesBothHalves(GetParam(), receiver, misfit);
  }
}

TEST_P(TagsTest, AMissedDeadlineNamesTheTag) {
  const auto body = [&](Communicator& comm) -> absl::Status {
    if (!HasTags(comm)) return absl::UnimplementedError("");
    std::vector<float> data(12, 1.0f);
    const TensorView view(absl::MakeSpan(data));
    Work late;
    const CallOptions options = {.timeout = absl::Milliseconds(200), .tag = 9};
    if (comm.rank() == 0) late = comm.user().Send(view, 1, options);
    if (comm.rank() == 1) late = comm.user().Recv(view, 0, {.tag = 10});
    absl::Status ended = comm.rank() == 0 ? late.Wait() : absl::OkStatus();
    while (ended.ok()) {  // A rank that works, and does not wait for the others.
      absl::SleepFor(absl::Milliseconds(20));
      ended = comm.status();
    }
    EXPECT_TRUE(absl::IsDeadlineExceeded(ended)) << ended;
    EXPECT_TRUE(absl::StrContains(ended.message(), "to rank 1 tag 9")) << ended;
    return ended;
  };
  EXPECT_FALSE(RunTested(GetParam(), body).ok());
}

INSTANTIATE_TEST_SUITE_P(WorldSize, TagsTest, testing::ValuesIn(WorldSizes(2)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
