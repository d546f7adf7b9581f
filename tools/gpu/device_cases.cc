#include "evenkeel/tools/gpu/device_cases.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/device/device_update.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

// Tensors one behind the other, each at a multiple of 16 bytes, as allocators place them.
struct Tensors {
  Memory memory;
  std::vector<TensorView> views;
};

absl::StatusOr<Tensors> MakeTensors(const BenchDevice& bench, absl::Span<const int64_t> counts,
                                    DType dtype, double fill) {
  const Device device = bench.stream.device;
  const auto padded = [&](int64_t count) { return (count * SizeOf(dtype) + 15) / 16 * 16; };
  int64_t bytes = 0;
  for (const int64_t count : counts) bytes += padded(count);
  Tensors tensors;
  EK_ASSIGN_OR_RETURN(tensors.memory, bench.runtime->Allocate(device, bytes));
  auto* at = static_cast<char*>(tensors.memory.data.get());
  for (const int64_t count : counts) {
    tensors.views.emplace_back(at, count, dtype, device);
    at += padded(count);
  }
  const TensorView all(tensors.memory.data.get(), bytes / SizeOf(dtype), dtype, device);
  EK_RETURN_IF_ERROR(
      CopySegmentsOnce(*bench.runtime, {{.to = all, .fill = fill}}, bench.stream.ref()));
  return tensors;
}

std::string MiB(int64_t bytes) { return absl::StrCat(bytes >> 20, " MiB"); }

absl::StatusOr<DeviceCase> SegmentsCase(const BenchDevice& bench, std::string name, int64_t bytes,
                                        DType from, DType to) {
  struct Held {
    Tensors from, to;
    std::vector<SegmentCopy> copy;  // One.
  };
  auto held = std::make_shared<Held>();
  const std::vector<int64_t> counts = BenchTensors(bytes / SizeOf(DType::kFloat32));
  EK_ASSIGN_OR_RETURN(held->from, MakeTensors(bench, counts, from, 1e-3));
  EK_ASSIGN_OR_RETURN(held->to, MakeTensors(bench, counts, to, 0));
  std::vector<CopySegment> segments;
  for (size_t i = 0; i < counts.size(); ++i) {
    segments.push_back({.to = held->to.views[i], .from = held->from.views[i]});
  }
  EK_ASSIGN_OR_RETURN(SegmentCopy copy,
                      SegmentCopy::Create(*bench.runtime, bench.stream.device, segments));
  held->copy.push_back(std::move(copy));
  const StreamRef stream = bench.stream.ref();
  return DeviceCase{.name = std::move(name),
                    .bytes = held->copy[0].bytes_moved(),
                    .run = [held, stream] { return held->copy[0].Run(stream, {.scale = 0.5}); }};
}

}  // namespace

std::vector<int64_t> BenchTensors(int64_t elements) {
  constexpr int64_t kCycle[] = {1 << 20, 1 << 18, 1 << 10, 3 << 18, 1 << 10, 1 << 16};
  std::vector<int64_t> counts;
  for (size_t i = 0; elements > 0; ++i) {
    counts.push_back(std::min(elements, kCycle[i % std::size(kCycle)]));
    elements -= counts.back();
  }
  return counts;
}

absl::StatusOr<DeviceCase> CopyCase(const BenchDevice& bench, int64_t bytes) {
  const int64_t half = bytes / 2;
  const std::vector<int64_t> counts = {half};
  EK_ASSIGN_OR_RETURN(Tensors from, MakeTensors(bench, counts, DType::kUint8, 0));
  EK_ASSIGN_OR_RETURN(Tensors to, MakeTensors(bench, counts, DType::kUint8, 0));
  DeviceRuntime* const runtime = bench.runtime;
  const StreamRef stream = bench.stream.ref();
  return DeviceCase{.name = absl::StrCat("copy, ", MiB(half)), .bytes = 2 * half, .run = [=] {
                      return runtime->Copy(to.memory.data.get(), from.memory.data.get(), half,
                                           stream);
                    }};
}

absl::StatusOr<DeviceCase> PackCase(const BenchDevice& bench, int64_t bytes, DType from) {
  return SegmentsCase(bench, absl::StrCat("pack ", ToString(from), ", ", MiB(bytes)), bytes, from,
                      DType::kFloat32);
}

absl::StatusOr<DeviceCase> UnpackCase(const BenchDevice& bench, int64_t bytes, DType to) {
  return SegmentsCase(bench, absl::StrCat("unpack ", ToString(to), ", ", MiB(bytes)), bytes,
                      DType::kFloat32, to);
}

absl::StatusOr<DeviceCase> AdamWCase(const BenchDevice& bench, int64_t bytes, DType dtype) {
  struct Held {
    std::vector<UpdateRule> rules = {AdamW{}};
    Tensors value, gradient;
    std::vector<Tensors> state;
    std::vector<std::vector<TensorView>> state_of;  // By parameter.
    std::vector<DeviceUpdateItem> items;
    std::unique_ptr<DeviceUpdate> update;
  };
  auto held = std::make_shared<Held>();
  const int64_t elements = bytes / SizeOf(DType::kFloat32);
  const std::vector<int64_t> counts = BenchTensors(elements);
  EK_ASSIGN_OR_RETURN(held->value, MakeTensors(bench, counts, dtype, 0.5));
  EK_ASSIGN_OR_RETURN(held->gradient, MakeTensors(bench, counts, dtype, 1e-3));
  const auto names = StateTensorNames(held->rules[0], dtype);
  for (size_t t = 0; t < names.size(); ++t) {
    EK_ASSIGN_OR_RETURN(Tensors state, MakeTensors(bench, counts, DType::kFloat32, 0));
    held->state.push_back(std::move(state));
  }
  held->state_of.resize(counts.size());
  for (size_t p = 0; p < counts.size(); ++p) {
    for (const Tensors& state : held->state) held->state_of[p].push_back(state.views[p]);
    held->items.push_back({.param = static_cast<int>(p),
                           .rule = 0,
                           .value = held->value.views[p],
                           .gradient = held->gradient.views[p],
                           .state = held->state_of[p]});
  }
  EK_ASSIGN_OR_RETURN(held->update, DeviceUpdate::Create(bench.runtime, bench.stream.device,
                                                         static_cast<int>(counts.size())));
  // State is read and written, the gradient is read; a value is read too where it is not rounded
  // from the master copy.
  const bool has_master = SizeOf(dtype) < SizeOf(DType::kFloat32);
  const int64_t moved =
      elements * (static_cast<int64_t>(names.size()) * 8 + SizeOf(dtype) * (has_master ? 2 : 3));
  const StreamRef stream = bench.stream.ref();
  return DeviceCase{
      .name = absl::StrCat("AdamW ", ToString(dtype), ", ", MiB(bytes)),
      .bytes = moved,
      .run = [held, stream]() -> absl::Status {
        EK_RETURN_IF_ERROR(held->update->SetList(0, held->rules, held->items, stream));
        EK_RETURN_IF_ERROR(
            held->update->Prepare(0, held->rules, {}, /*is_measured=*/false, stream));
        return held->update->Apply(0, stream);
      }};
}

}  // namespace evenkeel
