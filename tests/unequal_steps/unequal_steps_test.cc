// A rank that leaves out an optimizer's step, or takes it with other settings than the others, is
// named on all ranks before another gradient is reduced and before a checkpoint is written. A rank
// that an exception leaves is named, too.

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kWorld = 3, kOther = 1;  // The rank that does something else.
constexpr double kRate = 0.125;

enum class Kind {
  kWhole,
  kInBackward,
  kPartInBackward,
  kSharded,
  kShardedAlone,  // No other object reduces its gradients.
  kSliced,
  kSlicedInBackward
};
enum class Loop { kPlain, kEven, kUneven };

std::string NameOf(Kind kind) {
  const char* const names[] = {"Whole",        "InBackward", "PartInBackward",  "Sharded",
                               "ShardedAlone", "Sliced",     "SlicedInBackward"};
  return names[static_cast<int>(kind)];
}
std::string NameOf(Loop loop) {
  const char* const names[] = {"Plain", "Even", "Uneven"};
  return names[static_cast<int>(loop)];
}

// One rank: a model, its DataParallel and an optimizer. Batches begin with 1, so that they have the
//           numbers of steps.
class Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Communicator& comm, Kind kind) {
    auto trainer = std::make_unique<Trainer>(comm);
    EK_RETURN_IF_ERROR(trainer->Make(kind));
    return trainer;
  }
  explicit Trainer(Communicator& comm) : comm_(comm), model_({3, 7, 40, 5}) {}

  absl::Status Reduce(int batch) {
    model_.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep(mode_));
    EK_RETURN_IF_ERROR(model_.Backward(comm_.rank(), batch,
                                       [this](int param) { return ddp_->GradientReady(param); }));
    return ddp_->FinishStep();
  }
  absl::Status Update(const StepOptions& options = {}) {
    if (updates_itself_) return absl::OkStatus();
    return optimizer_->Step(options);
  }
  absl::Status SetRate(double rate) { return optimizer_->SetLearningRate(rate); }
  absl::Status Save(const std::string& folder) { return optimizer_->Save(folder); }
  absl::Status Run(Loop loop, int batches, const std::function<absl::Status(int)>& step) {
    const auto body = [&]() -> absl::Status {
      for (int batch = 1; batch <= batches; ++batch) EK_RETURN_IF_ERROR(step(batch));
      return absl::OkStatus();
    };
    if (loop == Loop::kPlain) return body();
    return RunJoined({ddp_.get(), &joinable()}, {}, [&](JoinScope&) { return body(); });
  }

  Joinable& joinable() { return *optimizer_; }
  DataParallel& ddp() { return *ddp_; }
  ToyModel& model() { return model_; }
  // Collectives that have carried gradients.
  int64_t reductions() { return (*comm_.OpenChannel(ddp_->join_name()))->position(); }

 private:
  static Placement PlacementOf(Kind kind) {
    switch (kind) {
      case Kind::kWhole:
        break;
      case Kind::kInBackward:
      case Kind::kPartInBackward:
        return Replicated{.update_in_backward = true};
      case Kind::kSharded:
      case Kind::kShardedAlone:
        return WholeTensors{};
      case Kind::kSliced:
        return Slices{};
      case Kind::kSlicedInBackward:
        return Slices{.update_in_backward = true};
    }
    return Replicated{};
  }
  absl::Status Make(Kind kind) {
    const UpdateRule rule = Sgd{.learning_rate = kRate, .momentum = 0.5};
    const OptimizerOptions options{.placement = PlacementOf(kind)};
    updates_itself_ = kind == Kind::kInBackward;
    if (kind == Kind::kShardedAlone) mode_ = StepMode::kAccumulate;
    if (kind != Kind::kPartInBackward) {
      EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(&comm_, &model_.params(), {}));
      EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*ddp_, rule, options));
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(comm_, model_.params(), rule, options));
    EK_ASSIGN_OR_RETURN(auto reduction, optimizer_->TakeReduction({.params = {1, 3}}));
    EK_ASSIGN_OR_RETURN(
        ddp_, DataParallel::Create(&comm_, &model_.params(), {}, {}, std::move(reduction)));
    return absl::OkStatus();
  }

  Communicator& comm_;
  ToyModel model_;
  std::unique_ptr<Optimizer> optimizer_;
  bool updates_itself_ = false;
  StepMode mode_ = StepMode::kSync;
  std::unique_ptr<DataParallel> ddp_;
};

