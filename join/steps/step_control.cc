#include "evenkeel/join/steps/step_control.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/failure_info.h"
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

constexpr size_t kMaxNote = 256;

const ParticipantState* FindState(const StepRecord& record, uint64_t name_hash) {
  for (const ParticipantState& state : record.participants) {
    if (state.name_hash == name_hash) return &state;
  }
  return nullptr;
}

// One field of one participant, as a value to compare and a way to say it.
struct Aspect {
  absl::string_view what;
  bool (*differs)(const ParticipantState&, const ParticipantState&);
  std::string (*value)(const ParticipantState&);
};
using State = const ParticipantState&;

const Aspect kAspects[] = {
    {"synchronising", [](State a, State b) { return a.sync != b.sync; },
     [](State s) -> std::string { return s.sync ? "synchronises" : "accumulates"; }},
    {"the set of trained parameters", [](State a, State b) { return a.mask_hash != b.mask_hash; },
     [](State s) {
       return absl::StrCat(s.note.empty() ? "nothing frozen" : s.note, " (mask ",
                           absl::Hex(s.mask_hash), ")");
     }},
    {"the plan generation", [](State a, State b) { return a.generation != b.generation; },
     [](State s) { return absl::StrCat("generation ", s.generation); }},
    {"the schedule", [](State a, State b) { return a.schedule_hash != b.schedule_hash; },
     [](State s) { return absl::StrCat("schedule ", absl::Hex(s.schedule_hash)); }},
};

// "<before>ranks 0,2: synchronises; rank 1: accumulates". The fewest ranks are named as the cause.
absl::Status Disagree(absl::string_view before,
                      const std::map<std::string, std::vector<int>>& ranks_by_value) {
  std::vector<std::pair<int, std::string>> parts;  // By their first rank.
  for (const auto& [value, ranks] : ranks_by_value) {
    parts.emplace_back(ranks[0], absl::StrCat(RankList(ranks), ": ", value));
  }
  std::sort(parts.begin(), parts.end());
  const auto fewest = std::min_element(
      ranks_by_value.begin(), ranks_by_value.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second.size(), a.second) < std::pair(b.second.size(), b.second);
      });
  return WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat(
          before, absl::StrJoin(parts, "; ",
                                [](std::string* out, const auto& part) { *out += part.second; }))),
      {.kind = FailureKind::kDisagreement, .ranks = fewest->second});
}

// OK if all active ranks are about to do the same; all ranks compute it from the same records.
absl::Status CompareRecords(int64_t step, const StepAnswer& answer,
                            const std::vector<StepParticipant*>& participants) {
  // Texts are only made for an error: thousands of ranks compare thousands of records in each step.
  const std::vector<StepRecord>& records = *answer.records;
  const auto has_first_scope = [&](const StepRecord& record) {
    return record.scope_hash == records[0].scope_hash;
  };
  if (!std::ranges::all_of(records, has_first_scope)) {
    std::map<std::string, std::vector<int>> ranks_by_scope;
    for (int rank = 0; rank < answer.world_size; ++rank) {
      const uint64_t scope = records[rank].scope_hash;
      ranks_by_scope[scope == 0 ? "no join" : absl::StrCat("join ", absl::Hex(scope))].push_back(
          rank);
    }
    return Disagree(
        absl::StrCat("step ", step, ": the ranks run different joins (objects or options): "),
        ranks_by_scope);
  }
  if (answer.lowest_active < 0) return absl::OkStatus();
  const StepRecord& leader = answer.record(answer.lowest_active);
  for (size_t p = 0; p < leader.participants.size(); ++p) {
    const ParticipantState& expected = leader.participants[p];
    std::string name = absl::StrCat("participant ", p);
    for (const StepParticipant* participant : participants) {
      if (StableHash(0, participant->participant_name()) == expected.name_hash)
        name = participant->participant_name();
    }
    for (const Aspect& aspect : kAspects) {
      const auto differs = [&](const StepRecord& record) {
        const ParticipantState* state = FindState(record, expected.name_hash);
        return !record.joined && (state == nullptr || aspect.differs(*state, expected));
      };
      if (std::ranges::none_of(records, differs)) continue;
      std::map<std::string, std::vector<int>> ranks_by_value;
      for (int rank = 0; rank < answer.world_size; ++rank) {
        if (records[rank].joined) continue;
        const ParticipantState* state = FindState(records[rank], expected.name_hash);
        ranks_by_value[state == nullptr ? "without it" : aspect.value(*state)].push_back(rank);
      }
      return Disagree(
          absl::StrCat("step ", step, ", ", name, ": the ranks disagree about ", aspect.what, ": "),
          ranks_by_value);
    }
  }
  return absl::OkStatus();
}

