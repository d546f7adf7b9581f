// A training that loses ranks, in whose places processes are started: by a launcher that knows of
// the losses as launch/launcher.cc does, or blindly, at any time. Each run's trace must keep the
// rules of docs/replacement.md.

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/tests/elastic/elastic_rank.h"
#include "evenkeel/tests/simulation/loss.h"
#include "evenkeel/tests/simulation/observed_store.h"
#include "evenkeel/tests/simulation/play.h"
#include "evenkeel/tests/simulation/replacement_rules.h"

namespace evenkeel::simulation {
namespace {

using Kind = TraceEvent::Kind;

constexpr int kLargeGroup = 16;
constexpr Nanos kLongestWait = 5 * kSecond;

struct LossAtTime {
  int rank = 0;
  LossKind kind = LossKind::kKilled;
  Nanos when = 0;
};

struct PlannedNewcomer {
  int place = 0;
  bool has_own_machine = false, is_misfit = false;
  Nanos when = 0;  // Of a launcher: after the end of the process before it.
  std::optional<LossKind> loss;
  Nanos lives = 0;  // From its start to its loss.
};

struct Plan {
  ElasticTraining training;
  std::vector<LossAtTime> losses;
  std::vector<PlannedNewcomer> newcomers;  // In the order of their incarnations in each place.
  bool has_launcher = true;
  Nanos patience = 0;   // The launcher's, before it ends a process that is declared lost.
  Nanos computing = 0;  // In each step.
  int slow_rank = -1, slowness = 1;

  int world_size() const { return static_cast<int>(training.inputs.size()); }
};

std::string ToText(Nanos nanos) { return absl::FormatDuration(absl::Nanoseconds(nanos)); }

uint64_t HashOf(const ToyState& state) {
  uint64_t hash = 0;
  for (const std::vector<float>* numbers : {&state.weights, &state.momentum}) {
    hash = StableHash(hash, absl::string_view(reinterpret_cast<const char*>(numbers->data()),
                                              numbers->size() * sizeof(float)));
  }
  return hash;
}

std::string TextOf(const Plan& plan) {
  std::string text = absl::StrCat(
      "replaces lost ranks: ", ToText(plan.training),
      plan.training.is_counted ? ", without data" : "", ", computes for ", ToText(plan.computing),
      " per step",
      plan.slow_rank < 0
          ? ""
          : absl::StrCat(", rank ", plan.slow_rank, " ", plan.slowness, " times as long"),
      ", waits for ", absl::FormatDuration(plan.training.wait_for_replacement), ", started ",
      plan.has_launcher ? absl::StrCat("by a launcher with a patience of ", ToText(plan.patience))
                        : "blindly");
  for (const LossAtTime& loss : plan.losses) {
    absl::StrAppend(&text, "; rank ", loss.rank, " ", TextOf(loss.kind), " at ", ToText(loss.when));
  }
  for (const PlannedNewcomer& newcomer : plan.newcomers) {
    absl::StrAppend(&text, "; a", newcomer.is_misfit ? " misfit" : "", " newcomer ",
                    newcomer.has_own_machine ? "on another machine " : "", "for place ",
                    newcomer.place, plan.has_launcher ? " after " : " at ", ToText(newcomer.when));
    if (newcomer.loss.has_value())
      absl::StrAppend(&text, ", ", TextOf(*newcomer.loss), " ", ToText(newcomer.lives), " later");
  }
  return text;
}

class ReplacePlay : public Play {
 public:
  explicit ReplacePlay(Plan plan) : plan_(std::move(plan)), holders_(world_size()) {
    trace_.steps = *std::ranges::max_element(plan_.training.inputs);
    trace_.wait = absl::ToInt64Nanoseconds(plan_.training.wait_for_replacement);
    for (int rank = 0; rank < world_size(); ++rank)
      processes_.push_back({.self = {rank, 0}, .has_started = true});
    for (const PlannedNewcomer& newcomer : plan_.newcomers) {
      const int before = static_cast<int>(std::ranges::count(
          processes_, newcomer.place, [](const Running& p) { return p.self.place; }));
      processes_.push_back({.self = {newcomer.place, before}});
    }
    for (int place = 0; place < world_size(); ++place) holders_[place].process = place;
  }

