// Checkpoints of all three optimizers: whoever loads one has the state that whoever saved it had,
// bit for bit.

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/join/join.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

std::string Folder(absl::string_view name) {
  const std::string folder = absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
  std::filesystem::remove_all(folder);
  return folder;
}

template <typename Kind>
absl::StatusOr<OptimizerState> WholeState(TestRank<Kind>& rank) {
  return rank.optimizer->Consolidate();
}

struct Standing {
  int steps = 0;
  std::string values;
  OptimizerState state;
};

// Takes over what `standing` says by its checkpoint, trains two steps, saves.
template <typename Kind>
void GoOn(int world_size, const std::string& folder, const SlicedRankOptions& options,
          Standing& standing) {
  Standing next = standing;
  RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank,
                        TestRank<Kind>::Create(comm, AdamW{.weight_decay = 0.1}, options));
    if (standing.steps > 0) {
      EK_RETURN_IF_ERROR(rank->optimizer->Load(folder));
      rank->model.SetBytes(standing.values);
      EXPECT_EQ(rank->optimizer->steps_finished(), standing.steps);
      EK_ASSIGN_OR_RETURN(const OptimizerState loaded, WholeState(*rank));
      EXPECT_TRUE(loaded == standing.state) << "rank " << comm.rank();
    }
    for (int step = standing.steps; step < standing.steps + 2; ++step)
      EK_RETURN_IF_ERROR(rank->Step(step));
    EK_RETURN_IF_ERROR(rank->optimizer->Save(folder));
    EK_ASSIGN_OR_RETURN(OptimizerState state, WholeState(*rank));
    if (comm.rank() == 0) next = {standing.steps + 2, rank->model.Bytes(), std::move(state)};
    return absl::OkStatus();
  });
  standing = std::move(next);
}

TEST(SlicedCheckpointTest, AnyOptimizerLoadsWhatAnotherSavedAtAnyWorldSize) {
  const std::string folder = Folder("any");
  Standing standing;
  SlicedRankOptions all, fewer, others;
  fewer.frozen = {1};  // Has state by then, which stays.
  others.frozen = {4, 5};
  others.reducer.caps = {Bytes{100}};
  GoOn<Slices>(4, folder, others, standing);
  GoOn<Slices>(3, folder, all, standing);
  GoOn<Slices>(8, folder, fewer, standing);
  GoOn<WholeTensors>(5, folder, fewer, standing);
  GoOn<Slices>(5, folder, others, standing);
  GoOn<Replicated>(2, folder, fewer, standing);
  GoOn<Slices>(2, folder, all, standing);
  GoOn<Slices>(1, folder, fewer, standing);
  GoOn<WholeTensors>(3, folder, all, standing);
  GoOn<Replicated>(1, folder, all, standing);
  EXPECT_EQ(standing.steps, 20);
  EXPECT_EQ(standing.state.params.at(1).step, 12);  // Trained in 12 of the 20 steps.
}

TEST(SlicedCheckpointTest, AResumedRunIsTheUndisturbedOneBitForBit) {
  for (const int world_size : internal::TestedWorldSizes()) {
    for (const UpdateRule& rule :
         {UpdateRule(AdamW{}), UpdateRule(Sgd{.learning_rate = 0.1, .momentum = 0.9})}) {
      SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(rule)));
      const std::string folder = Folder("same");
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto straight, SlicedRank::Create(comm, rule));
        for (int step = 0; step < 5; ++step) EK_RETURN_IF_ERROR(straight->Step(step));
        EK_ASSIGN_OR_RETURN(auto first, SlicedRank::Create(comm, rule));
        for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(first->Step(step));
        EK_RETURN_IF_ERROR(first->ddp->RebuildNow());
        EK_RETURN_IF_ERROR(first->optimizer->Save(folder));
        EK_ASSIGN_OR_RETURN(auto second, SlicedRank::Create(comm, rule));
        EK_RETURN_IF_ERROR(second->ddp->ImportPlan(first->ddp->ExportPlan()));
        EK_RETURN_IF_ERROR(second->optimizer->Load(folder));
        second->model.SetBytes(first->model.Bytes());
        for (int step = 3; step < 5; ++step) EK_RETURN_IF_ERROR(second->Step(step));
        EK_ASSIGN_OR_RETURN(const OptimizerState state, straight->optimizer->Consolidate());
        return ExpectEqual(*second, straight->model, state);
      });
    }
  }
}

