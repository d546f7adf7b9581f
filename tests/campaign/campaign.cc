#include "evenkeel/tests/campaign/campaign.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/tests/campaign/hosts.h"
#include "evenkeel/tests/campaign/job.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/trainer/report/sample_account.h"

namespace evenkeel {
namespace {

constexpr int kRanks = 4;
constexpr int kEvalEvery = 7;
constexpr int kMostKills = 300;  // In a run.
const std::vector<int> kHostOf = {0, 0, 1, 1};
// Ends a run that hangs. A recovery takes less than a second, and there are some 50 in a run.
constexpr absl::Duration kLongestRun = absl::Minutes(5);
constexpr absl::Duration kLongestRecovery = absl::Minutes(1);
// A newcomer is prepared and moved within such times, on a busy machine.
constexpr absl::Duration kStartSpread = absl::Milliseconds(90);
constexpr absl::Duration kMoveSpread = absl::Milliseconds(12);

constexpr KillPhase kPhases[] = {KillPhase::kStep,          KillPhase::kUnevenStep,
                                 KillPhase::kEvaluation,    KillPhase::kRecovery,
                                 KillPhase::kNewcomerStart, KillPhase::kTransfer};

// The result of a run, as far as it must not depend on lost ranks.
struct End {
  std::map<std::string, nlohmann::json> metrics;
  std::string weights;  // With the buffers.
  std::vector<SampleGroup> groups;
  std::set<int64_t> evaluated, uneven;  // See JobOptions.
};

class Campaign {
 public:
  explicit Campaign(const CampaignOptions& options) : options_(options), random_(options.seed) {}

  absl::StatusOr<CampaignResult> Run() {
    if (options_.backend == "hierarchical") {
      EK_ASSIGN_OR_RETURN(hosts_, HostNetwork::Make(options_.network));
    }
    WriteData();
    JobOptions undisturbed = OptionsOfRun("undisturbed");
    undisturbed.flags.push_back(OnFailure());
    EK_ASSIGN_OR_RETURN(expected_, Undisturbed(undisturbed));
    while (result_.runs < options_.runs || result_.kills < options_.kills)
      EK_RETURN_IF_ERROR(RunOnce());
    return result_;
  }

 private:
  using State = Job::State;

  // Each epoch ends with a step in which not all ranks have samples.
  void WriteData() const {
    if (options_.model != "gpt") {
      WriteSmallData(DataName(),
                     {.train = 20 * kRanks * 4 + 6, .test = options_.model == "cnn" ? 60 : 3000});
      return;
    }
    std::string text;
    for (int i = 0; text.size() < 83'700; ++i)
      absl::StrAppend(&text, "the ", i * i % 97, "th ship sails. ");
    WriteText(TempPath(DataName()), text);
  }
  std::string DataName() const { return options_.model + "-data"; }

  std::vector<std::string> FlagsOfModel() const {
    if (options_.model == "gpt") {
      return {"--preset=tiny", "--context=64", "--batch_size=8",
              absl::StrCat("--epochs=", options_.is_short ? 2 : 7)};
    }
    if (options_.model == "cnn") {
      return {"--widths=8,16", "--batch_size=4",
              absl::StrCat("--epochs=", options_.is_short ? 5 : 14)};
    }
    return {"--batch_size=4", absl::StrCat("--epochs=", options_.is_short ? 6 : 24)};
  }

  JobOptions OptionsOfRun(const std::string& name) const {
    JobOptions job{.train = options_.train,
                   .flags = {"--model=" + options_.model, "--data=" + TempPath(DataName()),
                             "--device=cpu", "--backend=" + options_.backend, "--nozero",
                             absl::StrCat("--eval_every=", kEvalEvery)},
                   .folder = absl::StrCat(options_.folder, "/", options_.model, "-",
                                          options_.backend, "-", name),
                   .ranks = kRanks,
                   .hosts = hosts_.get(),
                   .host_of = kHostOf,
                   .evaluated = expected_.evaluated,
                   .uneven = expected_.uneven};
    const std::vector<std::string> of_model = FlagsOfModel();
    job.flags.insert(job.flags.end(), of_model.begin(), of_model.end());
    return job;
  }
  bool replaces() const { return options_.play == CampaignOptions::Play::kReplace; }
  std::string OnFailure() const {
    return replaces() ? "--on_failure=replace" : "--on_failure=continue";
  }

  static absl::StatusOr<End> Undisturbed(const JobOptions& options) {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Start(options));
    job->Listen(absl::Now() + kLongestRun, [] { return false; });
    return EndOf(*job, /*has_all_samples=*/false);
  }

