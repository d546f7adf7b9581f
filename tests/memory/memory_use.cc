#include "evenkeel/tests/memory/memory_use.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/heap_counter.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {
namespace {

// As many as in a small network: matrices, and vectors that are as long as one of their sides.
const std::vector<int64_t>& Sizes() {
  static const auto* const kSizes = [] {
    auto* sizes = new std::vector<int64_t>{262144};
    for (int layer = 0; layer < 7; ++layer) sizes->insert(sizes->end(), {104448, 512, 256});
    return sizes;
  }();
  return *kSizes;
}

// One rank, made part by part.
class Rank {
 public:
  explicit Rank(Communicator* comm) : comm_(comm) {}

  void MakeParameters() {
    for (const int64_t size : Sizes()) values_.emplace_back(size, 0.5f);
  }

  void MakeGradients(bool views) {
    for (size_t p = 0; p < Sizes().size(); ++p) {
      if (!views) gradients_.emplace_back(Sizes()[p], 0.0f);
      params_.Add(absl::StrCat("p", p), absl::MakeSpan(values_[p]),
                  views ? TensorView() : TensorView(absl::MakeSpan(gradients_[p])));
    }
  }

  // Slices come with the reducer; they have no state before a Step() that is not skipped.
  absl::Status MakeReducer(const MemorySetting& setting) {
    DataParallelOptions options;
    options.reducer.gradient_as_bucket_view = setting.views;
    EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(comm_, &params_, {}, options));
    return setting.optimizer == OptimizerKind::kSliced ? Place(Slices{}) : absl::OkStatus();
  }

  absl::Status MakeOptimizer(OptimizerKind kind) {
    is_complete_ = true;
    if (kind == OptimizerKind::kSliced) return absl::OkStatus();
    return kind == OptimizerKind::kUnsharded ? Place(Replicated{}) : Place(WholeTensors{});
  }

  // Without an optimizer gradients are reduced and left.
  absl::Status Step() {
    params_.ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep());
    for (int p = params_.size() - 1; p >= 0; --p) {
      std::ranges::fill(params_[p].grad.as<float>(), 0.25f);
      params_.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp_->GradientReady(p));
    }
    EK_RETURN_IF_ERROR(ddp_->FinishStep());
    return optimizer_ != nullptr ? optimizer_->Step({.skip = !is_complete_}) : absl::OkStatus();
  }

  int64_t state_bytes() const { return optimizer_->state_bytes(); }

  // Returns the process's live bytes while every rank is here.
  absl::StatusOr<int64_t> LiveBytesOfAll() {
    EK_RETURN_IF_ERROR(comm_->Barrier());
    const int64_t live = LiveBytes();
    EK_RETURN_IF_ERROR(comm_->Barrier());
    return live;
  }

 private:
  absl::Status Place(const Placement& placement) {
    EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*ddp_, AdamW{}, {.placement = placement}));
    return absl::OkStatus();
  }

  Communicator* const comm_;
  std::vector<std::vector<float>> values_, gradients_;
  ParameterSet params_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
  bool is_complete_ = false;  // It has its optimizer.
};

absl::StatusOr<MemoryUse> MeasureRank(const MemorySetting& setting, Communicator& comm) {
  MemoryUse use;
  Rank rank(&comm);
  EK_ASSIGN_OR_RETURN(const int64_t start, rank.LiveBytesOfAll());
  int64_t last = start;
  const auto take = [&](int64_t* into) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const int64_t live, rank.LiveBytesOfAll());
    *into = (live - last) / setting.world;
    last = live;
    return absl::OkStatus();
  };
  rank.MakeParameters();
  EK_RETURN_IF_ERROR(take(&use.parameters));
  rank.MakeGradients(setting.views);
  EK_RETURN_IF_ERROR(take(&use.gradients));
  ResetPeakBytes();
  EK_RETURN_IF_ERROR(rank.MakeReducer(setting));
  for (int step = 0; step < 3; ++step)
    EK_RETURN_IF_ERROR(rank.Step());  // The second has the rebuilt buckets.
  EK_RETURN_IF_ERROR(take(&use.buckets));
  EK_RETURN_IF_ERROR(rank.MakeOptimizer(setting.optimizer));
  EK_RETURN_IF_ERROR(rank.Step());
  EK_RETURN_IF_ERROR(take(&use.optimizer));
  use.peak = (PeakBytes() - start) / setting.world;
  EK_RETURN_IF_ERROR(comm.Barrier());  // Nobody resets it before all have read it.
  ResetPeakBytes();
  for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank.Step());
  EK_RETURN_IF_ERROR(comm.Barrier());
  use.steady_peak = (PeakBytes() - start) / setting.world;
  use.peak = std::max(use.peak, use.steady_peak);
  use.most_state = rank.state_bytes();
  return use;
}

}  // namespace

int64_t ParameterBytes() {
  return std::accumulate(Sizes().begin(), Sizes().end(), int64_t{0}) *
         static_cast<int64_t>(sizeof(float));
}

int64_t LargestTensorBytes() {
  return *std::max_element(Sizes().begin(), Sizes().end()) * static_cast<int64_t>(sizeof(float));
}

absl::StatusOr<MemoryUse> MeasureMemory(const MemorySetting& setting) {
  if (!HeapIsCounted()) return absl::UnimplementedError("the heap is not counted in this build");
  std::vector<MemoryUse> uses(setting.world);
  EK_RETURN_IF_ERROR(RunRanks(setting.world, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(uses[comm.rank()], MeasureRank(setting, comm));
    return absl::OkStatus();
  }));
  MemoryUse use = uses[0];
  for (const MemoryUse& other : uses) use.most_state = std::max(use.most_state, other.most_state);
  return use;
}

}  // namespace evenkeel
