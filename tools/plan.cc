// Shows into which buckets parameters would be put.
//
//   echo '{"params":[{"numel":100,"dtype":"float32"},{"numel":50,"dtype":"float32"}],"caps":[400]}'
//   |
//     bazel run //tools:plan
//   {"buckets":[[0],[1]],"limits":[400,400]}
//
// Reads a description of the parameters, asks the planner, prints the plan; or refuses the input
// with one sentence.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/tools/program.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr char kUsage[] = R"(plan: shows into which buckets parameters would be put.

  plan [FILE]        FILE, or standard input without one, holds JSON:

  {"params": [{"name": "w", "numel": 100, "dtype": "float32", "device": "cpu", "sparse": false}, ...],
   "caps":   [1048576, 26214400],
   "order":  [1, 0]}

  numel    elements of the parameter
  dtype    float32, float64, float16, bfloat16, int8, uint8, int16, int32 or int64
  device   "cpu" if left out; only parameters of one dtype and device share a bucket
  sparse   true: its gradient is sparse, so it gets a bucket of its own
  caps     bytes at which the first, second, ... bucket of a dtype and device closes; the last one stays. 0: one
           parameter per bucket
  order    parameters in the order in which their gradients become ready, by index or by name; those left out are not
           planned. Left out or empty: all, by index

It prints {"buckets": [[...], ...], "limits": [...]}: indices of parameters per bucket, and the cap in force for each
(0: none, a sparse one). What is still open at the end comes last, by first index.
)";

constexpr size_t kMaxShownBytes = 60;

// A value as a message shows it: on one line, and not all of a long one.
std::string Shown(const Json& value) {
  if (value.is_array()) return absl::StrCat("a list of ", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kMaxShownBytes) text = absl::StrCat(text.substr(0, kMaxShownBytes), "...");
  return text;
}

absl::Status Wanted(absl::string_view where, const Json& value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat(where, " is ", Shown(value), ", not ", wanted));
}

absl::StatusOr<int64_t> WholeNumber(const Json& value, absl::string_view where) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  if (!value.is_number_unsigned() || value.get<uint64_t>() > kMax) {
    return Wanted(where, value, absl::StrCat("a whole number from 0 to ", kMax));
  }
  return static_cast<int64_t>(value.get<uint64_t>());
}

// An unknown key is a misspelt one.
absl::Status CheckKeys(const Json& object, absl::string_view where,
                       std::initializer_list<absl::string_view> required,
                       std::initializer_list<absl::string_view> optional) {
  for (absl::string_view key : required) {
    if (object.contains(std::string(key))) continue;
    return absl::InvalidArgumentError(absl::StrCat(where, " has no \"", key, "\""));
  }
  for (const auto& [key, value] : object.items()) {
    if (absl::c_linear_search(required, key) || absl::c_linear_search(optional, key)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        where, " has an unknown key ", Shown(key), "; known are ", absl::StrJoin(required, ", "),
        optional.size() > 0 ? ", " : "", absl::StrJoin(optional, ", ")));
  }
  return absl::OkStatus();
}

absl::StatusOr<DType> ReadDType(const Json& value, absl::string_view where) {
  if (value.is_string()) {
    const absl::StatusOr<DType> dtype = DTypeFromString(value.get_ref<const std::string&>());
    if (dtype.ok()) return dtype;
  }
  auto append_name = [](std::string* out, DType dtype) { absl::StrAppend(out, ToString(dtype)); };
  return Wanted(where, value,
                absl::StrCat("one of ", absl::StrJoin(kAllDTypes, ", ", append_name)));
}

// "cpu", "cuda:1", "meta": a word, and maybe a colon and a number.
bool IsDeviceName(absl::string_view name) {
  const size_t colon = name.find(':');
  const absl::string_view word = name.substr(0, colon);
  if (word.empty() || !absl::c_all_of(word, absl::ascii_islower)) return false;
  if (colon == absl::string_view::npos) return true;
  const absl::string_view number = name.substr(colon + 1);
  return !number.empty() && absl::c_all_of(number, absl::ascii_isdigit);
}

// The planner only distinguishes devices, so that any name is allowed: each new one becomes the
// next device.
class Devices {
 public:
  absl::StatusOr<Device> Of(const Json& value, absl::string_view where) {
    if (!value.is_string() || !IsDeviceName(value.get_ref<const std::string&>())) {
      return Wanted(where, value, "a device such as \"cpu\" or \"cuda:0\"");
    }
    const auto [named, is_new] = devices_.try_emplace(value.get<std::string>());
    if (!is_new) return named->second;
    const int index = static_cast<int>(devices_.size()) - 2;  // "cpu" and the new one are in it.
    if (index > std::numeric_limits<int16_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, " exceeds the number of devices that are supported, ", index));
    }
    return named->second = Device::Cuda(index);
  }

 private:
  std::map<std::string, Device> devices_ = {{"cpu", Device::Cpu()}};
};

absl::StatusOr<ParamSpec> ReadParam(const Json& value, absl::string_view where, Devices* devices) {
  if (!value.is_object()) return Wanted(where, value, "an object with \"numel\" and \"dtype\"");
  EK_RETURN_IF_ERROR(CheckKeys(value, where, {"numel", "dtype"}, {"name", "device", "sparse"}));
  ParamSpec param;
  EK_ASSIGN_OR_RETURN(param.count, WholeNumber(value["numel"], absl::StrCat(where, ".numel")));
  EK_ASSIGN_OR_RETURN(param.dtype, ReadDType(value["dtype"], absl::StrCat(where, ".dtype")));
  if (value.contains("device")) {
    EK_ASSIGN_OR_RETURN(param.device, devices->Of(value["device"], absl::StrCat(where, ".device")));
  }
  if (value.contains("sparse")) {
    const Json& sparse = value["sparse"];
    if (!sparse.is_boolean())
      return Wanted(absl::StrCat(where, ".sparse"), sparse, "true or false");
    param.sparse = sparse.get<bool>();
  }
  if (value.contains("name") && !value["name"].is_string()) {
    return Wanted(absl::StrCat(where, ".name"), value["name"], "a text");
  }
  return param;
}

