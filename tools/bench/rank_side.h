// A rank's side of the benchmark: waits for what to measure, measures it, answers. The same code
// for every transport, so that all are measured alike.
//
//   class MyCollectives : public Collectives { ... };
//   MyCollectives collectives(...);
//   return ServeRank({folder, rank, world}, collectives);  // until the benchmark has heard enough
//
// The benchmark listens at the Unix socket <folder>/socket. A rank says "rank <r>" and then answers
// each line:
//
//   time <op> <scalar> <bytes> <registered> <warmups> <repetitions>    "ok <ns> <ns> ...", one for
//     each repetition
//   loop <op> <scalar> <bytes> <registered> <warmups> <repetitions>    "ok <ns>", the mean of calls
//     back to back
//   check <op> <scalar> <bytes> <registered>                           "ok", if a fresh run had the
//     right result
//   forget                                                             "ok", its buffers are freed
//
// or with "error <sentence>", "wrong <sentence>" or, where the transport does not do that, "skip
// <sentence>". While it waits for a line it sleeps in read(): ranks of other transports, which are
// measured in turn, have the machine.
//
// Before each repetition all ranks meet in a barrier of their own, in <folder>/barrier, which they
// map: the transport's barrier may leave ranks apart by more than what is measured. A repetition is
// from there to this rank's end of the collective; who asked takes the slowest rank's.
//
// A rank that the benchmark has given up never stays behind: SIGALRM ends it when a line has taken
// two minutes, and the end of the socket ends it in between.
//
// Threads: one rank for each thread; SIGALRM is the process's.
//
// The standard library, POSIX and nothing else: an MPI's compiler takes this in, too (mpi_rank.cc).
// So errors are sentences here, and an empty one is none.

#ifndef EVENKEEL_TOOLS_BENCH_RANK_SIDE_H_
#define EVENKEEL_TOOLS_BENCH_RANK_SIDE_H_

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>

#include "evenkeel/tools/bench/case.h"

namespace evenkeel::bench {

// A transport, as the benchmark uses it. The calls come from one thread.
class Collectives {
 public:
  virtual ~Collectives() = default;

  // Why it does not do that; empty: it does.
  virtual std::string WhyNot(const Case&) { return ""; }
  // Memory that the transport has given out, where it has its own kind. Null: there is no such
  // kind.
  virtual std::shared_ptr<void> AllocateRegistered(int64_t) { return nullptr; }
  // Once, before the first Run() with these buffers, on all ranks; and when they go.
  virtual std::string Prepare(const Case&, void* /*in*/, void* /*out*/) { return ""; }
  virtual void Forget() {}
  virtual std::string Run(const Case& what, void* in, void* out) = 0;
  // Describes an error in the result of a Run() on buffers that Fill() has written; empty: none.
  virtual std::string FindWrong(const Case& what, int rank, const void* out) {
    return bench::FindWrong(what, rank, out);
  }
};

inline int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

// Where ranks meet that are processes; zeros at first. Nobody sleeps here: a rank that is woken up
// starts late, and may find itself on the core of the rank that has woken it.
struct SharedBarrier {
  static constexpr int kSpins = 2000;  // Some microseconds; then others may have the core.

  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;
  std::atomic<uint64_t> entered;  // The collective that is checked for being a barrier.

  void Wait(int world) {
    const uint32_t mine = generation.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(world)) {
      arrived.store(0, std::memory_order_relaxed);
      generation.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; generation.load(std::memory_order_acquire) == mine; ++spins) {
      if (spins > kSpins) sched_yield();
    }
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<uint64_t>::is_always_lock_free,
              "processes share them");

struct Seat {
  std::string folder;
  int rank = 0;
  int world = 1;
};

class RankSide {
 public:
  RankSide(const Seat& seat, Collectives& collectives, SharedBarrier& barrier)
      : seat_(seat), collectives_(collectives), barrier_(barrier) {}

