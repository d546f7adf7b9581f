#include "evenkeel/zero_optim/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Minutes(1);

std::string Folder(absl::string_view name) {
  const std::string folder = absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
  std::filesystem::remove_all(folder);
  return folder;
}

absl::StatusOr<OptimizerState> ReadAll(const std::string& folder, const ParameterSet& params) {
  EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, params));
  return saved.ReadState();
}

// A save of the optimizer's state, which stops before its files until the gate opens.
CheckpointToWrite Gated(Optimizer& optimizer, const std::string& folder, absl::Notification& gate) {
  return {.name = optimizer.join_name(),
          .state = optimizer.Pieces(),
          .steps_finished = optimizer.steps_finished(),
          .hooks = {.begin = [&gate, folder]() -> absl::StatusOr<std::string> {
            gate.WaitForNotification();
            return folder;
          }}};
}

// The files are written when further steps have changed the state.
TEST(CheckpointWriterTest, WritesTheStateOfTheStepInWhichItWasStarted) {
  for (const int world_size : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat("world ", world_size));
    const std::string folder = Folder(absl::StrCat("behind", world_size));
    absl::Notification gate;
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
      CheckpointWriter writer;
      EK_RETURN_IF_ERROR(trainer->Step(0));
      EK_ASSIGN_OR_RETURN(const OptimizerState then, trainer->zero->Consolidate());
      const PendingSave save =
          writer.Start(comm, trainer->model.params(), Gated(*trainer->zero, folder, gate));
      for (int step = 1; step < 4; ++step) EK_RETURN_IF_ERROR(trainer->Step(step));
      EXPECT_FALSE(save.IsDone());
      EXPECT_TRUE(absl::IsDeadlineExceeded(save.Wait(absl::ZeroDuration())));
      EK_RETURN_IF_ERROR(comm.Barrier());
      EXPECT_FALSE(std::filesystem::exists(folder));
      EK_RETURN_IF_ERROR(comm.Barrier());
      if (comm.rank() == 0) gate.Notify();
      EK_RETURN_IF_ERROR(save.Wait(kLong));
      EK_ASSIGN_OR_RETURN(const OptimizerState read, ReadAll(folder, trainer->model.params()));
      EXPECT_TRUE(read == then);
      return absl::OkStatus();
    });
  }
}

TEST(CheckpointWriterTest, KeepsTheMemoryOfItsCopies) {
  const std::string folder = Folder("memory");
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    CheckpointWriter writer;
    EXPECT_EQ(writer.copy_bytes(), 0);
    int64_t bytes = 0;
    for (int save = 0; save < 3; ++save) {
      EK_ASSIGN_OR_RETURN(StatePieces mine, trainer->zero->Pieces());
      EK_RETURN_IF_ERROR(
          writer
              .Start(
                  comm, trainer->model.params(),
                  {.folder = folder, .name = trainer->zero->join_name(), .state = std::move(mine)})
              .Wait(kLong));
      if (save == 0) bytes = writer.copy_bytes();
      EXPECT_EQ(writer.copy_bytes(), bytes);
    }
    // Each copy begins at a multiple of 64 bytes.
    EXPECT_GE(bytes, trainer->zero->state_bytes());
    EXPECT_LE(bytes, trainer->zero->state_bytes() + 2 * 64 * std::ssize(kSizes));
    return absl::OkStatus();
  });
}

TEST(CheckpointWriterTest, AReservationHasTheMemoryOfTheFirstSave) {
  const std::string folder = Folder("reserved");
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_ASSIGN_OR_RETURN(StatePieces mine, trainer->zero->Pieces());
    std::vector<TensorView> tensors;
    for (const StatePiece& piece : mine.pieces) tensors.push_back(piece.data);
    CheckpointWriter writer;
    writer.Reserve(tensors);
    EK_RETURN_IF_ERROR(writer.last().Wait(kLong));
    const int64_t reserved = writer.copy_bytes();
    EXPECT_GE(reserved, trainer->zero->state_bytes());
    EK_RETURN_IF_ERROR(
        writer
            .Start(comm, trainer->model.params(),
                   {.folder = folder, .name = trainer->zero->join_name(), .state = std::move(mine)})
            .Wait(kLong));
    EXPECT_EQ(writer.copy_bytes(), reserved);
    return ReadAll(folder, trainer->model.params()).status();
  });
}

