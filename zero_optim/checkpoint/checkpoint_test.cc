#include "evenkeel/zero_optim/checkpoint/checkpoint.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

std::string Folder(absl::string_view name) {
  const std::string folder = absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
  std::filesystem::remove_all(folder);
  return folder;
}

// Three kinds of rules, with two, one and no state tensors; parameter 3 is in none.
std::vector<ParameterGroup> ThreeKinds() {
  return {{.name = "adam", .params = {0, 4, 3}, .rule = AdamW{.weight_decay = 0.1}},
          {.name = "momentum", .params = {5, 1}, .rule = kMomentum},
          {.name = "sgd", .params = {2}, .rule = Sgd{.learning_rate = 0.3}}};
}

// Trains with the same `averaged` gradients at every world size: all ranks have those of rank 0.
absl::Status StepAlike(TestModel& model, int step) {
  model.params().ClearGradients();
  model.Backward(0, step);
  for (int i = 0; i < model.size(); ++i) model.params().SetGradState(i, GradState::kReduced);
  return absl::OkStatus();
}

TEST(CheckpointTest, GoesOnAtAnyWorldSizeShardedOrNot) {
  const std::string folder = Folder("any/world_size");
  TestModel plain_model(kSizes);
  PlainTraining plain(&plain_model, ThreeKinds());
  std::string weights;  // From the run so far; models begin equal.
  int first_step = 0;
  for (const int world_size : {1, 4, 3, -1, 8, -2, 2}) {  // Negative: unsharded.
    SCOPED_TRACE(absl::StrCat("world ", world_size));
    const auto train = [&](auto& optimizer, TestModel& model) -> absl::Status {
      if (first_step > 0) {
        EK_RETURN_IF_ERROR(optimizer.Load(folder));
        EXPECT_EQ(optimizer.steps_finished(), first_step);
        // The weights have a checkpoint of their own.
        for (int i = 0; i < model.size(); ++i) {
          const TensorView from = plain_model.params()[i].value, to = model.params()[i].value;
          if (to.count > 0) std::memcpy(to.data, from.data, to.bytes());
        }
      }
      for (int step = first_step; step < first_step + 2; ++step) {
        EK_RETURN_IF_ERROR(StepAlike(model, step));
        EK_RETURN_IF_ERROR(optimizer.Step());
      }
      return optimizer.Save(folder);
    };
    OptimizerState state;
    RunGroup(std::abs(world_size), [&](Communicator& comm) -> absl::Status {
      TestModel model(kSizes);
      if (world_size < 0) {
        EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), ThreeKinds()));
        EK_RETURN_IF_ERROR(train(*optimizer, model));
        if (comm.rank() == 0) state = optimizer->state();
      } else {
        EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), ThreeKinds(),
                                                              {.placement = WholeTensors{}}));
        EK_RETURN_IF_ERROR(train(*optimizer, model));
        EK_ASSIGN_OR_RETURN(OptimizerState all, optimizer->Consolidate(0));
        if (comm.rank() == 0) state = std::move(all);
      }
      if (comm.rank() == 0) weights = model.Bytes();
      return absl::OkStatus();
    });
    for (int step = first_step; step < first_step + 2; ++step) plain.Step({0}, step, 1.0);
    first_step += 2;
    EXPECT_TRUE(weights == plain_model.Bytes());
    EXPECT_TRUE(IsSame(state, plain.state()));
    // One manifest, and the files of this checkpoint alone.
    const auto files = std::filesystem::directory_iterator(folder);
    EXPECT_EQ(std::distance(begin(files), end(files)), 1 + std::abs(world_size));
  }
}

