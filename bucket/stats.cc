#include "evenkeel/bucket/stats.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/json.h"

namespace evenkeel {
namespace {

using internal::JsonJoined;
using internal::JsonQuoted;

void MoveMean(double& mean, absl::Duration took, int64_t steps) {
  mean += (absl::ToDoubleMicroseconds(took) - mean) / static_cast<double>(steps);
}

absl::string_view Json(bool value) { return value ? "true" : "false"; }

// JSON has no infinity; a link that costs nothing per byte has none either.
std::string Json(double value) { return value - value == 0 ? absl::StrCat(value) : "null"; }

std::string Json(const std::vector<int>& values) {
  return absl::StrCat("[", absl::StrJoin(values, ","), "]");
}

std::string JsonCap(Bytes cap) { return cap == kNoCap ? "null" : absl::StrCat(cap.value); }

std::string Json(const std::vector<Bytes>& caps) {
  const auto append = [](std::string* out, Bytes cap) { absl::StrAppend(out, JsonCap(cap)); };
  return absl::StrCat("[", absl::StrJoin(caps, ",", append), "]");
}

std::string Json(const std::vector<BucketStats>& buckets) {
  const auto append = [](std::string* out, const BucketStats& bucket) {
    absl::StrAppend(out, "{\"bytes\":", bucket.bytes, ",\"limit_bytes\":", JsonCap(bucket.limit),
                    ",\"params\":", Json(bucket.params), "}");
  };
  return absl::StrCat("[", absl::StrJoin(buckets, ",", append), "]");
}

std::string Json(const StepMeans& means) {
  return absl::StrCat("{\"measured_steps\":", means.measured_steps,
                      ",\"to_first_gradient_us\":", Json(means.to_first_gradient_us),
                      ",\"backward_us\":", Json(means.backward_us),
                      ",\"communication_us\":", Json(means.communication_us),
                      ",\"exposed_us\":", Json(means.exposed_us),
                      ",\"overlapped_us\":", Json(means.overlapped_us), "}");
}

std::string Json(const TuningStats& tuning) {
  return absl::StrCat("{\"is_on\":", Json(tuning.is_on), ",\"is_done\":", Json(tuning.is_done),
                      ",\"link_latency_us\":", Json(tuning.link_latency_us),
                      ",\"link_bytes_per_second\":", Json(tuning.link_bytes_per_second),
                      ",\"launch_us\":", Json(tuning.launch_us),
                      ",\"predicted_exposed_before_us\":", Json(tuning.predicted_before_us),
                      ",\"measured_exposed_before_us\":", Json(tuning.measured_before_us),
                      ",\"predicted_exposed_after_us\":", Json(tuning.predicted_after_us),
                      ",\"measured_exposed_after_us\":", Json(tuning.measured_after_us),
                      ",\"measured_after_steps\":", tuning.measured_after_steps, "}");
}

}  // namespace

void StepAverages::Add(const StepDurations& took) {
  const int64_t steps = ++means_.measured_steps;
  MoveMean(means_.to_first_gradient_us, took.to_first_gradient, steps);
  MoveMean(means_.backward_us, took.backward, steps);
  MoveMean(means_.communication_us, took.communication, steps);
  MoveMean(means_.exposed_us, took.exposed, steps);
  MoveMean(means_.overlapped_us, took.overlapped, steps);
}

std::string ToJson(const ReducerStats& stats) {
  std::string out;
  {
    JsonJoined members(&out, '{', '}');
    members.Add("\"name\":", JsonQuoted(stats.name));
    members.Add("\"backend\":", JsonQuoted(stats.backend));
    members.Add("\"rank\":", stats.rank);
    members.Add("\"world_size\":", stats.world_size);
    members.Add("\"parameters\":", stats.parameters);
    members.Add("\"parameter_bytes\":", stats.parameter_bytes);
    members.Add("\"caps_bytes\":", Json(stats.caps));
    members.Add("\"small_last_bucket\":", Json(stats.small_last_bucket));
    members.Add("\"gradient_as_bucket_view\":", Json(stats.gradient_as_bucket_view));
    members.Add("\"coalesced\":", Json(stats.coalesced));
    members.Add("\"find_unused\":", Json(stats.find_unused));
    members.Add("\"skip_unused_buckets\":", Json(stats.skip_unused_buckets));
    members.Add("\"static_graph\":", Json(stats.static_graph));
    members.Add("\"generation\":", stats.generation);
    members.Add("\"mask_hash\":\"", absl::Hex(stats.mask_hash, absl::kZeroPad16), "\"");
    members.Add("\"trained_parameters\":", stats.trained_parameters);
    members.Add("\"order_is_final\":", Json(stats.order_is_final));
    members.Add("\"ready_order\":", Json(stats.ready_order));
    members.Add("\"buckets\":", Json(stats.buckets));
    members.Add("\"steps\":", stats.steps);
    members.Add("\"shadowed_steps\":", stats.shadowed_steps);
    members.Add("\"is_joined\":", Json(stats.is_joined));
    members.Add("\"rebuilds\":", stats.rebuilds);
    members.Add("\"refreshes\":", stats.refreshes);
    members.Add("\"imports\":", stats.imports);
    members.Add("\"same_unused_steps\":", stats.same_unused_steps);
    members.Add("\"static_graph_would_do\":", Json(stats.static_graph_would_do));
    members.Add("\"last_error\":", JsonQuoted(stats.last_error));
    members.Add("\"means\":", Json(stats.means));
    members.Add("\"tuning\":", Json(stats.tuning));
  }
  return out;
}

}  // namespace evenkeel
