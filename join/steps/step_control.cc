#include "evenkeel/join/steps/step_control.h"

#include <algorithm>
#include <numeric>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_log.h"
#include "evenkeel/join/steps/step_status.h"

namespace evenkeel {
namespace {

constexpr size_t kMaxUnanswered = 64;
constexpr char kStepTopic[] = "step";
constexpr char kLogTopic[] = "step log";

std::string StateTopic(absl::string_view name, int64_t step) {
  return absl::StrCat("state/", name, "/", step);
}

// An exhausted rank gets everything in a step from the lowest active rank.
ControlChannel::From FromLeader(const StepAnswer& answer) {
  return {.rank = answer.lowest_active,
          .text = absl::StrCat(internal::kExhausted, "what rank ", answer.lowest_active,
                               " does in step ", answer.step)};
}

// Adds the event that this rank has waited for to an error of its own deadline. Others, and OK,
// stay.
absl::Status WithMissed(const Communicator& comm, const absl::Status& status, int sender,
                        absl::string_view what) {
  if (!absl::IsDeadlineExceeded(status) || !comm.status().ok()) return status;
  return internal::MissedDeadline(absl::StrCat("rank ", comm.rank(), " did not receive ", what,
                                               " from rank ", sender, ": ", status.message()),
                                  {sender}, kLogTopic);
}

class LogChannel : public StepLog::Channel {
 public:
  explicit LogChannel(Communicator* comm) : comm_(comm) {}
  void Send(absl::Span<const int> to, std::string entry) override {
    comm_->control().Send(to, kLogTopic, std::move(entry));
  }
  void Notify(std::string entry) override { comm_->control().Notify(kLogTopic, std::move(entry)); }
  absl::StatusOr<std::string> Receive(const ControlChannel::From& from) override {
    return comm_->control().Receive(kLogTopic, comm_->timeout(), from);
  }

 private:
  Communicator* const comm_;
};

}  // namespace

// StepTicket --------------------------------------------------------------------------------------

StepTicket::StepTicket(int64_t step, bool is_exhausted, StepControl* control, std::string why,
                       std::shared_ptr<const ParticipantNames> names,
                       std::shared_ptr<const StepShares> shares)
    : step_(step),
      is_exhausted_(is_exhausted),
      control_(control),
      why_(std::move(why)),
      names_(std::move(names)),
      shares_(std::move(shares)),
      deadline_(SteadyNow() + control->comm_->timeout()) {}

absl::StatusOr<StepAnswer> StepTicket::Wait() const {
  if (const absl::StatusOr<StepAnswer>* answer = GivenAnswer()) return *answer;
  const internal::Waits::Scope scope(
      control_->waits(), [this] { return Describe(); }, [this] { return IsAnswered(); });
  auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return answer_ != nullptr; };
  {
    absl::MutexLock lock(&mutex_);
    if (AwaitUntil(mutex_, absl::Condition(&answered), deadline_)) return *answer_;
  }
  control_->OnDeadline(Describe());
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&answered));  // OnDeadline() ends every exchange.
  return *answer_;
}

void StepTicket::Renew() {
  absl::MutexLock lock(&mutex_);
  deadline_ = SteadyNow() + control_->comm_->timeout();
}

internal::Wait StepTicket::Describe() const {
  return {.kind = internal::Wait::Kind::kExchange,
          .sequence = step_ - 1,
          .topic = kStepTopic,
          .text = absl::StrCat(is_exhausted_ ? internal::kExhausted : "", "step ", step_,
                               why_.empty() ? "" : absl::StrCat(", ", why_, ","),
                               " until all ranks have begun it")};
}

const absl::StatusOr<StepAnswer>* StepTicket::GivenAnswer() const {
  absl::MutexLock lock(&mutex_);
  return answer_.get();
}

