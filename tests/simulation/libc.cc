// The functions of the C library, and the random numbers of OpenSSL, as operations on the world.
//
// On a thread outside a world each calls the original, which the dynamic linker finds behind this
// definition.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "evenkeel/tests/simulation/clock.h"
#include "evenkeel/tests/simulation/network.h"
#include "evenkeel/tests/simulation/world.h"

using evenkeel::simulation::Inside;
using evenkeel::simulation::kMicrosecond;
using evenkeel::simulation::kMillisecond;
using evenkeel::simulation::kNever;
using evenkeel::simulation::kSecond;
using evenkeel::simulation::Nanos;
using evenkeel::simulation::Network;
using evenkeel::simulation::Thread;
using evenkeel::simulation::TimeOfDay;
using evenkeel::simulation::World;

namespace {

// The factor by which futexes of shared memory time out late: a thread that looks again after a
// while would hide a lost wake-up.
constexpr Nanos kLateness = 20;

bool IsSimulated() { return World::Current() != nullptr; }
bool IsSimulated(int fd) { return fd >= Network::kFirstFd && IsSimulated(); }

World& TheWorld() { return *World::Get(); }
// A call of the network, after a point at which the thread may lose the processor.
class Net {
 public:
  explicit Net(const char* doing) { TheWorld().Point(doing); }
  Network* operator->() const { return Network::Get(); }

 private:
  const Inside inside_;
};

timespec ToTimespec(int64_t nanos) {
  return {.tv_sec = nanos / kSecond, .tv_nsec = nanos % kSecond};
}
Nanos FromTimespec(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }
Nanos DeadlineOfPoll(int milliseconds) {
  return milliseconds < 0 ? kNever : TheWorld().now() + milliseconds * kMillisecond;
}

}  // namespace

// The original function of this name and type.
#define EK_ORIGINAL(name) \
  static const auto original = reinterpret_cast<decltype(&::name)>(dlsym(RTLD_NEXT, #name))

extern "C" {

// ---- Threads ------------------------------------------------------------------------------------

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) {
  EK_ORIGINAL(pthread_create);
  if (!IsSimulated()) return original(thread, attributes, body, argument);
  const Inside inside;
  // Its address, because the library's handle is used again once the thread has ended.
  *thread = reinterpret_cast<pthread_t>(
      TheWorld().StartThread(World::Current()->host, [body, argument] { (void)body(argument); }));
  TheWorld().Point("has started a thread");
  return 0;
}

// World::Run() joins the real thread.
int pthread_join(pthread_t thread, void** result) {
  EK_ORIGINAL(pthread_join);
  if (!IsSimulated()) return original(thread, result);
  const Inside inside;
  TheWorld().Join(reinterpret_cast<Thread*>(thread));
  return 0;
}

int pthread_detach(pthread_t thread) noexcept {
  EK_ORIGINAL(pthread_detach);
  return IsSimulated() ? 0 : original(thread);
}

int pthread_getcpuclockid(pthread_t thread, clockid_t* clock) {
  EK_ORIGINAL(pthread_getcpuclockid);
  return IsSimulated() ? ENOENT : original(thread, clock);
}

int sched_yield() {
  EK_ORIGINAL(sched_yield);
  if (!IsSimulated()) return original();
  TheWorld().Sleep(TheWorld().now() + kMicrosecond, "yields");
  return 0;
}

int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t* processors) noexcept {
  EK_ORIGINAL(sched_getaffinity);
  if (!IsSimulated()) return original(process, bytes, processors);
  CPU_ZERO_S(bytes, processors);
  for (int i = 0; i < TheWorld().processors(); ++i) CPU_SET_S(i, bytes, processors);
  return 0;
}

// Futexes outside the memory that ranks share: a thread that waits in one checks it again after a
// while. Abseil and the C++ library use them only where a thread loses the processor during an
// initialisation.
long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& one : a) one = va_arg(list, long);
  va_end(list);
  if (IsSimulated() && number == SYS_futex) {
    const int operation = static_cast<int>(a[1]) & FUTEX_CMD_MASK;
    const uint32_t* const word = reinterpret_cast<const uint32_t*>(a[0]);
    if (const auto place = Network::Get()->PlaceOf(word); place.has_value()) {
      if (operation == FUTEX_WAKE) return Net("wakes")->WakeFutex(*place, static_cast<int>(a[2]));
      const timespec* const timeout = reinterpret_cast<const timespec*>(a[3]);
      const Net network("waits in a futex");
      return network->AwaitFutex(
          *place, word, static_cast<uint32_t>(a[2]),
          timeout == nullptr ? kNever : TheWorld().now() + kLateness * FromTimespec(*timeout));
    }
    if (operation == FUTEX_WAKE) return 0;
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != static_cast<uint32_t>(a[2])) {
      errno = EAGAIN;
      return -1;
    }
    TheWorld().Sleep(TheWorld().now() + 10 * kMicrosecond, "waits in a futex");
    return 0;
  }
  static const auto original = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

