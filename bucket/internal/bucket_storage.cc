#include "evenkeel/bucket/internal/bucket_storage.h"

#include <cstring>
#include <utility>

#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<BucketStorage>> BucketStorage::Create(BucketPlan plan, const ParameterSet& params,
                                                                     Communicator& comm) {
  std::unique_ptr<BucketStorage> storage(new BucketStorage);
  storage->plan_ = std::move(plan);
  storage->slots_.resize(params.size());
  const auto& buckets = storage->plan_.buckets;
  storage->offsets_.resize(buckets.size());  // Sized once: infos_ keep spans of its entries.
  for (size_t b = 0; b < buckets.size(); ++b) {
    const TensorView& first = params[buckets[b][0]].value;
    int64_t count = 0;
    for (int param : buckets[b]) {
      storage->offsets_[b].push_back(count);
      count += params[param].value.count;
    }
    EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(count * SizeOf(first.dtype)));
    const TensorView data(memory.data.get(), count, first.dtype, first.device);
    storage->memory_.push_back(std::move(memory));
    for (size_t i = 0; i < buckets[b].size(); ++i) {
      const int param = buckets[b][i];
      storage->slots_[param] = data.Slice(storage->offsets_[b][i], params[param].value.count);
    }
    storage->infos_.push_back({.index = static_cast<int>(b),
                               .bucket_count = static_cast<int>(buckets.size()),
                               .data = data,
                               .params = buckets[b],
                               .offsets = storage->offsets_[b]});
  }
  return storage;
}

void BucketStorage::CopyIn(const ParameterSet& params, int param) {
  const TensorView slot = slots_[param];
  if (slot.count == 0) return;
  if (params.grad_state(param) == GradState::kNone) {
    std::memset(slot.data, 0, slot.bytes());
  } else if (params[param].grad.data != slot.data) {
    std::memcpy(slot.data, params[param].grad.data, slot.bytes());
  }
}

void BucketStorage::CopyOut(ParameterSet& params, int param) const {
  const TensorView slot = slots_[param];
  if (slot.count > 0 && params[param].grad.data != slot.data)
    std::memcpy(params[param].grad.data, slot.data, slot.bytes());
}

}  // namespace evenkeel
