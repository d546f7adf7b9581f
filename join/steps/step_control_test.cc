#include "evenkeel/join/steps/step_control.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/steps/step_log.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// A rank that is a step ahead sends notices to a rank whose StepControl does not exist yet.
TEST(StepControlTest, ANoticeThatComesBeforeTheFirstStepArrives) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 0) {
      StepControl::Of(comm).SetLoop(1);
      StepControl::Of(comm).BecomeExhausted();  // The other rank sends its calls from now on.
    }
    // The hub passes rank 0's notice on before its part of this.
    EK_RETURN_IF_ERROR(comm.control().Exchange("told", "", comm.timeout()).status());
    StepControl& steps = StepControl::Of(comm);
    if (comm.rank() == 1) {
      steps.SetLoop(1);
      steps.AnnounceCall("the call");
      // Without the notice the call would not be sent before the step.
      EK_RETURN_IF_ERROR(comm.control().Exchange("followed", "", comm.timeout()).status());
      EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter("a part", 0));
      EK_RETURN_IF_ERROR(ticket->Wait().status());
      steps.EndStep();
    } else {
      EK_ASSIGN_OR_RETURN(const auto ticket, steps.EnterJoined());
      EK_ASSIGN_OR_RETURN(std::optional<std::string> call, steps.NextCall(ticket));
      EXPECT_EQ(call, "the call");
      EK_RETURN_IF_ERROR(comm.control().Exchange("followed", "", comm.timeout()).status());
      EK_ASSIGN_OR_RETURN(call, steps.NextCall(ticket));
      EXPECT_EQ(call, std::nullopt);
    }
    steps.SetLoop(std::nullopt);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The end of the group runs callbacks, which may use the steps.
TEST(StepControlTest, AMalformedNoticeBeforeTheFirstStepEndsTheGroup) {
  std::vector<absl::Status> ends(2);
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) comm.control().Notify("step log", "malformed");
    // The hub passes rank 1's notice on before its part of this.
    EK_RETURN_IF_ERROR(comm.control().Exchange("told", "", comm.timeout()).status());
    if (comm.rank() == 0) {
      comm.control().Exchange("never", "", [&](const absl::StatusOr<std::vector<std::string>>&) {
        (void)StepControl::Of(comm).position();
      });
      ends[0] = StepControl::Of(comm).Enter("a part", 0).status();
      return ends[0];
    }
    ends[1] = comm.Barrier();
    return ends[1];
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& end : ends) {
    EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
    EXPECT_TRUE(absl::StrContains(end.message(), "an entry of the step log")) << end;
  }
}

// A later step cannot have an answer, and the other ranks wait for it.
TEST(StepControlTest, AnExchangeThatFailsEndsTheGroup) {
  std::vector<absl::Status> ends(2);
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) {
      ends[1] = comm.Barrier();
      return ends[1];
    }
    EK_ASSIGN_OR_RETURN(const auto ticket, StepControl::Of(comm).Enter("a part", 0));
    comm.control().Close(absl::InternalError("the reply is malformed"));
    EXPECT_FALSE(ticket->Wait().ok());
    ends[0] = comm.status();
    return ends[0];
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& end : ends)
    EXPECT_TRUE(absl::StrContains(end.message(), "the reply is malformed")) << end;
}

