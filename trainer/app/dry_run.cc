#include "evenkeel/trainer/app/dry_run.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace evenkeel {
namespace {

constexpr size_t kBucketsToList = 8;
constexpr size_t kRanksToList = 8;

std::string Size(int64_t bytes) {
  const double kilo = static_cast<double>(bytes) / 1024;
  if (kilo < 1) return absl::StrCat(bytes, " B");
  if (kilo < 1024) return absl::StrFormat("%.3g KiB", kilo);
  if (kilo < 1024 * 1024) return absl::StrFormat("%.4g MiB", kilo / 1024);
  return absl::StrFormat("%.4g GiB", kilo / 1024 / 1024);
}

std::string Time(double seconds) {
  if (seconds < 100) return absl::StrFormat("%.1f s", seconds);
  const int64_t minutes = std::llround(seconds / 60);
  if (minutes < 100) return absl::StrFormat("%d min", minutes);
  return absl::StrFormat("%d h %02d min", minutes / 60, minutes % 60);
}

std::string DescribeBuckets(const std::vector<PlannedBucket>& buckets) {
  std::string text = absl::StrCat(buckets.size(), buckets.size() == 1 ? " bucket: " : " buckets: ");
  for (size_t i = 0; i < std::min(buckets.size(), kBucketsToList); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", Size(buckets[i].bytes));
  }
  if (buckets.size() > kBucketsToList)
    absl::StrAppend(&text, ", and ", buckets.size() - kBucketsToList, " more");
  return absl::StrCat(text, ", as gradients become ready\n");
}

// Means over the sampled steps of a rank, in milliseconds, by kind of span.
struct StepMilliseconds {
  std::array<double, kSpanKinds> of = {};
  double whole = 0;
  bool is_device = false;  // By its clock; `host` is the time in which the host enqueued the step.
  double host = 0;
};

StepMilliseconds MeansOf(const RankRecord& rank) {
  StepMilliseconds means;
  for (const StepTrace& trace : rank.traces) {
    means.is_device = means.is_device || trace.clock == StepClock::kDevice;
    means.host +=
        static_cast<double>(trace.host_ns) / 1e6 / static_cast<double>(rank.traces.size());
    for (const TraceSpan& span : trace.spans) {
      const double took = static_cast<double>(span.end_ns - span.begin_ns) / 1e6;
      means.of[static_cast<int>(span.kind)] += took / static_cast<double>(rank.traces.size());
      means.whole += took / static_cast<double>(rank.traces.size());
    }
  }
  return means;
}

std::string DescribeStep(const StepMilliseconds& means) {
  const auto of = [&](SpanKind kind) { return means.of[static_cast<int>(kind)]; };
  const std::string text = absl::StrFormat(
      "a step takes %.1f ms%s: batch %.1f, forward %.1f, backward %.1f, waiting for gradients "
      "%.1f, optimizer %.1f",
      means.whole, means.is_device ? " on the device" : "",
      of(SpanKind::kData) + of(SpanKind::kBegin), of(SpanKind::kForward), of(SpanKind::kBackward),
      of(SpanKind::kWait), of(SpanKind::kOptimizer));
  return means.is_device ? absl::StrFormat("%s; the host enqueues it in %.1f\n", text, means.host)
                         : text + "\n";
}

}  // namespace

std::string DescribeDevice(Device device, const DeviceFacts& facts) {
  return absl::StrCat(ToString(device), ", ", facts.name, ", has ", Size(facts.free_bytes),
                      " free of ", Size(facts.total_bytes));
}

std::string DescribeMemory(int rank, const RankMemory& memory) {
  std::string text = absl::StrCat("rank ", rank, " holds ", Size(TotalOf(memory)), ":");
  absl::string_view comma = " ";
  for (const MemoryPart& part : kMemoryParts) {
    if (memory.*part.bytes == 0) continue;
    absl::StrAppend(&text, comma, part.name, " ", Size(memory.*part.bytes));
    comma = ", ";
  }
  if (memory.peak_resident > 0) {
    absl::StrAppend(&text, "; its process used at most ", Size(memory.peak_resident),
                    ", including data and libraries");
  }
  return text;
}

std::string DescribeDryRun(const DryRun& run) {
  std::string text;
  if (!run.plans.empty()) text = DescribeBuckets(run.plans.back().buckets);
  for (size_t i = 0; i < std::min(run.ranks.size(), kRanksToList); ++i) {
    absl::StrAppend(&text, DescribeMemory(run.ranks[i].rank, run.ranks[i].memory), "\n");
  }
  // The others wait for the slowest rank.
  StepMilliseconds slowest;
  for (const RankRecord& rank : run.ranks) {
    const StepMilliseconds means = MeansOf(rank);
    if (means.whole > slowest.whole) slowest = means;
  }
  if (slowest.whole == 0) return text;
  const int64_t steps = run.whole.total_steps;
  return absl::StrCat(text, DescribeStep(slowest), steps, " steps in ", run.whole.epochs(),
                      run.whole.epochs() == 1 ? " epoch take" : " epochs take", " about ",
                      Time(slowest.whole * static_cast<double>(steps) / 1e3),
                      ", without evaluation\n");
}

}  // namespace evenkeel
