#include "evenkeel/tests/campaign/job.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/report/sample_log.h"

namespace evenkeel {
namespace {

constexpr char kSecret[] = "00112233445566778899aabbccddeeff";
constexpr absl::Duration kLook = absl::Milliseconds(1);

}  // namespace

std::vector<std::string> Tail::Next() {
  std::ifstream file(path_, std::ios::binary);
  file.seekg(offset_);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  const std::string all = text.str();
  const size_t size = all.rfind('\n') + 1;  // npos + 1 is 0.
  offset_ += static_cast<int64_t>(size);
  return absl::StrSplit(absl::string_view(all).substr(0, size), '\n', absl::SkipEmpty());
}

Job::Job(const JobOptions& options)
    : options_(options), places_(options.ranks), metrics_(options.folder + "/metrics.jsonl") {}

absl::StatusOr<std::unique_ptr<Job>> Job::Start(const JobOptions& options) {
  std::error_code ignored;
  std::filesystem::remove_all(options.folder, ignored);
  std::filesystem::create_directory(options.folder, ignored);
  std::unique_ptr<Job> job(new Job(options));
  TcpStoreServerOptions store{.secret = kSecret, .world_size = options.ranks};
  if (options.hosts != nullptr) store.address = options.hosts->AddressOf(0) + ":0";
  store.on_group = [job = job.get()](const std::string& group, int, const absl::Status& status) {
    if (group != "world" && !absl::StartsWith(group, "world+")) return;
    absl::MutexLock lock(&job->mutex_);
    int& newest = status.ok() ? job->made_ : job->ended_;
    newest = std::max(newest, GroupNumber(group));
  };
  EK_ASSIGN_OR_RETURN(job->server_, TcpStoreServer::Create(store));
  for (int place = 0; place < options.ranks; ++place) EK_RETURN_IF_ERROR(job->StartPlace(place));
  return job;
}

absl::Status Job::StartPlace(int place) {
  Place& its = places_[place];
  std::vector<std::string> command = {options_.train,
                                      "--metrics=" + options_.folder + "/metrics.jsonl",
                                      "--sample_log=" + SampleLog(), "--save=" + Saved()};
  command.insert(command.end(), options_.flags.begin(), options_.flags.end());
  Variables variables = RankVariables(place, options_.ranks, server_->address(), kSecret);
  variables["OMP_NUM_THREADS"] = "1";
  if (options_.hosts != nullptr) {
    const std::vector<int>& all = options_.host_of;
    const int host = all[place];
    command = options_.hosts->CommandOn(host, std::move(command));
    variables["LOCAL_RANK"] = absl::StrCat(std::count(all.begin(), all.begin() + place, host));
    variables["LOCAL_WORLD_SIZE"] = absl::StrCat(std::ranges::count(all, host));
    variables["EVENKEEL_HOST_PARTS"] = "1";
    variables["EVENKEEL_ADDRESS"] = options_.hosts->AddressOf(host);
  }
  ++its.incarnation;
  if (its.incarnation > 0) variables["EVENKEEL_NEWCOMER"] = absl::StrCat(its.incarnation);
  its.child = children_.count();
  its.group = -1;
  its.is_killed = its.is_due = false;
  its.started = absl::Now();
  its.samples = std::make_unique<Tail>(
      absl::StrCat(SampleLog(), "/attempt0-rank", place, "-", its.incarnation, kSampleLogSuffix));
  return children_.Start(command, variables);
}

bool Job::Listen(absl::Time deadline, absl::FunctionRef<bool()> is_met) {
  while (true) {
    FollowProcesses();
    FollowFiles();
    if (is_met()) return true;
    const absl::Time now = absl::Now();
    if (now >= deadline || is_over()) return false;
    children_.Listen(std::min(deadline, now + kLook), [](int, absl::string_view) {});
  }
}

void Job::FollowProcesses() {
  for (int place = 0; place < options_.ranks; ++place) {
    Place& its = places_[place];
    if (its.child >= 0 && !children_.is_running(its.child)) {
      const int code = children_.exit_code(its.child);
      if (code == 0) ++ended_well_;
      if (code != 0 && !its.is_killed && (its.group >= 0 || ended_well_ == 0)) {
        failures_.push_back(absl::StrCat("rank ", place, "+", its.incarnation, " ended with code ",
                                         code, ": ", children_.complaints(its.child)));
      }
      its.is_due = its.is_killed && options_.replaces;
      its.start_at = absl::Now() + pause_;
      its.child = -1;
      its.group = -1;
    }
    if (ended_well_ > 0) its.is_due = false;
    if (!its.is_due || absl::Now() < its.start_at) continue;
    if (const absl::Status started = StartPlace(place); !started.ok())
      failures_.push_back(started.ToString());
  }
}

void Job::FollowFiles() {
  for (Place& place : places_) {
    if (place.samples == nullptr) continue;
    for (const std::string& line : place.samples->Next()) {
      absl::string_view rest = line;
      int64_t step = 0;
      if (absl::ConsumePrefix(&rest, "{\"step\":") &&
          absl::SimpleAtoi(rest.substr(0, rest.find(',')), &step)) {
        steps_ = std::max(steps_, step);
      } else if (absl::StartsWith(line, "{\"attempt\"") && place.child >= 0) {
        place.group = nlohmann::json::parse(line).at("group").get<int>();
      }
    }
  }
  for (const std::string& line : metrics_.Next()) {
    nlohmann::json event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!event.is_object()) continue;
    const std::string kind = event.at("event");
    if (kind == "step") {
      reported_ = event.at("step").get<int64_t>();
      if (event.at("active").get<int>() < options_.ranks) uneven_.insert(reported_);
      is_evaluated_ = false;
    }
    if (kind == "evaluation" || kind == "epoch") {
      evaluated_.insert(reported_);
      is_evaluated_ = true;
    }
    NoteLine(kind, std::move(event));
  }
}