// Rank 1 runs, outside of the group, so only the deadline ends the wait.
TEST(StepControlTest, AnEntryThatDoesNotArriveIsNamed) {
  for (const bool is_call : {true, false}) {
    absl::Notification is_over;
    const absl::Status status = RunTestRanks(
        2,
        [&](Communicator& comm) -> absl::Status {
          StepControl& steps = StepControl::Of(comm);
          steps.SetLoop(0);
          if (comm.rank() == 0) steps.BecomeExhausted();
          // The hub passes rank 0's notice on before its part of this.
          EK_RETURN_IF_ERROR(comm.control().Exchange("told", "", comm.timeout()).status());
          if (comm.rank() == 1) {
            if (is_call) steps.AnnounceCall("lost");
            const auto ticket = steps.Enter("a part", 0);
            EXPECT_TRUE(is_over.WaitForNotificationWithTimeout(absl::Seconds(30)));
            return ticket.status();
          }
          EK_ASSIGN_OR_RETURN(const auto ticket, steps.EnterJoined());
          if (is_call) {
            EK_RETURN_IF_ERROR(comm.control().Receive("step log", comm.timeout()).status());
          }
          const absl::StatusOr<std::optional<std::string>> call = steps.NextCall(ticket);
          absl::Status end = call.status();
          if (!is_call) {
            EXPECT_TRUE(call.ok() && !call->has_value());
            EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
            EXPECT_TRUE(steps.NextEntry(answer).ok());
            end = steps.NextEntry(answer).status();
          }
          is_over.Notify();
          EXPECT_TRUE(absl::IsDeadlineExceeded(end)) << end;
          EXPECT_TRUE(absl::StartsWith(
              end.message(), is_call
                                 ? "rank 0 did not receive call 1 of 1 before step 1 from rank 1"
                                 : "rank 0 did not receive the next action in step 1 from rank "
                                   "1: rank 0 waited 1s"))
              << end;
          const std::optional<FailureInfo> info = FailureInfoOf(end);
          EXPECT_TRUE(info.has_value() && info->ranks == std::vector<int>{1}) << end;
          return absl::OkStatus();
        },
        CommunicatorOptions{.timeout = absl::Seconds(1)});
    EXPECT_TRUE(status.ok()) << status;
  }
}

// The message wakes a thread, which may take the core of the sender: most often rank 0's, which
// forwards all messages.
TEST(StepControlTest, SendingARecordIsNotBusyTime) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    StepControl& steps = StepControl::Of(comm);
    const int64_t before = internal::NanosWaited();
    EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter("a part", 0));
    EXPECT_GT(internal::NanosWaited(), before);
    EK_RETURN_IF_ERROR(ticket->Wait().status());
    steps.EndStep();
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Thousands of ranks may be exhausted.
TEST(StepControlTest, AnActionIsOneMessageHoweverManyRanksShadowIt) {
  for (const int world_size : {3, 8}) {
    SCOPED_TRACE(world_size);
    const absl::Status status = RunTestRanks(world_size, [](Communicator& comm) -> absl::Status {
      StepControl& steps = StepControl::Of(comm);
      const bool is_exhausted = comm.rank() > 0;
      EK_RETURN_IF_ERROR(comm.Barrier());
      const int64_t before = comm.control().link().Counters().messages_sent;
      if (is_exhausted) {
        EK_ASSIGN_OR_RETURN(const auto ticket, steps.EnterJoined());
        EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
        StepEntry entry;
        do {
          EK_ASSIGN_OR_RETURN(entry, steps.NextEntry(answer));
        } while (entry.kind != StepEntry::Kind::kEnd);
      } else {
        EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter("part", 0));
        EK_RETURN_IF_ERROR(ticket->Wait().status());
        EK_RETURN_IF_ERROR(steps.Announce("part", "payload"));
        steps.EndStep();
      }
      EK_RETURN_IF_ERROR(comm.Barrier());
      if (!is_exhausted) {
        EXPECT_EQ(comm.control().link().Counters().messages_sent - before, 4)
            << "its record, that it takes part, an action, the end";
      }
      return comm.Barrier();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// The last message of a loop stands for the actions that no rank takes any more.
TEST(StepControlTest, WhileAllRanksAreActiveOnlyRecordsAreSent) {
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) -> absl::Status {
    constexpr int kSteps = 20;
    StepControl& steps = StepControl::Of(comm);
    steps.SetLoop(1);
    EK_RETURN_IF_ERROR(comm.Barrier());
    const ControlCounters before = comm.control().link().Counters();
    int64_t record_bytes = 0;
    for (int step = 0; step < kSteps; ++step) {
      EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter("gradients", 0));
      EK_RETURN_IF_ERROR(steps.Announce("gradients", std::string(1000, 'g')));
      steps.AnnounceCall(std::string(1000, 'c'));
      EK_RETURN_IF_ERROR(steps.Enter("optimizer", 2).status());
      EK_RETURN_IF_ERROR(steps.Announce("optimizer", std::string(1000, 'o')));
      EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
      record_bytes += static_cast<int64_t>(answer.record(comm.rank()).Serialize().size());
    }
    const ControlCounters after = comm.control().link().Counters();
    EXPECT_EQ(after.messages_sent - before.messages_sent, kSteps) << "one record for each step";
    EXPECT_LE(after.bytes_sent - before.bytes_sent, record_bytes + kSteps * 64) << "no entry";
    EK_RETURN_IF_ERROR(comm.Barrier());
    steps.EndStep();
    steps.BecomeExhausted();
    EK_ASSIGN_OR_RETURN(const auto ticket, steps.EnterJoined());
    EK_ASSIGN_OR_RETURN(const auto call, steps.NextCall(ticket));
    EXPECT_EQ(call, std::nullopt);
    EXPECT_EQ(comm.control().link().Counters().messages_sent - after.messages_sent,
              comm.rank() == 0 ? 3 : 2)
        << "the end of its input, its record, and rank 0 ends the loop";
    steps.SetLoop(std::nullopt);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Positions and messages of a group count its steps also on ranks that have no StepControl.
TEST(StepControlTest, ARankThatTakesPartInNoStepIsNamedAtTheEnd) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) return comm.Finalize(absl::Seconds(20));
    EK_ASSIGN_OR_RETURN(const auto ticket, StepControl::Of(comm).Enter("a part", 0));
    return ticket->Wait().status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "training steps")) << status;
}

