#include "evenkeel/join/steps/step_control.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// A rank that is a step ahead sends notices to a rank whose StepControl does not exist yet.
TEST(StepControlTest, ANoticeThatComesBeforeTheFirstStepArrives) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    int loop = 0;
    if (comm.rank() == 0) {
      StepControl::Of(comm).SetScope(&loop, 1);
      StepControl::Of(comm)
          .BecomeExhausted();  // Tells the other rank that this one follows its calls.
    }
    // The hub passes rank 0's notice on before its part of this.
    EK_RETURN_IF_ERROR(comm.control().Exchange("told", "", comm.timeout()).status());
    StepControl& steps = StepControl::Of(comm);
    if (comm.rank() == 1) {
      steps.SetScope(&loop, 1);
      steps.AnnounceCall("the call");
      EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter(&loop, "a part", 0));
      EK_RETURN_IF_ERROR(ticket->Wait().status());
      steps.EndStep();
    } else {
      EK_ASSIGN_OR_RETURN(const auto ticket, steps.EnterJoined());
      EK_ASSIGN_OR_RETURN(std::optional<std::string> call, steps.NextCall(ticket));
      EXPECT_EQ(call, "the call");
      EK_ASSIGN_OR_RETURN(call, steps.NextCall(ticket));
      EXPECT_EQ(call, std::nullopt);
    }
    steps.SetScope(nullptr, 0);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The message wakes a thread, which may take the core of the sender: most often rank 0's, which
// forwards all messages.
TEST(StepControlTest, SendingARecordIsNotBusyTime) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    int loop = 0;
    StepControl& steps = StepControl::Of(comm);
    const int64_t before = internal::NanosWaited();
    EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter(&loop, "a part", 0));
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
      int part = 0;
      EK_RETURN_IF_ERROR(comm.Barrier());
      const int64_t before = comm.control().link().Counters().messages_sent;
      if (is_exhausted) {
        EK_ASSIGN_OR_RETURN(const auto ticket, steps.EnterJoined());
        EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
        StepAction action;
        do {
          EK_ASSIGN_OR_RETURN(action, steps.NextAction(answer));
        } while (action.kind != StepAction::Kind::kEnd);
      } else {
        EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter(&part, "part", 0));
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

TEST(StepControlTest, AnUnknownActionIsRefused) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    StepControl& steps = StepControl::Of(comm);
    const StepAnswer answer{.step = 3, .lowest_active = 0};
    for (const char* wrong : {"", "\x04part\n", "\x80part\n", "\xffpart\n", "\x01part"}) {
      if (comm.rank() == 0) comm.control().Send(1, "action/3", wrong);
      if (comm.rank() == 1) {
        EXPECT_TRUE(absl::IsInternal(steps.NextAction(answer).status())) << wrong;
      }
    }
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Positions and messages of a group count its steps also on ranks that have no StepControl.
TEST(StepControlTest, ARankThatTakesPartInNoStepIsNamedAtTheEnd) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) return comm.Finalize(absl::Seconds(20));
    int who = 0;
    EK_ASSIGN_OR_RETURN(const auto ticket, StepControl::Of(comm).Enter(&who, "a part", 0));
    return ticket->Wait().status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "training steps")) << status;
}

// Each rank finds the disagreement by itself. The first rank to end its process would count as
// lost if it had not reported the reason to the hub before.
TEST(StepControlTest, EachRankReportsADisagreementBeforeItIsGone) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 0) comm.ledger().Finish("optimizer", 1, "");
    StepControl& steps = StepControl::Of(comm);
    EK_RETURN_IF_ERROR(comm.Barrier());
    const int64_t before = comm.control().link().Counters().messages_sent;
    int who = 0;
    EK_ASSIGN_OR_RETURN(const auto ticket, steps.Enter(&who, "a part", 0));
    const absl::Status end = ticket->Wait().status();
    EXPECT_EQ(comm.control().link().Counters().messages_sent - before, 2)
        << "its record, its failure";
    return end;
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

}  // namespace
}  // namespace evenkeel
