#include "evenkeel/tools/predict/traced_run.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/trainer/report/trace_settings.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kBucket = "bucket ";

// The events of one step on one rank; times are microseconds, as in the file.
struct Events {
  double begin = 0, end = 0;
  std::map<std::string, double> parts;
  double last_gradient = 0;
  std::vector<TracedBucket> buckets;  // By number; without bytes where the trace has none.
};

absl::Status Refused(const std::string& name, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", why));
}

std::string SettingOf(const Json& trace, const char* name) {
  const Json::json_pointer path("/otherData/settings");
  if (!trace.contains(path) || !trace[path].contains(name)) return "";
  return trace[path][name].get<std::string>();
}

absl::Status CheckSettings(const std::string& name, const Json& trace) {
  const std::string state = SettingOf(trace, TraceSettings::kState);
  if (state != TraceSettings::kReplicated && state != TraceSettings::kSliced) {
    return Refused(name, absl::StrCat("the run has \"", state,
                                      "\", which the model does not cover; trace a run of train "
                                      "with --nozero or --shards=slices"));
  }
  const std::string sent = SettingOf(trace, TraceSettings::kSentAs);
  if (sent != "none") {
    return Refused(name, absl::StrCat("gradients are sent as ", sent,
                                      ", which the model does not cover; trace a run without "
                                      "--comm_hook"));
  }
  return absl::OkStatus();
}

// Adds a "bucket N" event. A bucket that was reduced at once has none.
absl::Status AddBucket(const std::string& name, const Json& event, Events& step) {
  constexpr int64_t kMostBuckets = 100000;
  int64_t number = 0;
  const std::string what = event["name"].get<std::string>();
  const int64_t bytes = event["args"]["bytes"].get<int64_t>();
  if (!absl::SimpleAtoi(absl::string_view(what).substr(kBucket.size()), &number) || number < 0 ||
      number >= kMostBuckets || bytes < 1)
    return Refused(name, absl::StrCat("\"", what, "\" of ", bytes, " bytes is no bucket"));
  if (step.buckets.size() <= static_cast<size_t>(number)) step.buckets.resize(number + 1);
  const double start = event["ts"].get<double>();
  step.buckets[number] = {.bytes = bytes,
                          .ready = start - event["args"]["waited_us"].get<double>(),
                          .start = start,
                          .reduced = start + event["dur"].get<double>()};
  return absl::OkStatus();
}

using StepsOfRanks = std::map<std::pair<int, int64_t>, Events>;  // By rank and step.

// A rank's events come in the order of its steps, the step before its parts.
absl::Status ReadEvents(const std::string& name, const Json& trace, StepsOfRanks& steps) {
  std::map<int, Events*> current;
  for (const Json& event : trace["traceEvents"]) {
    const std::string kind = event["ph"].get<std::string>();
    const std::string what = event["name"].get<std::string>();
    const int rank = event["pid"].get<int>();
    if (kind == "i" && what == "last gradient" && current[rank] != nullptr)
      current[rank]->last_gradient = event["ts"].get<double>();
    if (kind != "X") continue;
    if (absl::StartsWith(what, kBucket)) {
      EK_RETURN_IF_ERROR(
          AddBucket(name, event, steps[{rank, event["args"]["step"].get<int64_t>()}]));
      continue;
    }
    const double begin = event["ts"].get<double>(), took = event["dur"].get<double>();
    if (absl::StartsWith(what, "step ")) {
      if (event["args"]["clock"].get<std::string>() != "host") {
        return Refused(name,
                       "its steps are timed by a device's clock, which does not show the "
                       "buckets; trace a run on the CPU");
      }
      Events& step = steps[{rank, event["args"]["step"].get<int64_t>()}];
      step.begin = begin;
      step.end = begin + took;
      current[rank] = &step;
    } else if (current[rank] != nullptr) {
      current[rank]->parts[what] += took;
    }
  }
  return absl::OkStatus();
}