  std::string Describe() const override { return TextOf(plan_); }
  int world_size() const override { return plan_.world_size(); }
  bool rank0_hosts() const override { return false; }
  bool moves_data() const override { return !plan_.training.is_counted; }
  CommunicatorOptions options() const override {
    return {.timeout = absl::Seconds(world_size() < kLargeGroup ? 12 : 40),
            .watch = {.beat = absl::Milliseconds(250), .silence = absl::Milliseconds(1500)}};
  }
  std::vector<Newcomer> newcomers() const override {
    std::vector<Newcomer> newcomers;
    for (const PlannedNewcomer& planned : plan_.newcomers)
      newcomers.push_back({planned.place, planned.has_own_machine});
    return newcomers;
  }
  std::vector<std::unique_ptr<Play>> Simpler() const override;

  absl::StatusOr<std::shared_ptr<void>> HostStore(const TcpStoreServerOptions& given) override {
    TcpStoreServerOptions options = given;
    options.on_group = [this](const std::string& group, int size, const absl::Status& status) {
      OnGroup(group, size, status);
    };
    absl::StatusOr<std::unique_ptr<ObservedStore>> store = ObservedStore::Create(options, &trace_);
    if (!store.ok()) return store.status();
    return std::shared_ptr<void>(*std::move(store));
  }

  void Prepare(Stage& stage) override {
    for (const LossAtTime& loss : plan_.losses) {
      Schedule(stage, loss.rank, loss.when,
               [this, loss, &stage] { Strike(loss.rank, loss.kind, stage); });
    }
  }

  void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) override;
  void Tend(Stage& stage) override;
  Verdict Judge(bool is_over, const Stage& stage) override;

 private:
  struct Running {  // By number, as in Stage::ranks.
    Process self;
    bool has_started = false;
    Nanos started = 0, ended = 0;
    bool has_trained = false;  // It has the state of the training.
    bool is_struck = false;
    absl::StatusOr<ElasticReport> report = absl::CancelledError("has not ended");
    bool has_ended = false;
  };
  struct Holder {  // Of a place, as the launcher knows it.
    int process = 0;
    Nanos ends_at = kNever;  // The launcher will end it.
    Nanos next_start = kNever;
    bool is_over = false;  // The process has ended, and the launcher has seen it.
  };

  void Add(int number, TraceEvent event) {
    event.process = processes_[number].self;
    Record(std::move(event), trace_);
  }

  // Marks processes as struck, if one remains that has the state.
  bool MayStrike(const std::set<int>& struck) {
    bool remains = false;
    for (int i = 0; i < static_cast<int>(processes_.size()); ++i) {
      const Running& process = processes_[i];
      remains |= process.has_trained && !process.is_struck && !struck.contains(i) &&
                 (!process.has_ended || process.report.ok());
    }
    if (!remains) return false;
    for (const int number : struck) {
      processes_[number].is_struck = true;
      Add(number, {.kind = Kind::kStrikes});
    }
    return true;
  }
  void Strike(int number, LossKind kind, Stage& stage) {
    if (begun_ < world_size() || processes_[number].has_ended) return;
    if (MayStrike(LostRanks(kind, number, stage))) Inflict(kind, number, stage);
  }

  void OnGroup(absl::string_view group, int size, const absl::Status& status);
  void EndLost(Stage& stage);
  bool StartsMore(const Stage& stage) const;
  void StartNewcomer(int number, Stage& stage);
  void Start(Stage& stage);

  std::vector<Continuation> History() const;
  void JudgeEnds(Verdict& verdict) const;
  std::vector<std::string> WrongStates() const;

