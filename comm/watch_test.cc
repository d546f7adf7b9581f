// A communicator's own actions: it records, warns, ends operations that missed their deadline, and
// writes its flight record.

#include <atomic>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group_extension.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/groups.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using internal::CreateGroupOver;
using internal::RunRanksOver;
using internal::Transport;
using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kQuick = absl::Milliseconds(20);

std::string Message(const absl::Status& status) { return std::string(status.message()); }

absl::Status EndOf(const Communicator& comm) {
  const absl::Time latest = absl::Now() + absl::Seconds(30);
  while (comm.status().ok() && absl::Now() < latest) absl::SleepFor(absl::Milliseconds(1));
  return comm.status();
}

// The warnings that ranks received.
class Warnings {
 public:
  std::function<void(const std::string&)> Collect() {
    return [this](const std::string& text) {
      absl::MutexLock lock(&mutex_);
      texts_.push_back(text);
    };
  }
  // Waits for `count` of them, at most for half a minute.
  void Await(size_t count) {
    const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return texts_.size() >= count;
    };
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(30));
  }
  std::vector<std::string> texts() const {
    absl::MutexLock lock(&mutex_);
    return texts_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mutex_);
};

class WatchTest : public testing::TestWithParam<Transport> {};

TEST_P(WatchTest, RecordsWhatIsIssuedAndHowItEnded) {
  const absl::Status status = RunRanksOver(GetParam(), 2, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(10);
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
    if (comm.rank() == 0) EK_RETURN_IF_ERROR(comm.user().Send(absl::MakeSpan(data), 1).Wait());
    if (comm.rank() == 1) EK_RETURN_IF_ERROR(comm.user().Recv(absl::MakeSpan(data), 0).Wait());
    EK_RETURN_IF_ERROR(comm.Barrier());
    const std::vector<FlightEntry> entries = comm.flight().Entries();
    EXPECT_EQ(entries.size(), 3u);
    if (entries.size() < 3) return absl::OkStatus();
    EXPECT_EQ(ToString(entries[0].what), "all_reduce (user) float32[10] sum");
    EXPECT_EQ(entries[0].channel, comm.user().id());
    EXPECT_EQ(entries[1].sequence, 0);
    EXPECT_EQ(entries[2].sequence, 1) << "pairs are counted by themselves";
    for (const FlightEntry& entry : entries) {
      EXPECT_EQ(entry.code, absl::StatusCode::kOk);
      EXPECT_LE(entry.issued, entry.ended);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(WatchTest, ADeadlineIsKeptWhenNobodyWaits) {
  absl::Status seen[2];
  RunRanksOver(GetParam(), 2,
               [&](Communicator& comm) -> absl::Status {
                 if (comm.rank() == 0) comm.user().Barrier({.timeout = absl::Milliseconds(200)});
                 seen[comm.rank()] = EndOf(comm);
                 return absl::OkStatus();
               },
               {.watch = {.beat = kQuick}})
      .IgnoreError();
  for (const absl::Status& status : seen) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(Message(status),
                HasSubstr("rank 0 waited 200ms in #0 barrier (user) on channel \"user\""));
  }
}

TEST_P(WatchTest, AMissedDeadlineSaysForWhom) {
  absl::Status seen[3];
  RunRanksOver(GetParam(), 3,
               [&](Communicator& comm) -> absl::Status {
                 seen[comm.rank()] =
                     comm.rank() == 1
                         ? EndOf(comm)
                         : comm.user().Barrier({.timeout = absl::Milliseconds(300)}).Wait();
                 return absl::OkStatus();
               },
               {.watch = {.beat = kQuick}})
      .IgnoreError();
  for (const absl::Status& status : seen) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    const std::optional<FailureInfo> info = FailureInfoOf(status);
    ASSERT_TRUE(info.has_value()) << status;
    EXPECT_EQ(*info, (FailureInfo{.kind = FailureKind::kDeadline,
                                  .ranks = {1},
                                  .operation = "#0 barrier (user) on channel \"user\"",
                                  .position = 0}));
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("waited 300ms in #0 barrier (user) on channel \"user\" for rank 1"),
                      HasSubstr("has issued nothing")));
  }
}