TEST(CheckpointTest, IsSavedInsideALoopWithDryRanksToo) {
  const std::string folder = Folder("in_loop");
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(RunJoined({trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
      EXPECT_TRUE(absl::IsFailedPrecondition(trainer->zero->Save(folder)));
      for (int step = 0; step < 2 * comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        EK_RETURN_IF_ERROR(trainer->zero->Save(folder));
      }
      EXPECT_TRUE(absl::IsFailedPrecondition(trainer->zero->Load(folder)));
      return absl::OkStatus();
    }));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
    EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, trainer->model.params()));
    EK_ASSIGN_OR_RETURN(const OptimizerState read, saved.ReadState());
    EXPECT_TRUE(read == all);
    EXPECT_EQ(saved.manifest().steps_finished, 4);
    // A part of a tensor.
    std::vector<float> part(10);
    EK_RETURN_IF_ERROR(saved.Read(
        {{.param = 1, .tensor = "exp_avg", .begin = 290, .data = absl::MakeSpan(part)}}));
    EXPECT_EQ(part[3], all.params.at(1).tensors.at("exp_avg").as<float>()[293]);
    return absl::OkStatus();
  });
}

// One that was complete stays until the next one is.
TEST(CheckpointTest, AnErrorOnOneRankIsEverybodysAndLeavesTheOlderOne) {
  const std::string folder = Folder("broken_off");
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_RETURN_IF_ERROR(trainer->zero->Save(folder));
    EK_ASSIGN_OR_RETURN(const OptimizerState first, trainer->zero->Consolidate());
    EK_RETURN_IF_ERROR(trainer->Step(1));

    // Rank 1's folder can't be made, or takes no files, which it learns when the others write
    // theirs.
    const std::string file = absl::StrCat(std::getenv("TEST_TMPDIR"), "/a_file");
    const absl::string_view text[] = {"not a folder"};
    if (comm.rank() == 1) EK_RETURN_IF_ERROR(WriteFileAtomically(file, text));
    for (const std::string& bad : {file + "/below", std::string("/proc/self")}) {
      const absl::Status status = trainer->zero->Save(comm.rank() == 1 ? bad : folder);
      EXPECT_FALSE(status.ok()) << bad;
      EXPECT_TRUE(absl::StrContains(status.message(), "rank 1")) << status;

      EK_ASSIGN_OR_RETURN(const Checkpoint saved,
                          Checkpoint::Open(folder, trainer->model.params()));
      EK_ASSIGN_OR_RETURN(const OptimizerState read, saved.ReadState());
      EXPECT_TRUE(read == first) << bad;
    }
    return absl::OkStatus();
  });
}

TEST(CheckpointTest, WhatDoesNotFitIsRefusedOnAllRanksAndChangesNothing) {
  const std::string folder = Folder("refused"), nothing = Folder("nothing");
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_RETURN_IF_ERROR(trainer->zero->Save(folder));
    EK_ASSIGN_OR_RETURN(auto other_rule, Trainer::Create(comm, Mode::kZeroAlone, kMomentum));
    const absl::Status rule = other_rule->zero->Load(folder);
    EXPECT_TRUE(absl::IsInvalidArgument(rule)) << rule;
    EXPECT_TRUE(absl::StrContains(rule.message(), "holds {exp_avg, exp_avg_sq}")) << rule;
    EK_ASSIGN_OR_RETURN(auto other_size,
                        Trainer::Create(comm, Mode::kZeroAlone, AdamW{},
                                        std::vector<int64_t>{7, 300, 1, 0, 65, 33}));
    const absl::Status size = other_size->zero->Load(folder);
    EXPECT_TRUE(absl::StrContains(size.message(),
                                  "\"p4\" is float32[64] in the checkpoint, and float32[65] here"))
        << size;
    EK_ASSIGN_OR_RETURN(
        auto fewer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}, std::vector<int64_t>{7, 300}));
    EXPECT_TRUE(
        absl::StrContains(fewer->zero->Load(folder).message(), "there is no parameter \"p2\""));
    EXPECT_TRUE(absl::IsNotFound(trainer->zero->Load(nothing)));

    // A rank's file is missing, then empty: all ranks are told, also those that do not need it.
    EK_ASSIGN_OR_RETURN(const OptimizerState before, trainer->zero->Consolidate());
    EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, trainer->model.params()));
    const std::string path = absl::StrCat(folder, "/", saved.manifest().files[1].name);
    EK_RETURN_IF_ERROR(comm.Barrier());
    if (comm.rank() == 0) std::filesystem::remove(path);
    EK_RETURN_IF_ERROR(comm.Barrier());
    EXPECT_TRUE(absl::IsNotFound(trainer->zero->Load(folder)));
    EK_RETURN_IF_ERROR(comm.Barrier());
    const absl::string_view text[] = {"x"};
    if (comm.rank() == 0) EK_RETURN_IF_ERROR(WriteFileAtomically(path, text));
    EK_RETURN_IF_ERROR(comm.Barrier());
    const absl::Status empty = trainer->zero->Load(folder);
    EXPECT_TRUE(absl::IsDataLoss(empty)) << empty;
    EK_ASSIGN_OR_RETURN(const OptimizerState after, trainer->zero->Consolidate());
    EXPECT_TRUE(after == before);
    return absl::OkStatus();
  });
}