// Files of the caller's own, and a rename, as a part of the save.
TEST(CheckpointWriterTest, HooksAddFilesAndHaveTheLastWord) {
  const std::string folder = Folder("hooked");
  for (const bool fails : {false, true}) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
      EK_RETURN_IF_ERROR(trainer->Step(0));
      std::vector<float> weights = {1, 2, 3};
      TensorView view = absl::MakeSpan(weights);
      std::vector<std::string> texts;
      absl::Status end = absl::UnknownError("not called");
      CheckpointToWrite what{.name = trainer->zero->join_name(), .state = trainer->zero->Pieces()};
      what.hooks.begin = [&]() -> absl::StatusOr<std::string> { return folder; };
      what.hooks.write = [&](const std::string& path) -> absl::StatusOr<std::string> {
        EXPECT_EQ(path, folder);
        return absl::StrCat("rank ", comm.rank(), " copied ", view.as<float>()[1]);
      };
      what.hooks.finish = [&](const std::vector<std::string>& all) -> absl::Status {
        texts = all;
        EXPECT_TRUE(std::filesystem::exists(folder + "/manifest.json"));
        return fails ? absl::ResourceExhaustedError("no room for the list") : absl::OkStatus();
      };
      what.hooks.end = [&](const absl::Status& result) { end = result; };
      CheckpointWriter writer;
      TensorView* const more[] = {&view};
      const PendingSave save = writer.Start(comm, trainer->model.params(), std::move(what), more);
      weights[1] = 7;
      const absl::Status saved = save.Wait(kLong);
      EXPECT_EQ(saved, end);
      EXPECT_EQ(saved.ok(), !fails) << saved;
      if (fails) {
        EXPECT_THAT(std::string(saved.message()), HasSubstr("no room for the list"));
      }
      if (comm.rank() == 0) {
        EXPECT_THAT(texts,
                    testing::ElementsAre("rank 0 copied 2", "rank 1 copied 2", "rank 2 copied 2"));
      }
      EK_RETURN_IF_ERROR(comm.Barrier());
      EXPECT_EQ(std::filesystem::is_empty(folder), fails);
      return comm.Barrier();
    });
  }
}

TEST(CheckpointWriterTest, AnErrorOnOneRankIsThatOfAllAndTheGroupGoesOn) {
  const std::string folder = Folder("failing");
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_ASSIGN_OR_RETURN(PendingSave first, trainer->zero->SaveAsync(folder));
    EK_RETURN_IF_ERROR(trainer->Step(1));
    // The next one waits for it.
    EK_ASSIGN_OR_RETURN(const PendingSave failing,
                        trainer->zero->SaveAsync(comm.rank() == 1 ? "/proc/self" : folder));
    EK_RETURN_IF_ERROR(trainer->Step(2));
    const absl::Status status = failing.Wait(kLong);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1: cannot "));
    EXPECT_TRUE(first.IsDone());
    EK_RETURN_IF_ERROR(first.Wait(absl::ZeroDuration()));
    // The older checkpoint stays, and the group works.
    EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, trainer->model.params()));
    EXPECT_EQ(saved.manifest().steps_finished, 1);
    EK_RETURN_IF_ERROR(saved.ReadState().status());
    EK_ASSIGN_OR_RETURN(const PendingSave last, trainer->zero->SaveAsync(folder));
    EK_RETURN_IF_ERROR(last.Wait(kLong));
    EK_ASSIGN_OR_RETURN(const Checkpoint newer, Checkpoint::Open(folder, trainer->model.params()));
    EXPECT_EQ(newer.manifest().steps_finished, 3);
    return comm.Barrier();
  });
}