absl::StatusOr<std::vector<ParamSpec>> ReadParams(const Json& value) {
  if (!value.is_array() || value.empty())
    return Wanted("\"params\"", value, "a list of one or more parameters");
  Devices devices;
  std::vector<ParamSpec> params;
  for (const Json& entry : value) {
    EK_ASSIGN_OR_RETURN(ParamSpec param,
                        ReadParam(entry, absl::StrCat("params[", params.size(), "]"), &devices));
    params.push_back(param);
  }
  return params;
}

absl::StatusOr<std::vector<Bytes>> ReadCaps(const Json& value) {
  if (!value.is_array() || value.empty())
    return Wanted("\"caps\"", value, "a list of one or more numbers of bytes");
  std::vector<Bytes> caps;
  for (const Json& entry : value) {
    EK_ASSIGN_OR_RETURN(const int64_t bytes,
                        WholeNumber(entry, absl::StrCat("caps[", caps.size(), "]")));
    caps.push_back(Bytes{bytes});
  }
  return caps;
}

// Returns the indices of the parameters by name; several for a name that is not unique.
std::multimap<std::string, int> IndicesByName(const Json& params) {
  std::multimap<std::string, int> indices;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].contains("name"))
      indices.emplace(params[i]["name"].get<std::string>(), static_cast<int>(i));
  }
  return indices;
}

absl::StatusOr<int> ReadNamed(const Json& value, absl::string_view where,
                              const std::multimap<std::string, int>& indices) {
  const auto [first, last] = indices.equal_range(value.get_ref<const std::string&>());
  if (first == last) return Wanted(where, value, "the name of a parameter");
  if (std::next(first) != last) {
    return absl::InvalidArgumentError(absl::StrCat(where, " is ", Shown(value),
                                                   ", the name of parameters ", first->second,
                                                   " and ", std::next(first)->second));
  }
  return first->second;
}

absl::StatusOr<std::vector<int>> ReadOrder(const Json& value, const Json& params) {
  if (!value.is_array()) return Wanted("\"order\"", value, "a list of parameters");
  std::multimap<std::string, int> indices;  // Made for the first name.
  std::vector<int> order;
  for (const Json& entry : value) {
    const std::string where = absl::StrCat("order[", order.size(), "]");
    if (entry.is_string()) {
      if (indices.empty()) indices = IndicesByName(params);
      EK_ASSIGN_OR_RETURN(const int index, ReadNamed(entry, where, indices));
      order.push_back(index);
    } else if (!entry.is_number_unsigned() || entry.get<uint64_t>() >= params.size()) {
      return Wanted(
          where, entry,
          absl::StrCat("a parameter's index from 0 to ", params.size() - 1, " or its name"));
    } else {
      order.push_back(static_cast<int>(entry.get<uint64_t>()));
    }
  }
  return order;
}

absl::StatusOr<BucketPlan> PlanFromJson(absl::string_view text) {
  EK_ASSIGN_OR_RETURN(const Json json, internal::ParseStrictJson(text, /*max_depth=*/8, "the input",
                                                                 internal::JsonRoot::kAny));
  if (!json.is_object()) return Wanted("the input", json, "an object with \"params\" and \"caps\"");
  EK_RETURN_IF_ERROR(CheckKeys(json, "the input", {"params", "caps"}, {"order"}));
  EK_ASSIGN_OR_RETURN(const std::vector<ParamSpec> params, ReadParams(json["params"]));
  PlanOptions options;
  EK_ASSIGN_OR_RETURN(options.caps, ReadCaps(json["caps"]));
  if (json.contains("order")) {
    EK_ASSIGN_OR_RETURN(options.order, ReadOrder(json["order"], json["params"]));
  }
  return PlanBuckets(params, options);
}

std::string ToJson(const BucketPlan& plan) {
  auto append_bucket = [](std::string* out, const std::vector<int>& bucket) {
    absl::StrAppend(out, "[", absl::StrJoin(bucket, ","), "]");
  };
  auto append_limit = [](std::string* out, Bytes limit) { absl::StrAppend(out, limit.value); };
  return absl::StrCat("{\"buckets\":[", absl::StrJoin(plan.buckets, ",", append_bucket),
                      "],\"limits\":[", absl::StrJoin(plan.limits, ",", append_limit), "]}\n");
}

absl::StatusOr<BucketPlan> PlanFromFile(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const std::string text, ReadInput(path));
  return PlanFromJson(text);
}

absl::StatusOr<int> Run(const std::vector<std::string>& args) {
  if (absl::c_linear_search(args, "--help")) {
    EK_RETURN_IF_ERROR(Print(kUsage));
    return EXIT_SUCCESS;
  }
  const bool is_flag = !args.empty() && args[0] != "-" && absl::StartsWith(args[0], "-");
  if (args.size() > 1 || is_flag)
    return absl::InvalidArgumentError("expects at most one file and no flag except --help");
  const std::string path = args.empty() || args[0] == "-" ? "" : args[0];
  EK_RETURN_IF_ERROR(EnterUserFolder());
  EK_ASSIGN_OR_RETURN(const BucketPlan plan,
                      Annotate(PlanFromFile(path), path.empty() ? "standard input" : path));
  EK_RETURN_IF_ERROR(Print(ToJson(plan)));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Run({argv + 1, argv + argc}); });
}