  // The answer to a line.
  std::string Answer(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "forget") {
      Forget();
      return "ok";
    }
    std::string op, scalar;
    Case what;
    long long bytes = 0;
    int registered = 0, warmups = 0, repetitions = 1;
    words >> op >> scalar >> bytes >> registered;
    if (verb == "time" || verb == "loop") words >> warmups >> repetitions;
    if (!words || !Named(op, kAllOps, &what.op) || !Named(scalar, kAllScalars, &what.scalar) ||
        bytes < 0 || repetitions < 1) {
      return "error rank " + std::to_string(seat_.rank) + " received the unknown request \"" +
             line + "\"";
    }
    what.bytes = bytes;
    what.world = seat_.world;
    what.registered = registered != 0;
    const std::string why_not = collectives_.WhyNot(what);
    if (!why_not.empty()) return "skip " + why_not;
    std::string trouble = Ready(what);
    std::string answer = "ok";
    if (trouble.empty())
      trouble = verb == "check" ? Check() : Measure(verb == "loop", warmups, repetitions, &answer);
    if (trouble.empty()) return answer;
    // A wrong result is not the same as no result.
    const char* const kind = is_wrong_ ? "wrong " : "error ";
    return kind + std::string(NameOf(what.op)) + " of " + std::to_string(what.bytes) +
           " bytes, rank " + std::to_string(seat_.rank) + ": " + trouble;
  }

 private:
  template <typename Enum, size_t kCount>
  static bool Named(const std::string& name, const Enum (&all)[kCount], Enum* to) {
    for (const Enum one : all) {
      if (name != NameOf(one)) continue;
      *to = one;
      return true;
    }
    return false;
  }

  void Forget() {
    if (is_ready_) collectives_.Forget();
    is_ready_ = false;
    in_.reset();
    out_.reset();
  }

  std::string Ready(const Case& what) {
    if (is_ready_ && what == what_) return "";
    Forget();
    what_ = what;
    std::string trouble = Allocate(what.in_bytes(), &in_);
    if (trouble.empty()) trouble = Allocate(what.out_bytes(), &out_);
    if (trouble.empty()) trouble = collectives_.Prepare(what_, in_.get(), out_.get());
    is_ready_ = trouble.empty();
    // No rank begins before all are prepared.
    if (is_ready_) barrier_.Wait(seat_.world);
    return trouble;
  }

  // Zeroed, so that its pages are there.
  std::string Allocate(int64_t bytes, std::shared_ptr<void>* to) {
    if (bytes == 0) return "";
    if (what_.registered) {
      *to = collectives_.AllocateRegistered(bytes);
      if (*to == nullptr)
        return "cannot allocate " + std::to_string(bytes) + " bytes of registered memory";
    } else {
      const size_t alignment = 64, whole = (static_cast<size_t>(bytes) / alignment + 1) * alignment;
      *to = std::shared_ptr<void>(std::aligned_alloc(alignment, whole),
                                  [](void* data) { std::free(data); });
      if (*to == nullptr) return "cannot allocate " + std::to_string(bytes) + " bytes of memory";
    }
    std::memset(to->get(), 0, static_cast<size_t>(bytes));
    return "";
  }

  std::string RunOnce() { return collectives_.Run(what_, in_.get(), out_.get()); }

  std::string Check() {
    if (what_.op == Op::kBarrier) return CheckBarrier();
    Fill(what_, seat_.rank, in_.get(), out_.get());
    barrier_.Wait(seat_.world);
    std::string trouble = RunOnce();
    if (!trouble.empty()) return trouble;
    const std::string wrong = collectives_.FindWrong(what_, seat_.rank, out_.get());
    is_wrong_ = !wrong.empty();
    // Zeros again: sums of sums would end in infinities.
    barrier_.Wait(seat_.world);
    if (what_.in_bytes() > 0) std::memset(in_.get(), 0, what_.in_bytes());
    if (what_.out_bytes() > 0) std::memset(out_.get(), 0, what_.out_bytes());
    return wrong;
  }