TEST(SlicedCheckpointTest, IsSavedInsideALoopWithDryRanksToo) {
  for (const bool updates : {kInStep, kInBackward}) {
    const std::string folder = Folder("in_loop");
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(
          auto rank,
          SlicedRank::Create(comm, AdamW{}, {.placement = {.update_in_backward = updates}}));
      EK_RETURN_IF_ERROR(RunJoined(rank->joinables(), {}, [&](JoinScope&) -> absl::Status {
        EXPECT_TRUE(absl::IsFailedPrecondition(rank->optimizer->Save(folder)));
        for (int step = 0; step < 2 * comm.rank(); ++step) {
          EK_RETURN_IF_ERROR(rank->Step(step));
          EK_RETURN_IF_ERROR(rank->optimizer->Save(folder));
        }
        EXPECT_TRUE(absl::IsFailedPrecondition(rank->optimizer->Load(folder)));
        return absl::OkStatus();
      }));
      EK_ASSIGN_OR_RETURN(const OptimizerState all, rank->optimizer->Consolidate());
      EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, rank->model.params()));
      EK_ASSIGN_OR_RETURN(const OptimizerState read, saved.ReadState());
      EXPECT_TRUE(read == all);
      EXPECT_EQ(saved.manifest().steps_finished, 4);
      EXPECT_EQ(saved.manifest().files.size(), 3u);
      return absl::OkStatus();
    });
  }
}

void FlipBit(const std::string& path, size_t at) {
  std::string bytes = *ReadFile(path);
  bytes[at % bytes.size()] ^= 16;
  const absl::string_view pieces[] = {bytes};
  EXPECT_TRUE(WriteFileAtomically(path, pieces).ok());
}

// Damage, and files of another checkpoint: all ranks are told, by one sentence that names the file,
// and go on with what they had.
TEST(SlicedCheckpointTest, WhatIsDamagedOrMixedIsRefusedAndChangesNothing) {
  const std::string folder = Folder("damaged"), other = Folder("other");
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    EK_RETURN_IF_ERROR(rank->Step(0));
    EK_RETURN_IF_ERROR(rank->optimizer->Save(other));
    EK_RETURN_IF_ERROR(rank->Step(1));
    EK_RETURN_IF_ERROR(rank->optimizer->Save(folder));
    EK_ASSIGN_OR_RETURN(const OptimizerState before, rank->optimizer->Consolidate());
    EK_ASSIGN_OR_RETURN(const Checkpoint saved, Checkpoint::Open(folder, rank->model.params()));
    EK_ASSIGN_OR_RETURN(const Checkpoint others, Checkpoint::Open(other, rank->model.params()));
    const std::string file = saved.manifest().files[1].name;
    const std::string path = absl::StrCat(folder, "/", file),
                      manifest = absl::StrCat(folder, "/manifest.json");
    const auto refuses = [&](absl::string_view what) -> absl::Status {
      EK_RETURN_IF_ERROR(comm.Barrier());
      const absl::Status status = rank->optimizer->Load(folder);
      EXPECT_FALSE(status.ok());
      EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
      return comm.Barrier();
    };
    const size_t size = saved.manifest().files[1].sums.bytes;
    for (const size_t at : {size_t{3}, size / 2, size - 1}) {
      if (comm.rank() == 0) FlipBit(path, at);
      EK_RETURN_IF_ERROR(refuses(absl::StrCat(file, " is damaged")));
      if (comm.rank() == 0) FlipBit(path, at);
    }
    // One of the step before, under this one's name.
    if (comm.rank() == 0) {
      std::filesystem::copy_file(path, path + ".kept");
      std::filesystem::copy_file(absl::StrCat(other, "/", others.manifest().files[1].name), path,
                                 std::filesystem::copy_options::overwrite_existing);
    }
    EK_RETURN_IF_ERROR(refuses(file));
    if (comm.rank() == 0) {
      std::filesystem::rename(path + ".kept", path);
      // A number of the manifest that still is a possible one.
      std::string text = *ReadFile(manifest);
      const size_t at = text.find("\"steps_finished\": 2");
      text[at + 18] = '6';
      const absl::string_view pieces[] = {text};
      EK_RETURN_IF_ERROR(WriteFileAtomically(manifest, pieces));
    }
    EK_RETURN_IF_ERROR(refuses("manifest: it is damaged"));
    EK_ASSIGN_OR_RETURN(const OptimizerState after, rank->optimizer->Consolidate());
    EXPECT_TRUE(after == before);
    return absl::OkStatus();
  });
}

// A rank of eight reads its eighth of a file that one rank wrote, and takes no memory for more.
TEST(SlicedCheckpointTest, NobodyReadsMoreThanItsPart) {
  const std::string folder = Folder("large");
  constexpr int64_t kLarge = 200000;
  SlicedRankOptions options;
  options.sizes = std::vector<int64_t>(6, kLarge);
  options.reducer.caps = {Bytes{1 << 20}};
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, WholeRank::Create(comm, AdamW{}, options));
    EK_RETURN_IF_ERROR(rank->Step(0));
    return rank->optimizer->Save(folder);
  });
  RunGroup(8, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, options));
    absl::Status status;
    const int64_t taken =
        static_cast<int64_t>(MemoryTakenBy([&] { status = rank->optimizer->Load(folder); }));
    EK_RETURN_IF_ERROR(status);
    const int64_t whole = 6 * 2 * kLarge * 4, part = whole / 8;
    EXPECT_LE(rank->optimizer->state_bytes(), part + 4096);
    // Its part, a block, and the manifest with its messages; all of it counted, whether given back
    // or not.
    EXPECT_LT(taken, part + (256 << 10) + (600 << 10)) << "of " << whole;
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