void StepTicket::OnAnswer(std::function<void(const absl::StatusOr<StepAnswer>&)> callback) {
  const absl::StatusOr<StepAnswer>* answer = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    answer = answer_.get();
    if (answer == nullptr || is_calling_back_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(*answer);
}

void StepTicket::Resolve(absl::StatusOr<StepAnswer> answer) {
  absl::MutexLock lock(&mutex_);
  if (answer_ != nullptr) return;
  answer_ = std::make_unique<absl::StatusOr<StepAnswer>>(std::move(answer));
  const absl::StatusOr<StepAnswer>& given = *answer_;
  // Keeps the order: a callback that another thread passes meanwhile runs after these.
  is_calling_back_ = true;
  const internal::LibrarysTurn turn;
  while (!callbacks_.empty()) {
    const auto callback = std::move(callbacks_.front());
    callbacks_.pop_front();
    mutex_.Unlock();
    callback(given);
    mutex_.Lock();
  }
  is_calling_back_ = false;
}

// StepControl -------------------------------------------------------------------------------------

StepControl& StepControl::Of(Communicator& comm) { return comm.Extension<StepControl>(); }

StepControl::StepControl(Communicator* comm)
    : GroupExtension(comm),
      log_(std::make_unique<StepLog>(comm->rank(), comm->world_size(),
                                     std::make_unique<LogChannel>(comm))),
      stragglers_(comm->world_size()),
      interval_samples_(comm->world_size()) {
  absl::MutexLock lock(&mutex_);
  UpdateNames();
}

StepControl::~StepControl() = default;

void StepControl::OnNotice(int from, absl::string_view topic, absl::string_view notice) {
  if (topic != kLogTopic) return;
  if (const absl::Status status = log_->OnNotice(from, notice); !status.ok()) FailWithAll(status);
}

void StepControl::SetLoop(std::optional<uint64_t> hash) {
  log_->SetLoop(records_sent_);
  if (!hash.has_value()) {  // They are not those of another loop.
    samples_ = StepRecord::kNotSaid;
    shares_ = nullptr;
  }
  loop_hash_ = hash;
  absl::MutexLock lock(&mutex_);
  active_ranks_.clear();
}

void StepControl::BecomeExhausted() { log_->BecomeExhausted(records_sent_); }

void StepControl::UpdateNames() {
  auto names = std::make_shared<ParticipantNames>();
  for (const StepParticipant* participant : participants_)
    names->push_back(participant->participant_name());
  names_hash_ = HashOfNames(*names);
  names_ = std::move(names);
}

void StepControl::Register(StepParticipant* participant) {
  absl::MutexLock lock(&mutex_);
  participants_.push_back(participant);
  UpdateNames();
}

void StepControl::Unregister(StepParticipant* participant) {
  absl::MutexLock lock(&mutex_);
  std::erase(participants_, participant);
  UpdateNames();
}

bool StepControl::HoldName(absl::string_view name) {
  absl::MutexLock lock(&mutex_);
  return held_names_.insert(std::string(name)).second;
}

void StepControl::ReleaseName(absl::string_view name) {
  absl::MutexLock lock(&mutex_);
  held_names_.erase(std::string(name));
}

std::vector<int> StepControl::active_ranks() const {
  absl::MutexLock lock(&mutex_);
  std::vector<int> ranks = active_ranks_;
  if (!ranks.empty()) return ranks;
  ranks.resize(comm_->world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<StepParticipant*> StepControl::participants() const {
  absl::MutexLock lock(&mutex_);
  return participants_;
}

absl::StatusOr<std::shared_ptr<StepTicket>> StepControl::Enter(absl::string_view name, int phase) {
  if (WillBegin(name, phase)) {
    EK_ASSIGN_OR_RETURN(current_, Begin(As::kActive));
    entered_.clear();
    ended_ = false;
  }
  entered_.emplace(name);
  entered_phase_ = phase;
  if (agreement_) log_->Add(records_sent_, StepEntry::Kind::kEntered, name, "");
  return current_;
}

void StepControl::AddSamples(int64_t samples) {
  samples_ = std::max<int64_t>(samples_, 0) + samples;
}

void StepControl::Request(uint32_t bits) { requests_ |= bits; }

absl::StatusOr<StepControl::NewRecord> StepControl::MakeRecord(As as) {
  NewRecord made;
  StepRecord& record = made.record;
  record.joined = as == As::kExhausted;
  record.scope_hash = loop_hash_.value_or(0);
  absl::InlinedVector<StepParticipant*, 8> participants;  // Without the lock, which they may need.
  {
    absl::MutexLock lock(&mutex_);
    participants.assign(participants_.begin(), participants_.end());
    made.names = names_;
    record.names_hash = names_hash_;
  }
  for (StepParticipant* participant : participants) {
    ParticipantState& state = record.participants.emplace_back();
    if (record.joined) {
      state = participant->CurrentState();
    } else {
      EK_ASSIGN_OR_RETURN(state, participant->PrepareStep());
    }
  }
  record.samples = TakeSamples();
  if (!record.joined) record.requests = std::exchange(requests_, 0);
  made.shares = std::exchange(shares_, nullptr);
  if (made.shares != nullptr) record.SetShares(*made.shares, comm_->rank());
  return made;
}

absl::StatusOr<std::shared_ptr<StepTicket>> StepControl::Begin(As as) {
  EndStep();
  is_exhausted_ = as == As::kExhausted;
  EK_ASSIGN_OR_RETURN(NewRecord made, MakeRecord(as));
  StepRecord& record = made.record;
  EK_RETURN_IF_ERROR(comm_->status());
  if (comm_->waiting()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a step of a process that waits for the place of rank ", comm_->rank(),
        ": call Enter() first, and train in the group that it returns (join/recovery.h)"));
  }
  last_samples_ = record.samples;
  ++steps_begun_;
  if (!agreement_) {
    (void)phases_.Take();  // No record contains it.
    auto ticket = std::shared_ptr<StepTicket>(new StepTicket(0, false, this));
    ticket->Resolve(StepAnswer{.world_size = comm_->world_size(),
                               .active = comm_->world_size(),
                               .highest_active = comm_->world_size() - 1,
                               .requests = record.requests,
                               .samples = std::max<int64_t>(record.samples, 0)});
    return ticket;
  }
  while (!unanswered_.empty() &&
         (unanswered_.size() >= kMaxUnanswered || unanswered_.front()->IsAnswered())) {
    EK_RETURN_IF_ERROR(unanswered_.front()->Wait().status());
    unanswered_.pop_front();
  }
  record.calls = log_->calls();
  record.times = phases_.Take();
  if (record.joined) phases_.Reset();
  record.ledger =
      ledger_.Serialize(record.joined ? StepLedger::Plans::kWithout : StepLedger::Plans::kWith);
  EK_RETURN_IF_ERROR(CheckAgainstLeft(records_sent_));
  const int64_t step = ++records_sent_;
  auto ticket = std::shared_ptr<StepTicket>(
      new StepTicket(step, record.joined, this, std::exchange(why_ended_, ""),
                     std::move(made.names), std::move(made.shares)));
  unanswered_.push_back(ticket);
  if (record.reduces()) last_reduction_ = ticket;
  std::string mine = record.Serialize();
  // A message wakes a thread, which may take this one's core: not this rank's delay.
  const internal::CountedWait exchange;
  comm_->control().Exchange(
      kStepTopic, std::move(mine),
      [this, step, ticket](const absl::StatusOr<std::vector<std::string>>& parts) {
        OnRecords(step, ticket, parts);
      });
  return ticket;
}

void StepControl::ShowDetails(const StepAnswer& answer, const std::shared_ptr<StepTicket>& ticket) {
  StepDetails mine{.names = absl::StrJoin(*ticket->names_, ", ")};
  if (ticket->shares_ != nullptr) mine.shares = *ticket->shares_;
  comm_->control().Exchange(
      "step details", internal::ToBytes(mine),
      [this, answer, ticket](const absl::StatusOr<std::vector<std::string>>& details) {
        if (!details.ok()) return ticket->Resolve(details.status());
        FailWithAll(CompareDetails(answer, *details));
        ticket->Resolve(comm_->status());
      });
}

void StepControl::OnRecords(int64_t step, const std::shared_ptr<StepTicket>& ticket,
                            const absl::StatusOr<std::vector<std::string>>& parts) {
  if (!parts.ok()) {
    // Also without an earlier failure: no later step can have an answer, and NextCall() may wait.
    if (comm_->status().ok()) FailWithAll(parts.status());
    return ticket->Resolve(parts.status());
  }
  StepAnswer answer;
  const absl::Status agreed =
      Agree(step, *parts, ticket->names_,
            requires_samples_ ? SamplesRule::kRequired : SamplesRule::kOptional, answer);
  if (answer.records != nullptr) {
    absl::MutexLock lock(&mutex_);
    const absl::Span<const int64_t> samples = AddTimes(answer);
    if (agreed.ok() && observer_ != nullptr) observer_(answer, samples);
    active_ranks_.clear();
    for (int rank = 0; rank < answer.world_size; ++rank) {
      if (!answer.record(rank).joined) active_ranks_.push_back(rank);
    }
  }
  if (absl::IsNotFound(agreed)) return ShowDetails(answer, ticket);
  if (!agreed.ok()) {
    FailWithAll(agreed);  // They have the same records.
    return ticket->Resolve(comm_->status());
  }
  int64_t calls_of_all = answer.record(0).calls;
  std::vector<std::pair<int, int64_t>> exhausted;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    const StepRecord& record = answer.record(rank);
    calls_of_all = std::min(calls_of_all, record.calls);
    if (record.joined) exhausted.emplace_back(rank, record.calls);
  }
  log_->OnAnswer(step, answer.lowest_active, calls_of_all, exhausted);
  HelpThoseBehind(answer);
  ticket->Resolve(std::move(answer));
}