// One rank has handed its part in, another is lost before that, a third still writes. None of them
// receives the result of rank 0.
TEST(CheckpointWriterTest, NoFileStaysOfASaveThatFailsWithTheGroup) {
  const std::string folder = Folder("no_file");
  absl::Notification has_ended;  // On rank 0.
  const auto files = [&] {
    std::filesystem::create_directory(folder);
    return std::vector<std::filesystem::path>(std::filesystem::directory_iterator(folder), {});
  };
  const auto file_of = [&](int rank) {
    for (const std::filesystem::path& path : files()) {
      if (absl::EndsWith(path.string(), absl::StrCat(".", rank, "-of-4.safetensors"))) return path;
    }
    return std::filesystem::path();
  };
  const absl::Status status = RunTestRanks(4, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    if (comm.rank() == 2) {
      while (file_of(0).empty() || file_of(1).empty() || file_of(3).empty())
        absl::SleepFor(absl::Milliseconds(1));
      comm.Abort(absl::UnavailableError("this rank is lost"));
      return comm.status();
    }
    CheckpointToWrite checkpoint{
        .name = "no_file", .state = trainer->zero->Pieces(), .steps_finished = 1};
    checkpoint.hooks = {.begin = [&]() -> absl::StatusOr<std::string> { return folder; },
                        .write = [&](const std::string&) -> absl::StatusOr<std::string> {
                          if (comm.rank() != 3) return "";
                          const std::filesystem::path own = file_of(3);
                          has_ended.WaitForNotification();
                          while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(1));
                          std::ofstream(own) << "written late";
                          return "";
                        },
                        .end =
                            [&](const absl::Status&) {
                              if (comm.rank() == 0) has_ended.Notify();
                            }};
    return WriteCheckpoint(comm, trainer->model.params(), std::move(checkpoint));
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("this rank is lost"));
  EXPECT_THAT(files(), testing::IsEmpty());
}

TEST(CheckpointWriterTest, AGroupThatHasEndedSavesNothing) {
  const std::string folder = Folder("ended");
  for (const int world_size : {1, 2}) {
    for (const bool ends_well : {false, true}) {
      const absl::Status status = RunTestRanks(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
        EK_RETURN_IF_ERROR(trainer->Step(0));
        if (ends_well) EK_RETURN_IF_ERROR(comm.Finalize());
        if (!ends_well) comm.Abort(absl::UnavailableError("this rank is lost"));
        for (const bool waits : {false, true}) {
          const absl::Status saved =
              waits ? trainer->zero->Save(folder) : trainer->zero->SaveAsync(folder).status();
          EXPECT_THAT(std::string(saved.message()),
                      HasSubstr(ends_well ? "has left the group" : "this rank is lost"))
              << waits;
        }
        return comm.status();
      });
      EXPECT_FALSE(status.ok());
    }
  }
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST(CheckpointWriterTest, IsStartedInsideALoopWithExhaustedRanks) {
  const std::string folder = Folder("joined");
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(RunJoined({trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
      EXPECT_TRUE(absl::IsFailedPrecondition(trainer->zero->SaveAsync(folder).status()));
      for (int step = 0; step < 2 * comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        EK_RETURN_IF_ERROR(trainer->zero->SaveAsync(folder).status());
      }
      return absl::OkStatus();
    }));
    // Saves, after those that were started in the loop.
    EK_RETURN_IF_ERROR(trainer->zero->Save(folder));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
    EK_ASSIGN_OR_RETURN(const OptimizerState read, ReadAll(folder, trainer->model.params()));
    EXPECT_TRUE(read == all);
    return comm.Barrier();
  });
}