  // No rank leaves before all have arrived; each rank is late once.
  std::string CheckBarrier() {
    std::string wrong;
    for (int late = 0; late < seat_.world; ++late) {
      barrier_.Wait(seat_.world);
      const uint64_t before = barrier_.entered.load();
      barrier_.Wait(seat_.world);
      if (late == seat_.rank) usleep(2000);
      barrier_.entered.fetch_add(1);
      const std::string trouble = RunOnce();
      if (!trouble.empty()) return trouble;
      const uint64_t entered = barrier_.entered.load() - before;
      if (entered == static_cast<uint64_t>(seat_.world)) continue;
      wrong = "a rank left it when " + std::to_string(entered) + " of " +
              std::to_string(seat_.world) + " ranks had entered it";
    }
    is_wrong_ = !wrong.empty();
    return wrong;
  }

  std::string Measure(bool in_loop, int warmups, int repetitions, std::string* answer) {
    int64_t begin = 0;
    for (int i = -warmups; i < repetitions; ++i) {
      if (!in_loop || i == 0) {
        barrier_.Wait(seat_.world);
        begin = NowNs();
      }
      const std::string trouble = RunOnce();
      if (!trouble.empty()) return trouble;
      if (!in_loop && i >= 0) *answer += " " + std::to_string(NowNs() - begin);
    }
    if (in_loop) *answer += " " + std::to_string((NowNs() - begin) / repetitions);
    return "";
  }

  const Seat seat_;
  Collectives& collectives_;
  SharedBarrier& barrier_;
  Case what_;
  bool is_ready_ = false;  // The buffers are what_'s.
  bool is_wrong_ = false;
  std::shared_ptr<void> in_, out_;
};

// The socket's path may be as long as it likes: it is named from its folder.
inline sockaddr_un SocketAddressIn(int folder) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/socket", folder);
  return address;
}

inline bool WriteAll(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t size = send(fd, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return false;
    done += static_cast<size_t>(size);
  }
  return true;
}

// To the benchmark; -1 if there is none.
inline int ConnectTo(const std::string& folder) {
  const int at = open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un address = SocketAddressIn(at);
  const bool is_there =
      at >= 0 && fd >= 0 &&
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  if (at >= 0) close(at);
  if (is_there) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

// Null if there is none.
inline SharedBarrier* MapBarrier(const std::string& folder) {
  const int fd = open((folder + "/barrier").c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* const data =
      mmap(nullptr, sizeof(SharedBarrier), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return data == MAP_FAILED ? nullptr : static_cast<SharedBarrier*>(data);
}

constexpr unsigned kMostSecondsOfALine = 120;

// Answers until the benchmark hangs up. The program's exit code.
inline int ServeRank(const Seat& seat, Collectives& collectives) {
  const int fd = ConnectTo(seat.folder);
  SharedBarrier* const barrier = MapBarrier(seat.folder);
  if (fd < 0 || barrier == nullptr || !WriteAll(fd, "rank " + std::to_string(seat.rank) + "\n")) {
    std::fprintf(stderr, "rank %d cannot connect to the benchmark in %s: %s\n", seat.rank,
                 seat.folder.c_str(), strerror(errno));
    return 1;
  }
  RankSide side(seat, collectives, *barrier);
  std::string received;
  while (true) {
    const size_t end = received.find('\n');
    if (end == std::string::npos) {
      char bytes[512];
      const ssize_t size = read(fd, bytes, sizeof(bytes));
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) return 0;
      received.append(bytes, static_cast<size_t>(size));
      continue;
    }
    alarm(kMostSecondsOfALine);
    const std::string answer = side.Answer(received.substr(0, end));
    alarm(0);
    received.erase(0, end + 1);
    if (!WriteAll(fd, answer + "\n")) return 0;
  }
}

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_RANK_SIDE_H_
