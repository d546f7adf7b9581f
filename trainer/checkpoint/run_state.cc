#include "evenkeel/trainer/checkpoint/run_state.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/strict_json.h"

namespace evenkeel {
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

Json ToJson(const EpochPosition& at) { return {{"epoch", at.epoch}, {"step", at.step}, {"samples", at.samples}}; }

Json ToJson(const RunState& state) {
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"steps", state.steps},
               {"at", ToJson(state.at)},
               {"world_size", state.world_size},
               {"plan_begin", ToJson(state.plan_begin)},
               {"bucket_plan", absl::BytesToHexString(state.bucket_plan)}};
  Json& trained = json["trained"] = Json::array();
  for (const Evaluation& rank : state.trained) {
    trained.push_back({{"predictions", rank.predictions}, {"correct", rank.correct}, {"loss_sum", rank.loss_sum}});
  }
  if (!state.loss_scale.empty()) {
    json["loss_scale"] = {{"state", absl::BytesToHexString(state.loss_scale)},
                          {"last_overflowed", state.last_overflowed ? 1U : 0U}};
  }
  json["settings"] = {
      {"fixed", state.settings.fixed}, {"dealing", state.settings.dealing}, {"free", state.settings.free}};
  Json& files = json["files"] = Json::object();
  for (const auto& [name, sums] : state.files) files[name] = {{"bytes", sums.bytes}, {"crc32", sums.Hex()}};
  return json;
}

// ---- Reading: whatever is not there, or of another kind, makes `ok` false. ----

class Reader {
 public:
  Reader(const Json& json, bool& ok) : json_(json), ok_(ok) {}

  const Json& At(const char* name) const {
    static const Json kNothing;
    const auto found = json_.find(name);
    if (json_.is_object() && found != json_.end()) return *found;
    ok_ = false;
    return kNothing;
  }
  Reader In(const char* name) const { return {At(name), ok_}; }
  int64_t Number(const char* name, int64_t largest = INT64_MAX) const {
    const auto* number = At(name).get_ptr<const uint64_t*>();
    if (number != nullptr && *number <= static_cast<uint64_t>(largest)) return static_cast<int64_t>(*number);
    ok_ = false;
    return 0;
  }
  double Real(const char* name) const {
    const Json& value = At(name);
    if (value.is_number()) return value.get<double>();
    ok_ = false;
    return 0;
  }
  std::string Text(const char* name) const {
    const auto* text = At(name).get_ptr<const std::string*>();
    if (text != nullptr) return *text;
    ok_ = false;
    return "";
  }
  EpochPosition Position(const char* name) const {
    const Reader at = In(name);
    return {.epoch = static_cast<int>(at.Number("epoch", INT32_MAX)),
            .step = at.Number("step"),
            .samples = at.Number("samples")};
  }
  RunSettings::Values Texts(const char* name) const {
    RunSettings::Values values;
    const Json& object = At(name);
    if (!object.is_object()) ok_ = false;
    for (const auto& [key, value] : object.items()) {
      const auto* text = value.get_ptr<const std::string*>();
      if (text == nullptr) {
        ok_ = false;
        break;
      }
      values[key] = *text;
    }
    return values;
  }

 private:
  const Json& json_;
  bool& ok_;
};

bool IsHex(const std::string& text) {
  return text.size() % 2 == 0 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool ReadFiles(const Json& json, std::map<std::string, FileSums>& files) {
  if (!json.is_object()) return false;
  for (const auto& [name, entry] : json.items()) {
    bool ok = name.find('/') == std::string::npos && name != ".." && name != "." && !name.empty();
    const Reader reader(entry, ok);
    const int64_t bytes = reader.Number("bytes");
    absl::StatusOr<FileSums> sums = FileSums::FromHex(bytes, reader.Text("crc32"));
    if (!ok || !sums.ok()) return false;
    files[name] = *std::move(sums);
  }
  return true;
}

bool ReadTrained(const Json& json, std::vector<Evaluation>& trained) {
  if (!json.is_array()) return false;
  bool ok = true;
  for (const Json& entry : json) {
    const Reader rank(entry, ok);
    trained.push_back({.predictions = rank.Number("predictions"),
                       .correct = rank.Number("correct"),
                       .loss_sum = rank.Real("loss_sum")});
  }
  return ok;
}

}  // namespace

std::string RunState::Serialize() const {
  Json json = ToJson(*this);
  json["checksum"] = ChecksumOf(json);
  return Dump(json);
}

absl::StatusOr<RunState> RunState::Parse(absl::string_view text) {
  EK_ASSIGN_OR_RETURN(Json json, internal::ParseStrictJson(text, kMaxDepth, "the state of a run"));
  bool ok = true;
  const Reader all(json, ok);
  if (all.Text("format") != kFormat || all.Number("version") != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("this is not the state of a training run, version ", kVersion));
  }
  const std::string checksum = all.Text("checksum");
  RunState state{.steps = all.Number("steps"),
                 .at = all.Position("at"),
                 .world_size = static_cast<int>(all.Number("world_size", INT32_MAX)),
                 .plan_begin = all.Position("plan_begin")};
  const std::string plan = all.Text("bucket_plan");
  ok = ok && IsHex(plan);
  if (ok) state.bucket_plan = absl::HexStringToBytes(plan);
  if (json.contains("loss_scale")) {
    const Reader scale = all.In("loss_scale");
    const std::string hex = scale.Text("state");
    ok = ok && IsHex(hex);
    if (ok) state.loss_scale = absl::HexStringToBytes(hex);
    state.last_overflowed = scale.Number("last_overflowed", 1) == 1;
  }
  const Reader settings = all.In("settings");
  state.settings = {
      .fixed = settings.Texts("fixed"), .dealing = settings.Texts("dealing"), .free = settings.Texts("free")};
  ok = ReadTrained(all.At("trained"), state.trained) && ok;
  ok = ReadFiles(all.At("files"), state.files) && ok;
  if (!ok || state.world_size < 1 || state.trained.size() != static_cast<size_t>(state.world_size)) {
    return absl::InvalidArgumentError("the state of a training run lacks something, or it is of another kind");
  }
  // Also finds what is there and should not be.
  json.erase("checksum");
  if (checksum == ChecksumOf(json) && json == ToJson(state)) return state;
  return absl::InvalidArgumentError("the state of a training run is damaged: its checksum is another one");
}

}  // namespace evenkeel