// Where gradients are divided by them.
absl::Status CheckSamples(int64_t step, const StepAnswer& answer) {
  std::vector<int> silent, unknown;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    const StepRecord& record = answer.record(rank);
    if (!record.joined && record.samples == StepRecord::kNotSaid) silent.push_back(rank);
    if (std::ranges::any_of(record.participants, [](const ParticipantState& state) {
          return state.samples == StepRecord::kNotSaid;
        }))
      unknown.push_back(rank);
  }
  if (silent.empty() && unknown.empty()) return absl::OkStatus();
  const std::string what =
      silent.empty() ? absl::StrCat("the gradients of ", RankList(unknown),
                                    " were accumulated without a number of samples, outside of "
                                    "this loop: reduce or clear them before it")
                     : absl::StrCat(RankList(silent),
                                    " passed no number: call JoinScope::AddSamples() before each "
                                    "step");
  return WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat(
          "step ", step, ": gradients are divided by the samples of all ranks, and ", what)),
      {.ranks = silent.empty() ? unknown : silent});
}

}  // namespace

std::string StepRecord::Serialize() const {
  internal::ByteWriter writer;
  writer.U8(kVersion)
      .Bool(joined)
      .U32(requests)
      .I64(samples)
      .I64(calls)
      .U64(scope_hash)
      .Bytes(ledger);
  writer.Bool(times.has_value());
  if (times.has_value()) {
    times->Write(writer);
    times->ready.Write(writer);
  }
  writer.U32(static_cast<uint32_t>(participants.size()));
  for (const ParticipantState& state : participants) {
    writer.U64(state.name_hash)
        .U64(state.generation)
        .U64(state.schedule_hash)
        .U64(state.mask_hash)
        .Bool(state.sync)
        .I64(state.samples);
    writer.Bytes(absl::string_view(state.note).substr(0, kMaxNote));
  }
  return writer.Take();
}

absl::StatusOr<StepRecord> StepRecord::Parse(absl::string_view bytes) {
  internal::ByteReader reader(bytes);
  if (const uint8_t version = reader.U8(); reader.ok() && version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("the record of a step has version ", version,
                                                   ", this build reads ", kVersion,
                                                   ": run the same build on all ranks"));
  }
  StepRecord record;
  record.joined = reader.Bool();
  record.requests = reader.U32();
  record.samples = reader.I64();
  record.calls = reader.I64();
  record.scope_hash = reader.U64();
  record.ledger = std::string(reader.Bytes());
  if (reader.Bool()) {
    record.times = PhaseTimes::Read(reader);
    record.times->ready = BucketsReady::Read(reader);
  }
  const uint32_t count = reader.U32();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    ParticipantState state;
    state.name_hash = reader.U64();
    state.generation = reader.U64();
    state.schedule_hash = reader.U64();
    state.mask_hash = reader.U64();
    state.sync = reader.Bool();
    state.samples = reader.I64();
    state.note = std::string(reader.Bytes());
    if (state.note.size() > kMaxNote) reader.Refuse();
    record.participants.push_back(std::move(state));
  }
  EK_RETURN_IF_ERROR(reader.Finish("the record of a step"));
  return record;
}

ParticipantState StepAnswer::LeaderState(absl::string_view participant_name) const {
  if (lowest_active >= 0 && records != nullptr) {
    const ParticipantState* state =
        FindState(record(lowest_active), StableHash(0, participant_name));
    if (state != nullptr) return *state;
  }
  return {};
}

int64_t StepAnswer::SamplesOf(absl::string_view participant_name) const {
  int64_t sum = samples;
  for (int rank = 0; rank < world_size && records != nullptr; ++rank) {
    const ParticipantState* state = FindState(record(rank), StableHash(0, participant_name));
    if (state != nullptr) sum += std::max<int64_t>(state->samples, 0);
  }
  return sum;
}

// StepTicket --------------------------------------------------------------------------------------

StepTicket::StepTicket(int64_t step, bool is_exhausted, StepControl* control, std::string why)
    : step_(step),
      is_exhausted_(is_exhausted),
      control_(control),
      why_(std::move(why)),
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
  // In order, whichever thread asks meanwhile: what is announced in a step must reach exhausted
  // ranks before its end does.
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