void Job::NoteLine(const std::string& kind, nlohmann::json event) {
  std::string name = kind;
  if (kind == "step" || kind == "evaluation" || kind == "epoch") {
    const char* const number = kind == "epoch" ? "epoch" : "step";
    absl::StrAppend(&name, " ", event.at(number).get<int64_t>());
  } else if (kind != "test") {
    return;
  }
  for (const char* const field : {"seconds", "step_ms", "exposed_ms", "samples_per_second",
                                  "tokens_per_second", "ranks_lost"})
    event.erase(field);
  nlohmann::json& known = lines_.try_emplace(name, event).first->second;
  if (known != event && options_.replaces) {
    failures_.push_back(
        absl::StrCat("the metrics have two lines: ", known.dump(), " and ", event.dump()));
  }
  known = std::move(event);
}

Job::State Job::state() {
  absl::MutexLock lock(&mutex_);
  if (made_ < 0) return State::kStarting;
  if (std::max(lost_in_, ended_) >= made_) return State::kGathering;
  const bool all_train = std::ranges::all_of(places_, [this](const Place& place) {
    mutex_.AssertHeld();
    return place.group == made_ || (place.child < 0 && !place.is_due);
  });
  if (!all_train) return made_ == 0 ? State::kStarting : State::kMoving;
  // The steps of fewer ranks are others.
  if (made_ > 0 && !options_.replaces) return State::kTraining;
  if (options_.evaluated.contains(reported_) && !is_evaluated_) return State::kEvaluating;
  const bool is_in_step = reported_ < steps_;
  return is_in_step && options_.uneven.contains(steps_) ? State::kUnevenStep : State::kTraining;
}

bool Job::is_running(int place) const {
  return places_[place].child >= 0 && !places_[place].is_killed;
}

bool Job::has_state(int place) const { return is_running(place) && places_[place].group >= 0; }

bool Job::MayKill(const std::vector<int>& places) const {
  bool another = false;
  for (int place = 0; place < options_.ranks; ++place)
    another = another || (has_state(place) && std::ranges::count(places, place) == 0);
  return another && std::ranges::all_of(places, [this](int place) { return is_running(place); });
}

void Job::Kill(int place) {
  places_[place].is_killed = true;
  children_.Kill(places_[place].child);
  absl::MutexLock lock(&mutex_);
  lost_in_ = made_;
}

bool Job::is_over() const {
  const bool trains = std::ranges::any_of(places_, [this](const Place& place) {
    return place.is_due || (place.child >= 0 && (ended_well_ == 0 || place.group >= 0));
  });
  return !trains;
}

absl::Status Job::status() const {
  return failures_.empty() ? absl::OkStatus() : absl::InternalError(absl::StrJoin(failures_, "\n"));
}

std::string Job::Complaints() const {
  std::string text;
  for (int child = 0; child < children_.count(); ++child) {
    absl::StrAppend(&text, "process ", child, ", exit code ", children_.exit_code(child), ": ",
                    children_.complaints(child), "\n");
  }
  return text;
}

}  // namespace evenkeel