// Returns for each rank the status of `body`, or of Finalize() if that was OK.
std::vector<std::string> ErrorsOf(const std::function<absl::Status(Communicator&)>& body) {
  std::vector<std::string> errors(kWorld);
  const absl::Status status = RunTestRanks(kWorld, [&](Communicator& comm) -> absl::Status {
    absl::Status mine = body(comm);
    if (mine.ok()) mine = comm.Finalize();
    errors[comm.rank()] = std::string(mine.message());
    return mine;
  });
  EXPECT_FALSE(status.ok());
  return errors;
}

// Rank 0 has half as many batches, and follows the others, where inputs are uneven.
int BatchesOf(Loop loop, int rank) { return loop == Loop::kUneven && rank == 0 ? 2 : 5; }

class LoopTest : public testing::TestWithParam<Loop> {
 protected:
  // Rank 1 has finished so many steps, and another one more. Rank 0 follows rank 1, the lowest that
  // is active, where inputs are uneven: it has done the same.
  static std::string Counts(Loop loop, int steps) {
    const std::string fewer = absl::StrCat(" finished ", steps, " steps"),
                      more = absl::StrCat(" finished ", steps + 1, " steps");
    return loop == Loop::kUneven
               ? absl::StrCat("optimizer#0: rank 2 has", more, "; ranks 0,1 have", fewer)
               : absl::StrCat("optimizer#0: rank 1 has", fewer, "; ranks 0,2 have", more);
  }
};

TEST_P(LoopTest, ARankThatLeavesAStepOutIsNamedBeforeTheNextGradients) {
  for (const Kind kind : {Kind::kWhole, Kind::kPartInBackward}) {
    SCOPED_TRACE(NameOf(kind));
    const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, kind));
      int64_t reductions = 0;
      const absl::Status ended =
          trainer->Run(GetParam(), BatchesOf(GetParam(), comm.rank()), [&](int batch) {
            if (batch == 4) reductions = trainer->reductions();
            EK_RETURN_IF_ERROR(trainer->Reduce(batch));
            return comm.rank() == kOther && batch == 3 ? absl::OkStatus() : trainer->Update();
          });
      if (reductions > 0) {
        EXPECT_EQ(trainer->reductions(), reductions) << "nothing of the step after it was reduced";
      }
      return ended;
    });
    EXPECT_THAT(errors, Each(HasSubstr(Counts(GetParam(), 2))));
  }
}

// Nothing comes after it but the end of the loop, or the group's.
TEST_P(LoopTest, ARankThatLeavesTheLastStepOutIsNamed) {
  const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, Kind::kWhole));
    return trainer->Run(GetParam(), BatchesOf(GetParam(), comm.rank()), [&](int batch) {
      EK_RETURN_IF_ERROR(trainer->Reduce(batch));
      return comm.rank() == kOther && batch == 5 ? absl::OkStatus() : trainer->Update();
    });
  });
  EXPECT_THAT(errors, Each(HasSubstr(Counts(GetParam(), 4))));
  if (GetParam() == Loop::kPlain) {
    EXPECT_THAT(errors, Each(HasSubstr("the finalization of the group")));
  }
}

struct Omission {
  Kind kind;
  int batch;
  int rank = kOther;
};

