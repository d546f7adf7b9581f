#include "evenkeel/bucket/reducer/bucket_storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

void SetFlag(const TensorView& flag, bool is_set) {  // Gradients are floats.
  if (flag.dtype == DType::kFloat32) *flag.as<float>().data() = is_set;
  if (flag.dtype == DType::kFloat64) *flag.as<double>().data() = is_set;
  if (flag.dtype == DType::kFloat16) *flag.as<Float16>().data() = Float16(is_set);
  if (flag.dtype == DType::kBFloat16) *flag.as<BFloat16>().data() = BFloat16(is_set);
}

// By its bits, which are those of +0 where no rank has set it, whatever its type.
bool IsFlagSet(const TensorView& flag) {
  uint64_t bits = 0;
  std::memcpy(&bits, flag.data, flag.bytes());
  return bits != 0;
}

// Adds to the list that `to` becomes `fill`; to its last entry, if that is the memory in front.
void AddFill(std::vector<CopySegment>& segments, const TensorView& to, double fill) {
  if (!segments.empty()) {
    CopySegment& last = segments.back();
    const void* const end = static_cast<const char*>(last.to.data) + last.to.bytes();
    if (last.from.data == nullptr && last.fill == fill && last.to.dtype == to.dtype &&
        end == to.data) {
      last.to.count += to.count;
      return;
    }
  }
  segments.push_back({.to = to, .fill = fill});
}

auto Having(const ParameterSet& params) {
  return [&params](int param) { return params.grad_state(param) != GradState::kNone; };
}

absl::Status MoveGradient(ParameterSet& params, int param, TensorView to,
                          const DeviceSide* device) {
  const TensorView from = params[param].grad;
  if (from.data == to.data || from.count == 0) return absl::OkStatus();
  absl::Status moved;
  if (params.grad_state(param) != GradState::kNone) {
    if (to.data == nullptr) {
      // Nowhere to keep it: it was made without memory of its own.
      params.SetGradState(param, GradState::kNone);
    } else if (device != nullptr) {
      moved = device->runtime().Copy(to.data, from.data, from.bytes(), device->stream());
    } else {
      std::memcpy(to.data, from.data, from.bytes());
    }
  }
  params.SetGradMemory(param, to);
  return moved;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BucketStorage>> BucketStorage::Create(BucketPlan plan,
                                                                     const ParameterSet& params,
                                                                     Layout layout,
                                                                     Communicator& comm) {
  std::unique_ptr<BucketStorage> storage(new BucketStorage);
  storage->plan_ = std::move(plan);
  storage->layout_ = layout;
  storage->slots_.resize(params.size());
  storage->flags_.resize(params.size());
  storage->part_of_.resize(params.size(), nullptr);
  const auto& buckets = storage->plan_.buckets;
  storage->offsets_.resize(
      buckets.size());  // Sized once: infos_ keep spans of its entries, and of those of parts_.
  storage->parts_.resize(buckets.size());
  if (layout.separate_flags && !buckets.empty()) {
    EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(params.size() * SizeOf(DType::kFloat32)));
    storage->separate_ =
        TensorView(memory.data.get(), params.size(), DType::kFloat32, comm.device());
    storage->memory_.push_back(std::move(memory));
  }
  const int64_t multiple = layout.count_multiple;
  const bool is_flat = layout.fusion == Fusion::kFlat;
  for (size_t b = 0; b < buckets.size(); ++b) {
    const TensorView& first = params[buckets[b][0]].value;
    int64_t filled = 0;
    for (int param : buckets[b]) {
      storage->offsets_[b].push_back(filled);
      filled += params[param].value.count;
    }
    const int64_t count = is_flat ? (filled + multiple - 1) / multiple * multiple : 0;
    const int64_t flags = static_cast<int64_t>(buckets[b].size());
    EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate((count + flags) * SizeOf(first.dtype)));
    const TensorView wire(memory.data.get(), count + flags, first.dtype, first.device);
    storage->memory_.push_back(std::move(memory));
    if (count > filled && first.device.is_cpu())
      std::memset(wire.Slice(filled, count - filled).data, 0,
                  (count - filled) * SizeOf(first.dtype));
    std::vector<TensorView>& parts = storage->parts_[b];
    if (is_flat) {
      parts = {wire};
    } else {
      // Also where this rank never has a gradient: what the others reduce comes to it.
      for (int param : buckets[b]) parts.push_back(params[param].grad);
      parts.push_back(wire);
    }
    for (size_t i = 0; i < buckets[b].size(); ++i) {
      const int param = buckets[b][i];
      if (is_flat)
        storage->slots_[param] = wire.Slice(storage->offsets_[b][i], params[param].value.count);
      if (!is_flat) storage->part_of_[param] = &parts[i];
      storage->flags_[param] = wire.Slice(count + static_cast<int64_t>(i), 1);
    }
    storage->infos_.push_back(
        {.index = static_cast<int>(b),
         .bucket_count = static_cast<int>(buckets.size()),
         .data = wire.Slice(0, count),
         .used = wire.Slice(count, flags),
         .wire = wire,
         .parts = parts,
         .parts_count = filled + (count > filled ? count - filled : 0) + flags,
         .params = buckets[b],
         .offsets = storage->offsets_[b]});
    if (!first.device.is_cpu()) {
      storage->packs_.emplace_back(comm.runtime(), first.device);
      storage->unpacks_.emplace_back(comm.runtime(), first.device);
    }
  }
  return storage;
}

