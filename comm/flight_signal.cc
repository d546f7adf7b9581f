#include "evenkeel/comm/flight_signal.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/living_groups.h"

namespace evenkeel {
namespace {

// The only state that the handler uses: a descriptor that is set before any handler, and never
// changes.
int wake_up = -1;

void OnSignal(int signal) {
  const int before = errno;
  const uint8_t byte = static_cast<uint8_t>(signal);
  // A full pipe means that the thread has been woken up already.
  (void)!write(wake_up, &byte, 1);
  errno = before;
}

// One per process, never destroyed: a signal may arrive at any time.
class Dumper {
 public:
  static Dumper& Get() {
    static Dumper* const dumper = new Dumper;
    return *dumper;
  }

  absl::Status Install(int signal, std::string folder) {
    absl::MutexLock lock(&mutex_);
    if (!started_.ok()) return started_;
    struct sigaction action = {};
    action.sa_handler = OnSignal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    folders_[signal] = std::move(folder);
    if (sigaction(signal, &action, nullptr) == 0) {
      sigset_t signals;
      sigemptyset(&signals);
      sigaddset(&signals, signal);
      pthread_sigmask(SIG_BLOCK, &signals, nullptr);
      return absl::OkStatus();
    }
    folders_.erase(signal);
    return absl::InvalidArgumentError(
        absl::StrCat("DumpFlightOnSignal: signal ", signal, " cannot be caught"));
  }

 private:
  Dumper() : started_(Start()) {}

  absl::Status Start() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
      return absl::ErrnoToStatus(errno, "DumpFlightOnSignal: no pipe");
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    wake_up = ends[1];
    absl::StatusOr<std::thread> thread = internal::StartThread(
        "the signals of flight records", [this, read_end = ends[0]] { Run(read_end); });
    EK_RETURN_IF_ERROR(thread.status());
    thread->detach();
    return absl::OkStatus();
  }

  void Run(int read_end) {
    while (true) {
      uint8_t signal = 0;
      const ssize_t got = read(read_end, &signal, 1);
      if (got == 0 || (got < 0 && errno != EINTR)) return;
      if (got == 1) DumpAll(signal);
    }
  }

  void DumpAll(int signal) {
    std::string folder;
    {
      absl::MutexLock lock(&mutex_);
      folder = folders_[signal];
    }
    internal::ForEachLiving([&](const Communicator& comm) {
      const absl::Status status = comm.DumpFlight(comm.FlightPath(folder));
      if (!status.ok()) internal::Warn(nullptr, std::string(status.message()));
    });
  }

  absl::Mutex mutex_;
  std::map<int, std::string> folders_ ABSL_GUARDED_BY(mutex_);
  const absl::Status started_;  // Last: its thread uses the others.
};

}  // namespace

absl::Status DumpFlightOnSignal(int signal, std::string folder) {
  return Dumper::Get().Install(signal, std::move(folder));
}

}  // namespace evenkeel
