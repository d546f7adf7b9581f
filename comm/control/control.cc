#include "evenkeel/comm/control/control.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/ranks/parties.h"

namespace evenkeel {
namespace {

using internal::Wait;
using internal::Waits;

}  // namespace

std::string RankList(const std::vector<int>& ranks) { return internal::RankList(ranks); }

ControlChannel::ControlChannel(int rank, int world_size, std::unique_ptr<ControlLink> link)
    : rank_(rank), world_size_(world_size), link_(std::move(link)) {
  link_->Start(
      [this](ToRank message) {
        internal::ThisThreadIsTheLibrarys();
        OnMessage(std::move(message));
      },
      [this](absl::Status why) { OnLost(why); });
}

ControlChannel::~ControlChannel() { Stop(); }

std::shared_ptr<Waits> ControlChannel::IfEndless(absl::Duration timeout) const {
  return timeout >= endless_ ? waits_ : nullptr;
}

void ControlChannel::Stop() {
  Close(absl::CancelledError("the communicator is gone"));
  link_->Stop();
}

void ControlChannel::Exchange(absl::string_view topic, std::string payload, ExchangeCallback done) {
  waits_->Use();
  to_hub::Exchange mine{.id = {.topic = std::string(topic)}};
  mine.parts.push_back({1, std::move(payload)});
  absl::Status closed;
  {
    absl::MutexLock lock(&mutex_);
    closed = closed_;
    if (closed.ok()) {
      mine.id.sequence = sequences_[mine.id.topic]++;
      exchanges_[mine.id] = std::move(done);
    }
  }
  if (!closed.ok()) return done(closed);
  link_->Send(std::move(mine));
}

absl::StatusOr<ControlChannel::Parts> ControlChannel::Exchange(absl::string_view topic,
                                                               std::string payload,
                                                               absl::Duration timeout) {
  struct Result {
    internal::Notification done;
    absl::StatusOr<Parts> parts = absl::UnknownError("pending");
  };
  auto result = std::make_shared<Result>();
  int64_t sequence = 0;
  {
    absl::MutexLock lock(&mutex_);
    auto found = sequences_.find(topic);
    if (found != sequences_.end()) sequence = found->second;
  }
  Exchange(topic, std::move(payload), [result](absl::StatusOr<Parts> parts) {
    result->parts = std::move(parts);
    result->done.Notify();
  });
  const Waits::Scope scope(
      IfEndless(timeout),
      [&] {
        return Wait{.kind = Wait::Kind::kExchange,
                    .sequence = sequence,
                    .topic = std::string(topic),
                    .text = absl::StrCat("\"", topic, "\" #", sequence,
                                         " until all ranks have reached it")};
      },
      [result] { return result->done.HasBeenNotified(); });
  if (result->done.WaitUntil(SteadyNow() + timeout)) return std::move(result->parts);
  const Missing missing = WhoIsMissing(topic, sequence);
  return internal::MissedDeadline(
      absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " at \"", topic,
                   "\" #", sequence, " for ",
                   missing.text.empty() ? "the other ranks" : missing.text),
      missing.ranks, topic, sequence);
}

void ControlChannel::Put(absl::string_view key, std::string value) {
  waits_->Use();
  link_->Send(to_hub::Put{.key = std::string(key), .value = std::move(value)});
}

absl::StatusOr<std::string> ControlChannel::Get(absl::string_view key, absl::Duration timeout) {
  absl::StatusOr<to_rank::Value> value =
      Request(to_hub::Get{.key = std::string(key)}, timeout, Until::kClosed, IfEndless(timeout),
              absl::StrCat("the value \"", key, "\""));
  if (value.ok()) return std::move(value->value);
  if (!absl::IsDeadlineExceeded(value.status())) return value.status();
  return internal::MissedDeadline(
      absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for the value \"",
                   key, "\""),
      {}, key);
}

ControlChannel::Missing ControlChannel::WhoIsMissing(const Wait& wait) {
  to_hub::WhoIsMissing question{.wait = wait};
  auto missing = Request(question, absl::Milliseconds(500), Until::kLost);
  if (absl::IsDeadlineExceeded(missing.status())) {
    question.is_urgent = true;  // A rank does not reply to the hub; this is information, too.
    missing = Request(question, absl::Milliseconds(500), Until::kLost);
  }
  if (!missing.ok()) return {};
  return {.ranks = FailureInfoOf(missing->status).value_or(FailureInfo()).ranks,
          .text = std::string(missing->status.message())};
}

ControlChannel::Missing ControlChannel::WhoIsMissing(absl::string_view topic, int64_t sequence) {
  return WhoIsMissing(
      Wait{.kind = Wait::Kind::kExchange, .sequence = sequence, .topic = std::string(topic)});
}