std::string StepControl::StatusJson() const {
  absl::MutexLock lock(&mutex_);
  return ToJson({.step = records_sent_, .phase = phases_.phase(), .is_exhausted = is_exhausted_},
                stragglers_.Recent(), comm_->rank());
}

std::string StepControl::FinalState() const {
  return ledger_.Serialize(StepLedger::Plans::kWithout);
}

absl::Status StepControl::CompareFinalStates(absl::Span<const std::string> states) const {
  return StepLedger::Compare(states);
}

absl::Span<const int64_t> StepControl::AddTimes(const StepAnswer& answer) {
  const absl::Span<const int64_t> samples = interval_samples_.Add(answer);
  absl::InlinedVector<StragglerDetector::RankTimes, 8> times;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    const StepRecord& record = answer.record(rank);
    times.push_back(
        {.times = record.times, .is_exhausted = record.joined, .samples = samples[rank]});
  }
  stragglers_.Add(times);
  return samples;
}

void StepControl::HelpThoseBehind(const StepAnswer& answer) {
  if (answer.lowest_active != comm_->rank() || answer.everyone_active()) return;
  absl::MutexLock lock(&mutex_);
  for (StepParticipant* participant : participants_) {
    const std::string& name = participant->participant_name();
    const ParticipantState* mine = answer.StateOf(name, comm_->rank());
    if (mine == nullptr) continue;  // Registered since then.
    std::string state;
    for (int rank = 0; rank < answer.world_size; ++rank) {
      if (!answer.record(rank).joined || answer.StateOf(name, rank)->SamePlan(*mine)) continue;
      if (state.empty()) state = participant->ExportState();
      comm_->control().Send(rank, StateTopic(name, answer.step), state);
    }
  }
}

