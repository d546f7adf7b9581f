#include "evenkeel/trainer/device/cuda_devices.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/cuda_if_built.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"

namespace evenkeel {
namespace {

// Returns the child's answer: the number of devices, or the reason that there is none. A second
// line is the reason that the devices cannot be used.
std::string Answer(CudaUse use) {
  const absl::StatusOr<DeviceRuntime*> cuda = CudaIfBuilt();
  const absl::StatusOr<int> count = cuda.ok() ? (*cuda)->DeviceCount() : cuda.status();
  if (!count.ok()) return std::string(count.status().message());
  absl::Status libraries = internal::LoadCublas();
  if (use == CudaUse::kProductsAndConvolutions) libraries.Update(internal::LoadCudnn());
  return absl::StrCat(*count, libraries.ok() ? "" : "\n", libraries.message());
}

// All that the child writes, until it ends.
absl::StatusOr<std::string> ReadAll(int file, absl::Time deadline) {
  std::string text;
  while (true) {
    const int64_t left = std::max<int64_t>(0, absl::ToInt64Milliseconds(deadline - SteadyNow()));
    pollfd ready{.fd = file, .events = POLLIN};
    const int polled = poll(&ready, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (polled == 0) return absl::DeadlineExceededError("the CUDA driver does not respond");
    if (polled < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll");
    if (polled < 0) continue;
    char buffer[512];
    const ssize_t bytes = read(file, buffer, sizeof(buffer));
    if (bytes < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "read");
    if (bytes == 0) return text;
    if (bytes > 0) text.append(buffer, bytes);
  }
}

}  // namespace

absl::StatusOr<DeviceFacts> FactsOfCudaDevice(int index) {
  EK_ASSIGN_OR_RETURN(DeviceRuntime* const cuda, CudaIfBuilt());
  return cuda->Facts(Device::Cuda(index));
}

absl::StatusOr<int> CountCudaDevices(CudaUse use, absl::Duration timeout) {
  EK_RETURN_IF_ERROR(CudaIfBuilt().status());
  int pipes[2];
  if (pipe(pipes) != 0) return absl::ErrnoToStatus(errno, "pipe");
  const pid_t child = fork();
  if (child < 0) {
    close(pipes[0]);
    close(pipes[1]);
    return absl::ErrnoToStatus(errno, "fork");
  }
  if (child == 0) {
    close(pipes[0]);
    const std::string answer = Answer(use);
    const bool is_written =
        write(pipes[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size());
    _exit(is_written ? 0 : 1);
  }
  close(pipes[1]);
  const absl::StatusOr<std::string> answer = ReadAll(pipes[0], SteadyNow() + timeout);
  close(pipes[0]);
  if (!answer.ok()) kill(child, SIGKILL);
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  EK_RETURN_IF_ERROR(answer.status());
  const std::pair<std::string, std::string> lines =
      absl::StrSplit(*answer, absl::MaxSplits('\n', 1));
  int count = 0;
  if (absl::SimpleAtoi(lines.first, &count)) {
    if (lines.second.empty()) return count;
    return absl::NotFoundError(absl::StrCat("the GPU cannot be used: ", lines.second));
  }
  return absl::FailedPreconditionError(
      answer->empty() ? "no CUDA device: the driver ended the process that asked" : *answer);
}

}  // namespace evenkeel