  const Plan plan_;
  ReplacementTrace trace_;
  int begun_ = 0;  // Ranks of the first group that train.
  std::vector<Running> processes_;
  // The launcher's.
  std::vector<Holder> holders_;              // By place.
  Nanos made_at_ = kNever;                   // When the newest group was made.
  std::vector<std::pair<int, Nanos>> lost_;  // Places that the group has lost, with that time.
};

std::vector<std::unique_ptr<Play>> ReplacePlay::Simpler() const {
  std::vector<std::unique_ptr<Play>> simpler;
  const auto add = [&](Plan plan) {
    simpler.push_back(std::make_unique<ReplacePlay>(std::move(plan)));
  };
  for (size_t i = 0; i < plan_.losses.size(); ++i) {
    Plan next = plan_;
    next.losses.erase(next.losses.begin() + static_cast<int>(i));
    add(std::move(next));
  }
  for (size_t i = 0; i < plan_.training.losses.size(); ++i) {
    Plan next = plan_;
    next.training.losses.erase(next.training.losses.begin() + static_cast<int>(i));
    add(std::move(next));
  }
  for (size_t i = 0; i < plan_.newcomers.size(); ++i) {
    Plan next = plan_;
    next.newcomers.erase(next.newcomers.begin() + static_cast<int>(i));
    add(std::move(next));
    next = plan_;
    next.newcomers[i].loss.reset();
    if (plan_.newcomers[i].loss.has_value()) add(std::move(next));
  }
  const int last = world_size() - 1;
  const auto is_last = [&](const auto& loss) { return loss.rank == last; };
  if (last < 2 || std::ranges::any_of(plan_.losses, is_last) ||
      std::ranges::any_of(plan_.training.losses, is_last) ||
      std::ranges::count(plan_.newcomers, last, &PlannedNewcomer::place) > 0)
    return simpler;
  Plan next = plan_;
  next.training.inputs.pop_back();
  add(std::move(next));
  return simpler;
}

void ReplacePlay::RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) {
  Running& process = processes_[rank];
  const bool is_newcomer = rank >= world_size();
  ElasticTraining training = plan_.training;
  if (is_newcomer) training.is_misfit = plan_.newcomers[rank - world_size()].is_misfit;
  int group = 0;
  ElasticHooks hooks;
  hooks.die = [&] {
    if (begun_ == world_size() && MayStrike({rank})) stage.world.Kill(stage.ranks[rank]);
  };
  hooks.begin = [&] { begun_ += !is_newcomer; };
  hooks.at = [&](StepPoint point, int step) {
    if (point == StepPoint::kBeforeRecord)
      Add(rank, {.kind = Kind::kBegins, .group = group, .step = step});
    if (point == StepPoint::kForward) {
      const int factor = process.self.place == plan_.slow_rank ? plan_.slowness : 1;
      absl::SleepFor(absl::Nanoseconds(plan_.computing * factor));
    }
    if (point == StepPoint::kLoopEnd && step < trace_.steps) Add(rank, {.kind = Kind::kExhausted});
  };
  hooks.finished = [&](int64_t steps, const ToyState& state) {
    Add(rank, {.kind = Kind::kFinishes, .group = group, .step = steps, .state = HashOf(state)});
  };
  hooks.fails = [&](int64_t steps, const ToyState& state) {
    Add(rank, {.kind = Kind::kAsks, .step = steps, .state = HashOf(state)});
  };
  hooks.goes_on = [&](const Communicator& comm, int64_t step, int source, const ToyState& state) {
    process.has_trained = true;
    group = NumberOf(comm.group());
    TraceEvent event = {.kind = Kind::kGoesOn,
                        .group = group,
                        .step = step,
                        .source = source,
                        .state = HashOf(state)};
    for (const int place : comm.members()) event.members.push_back({.place = place});
    Add(rank, std::move(event));
  };
  Add(rank, {.kind = Kind::kStarts});
  process.report = TrainElastically(std::move(comm), training, hooks);
  process.has_ended = true;
  process.ended = stage.world.now();
  Add(rank, {.kind = Kind::kEnds, .step = trace_.steps, .is_error = !process.report.ok()});
}

