#include "evenkeel/tests/stragglers/delayed_training.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr size_t kElements = 2048;

// Takes page faults for that time.
void TouchPages(absl::Duration time) {
  constexpr size_t kPage = 4096, kPages = 64;
  const absl::Time end = absl::Now() + time;
  while (absl::Now() < end) {
    void* const memory =
        mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return absl::SleepFor(end - absl::Now());
    for (size_t i = 0; i < kPages; ++i)
      static_cast<volatile char*>(memory)[i * kPage] = static_cast<char>(i);
    munmap(memory, kPages * kPage);
  }
}

}  // namespace

absl::Duration CpuTime() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

const char* NameOf(Delay delay) {
  static constexpr const char* kNames[kDelays] = {"none",
                                                  "slow loader, marked",
                                                  "slow loader, not marked",
                                                  "sleep in forward",
                                                  "sleep in backward",
                                                  "page faults",
                                                  "slow disk while saving",
                                                  "busy neighbour",
                                                  "throttled core"};
  return kNames[static_cast<int>(delay)];
}

std::optional<StepPhase> PhaseOf(Delay delay) {
  switch (delay) {
    case Delay::kLoader:
      return StepPhase::kInput;
    case Delay::kUnmarkedLoader:
      return StepPhase::kOutside;
    case Delay::kForward:
    case Delay::kPageFaults:
      return StepPhase::kForward;
    case Delay::kBackward:
      return StepPhase::kBackward;
    case Delay::kSaving:
      return StepPhase::kSaving;
    case Delay::kNone:
    case Delay::kNeighbour:
    case Delay::kThrottled:
      return std::nullopt;
  }
  return std::nullopt;
}

bool Computes(Delay delay) { return delay == Delay::kNeighbour || delay == Delay::kThrottled; }

absl::StatusOr<std::unique_ptr<DelayedTraining>> DelayedTraining::Create(
    Communicator* comm, const DelaySetting& setting) {
  auto training = std::make_unique<DelayedTraining>(comm, setting);
  DataParallelOptions options;
  options.reducer.caps = {Bytes{3 * kElements * sizeof(float)}};
  EK_ASSIGN_OR_RETURN(training->ddp_, DataParallel::Create(comm, &training->params_, {}, options));
  EK_ASSIGN_OR_RETURN(training->optimizer_, Optimizer::Create(*training->ddp_, Sgd{.momentum = 0.9},
                                                              {.placement = setting.placement}));
  return training;
}

DelayedTraining::DelayedTraining(Communicator* comm, const DelaySetting& setting)
    : comm_(comm), setting_(setting) {
  for (int layer = 0; layer < kLayers; ++layer) {
    values_.emplace_back(kElements, 0.5f);
    gradients_.emplace_back(kElements);
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    params_.Add(absl::StrCat("layer", layer), absl::MakeSpan(values_[layer]),
                absl::MakeSpan(gradients_[layer]));
  }
}

absl::Status DelayedTraining::Run(int steps) {
  for (int step = 0; step < steps; ++step) EK_RETURN_IF_ERROR(Step());
  return absl::OkStatus();
}

absl::Status DelayedTraining::Calibrate(int steps) {
  is_calibrating_ = true;
  EK_RETURN_IF_ERROR(Run(steps / 2));  // Caches, connections, and the buckets' second plan.
  const absl::Time begin = absl::Now();
  EK_RETURN_IF_ERROR(Run(steps - steps / 2));
  step_time_ = (absl::Now() - begin) / (steps - steps / 2);
  is_calibrating_ = false;
  return absl::OkStatus();
}

absl::Status DelayedTraining::Step() {
  DelayIf(Delay::kUnmarkedLoader);
  {
    const PhaseScope input(*comm_, StepPhase::kInput);
    DelayIf(Delay::kLoader);
  }
  params_.ClearGradients();
  EK_RETURN_IF_ERROR(ddp_->BeginStep());
  Work(setting_.step / 3);
  DelayIf(Delay::kForward);
  DelayIf(Delay::kPageFaults);
  for (int layer = kLayers - 1; layer >= 0; --layer) {
    Work(setting_.step * 2 / 3 / kLayers);
    if (layer == 2) DelayIf(Delay::kBackward);
    std::ranges::fill(gradients_[layer], 0.25f);
    params_.SetGradState(layer, GradState::kLocal);
    EK_RETURN_IF_ERROR(ddp_->GradientReady(layer));
  }
  EK_RETURN_IF_ERROR(ddp_->FinishStep());
  EK_RETURN_IF_ERROR(optimizer_->Step());
  if (++steps_ % setting_.save_every == 0) {
    const PhaseScope saving(*comm_, StepPhase::kSaving);
    DelayIf(Delay::kSaving, setting_.save_every);
  }
  return absl::OkStatus();
}

void DelayedTraining::Work(absl::Duration time) const {
  if (!setting_.computes) return absl::SleepFor(time);
  // Processor time, so that a neighbour makes it longer.
  for (const absl::Duration end = CpuTime() + time; CpuTime() < end;) {
  }
}

void DelayedTraining::DelayIf(Delay delay, double steps) {
  if (delay != setting_.delay || comm_->rank() != setting_.rank || is_calibrating_) return;
  const absl::Duration time = step_time_ * setting_.fraction * steps;
  delay == Delay::kPageFaults ? TouchPages(time) : absl::SleepFor(time);
}

}  // namespace evenkeel
