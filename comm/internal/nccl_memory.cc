#include "evenkeel/comm/internal/nccl_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kClearTimeout = absl::Minutes(1);

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

NcclMemory::NcclMemory(DeviceRuntime& runtime, NcclApi& api, Device device, std::shared_ptr<NcclConnection> connection,
                       int64_t least_registered)
    : runtime_(runtime),
      api_(api),
      device_(device),
      connection_(std::move(connection)),
      least_registered_(least_registered) {}

absl::StatusOr<Memory> NcclMemory::Allocate(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Allocate: ", bytes, " bytes"));
  if (bytes >= least_registered_) {
    absl::StatusOr<Memory> registered = AllocateRegistered(bytes);
    if (registered.ok()) return registered;
    // Memory is memory; NCCL uses it with one more copy.
  }
  return runtime_.Allocate(device_, bytes);
}

absl::StatusOr<Memory> NcclMemory::AllocateRegistered(int64_t bytes) {
  const int64_t at_least = std::max<int64_t>(bytes, 1);
  void* data = nullptr;
  EK_RETURN_IF_ERROR(ToStatus("ncclMemAlloc", api_.AllocateMemory(device_, at_least, &data)));
  void* handle = nullptr;
  const absl::Status registered = connection_->Call(
      "ncclCommRegister", [&](NcclComm comm) { return api_.Register(comm, data, at_least, &handle); });
  if (!registered.ok()) {
    (void)api_.FreeMemory(device_, data);
    return registered;
  }
  places_->Add(data, at_least);
  Memory memory{std::shared_ptr<void>(
                    data,
                    [&api = api_, device = device_, connection = connection_, places = places_, handle](void* buffer) {
                      places->Remove(buffer);
                      // A group that has ended has taken its registrations along.
                      (void)connection->Call("ncclCommDeregister",
                                             [&](NcclComm comm) { return api.Deregister(comm, handle); });
                      if (!connection->is_left_behind()) (void)api.FreeMemory(device, buffer);
                    }),
                bytes};
  EK_RETURN_IF_ERROR(Clear(memory));
  return memory;
}

absl::Status NcclMemory::Clear(const Memory& memory) {
  // Not the group's stream, which may wait for peers.
  EK_ASSIGN_OR_RETURN(const Stream stream, runtime_.CreateStream(device_));
  EK_RETURN_IF_ERROR(runtime_.Zero(memory.data.get(), memory.bytes, stream.ref()));
  return runtime_.Synchronize(stream.ref(), absl::Now() + kClearTimeout);
}

uint64_t NcclMemory::LayoutOf(const Operation& operation, const NcclPlan& plan) const {
  const CollectiveKind kind = operation.what.kind;
  const bool is_message = kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
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
    layout = StableHash(layout, static_cast<uint64_t>(is_message ? std::min<int64_t>(offset, 0) : offset));
  };
  add(operation.in, plan.stages_in);
  add(operation.out, plan.stages_out);
  return layout;
}

}  // namespace evenkeel::internal