// ---- The launcher ----

void ReplacePlay::OnGroup(absl::string_view group, int size, const absl::Status& status) {
  if (NumberOf(group) < 0) return;
  const Nanos now = World::Get()->now();
  if (status.ok()) {
    made_at_ = now;
    return;
  }
  const std::optional<FailureInfo> info = FailureInfoOf(status);
  if (size < world_size() || !info.has_value() || info->kind != FailureKind::kRankLost) return;
  for (const int rank : info->ranks) lost_.emplace_back(rank, made_at_);
}

void ReplacePlay::EndLost(Stage& stage) {
  const Nanos now = stage.world.now();
  for (const auto& [place, made_at] : std::exchange(lost_, {})) {
    Holder& holder = holders_[place];
    if (!holder.is_over && processes_[holder.process].started < made_at)
      holder.ends_at = now + plan_.patience;
  }
  for (Holder& holder : holders_) {
    Host* const host = stage.ranks[holder.process];
    const bool is_due = holder.ends_at <= now || host->is_stopped;
    if (holder.is_over || holder.ends_at == kNever || !is_due) continue;
    stage.world.Kill(host);
  }
}

bool ReplacePlay::StartsMore(const Stage& stage) const {
  bool has_survivor = false;
  for (size_t i = 0; i < processes_.size(); ++i) {
    const Running& process = processes_[i];
    if (process.has_ended && process.report.ok()) return false;
    has_survivor |= process.has_started && process.started < made_at_ && !process.has_ended &&
                    !stage.ranks[i]->is_dead;
  }
  return has_survivor;
}

void ReplacePlay::StartNewcomer(int number, Stage& stage) {
  Running& process = processes_[number];
  const PlannedNewcomer& planned = plan_.newcomers[number - world_size()];
  process.has_started = true;
  process.started = stage.world.now();
  holders_[planned.place] = {.process = number};
  stage.start(number - world_size(), process.self.incarnation);
  if (!planned.loss.has_value()) return;
  Schedule(stage, number, stage.world.now() + planned.lives,
           [this, number, kind = *planned.loss, &stage] { Strike(number, kind, stage); });
}

void ReplacePlay::Start(Stage& stage) {
  const Nanos now = stage.world.now();
  for (int place = 0; place < world_size(); ++place) {
    Holder& holder = holders_[place];
    const Running& process = processes_[holder.process];
    const auto planned = std::ranges::find_if(
        processes_, [&](const Running& p) { return p.self.place == place && !p.has_started; });
    if (planned == processes_.end()) continue;
    const int number = static_cast<int>(planned - processes_.begin());
    if (!holder.is_over &&
        (stage.ranks[holder.process]->is_dead || (process.has_ended && !process.report.ok()))) {
      holder.is_over = true;
      holder.next_start = now + plan_.newcomers[number - world_size()].when;
    }
    if (holder.next_start <= now && StartsMore(stage)) StartNewcomer(number, stage);
  }
}

void ReplacePlay::Tend(Stage& stage) {
  if (plan_.has_launcher) {
    EndLost(stage);
    return Start(stage);
  }
  for (int number = world_size(); number < static_cast<int>(processes_.size()); ++number) {
    if (!processes_[number].has_started &&
        plan_.newcomers[number - world_size()].when <= stage.world.now())
      StartNewcomer(number, stage);
  }
}

// ---- The judge ----

// Returns how the training went on, from what all processes have recorded.
std::vector<Continuation> ReplacePlay::History() const {
  std::map<int, TraceEvent> groups;  // By number.
  for (const TraceEvent& event : trace_.events) {
    if (event.kind == Kind::kGoesOn) groups.try_emplace(event.group, event);
  }
  std::vector<Continuation> history;
  std::vector<Process> before;
  for (const auto& [number, event] : groups) {
    if (number > 0) {
      Continuation& next = history.emplace_back();
      next.step = static_cast<int>(event.step);
      for (const Process& member : before) {
        if (std::ranges::count(event.members, member.place, &Process::place) == 0)
          next.lost.push_back(member.place);
      }
    }
    before = event.members;
  }
  return history;
}