// ---- Points in code -----------------------------------------------------------------------------

// Compilers insert calls of this function between the basic blocks of files that are compiled with
// -fsanitize-coverage=trace-pc.
void __sanitizer_cov_trace_pc() {
  if (IsSimulated() && !World::Current()->is_inside) TheWorld().PointInCode();
}

// ---- Time ---------------------------------------------------------------------------------------

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  EK_ORIGINAL(clock_gettime);
  if (!IsSimulated()) return original(clock, time);
  switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
      *time = ToTimespec(TimeOfDay(*World::Current()->host, TheWorld().Tick()));
      return 0;
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_COARSE:
    case CLOCK_MONOTONIC_RAW:
    case CLOCK_BOOTTIME:
      *time = ToTimespec(TheWorld().Tick());
      return 0;
    default:  // Computing takes no time.
      *time = {};
      return 0;
  }
}

int gettimeofday(timeval* time, void* zone) noexcept {
  static const auto original =
      reinterpret_cast<int (*)(timeval*, void*)>(dlsym(RTLD_NEXT, "gettimeofday"));
  if (!IsSimulated()) return original(time, zone);
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* result) noexcept {
  EK_ORIGINAL(time);
  if (!IsSimulated()) return original(result);
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result != nullptr) *result = now.tv_sec;
  return now.tv_sec;
}

int nanosleep(const timespec* duration, timespec* left) {
  EK_ORIGINAL(nanosleep);
  if (!IsSimulated()) return original(duration, left);
  TheWorld().Sleep(TheWorld().now() + FromTimespec(*duration), "sleeps");
  return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  EK_ORIGINAL(clock_nanosleep);
  if (!IsSimulated()) return original(clock, flags, time, left);
  Nanos until = FromTimespec(*time);
  if (flags != TIMER_ABSTIME) {
    until += TheWorld().now();
  } else if (clock == CLOCK_REALTIME) {
    until = evenkeel::simulation::Deadline{.time = absl::FromUnixNanos(until)}.InWorld();
  }
  TheWorld().Sleep(until, "sleeps");
  return 0;
}

// ---- Files --------------------------------------------------------------------------------------

int socket(int domain, int type, int protocol) noexcept {
  EK_ORIGINAL(socket);
  return IsSimulated() ? Net("makes a socket")->Socket(domain) : original(domain, type, protocol);
}

int eventfd(unsigned count, int flags) noexcept {
  EK_ORIGINAL(eventfd);
  return IsSimulated() ? Net("makes an event")->EventFd() : original(count, flags);
}

int epoll_create1(int flags) noexcept {
  EK_ORIGINAL(epoll_create1);
  return IsSimulated() ? Net("makes an epoll")->EpollCreate() : original(flags);
}

int close(int fd) {
  EK_ORIGINAL(close);
  return IsSimulated(fd) ? Net("closes")->Close(fd) : original(fd);
}

int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  EK_ORIGINAL(bind);
  return IsSimulated(fd) ? Net("binds")->Bind(fd, *address) : original(fd, address, size);
}

int listen(int fd, int backlog) noexcept {
  EK_ORIGINAL(listen);
  return IsSimulated(fd) ? Net("listens")->Listen(fd) : original(fd, backlog);
}

int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  EK_ORIGINAL(accept4);
  return IsSimulated(fd) ? Net("accepts")->Accept(fd) : original(fd, address, size, flags);
}

int connect(int fd, const sockaddr* address, socklen_t size) {
  EK_ORIGINAL(connect);
  return IsSimulated(fd) ? Net("connects")->Connect(fd, *address, size)
                         : original(fd, address, size);
}

int getsockname(int fd, sockaddr* address, socklen_t* size) noexcept {
  EK_ORIGINAL(getsockname);
  return IsSimulated(fd) ? Network::Get()->GetName(fd, false, *address, *size)
                         : original(fd, address, size);
}

int getpeername(int fd, sockaddr* address, socklen_t* size) noexcept {
  EK_ORIGINAL(getpeername);
  return IsSimulated(fd) ? Network::Get()->GetName(fd, true, *address, *size)
                         : original(fd, address, size);
}