template <typename Message>
absl::StatusOr<typename Message::Reply> ControlChannel::Request(Message message,
                                                                absl::Duration timeout, Until until,
                                                                const std::shared_ptr<Waits>& waits,
                                                                const std::string& text) {
  const auto end = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return until == Until::kClosed ? closed_ : lost_;
  };
  int64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!end().ok()) return end();
    id = message.request = next_request_++;
    requests_[id];
  }
  bool is_over = false;  // Stays true, also after the reply was taken.
  const auto check = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_over = is_over || requests_[id].index() != 0 || !end().ok();
  };
  const Waits::Scope scope(
      waits, [&text] { return Wait{.text = text}; },
      [&] {
        absl::MutexLock lock(&mutex_);
        return check();
      });
  link_->Send(std::move(message));
  absl::MutexLock lock(&mutex_);
  AwaitFor(mutex_, absl::Condition(&check), timeout);
  is_over = true;
  absl::StatusOr<typename Message::Reply> result = absl::DeadlineExceededError("no reply");
  if (auto* reply = std::get_if<typename Message::Reply>(&requests_[id])) {
    result = std::move(*reply);
  } else if (!end().ok()) {
    result = end();
  }
  requests_.erase(id);
  return result;
}

absl::StatusOr<to_rank::Regrouped> ControlChannel::Regroup(absl::Duration timeout,
                                                           absl::Duration wait,
                                                           std::vector<int> members) {
  auto answer = Request(
      to_hub::Regroup{
          .wait_us = wait == absl::InfiniteDuration() ? -1 : absl::ToInt64Microseconds(wait),
          .members = std::move(members)},
      timeout, Until::kLost);
  if (absl::IsDeadlineExceeded(answer.status())) {
    const Missing missing = WhoIsMissing(kRegroupTopic, 0);
    return internal::MissedDeadline(
        absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for ",
                     missing.text.empty() ? "the other ranks" : missing.text,
                     " to regroup or to be lost"),
        missing.ranks);
  }
  if (!answer.ok()) {
    absl::MutexLock lock(&mutex_);
    if (cut_off_.ok()) return answer.status();
    return WithFailureInfo(absl::AbortedError(cut_off_.message()),
                           FailureInfoOf(cut_off_).value_or(FailureInfo()));
  }
  EK_RETURN_IF_ERROR(answer->refusal);
  return answer;
}

absl::Status ControlChannel::SurvivorsStatus() const {
  absl::MutexLock lock(&mutex_);
  return lost_.ok() ? survivors_status_ : lost_;
}

void ControlChannel::Beat(std::string rank_status, absl::Duration silence) {
  link_->Send(to_hub::Beat{.rank_status = std::move(rank_status),
                           .silence_us = absl::ToInt64Microseconds(silence)});
}

int64_t ControlChannel::received() const {
  absl::MutexLock lock(&mutex_);
  return received_;
}

void ControlChannel::Send(absl::Span<const int> to, absl::string_view topic, std::string payload) {
  if (to.empty()) return;
  waits_->Use();
  link_->Send(to_hub::Message{
      .to = {to.begin(), to.end()}, .topic = std::string(topic), .payload = std::move(payload)});
}

absl::StatusOr<std::string> ControlChannel::Receive(absl::string_view topic, absl::Duration timeout,
                                                    const From& from) {
  bool is_over = false;  // Stays true, also after the message was taken.
  const auto check = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_over = is_over || inbox_.find(topic) != inbox_.end() || !closed_.ok();
  };
  const Waits::Scope scope(
      from.is_endless ? waits_ : IfEndless(timeout),
      [&] {
        if (from.as.has_value()) return *from.as;
        return Wait{
            .peer = from.rank,
            .text = from.text.empty() ? absl::StrCat("a message \"", topic, "\"") : from.text};
      },
      [&] {
        absl::MutexLock lock(&mutex_);
        return check();
      });
  absl::MutexLock lock(&mutex_);
  const bool has_come = AwaitFor(mutex_, absl::Condition(&check), timeout);
  is_over = true;
  if (!has_come) {
    return internal::MissedDeadline(
        absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for a message \"",
                     topic, "\"", from.rank < 0 ? "" : absl::StrCat(" of rank ", from.rank)),
        from.rank < 0 ? std::vector<int>() : std::vector<int>{from.rank}, topic);
  }
  auto inbox = inbox_.find(topic);
  if (inbox == inbox_.end()) return closed_;
  std::string payload = std::move(inbox->second.front());
  inbox->second.pop_front();
  if (inbox->second.empty()) inbox_.erase(inbox);
  return payload;
}

void ControlChannel::Discard(absl::string_view topic) {
  absl::MutexLock lock(&mutex_);
  auto inbox = inbox_.find(topic);
  if (inbox == inbox_.end()) {
    unwanted_.insert(std::string(topic));
    return;
  }
  inbox->second.pop_front();
  if (inbox->second.empty()) inbox_.erase(inbox);
}

