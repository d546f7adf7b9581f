// The time for which a step waits when a checkpoint is saved beside it, next to a plain copy of the
// same bytes, and to a save that the step waits for. Files are written and flushed while the clock
// stands still.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {
namespace {

constexpr int64_t kElements = int64_t{1} << 18;  // Of a parameter.

// Parameters with Adam's state, two float32 for each element.
struct Trained {
  explicit Trained(int64_t bytes) : values(bytes / (2 * 4 * kElements)), gradients(values.size()) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].assign(kElements, 1.0f);
      gradients[i].assign(kElements, 0.01f);
      params.Add(std::to_string(i), absl::MakeSpan(values[i]), absl::MakeSpan(gradients[i]));
    }
  }
  absl::Status Step(Optimizer& optimizer) {
    for (int i = 0; i < params.size(); ++i) params.SetGradState(i, GradState::kReduced);
    return optimizer.Step();
  }
  std::vector<std::vector<float>> values, gradients;
  ParameterSet params;
};

std::string Folder() {
  const char* const folder = std::getenv("TEST_TMPDIR");
  return absl::StrCat(folder == nullptr ? "/tmp" : folder, "/checkpoint_benchmark");
}

enum class How { kFirstAsync, kAsync, kSync, kCopy };

// On one rank, which has all state: a rank of more than one does the same with its part.
void Save(benchmark::State& state, How how) {
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    Trained trained(state.range(0) << 20);
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, trained.params, AdamW{}));
    EK_RETURN_IF_ERROR(trained.Step(*optimizer));
    EK_ASSIGN_OR_RETURN(const StatePieces pieces, optimizer->Pieces());
    std::vector<std::vector<std::byte>> copies;
    for (const StatePiece& piece : pieces.pieces) copies.emplace_back(piece.data.bytes());
    if (how == How::kAsync) {  // The memory of the copy is new in the first save.
      EK_ASSIGN_OR_RETURN(const PendingSave first, optimizer->SaveAsync(Folder()));
      EK_RETURN_IF_ERROR(first.Wait(absl::Minutes(10)));
    }
    for (auto _ : state) {
      PendingSave save;
      if (how == How::kFirstAsync) {
        state.PauseTiming();
        EK_ASSIGN_OR_RETURN(optimizer, Optimizer::Create(comm, trained.params, AdamW{}));
        EK_RETURN_IF_ERROR(trained.Step(*optimizer));
        state.ResumeTiming();
      }
      if (how == How::kAsync || how == How::kFirstAsync) {
        EK_ASSIGN_OR_RETURN(save, optimizer->SaveAsync(Folder()));
      } else if (how == How::kSync) {
        EK_RETURN_IF_ERROR(optimizer->Save(Folder()));
      } else {
        for (size_t i = 0; i < copies.size(); ++i)
          std::memcpy(copies[i].data(), pieces.pieces[i].data.data, copies[i].size());
        benchmark::ClobberMemory();
      }
      state.PauseTiming();
      EK_RETURN_IF_ERROR(save.Wait(absl::Minutes(10)));
      EK_RETURN_IF_ERROR(trained.Step(*optimizer));  // The caches are those of a step's end.
      state.ResumeTiming();
    }
    return absl::OkStatus();
  });
  if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  state.SetBytesProcessed(state.iterations() * (state.range(0) << 20));
  std::filesystem::remove_all(Folder());
}

void BM_Copy(benchmark::State& state) { Save(state, How::kCopy); }
void BM_FirstSaveAsync(benchmark::State& state) { Save(state, How::kFirstAsync); }
void BM_SaveAsync(benchmark::State& state) { Save(state, How::kAsync); }
void BM_Save(benchmark::State& state) { Save(state, How::kSync); }

// MiB of state.
BENCHMARK(BM_Copy)->Arg(16)->Arg(64)->Arg(256)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_SaveAsync)->Arg(16)->Arg(64)->Arg(256)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_FirstSaveAsync)->Arg(64)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Save)->Arg(64)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace evenkeel