// Others wait for it inside of the step that it has left out.
TEST_P(LoopTest, ARankThatLeavesOutAStepThatCommunicatesIsNamed) {
  const Loop loop = GetParam();
  std::vector<Omission> omissions = {
      {Kind::kSharded, 3}, {Kind::kShardedAlone, 3}, {Kind::kSliced, 1}, {Kind::kSliced, 3}};
  omissions.push_back({Kind::kSliced, 5});                                // Its last one,
  if (loop == Loop::kUneven) omissions.push_back({Kind::kSliced, 2, 0});  // that of another one,
  if (loop != Loop::kUneven) omissions.push_back({Kind::kSharded, 5, 2});
  if (loop == Loop::kUneven) omissions.push_back({Kind::kSliced, 3, 2});  // or not the leader's.
  std::vector<std::thread> runs;                                          // They mostly wait.
  for (const Omission& omission : omissions) {
    runs.emplace_back([=] {
      const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, omission.kind));
        return trainer->Run(loop, BatchesOf(loop, comm.rank()), [&](int batch) {
          EK_RETURN_IF_ERROR(trainer->Reduce(batch));
          const bool omits = comm.rank() == omission.rank && batch == omission.batch;
          return omits ? absl::OkStatus() : trainer->Update();
        });
      });
      const std::string ranks =  // Rank 0 has followed the last one that had inputs.
          loop == Loop::kUneven && omission.rank == kOther && omission.batch == 5
              ? "(ranks 0,1 have"
              : absl::StrCat("(rank ", omission.rank, " has");
      EXPECT_THAT(errors, Each(AllOf(HasSubstr(ranks + " not taken the step of optimizer#0 in "
                                                       "which rank"),
                                     HasSubstr(": every rank must take every step)"))))
          << NameOf(omission.kind) << " batch " << omission.batch;
    });
  }
  for (std::thread& run : runs) run.join();
}

// The program decides which steps all ranks leave out.
TEST_P(LoopTest, AStepThatAllRanksLeaveOutIsNoError) {
  for (const Kind kind : {Kind::kWhole, Kind::kSharded, Kind::kSliced}) {
    SCOPED_TRACE(NameOf(kind));
    std::vector<std::vector<std::vector<float>>> values(kWorld);
    const absl::Status status = RunTestRanks(kWorld, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, kind));
      EK_RETURN_IF_ERROR(
          trainer->Run(GetParam(), BatchesOf(GetParam(), comm.rank()), [&](int batch) {
            EK_RETURN_IF_ERROR(trainer->Reduce(batch));
            return batch % 2 == 1 ? absl::OkStatus() : trainer->Update();
          }));
      values[comm.rank()] = trainer->model().values();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_THAT(values, Each(values[0]));
  }
}

INSTANTIATE_TEST_SUITE_P(All, LoopTest, testing::Values(Loop::kPlain, Loop::kEven, Loop::kUneven),
                         [](const auto& info) { return NameOf(info.param); });

struct Difference {
  std::string name;
  Kind kind;
  std::optional<double> rate;
  StepOptions options;      // The other rank's;
  StepOptions of_all = {};  // of the others.
  std::string others, all;
};

void PrintTo(const Difference& difference, std::ostream* out) { *out << difference.name; }

const Difference kDifferences[] = {
    {"Rate", Kind::kWhole, 0.25, {}, {}, "learning_rate=0.25", "learning_rate=0.125"},
    {"Clip",
     Kind::kWhole,
     {},
     {.clip = ClipOptions{.max_norm = 2}},
     {},
     "max_norm=2",
     "none of these"},
    {"Norm",
     Kind::kWhole,
     {},
     {.clip = ClipOptions{.norm = kInfinityNorm}},
     {.clip = ClipOptions{}},
     "norm=inf",
     "none of these"},
    {"Scale",
     Kind::kWhole,
     {},
     {.grad_scale = 0.5},
     {.grad_scale = 0.1},
     "grad_scale=0.5",
     "grad_scale=0.1"},
    {"Skip", Kind::kWhole, {}, {.skip = true}, {}, "skip=true", "none of these"},
    {"SkipNonfinite",
     Kind::kWhole,
     {},
     {},
     {.skip_nonfinite = true},
     "none of these",
     "skip_nonfinite=true"},
    {"RateOfShards", Kind::kSharded, 0.25, {}, {}, "learning_rate=0.25", "learning_rate=0.125"},
    {"ClipOfShards",
     Kind::kSharded,
     {},
     {.clip = ClipOptions{.max_norm = 2}},
     {.clip = ClipOptions{}},
     "max_norm=2",
     "max_norm=1"},
    {"RateOfSlices", Kind::kSliced, 0.25, {}, {}, "learning_rate=0.25", "learning_rate=0.125"},
    {"ScaleOfSlices",
     Kind::kSliced,
     {},
     {.grad_scale = 0.5},
     {},
     "grad_scale=0.5",
     "none of these"},
};