absl::Status BucketStorage::MoveGradients(ParameterSet& params, bool are_views,
                                          const DeviceSide* device) const {
  absl::Status first;
  for (int i = 0; i < params.size(); ++i) {
    const TensorView to = are_views && slots_[i].data != nullptr ? slots_[i] : params.own_grad(i);
    first.Update(MoveGradient(params, i, to, device));
  }
  return first;
}

void BucketStorage::CopyIn(const ParameterSet& params, int param) {
  const bool is_used = params.grad_state(param) != GradState::kNone;
  SetFlag(flags_[param], is_used);
  if (separate_.data != nullptr) SetFlag(flag(param), is_used);
  Locate(params, param);
  const TensorView slot = part_of_[param] != nullptr ? params[param].grad : slots_[param];
  if (slot.count == 0) return;
  if (!is_used) {
    std::memset(slot.data, 0, slot.bytes());
  } else if (params[param].grad.data != slot.data) {
    std::memcpy(slot.data, params[param].grad.data, slot.bytes());
  }
}

void BucketStorage::Locate(const ParameterSet& params, int param) {
  if (part_of_[param] != nullptr) *part_of_[param] = params[param].grad;
}

bool BucketStorage::IsUsed(int param) const { return IsFlagSet(flag(param)); }

void BucketStorage::CopyOut(ParameterSet& params, int param) const {
  const TensorView slot = slots_[param];
  if (slot.data != nullptr && slot.count > 0 && params[param].grad.data != slot.data)
    std::memcpy(params[param].grad.data, slot.data, slot.bytes());
}

// On a device -------------------------------------------------------------------------------------

std::vector<CopySegment> BucketStorage::PackSegments(const ParameterSet& params, int bucket,
                                                     IsUsedFn is_used) const {
  std::vector<CopySegment> segments;
  for (const int param : infos_[bucket].params) {
    const TensorView& grad = params[param].grad;
    const TensorView slot = part_of_[param] != nullptr ? grad : slots_[param];
    if (slot.count == 0) continue;
    if (!is_used(param)) {
      AddFill(segments, slot, 0);
    } else if (grad.data != slot.data) {
      segments.push_back({.to = slot, .from = grad});
    }
  }
  for (const int param : infos_[bucket].params)
    AddFill(segments, flags_[param], is_used(param) ? 1 : 0);
  for (const int param : infos_[bucket].params) {
    if (separate_.data != nullptr) AddFill(segments, flag(param), is_used(param) ? 1 : 0);
  }
  return segments;
}

std::vector<CopySegment> BucketStorage::UnpackSegments(const ParameterSet& params, int bucket,
                                                       IsUsedFn is_used) const {
  std::vector<CopySegment> segments;
  for (const int param : infos_[bucket].params) {
    const TensorView slot = slots_[param];
    if (slot.data == nullptr || slot.count == 0 || params[param].grad.data == slot.data ||
        !is_used(param))
      continue;
    segments.push_back({.to = params[param].grad, .from = slot});
  }
  return segments;
}

absl::Status BucketStorage::Prepare(const ParameterSet& params, StreamRef stream) {
  const auto all = [](int) { return true; };
  for (int b = 0; b < size(); ++b) {
    EK_RETURN_IF_ERROR(packs_[b].Prepare(PackSegments(params, b, all), stream));
    EK_RETURN_IF_ERROR(unpacks_[b].Prepare(UnpackSegments(params, b, all), stream));
  }
  return absl::OkStatus();
}

absl::Status BucketStorage::Pack(const ParameterSet& params, int bucket, StreamRef stream) {
  for (const int param : infos_[bucket].params) Locate(params, param);
  return packs_[bucket].Run(PackSegments(params, bucket, Having(params)), stream);
}

absl::Status BucketStorage::Unpack(const ParameterSet& params, int bucket, StreamRef stream) {
  return unpacks_[bucket].Run(UnpackSegments(params, bucket, Having(params)), stream);
}

}  // namespace evenkeel