  // Returns the end of a run, or the reason why it is wrong in itself.
  static absl::StatusOr<End> EndOf(Job& job, bool has_all_samples = true) {
    if (!job.is_over()) return absl::DeadlineExceededError("it hangs");
    EK_RETURN_IF_ERROR(job.status());
    if (!job.metrics().contains("test")) return absl::InternalError("it has not reported its end");
    End end{.metrics = job.metrics(), .evaluated = job.evaluated(), .uneven = job.uneven()};
    EK_ASSIGN_OR_RETURN(end.weights, ReadFile(job.Saved()));
    EK_ASSIGN_OR_RETURN(const SampleAccount account, ReadSampleLogs(job.SampleLog()));
    if (!account.is_once(/*may_miss=*/!has_all_samples) || !account.has_ended)
      return absl::InternalError(absl::StrCat("the samples: ", Describe(account)));
    for (const auto& [key, group] : account.groups) end.groups.push_back(group);
    return end;
  }

  // Returns the end of undisturbed runs with the ranks of these groups, one after the other.
  absl::StatusOr<End> Replay(std::vector<SampleGroup> groups) const {
    // Groups may begin with the same step: the last one has made it.
    for (size_t i = 0; i + 1 < groups.size();) {
      if (groups[i].from == groups[i + 1].from) {
        groups.erase(groups.begin() + static_cast<int64_t>(i));
      } else {
        ++i;
      }
    }
    End end;
    std::string resumed;
    for (size_t i = 0; i < groups.size(); ++i) {
      JobOptions options = OptionsOfRun(absl::StrCat("group", i));
      options.ranks = static_cast<int>(groups[i].ranks.size());
      options.host_of.clear();
      for (const int rank : groups[i].ranks) options.host_of.push_back(kHostOf[rank]);
      if (!resumed.empty()) options.flags.push_back("--resume=" + resumed);
      if (i + 1 < groups.size()) {
        const int64_t next = groups[i + 1].from;
        const std::string checkpoints = options.folder + "/checkpoints";
        options.flags.insert(options.flags.end(), {"--checkpoint_dir=" + checkpoints, "--keep=0",
                                                   absl::StrCat("--checkpoint_every=", next)});
        resumed = absl::StrFormat("%s/step-%09d", checkpoints, next);
      }
      EK_ASSIGN_OR_RETURN(end, Undisturbed(options));
    }
    return end;
  }

  absl::Status Compare(Job& job) const {
    EK_ASSIGN_OR_RETURN(End end, EndOf(job));
    if (replaces()) return CompareEnds(end, expected_);
    EK_ASSIGN_OR_RETURN(End replayed, Replay(end.groups));
    for (End* const one : {&end, &replayed}) {
      nlohmann::json test = one->metrics.at("test");
      test.erase("ranks");
      if (options_.model == "cnn") {  // Each rank has buffers of its own, which are lost with it.
        test = test.at("state_hash");
        one->weights.clear();
      }
      one->metrics = {{"test", test}};
    }
    return Annotate(CompareEnds(end, replayed), absl::StrCat(end.groups.size(), " groups"));
  }

  // Rank 0's own numbers are null where another one reports for it, because it was lost then.
  static bool IsSame(const nlohmann::json& line, const nlohmann::json& expected) {
    if (line == expected) return true;
    const bool is_for_another = line.is_object() && line.contains("loss") && line["loss"].is_null();
    return is_for_another && std::ranges::all_of(line.items(), [&](const auto& field) {
             return field.value().is_null() ||
                    field.value() == expected.value(field.key(), nlohmann::json());
           });
  }