TracedStep StepOf(int rank, int64_t number, const Events& events) {
  const auto part = [&](const char* name) {
    const auto found = events.parts.find(name);
    return found == events.parts.end() ? 0 : 1e-6 * found->second;
  };
  const auto since = [&](double us) { return 1e-6 * (us - events.begin); };
  TracedStep step{.number = number,
                  .rank = rank,
                  .at = 1e-6 * events.begin,
                  .seconds = since(events.end),
                  .begin = part("begin"),
                  .compute = part("data") + part("forward") + part("backward"),
                  .wait = part("wait"),
                  .optimizer = part("optimizer"),
                  .last_gradient = since(events.last_gradient)};
  for (const TracedBucket& bucket : events.buckets) {
    step.buckets.push_back({.bytes = bucket.bytes,
                            .ready = since(bucket.ready),
                            .start = since(bucket.start),
                            .reduced = since(bucket.reduced)});
  }
  return step;
}

// Steps before the last plan have other buckets; steps that the rank shadowed have none.
void KeepStepsOfLastPlan(std::vector<TracedStep>& steps) {
  const auto bytes = [](const TracedStep& step) {
    std::vector<int64_t> all;
    for (const TracedBucket& bucket : step.buckets) all.push_back(bucket.bytes);
    return all;
  };
  std::map<std::vector<int64_t>, int> count;
  for (const TracedStep& step : steps) {
    if (!step.buckets.empty() &&
        std::ranges::none_of(step.buckets, [](const auto& b) { return b.bytes == 0; }))
      ++count[bytes(step)];
  }
  const auto most =
      std::ranges::max_element(count, {}, [](const auto& entry) { return entry.second; });
  std::erase_if(steps, [&](const TracedStep& step) {
    return most == count.end() || bytes(step) != most->first;
  });
}

absl::StatusOr<TracedRun> ReadRun(std::string name, const Json& trace) {
  EK_RETURN_IF_ERROR(CheckSettings(name, trace));
  TracedRun run{.name = std::move(name),
                .title = trace["otherData"]["title"].get<std::string>(),
                .backend = SettingOf(trace, TraceSettings::kBackend),
                .is_sliced = SettingOf(trace, TraceSettings::kState) == TraceSettings::kSliced};
  if (!absl::SimpleAtoi(SettingOf(trace, TraceSettings::kRanks), &run.ranks) || run.ranks < 1)
    return Refused(run.name, "it has no number of ranks");
  if (!absl::SimpleAtoi(SettingOf(trace, TraceSettings::kBufferBytes), &run.buffer_bytes))
    run.buffer_bytes = 0;
  StepsOfRanks steps;
  EK_RETURN_IF_ERROR(ReadEvents(run.name, trace, steps));
  for (const auto& [key, events] : steps) {
    if (events.end > events.begin)  // Otherwise the trace has only its buckets.
      run.steps.push_back(StepOf(key.first, key.second, events));
  }
  KeepStepsOfLastPlan(run.steps);
  if (run.steps.empty())
    return Refused(run.name, "it has no step with buckets; trace a run with more steps and ranks");
  return run;
}

}  // namespace

double TracedRun::MedianStep() const {
  std::vector<double> seconds;
  for (const TracedStep& step : steps) seconds.push_back(step.seconds);
  return MedianOf(seconds);
}

absl::StatusOr<TracedRun> ParseTrace(std::string name, absl::string_view text) {
  EK_ASSIGN_OR_RETURN(const Json trace, internal::ParseStrictJson(text, /*max_depth=*/16, name,
                                                                  internal::JsonRoot::kAny));
  if (!trace.is_object() || !trace.contains("traceEvents") || !trace.contains("otherData"))
    return Refused(name, "it is no trace; write one with train --trace=FILE.json");
  try {
    return ReadRun(name, trace);
  } catch (const Json::exception& error) {
    return Refused(name, absl::StrCat("it is no trace of train: ", error.what()));
  }
}

}  // namespace evenkeel