CheckpointManifest SomeManifest() {
  CheckpointManifest manifest{.steps_finished = 7,
                              .files = {{"a.safetensors", {.bytes = 1000, .blocks = {1}}},
                                        {"b.safetensors", {.bytes = 2000, .blocks = {2}}}}};
  manifest.params["fc.weight"] = {
      .count = 10,
      .step = 7,
      .tensors = {{"exp_avg", {{0, 4, 0, 64}, {4, 6, 1, 80}}}, {"m", {{0, 10, 0, 80}}}}};
  manifest.params["fc.bias"] = {
      .dtype = DType::kFloat64, .count = 0, .step = 1, .tensors = {{"exp_avg", {{0, 0, 1}}}}};
  return manifest;
}

TEST(CheckpointManifestTest, IsReadAsItWasWritten) {
  const auto read = CheckpointManifest::Parse(SomeManifest().Serialize());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, SomeManifest());
}

TEST(CheckpointManifestTest, RefusesWhatContradictsItself) {
  using Change = void (*)(CheckpointManifest&);
  const struct {
    Change change;
    const char* says;
  } cases[] = {
      {[](auto& m) { m.params["fc.weight"].tensors["exp_avg"][1].begin = 5; },
       "elements from 4 to 5 are missing"},
      {[](auto& m) { m.params["fc.weight"].tensors["exp_avg"][1].begin = 3; },
       "elements from 3 to 4 are present twice"},
      {[](auto& m) { m.params["fc.weight"].tensors["exp_avg"].pop_back(); },
       "has 4 of 10 elements"},
      {[](auto& m) { m.params["fc.weight"].tensors["m"][0].file = 2; }, "is in file 2 of 2"},
      {[](auto& m) { m.params["fc.weight"].step = 0; }, "has no count or step"},
      {[](auto& m) { m.params["fc.weight"].dtype = DType::kInt8; }, "neither float32 nor float64"},
      {[](auto& m) { m.files[0].name = "../elsewhere"; }, "no plain name"},
      {[](auto& m) { m.params["fc.weight"].tensors["m"][0].offset = 961; },
       "behind the end of a.safetensors"},
      {[](auto& m) { m.files[1].sums.blocks.push_back(3); },
       "\"b.safetensors\" has no size or checksums"},
      {[](auto& m) { m.steps_finished = -1; }, "are missing"},
  };
  for (const auto& wrong : cases) {
    CheckpointManifest manifest = SomeManifest();
    wrong.change(manifest);
    const absl::Status status = CheckpointManifest::Parse(manifest.Serialize()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.says));
  }
}

TEST(CheckpointManifestTest, NoBytesDoHarm) {
  Fuzz({SomeManifest().Serialize(), CheckpointManifest().Serialize()}, Again<CheckpointManifest>,
       {.rounds = 3000, .memory_per_byte = 400, .memory = 64 << 10, .is_canonical = false});
}

