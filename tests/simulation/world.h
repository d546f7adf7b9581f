// Hosts whose threads run one at a time, in an order and at times that a seed determines.
//
//   World world({.seed = 7});
//   Host* host = world.AddHost({.name = "rank 0"});
//   world.Start(host, [&] { ... any code: std::thread, absl::Mutex, sockets, clocks ... });
//   bool all_ended = world.Run(/*limit=*/60 * kSecond);
//
// The code under test is not changed: this library defines the functions of the C library and of
// absl::Mutex by which a program starts threads, waits, reads clocks and uses sockets (libc.cc,
// abseil.cc). On a thread of a world they are operations on the world; on other threads they call
// the originals. Each simulated thread has the stack and the thread-local variables of a real
// thread; the thread that calls Run() runs them all (fiber.h).
//
// Time is virtual, and computation takes none. A thread may lose the processor at each operation,
// for a while that the seed determines; when no thread can run, time advances to the next event.
//
// Threads:   a process has one world at a time. AddHost(), Start() and Run() are called on a thread
//            outside it, the rest on threads of the world.
// Ownership: threads of dead and stopped hosts never end, so their memory is never freed. A process
//            simulates one world, and ends by _exit().

#ifndef EVENKEEL_TESTS_SIMULATION_WORLD_H_
#define EVENKEEL_TESTS_SIMULATION_WORLD_H_

#include <pthread.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/tests/simulation/draws.h"
#include "evenkeel/tests/simulation/fiber.h"
#include "evenkeel/tests/simulation/nanos.h"

namespace evenkeel::simulation {

class World;
struct Host;

struct Thread {
  Host* host = nullptr;
  int id = 0;
  bool is_root = false;  // Started by World::Start().
  bool is_ready = false, is_over = false;
  bool was_late = false;  // The last Block() ended at its deadline.
  uint64_t waits = 0;     // Counts calls of Block(), so that an old deadline wakes no thread.
  const void* wanted = nullptr;  // The lock that it waits for, and the thread that holds it.
  Thread* holder = nullptr;
  std::set<const void*> revived_for;  // On a dead or stopped host: locks that it must release.
  bool is_inside = false;             // In an operation of the world.
  bool waits_by_clock = false;        // Until its host's clock shows a time of day.
  const char* doing = "";             // For reports of hangs.
  pthread_t real = 0;
  std::function<void()> body;
  std::vector<Thread*> joiners;
  Fiber fiber;
};

// A process.
struct Host {
  std::string name;
  int id = 0;
  // Processes with the same number share a kernel: Unix sockets, memory and its futexes, and a
  // network that never fails between them. Negative: a machine of its own.
  int machine = -1;
  // The host's clock was ahead of the world's by `clock_offset` when it began, is `clock_drift`
  // parts per million fast, and has been set by `clock_set` since.
  Nanos clock_offset = 0, clock_set = 0;
  double clock_drift = 0;
  // The factor by which each loss of the processor lasts longer.
  int slowness = 1;

  bool is_dead = false, is_stopped = false;
  std::vector<Thread*> held;  // Ready, but the host runs no thread any more.
  int points_to_ambush = 0;   // 0: none.
  std::function<void()> ambush;
  int next_port = 40000;
};

struct WorldOptions {
  uint64_t seed = 0;
  // A thread loses the processor at one of so many operations, on average.
  int switch_one_in = 8;
  // One of so many of these losses lasts for a while, up to `longest_pause`.
  int pause_one_in = 8;
  Nanos longest_pause = kMillisecond;
  // The time that a reading of a clock takes. More than a nanosecond only where threads may spin
  // until a time has passed: then a reading is also a point at which they may lose the processor.
  Nanos clock_reading = 1;
  int processors = 1024;  // Of each machine, as reported to its processes.
  bool traces = false;    // Prints each event.
};

class World {
 public:
  explicit World(const WorldOptions& options);
  ~World();

  // Returns the world of this process, or null.
  static World* Get();
  // Returns the calling simulated thread, or null on a thread outside the world.
  static Thread* Current();

