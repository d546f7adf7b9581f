#include "evenkeel/bucket/plan/tuner.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int64_t kFirstCaps[] = {int64_t{1} << 18, int64_t{1} << 20, int64_t{1} << 22};
constexpr int64_t kFurtherCaps[] = {
    int64_t{1} << 19, int64_t{1} << 20, int64_t{1} << 21, int64_t{1} << 22, int64_t{1} << 23,
    int64_t{1} << 24, int64_t{1} << 25, int64_t{1} << 26, int64_t{1} << 27, kNoCap.value};
constexpr size_t kPieces = 2048;  // With more parameters than these, neighbours are merged.
constexpr int64_t kClearlyBetter = 50;

// One parameter, or neighbours that stay together.
struct Piece {
  int64_t bytes = 0;
  int64_t ready_ns = 0;  // With all pieces before it.
};

// The (dtype, device) with the most bytes only: the others walk through the same caps.
std::vector<Piece> PiecesOf(std::span<const ParamSpec> specs, std::span<const int> order,
                            std::span<const int64_t> ready_ns) {
  auto key_of = [](const ParamSpec& spec) {
    return std::tuple(spec.dtype, spec.device.kind, spec.device.index);
  };
  std::map<decltype(key_of(ParamSpec())), int64_t> bytes_of;
  for (int param : order) {
    if (!specs[param].sparse) bytes_of[key_of(specs[param])] += specs[param].bytes();
  }
  if (bytes_of.empty()) return {};
  const auto largest =
      std::ranges::max_element(bytes_of, {}, [](const auto& group) { return group.second; });
  const int64_t piece_bytes =
      order.size() <= kPieces ? 0 : 2 * largest->second / static_cast<int64_t>(kPieces);
  std::vector<Piece> pieces;
  int64_t ready = std::numeric_limits<int64_t>::min();
  bool is_full = true;
  for (int param : order) {
    if (specs[param].sparse || key_of(specs[param]) != largest->first) continue;
    if (is_full) pieces.emplace_back();
    ready = std::max(ready, ready_ns[param]);
    pieces.back().bytes += specs[param].bytes();
    pieces.back().ready_ns = ready;
    is_full = pieces.back().bytes >= piece_bytes &&
              pieces.back().bytes > 0;  // An empty one ends no bucket.
  }
  return pieces;
}

// The bytes of each bucket of the partition that is reduced first. A bucket begins when it is ready
// and the ones before it are reduced, so an earlier end of those is never worse, and the best
// partition of the first j pieces is made from the best one of the first i.
std::vector<Bytes> BestPartition(const std::vector<Piece>& pieces, const LinkCost& link) {
  const size_t count = pieces.size();
  std::vector<int64_t> bytes_before(count + 1, 0);
  for (size_t i = 0; i < count; ++i) bytes_before[i + 1] = bytes_before[i] + pieces[i].bytes;
  std::vector<int64_t> reduced(count + 1, std::numeric_limits<int64_t>::max());
  std::vector<size_t> begin_of_last(count + 1, 0);
  reduced[0] = std::numeric_limits<int64_t>::min();
  for (size_t j = 1; j <= count; ++j) {
    for (size_t i = 0; i < j; ++i) {
      const int64_t end = std::max(reduced[i], pieces[j - 1].ready_ns) + link.launch_ns +
                          link.ReductionNs(bytes_before[j] - bytes_before[i]);
      if (end >= reduced[j]) continue;
      reduced[j] = end;
      begin_of_last[j] = i;
    }
  }
  std::vector<Bytes> sizes;
  for (size_t j = count; j > 0; j = begin_of_last[j]) {
    sizes.push_back({bytes_before[j] - bytes_before[begin_of_last[j]]});
  }
  std::reverse(sizes.begin(), sizes.end());
  return sizes;
}

