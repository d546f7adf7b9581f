#include "evenkeel/comm/internal/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <optional>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/internal/frame.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<Connection>> Connection::Create(Greeted greeted) {
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  return absl::WrapUnique(new Connection(std::move(greeted), std::move(wake)));
}

void Connection::Start(std::function<void(std::string)> on_frame, std::function<void(absl::Status)> on_lost) {
  on_frame_ = std::move(on_frame);
  on_lost_ = std::move(on_lost);
  thread_ = std::thread([this] { Run(); });
}

void Connection::Send(absl::string_view payload) {
  absl::MutexLock lock(&mutex_);
  if (is_lost_ || close_by_ != absl::InfiniteFuture()) return;
  const size_t waiting = outgoing_.size() - sent_;
  if (payload.size() > kMaxFrame || waiting > kMaxFrame) {
    send_error_ = absl::ResourceExhaustedError(absl::StrCat("a control message of ", payload.size(), " bytes behind ",
                                                            waiting, " unsent ones: more than ", kMaxFrame));
    return wake_.Signal();
  }
  outgoing_ += Frame(payload);
  Flush();  // Here and now if the socket takes it: that saves waking the thread up.
  if (!outgoing_.empty()) wake_.Signal();
}

void Connection::Close(absl::Duration linger) {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    close_by_ = absl::Now() + linger;
  }
  wake_.Signal();
  thread_.join();
}

absl::Status Connection::GoneStatus() const {
  return absl::UnavailableError(
      absl::StrCat("the store at ", greeted_.server.ToString(), " is gone",
                   greeted_.host.empty() ? "" : absl::StrCat(": ", greeted_.host, ", which hosts it, is gone")));
}

void Connection::Run() {
  bool said_goodbye = false;
  absl::Status over = HandleFrames();
  while (over.ok()) {
    const Plan plan = NextPlan();
    const bool closing = plan.close_by != absl::InfiniteFuture();
    if (closing && absl::Now() >= plan.close_by) return;
    if (closing && !plan.has_data && !said_goodbye) {
      said_goodbye = shutdown(greeted_.fd.get(), SHUT_WR) == 0;
      if (!said_goodbye) return;
    }
    pollfd entries[] = {{greeted_.fd.get(), static_cast<short>(POLLIN | (plan.has_data ? POLLOUT : 0)), 0},
                        {wake_.fd(), POLLIN, 0}};
    over = plan.error;
    if (!over.ok() || poll(entries, 2, PollTimeout(plan.close_by)) <= 0) continue;
    if (entries[1].revents != 0) wake_.Clear();
    if ((entries[0].revents & ~POLLOUT) != 0) over = Receive();
  }
  shutdown(greeted_.fd.get(), SHUT_RDWR);  // The server need not wait for this end.
  {
    absl::MutexLock lock(&mutex_);
    is_lost_ = true;
    if (close_by_ != absl::InfiniteFuture()) return;
  }
  on_lost_(over);
}

Connection::Plan Connection::NextPlan() {
  absl::MutexLock lock(&mutex_);
  Flush();
  return {send_error_, !outgoing_.empty(), close_by_};
}

void Connection::Flush() {
  sent_ += SendSome(greeted_.fd, absl::string_view(outgoing_).substr(sent_)).bytes;  // Receive() sees a broken one.
  if (sent_ < outgoing_.size() / 2) return;
  outgoing_.erase(0, sent_);
  sent_ = 0;
}

absl::Status Connection::Receive() {
  std::string bytes;
  const bool is_over = ReceiveSome(greeted_.fd, bytes).is_over;
  greeted_.received.Append(bytes);
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
