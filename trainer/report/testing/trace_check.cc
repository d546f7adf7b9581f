#include "evenkeel/trainer/report/testing/trace_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using Thread = std::pair<int64_t, int64_t>;  // Process, thread.

struct Slice {
  int64_t begin = 0, end = 0;  // Nanoseconds.
};

// A time in microseconds as whole nanoseconds.
int64_t Nanos(const Json& value) { return std::llround(value.get<double>() * 1000); }

Thread ThreadOf(const Json& event) {
  return {event["pid"].get<int64_t>(), event["tid"].get<int64_t>()};
}

class Trace {
 public:
  std::string Check(absl::string_view text) {
    const Json trace = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
    if (!trace.is_object()) return "no JSON object";
    if (!trace.contains("traceEvents") || !trace["traceEvents"].is_array())
      return "no list of traceEvents";
    if (trace.value("displayTimeUnit", "ms") != "ms" &&
        trace.value("displayTimeUnit", "ms") != "ns") {
      return "another displayTimeUnit than ms and ns";
    }
    for (const Json& event : trace["traceEvents"]) {
      const std::string wrong = CheckEvent(event);
      if (!wrong.empty()) return absl::StrCat(wrong, ": ", event.dump());
    }
    for (auto& [thread, slices] : slices_) {
      if (!processes_.contains(thread.first))
        return absl::StrCat("process ", thread.first, " has no name");
      if (!threads_.contains(thread)) return absl::StrCat("thread ", thread.second, " has no name");
      if (const std::string wrong = CheckNesting(slices); !wrong.empty()) return wrong;
    }
    return CheckArrows();
  }

 private:
  std::string CheckEvent(const Json& event) {
    if (!event.is_object()) return "no object";
    if (!event.contains("ph") || !event["ph"].is_string()) return "no phase";
    if (!event.contains("name") || !event["name"].is_string()) return "no name";
    for (const char* field : {"pid", "tid"}) {
      if (!event.contains(field) || !event[field].is_number_integer())
        return absl::StrCat("no ", field);
    }
    if (event.contains("args") && !event["args"].is_object()) return "args are no object";
    const std::string phase = event["ph"];
    if (phase == "M") return CheckMetadata(event);
    if (!event.contains("ts") || !event["ts"].is_number() || event["ts"] < 0) return "no time";
    const Thread thread = ThreadOf(event);
    if (phase == "X") {
      if (!event.contains("dur") || !event["dur"].is_number() || event["dur"] < 0)
        return "no duration";
      const int64_t begin = Nanos(event["ts"]);
      slices_[thread].push_back({begin, begin + Nanos(event["dur"])});
      return "";
    }
    if (phase == "i") return event.value("s", "") == "t" ? "" : "an instant without scope";
    if (phase == "C") {
      const bool is_number =
          event.contains("args") && event["args"].size() == 1 && event["args"].front().is_number();
      return is_number ? "" : "a counter without a number";
    }
    if (phase == "s" || phase == "f") {
      if (!event.contains("id") || !event["id"].is_number_integer() || !event.contains("cat"))
        return "an arrow without id or category";
      auto& ends = phase == "s" ? from_ : to_;
      const bool is_new =
          ends.try_emplace(event["id"].get<int64_t>(), thread, Nanos(event["ts"])).second;
      return is_new ? "" : "an arrow's end twice";
    }
    return "a phase that is not known";
  }

  std::string CheckMetadata(const Json& event) {
    const std::string name = event["name"];
    if (!event.contains("args") || event["args"].size() != 1) return "metadata without its value";
    const Json& args = event["args"];
    if (name == "process_name" || name == "thread_name") {
      if (!args.contains("name") || !args["name"].is_string()) return "a name without a name";
      if (name == "process_name") processes_.insert(event["pid"].get<int64_t>());
      if (name == "thread_name") threads_.insert(ThreadOf(event));
      return "";
    }
    if (name == "process_sort_index" || name == "thread_sort_index") {
      return args.contains("sort_index") && args["sort_index"].is_number_integer()
                 ? ""
                 : "no sort_index";
    }
    return "metadata that is not known";
  }

  // Slices of a thread follow each other or lie in one another.
  static std::string CheckNesting(std::vector<Slice>& slices) {
    std::stable_sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    std::vector<Slice> open;
    for (const Slice& slice : slices) {
      while (!open.empty() && open.back().end <= slice.begin) open.pop_back();
      if (!open.empty() && slice.end > open.back().end) {
        return absl::StrCat("slices overlap: [", open.back().begin, ", ", open.back().end,
                            "] and [", slice.begin, ", ", slice.end, "] ns");
      }
      open.push_back(slice);
    }
    return "";
  }

  std::string CheckArrows() const {
    for (const auto& [id, from] : from_) {
      const auto to = to_.find(id);
      if (to == to_.end()) return absl::StrCat("arrow ", id, " has no end");
      if (to->second.second < from.second) return absl::StrCat("arrow ", id, " goes back in time");
      if (!IsInSlice(from) || !IsInSlice(to->second))
        return absl::StrCat("an end of arrow ", id, " is in no slice");
    }
    return to_.size() == from_.size() ? "" : "an arrow without a beginning";
  }

  bool IsInSlice(const std::pair<Thread, int64_t>& end) const {
    const auto slices = slices_.find(end.first);
    if (slices == slices_.end()) return false;
    return std::any_of(slices->second.begin(), slices->second.end(), [&](const Slice& slice) {
      return slice.begin <= end.second && end.second <= slice.end;
    });
  }

  std::set<int64_t> processes_;
  std::set<Thread> threads_;
  std::map<Thread, std::vector<Slice>> slices_;
  std::map<int64_t, std::pair<Thread, int64_t>> from_, to_;
};

}  // namespace

std::string CheckTrace(absl::string_view json) { return Trace().Check(json); }

}  // namespace evenkeel
