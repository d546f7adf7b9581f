// Plans which gradients are sent together: parameters are put into buckets of at least `cap` bytes,
// in one sequence of buckets per (dtype, device). Pure functions; the reducer runs the plan.
//
//   std::vector<ParamSpec> params = {{.count = 100}, {.count = 100}, {.count = 50}};
//   EK_ASSIGN_OR_RETURN(BucketPlan plan, PlanBuckets(params, {.caps = {Bytes{400}}}));
//   // plan.buckets == {{0}, {1}, {2}}
//
// A bucket closes when its size reaches the cap, so it may exceed it by one tensor; a cap of 0
// gives one parameter per bucket. Each (dtype, device) uses `caps` one after the other and stays at
// the last. A parameter with sparse gradients is a bucket of its own. With `order` (parameters in
// gradient-ready order) buckets are in that order, followed by the buckets that are still open, by
// their first index; without it they are sorted by their smallest parameter index. Delayed
// parameters come last, in one bucket per (dtype, device) without a cap.
//
// With CapOrder::kFromLastReady buckets are filled from the last parameter backwards, so the first
// cap belongs to the bucket that is ready last: a small one leaves little to send when backward has
// ended. Buckets are then in the order in which they are complete.
//
// Units:   caps and limits in bytes, `count` in elements. Indices are positions in `params`.
// Order:   the same plan for the same input, on every rank, build and machine.
// Threads: pure functions, safe from any thread.
// Errors:  InvalidArgument for no parameters or caps, a negative count or cap, more bytes than 63
//          bits can count, or an order with a repeated or unknown parameter; with the values.
// Source:  Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3; same results as its
//          compute_bucket_assignment.

#ifndef EVENKEEL_BUCKET_PLAN_PLANNER_H_
#define EVENKEEL_BUCKET_PLAN_PLANNER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct Bytes {
  int64_t value = 0;
  friend auto operator<=>(const Bytes&, const Bytes&) = default;
};
inline constexpr Bytes kNoCap{0x7fffffffffffffff};
inline constexpr Bytes kDefaultFirstCap{int64_t{1} << 20};
inline constexpr Bytes kDefaultCap{int64_t{25} << 20};

struct ParamSpec {
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  Device device;
  bool sparse = false;
  bool delayed = false;

  int64_t bytes() const { return count * SizeOf(dtype); }
};

// The end at which filling begins, and so the bucket of the first cap.
enum class CapOrder : uint8_t {
  kFromFirstReady,  // The bucket that is ready first: it is sent early.
  kFromLastReady,   // The bucket that is ready last: the tail after backward is short.
};

struct PlanOptions {
  std::vector<Bytes> caps = {kDefaultFirstCap, kDefaultCap};
  // The parameters to plan, in gradient-ready order; others get no bucket. Empty: all, in index
  // order.
  std::vector<int> order;
  CapOrder cap_order = CapOrder::kFromFirstReady;
};

struct BucketPlan {
  std::vector<std::vector<int>> buckets;  // Parameter indices.
  std::vector<Bytes> limits;              // The cap of each bucket; 0 for a sparse one, kNoCap
                                          // for a delayed one.

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;
};

// Returns OK for caps that PlanBuckets() accepts.
absl::Status CheckCaps(std::span<const Bytes> caps);

absl::StatusOr<BucketPlan> PlanBuckets(std::span<const ParamSpec> params,
                                       const PlanOptions& options);

// Returns the plan before any gradient order is known: one bucket per (dtype, device), since
// registration order need not be execution order (PyTorch #72843). `trained` lists the parameters
// to plan, ascending; if there are none, there are no buckets. Within a bucket the last registered
// parameter comes first, and buckets are ordered by their first entry, descending.
absl::StatusOr<BucketPlan> PlanFirstStep(std::span<const ParamSpec> params,
                                         std::span<const int> trained);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PLAN_PLANNER_H_