TEST_P(WatchTest, ALongWaitIsWarnedOfOnce) {
  Warnings warnings;
  const absl::Status status = RunRanksOver(
      GetParam(), 3,
      [&](Communicator& comm) -> absl::Status {
        EK_RETURN_IF_ERROR(comm.Barrier());
        if (comm.rank() == 1) {
          warnings.Await(2);
          absl::SleepFor(
              5 * kQuick);  // Long enough for a second warning of the same wait, if there were one.
        }
        return comm.Barrier();
      },
      {.watch = {.beat = kQuick, .stall_warning = 5 * kQuick, .warn = warnings.Collect()}});
  EXPECT_TRUE(status.ok()) << status << ": a slow rank is not killed";
  std::vector<std::string> texts = warnings.texts();
  for (const char* rank : {"rank 0", "rank 2"}) {
    int count = 0;
    for (const std::string& text : texts) {
      if (text.find(absl::StrCat(rank, " has waited ")) != 0 ||
          text.find("in #1 barrier") == std::string::npos)
        continue;
      ++count;
      EXPECT_THAT(text, AllOf(HasSubstr("in #1 barrier (user) on channel \"user\" for rank 1"),
                              HasSubstr("after #0 barrier (user)")));
    }
    EXPECT_EQ(count, 1) << rank << ": " << testing::PrintToString(texts);
  }
}

TEST_P(WatchTest, RanksThatWaitForEachOtherLearnOfIt) {
  absl::Status seen[2];
  const absl::Time start = absl::Now();
  RunRanksOver(GetParam(), 2,
               [&](Communicator& comm) -> absl::Status {
                 EK_ASSIGN_OR_RETURN(Channel * other, comm.OpenChannel("other"));
                 EK_RETURN_IF_ERROR(comm.Barrier());
                 seen[comm.rank()] = (comm.rank() == 0 ? comm.user() : *other).Barrier().Wait();
                 return absl::OkStatus();
               },
               {.watch = {.beat = kQuick}})
      .IgnoreError();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (const absl::Status& status : seen) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("rank 0 waits in #1 barrier (user) on channel \"user\""),
                      HasSubstr("rank 1 waits in #0 barrier (user) on channel \"other\"")));
  }
}

// Longer than the hub lets a deadlock stand: a second, and a few beats of kQuick.
constexpr absl::Duration kLong = absl::Milliseconds(1500);

TEST_P(WatchTest, ACallbackThatTakesLongIsNoDeadlock) {
  const absl::Status status =
      RunRanksOver(GetParam(), 2,
                   [](Communicator& comm) -> absl::Status {
                     EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel("other"));
                     if (comm.rank() == 1) {
                       EK_RETURN_IF_ERROR(channel->Barrier().Wait());
                       EK_RETURN_IF_ERROR(channel->Barrier().Wait());
                       return comm.Barrier();
                     }
                     Work second;
                     absl::Notification is_issued;
                     channel->Barrier().OnDone([&](const absl::Status&) {
                       absl::SleepFor(kLong);  // It computes.
                       second = channel->Barrier();
                       is_issued.Notify();
                     });
                     const absl::Status barrier = comm.Barrier();
                     is_issued.WaitForNotification();
                     return barrier.ok() ? second.Wait() : barrier;
                   },
                   {.watch = {.beat = kQuick}});
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(WatchTest, AWaitThatEndsByItselfIsNoDeadlock) {
  const absl::Status status = RunRanksOver(
      GetParam(), 2,
      [](Communicator& comm) -> absl::Status {
        if (comm.rank() == 0) {
          EXPECT_TRUE(absl::IsDeadlineExceeded(comm.control().Get("maybe", kLong).status()));
        }
        return comm.Barrier();
      },
      {.watch = {.beat = kQuick}});
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(WatchTest, AFailureLeavesARecordOfItsMoment) {
  const std::string folder = testing::TempDir();
  absl::Notification waits;
  {
    auto group = CreateGroupOver(GetParam(), 2, {.flight = {.folder = folder}});
    ASSERT_TRUE(group.ok()) << group.status();
    std::thread waiter([&] {
      const Work work = (*group)[0]->user().Barrier();
      waits.Notify();
      EXPECT_FALSE(work.Wait().ok());
    });
    waits.WaitForNotification();
    (*group)[1]->Abort(absl::InternalError("out of \"memory\""));
    waiter.join();
    EXPECT_THAT(Message(EndOf(*(*group)[0])), HasSubstr("out of \"memory\""));
  }
  for (int rank = 0; rank < 2; ++rank) {
    std::ifstream file(absl::StrCat(folder, "/world.rank", rank, ".json"));
    const auto json = nlohmann::json::parse(std::string(std::istreambuf_iterator<char>(file), {}));
    EXPECT_EQ(json["rank"], rank);
    EXPECT_EQ(json["group"], "world");
    EXPECT_THAT(json["status"]["message"].get<std::string>(), HasSubstr("out of \"memory\""));
    ASSERT_EQ(json["entries"].size(), rank == 0 ? 1u : 0u);
    if (rank == 0) {
      EXPECT_EQ(json["entries"][0]["state"], "open") << "it was, at that moment";
      EXPECT_EQ(json["channels"][0]["position"], 1);
    }
    ASSERT_EQ(std::remove(absl::StrCat(folder, "/world.rank", rank, ".json").c_str()), 0);
  }
}

TEST_P(WatchTest, ARankThatGoesWithoutAWordLeavesItsRecordInAFolderThatIsMade) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/made/for/it");
  {
    auto group = CreateGroupOver(GetParam(), 2, {.flight = {.folder = folder}});
    ASSERT_TRUE(group.ok()) << group.status();
    (*group)[1] = nullptr;
  }
  const std::string path = absl::StrCat(folder, "/world.rank1.json");
  EXPECT_TRUE(std::ifstream(path).good());
  std::remove(path.c_str());
}