std::vector<std::string> ReplacePlay::WrongStates() const {
  std::vector<std::string> wrong;
  const std::vector<Continuation> history = History();
  const ToyState expected = TrainElasticallyAlone(plan_.training, history);
  // Shares of a number of ranks that is a power of two have the same bits in any order.
  bool is_exact = plan_.training.is_counted || (world_size() & (world_size() - 1)) == 0;
  for (const Continuation& continuation : history)
    is_exact &= plan_.training.is_counted || continuation.lost.empty();
  const ElasticReport* first = nullptr;
  for (const Running& process : processes_) {
    if (!process.report.ok()) continue;
    const ToyState& ended = process.report->ended;
    const std::string who = simulation::ToText(process.self);
    if (first == nullptr) first = &*process.report;
    if (HashOf(ended) != HashOf(first->ended))
      wrong.push_back(absl::StrCat(who, " does not end as the others do"));
    if (is_exact ? HashOf(ended) != HashOf(expected)
                 : !IsClose(ended.weights, expected.weights) ||
                       !IsClose(ended.momentum, expected.momentum))
      wrong.push_back(absl::StrCat(who, " ends with a wrong state"));
  }
  if (first == nullptr) wrong.push_back("no process has ended well");
  return wrong;
}

void ReplacePlay::JudgeEnds(Verdict& verdict) const {
  std::set<Process> decided;
  for (const TraceEvent& event : trace_.events) {
    if (event.kind == Kind::kDecided) decided.insert(event.members.begin(), event.members.end());
  }
  for (size_t i = 0; i < processes_.size(); ++i) {
    const Running& process = processes_[i];
    if (!process.has_started || process.is_struck) continue;
    const absl::Status& status = process.report.status();
    const std::string who = absl::StrCat(simulation::ToText(process.self), ": ");
    const bool is_refused = absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status);
    const bool is_misfit =
        i >= static_cast<size_t>(world_size()) && plan_.newcomers[i - world_size()].is_misfit;
    if (is_misfit && decided.contains(process.self) && !is_refused) {
      verdict.is_wrong = true;
      verdict.complaints.push_back(absl::StrCat(who, "does not fit: ", status.ToString()));
    }
    const bool may_fail = i >= static_cast<size_t>(world_size()) && !process.has_trained;
    // By its own clock, which may be fast.
    const bool was_long =
        absl::Nanoseconds(process.ended - process.started) >= 0.99 * plan_.training.timeout;
    const bool has_waited = absl::IsDeadlineExceeded(status) && was_long;
    if (status.ok() || (may_fail && (is_refused || has_waited))) continue;
    verdict.is_other = true;
    verdict.complaints.push_back(absl::StrCat(who, status.ToString()));
  }
  for (const TraceEvent& event : trace_.events) {
    if (event.kind != Kind::kLost) continue;
    const auto process = std::ranges::find(processes_, event.process, &Running::self);
    if (process->is_struck || (process->has_ended && !process->report.ok())) continue;
    verdict.is_wrong = true;
    verdict.complaints.push_back(
        absl::StrCat(simulation::ToText(event.process), " is declared lost, but it is not"));
  }
}

Verdict ReplacePlay::Judge(bool is_over, const Stage& stage) {
  Verdict verdict{.hangs = !is_over};
  if (!is_over) verdict.complaints.push_back("it was not over in time");
  if (!stage.crash.empty()) {
    verdict.is_other = true;
    verdict.complaints.push_back(stage.crash);
  }
  for (std::string& broken : BrokenRules(trace_)) {
    verdict.is_wrong = true;
    verdict.complaints.push_back(std::move(broken));
  }
  if (!is_over) return verdict;
  JudgeEnds(verdict);
  for (std::string& wrong : WrongStates()) {
    verdict.is_wrong = true;
    verdict.complaints.push_back(std::move(wrong));
  }
  return verdict;
}