std::vector<PlanOptions> Candidates(const PlanOptions& now, std::vector<Bytes> partition) {
  std::vector<PlanOptions> candidates = {now};
  for (CapOrder from : {CapOrder::kFromFirstReady, CapOrder::kFromLastReady}) {
    for (int64_t first : kFirstCaps) {
      for (int64_t further : kFurtherCaps) {
        if (first <= further)
          candidates.push_back({.caps = {Bytes{first}, Bytes{further}}, .cap_order = from});
      }
    }
  }
  if (!partition.empty()) candidates.push_back({.caps = std::move(partition)});
  return candidates;
}

}  // namespace

std::string StepProfile::Serialize() const { return internal::ToBytes(*this); }

absl::StatusOr<StepProfile> StepProfile::Parse(absl::string_view bytes, int param_count,
                                               int bucket_count) {
  const std::string what = absl::StrCat("the profile of a step with ", param_count,
                                        " parameters in ", bucket_count, " buckets");
  EK_ASSIGN_OR_RETURN(StepProfile profile, internal::FromBytes<StepProfile>(bytes, what));
  if (std::ssize(profile.ready_ns) == param_count && std::ssize(profile.bucket_ns) == bucket_count)
    return profile;
  return absl::InvalidArgumentError(absl::StrCat(what, ": value out of range"));
}

StepProfile MedianOf(std::span<const StepProfile> steps) {
  StepProfile median = steps.front();
  const auto of = [&](auto number) {
    std::vector<int64_t> values;
    for (const StepProfile& step : steps) values.push_back(number(step));
    return MedianOf(std::move(values));
  };
  for (size_t p = 0; p < median.ready_ns.size(); ++p)
    median.ready_ns[p] = of([p](const StepProfile& step) { return step.ready_ns[p]; });
  for (size_t b = 0; b < median.bucket_ns.size(); ++b)
    median.bucket_ns[b] = of([b](const StepProfile& step) { return step.bucket_ns[b]; });
  median.launch_ns = of([](const StepProfile& step) { return step.launch_ns; });
  return median;
}

StepProfile Combined(std::span<const StepProfile> profiles) {
  StepProfile all = profiles.front();
  for (const StepProfile& one : profiles.subspan(1)) {
    for (size_t p = 0; p < all.ready_ns.size(); ++p)
      all.ready_ns[p] = std::max(all.ready_ns[p], one.ready_ns[p]);
    for (size_t b = 0; b < all.bucket_ns.size(); ++b)
      all.bucket_ns[b] = std::min(all.bucket_ns[b], one.bucket_ns[b]);
    all.launch_ns = std::max(all.launch_ns, one.launch_ns);
  }
  return all;
}

absl::StatusOr<CapChoice> ChooseCaps(std::span<const ParamSpec> specs, std::span<const int> order,
                                     const PlanOptions& now, std::span<const int64_t> ready_ns,
                                     const LinkCost& link) {
  if (ready_ns.size() != specs.size()) {
    return absl::InvalidArgumentError(absl::StrCat("there are ready times of ", ready_ns.size(),
                                                   " of ", specs.size(), " parameters"));
  }
  CapChoice choice{.caps = now.caps, .cap_order = now.cap_order};
  if (order.empty()) return choice;
  bool is_first = true;
  for (PlanOptions& candidate :
       Candidates(now, BestPartition(PiecesOf(specs, order, ready_ns), link))) {
    candidate.order.assign(order.begin(), order.end());
    EK_ASSIGN_OR_RETURN(const BucketPlan plan, PlanBuckets(specs, candidate));
    Prediction prediction = Predict(plan, specs, ready_ns, link);
    if (is_first) choice.before = prediction;
    const int64_t to_beat = choice.after.exposed_ns - choice.after.exposed_ns / kClearlyBetter;
    if (!is_first && prediction.exposed_ns >= to_beat) continue;
    is_first = false;
    choice.caps = std::move(candidate.caps);
    choice.cap_order = candidate.cap_order;
    choice.after = std::move(prediction);
  }
  return choice;
}

}  // namespace evenkeel
