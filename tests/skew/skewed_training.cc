#include "evenkeel/tests/skew/skewed_training.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"

namespace evenkeel {

int SkewSetting::StepsOf(int rank, int world) const {
  switch (skew) {
    case Skew::kEven:
      return steps;
    case Skew::kTen:
      return rank < world / 2 ? std::max(0, steps - 10) : steps;
    case Skew::kEmptyEighth:
      return rank % 8 == 0 ? 0 : steps;
  }
  return steps;
}

absl::StatusOr<std::unique_ptr<SkewedTraining>> SkewedTraining::Create(Communicator* comm,
                                                                       const SkewSetting& setting) {
  if (setting.skew != Skew::kEven &&
      (setting.way == JoinWay::kNone || setting.way == JoinWay::kDisabled)) {
    return absl::InvalidArgumentError("ranks with fewer inputs require join");
  }
  auto training = std::make_unique<SkewedTraining>(comm, setting);
  DataParallelOptions options;
  options.reducer.caps = {Bytes{3 * setting.layer_elements * static_cast<int64_t>(sizeof(float))}};
  EK_ASSIGN_OR_RETURN(training->ddp_, DataParallel::Create(comm, &training->params_, {}, options));
  EK_ASSIGN_OR_RETURN(training->optimizer_,
                      Optimizer::Create(*comm, training->params_, Sgd{.momentum = 0.9}));
  return training;
}

SkewedTraining::SkewedTraining(Communicator* comm, const SkewSetting& setting)
    : comm_(comm), setting_(setting) {
  for (int layer = 0; layer < setting_.layers; ++layer) {
    values_.emplace_back(setting_.layer_elements, 0.5f);
    gradients_.emplace_back(setting_.layer_elements);
  }
  for (int layer = 0; layer < setting_.layers; ++layer) {
    params_.Add(absl::StrCat("layer", layer), absl::MakeSpan(values_[layer]),
                absl::MakeSpan(gradients_[layer]));
  }
}

absl::StatusOr<BlockTimes> SkewedTraining::RunBlock() {
  EK_RETURN_IF_ERROR(comm_->control().Exchange("skew", "", comm_->timeout()).status());
  BlockTimes times;
  const absl::Time start = absl::Now();
  if (setting_.way == JoinWay::kNone) {
    EK_RETURN_IF_ERROR(Loop(times));
  } else {
    JoinOptions options{.enable = setting_.way != JoinWay::kDisabled};
    EK_RETURN_IF_ERROR(RunJoined({ddp_.get(), optimizer_.get()}, options,
                                 [&](JoinScope&) { return Loop(times); }));
  }
  times.block = absl::ToDoubleSeconds(absl::Now() - start);
  return times;
}

bool SkewedTraining::BucketsFollowBackward() const {
  std::vector<int> order;
  for (const BucketInfo& bucket : ddp_->buckets()) {
    order.insert(order.end(), bucket.params.begin(), bucket.params.end());
  }
  return ddp_->buckets().size() > 1 && std::ranges::is_sorted(order, std::greater<int>());
}

absl::Status SkewedTraining::Loop(BlockTimes& times) {
  const int steps = setting_.StepsOf(comm_->rank(), comm_->world_size());
  for (int step = 0; step < steps; ++step) EK_RETURN_IF_ERROR(Step(times));
  return absl::OkStatus();
}

absl::Status SkewedTraining::Step(BlockTimes& times) {
  const absl::Time start = absl::Now();
  params_.ClearGradients();
  EK_RETURN_IF_ERROR(ddp_->BeginStep());
  absl::SleepFor(setting_.forward);
  const absl::Time turn = absl::Now();
  const bool is_reversed = setting_.registration_order && is_first_step_;
  is_first_step_ = false;
  for (int i = 0; i < setting_.layers; ++i) {
    const int layer = is_reversed ? i : setting_.layers - 1 - i;
    // Against the clock, so that sleeping too long once does not add up.
    absl::SleepFor(turn + setting_.backward * (i + 1) / setting_.layers - absl::Now());
    // The memory holds the mean of the step before, which counts empty ranks as zeros. Reduced
    // again and again it would become denormal numbers, with which arithmetic is slow.
    std::ranges::fill(gradients_[layer], 0.25f);
    params_.SetGradState(layer, GradState::kLocal);
    EK_RETURN_IF_ERROR(ddp_->GradientReady(layer));
  }
  EK_RETURN_IF_ERROR(ddp_->FinishStep());
  const absl::Time reduced = absl::Now();
  EK_RETURN_IF_ERROR(optimizer_->Step());
  times.backwards.push_back(absl::ToDoubleSeconds(reduced - turn));
  times.steps.push_back(absl::ToDoubleSeconds(absl::Now() - start));
  return absl::OkStatus();
}

}  // namespace evenkeel
