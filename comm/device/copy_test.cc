#include "evenkeel/comm/device/copy.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/testing/tested_devices.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr Device kDevice = Device::Cuda(0);

class SegmentCopyTest : public testing::Test {
 protected:
  SegmentCopyTest() : stream_(*devices_.CreateStream(kDevice)) {}

  TensorView On(DType dtype, int64_t count) {
    memory_.push_back(*devices_.Allocate(kDevice, count * SizeOf(dtype)));
    return TensorView(memory_.back().data.get(), count, dtype, kDevice);
  }
  // With values that no type rounds, unless scaled.
  TensorView Filled(DType dtype, int64_t count, int seed) {
    const TensorView view = On(dtype, count);
    for (int64_t i = 0; i < count; ++i)
      Set(view, i, static_cast<double>((i * 7 + seed) % 41 - 20) / 4);
    return view;
  }
  static void Set(const TensorView& view, int64_t i, double value) {
    const TensorView at = view.Slice(i, 1);
    if (view.dtype == DType::kFloat32) *at.as<float>().data() = static_cast<float>(value);
    if (view.dtype == DType::kFloat64) *at.as<double>().data() = value;
    if (view.dtype == DType::kFloat16)
      *at.as<Float16>().data() = Float16(static_cast<float>(value));
    if (view.dtype == DType::kBFloat16)
      *at.as<BFloat16>().data() = BFloat16(static_cast<float>(value));
  }
  static double Get(const TensorView& view, int64_t i) {
    const TensorView at = view.Slice(i, 1);
    if (view.dtype == DType::kFloat32) return *at.as<float>().data();
    if (view.dtype == DType::kFloat64) return *at.as<double>().data();
    if (view.dtype == DType::kFloat16) return static_cast<float>(*at.as<Float16>().data());
    return static_cast<float>(*at.as<BFloat16>().data());
  }
  void Finish() {
    ASSERT_TRUE(devices_.Synchronize(stream_.ref(), absl::Now() + absl::Seconds(30)).ok());
  }

  TestedDevices devices_;
  Stream stream_;
  std::vector<Memory> memory_;
};

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

TEST_F(SegmentCopyTest, ConvertsAndScalesEachPairOfTypes) {
  for (const DType to : kFloats) {
    for (const DType from : kFloats) {
      for (const double scale : {1.0, 0.5}) {
        SCOPED_TRACE(ToString(from));
        SCOPED_TRACE(ToString(to));
        std::vector<CopySegment> segments;
        // Around what a thread, a block and a chunk take at once; and from an odd place.
        for (const int64_t count : {0, 1, 3, 4, 5, 1023, 1024, 4095, 4096, 4097, 20000}) {
          segments.push_back(
              {.to = On(to, count + 1).Slice(0, count), .from = Filled(from, count, 3)});
          if (count > 1) {
            segments.push_back({.to = On(to, count).Slice(1, count - 1),
                                .from = Filled(from, count, 5).Slice(0, count - 1)});
          }
        }
        const absl::StatusOr<SegmentCopy> copy = SegmentCopy::Create(devices_, kDevice, segments);
        ASSERT_TRUE(copy.ok()) << copy.status();
        const int64_t launches = devices_.launches();
        ASSERT_TRUE(copy->Run(stream_.ref(), {.scale = scale}).ok());
        EXPECT_EQ(devices_.launches(), launches + 1);
        Finish();
        for (const CopySegment& segment : segments) {
          for (int64_t i = 0; i < segment.to.count; ++i) {
            ASSERT_EQ(Get(segment.to, i), Get(segment.from, i) * scale)
                << i << " of " << segment.to.count;
          }
        }
      }
    }
  }
}

TEST_F(SegmentCopyTest, InlineIsTheSame) {
  std::vector<CopySegment> segments;
  for (int i = 0; i < kMostInlineSegments; ++i) {
    segments.push_back(
        {.to = On(DType::kBFloat16, 1 + 777 * i), .from = Filled(DType::kFloat32, 1 + 777 * i, i)});
  }
  const TensorView factor = On(DType::kFloat32, 1);
  Set(factor, 0, 0.25);
  ASSERT_TRUE(CopySegmentsOnce(devices_, segments, stream_.ref(),
                               {.scale = 2.0, .scale_at = factor.as<float>().data()})
                  .ok());
  Finish();
  for (const CopySegment& segment : segments) {
    for (int64_t i = 0; i < segment.to.count; ++i)
      ASSERT_EQ(Get(segment.to, i), Get(segment.from, i) * 0.5);
  }
  segments.push_back(segments.front());
  EXPECT_EQ(CopySegmentsOnce(devices_, segments, stream_.ref()).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SegmentCopyTest, FillsWhatComesFromNowhere) {
  const TensorView ones = On(DType::kFloat16, 5), zeros = Filled(DType::kFloat32, 3000, 1);
  ASSERT_TRUE(CopySegmentsOnce(devices_, {{.to = ones, .fill = 1}, {.to = zeros}}, stream_.ref(),
                               {.scale = 9})
                  .ok());
  Finish();
  for (int64_t i = 0; i < ones.count; ++i) EXPECT_EQ(Get(ones, i), 1);
  for (int64_t i = 0; i < zeros.count; ++i) EXPECT_EQ(Get(zeros, i), 0);
}

TEST_F(SegmentCopyTest, WhatIsNotScaledIsMovedBitForBit) {
  for (const DType dtype : kAllDTypes) {
    const int64_t count = 4099;
    const TensorView from = On(dtype, count), to = On(dtype, count);
    auto* const bytes = static_cast<uint8_t*>(from.data);
    for (int64_t i = 0; i < from.bytes(); ++i)
      bytes[i] = static_cast<uint8_t>(i * 37 + 11);  // NaNs among them.
    const absl::StatusOr<SegmentCopy> copy =
        SegmentCopy::Create(devices_, kDevice, {{.to = to, .from = from}});
    ASSERT_TRUE(copy.ok()) << copy.status();
    ASSERT_TRUE(copy->Run(stream_.ref()).ok());
    Finish();
    EXPECT_EQ(std::memcmp(from.data, to.data, from.bytes()), 0) << ToString(dtype);
    EXPECT_EQ(copy->Run(stream_.ref(), {.scale = 2}).ok(), IsFloat(dtype)) << ToString(dtype);
    Finish();  // Before `copy` goes.
  }
}

TEST_F(SegmentCopyTest, SaysWhichSegmentDoesNotFit) {
  const TensorView tensor = On(DType::kFloat32, 4), ints = On(DType::kInt32, 4);
  std::vector<float> host(4);
  for (const CopySegment& wrong :
       {CopySegment{.to = tensor, .from = tensor.Slice(0, 3)},
        CopySegment{.to = tensor, .from = ints},
        CopySegment{.to = tensor, .from = TensorView(absl::MakeSpan(host))},
        CopySegment{.to = TensorView(absl::MakeSpan(host)), .from = tensor},
        CopySegment{.to = ints, .fill = 1}}) {
    const absl::Status status =
        SegmentCopy::Create(devices_, kDevice, {{.to = tensor, .from = tensor}, wrong}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().substr(0, 15), "copy: segment 1") << status;
  }
}

}  // namespace
}  // namespace evenkeel
