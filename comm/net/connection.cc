#include "evenkeel/comm/net/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// While a reply is due, no turn takes longer, and none counts for more: any longer time was time in
// which this thread did not run, and it may have to read first what has arrived meanwhile.
constexpr absl::Duration kListening = absl::Milliseconds(500);

}  // namespace

absl::StatusOr<std::unique_ptr<Connection>> Connection::Create(Greeted greeted) {
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  return absl::WrapUnique(new Connection(std::move(greeted), std::move(wake)));
}

absl::Status Connection::Start(std::function<void(std::string)> on_frame,
                               std::function<void(absl::Status)> on_lost) {
  on_frame_ = std::move(on_frame);
  on_lost_ = std::move(on_lost);
  EK_ASSIGN_OR_RETURN(thread_, StartThread("a connection to the store", [this] { Run(); }));
  return absl::OkStatus();
}

void Connection::Send(absl::string_view payload) {
  absl::MutexLock lock(&mutex_);
  if (is_lost_ || close_by_ != absl::InfiniteFuture()) return;
  const size_t waiting = outgoing_.size() - sent_;
  if (payload.size() > kMaxLinkFrame || waiting > kMaxFrame) {
    send_error_ = absl::ResourceExhaustedError(
        absl::StrCat("cannot send a control message of ", payload.size(), " bytes: ", waiting,
                     " bytes are still unsent, and the limit for each is ", kMaxFrame));
    return wake_.Signal();
  }
  outgoing_ += Frame(payload);
  Flush();  // Without waking the thread, if the socket accepts it.
  if (!outgoing_.empty()) wake_.Signal();
}

void Connection::Post(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  wake_.Signal();
}

void Connection::ExpectAnswer() {
  absl::MutexLock lock(&mutex_);
  if (std::exchange(answer_is_due_, true)) return;
  silence_ = absl::ZeroDuration();
  wake_.Signal();  // The thread must read the clock now.
}

absl::Duration Connection::Silence() const {
  absl::MutexLock lock(&mutex_);
  return answer_is_due_ ? silence_ : absl::ZeroDuration();
}

void Connection::Close(absl::Duration linger) {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    close_by_ = SteadyNow() + linger;
  }
  wake_.Signal();
  thread_.join();
}

std::string Connection::ServerName() const {
  return absl::StrCat("the store at ", greeted_.server.ToString(),
                      greeted_.host.empty() ? "" : absl::StrCat(", hosted by ", greeted_.host));
}

absl::Status Connection::GoneStatus() const {
  return absl::UnavailableError(absl::StrCat(
      "the store at ", greeted_.server.ToString(), " is gone",
      greeted_.host.empty() ? "" : absl::StrCat(": ", greeted_.host, ", which hosts it, is gone")));
}

void Connection::Run() {
  bool said_goodbye = false;
  absl::Status over = HandleFrames();
  while (over.ok()) {
    const Plan plan = NextPlan();
    const bool closing = plan.close_by != absl::InfiniteFuture();
    for (const auto& task : plan.tasks) task();
    if (closing && SteadyNow() >= plan.close_by) return;
    if (closing && !plan.has_data && !said_goodbye) {
      said_goodbye = shutdown(greeted_.fd.get(), SHUT_WR) == 0;
      if (!said_goodbye) return;
    }
    over = plan.error;
    if (!over.ok()) break;
    const absl::Time start = SteadyNow();
    over = Turn(plan);
    if (plan.listens) PassTime(SteadyNow() - start);
  }
  shutdown(greeted_.fd.get(), SHUT_RDWR);  // So that the server does not wait for this end.
  {
    absl::MutexLock lock(&mutex_);
    is_lost_ = true;
    if (close_by_ != absl::InfiniteFuture()) return;
  }
  on_lost_(over);
  while (true) {
    const Plan plan = NextPlan();
    for (const auto& task : plan.tasks) task();
    if (plan.close_by != absl::InfiniteFuture()) return;
    pollfd entry = {wake_.fd(), POLLIN, 0};
    poll(&entry, 1, -1);
    wake_.Clear();
  }
}

Connection::Plan Connection::NextPlan() {
  absl::MutexLock lock(&mutex_);
  Flush();
  return {send_error_, !outgoing_.empty(), close_by_, answer_is_due_, std::exchange(tasks_, {})};
}

absl::Status Connection::Turn(const Plan& plan) {
  pollfd entries[] = {
      {greeted_.fd.get(), static_cast<short>(POLLIN | (plan.has_data ? POLLOUT : 0)), 0},
      {wake_.fd(), POLLIN, 0}};
  const absl::Time until =
      plan.listens ? std::min(plan.close_by, SteadyNow() + kListening) : plan.close_by;
  if (poll(entries, 2, PollTimeout(until)) <= 0) return absl::OkStatus();
  if (entries[1].revents != 0) wake_.Clear();
  return (entries[0].revents & ~POLLOUT) != 0 ? Receive() : absl::OkStatus();
}

void Connection::PassTime(absl::Duration time) {
  absl::MutexLock lock(&mutex_);
  if (answer_is_due_) silence_ += std::clamp(time, absl::ZeroDuration(), kListening);
}

void Connection::Flush() {
  sent_ += SendSome(greeted_.fd, absl::string_view(outgoing_).substr(sent_))
               .bytes;  // Receive() sees a broken one.
  if (sent_ < outgoing_.size() / 2) return;
  outgoing_.erase(0, sent_);
  sent_ = 0;
}

absl::Status Connection::Receive() {
  std::string bytes;
  const bool is_over = ReceiveSome(greeted_.fd, bytes).is_over;
  greeted_.received.Append(bytes);
  if (!bytes.empty()) {
    absl::MutexLock lock(&mutex_);
    answer_is_due_ = false;
  }
  EK_RETURN_IF_ERROR(HandleFrames());
  return is_over ? GoneStatus() : absl::OkStatus();
}

absl::Status Connection::HandleFrames() {
  while (true) {
    EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, greeted_.received.Next());
    if (!frame) return absl::OkStatus();
    {
      absl::MutexLock lock(&mutex_);
      if (close_by_ != absl::InfiniteFuture()) continue;
    }
    on_frame_(*std::move(frame));
  }
}

}  // namespace evenkeel::internal
