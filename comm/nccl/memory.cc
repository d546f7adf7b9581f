#include "evenkeel/comm/nccl/memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kClearTimeout = absl::Minutes(1);
// For what NCCL does meanwhile.
constexpr absl::Duration kTurnTimeout = absl::Minutes(1);

}  // namespace

void NcclMemory::Places::Add(const void* data, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  bytes_[reinterpret_cast<uintptr_t>(data)] = bytes;
}

void NcclMemory::Places::Remove(const void* data) {
  absl::MutexLock lock(&mutex_);
  bytes_.erase(reinterpret_cast<uintptr_t>(data));
}

int64_t NcclMemory::Places::OffsetOf(const void* data) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  absl::MutexLock lock(&mutex_);
  auto after = bytes_.upper_bound(address);
  if (after == bytes_.begin()) return -1;
  --after;
  const auto offset = static_cast<int64_t>(address - after->first);
  return offset < after->second ? offset : -1;
}

NcclMemory::NcclMemory(DeviceRuntime& runtime, NcclApi& api,
                       std::shared_ptr<NcclConnection> connection, Settings settings)
    : runtime_(runtime),
      api_(api),
      connection_(std::move(connection)),
      settings_(std::move(settings)) {}

absl::StatusOr<Memory> NcclMemory::Allocate(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Allocate: ", bytes, " bytes"));
  bool is_refused = false;
  absl::Status trouble;
  if (bytes >= settings_.least_registered) {
    absl::StatusOr<Memory> registered = AllocateRegistered(bytes, &is_refused);
    if (registered.ok()) return registered;
    // Memory is memory; NCCL uses it with one more copy.
    trouble = registered.status();
  }
  EK_ASSIGN_OR_RETURN(Memory plain, runtime_.Allocate(settings_.device, bytes));
  if (is_refused && !absl::IsUnimplemented(trouble)) Warn(bytes, trouble);
  return FreedByLeaveOf(connection_, std::move(plain));
}

void NcclMemory::Warn(int64_t bytes, const absl::Status& why) {
  if (has_warned_.exchange(true)) return;
  const std::string text = absl::StrCat(
      "rank ", settings_.rank, ": ", bytes, " bytes on ", ToString(settings_.device),
      " are not registered with NCCL, which copies them once more (this is logged once): ",
      why.message());
  internal::Warn(settings_.warn, text);
}

absl::StatusOr<Memory> NcclMemory::AllocateRegistered(int64_t bytes, bool* refused) {
  const int64_t at_least = std::max<int64_t>(bytes, 1);
  const Device device = settings_.device;
  *refused = true;
  void* data = nullptr;
  EK_RETURN_IF_ERROR(ToStatus("ncclMemAlloc", api_.AllocateMemory(device, at_least, &data)));
  void* handle = nullptr;
  const absl::Status registered = connection_->Call(
      "ncclCommRegister", SteadyNow() + kTurnTimeout,
      [&](NcclComm comm) { return api_.Register(comm, data, at_least, &handle); });
  if (!registered.ok()) {
    *refused = !connection_->has_ended();
    (void)api_.FreeMemory(device, data);
    return registered;
  }
  if (handle != nullptr) places_->Add(data, at_least);  // Null: NCCL was told to register nothing.
  const auto free = [&api = api_, device, connection = connection_, places = places_,
                     handle](void* buffer) {
    places->Remove(buffer);
    absl::Status gone;
    if (handle != nullptr) {
      gone = connection->Call("ncclCommDeregister", SteadyNow() + kTurnTimeout,
                              [&](NcclComm comm) { return api.Deregister(comm, handle); });
    }
    // A group that has ended has taken its registrations along. What is still registered, or used,
    // stays.
    const bool is_registered = !gone.ok() && !connection->has_ended();
    if (!is_registered && connection->MayFree()) (void)api.FreeMemory(device, buffer);
  };
  Memory memory{std::shared_ptr<void>(data, free), bytes};
  EK_RETURN_IF_ERROR(Clear(memory));
  return memory;
}

absl::Status NcclMemory::Clear(const Memory& memory) {
  // Not the group's stream, which may wait for peers.
  EK_ASSIGN_OR_RETURN(const Stream stream, runtime_.CreateStream(settings_.device));
  EK_RETURN_IF_ERROR(runtime_.Zero(memory.data.get(), memory.bytes, stream.ref()));
  const absl::Status cleared = runtime_.Synchronize(stream.ref(), SteadyNow() + kClearTimeout);
  if (!cleared.ok()) {  // It may happen yet.
    KeepForever(memory.data);
    KeepForever(stream.handle);
  }
  return cleared;
}

uint64_t NcclMemory::LayoutOf(const Operation& operation, const NcclPlan& plan) const {
  const bool is_message = IsPair(operation.what.kind);
  uint64_t layout = 0;
  if (operation.in == operation.out) {  // In place, view by view.
    for (const TensorView& view : operation.in) {
      if (view.count == 0) continue;
      layout = StableHash(layout, static_cast<uint64_t>(view.count));
      layout = StableHash(layout, static_cast<uint64_t>(places_->OffsetOf(view.data)));
    }
    return layout;
  }
  const auto add = [&](const TensorList& views, bool is_staged) {
    if (views.empty()) return;
    const int64_t offset = is_staged ? -1 : places_->OffsetOf(views[0].data);
    // A message's halves lie where they lie.
    layout = StableHash(layout,
                        static_cast<uint64_t>(is_message ? std::min<int64_t>(offset, 0) : offset));
  };
  add(operation.in, plan.stages_in);
  add(operation.out, plan.stages_out);
  return layout;
}

}  // namespace evenkeel::internal
