#include "evenkeel/tests/simulation/world.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/internal/cordz_functions.h"
#include "absl/strings/str_cat.h"

namespace evenkeel::simulation {
namespace {

// More than any world that makes progress needs.
constexpr int64_t kMostOperations = 2'000'000'000;
constexpr int kBlocksPerOperation = 16;
// Enough for the libraries, and small enough for ten thousand threads.
constexpr size_t kStackBytes = 512 << 10;
constexpr int kMostAttempts = 600, kPauseOfAttempts = 100'000;  // In real microseconds.

World* the_world = nullptr;
thread_local Thread* current = nullptr;
// Its destructor runs after those of the thread's own variables, which still take locks.
pthread_key_t last_breath;

template <typename Function>
Function* Original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

World::World(const WorldOptions& options) : options_(options), draws_(options.seed) {
  the_world = this;
  // A sampled cord reads the clock, and addresses determine which cords are sampled.
  absl::cord_internal::set_cordz_mean_interval(0);
  pthread_key_create(&last_breath, &World::EndThread);
  points_left_ = PointsUntilSwitch();
}

World::~World() { the_world = nullptr; }

World* World::Get() { return the_world; }

Thread* World::Current() { return current; }

Host* World::AddHost(const Host& host) {
  hosts_.push_back(std::make_unique<Host>(host));
  hosts_.back()->id = static_cast<int>(hosts_.size()) - 1;
  if (host.machine < 0) hosts_.back()->machine = hosts_.back()->id;
  return hosts_.back().get();
}

void World::Start(Host* host, std::function<void()> body) {
  StartThread(host, std::move(body))->is_root = true;
  ++roots_;
}

Thread* World::StartThread(Host* host, std::function<void()> body) {
  static const auto create =
      Original<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  Thread* const thread = threads_.emplace_back(std::make_unique<Thread>()).get();
  thread->host = host;
  thread->id = static_cast<int>(threads_.size()) - 1;
  thread->body = std::move(body);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int error = EAGAIN;
  // The machine may be out of threads for a moment.
  for (int attempt = 0; attempt < kMostAttempts && error == EAGAIN; ++attempt) {
    if (attempt > 0) usleep(kPauseOfAttempts);
    error = create(&thread->real, &attributes, &World::RunThread, thread);
  }
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    std::fprintf(stderr, "simulation: thread %d cannot be created (error %d)\n", thread->id, error);
    _exit(2);
  }
  AwaitLent(thread->fiber);
  MakeReady(thread);
  return thread;
}

void* World::RunThread(void* argument) {
  Thread* const thread = static_cast<Thread*>(argument);
  pthread_setspecific(last_breath, thread);
  LendFiber(thread->fiber);
  current = thread;  // Set at its first turn: the code before that is not simulated.
  thread->body();
  thread->body = nullptr;
  return nullptr;
}

void World::EndThread(void* argument) {
  Thread* const thread = static_cast<Thread*>(argument);
  World& world = *the_world;
  thread->is_inside = true;
  thread->is_over = true;
  world.Trace("ends", thread->id);
  for (Thread* const joiner : thread->joiners) world.Wake(joiner);
  if (thread->is_root && --world.roots_ == 0) world.End(true);
  // The C library's work after this is the real thread's. It ends before another thread continues:
  // Run() waits for it.
  world.after_end_ = world.Next();
  current = nullptr;
  world.ended_ = thread;
  SwitchFiber(thread->fiber, world.outside_);
}

void World::Join(Thread* thread) {
  while (!thread->is_over) {
    thread->joiners.push_back(current);
    Block(kNever, "joins a thread");
  }
}

bool World::Run(Nanos limit) {
  limit_ = limit;
  static const auto join = Original<int(pthread_t, void**)>("pthread_join");
  InitFiber(outside_);
  Thread* next = Next();
  while (true) {
    if (next != nullptr) SwitchFiber(outside_, next->fiber);
    if (Thread* const ended = std::exchange(ended_, nullptr); ended != nullptr) {
      ReturnFiber(ended->fiber);
      (void)join(ended->real, nullptr);
    }
    if (is_over_) return is_good_;
    next = std::exchange(after_end_, nullptr);
  }
}

void World::End(bool is_good) {
  if (is_over_) return;
  is_over_ = true;
  is_good_ = is_good;
}

bool World::MayRun(const Thread& thread) const {
  return !thread.revived_for.empty() || (!thread.host->is_dead && !thread.host->is_stopped);
}

void World::MakeReady(Thread* thread) {
  if (thread->is_ready || thread->is_over) return;
  thread->is_ready = true;
  (MayRun(*thread) ? ready_ : thread->host->held).push_back(thread);
}

void World::Wake(Thread* thread) {
  thread->holder = nullptr;  // It looks again.
  if (thread->is_ready) return;
  thread->was_late = false;
  MakeReady(thread);
}

Thread* World::Next() {
  while (!is_over_) {
    if (now_ > limit_) break;  // Readings of clocks have come so far.
    while (!events_.empty() && (events_.top().time <= now_ || ready_.empty())) {
      now_ = std::max(now_, events_.top().time);
      // Moved out first, since it may add events.
      const std::function<void()> run = std::move(const_cast<Event&>(events_.top()).run);
      events_.pop();
      // On no thread: an event that stops its host must not hold it in here.
      Thread* const self = std::exchange(current, nullptr);
      run();
      current = self;
    }
    if (ready_.empty()) break;
    const int index = draws_.Below(static_cast<int>(ready_.size()));
    Thread* const thread = ready_[index];
    ready_[index] = ready_.back();
    ready_.pop_back();
    if (!MayRun(*thread)) {
      thread->host->held.push_back(thread);
      continue;
    }
    thread->is_ready = false;
    Trace("runs", thread->id);
    return thread;
  }
  End(false);  // Unless it is over: no thread can ever run again.
  return nullptr;
}

void World::Switch() {
  Thread* const self = current;
  Thread* const next = Next();
  if (next == self) return;
  SwitchFiber(self->fiber, next != nullptr ? next->fiber : outside_);
}

int World::PointsUntilSwitch() {
  return options_.switch_one_in <= 1 ? 1 : 1 + draws_.Below(2 * options_.switch_one_in - 1);
}

void World::Point(const char* doing) {
  if (++operations_ > kMostOperations) {
    current->doing = doing;
    End(false);
    return Switch();
  }
  MayBeAmbushed();
  if (--points_left_ > 0) return;
  points_left_ = PointsUntilSwitch();
  LoseProcessor(options_.pause_one_in, doing);
}

void World::PointInCode() {
  MayBeAmbushed();
  if (--points_left_in_code_ > 0) return;
  const Inside inside;
  points_left_in_code_ = kBlocksPerOperation * PointsUntilSwitch();
  LoseProcessor(kBlocksPerOperation * options_.pause_one_in, "computes");
}

void World::AfterPoints(Host* host, int points, std::function<void()> ambush) {
  host->points_to_ambush = points;
  host->ambush = std::move(ambush);
}

void World::MayBeAmbushed() {
  Host& host = *current->host;
  if (host.points_to_ambush == 0 || --host.points_to_ambush > 0) return;
  const Inside inside;
  std::exchange(host.ambush, nullptr)();
}

void World::LoseProcessor(int pause_one_in, const char* doing) {
  current->doing = doing;
  if (draws_.OneIn(pause_one_in)) {
    const Nanos pause = draws_.Magnitude(kMicrosecond, options_.longest_pause);
    return Sleep(now_ + pause * current->host->slowness, doing);
  }
  MakeReady(current);
  Switch();
}

Nanos World::Tick() {
  const Inside inside;
  if (options_.clock_reading > 1) Point("reads a clock");
  return now_ += options_.clock_reading;
}

void World::Sleep(Nanos until, const char* doing) {
  const Inside inside;
  while (now_ < until) Block(until, doing);
}

bool World::Block(Nanos deadline, const char* doing) {
  Thread* const self = current;
  self->doing = doing;
  self->was_late = false;
  const uint64_t wait = ++self->waits;
  if (deadline != kNever) {
    At(deadline, [this, self, wait] {
      if (self->waits != wait || self->is_ready) return;
      self->was_late = true;
      MakeReady(self);
    });
  }
  Switch();
  ++self->waits;
  return !self->was_late;
}

void World::At(Nanos time, std::function<void()> event) {
  if (time > limit_) return;  // Most deadlines are: they would fill the queue.
  events_.push({time, events_made_++, std::move(event)});
}

void World::Kill(Host* host) {
  if (host->is_dead) return;
  Trace("dies", host->id);
  host->is_dead = true;
  if (on_death) on_death(host);
  Halt(host, /*was_running=*/!host->is_stopped);
}

void World::Stop(Host* host) {
  if (host->is_dead || host->is_stopped) return;
  Trace("stops", host->id);
  host->is_stopped = true;
  Halt(host, /*was_running=*/true);
}

void World::Halt(Host* host, bool was_running) {
  for (const std::unique_ptr<Thread>& thread : threads_) {
    if (thread->host == host && thread->is_root && !thread->is_over && was_running) --roots_;
    if (thread->holder != nullptr && thread->holder->host == host && MayRun(*thread))
      Revive(thread->holder, thread->wanted);
  }
  if (roots_ == 0) End(true);
  if (current != nullptr && current->host == host) {
    MakeReady(current);
    Switch();
  }
}

void World::Continue(Host* host) {
  if (host->is_dead || !host->is_stopped) return;
  Trace("continues", host->id);
  host->is_stopped = false;
  for (const std::unique_ptr<Thread>& thread : threads_) {
    if (thread->host == host && thread->is_root && !thread->is_over) ++roots_;
  }
  ready_.insert(ready_.end(), host->held.begin(), host->held.end());
  host->held.clear();
}

void World::SetClock(Host* host, Nanos by) {
  Trace("sets its clock", host->id, by);
  host->clock_set += by;
  for (const std::unique_ptr<Thread>& thread : threads_) {
    if (thread->host == host && thread->waits_by_clock) Wake(thread.get());
  }
}

void World::WaitsFor(Thread* holder, const void* lock) {
  current->wanted = lock;
  current->holder = holder;
  if (holder != nullptr && (holder->host->is_dead || holder->host->is_stopped))
    Revive(holder, lock);
}

void World::Revive(Thread* thread, const void* lock) {
  if (!thread->revived_for.insert(lock).second) return;
  // It may wait itself for a lock that a thread of its own host holds.
  if (thread->holder != nullptr && !MayRun(*thread->holder)) Revive(thread->holder, thread->wanted);
  std::vector<Thread*>& held = thread->host->held;
  const auto found = std::find(held.begin(), held.end(), thread);
  if (found == held.end()) return;
  held.erase(found);
  ready_.push_back(thread);
}

void World::HasReleased(Thread* thread, const void* lock) {
  if (thread->revived_for.erase(lock) == 0 || MayRun(*thread)) return;
  MakeReady(thread);
  Switch();
}

void World::Trace(absl::string_view what, int64_t a, int64_t b) {
  const auto add = [this](uint64_t value) { trace_hash_ = (trace_hash_ ^ value) * 0x100000001b3; };
  add(static_cast<uint64_t>(now_));
  for (const char c : what) add(static_cast<unsigned char>(c));
  add(static_cast<uint64_t>(a));
  add(static_cast<uint64_t>(b));
  if (!options_.traces) return;
  const Thread* const thread = current;
  std::fprintf(stderr, "%12.6f ms  %-10s thread %d  %.*s %lld %lld\n",
               static_cast<double>(now_) * 1e-6,
               thread == nullptr ? "" : thread->host->name.c_str(),
               thread == nullptr ? -1 : thread->id, static_cast<int>(what.size()), what.data(),
               static_cast<long long>(a), static_cast<long long>(b));
}

std::string World::Unfinished() const {
  std::string text;
  for (const std::unique_ptr<Thread>& thread : threads_) {
    if (thread->is_over || !MayRun(*thread)) continue;
    absl::StrAppend(&text, text.empty() ? "" : "; ", thread->host->name, " thread ", thread->id,
                    thread->is_ready ? " is ready, it " : " ", thread->doing);
  }
  return text;
}

int World::LeftBehind() const {
  return static_cast<int>(
      std::count_if(threads_.begin(), threads_.end(), [this](const std::unique_ptr<Thread>& t) {
        return !t->is_root && !t->is_over && MayRun(*t);
      }));
}

}  // namespace evenkeel::simulation