StepControl& StepControl::Of(Communicator& comm) {
  return static_cast<StepControl&>(
      comm.Extension([](Communicator* group) { return std::make_unique<StepControl>(group); }));
}

StepControl::StepControl(Communicator* comm)
    : GroupExtension(comm),
      log_(std::make_unique<StepLog>(comm->rank(), comm->world_size(),
                                     std::make_unique<LogChannel>(comm))),
      stragglers_(comm->world_size()) {}

StepControl::~StepControl() = default;

void StepControl::OnNotice(int from, absl::string_view topic, absl::string_view notice) {
  if (topic != kLogTopic) return;
  if (const absl::Status status = log_->OnNotice(from, notice); !status.ok()) FailWithAll(status);
}

void StepControl::SetScope(const void* scope, uint64_t hash) {
  log_->SetLoop(records_sent_);
  if (scope == nullptr) samples_ = StepRecord::kNotSaid;  // No other loop's.
  absl::MutexLock lock(&mutex_);
  active_ranks_.clear();
  scope_ = scope;
  scope_hash_ = hash;
}

void StepControl::BecomeExhausted() { log_->BecomeExhausted(records_sent_); }

void StepControl::Register(StepParticipant* participant) {
  absl::MutexLock lock(&mutex_);
  participants_.push_back(participant);
}

void StepControl::Unregister(StepParticipant* participant) {
  absl::MutexLock lock(&mutex_);
  participants_.erase(std::remove(participants_.begin(), participants_.end(), participant),
                      participants_.end());
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
  if (!WillBegin(name, phase)) {
    entered_.emplace(name);
    entered_phase_ = phase;
    if (agreement_) log_->Add(records_sent_, StepEntry::Kind::kEntered, name, "");
    return current_;
  }
  EndStep();
  is_exhausted_ = false;
  StepRecord record;
  absl::InlinedVector<StepParticipant*, 8> preparing;  // Without the lock, which they may need.
  {
    absl::MutexLock lock(&mutex_);
    preparing.assign(participants_.begin(), participants_.end());
  }
  for (StepParticipant* participant : preparing) {
    EK_ASSIGN_OR_RETURN(ParticipantState state, participant->PrepareStep());
    state.name_hash = StableHash(0, participant->participant_name());
    record.participants.push_back(std::move(state));
  }
  record.scope_hash = scope_hash_;
  record.samples = std::exchange(samples_, StepRecord::kNotSaid);
  record.requests = requests_;
  requests_ = 0;
  EK_ASSIGN_OR_RETURN(current_, Begin(std::move(record)));
  entered_ = {std::string(name)};
  entered_phase_ = phase;
  ended_ = false;
  if (agreement_) log_->Add(records_sent_, StepEntry::Kind::kEntered, name, "");
  return current_;
}

void StepControl::AddSamples(int64_t samples) {
  samples_ = std::max<int64_t>(samples_, 0) + samples;
}

void StepControl::Request(uint32_t bits) { requests_ |= bits; }

absl::StatusOr<std::shared_ptr<StepTicket>> StepControl::EnterJoined() {
  EndStep();
  is_exhausted_ = true;
  StepRecord record;
  record.joined = true;
  record.scope_hash = scope_hash_;
  record.samples = std::exchange(samples_, StepRecord::kNotSaid);
  for (StepParticipant* participant : participants()) {
    ParticipantState state = participant->CurrentState();
    state.name_hash = StableHash(0, participant->participant_name());
    record.participants.push_back(std::move(state));
  }
  return Begin(std::move(record));
}

absl::StatusOr<std::shared_ptr<StepTicket>> StepControl::Begin(StepRecord record) {
  EK_RETURN_IF_ERROR(comm_->status());
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
  record.ledger = comm_->ledger().Serialize(record.joined ? StepLedger::Plans::kWithout
                                                          : StepLedger::Plans::kWith);
  EK_RETURN_IF_ERROR(CheckAgainstLeft(records_sent_));
  const int64_t step = ++records_sent_;
  auto ticket = std::shared_ptr<StepTicket>(
      new StepTicket(step, record.joined, this, std::exchange(why_ended_, "")));
  unanswered_.push_back(ticket);
  std::string mine = record.Serialize();
  // A message wakes a thread, which may take this one's core: not this rank's delay.
  const internal::CountedWait exchange;
  comm_->control().Exchange(
      kStepTopic, std::move(mine),
      [this, step, ticket](const absl::StatusOr<std::vector<std::string>>& parts) {
        OnRecords(step, *ticket, parts);
      });
  return ticket;
}