  Host* AddHost(const Host& host);
  const std::vector<std::unique_ptr<Host>>& hosts() const { return hosts_; }
  // Starts a root thread, which may start other threads of the host.
  void Start(Host* host, std::function<void()> body);
  // Returns true when all root threads of running hosts (neither dead nor stopped) have ended.
  // Returns false at `limit`, when no thread can ever run again, and after very many operations.
  bool Run(Nanos limit);
  // Returns, for a report, the threads that have not ended, with the operation of each.
  std::string Unfinished() const;
  // Returns the number of threads, other than root threads, that running hosts have left behind.
  int LeftBehind() const;

  Nanos now() const { return now_; }
  Draws& draws() { return draws_; }
  uint64_t trace_hash() const { return trace_hash_; }
  int64_t operations() const { return operations_; }
  int processors() const { return options_.processors; }
  void Trace(absl::string_view what, int64_t a = 0, int64_t b = 0);

  // ---- On threads of the world ----

  // Marks a point at which the thread may lose the processor.
  void Point(const char* doing);
  // The same between two basic blocks of code: less often, since an operation has many.
  void PointInCode();
  void Sleep(Nanos until, const char* doing);
  // Waits for Wake(). Returns false if the deadline came first. The caller must check its condition
  // again.
  bool Block(Nanos deadline, const char* doing);
  void Wake(Thread* thread);
  // Calls `event` at `time`, on any thread; `event` must not block.
  void At(Nanos time, std::function<void()> event);
  // Returns the time for a reading of a clock. A reading takes some time, so that loops that wait
  // for a time end.
  Nanos Tick();

  Thread* StartThread(Host* host, std::function<void()> body);
  void Join(Thread* thread);

  // Calls `ambush` when the host's threads have come to so many more points, on the thread that
  // has.
  void AfterPoints(Host* host, int points, std::function<void()> ambush);

  // The threads of the host no longer run; a call by one of them does not return. `on_death` does
  // the kernel's work after a death.
  void Kill(Host* host);
  void Stop(Host* host);
  void Continue(Host* host);  // After Stop().
  std::function<void(Host*)> on_death;
  // Sets the host's time of day, forward or back. Threads that wait for a time of day look again.
  void SetClock(Host* host, Nanos by);
  // The ranks are threads of one process, so they share its global locks. A thread that another one
  // waits for runs until it has released the lock, also on a dead or stopped host.
  void WaitsFor(Thread* holder, const void* lock);
  void HasReleased(Thread* thread, const void* lock);

 private:
  struct Event {
    Nanos time;
    uint64_t number;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;
    }
  };
  static void* RunThread(void* thread);
  static void EndThread(void* thread);
  bool MayRun(const Thread& thread) const;
  void MakeReady(Thread* thread);
  void Revive(Thread* thread, const void* lock);
  void Halt(Host* host, bool was_running);
  int PointsUntilSwitch();
  void MayBeAmbushed();
  void LoseProcessor(int pause_one_in, const char* doing);
  Thread* Next();  // Null: the run is over.
  void Switch();   // Runs the next thread, and returns when it is the turn of this one.
  void End(bool is_good);

  const WorldOptions options_;
  Draws draws_;
  Nanos now_ = 0, limit_ = kNever;
  int points_left_ = 0, points_left_in_code_ = 0;
  int64_t operations_ = 0;
  uint64_t events_made_ = 0;
  uint64_t trace_hash_ = 0xcbf29ce484222325;
  int roots_ = 0;  // Root threads of running hosts that have not ended.
  bool is_over_ = false, is_good_ = false;
  Fiber outside_;            // Of the thread in Run().
  Thread* ended_ = nullptr;  // Run() must join it, and then run the next one.
  Thread* after_end_ = nullptr;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Thread*> ready_;
  std::priority_queue<Event> events_;
};

// While it lives, the calling thread is in an operation of the world: it loses the processor only
// where that operation waits.
class Inside {
 public:
  Inside() : thread_(World::Current()), was_inside_(thread_ != nullptr && thread_->is_inside) {
    if (thread_ != nullptr) thread_->is_inside = true;
  }
  ~Inside() {
    if (thread_ != nullptr) thread_->is_inside = was_inside_;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Thread* const thread_;
  const bool was_inside_;
};

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_WORLD_H_
