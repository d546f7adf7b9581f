#include "evenkeel/bucket/reducer/launcher.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status Launcher::Init() {
  if (core_.options.skip_unused_buckets) {
    EK_ASSIGN_OR_RETURN(unused_,
                        UnusedAgreement::Create(core_.comm, core_.name, core_.params->size()));
  }
  MakeWorker();
  return absl::OkStatus();
}

void Launcher::MakeWorker() {
  const bool needs_one = core_.reduction->HasThread() && core_.device == nullptr;
  worker_ = needs_one ? std::make_unique<internal::WorkerThread>() : nullptr;
}

absl::Status Launcher::ReplaceGroup() {
  return unused_ == nullptr ? absl::OkStatus() : unused_->ReplaceGroup(core_.comm);
}

std::optional<Collective> Launcher::unused() const {
  return unused_ == nullptr ? std::nullopt : unused_->what();
}

void Launcher::MakePipeline(std::vector<bool> contributes, bool measures_ends) {
  pipeline_ =
      BucketPipeline::Create({.plan = core_.plan,
                              .contributes = std::move(contributes),
                              .waits_for_skips = unused_ != nullptr,
                              .worker = worker_.get(),
                              .waits = worker_ == nullptr ? nullptr : core_.comm->control().waits(),
                              .measures_ends = measures_ends});
}

void Launcher::Begin(bool measures_ends) {
  MakePipeline(std::vector<bool>(core_.plan->buckets.size(), true), measures_ends);
}

absl::Status Launcher::BucketReady(int bucket, bool contributes) {
  const auto has_gradient = [this](int param) {
    return core_.params->grad_state(param) != GradState::kNone;
  };
  const std::span<const int> planned = core_.plan->buckets[bucket].info.params;
  BucketPipeline::Ready ready{.has_all = contributes && std::ranges::all_of(planned, has_gradient)};
  if (core_.device == nullptr) {
    pipeline_->BucketReady(bucket, ready);
    return absl::OkStatus();
  }
  const StreamRef stream = core_.device->stream();
  absl::MutexLock lock(&packing_);
  if (contributes) {
    EK_RETURN_IF_ERROR(core_.plan->storage->Pack(*core_.params, bucket, stream));
    for (const int param : planned) {
      if (core_.options.gradient_as_bucket_view)
        core_.params->SetGradMemory(param, core_.plan->storage->SlotOf(param));
    }
  }
  EK_ASSIGN_OR_RETURN(ready.packed, core_.device->runtime().Record(stream));
  pipeline_->BucketReady(bucket, ready);
  return absl::OkStatus();
}

void Launcher::AgreeOnUnused(absl::Span<const uint8_t> uses, bool contributes) {
  // May come after this step: it keeps what it uses, and the pipeline is closed then.
  unused_->Begin(uses, contributes,
                 [pipeline = pipeline_, plan = core_.plan](absl::Span<const uint8_t> used) {
                   std::vector<bool> skipped(plan->buckets.size(), true);
                   for (size_t param = 0; param < used.size(); ++param) {
                     const int bucket = plan->bucket_of[param];
                     if (bucket >= 0 && used[param] != 0) skipped[bucket] = false;
                   }
                   pipeline->Skip(std::move(skipped));
                 });
}

absl::Status Launcher::WaitForUnused() {
  if (unused_ == nullptr) return absl::OkStatus();
  EK_RETURN_IF_ERROR(unused_->Wait());
  pipeline_->WaitForSkips();
  return absl::OkStatus();
}

absl::Status Launcher::BeginShadow() {
  ParameterSet& params = *core_.params;
  BucketStorage& storage = *core_.plan->storage;
  DeviceSide* const device = core_.device.get();
  if (const TensorView flags = storage.separate_flags(); flags.count > 0) {
    if (device == nullptr) {
      std::memset(flags.data, 0, flags.bytes());
    } else {
      EK_RETURN_IF_ERROR(device->runtime().Zero(flags.data, flags.bytes(), device->stream()));
    }
  }
  std::vector<uint8_t> uses(params.size(), 0);
  for (int param = 0; param < params.size(); ++param)
    uses[param] = params.grad_state(param) == GradState::kLocal;
  std::vector<bool> contributes;
  for (const BucketInfo& bucket : storage.buckets()) {
    contributes.push_back(
        std::ranges::any_of(bucket.params, [&](int param) { return uses[param] != 0; }));
    for (int param : bucket.params) {
      storage.Locate(params, param);  // Received even where this rank contributes nothing.
      if (!contributes.back()) continue;
      // An earlier step's reduced gradient is the group's already; only what this rank accumulated
      // counts.
      if (params.grad_state(param) == GradState::kReduced)
        params.SetGradState(param, GradState::kNone);
      if (device == nullptr) storage.CopyIn(params, param);
    }
  }
  MakePipeline(contributes, /*measures_ends=*/false);
  if (unused_ != nullptr)
    AgreeOnUnused(uses,
                  std::find(contributes.begin(), contributes.end(), true) != contributes.end());
  for (int b = 0; b < storage.size(); ++b) EK_RETURN_IF_ERROR(BucketReady(b, contributes[b]));
  for (int param : core_.plan->sparse) {
    if (params.grad_state(param) == GradState::kReduced)
      params.SetGradState(param, GradState::kNone);
  }
  return absl::OkStatus();
}

void Launcher::Forget() {
  if (pipeline_ != nullptr) {
    pipeline_->Close();
    // A step that was not completed: what its reduction does on other streams is in front of what
    // comes.
    if (core_.device != nullptr) (void)core_.device->Join();
    pipeline_.reset();
  }
  if (unused_ != nullptr) unused_->Forget();
}

}  // namespace evenkeel