class SettingsTest : public testing::TestWithParam<Difference> {
 protected:
  // Batch 3, or the last, is taken differently.
  absl::Status Step(Trainer& trainer, int rank, int batch, int differs_in) const {
    const Difference& difference = GetParam();
    const bool differs = rank == kOther && batch == differs_in;
    EK_RETURN_IF_ERROR(trainer.Reduce(batch));
    EK_RETURN_IF_ERROR(trainer.SetRate(differs ? difference.rate.value_or(kRate) : kRate));
    EK_RETURN_IF_ERROR(trainer.Update(differs ? difference.options : difference.of_all));
    return trainer.SetRate(kRate);
  }
  std::string Message(int step) const {
    return absl::StrCat("#0: step ", step, " was taken with different settings: rank 1 has ",
                        GetParam().others, "; ranks 0,2 have ", GetParam().all,
                        ": the ranks disagree");
  }
};

TEST_P(SettingsTest, AreComparedBeforeTheNextGradients) {
  for (const Loop loop : {Loop::kPlain, Loop::kEven, Loop::kUneven}) {
    SCOPED_TRACE(NameOf(loop));
    const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, GetParam().kind));
      int64_t reductions = 0;
      const absl::Status ended = trainer->Run(loop, BatchesOf(loop, comm.rank()), [&](int batch) {
        if (batch == 4) reductions = trainer->reductions();
        return Step(*trainer, comm.rank(), batch, 3);
      });
      if (reductions > 0) {
        EXPECT_EQ(trainer->reductions(), reductions);
      }
      return ended;
    });
    if (loop != Loop::kUneven) {
      EXPECT_THAT(errors, Each(HasSubstr(Message(3))));
    }
    // Rank 0 follows rank 1, which is the lowest that is active: it has done the same.
    if (loop == Loop::kUneven) {
      EXPECT_THAT(errors, Each(HasSubstr("step 3 was taken with different settings: rank 2")));
    }
  }
}

TEST_P(SettingsTest, AreComparedAtTheEnd) {
  for (const Loop loop : {Loop::kPlain, Loop::kEven}) {
    SCOPED_TRACE(NameOf(loop));
    const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, GetParam().kind));
      return trainer->Run(loop, 5,
                          [&](int batch) { return Step(*trainer, comm.rank(), batch, 5); });
    });
    EXPECT_THAT(errors, Each(HasSubstr(Message(5))));
  }
}

TEST_P(SettingsTest, AreComparedBeforeACheckpointIsWritten) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / GetParam().name;
  const absl::Status status = RunTestRanks(kWorld, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, GetParam().kind));
    for (int batch = 1; batch <= 2; ++batch)
      EK_RETURN_IF_ERROR(Step(*trainer, comm.rank(), batch, 2));
    const absl::Status saved = trainer->Save(folder.string());
    EXPECT_THAT(std::string(saved.message()), HasSubstr(Message(2)));
    return saved;
  });
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(!std::filesystem::exists(folder) || std::filesystem::is_empty(folder));
}

INSTANTIATE_TEST_SUITE_P(All, SettingsTest, testing::ValuesIn(kDifferences),
                         [](const auto& info) { return info.param.name; });