class Part : public StepParticipant {
 public:
  explicit Part(std::string name) : name_(std::move(name)) {}
  const std::string& participant_name() const override { return name_; }
  absl::StatusOr<ParticipantState> PrepareStep() override { return CurrentState(); }
  ParticipantState CurrentState() const override { return {}; }
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view) override { return absl::OkStatus(); }

 private:
  const std::string name_;
};

// Also an exhausted rank: it would wait for the state of a part that no other rank has.
TEST(StepControlTest, RanksWithDifferentPartsSeeTheListsOfAll) {
  std::vector<absl::Status> results(3);
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    Part model("model"), optimizer("optimizer");
    StepControl& steps = StepControl::Of(comm);
    steps.Register(&model);
    if (comm.rank() != 1) steps.Register(&optimizer);
    const auto ticket = comm.rank() == 1 ? steps.EnterJoined() : steps.Enter("model", 0);
    results[comm.rank()] = ticket.ok() ? (*ticket)->Wait().status() : ticket.status();
    steps.Unregister(&model);
    if (comm.rank() != 1) steps.Unregister(&optimizer);
    return results[comm.rank()];
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& result : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(result)) << result;
    EXPECT_TRUE(absl::StrContains(result.message(), "ranks 0,2: model, optimizer; rank 1: model"))
        << result;
  }
}

TEST(StepControlTest, RanksWithAnotherOrderOfPartsSeeTheListsOfAll) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    Part parts[] = {Part("model"), Part("optimizer")};
    StepControl& steps = StepControl::Of(comm);
    steps.Register(&parts[comm.rank()]);
    steps.Register(&parts[1 - comm.rank()]);
    const auto ticket = steps.Enter("model", 0);
    const absl::Status end = ticket.ok() ? (*ticket)->Wait().status() : ticket.status();
    for (Part& part : parts) steps.Unregister(&part);
    return end;
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(
      absl::StrContains(status.message(), "rank 0: model, optimizer; rank 1: optimizer, model"))
      << status;
}

// The error says who they are, and the group's state is that of the step.
TEST(StepControlTest, ADisagreementComesAfterTheActiveRanksAreKnown) {
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) StepControl::Of(comm).ledger().Finish("optimizer", 1, "");
    StepControl& steps = StepControl::Of(comm);
    const auto ticket = comm.rank() == 0 ? steps.EnterJoined() : steps.Enter("a part", 0);
    const absl::Status end = ticket.ok() ? (*ticket)->Wait().status() : ticket.status();
    EXPECT_EQ(steps.active_ranks(), (std::vector<int>{1, 2}));
    return end;
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

// Each rank finds the disagreement by itself. The first rank to end its process would count as
// lost if it had not reported the reason to the hub before.
TEST(StepControlTest, EachRankReportsADisagreementBeforeItIsGone) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 0) StepControl::Of(comm).ledger().Finish("optimizer", 1, "");
    StepControl& steps = StepControl::Of(comm);
    EK_RETURN_IF_ERROR(comm.Barrier());
    const int64_t before = comm.control().link().Counters().messages_sent;
    EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter("a part", 0));
    const absl::Status end = ticket->Wait().status();
    EXPECT_EQ(comm.control().link().Counters().messages_sent - before, 2)
        << "its record, its failure";
    return end;
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

}  // namespace
}  // namespace evenkeel