void StepControl::OnRecords(int64_t step, StepTicket& ticket,
                            const absl::StatusOr<std::vector<std::string>>& parts) {
  if (!parts.ok()) return ticket.Resolve(parts.status());
  StepAnswer answer{.step = step,
                    .world_size = comm_->world_size(),
                    .active = 0,
                    .lowest_active = -1,
                    .highest_active = -1};
  absl::Status status;
  auto records = std::make_shared<std::vector<StepRecord>>();
  records->reserve(answer.world_size);
  absl::InlinedVector<std::string, 8> ledgers;
  for (int rank = 0; rank < answer.world_size && status.ok(); ++rank) {
    absl::StatusOr<StepRecord> record = StepRecord::Parse((*parts)[rank]);
    if (!record.ok()) {
      status = Annotate(record.status(), absl::StrCat("step ", step, ", rank ", rank));
      break;
    }
    answer.requests |= record->requests;
    answer.samples += std::max<int64_t>(record->samples, 0);
    if (!record->joined) {
      ++answer.active;
      if (answer.lowest_active < 0) answer.lowest_active = rank;
      answer.highest_active = rank;
    }
    ledgers.push_back(std::exchange(record->ledger, ""));
    records->push_back(*std::move(record));
  }
  answer.records = std::move(records);
  if (status.ok()) status = Annotate(StepLedger::Compare(ledgers), absl::StrCat("step ", step));
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    status = CompareRecords(step, answer, participants_);
    if (requires_samples_) status.Update(CheckSamples(step, answer));
    AddTimes(*answer.records);
    active_ranks_.clear();
    for (int rank = 0; rank < answer.world_size; ++rank) {
      if (!answer.record(rank).joined) active_ranks_.push_back(rank);
    }
  }
  if (!status.ok()) {
    FailWithAll(status);  // They have the same records.
    return ticket.Resolve(comm_->status());
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
  ticket.Resolve(std::move(answer));
}

std::string StepControl::StatusJson() const {
  absl::MutexLock lock(&mutex_);
  return ToJson({.step = records_sent_, .phase = phases_.phase(), .is_exhausted = is_exhausted_},
                stragglers_.Recent(), comm_->rank());
}

void StepControl::AddTimes(const std::vector<StepRecord>& records) {
  absl::InlinedVector<StragglerDetector::RankTimes, 8> times;
  for (const StepRecord& record : records)
    times.push_back({.times = record.times, .is_exhausted = record.joined});
  stragglers_.Add(times);
}

void StepControl::HelpThoseBehind(const StepAnswer& answer) {
  if (answer.lowest_active != comm_->rank() || answer.everyone_active()) return;
  if (answer.record(comm_->rank()).participants.empty()) return;
  absl::MutexLock lock(&mutex_);
  for (StepParticipant* participant : participants_) {
    const std::string& name = participant->participant_name();
    const uint64_t name_hash = StableHash(0, name);
    const ParticipantState mine = answer.LeaderState(name);
    std::string state;
    for (int rank = 0; rank < answer.world_size; ++rank) {
      const StepRecord& record = answer.record(rank);
      const ParticipantState* theirs = FindState(record, name_hash);
      if (!record.joined || (theirs != nullptr && theirs->SamePlan(mine))) continue;
      if (state.empty()) state = participant->ExportState();
      comm_->control().Send(rank, StateTopic(name, answer.step), state);
    }
  }
}

absl::Status StepControl::CatchUp(const StepAnswer& answer) {
  const StepRecord& mine = answer.record(comm_->rank());
  for (StepParticipant* participant : participants()) {
    const std::string& name = participant->participant_name();
    const ParticipantState* state = FindState(mine, StableHash(0, name));
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
  return log_->NextIn(answer.step, FromLeader(answer));
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
  // Of two errors, that of the ticket names the ranks that have not begun the step.
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  EK_RETURN_IF_ERROR(call.status());
  // Ends with the lowest active rank's last call before the step; at the end of the loop, with the
  // last one of all.
  int64_t before = 0;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    if (answer.active > 0 ? rank == answer.lowest_active : true)
      before = std::max(before, answer.record(rank).calls);
  }
  if (log_->calls() >= before) return std::nullopt;
  return log_->NextCall(ticket->step_, from, StepLog::Call::kDue);
}

void StepControl::EndStep(std::string why) {
  if (ended_ || current_ == nullptr) return;
  ended_ = true;
  why_ended_ = std::move(why);
  if (agreement_) log_->Add(records_sent_, StepEntry::Kind::kEnd, "", "");
}

}  // namespace evenkeel
