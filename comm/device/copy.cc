#include "evenkeel/comm/device/copy.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/copy_kernels.cuh"
#include "evenkeel/comm/device/copy_kernels_image.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using kernel::CopyChunk;
using kernel::CopyType;
using kernel::InlineChunks;

const auto kCopyChunks = MakeKernel<&ek_copy_chunks>("ek_copy_chunks", copy_kernels_image);
const auto kCopyInline = MakeKernel<&ek_copy_inline>("ek_copy_inline", copy_kernels_image);

// For the list's way to the device, once.
constexpr absl::Duration kUploadTimeout = absl::Minutes(1);

CopyType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CopyType::kFloat;
    case DType::kFloat64:
      return CopyType::kDouble;
    case DType::kFloat16:
      return CopyType::kHalf;
    case DType::kBFloat16:
      return CopyType::kBFloat;
    default:
      return CopyType::kBytes;
  }
}

absl::Status CheckSegment(const CopySegment& segment, size_t index, Device device) {
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("copy: segment ", index, ", to ", ToString(segment.to), ", ", what));
  };
  if (segment.to.device != device) return wrong(absl::StrCat("does not lie on ", ToString(device)));
  if (segment.to.count > 0 && segment.to.data == nullptr) return wrong("has no memory");
  if (segment.from.data == nullptr) {
    if (segment.fill == 0 || IsFloat(segment.to.dtype)) return absl::OkStatus();
    return wrong(absl::StrCat("cannot be filled with ", segment.fill));
  }
  const std::string from = absl::StrCat("comes from ", ToString(segment.from));
  if (segment.from.device != device)
    return wrong(absl::StrCat(from, ", not from ", ToString(device)));
  if (segment.from.count != segment.to.count) return wrong(from);
  const bool is_converted = segment.from.dtype != segment.to.dtype;
  if (is_converted && !(IsFloat(segment.from.dtype) && IsFloat(segment.to.dtype)))
    return wrong(from);
  return absl::OkStatus();
}

CopyChunk ChunkOf(const CopySegment& segment) {
  const CopyType to = TypeOf(segment.to.dtype);
  const bool is_raw = to == CopyType::kBytes;
  return {.to = segment.to.data,
          .from = segment.from.data,
          .count = is_raw ? segment.to.bytes() : segment.to.count,
          .fill = segment.fill,
          .to_type = to,
          .from_type = segment.from.data == nullptr ? to : TypeOf(segment.from.dtype)};
}

int64_t BytesMoved(const CopySegment& segment) {
  return segment.to.bytes() + (segment.from.data == nullptr ? 0 : segment.from.bytes());
}

absl::Status CheckScale(absl::Span<const CopySegment> segments,
                        const SegmentCopy::Options& options) {
  if (options.scale == 1.0 && options.scale_at == nullptr) return absl::OkStatus();
  for (size_t i = 0; i < segments.size(); ++i) {
    if (IsFloat(segments[i].to.dtype)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("copy: segment ", i, ", to ", ToString(segments[i].to), ", cannot be scaled"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SegmentCopy> SegmentCopy::Create(DeviceRuntime& runtime, Device device,
                                                absl::Span<const CopySegment> segments) {
  SegmentCopy copy;
  copy.runtime_ = &runtime;
  std::vector<CopyChunk> chunks;
  for (size_t i = 0; i < segments.size(); ++i) {
    EK_RETURN_IF_ERROR(CheckSegment(segments[i], i, device));
    copy.scales_ = copy.scales_ && IsFloat(segments[i].to.dtype);
    copy.bytes_moved_ += BytesMoved(segments[i]);
    const CopyChunk whole = ChunkOf(segments[i]);
    const int64_t to_bytes = kernel::BytesOf(whole.to_type),
                  from_bytes = kernel::BytesOf(whole.from_type);
    // As many bytes, whatever the types: so each thread has as much on its way.
    const int64_t most =
        kernel::kCopyChunk * 4 / std::max(to_bytes, whole.from == nullptr ? to_bytes : from_bytes);
    for (int64_t begin = 0; begin < whole.count; begin += most) {
      CopyChunk part = whole;
      part.to = static_cast<std::byte*>(whole.to) + begin * to_bytes;
      if (whole.from != nullptr)
        part.from = static_cast<const std::byte*>(whole.from) + begin * from_bytes;
      part.count = std::min(most, whole.count - begin);
      chunks.push_back(part);
    }
  }
  copy.chunks_ = static_cast<int64_t>(chunks.size());
  if (chunks.empty()) return copy;
  const int64_t bytes = copy.chunks_ * static_cast<int64_t>(sizeof(CopyChunk));
  EK_ASSIGN_OR_RETURN(copy.table_, runtime.Allocate(device, bytes));
  EK_ASSIGN_OR_RETURN(const Stream stream, runtime.CreateStream(device));
  EK_RETURN_IF_ERROR(runtime.Copy(copy.table_.data.get(), chunks.data(), bytes, stream.ref()));
  EK_RETURN_IF_ERROR(runtime.Synchronize(stream.ref(), SteadyNow() + kUploadTimeout));
  return copy;
}

absl::Status SegmentCopy::Run(StreamRef stream, const Options& options) const {
  if (chunks_ == 0) return absl::OkStatus();
  if (!scales_ && (options.scale != 1.0 || options.scale_at != nullptr)) {
    return absl::InvalidArgumentError("copy: a segment of integers cannot be scaled");
  }
  return Launch(*runtime_, kCopyChunks, {.blocks = chunks_, .threads = kernel::kCopyThreads},
                stream, static_cast<const CopyChunk*>(table_.data.get()), chunks_, options.scale,
                options.scale_at);
}

absl::Status CopySegmentsOnce(DeviceRuntime& runtime, absl::Span<const CopySegment> segments,
                              StreamRef stream, const SegmentCopy::Options& options) {
  static_assert(kMostInlineSegments == kernel::kInlineChunks);
  if (segments.size() > static_cast<size_t>(kMostInlineSegments)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "copy: ", segments.size(), " segments in one launch, at most ", kMostInlineSegments));
  }
  EK_RETURN_IF_ERROR(CheckScale(segments, options));
  InlineChunks chunks = {};
  int64_t largest = 0, rows = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    EK_RETURN_IF_ERROR(CheckSegment(segments[i], i, stream.device));
    if (segments[i].to.count == 0) continue;
    chunks.chunks[rows] = ChunkOf(segments[i]);
    largest = std::max(largest, chunks.chunks[rows++].count);
  }
  // More than this fills any device already.
  constexpr int64_t kMostBlocksPerRow = 1024;
  const int64_t blocks =
      std::min((largest + kernel::kCopyChunk - 1) / kernel::kCopyChunk, kMostBlocksPerRow);
  return Launch(runtime, kCopyInline,
                {.blocks = blocks, .threads = kernel::kCopyThreads, .rows = rows}, stream, chunks,
                options.scale, options.scale_at);
}

}  // namespace evenkeel