TEST(CheckpointWriterTest, ASaveThatOnlyOneRankBeginsIsFound) {
  for (const int saves : {0, 1}) {
    const absl::Time begin = absl::Now();
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
      EK_RETURN_IF_ERROR(trainer->Step(0));
      const absl::Status wrong = comm.rank() == saves
                                     ? trainer->zero->Save(Folder(absl::StrCat("alone", saves)))
                                     : trainer->Step(1);
      EXPECT_THAT(std::string(wrong.message()),
                  HasSubstr(absl::StrCat("rank ", saves, " waits in a save (\"save/")));
      EXPECT_THAT(std::string(wrong.message()),
                  HasSubstr("all ranks must make the same calls, in the same order"));
      return wrong;
    });
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  }
}

// A rank that is lost in mid-save, rank 0 or another: soon the saves of all others end with an
// error, and the older checkpoint stays.
TEST(CheckpointWriterTest, ARankThatIsLostEndsTheSave) {
  for (const int lost : {0, 2}) {
    SCOPED_TRACE(absl::StrCat("rank ", lost));
    const std::string folder = Folder(absl::StrCat("lost", lost));
    absl::Notification gate;
    const absl::Time begin = absl::Now();
    const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
      TestModel model(kSizes);
      EK_ASSIGN_OR_RETURN(
          auto optimizer,
          Optimizer::Create(comm, model.params(), AllInOneGroup(model.params(), AdamW{})));
      const auto step = [&](int number) {
        model.params().ClearGradients();
        model.Backward(0, number);
        for (int i = 0; i < model.size(); ++i) model.params().SetGradState(i, GradState::kReduced);
        return optimizer->Step();
      };
      EK_RETURN_IF_ERROR(step(0));
      EK_RETURN_IF_ERROR(optimizer->Save(folder));
      EK_RETURN_IF_ERROR(step(1));
      CheckpointWriter writer;
      const PendingSave save = writer.Start(comm, model.params(), Gated(*optimizer, folder, gate));
      step(2).IgnoreError();  // The other rank may be lost already.
      if (comm.rank() == lost) {
        const absl::Status why = absl::UnavailableError("this rank is lost");
        comm.Abort(why);
        if (lost == 0) gate.Notify();  // Its thread ends, too.
        return why;
      }
      while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(1));
      if (comm.rank() == 0) gate.Notify();
      const absl::Status ended = save.Wait(kLong);
      EXPECT_FALSE(ended.ok());
      EXPECT_TRUE(save.IsDone());
      EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, model.params()));
      EXPECT_EQ(saved.manifest().steps_finished, 1);
      return saved.ReadState().status();
    });
    EXPECT_FALSE(status.ok());  // The lost rank's.
    EXPECT_THAT(std::string(status.message()), HasSubstr("this rank is lost"));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  }
}

// A group that is finalized while a save is pending: the save ends with an error on all ranks, and
// the older checkpoint stays.
TEST(CheckpointWriterTest, AGroupThatIsFinalizedEndsTheSave) {
  const std::string folder = Folder("finalized");
  absl::Notification gate;
  const absl::Time begin = absl::Now();
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_RETURN_IF_ERROR(trainer->zero->Save(folder));
    EK_RETURN_IF_ERROR(trainer->Step(1));
    CheckpointWriter writer;
    const PendingSave save =
        writer.Start(comm, trainer->model.params(), Gated(*trainer->zero, folder, gate));
    EXPECT_FALSE(save.IsDone());
    const absl::Status left = comm.Finalize();
    if (comm.rank() == 0) gate.Notify();
    EXPECT_TRUE(left.ok()) << left;
    EXPECT_FALSE(save.Wait(kLong).ok());
    EXPECT_TRUE(save.IsDone());
    EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, trainer->model.params()));
    EXPECT_EQ(saved.manifest().steps_finished, 1);
    return saved.ReadState().status();
  });
  // RunTestRanks() finalizes, too.
  EXPECT_THAT(std::string(status.message()), HasSubstr("has left the group"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
}

}  // namespace
}  // namespace evenkeel::internal