void ControlChannel::Notify(int to, absl::string_view topic, std::string payload) {
  waits_->Use();
  link_->Send(to_hub::Notice{.to = to, .topic = std::string(topic), .payload = std::move(payload)});
}

void ControlChannel::NotifyOnce(absl::string_view topic, std::string payload) {
  waits_->Use();
  link_->Send(
      to_hub::Notice{.is_once = true, .topic = std::string(topic), .payload = std::move(payload)});
}

void ControlChannel::Fail(const absl::Status& why, absl::Duration unheard) {
  link_->Send(to_hub::Failed{.why = why, .unheard_us = absl::ToInt64Microseconds(unheard)});
}

void ControlChannel::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
  }
  link_->Send(to_hub::Leave());
}

void ControlChannel::SetHandlers(
    std::function<void(int, const absl::Status&)> on_failure,
    std::function<void(int, absl::string_view, absl::string_view)> on_notice) {
  std::vector<ToRank> early;
  {
    absl::MutexLock lock(&mutex_);
    on_failure_ = std::move(on_failure);
    on_notice_ = std::move(on_notice);
    early.swap(early_);
  }
  for (ToRank& message : early) std::visit([this](auto& it) { Handle(std::move(it)); }, message);
}

void ControlChannel::Close(const absl::Status& why) {
  std::map<ExchangeId, ExchangeCallback> exchanges;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_.ok()) closed_ = why;
    exchanges.swap(exchanges_);
  }
  for (auto& [id, done] : exchanges) done(why);
}

void ControlChannel::OnMessage(ToRank message) {
  if (IsBeat(message)) return;
  std::visit([this](auto& it) { Handle(std::move(it)); }, message);
  absl::MutexLock lock(&mutex_);
  ++received_;
}

void ControlChannel::Handle(to_rank::Exchanged exchanged) {
  ExchangeCallback done;
  {
    absl::MutexLock lock(&mutex_);
    auto exchange = exchanges_.find(exchanged.id);
    if (exchange == exchanges_.end()) return;
    done = std::move(exchange->second);
    exchanges_.erase(exchange);
  }
  Parts parts;
  parts.reserve(world_size_);
  for (EqualParts& run : exchanged.parts) {
    if (run.count < 1 || run.count > world_size_ - static_cast<int64_t>(parts.size())) break;
    parts.insert(parts.end(), run.count - 1, run.part);
    parts.push_back(std::move(run.part));
  }
  if (static_cast<int>(parts.size()) == world_size_) return done(std::move(parts));
  done(absl::InternalError(absl::StrCat("\"", exchanged.id.topic, "\" #", exchanged.id.sequence,
                                        ": the hub's reply is not for ", world_size_, " ranks")));
}

void ControlChannel::Handle(to_rank::Message message) {
  absl::MutexLock lock(&mutex_);
  if (auto unwanted = unwanted_.find(message.topic); unwanted != unwanted_.end()) {
    unwanted_.erase(unwanted);
  } else {
    inbox_[message.topic].push_back(std::move(message.payload));
  }
}

void ControlChannel::Handle(to_rank::Notice notice) {
  std::function<void(int, absl::string_view, absl::string_view)> on_notice;
  {
    absl::MutexLock lock(&mutex_);
    if (on_notice_ == nullptr) return early_.push_back(std::move(notice));
    on_notice = on_notice_;
  }
  on_notice(notice.from, notice.topic, notice.payload);
}

void ControlChannel::Handle(to_rank::Failed failed) {
  std::function<void(int, const absl::Status&)> on_failure;
  {
    absl::MutexLock lock(&mutex_);
    if (failed.is_cut_off) cut_off_ = failed.why;
    if (on_failure_ == nullptr) return early_.push_back(std::move(failed));
    on_failure = on_failure_;
  }
  on_failure(failed.culprit, failed.why);
}

void ControlChannel::Handle(to_rank::SurvivorLost lost) {
  absl::MutexLock lock(&mutex_);
  survivors_status_ = lost.why;
}

void ControlChannel::Handle(auto reply) requires requires { reply.request; }
{
  absl::MutexLock lock(&mutex_);
  if (std::is_same_v<decltype(reply), to_rank::Regrouped>) survivors_status_ = absl::OkStatus();
  const auto request = requests_.find(reply.request);
  if (request != requests_.end()) request->second = std::move(reply);
}

FailureInfo ControlChannel::HubLost() const {
  FailureInfo info{.kind = FailureKind::kRankLost};
  if (link_->HubRank() >= 0) info.ranks = {link_->HubRank()};
  return info;
}

void ControlChannel::OnLost(const absl::Status& why) {
  absl::Status reason;
  {
    absl::MutexLock lock(&mutex_);
    reason = FailureInfoOf(why).has_value() ? why : WithFailureInfo(why, HubLost());
    if (!cut_off_.ok()) reason = cut_off_;
    lost_ = reason;
    if (leaving_) return;
  }
  Handle(to_rank::Failed{.why = reason});
}

}  // namespace evenkeel