absl::Status StepControl::CatchUp(const StepAnswer& answer) {
  for (StepParticipant* participant : participants()) {
    const std::string& name = participant->participant_name();
    const ParticipantState* state = answer.StateOf(name, comm_->rank());
    if (state != nullptr && state->SamePlan(answer.LeaderState(name))) continue;
    EK_ASSIGN_OR_RETURN(std::string newer,
                        comm_->control().Receive(StateTopic(name, answer.step), comm_->timeout(),
                                                 FromLeader(answer)));
    EK_RETURN_IF_ERROR(
        Annotate(participant->ImportState(newer), absl::StrCat(name, ", step ", answer.step)));
  }
  return absl::OkStatus();
}

absl::Status StepControl::Announce(absl::string_view name, absl::string_view payload) {
  if (current_ == nullptr || ended_)
    return absl::FailedPreconditionError("Announce: no step has begun");
  if (agreement_) log_->Add(records_sent_, StepEntry::Kind::kAction, name, payload);
  return absl::OkStatus();
}

absl::StatusOr<StepEntry> StepControl::NextEntry(const StepAnswer& answer) {
  absl::StatusOr<StepEntry> entry = log_->NextIn(answer.step, FromLeader(answer));
  EK_RETURN_IF_ERROR(WithMissed(*comm_, entry.status(), answer.lowest_active,
                                absl::StrCat("the next action in step ", answer.step)));
  return entry;
}

void StepControl::AnnounceCall(const std::string& call) {
  log_->Add(records_sent_, StepEntry::Kind::kCall, "", call);
}

absl::StatusOr<std::optional<std::string>> StepControl::NextCall(
    const std::shared_ptr<StepTicket>& ticket) {
  ticket->Renew();
  const ControlChannel::From from{.as = ticket->Describe()};
  const absl::StatusOr<std::optional<std::string>> call = log_->NextCall(ticket->step_, from);
  if (call.ok() ? call->has_value() : !absl::IsDeadlineExceeded(call.status())) return call;
  // The ticket's error comes first: it names the ranks that have not begun the step.
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  // Ends with the lowest active rank's last call before the step; at the end of the loop, with the
  // last one of all.
  int sender = std::max(answer.lowest_active, 0);
  for (int rank = 0; rank < answer.world_size && answer.active == 0; ++rank) {
    if (answer.record(rank).calls > answer.record(sender).calls) sender = rank;
  }
  const int64_t taken = log_->calls(), before = answer.record(sender).calls;
  const std::string what = taken < before ? absl::StrCat("call ", taken + 1, " of ", before,
                                                         " before step ", answer.step)
                                          : absl::StrCat("the beginning of step ", answer.step);
  EK_RETURN_IF_ERROR(WithMissed(*comm_, call.status(), sender, what));
  if (taken >= before) return std::nullopt;
  // Another rank may send it, too.
  const ControlChannel::From any{.text = absl::StrCat(internal::kExhausted, what)};
  absl::StatusOr<std::optional<std::string>> due =
      log_->NextCall(ticket->step_, any, StepLog::Call::kDue);
  EK_RETURN_IF_ERROR(WithMissed(*comm_, due.status(), sender, what));
  return due;
}

void StepControl::EndStep(std::string why) {
  if (ended_ || current_ == nullptr) return;
  ended_ = true;
  why_ended_ = std::move(why);
  if (agreement_) log_->Add(records_sent_, StepEntry::Kind::kEnd, "", "");
}

}  // namespace evenkeel