// Those of the step that begins: nothing of it has been reduced, and no parameter been updated.
TEST(SettingsInBackwardTest, AreComparedInTheStepItself) {
  for (const Kind kind : {Kind::kInBackward, Kind::kPartInBackward, Kind::kSlicedInBackward}) {
    for (const Loop loop : {Loop::kPlain, Loop::kEven, Loop::kUneven}) {
      SCOPED_TRACE(absl::StrCat(NameOf(kind), NameOf(loop)));
      std::vector<std::vector<std::vector<float>>> values(kWorld);
      const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, kind));
        int64_t reductions = 0;
        const absl::Status ended = trainer->Run(loop, BatchesOf(loop, comm.rank()), [&](int batch) {
          if (batch == 4) reductions = trainer->reductions();
          EK_RETURN_IF_ERROR(
              trainer->SetRate(comm.rank() == kOther && batch == 4 ? 0.25 : kRate / batch));
          EK_RETURN_IF_ERROR(trainer->Reduce(batch));
          return trainer->Update();
        });
        if (reductions > 0) {
          EXPECT_EQ(trainer->reductions(), reductions);
        }
        values[comm.rank()] = trainer->model().values();
        return ended;
      });
      EXPECT_THAT(errors, Each(HasSubstr("#0: step 4 begins with different settings: ")));
      EXPECT_THAT(errors, Each(HasSubstr("rank 1 has learning_rate=0.25")));
      EXPECT_THAT(errors,
                  Each(HasSubstr(loop == Loop::kUneven ? "rank 2 has learning_rate=0.03125"
                                                       : "ranks 0,2 have learning_rate=0.03125")));
      EXPECT_THAT(values, Each(values[0]));
    }
  }
}

// A rank that ran out of inputs did not count the steps it followed.
TEST(SettingsOfAnEpochTest, ACounterOfEachRanksOwnIsFoundInTheNextEpoch) {
  for (const Kind kind : {Kind::kWhole, Kind::kSharded, Kind::kSliced}) {
    SCOPED_TRACE(NameOf(kind));
    const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, kind));
      int own_steps = 0;
      const auto step = [&](int batch) -> absl::Status {
        EK_RETURN_IF_ERROR(trainer->Reduce(batch));
        EK_RETURN_IF_ERROR(trainer->SetRate(1.0 / (1 << own_steps++)));
        return trainer->Update();
      };
      EK_RETURN_IF_ERROR(trainer->Run(Loop::kUneven, comm.rank() == 0 ? 2 : 4, step));
      return trainer->Run(Loop::kUneven, comm.rank() == 0 ? 4 : 2, step);
    });
    EXPECT_THAT(errors,
                Each(HasSubstr(
                    "#0: step 5 was taken with different settings: rank 0 has learning_rate=0.25; "
                    "ranks 1,2 have learning_rate=0.0625")));
  }
}

TEST(NeverSteppedTest, AnOptimizerOfTheListMustStepWhereGradientsAreReduced) {
  for (const bool enable : {true, false}) {
    for (const Loop loop : {Loop::kEven, Loop::kUneven}) {
      if (!enable && loop == Loop::kUneven) continue;
      const std::vector<std::string> errors = ErrorsOf([&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, Kind::kWhole));
        EK_ASSIGN_OR_RETURN(const auto idle,
                            Optimizer::Create(comm, trainer->model().params(), Sgd{}));
        const auto run = [&](bool steps) {
          return RunJoined({&trainer->ddp(), &trainer->joinable(), idle.get()}, {.enable = enable},
                           [&](JoinScope&) -> absl::Status {
                             for (int batch = 1; batch <= BatchesOf(loop, comm.rank()); ++batch) {
                               EK_RETURN_IF_ERROR(trainer->Reduce(batch));
                               EK_RETURN_IF_ERROR(trainer->Update());
                               if (steps) EK_RETURN_IF_ERROR(idle->Step({.skip = true}));
                             }
                             return absl::OkStatus();
                           });
        };
        EK_RETURN_IF_ERROR(run(true));
        return run(false);
      });
      for (int rank = 0; rank < kWorld; ++rank) {
        EXPECT_THAT(errors[rank],
                    HasSubstr(": gradients were reduced 5 times in the loop, but optimizer#1 never "
                              "stepped: call its own step(), "));
      }
    }
  }
}

// Optimizers' settings at their creation, which they keep.
TEST(SettingsAtCreationTest, AreNamed) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model({3, 5});
    const bool is_other = comm.rank() == 1;
    const absl::Status sharded =
        Optimizer::Create(
            comm, model.params(), Sgd{},
            {.placement = WholeTensors{.bucket_cap = Bytes{is_other ? 1 << 10 : 1 << 20}}})
            .status();
    EXPECT_THAT(std::string(sharded.message()),
                HasSubstr("bucket_cap: rank 0 has 1048576 bytes; rank 1 has 1024 bytes"));
    const absl::Status sliced =
        Optimizer::Create(comm, model.params(), Sgd{},
                          {.placement = Slices{.overlap_forward = is_other}})
            .status();
    EXPECT_THAT(std::string(sliced.message()),
                HasSubstr("overlap_forward: rank 0 has false; rank 1 has true"));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