TEST_P(WatchTest, ACleanEndLeavesNoRecord) {
  const std::string folder = testing::TempDir();
  const absl::Status status =
      RunRanksOver(GetParam(), 2, [](Communicator& comm) { return comm.Barrier(); },
                   {.flight = {.folder = folder}});
  EXPECT_TRUE(status.ok()) << status;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(std::ifstream(absl::StrCat(folder, "/world.rank", rank, ".json")).good());
  }
}

TEST_P(WatchTest, ARecordOnDemandSaysWhatIsWaitedFor) {
  auto group = CreateGroupOver(GetParam(), 2);
  ASSERT_TRUE(group.ok()) << group.status();
  Communicator& comm = *(*group)[0];
  std::thread waiter([&] { EXPECT_TRUE(comm.Barrier().ok()); });
  const absl::Time latest = absl::Now() + absl::Seconds(30);
  nlohmann::json json;
  do {
    json = nlohmann::json::parse(comm.FlightJson());
  } while (json["waits"].empty() && absl::Now() < latest);
  EXPECT_EQ(json["waits"], nlohmann::json({"#0 barrier (user) on channel \"user\""}));
  EXPECT_EQ(json["status"]["code"], "OK");
  EXPECT_EQ(json["backend"], std::string(comm.backend_name()));
  EXPECT_TRUE((*group)[1]->Barrier().ok());
  waiter.join();
  EXPECT_FALSE(comm.DumpFlight("/no such folder/x.json").ok());
}