int setsockopt(int fd, int level, int option, const void* value, socklen_t size) noexcept {
  EK_ORIGINAL(setsockopt);
  return IsSimulated(fd) ? 0 : original(fd, level, option, value, size);
}

int getsockopt(int fd, int level, int option, void* value, socklen_t* size) noexcept {
  EK_ORIGINAL(getsockopt);
  if (!IsSimulated(fd)) return original(fd, level, option, value, size);
  return Network::Get()->GetOption(fd, level, option, value, size);
}

int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list list;
  va_start(list, request);
  void* const argument = va_arg(list, void*);
  va_end(list);
  static const auto original =
      reinterpret_cast<int (*)(int, unsigned long, ...)>(dlsym(RTLD_NEXT, "ioctl"));
  if (!IsSimulated(fd)) return original(fd, request, argument);
  if (request != SIOCOUTQ) {
    errno = ENOTTY;
    return -1;
  }
  const int waiting = Network::Get()->BytesWaiting(fd);
  std::memcpy(argument, &waiting, sizeof(waiting));
  return waiting < 0 ? -1 : 0;
}

int shutdown(int fd, int how) noexcept {
  EK_ORIGINAL(shutdown);
  return IsSimulated(fd) ? Net("shuts down")->Shutdown(fd, how) : original(fd, how);
}

ssize_t read(int fd, void* data, size_t bytes) {
  EK_ORIGINAL(read);
  if (!IsSimulated(fd)) return original(fd, data, bytes);
  const iovec part = {data, bytes};
  return Net("reads")->Read(fd, &part, 1);
}

ssize_t readv(int fd, const iovec* parts, int count) {
  EK_ORIGINAL(readv);
  return IsSimulated(fd) ? Net("reads")->Read(fd, parts, count) : original(fd, parts, count);
}

ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  EK_ORIGINAL(recv);
  if (!IsSimulated(fd)) return original(fd, data, bytes, flags);
  iovec part = {data, bytes};
  msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  return Net("reads")->Receive(fd, message);
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  EK_ORIGINAL(recvmsg);
  return IsSimulated(fd) ? Net("reads")->Receive(fd, *message) : original(fd, message, flags);
}

ssize_t write(int fd, const void* data, size_t bytes) {
  EK_ORIGINAL(write);
  if (!IsSimulated(fd)) return original(fd, data, bytes);
  const iovec part = {const_cast<void*>(data), bytes};
  return Net("writes")->Write(fd, &part, 1);
}

ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  EK_ORIGINAL(send);
  if (!IsSimulated(fd)) return original(fd, data, bytes, flags);
  iovec part = {const_cast<void*>(data), bytes};
  return Net("writes")->Send(fd, {.msg_iov = &part, .msg_iovlen = 1});
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  EK_ORIGINAL(sendmsg);
  return IsSimulated(fd) ? Net("writes")->Send(fd, *message) : original(fd, message, flags);
}

int poll(pollfd* entries, nfds_t count, int timeout) {
  EK_ORIGINAL(poll);
  if (!IsSimulated()) return original(entries, count, timeout);
  const Net network("polls");
  return network->Poll(entries, count, DeadlineOfPoll(timeout));
}

int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  EK_ORIGINAL(epoll_ctl);
  if (!IsSimulated(epoll)) return original(epoll, operation, fd, event);
  return Net("watches")->EpollControl(epoll, operation, fd, event);
}

int epoll_wait(int epoll, epoll_event* events, int most, int timeout) {
  EK_ORIGINAL(epoll_wait);
  if (!IsSimulated(epoll)) return original(epoll, events, most, timeout);
  const Net network("polls");
  return network->EpollWait(epoll, events, most, DeadlineOfPoll(timeout));
}

// ---- Memory that ranks share --------------------------------------------------------------------

int memfd_create(const char* name, unsigned flags) noexcept {
  EK_ORIGINAL(memfd_create);
  if (!IsSimulated()) return original(name, flags);
  // Linux before 6.3 refuses this flag, and the library would call again.
  constexpr unsigned kNoExecution = 8;
  return Net("makes memory")->AddMemory(original(name, flags & ~kNoExecution));
}

int ftruncate(int fd, off_t bytes) noexcept {
  EK_ORIGINAL(ftruncate);
  return original(IsSimulated(fd) ? Network::Get()->RealMemory(fd, "ftruncate") : fd, bytes);
}