// ---- The plan of a seed ----

void DrawPoints(Draws& draws, Plan& plan) {
  constexpr StepPoint kPoints[] = {StepPoint::kBeforeRecord, StepPoint::kForward,
                                   StepPoint::kBackward, StepPoint::kReduced, StepPoint::kStepped};
  const int rank = draws.Below(plan.world_size());
  plan.training.losses.push_back(
      {rank, draws.Below(plan.training.inputs[rank]), kPoints[draws.Below(5)]});
}

void DrawNewcomers(Draws& draws, int place, Plan& plan) {
  const int count = draws.OneIn(6) ? 0 : 1 + (draws.OneIn(2) ? draws.Below(3) : 0);
  for (int i = 0; i < count; ++i) {
    PlannedNewcomer& newcomer = plan.newcomers.emplace_back();
    newcomer.place = place;
    newcomer.has_own_machine = draws.OneIn(2);
    newcomer.is_misfit = draws.OneIn(8);
    newcomer.when = draws.Magnitude(kMillisecond, 2 * kLongestWait);
    if (plan.has_launcher && !draws.OneIn(3)) newcomer.when = 0;
    if (!draws.OneIn(5)) continue;
    newcomer.loss = static_cast<LossKind>(draws.Below(kLossKinds - 1));
    newcomer.lives = draws.Magnitude(kMillisecond, 4 * kSecond);
  }
}

}  // namespace

std::unique_ptr<Play> MakeReplacePlay(uint64_t seed, const PlayOptions& options) {
  Draws draws(seed ^ 0x4e91ace);
  const int sizes = static_cast<int>(options.world_sizes.size());
  const int world_size = options.world_sizes[draws.Below(sizes)];
  Plan plan;
  ElasticTraining& training = plan.training;
  training.is_counted = world_size > kMostConnected || draws.OneIn(6);
  training.is_exact = true;
  training.joins = !training.is_counted && draws.OneIn(4);
  training.inputs.assign(world_size, 3 + draws.Below(4));
  if (training.joins) {
    for (int& inputs : training.inputs) inputs = 2 + draws.Below(5);
  }
  training.wait_for_replacement =
      absl::Nanoseconds(draws.Magnitude(200 * kMillisecond, kLongestWait));
  if (world_size >= kLargeGroup) training.timeout = absl::Seconds(60);
  plan.computing = draws.Magnitude(10 * kMicrosecond, 500 * kMillisecond);
  if (draws.OneIn(4)) {
    plan.slow_rank = draws.Below(world_size);
    plan.slowness = 2 + draws.Below(4);
  }
  plan.has_launcher = !draws.OneIn(3);
  plan.patience = draws.Magnitude(10 * kMillisecond, 5 * kSecond);
  const int count = 1 + draws.Below(3);
  Nanos when = draws.Magnitude(10 * kMillisecond, 2 * kSecond);
  std::set<int> places;
  for (int i = 0; i < count; ++i) {
    if (draws.OneIn(2)) {
      DrawPoints(draws, plan);
      places.insert(plan.training.losses.back().rank);
      continue;
    }
    const int rank = draws.Below(world_size);
    plan.losses.push_back({rank, static_cast<LossKind>(draws.Below(kLossKinds - 1)), when});
    places.insert(rank);
    when += draws.Magnitude(kMillisecond, 6 * kSecond);
  }
  if (draws.OneIn(8)) places.insert(draws.Below(world_size));  // No loss of it is planned.
  for (const int place : places) DrawNewcomers(draws, place, plan);
  return std::make_unique<ReplacePlay>(std::move(plan));
}

}  // namespace evenkeel::simulation
