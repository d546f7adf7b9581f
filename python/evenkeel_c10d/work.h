// c10d::Work over the works of evenkeel, and the threads that complete futures.
//
// An operation ends in three steps: evenkeel's works end, one thread copies the outputs that are
// not dense back, and all threads see that it has ended. The second step is done by the thread that
// first waits, polls, or completes the future.
//
// Threads: thread-safe. A thread that holds the GIL never waits here for one that may need it,
//          except in wait(), which torch's bindings call without the GIL.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_WORK_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_WORK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "evenkeel/comm/abi/group.h"
#include "tensors.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace evenkeel::bridge {

class Work;

// Completes the futures of works on threads of its own, which hold no lock while callbacks run:
// they take the GIL, call collectives, and may wait for other futures, so a future that is complete
// never waits for the callbacks of another one. Threads that have nothing to do end.
class Completer {
 public:
  Completer();
  // Does not wait: the calling thread may hold the GIL, for which a callback waits.
  ~Completer();

  // Completes `work` when all that it waits for has ended.
  void Watch(c10::intrusive_ptr<Work> work);
  // Completes what has ended, and waits for the threads, but not for the calling one. Works that
  // end later are completed by the thread that ends them. Returns false at the timeout; callbacks
  // that still run then continue.
  bool Stop(std::chrono::milliseconds timeout);
  // Returns whether the calling thread runs a callback of a future, of any group.
  static bool IsRunning();

 private:
  struct Queue;
  const std::shared_ptr<Queue> queue_;
};

// One operation that has been issued. Drops the tensors of `operation` when it ends.
class Flight {
 public:
  // `has_several_issuers`: whether several threads have called collectives of its group.
  Flight(Operation operation, std::vector<std::shared_ptr<abi::Work>> works,
         std::shared_ptr<const std::atomic<bool>> has_several_issuers);

  const std::vector<std::shared_ptr<abi::Work>>& works() const { return works_; }
  // Returns whether evenkeel's works have ended.
  bool HasLanded() const;
  // Ends the flight if HasLanded(); returns whether it has ended. Does not wait.
  bool TryEnd();
  // Waits for the end.
  void Wait();
  // Returns code kOk if the flight succeeded; valid once it has ended.
  const abi::Failure& failure() const { return failure_; }

 private:
  enum State : int { kFlying, kEnding, kEnded };

  std::vector<std::shared_ptr<abi::Work>> works_;
  Operation operation_;
  const std::shared_ptr<const std::atomic<bool>> has_several_issuers_;
  std::atomic<int> state_{kFlying};
  abi::Failure failure_;
};

class Work : public c10d::Work {
 public:
  struct Attributes {
    int rank = 0;
    int source_rank = -1;
    std::shared_ptr<const int> sender;  // Operation::sender.
    const char* title = nullptr;        // The name of the profiler's range.
    c10d::OpType type = c10d::OpType::UNKNOWN;
    uint64_t sequence = 0;
    std::chrono::milliseconds timeout{0};
    std::vector<at::Tensor> inputs;  // For the profiler.
    // For result() and the future. One list, or a list per input.
    std::vector<std::vector<at::Tensor>> results;
  };

  Work(const Attributes& attributes, std::shared_ptr<Flight> flight,
       std::shared_ptr<Completer> completer);

  const Flight& flight() const { return *flight_; }
  // Makes the backend's thread complete it, even if no caller waits for it.
  void WatchOnce();
  // Completes the future, if there is one. Called by the completer after the flight has landed.
  void Complete();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  // Returns, as with Gloo, once the future is complete, but does not wait for its callbacks.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  // No `override`: torch has it since 2.14.
  std::chrono::milliseconds getTimeout() const { return timeout_; }

 private:
  void Fill(c10::ivalue::Future& future) const;
  void EndProfilerRange();
  // Returns false at the timeout.
  bool WaitUntilLanded(std::chrono::milliseconds timeout);

  const std::shared_ptr<Flight> flight_;
  const std::shared_ptr<Completer> completer_;
  const int source_rank_;
  const std::shared_ptr<const int> sender_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  const std::vector<std::vector<at::Tensor>> results_;
  std::once_flag profiled_;
  std::mutex future_mutex_;  // Guards the next three.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool is_watched_ = false;
  bool is_complete_ = false;
};

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_WORK_H_
