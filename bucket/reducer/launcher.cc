#include "evenkeel/bucket/reducer/launcher.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/reducer/sparse_reduction.h"
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

absl::Status Launcher::OnPlan() {
  auto plan = std::make_shared<BucketPipeline::Plan>();
  BucketReduction& reduction = *core_.reduction;
  plan->reduction = &reduction;
  plan->worker = worker_.get();
  if (worker_ != nullptr) plan->waits = core_.comm->control().waits();
  schedule_ = {.generation = core_.state.generation};
  if (unused_ != nullptr && unused_->what().has_value())
    schedule_.entries.push_back(*unused_->what());
  size_t rounds = 1;
  for (const BucketInfo& bucket : core_.storage->buckets()) {
    std::vector<Collective> collectives = reduction.CollectivesFor(bucket);
    if (bucket.index == 0) rounds = collectives.size();
    if (collectives.empty() || collectives.size() != rounds ||
        (rounds > 1 && !reduction.HasThread())) {
      return absl::InvalidArgumentError(
          absl::StrCat("the reduction has for bucket ", bucket.index, " ", collectives.size(),
                       " collectives, bucket 0 ", rounds,
                       ": a reduction needs the same number for each bucket, at least one, and a "
                       "thread for more than one"));
    }
    for (Collective& what : collectives) {
      what.role = Role::kBucket;
      what.index = bucket.index;
      what.index_count = bucket.bucket_count;
      what.joined = Contribution::kIdentity;
      schedule_.entries.push_back(what);
    }
    plan->buckets.push_back({bucket, std::move(collectives)});
  }
  plan->used_data = core_.storage->separate_flags();
  if (const int64_t count = plan->used_data.count; count > 0) {
    plan->used = {.kind = CollectiveKind::kAllReduce, .count = count, .role = Role::kState};
    schedule_.entries.push_back(plan->used);
  }
  if (DeviceSide* const device = core_.device.get(); device != nullptr) {
    plan->runtime = &device->runtime();
    if (core_.has_own_reduction) {
      EK_ASSIGN_OR_RETURN(plan->streams, device->SideStreams(static_cast<int>(rounds) + 1));
    }
    EK_RETURN_IF_ERROR(core_.storage->Prepare(*core_.params, device->stream()));
  }
  for (const Collective& what : SparseCollectives(*core_.params, core_.sparse))
    schedule_.entries.push_back(what);
  for (size_t round = 0; round < rounds; ++round) {
    EK_ASSIGN_OR_RETURN(Channel* const channel,
                        core_.comm->OpenChannel(
                            round == 0 ? core_.name : absl::StrCat(core_.name, ".round", round)));
    plan->channels.push_back(channel);
  }
  plan_ = std::move(plan);
  collectives_version_ = reduction.CollectivesVersion();
  return absl::OkStatus();
}

absl::Status Launcher::Refresh() {
  return core_.reduction->CollectivesVersion() == collectives_version_ ? absl::OkStatus()
                                                                       : OnPlan();
}

void Launcher::Begin(bool measures_ends) {
  pipeline_ =
      std::make_shared<BucketPipeline>(plan_, std::vector<bool>(plan_->buckets.size(), true),
                                       /*waits_for_skips=*/unused_ != nullptr);
  if (measures_ends) pipeline_->MeasureEnds();
}

absl::Status Launcher::BucketReady(int bucket, bool contributes) {
  const auto has_gradient = [this](int param) {
    return core_.params->grad_state(param) != GradState::kNone;
  };
  const auto& planned = core_.storage->plan().buckets[bucket];
  BucketPipeline::Ready ready{.has_all = contributes && std::ranges::all_of(planned, has_gradient)};
  if (core_.device == nullptr) {
    pipeline_->BucketReady(bucket, ready);
    return absl::OkStatus();
  }
  const StreamRef stream = core_.device->stream();
  absl::MutexLock lock(&packing_);
  if (contributes) {
    EK_RETURN_IF_ERROR(core_.storage->Pack(*core_.params, bucket, stream));
    for (const int param : planned) {
      if (core_.options.gradient_as_bucket_view)
        core_.params->SetGradMemory(param, core_.storage->SlotOf(param));
    }
  }
  EK_ASSIGN_OR_RETURN(ready.packed, core_.device->runtime().Record(stream));
  pipeline_->BucketReady(bucket, ready);
  return absl::OkStatus();
}

void Launcher::AgreeOnUnused(absl::Span<const uint8_t> uses, bool contributes) {
  // May come after this step: it keeps what it uses, and the pipeline is closed then.
  unused_->Begin(
      uses, contributes,
      [pipeline = pipeline_, plan = core_.storage->plan()](absl::Span<const uint8_t> used) {
        std::vector<bool> skipped;
        for (const std::vector<int>& bucket : plan.buckets) {
          skipped.push_back(std::none_of(bucket.begin(), bucket.end(),
                                         [&](int param) { return used[param] != 0; }));
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
  BucketStorage& storage = *core_.storage;
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
  pipeline_ = std::make_shared<BucketPipeline>(plan_, contributes,
                                               /*waits_for_skips=*/unused_ != nullptr);
  if (unused_ != nullptr)
    AgreeOnUnused(uses,
                  std::find(contributes.begin(), contributes.end(), true) != contributes.end());
  for (int b = 0; b < storage.size(); ++b) EK_RETURN_IF_ERROR(BucketReady(b, contributes[b]));
  for (int param : core_.sparse) {
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