// To one rank or to all, in chunks of any size; nobody takes memory for more than a chunk.
TEST(ForEachStateTest, SendsEverythingWithoutAPeakOnAnyRank) {
  constexpr int64_t kLarge = 100000;
  for (const int world_size : {1, 2, 3}) {
    for (const int to : {kAllRanks, 0, world_size - 1}) {
      for (const int64_t chunk_bytes :
           {int64_t{1}, int64_t{100}, int64_t{40000}, int64_t{64} << 20}) {
        if (chunk_bytes == 1 && world_size == 3) continue;  // An element at a time takes long.
        SCOPED_TRACE(absl::StrCat("world ", world_size, " to ", to, " chunk ", chunk_bytes));
        const bool is_large = chunk_bytes == 40000;
        RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
          const std::vector<int64_t> sizes = is_large ? std::vector<int64_t>(6, kLarge) : kSizes;
          const auto groups =
              is_large
                  ? std::vector<ParameterGroup>{{.params = {0, 1, 2, 3, 4, 5}, .rule = AdamW{}}}
                  : ThreeKinds();
          EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, groups, sizes));
          EK_RETURN_IF_ERROR(trainer->Step(0));
          EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
          const bool receives = to == kAllRanks || to == comm.rank();
          OptimizerState got;
          absl::Status status;
          const auto sink = [&](const StateChunk& chunk) -> absl::Status {
            EXPECT_LE(chunk.data.bytes(), std::max<int64_t>(chunk_bytes, 4));
            EXPECT_TRUE(receives);
            if (is_large) {
              const std::byte* const want =
                  all.params.at(chunk.param).tensors.at(std::string(chunk.tensor)).data() +
                  chunk.begin * 4;
              EXPECT_EQ(std::memcmp(chunk.data.data, want, chunk.data.bytes()), 0);
              return absl::OkStatus();
            }
            ParameterState& entry = got.params[chunk.param];
            entry.step = chunk.step;
            if (chunk.tensor.empty()) return absl::OkStatus();
            StateTensor& tensor = entry.tensors[std::string(chunk.tensor)];
            if (chunk.begin == 0) tensor = StateTensor(DType::kFloat32, chunk.count);
            if (chunk.data.count == 0) return absl::OkStatus();
            std::memcpy(tensor.view().Slice(chunk.begin, chunk.data.count).data, chunk.data.data,
                        chunk.data.bytes());
            return absl::OkStatus();
          };
          const size_t taken = MemoryTakenBy(
              [&] { status = trainer->zero->VisitState(to, sink, Bytes{chunk_bytes}); });
          EK_RETURN_IF_ERROR(status);
          EXPECT_TRUE(is_large || got == (receives ? all : OptimizerState()));
          // A chunk, and what operations and messages take, all of it counted, whether given back
          // or not.
          const size_t most = 40000 + 2 * 6 * (kLarge * 4 / 40000) * 2048;
          EXPECT_TRUE(!is_large || taken < most) << taken;
          return absl::OkStatus();
        });
      }
    }
  }
}

TEST(ForEachStateTest, AnErrorOfASinkIsThisRanksAlone) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    int calls = 0;
    const absl::Status status =
        trainer->zero->VisitState(kAllRanks, [&](const auto&) -> absl::Status {
          ++calls;
          return comm.rank() == 1 ? absl::ResourceExhaustedError("the disk is full")
                                  : absl::OkStatus();
        });
    EXPECT_EQ(status.code(),
              comm.rank() == 1 ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk);
    EXPECT_EQ(calls, comm.rank() == 1 ? 1 : 2 * 6);
    EXPECT_TRUE(absl::IsInvalidArgument(
        trainer->zero->VisitState(3, [](const auto&) { return absl::OkStatus(); })));
    return comm.Barrier();
  });
}

}  // namespace
}  // namespace evenkeel::internal