  // A rank 0 that is lost after a step or an evaluation may not have reported it.
  static absl::Status CompareEnds(const End& end, const End& expected) {
    for (const auto& [name, line] : end.metrics) {
      const auto found = expected.metrics.find(name);
      const bool is_known = found != expected.metrics.end();
      if (is_known && IsSame(line, found->second)) continue;
      return absl::InternalError(absl::StrCat("the metrics are ", line.dump(), ", expected ",
                                              is_known ? found->second.dump() : "none"));
    }
    if (end.weights != expected.weights)
      return absl::InternalError("the saved weights or buffers differ");
    return absl::OkStatus();
  }

  absl::Status RunOnce() {
    JobOptions options = OptionsOfRun(absl::StrCat("run", result_.runs));
    options.replaces = replaces();
    options.flags.push_back(OnFailure());
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Start(options));
    const absl::Time deadline = absl::Now() + kLongestRun;
    const int before = result_.kills;
    absl::Status status = Disturb(*job, deadline);
    if (status.ok()) {
      job->Listen(deadline, [] { return false; });
      status = Compare(*job);
    }
    ++result_.runs;
    result_.wrong += !status.ok() && !absl::IsDeadlineExceeded(status);
    result_.hangs += absl::IsDeadlineExceeded(status);
    if (status.ok()) {
      std::error_code ignored;
      std::filesystem::remove_all(options.folder, ignored);
      return absl::OkStatus();
    }
    absl::FPrintF(options_.log, "%s %s: after %d kills in %s: %s\n%s", options_.model,
                  options_.backend, result_.kills - before, options.folder, status.ToString(),
                  job->Complaints());
    std::fflush(options_.log);
    return absl::OkStatus();
  }

  // Kills ranks until the run begins to end. Returns DeadlineExceeded if it hangs.
  absl::Status Disturb(Job& job, absl::Time deadline) {
    job.Listen(deadline, [&] { return job.ends() || Trains(job); });
    const int most = result_.kills + (options_.is_short ? 15 : kMostKills);
    while (!job.ends() && result_.kills < most) {
      AwaitMoment(job, deadline);
      if (job.ends()) return absl::OkStatus();
      job.SetPause(Below(3) == 0 ? Spread(kStartSpread) : absl::ZeroDuration());
      const absl::Time begin = absl::Now();
      KillSome(job, Below(5) == 0 ? 2 : 1, /*newcomer=*/false);
      for (int64_t more = Below(3); more > 0 && !job.ends(); --more) KillMore(job);
      const absl::Time limit = std::min(deadline, absl::Now() + kLongestRecovery);
      const bool trains = job.Listen(limit, [&] { return job.ends() || Trains(job); });
      if (!trains && !job.is_over())
        return absl::DeadlineExceededError("the ranks do not train again");
      if (!job.ends()) result_.slowest = std::max(result_.slowest, absl::Now() - begin);
    }
    return absl::OkStatus();
  }

  static bool Trains(Job& job) {
    return job.state() == State::kTraining || job.state() == State::kUnevenStep ||
           job.state() == State::kEvaluating;
  }

  // Waits for an evaluation, an uneven step, or some steps.
  void AwaitMoment(Job& job, absl::Time deadline) {
    const int64_t kind = Below(6);
    const int64_t steps = job.steps() + 1 + Below(7);
    job.Listen(deadline, [&] {
      // A busy machine may miss a short one.
      if (job.ends() || job.steps() >= steps + 12) return true;
      return kind < 2    ? job.state() == State::kEvaluating
             : kind == 2 ? job.state() == State::kUnevenStep
                         : job.steps() >= steps;
    });
    if (kind > 2) Listen(job, Spread(absl::Milliseconds(5)));
  }