// Pages are allocated when they are used, because most of a simulated rank's are not. The file
// grows.
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  EK_ORIGINAL(fallocate);
  if (!IsSimulated(fd)) return original(fd, mode, offset, bytes);
  const int real = Network::Get()->RealMemory(fd, "fallocate");
  if (mode != 0 || real < 0) return original(real, mode, offset, bytes);
  struct stat file;
  if (fstat(real, &file) != 0) return -1;
  return file.st_size < offset + bytes ? ftruncate(real, offset + bytes) : 0;
}

int madvise(void* address, size_t bytes, int advice) noexcept {
  EK_ORIGINAL(madvise);
  if (IsSimulated() && Network::Get()->PlaceOf(address).has_value()) return 0;
  return original(address, bytes, advice);
}

int fcntl(int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  static const auto original = reinterpret_cast<int (*)(int, int, ...)>(dlsym(RTLD_NEXT, "fcntl"));
  return original(IsSimulated(fd) ? Network::Get()->RealMemory(fd, "fcntl") : fd, command,
                  argument);
}

int fstat(int fd, struct stat* file) noexcept {
  static const auto original =
      reinterpret_cast<int (*)(int, struct stat*)>(dlsym(RTLD_NEXT, "fstat"));
  return original(IsSimulated(fd) ? Network::Get()->RealMemory(fd, "fstat") : fd, file);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  EK_ORIGINAL(mmap);
  if (!IsSimulated(fd)) return original(address, bytes, protection, flags, fd, offset);
  const Net network("maps memory");
  void* const mapped =
      original(address, bytes, protection, flags, network->RealMemory(fd, "mmap"), offset);
  if (mapped != MAP_FAILED) network->AddMapping(mapped, bytes, fd, offset);
  return mapped;
}

int munmap(void* address, size_t bytes) noexcept {
  EK_ORIGINAL(munmap);
  if (IsSimulated()) Network::Get()->RemoveMapping(address);
  return original(address, bytes);
}

// ---- The machine --------------------------------------------------------------------------------

// Each machine has a network name space of its own. The numbers are such as Linux gives.
int stat(const char* path, struct stat* file) noexcept {
  static const auto original =
      reinterpret_cast<int (*)(const char*, struct stat*)>(dlsym(RTLD_NEXT, "stat"));
  const bool is_network = std::strcmp(path, "/proc/self/ns/net") == 0;
  if (!IsSimulated() || (!is_network && std::strcmp(path, "/proc/self/ns/user") != 0))
    return original(path, file);
  *file = {};
  file->st_ino =
      is_network ? 4026531840 + static_cast<ino_t>(World::Current()->host->machine) : 4026531837;
  return 0;
}

uid_t geteuid() noexcept {
  EK_ORIGINAL(geteuid);
  return IsSimulated() ? 1000 : original();
}

int gethostname(char* name, size_t bytes) noexcept {
  EK_ORIGINAL(gethostname);
  if (!IsSimulated()) return original(name, bytes);
  const int written = std::snprintf(name, bytes, "machine%d", World::Current()->host->machine);
  if (written >= 0 && static_cast<size_t>(written) < bytes) return 0;
  errno = ENAMETOOLONG;
  return -1;
}

// The memory that is left, and what limits it, differ from run to run.
static bool IsOfThisMoment(const char* path) {
  return IsSimulated() &&
         (std::strcmp(path, "/proc/meminfo") == 0 || std::strcmp(path, "/proc/self/cgroup") == 0);
}

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = va_arg(list, mode_t);
  va_end(list);
  static const auto original =
      reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"));
  if (!IsOfThisMoment(path)) return original(path, flags, mode);
  errno = ENOENT;
  return -1;
}
int __open_2(const char* path, int flags) { return open(path, flags); }

// Compilers call the functions above by these names where the buffer's size is a constant.
ssize_t __read_chk(int fd, void* data, size_t bytes, size_t) { return read(fd, data, bytes); }
ssize_t __recv_chk(int fd, void* data, size_t bytes, size_t, int flags) {
  return recv(fd, data, bytes, flags);
}
int __poll_chk(pollfd* entries, nfds_t count, int timeout, size_t) {
  return poll(entries, count, timeout);
}

// ---- OpenSSL ------------------------------------------------------------------------------------

int RAND_bytes(unsigned char* bytes, int count) {
  static const auto original =
      reinterpret_cast<int (*)(unsigned char*, int)>(dlsym(RTLD_NEXT, "RAND_bytes"));
  if (!IsSimulated()) return original(bytes, count);
  std::generate(bytes, bytes + count,
                [] { return static_cast<unsigned char>(TheWorld().draws().Next()); });
  return 1;
}

}  // extern "C"
