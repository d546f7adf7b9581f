#include "evenkeel/trainer/checkpoint/run_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/hex.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"

namespace evenkeel {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EpochPosition, epoch, step, samples)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Evaluation, predictions, correct, loss_sum)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BestTest, loss, step, latest, since)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunSettings, fixed, dealing, free)

namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "evenkeel training run";
constexpr int kVersion = 1;
constexpr int kMaxDepth = 4;

std::string Dump(const Json& json) {
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
}

std::string ChecksumOf(const Json& json) {
  return absl::StrCat(absl::Hex(StableHash(0, Dump(json)), absl::kZeroPad16));
}

Json ToJson(const RunState& state) {
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"steps", state.steps},
               {"at", state.at},
               {"world_size", state.world_size},
               {"plan_begin", state.plan_begin},
               {"bucket_plan", absl::BytesToHexString(state.bucket_plan)},
               {"trained", state.trained},
               {"settings", state.settings}};
  if (!state.loss_scale.empty()) {
    json["loss_scale"] = {{"state", absl::BytesToHexString(state.loss_scale)},
                          {"last_overflowed", state.last_overflowed ? 1U : 0U}};
  }
  if (state.best.latest > 0) json["best"] = state.best;
  Json& files = json["files"] = Json::object();
  for (const auto& [name, sums] : state.files)
    files[name] = {{"bytes", sums.bytes}, {"crc32", sums.Hex()}};
  return json;
}

// Returns true if all numbers but losses and their sums are from 0 to INT64_MAX.
bool HasValidNumbers(const Json& json) {
  return std::ranges::all_of(json.items(), [](const auto& item) {
    const Json& value = item.value();
    if (value.is_structured()) return HasValidNumbers(value);
    if (!value.is_number() || item.key() == "loss_sum" || item.key() == "loss") return true;
    return value.is_number_unsigned() && value.template get<uint64_t>() <= INT64_MAX;
  });
}

bool IsFileName(const std::string& name) {
  return name.find('/') == std::string::npos && name != ".." && name != "." && !name.empty();
}

// Reads the fields of `json`; throws Json::exception if one is missing or has a wrong type.
// Values that do not fit a field, such as texts that are not hexadecimal, become different ones.
RunState FromJson(const Json& json) {
  RunState state{.steps = json.at("steps"),
                 .at = json.at("at"),
                 .world_size = json.at("world_size"),
                 .plan_begin = json.at("plan_begin"),
                 .bucket_plan = internal::BytesFromHex(json.at("bucket_plan").get<std::string>()),
                 .trained = json.at("trained"),
                 .settings = json.at("settings")};
  if (json.contains("loss_scale")) {
    const Json& scale = json["loss_scale"];
    state.loss_scale = internal::BytesFromHex(scale.at("state").get<std::string>());
    state.last_overflowed = scale.at("last_overflowed").get<int>() == 1;
  }
  if (json.contains("best")) state.best = json["best"];
  for (const auto& [name, file] : json.at("files").items()) {
    if (!IsFileName(name)) continue;
    const absl::StatusOr<FileSums> sums =
        FileSums::FromHex(file.at("bytes").get<int64_t>(), file.at("crc32").get<std::string>());
    if (sums.ok()) state.files[name] = *sums;
  }
  return state;
}

}  // namespace

std::string RunState::Serialize() const {
  Json json = ToJson(*this);
  json["checksum"] = ChecksumOf(json);
  return Dump(json);
}

absl::StatusOr<RunState> RunState::Parse(absl::string_view text) {
  EK_ASSIGN_OR_RETURN(Json json, internal::ParseStrictJson(text, kMaxDepth, "the state of a run"));
  if (json.value("format", Json()) != kFormat || json.value("version", Json()) != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("not the state of a training run of version ", kVersion));
  }
  const Json checksum = json.value("checksum", Json());
  json.erase("checksum");
  RunState state{.world_size = 0};
  try {
    if (HasValidNumbers(json)) state = FromJson(json);
  } catch (const Json::exception&) {  // The state is as before.
  }
  if (state.world_size < 1 || state.trained.size() != static_cast<size_t>(state.world_size)) {
    return absl::InvalidArgumentError(
        "the state of a training run lacks a required field or has one of the wrong type");
  }
  // Also detects unexpected fields.
  if (checksum == ChecksumOf(json) && json == ToJson(state)) return state;
  return absl::InvalidArgumentError(
      "the state of a training run is damaged: its checksum does not match");
}

}  // namespace evenkeel