  // Kills another process before all ranks train again.
  void KillMore(Job& job) {
    const absl::Time soon = absl::Now() + absl::Seconds(10);
    const auto trains = [&job] { return job.ends() || Trains(job); };
    switch (replaces() ? Below(3) : 0) {
      case 0:  // A survivor, before the next group is made.
        Listen(job, Spread(Below(2) == 0 ? absl::Milliseconds(2) : kStartSpread));
        return KillSome(job, 1, /*newcomer=*/false);
      case 1:  // A newcomer, as it starts.
        job.Listen(soon, [&] { return trains() || NewcomerOf(job) >= 0; });
        Listen(job, Spread(kStartSpread));
        return KillSome(job, 1, /*newcomer=*/true);
      default:  // Anyone, while the state moves.
        job.Listen(soon, [&] { return trains() || job.state() == State::kMoving; });
        Listen(job, Spread(kMoveSpread));
        return KillSome(job, 1, /*newcomer=*/Below(2) == 0);
    }
  }

  // Returns a place whose process has no state yet; -1: none.
  static int NewcomerOf(const Job& job) {
    for (int place = 0; place < kRanks; ++place) {
      if (job.is_running(place) && !job.has_state(place)) return place;
    }
    return -1;
  }

  void KillSome(Job& job, int count, bool newcomer) {
    if (job.ends()) return;
    std::vector<int> victims(kRanks);
    for (int place = 0; place < kRanks; ++place) victims[place] = place;
    std::ranges::shuffle(victims, random_);
    if (newcomer)
      std::ranges::stable_partition(victims, [&](int place) { return !job.has_state(place); });
    std::erase_if(victims, [&](int place) { return !job.is_running(place); });
    victims.resize(std::min<size_t>(victims.size(), count));
    if (victims.empty() || !job.MayKill(victims)) return;
    const State state = job.state();
    for (const int place : victims) {
      ++result_.by_phase[PhaseOf(state, job.has_state(place))];
      ++result_.kills;
      result_.of_rank_zero += place == 0;
      result_.of_two_at_once += victims.size() == 2;
      job.Kill(place);
    }
  }

  static KillPhase PhaseOf(State state, bool has_state) {
    if (state == State::kMoving) return KillPhase::kTransfer;
    if (!has_state) return KillPhase::kNewcomerStart;
    if (state == State::kGathering) return KillPhase::kRecovery;
    if (state == State::kUnevenStep) return KillPhase::kUnevenStep;
    return state == State::kEvaluating ? KillPhase::kEvaluation : KillPhase::kStep;
  }

  static void Listen(Job& job, absl::Duration duration) {
    job.Listen(absl::Now() + duration, [] { return false; });
  }
  int64_t Below(int64_t limit) { return static_cast<int64_t>(random_() % limit); }
  absl::Duration Spread(absl::Duration most) {
    return absl::Microseconds(Below(absl::ToInt64Microseconds(most) + 1));
  }

  const CampaignOptions options_;
  std::mt19937_64 random_;
  std::unique_ptr<HostNetwork> hosts_;
  End expected_;
  CampaignResult result_;
};

}  // namespace

absl::StatusOr<CampaignResult> RunCampaign(const CampaignOptions& options) {
  return Campaign(options).Run();
}

std::string TableHead() {
  return "| model | backend | runs | kills | in a step | uneven step | evaluation | recovery | "
         "newcomer's start | "
         "transfer | of rank 0 | two at once | wrong | hangs | slowest recovery |\n"
         "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
}

std::string TableRow(const CampaignOptions& options, const CampaignResult& result) {
  std::string row = absl::StrCat("| ", options.model, " | ", options.backend, " | ", result.runs,
                                 " | ", result.kills);
  for (const KillPhase phase : kPhases) {
    const auto found = result.by_phase.find(phase);
    absl::StrAppend(&row, " | ", found == result.by_phase.end() ? 0 : found->second);
  }
  absl::StrAppend(&row, " | ", result.of_rank_zero, " | ", result.of_two_at_once, " | ",
                  result.wrong, " | ", result.hangs, " | ",
                  absl::StrFormat("%.1f s |\n", absl::ToDoubleSeconds(result.slowest)));
  return row;
}

}  // namespace evenkeel