struct NoStandardException {};

struct Thrown {
  std::string name;
  std::function<void()> act;
  std::string text;
};

void PrintTo(const Thrown& thrown, std::ostream* out) { *out << thrown.name; }

const Thrown kThrown[] = {
    {"RuntimeError", [] { throw std::runtime_error("sample 17 is broken"); },
     "std::runtime_error: sample 17 is broken"},
    {"BadAlloc", [] { throw std::bad_alloc(); }, "std::bad_alloc"},
    {"NoStandardException", [] { throw NoStandardException(); },
     "an exception that is not a std::exception"},
};

class ExceptionTest : public testing::TestWithParam<Thrown> {
 public:
  // Rank 1 throws in its third step. What the others get, and that rank 1's caller gets the
  // exception itself, and aborts the group with `caught`; if that is OK, not before the others have
  // failed.
  static std::vector<std::string> ErrorsIn(Loop loop, const std::function<void()>& act,
                                           const absl::Status& caught = absl::OkStatus()) {
    std::vector<std::string> errors(kWorld);
    bool has_passed = false;
    std::atomic<int> failed = 0;
    const absl::Status status = RunTestRanks(kWorld, [&](Communicator& comm) -> absl::Status {
      absl::Status mine;
      try {
        EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, Kind::kSharded));
        mine = trainer->Run(loop, 5, [&](int batch) -> absl::Status {
          EK_RETURN_IF_ERROR(trainer->Reduce(batch));
          if (comm.rank() == kOther && batch == 3) act();
          return trainer->Update();
        });
      } catch (...) {
        has_passed = true;
        while (caught.ok() && failed < kWorld - 1) std::this_thread::yield();
        mine = caught.ok() ? comm.status() : caught;
      }
      errors[comm.rank()] = std::string(mine.message());
      ++failed;
      return mine;
    });
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(has_passed);
    return errors;
  }
};

TEST_P(ExceptionTest, IsReportedByRunJoined) {
  const std::vector<std::string> errors = ErrorsIn(Loop::kEven, GetParam().act);
  EXPECT_EQ(errors[0], absl::StrCat("rank 1 failed in step 3 of its loop: ", GetParam().text));
  EXPECT_EQ(errors[2], errors[0]);
}

TEST_P(ExceptionTest, IsReportedByWhoCatchesIt) {
  const std::vector<std::string> errors =
      ErrorsIn(Loop::kPlain, GetParam().act, absl::UnknownError(GetParam().text));
  EXPECT_EQ(errors[0], absl::StrCat("rank 1 aborted the group: ", GetParam().text));
  EXPECT_EQ(errors[2], errors[0]);
}

INSTANTIATE_TEST_SUITE_P(All, ExceptionTest, testing::ValuesIn(kThrown),
                         [](const auto& info) { return info.param.name; });

TEST(UnreportedExceptionTest, IsReportedByWhatItDestroys) {
  const std::vector<std::string> errors = ExceptionTest::ErrorsIn(Loop::kPlain, kThrown[0].act);
  EXPECT_THAT(errors[0], HasSubstr("rank 1 failed in step 3: a C++ exception destroyed "));
  EXPECT_EQ(errors[2], errors[0]);
}

// An exception that is caught inside the loop is not reported.
TEST(CaughtExceptionTest, IsNotReported) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(comm, Kind::kWhole));
    return trainer->Run(Loop::kEven, 3, [&](int batch) -> absl::Status {
      try {
        if (comm.rank() == 1) throw std::runtime_error("a sample to leave out");
      } catch (const std::runtime_error&) {
      }
      EK_RETURN_IF_ERROR(trainer->Reduce(batch));
      return trainer->Update();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