// Every thread of a communicator at its busiest while it goes: for the sanitizers.
TEST_P(WatchTest, GroupsMayEndAtAnyMoment) {
  for (int round = 0; round < 20; ++round) {
    auto group = CreateGroupOver(GetParam(), 2,
                                 {.verify = static_cast<VerifyLevel>(round % 3),
                                  .watch = {.beat = absl::Microseconds(200),
                                            .stall_warning = absl::Microseconds(300),
                                            .warn = [](const std::string&) {}},
                                  .flight = {.folder = testing::TempDir()}});
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<std::thread> threads;
    for (auto& comm : *group) {
      threads.emplace_back([&comm, round] {
        std::vector<float> data(100), message(100);
        const TensorView view(absl::MakeSpan(message));
        int from = -1;
        const auto half = [&] {
          return comm->rank() == 0 ? comm->user().RecvAny(view, &from) : comm->user().Send(view, 0);
        };
        for (int i = 0; i < 10 * (1 + comm->rank()); ++i) {
          const Work work = half();
          if (!comm->AllReduce(absl::MakeSpan(data), ReduceOp::kSum).ok()) break;
          if (!work.Wait().ok()) break;
        }
        half();
        if (comm->rank() == round % 2) comm->Abort(absl::InternalError("enough"));
        comm.reset();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

struct Failures {
  std::atomic<int> reported = 0;
  std::atomic<int> hub_must_judge = 0;  // Those that leave the judgement to the hub.
};

// A link whose hub can fall silent, and that counts the failures that this rank reports to it.
class FakeLink : public ControlLink {
 public:
  FakeLink(std::unique_ptr<ControlLink> link, const std::atomic<int>* silence, Failures* failures)
      : link_(std::move(link)), silence_(silence), failures_(failures) {}
  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override {
    link_->Start(
        [this, receive](ToRank message) {
          if (*silence_ == 0) receive(std::move(message));
        },
        std::move(lost));
  }
  void Send(ToHub message) override {
    const auto* failed = std::get_if<to_hub::Failed>(&message);
    if (failures_ != nullptr && failed != nullptr) {
      ++failures_->reported;
      if (failed->unheard_us > 0) ++failures_->hub_must_judge;
    }
    if (*silence_ == 0) link_->Send(std::move(message));
  }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view, int, int, absl::Duration,
                                                    const Origin&) override {
    return absl::UnimplementedError("a fake");
  }
  std::string Key(absl::string_view purpose) const override { return link_->Key(purpose); }
  absl::Duration Silence() const override { return absl::Seconds(silence_->load()); }
  int HubRank() const override { return 1; }
  ControlCounters Counters() const override { return link_->Counters(); }
  void Stop() override { link_->Stop(); }

 private:
  const std::unique_ptr<ControlLink> link_;
  const std::atomic<int>* const silence_;  // In seconds.
  Failures* const failures_;
};

// Two ranks; for how long the hub is silent for each, in seconds, and how many failures they
// report.
std::vector<std::unique_ptr<Communicator>> GroupWithHub(const std::atomic<int>* silence0,
                                                        const std::atomic<int>* silence1,
                                                        Failures* failures = nullptr) {
  std::vector<std::unique_ptr<Backend>> backends = internal::CreateLocalBackends(2);
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(2);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < 2; ++rank) {
    group.push_back(std::make_unique<Communicator>(
        std::move(backends[rank]),
        std::make_unique<ControlChannel>(
            rank, 2,
            std::make_unique<FakeLink>(std::move(links[rank]), rank == 0 ? silence0 : silence1,
                                       failures)),
        CommunicatorOptions{.watch = {.beat = kQuick}}));
  }
  return group;
}

TEST(SilenceTest, ASilentHubEndsTheGroupHere) {
  std::atomic<int> silence = 0;
  const auto group = GroupWithHub(&silence, &silence);
  const Work work = group[0]->user().Barrier();
  silence = 7;
  const absl::Status status = work.Wait();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(Message(status),
              HasSubstr("rank 0 has received nothing for 7s from the job's store"));
  EXPECT_EQ(FailureInfoOf(status), (FailureInfo{.kind = FailureKind::kRankLost,
                                                .ranks = {1},
                                                .operation = "barrier (user)",
                                                .position = 0}));
  EXPECT_TRUE(absl::IsUnavailable(EndOf(*group[1]))) << "it learns of it by itself";
}

// It swallows what the rank that has lost patience says, too; what tells the other is that it goes
// for a new group.
TEST(SilenceTest, AHubThatIsSilentForOneRankEndsTheGroupForTheOther) {
  std::atomic<int> silence = 0, none = 0;
  const auto group = GroupWithHub(&silence, &none);
  silence = 7;
  EXPECT_TRUE(absl::IsUnavailable(EndOf(*group[0])));
  silence = 0;
  std::thread survivor([&] { (void)group[0]->control().Regroup(absl::Seconds(30)); });
  EXPECT_THAT(Message(group[1]->AgreeAny(true).status()),
              HasSubstr("rank 0 has left the group for a new one"));
  (void)group[1]->control().Regroup(absl::Seconds(30));
  survivor.join();
}

// A rank that receives nothing is in two groups, and the error of the first ends the second.
TEST(SilenceTest, TheHubJudgesAnErrorOfAnotherGroupThatTakesItForLost) {
  for (const bool is_hubs : {true, false}) {
    std::atomic<int> silence = 0, none = 0;
    Failures failures;
    const auto group = GroupWithHub(&silence, &none, &failures);
    silence = 7;
    group[0]->Abort(is_hubs ? WithFailureInfo(absl::UnavailableError("it has received nothing"),
                                              {.kind = FailureKind::kRankLost})
                            : absl::DataLossError("the disk is gone"));
    // The watchdog may have reported the hub's silence, too.
    EXPECT_EQ(failures.reported - failures.hub_must_judge, is_hubs ? 0 : 1);
  }
}

// The hub does not judge the first report if it did not run for a while.
TEST(SilenceTest, ARankThatReceivesNothingReportsItAgainAfterAsLong) {
  std::atomic<int> silence = 0, none = 0;
  Failures failures;
  const auto group = GroupWithHub(&silence, &none, &failures);
  const auto await_reports = [&](int reports) {
    for (int i = 0; i < 1000 && failures.hub_must_judge < reports; ++i)
      absl::SleepFor(absl::Milliseconds(10));
    absl::SleepFor(10 * kQuick);
    EXPECT_EQ(failures.hub_must_judge, reports);
  };
  silence = 7;
  await_reports(1);
  silence = 11;
  await_reports(1);
  silence = 13;
  await_reports(2);
  silence = 0;
}

class FinalStates final : public internal::GroupExtension {
 public:
  FinalStates(Communicator* comm, std::string state)
      : GroupExtension(comm), state_(std::move(state)) {}
  void OnNotice(int, absl::string_view, absl::string_view) override {}
  int64_t position() const override { return 0; }
  bool is_exhausted() const override { return false; }
  std::string FinalState() const override { return state_; }
  absl::Status CompareFinalStates(absl::Span<const std::string> states) const override {
    return states[0] == states[1] ? absl::OkStatus() : absl::FailedPreconditionError("they differ");
  }

 private:
  const std::string state_;
};

void Extend(Communicator& comm, const std::string& state) { comm.Extension<FinalStates>(state); }

TEST(FinalizeTest, EqualStatesOfExtensionsAreNoDisagreement) {
  std::atomic<int> silence = 0;
  Failures failures;
  const auto group = GroupWithHub(&silence, &silence, &failures);
  for (const auto& comm : group) Extend(*comm, "1 step");
  absl::Status end;
  std::thread other([&] { end = group[1]->Finalize(absl::Seconds(30)); });
  EXPECT_TRUE(group[0]->Finalize(absl::Seconds(30)).ok());
  other.join();
  EXPECT_TRUE(end.ok()) << end;
}

std::vector<absl::Status> FinalizeAll(const std::vector<std::unique_ptr<Communicator>>& group) {
  std::vector<absl::Status> ends(2);
  std::thread other([&] { ends[1] = group[1]->Finalize(absl::Seconds(30)); });
  ends[0] = group[0]->Finalize(absl::Seconds(30));
  other.join();
  return ends;
}

TEST(FinalizeTest, ARankWithoutAnExtensionLearnsOfTheOthersStates) {
  for (const int extended : {0, 1}) {
    std::atomic<int> silence = 0;
    const auto group = GroupWithHub(&silence, &silence);
    Extend(*group[extended], "1 step");
    for (const absl::Status& end : FinalizeAll(group)) {
      EXPECT_TRUE(absl::IsFailedPrecondition(end)) << end;
      EXPECT_EQ(end.message(), "the finalization of the group: they differ");
    }
  }
}

TEST(FinalizeTest, ARankWithoutAnExtensionIsEqualToOneWithoutAState) {
  std::atomic<int> silence = 0;
  const auto group = GroupWithHub(&silence, &silence);
  Extend(*group[0], "");
  for (const absl::Status& end : FinalizeAll(group)) EXPECT_TRUE(end.ok()) << end;
}

// Each rank finds the disagreement by itself. The first rank to end its process would count as
// lost if it had not reported the reason to the hub before.
TEST(FinalizeTest, EachRankReportsADisagreementBeforeItIsGone) {
  std::atomic<int> silence = 0;
  Failures failures;
  const auto group = GroupWithHub(&silence, &silence, &failures);
  Extend(*group[0], "1 step");
  Extend(*group[1], "2 steps");
  std::vector<absl::Status> ends(2);
  std::thread other([&] { ends[1] = group[1]->Finalize(absl::Seconds(30)); });
  ends[0] = group[0]->Finalize(absl::Seconds(30));
  other.join();
  for (const absl::Status& end : ends) EXPECT_TRUE(absl::IsFailedPrecondition(end)) << end;
  EXPECT_EQ(ends[0].message(), ends[1].message());
  EXPECT_EQ(failures.reported, 2);
}

INSTANTIATE_TEST_SUITE_P(Over, WatchTest, testing::Values(Transport::kLocal, Transport::kTcp),
                         [](const auto& info) { return internal::ToString(info.param); });

}  // namespace
}  // namespace evenkeel
