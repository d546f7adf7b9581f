// The backend "evenkeel" of torch.distributed, for tensors of the CPU.
//
//   c10::intrusive_ptr<Backend> backend = Backend::Create(
//       {.store = store, .rank = 0, .world_size = 2, .timeout = std::chrono::minutes(1)});
//   backend->allreduce(tensors)->wait();
//
// Each operation becomes one or more calls of evenkeel/comm/abi/group.h. gather and scatter are
// all-to-alls in which most parts are empty, a reduce_scatter of uneven parts is a reduce per rank,
// and a coalesced operation is a series of calls with one work. An all-reduce of sparse tensors
// waits until all ranks call it, since their numbers of rows differ, and then gathers the rows.
//
// Threads: thread-safe. As with every backend, all ranks must call collectives in one order.
// Errors:  arguments are checked before anything is sent, and throw c10::Error. What fails later is
//          thrown by Work::wait() and is the error of the future.
// End:     shutdown() leaves the group. The destructor does it too, with a deadline of seconds. A
//          forked child neither uses nor leaves its parent's groups.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_BACKEND_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_BACKEND_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "evenkeel/comm/abi/group.h"
#include "store.h"
#include "tensors.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "work.h"

namespace evenkeel::bridge {

using TensorList = std::vector<at::Tensor>;
using TensorLists = std::vector<TensorList>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Backend : public c10d::Backend {
 public:
  struct Settings {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int world_size = 1;
    std::chrono::milliseconds timeout = kBackendDefaultTimeout;
    std::string name = "world";          // The name that torch gives; may differ between ranks.
    std::vector<uint64_t> global_ranks;  // Empty: the default group.
  };
  // Waits until all ranks have called it. Throws what ExceptionOf() returns.
  static c10::intrusive_ptr<Backend> Create(const Settings& settings);
  // Leaves all groups of this process, for its exit; or aborts them if `why` is not empty.
  static void LeaveAll(const std::string& why, std::chrono::milliseconds timeout);

  Backend(const Settings& settings, std::unique_ptr<abi::Group> group);
  ~Backend() override { End(); }
  void release_resources() override { End(); }  // When only weak references are left.

  std::string transport() const { return group_->backend(); }
  std::string FlightJson() const;

  const std::string getBackendName() const override { return "evenkeel"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& options,
                                          const int& rank, const int& size) override;

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(TensorList& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr allgather(TensorLists& outputs, TensorList& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, TensorList& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(TensorList& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(TensorList& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs,
                   const c10d::AllToAllOptions& options) override;

  // PyTorch 2.14 gave these new names, and its base class forwards the new ones to the old.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  // No `override`: torch has it since 2.14.
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& options);

  WorkPtr send(TensorList& tensors, int rank, int tag) override;
  WorkPtr recv(TensorList& tensors, int rank, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;

 private:
  // Issues the calls of `operation`, each with this timeout (not positive: the group's).
  WorkPtr Run(Operation operation, std::chrono::milliseconds timeout, TensorList inputs,
              TensorLists results, int source_rank = -1);
  // Waits for all ranks and returns their FactsOf() the tensor, by rank.
  TensorList GatherSparseFacts(const at::Tensor& tensor, std::chrono::milliseconds timeout);
  // Keeps the tensors of `flight` until it has ended, and drops the flights that have.
  void Keep(std::shared_ptr<Flight> flight);
  // Leaves the group, or ends it on all ranks where `why` is not empty. A forked child only forgets
  // it.
  void Leave(const std::string& why, std::chrono::milliseconds timeout);
  // Throws in a forked child, and after Leave().
  void CheckUsable(const char* operation) const;
  bool IsForkedChild() const;
  // Leaves the group, and destroys it: when the last reference goes.
  void End();

  void CheckRank(const char* operation, const char* what, int64_t rank) const;
  void CheckListSize(const char* operation, const char* what, size_t size) const;
  void CheckTag(const char* operation, int tag) const;

  const pid_t pid_;
  const c10::intrusive_ptr<Options> options_;
  std::unique_ptr<abi::Group> group_;
  std::shared_ptr<StoreClones> clones_;  // Kept until this rank leaves the group.
  const std::shared_ptr<Completer> completer_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};      // Collectives of torch.distributed, without messages.
  std::atomic<std::thread::id> issuer_{};  // The thread that called the last collective.
  const std::shared_ptr<std::atomic<bool>> has_several_issuers_ =
      std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> has_left_{false};
  std::mutex mutex_;
  std::deque<std::shared_ptr<Flight>> flying_;  // Guarded by mutex_.
};

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_BACKEND_H_
