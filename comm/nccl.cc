// An operation's way: Start() marks its place on the caller's stream; the launch queue calls Launch() in its turn,
// which puts it on the group's stream with an event behind it; the completion thread sees the event and finishes the
// work.
//
// The communicator is non-blocking, so that no call into NCCL can hang: what is in progress is polled for, because NCCL
// has nothing to wait on. `mutex_` is held for each such call and not in between, so that Abort() can come at any time.

#include "evenkeel/comm/nccl.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/internal/launch_queue.h"
#include "evenkeel/comm/internal/reduce_kernels.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {
namespace {

// Frees a communicator without waiting for peers.
struct NcclCommDeleter {
  void operator()(ncclComm_t comm) const { ncclCommAbort(comm); }
};
using UniqueNcclComm = std::unique_ptr<ncclComm, NcclCommDeleter>;

struct StreamDeleter {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
using UniqueStream = std::unique_ptr<CUstream_st, StreamDeleter>;

struct EventDeleter {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using UniqueEvent = std::unique_ptr<CUevent_st, EventDeleter>;

// Sets the calling thread's device for a scope.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~ScopedDevice() { cudaSetDevice(before_); }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int before_ = 0;
};

absl::Status FromCuda(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

absl::Status FromNccl(absl::string_view what, ncclResult_t result, ncclComm_t comm) {
  std::string text = absl::StrCat(what, ": ", ncclGetErrorString(result));
  const char* const detail = ncclGetLastError(comm);
  if (detail != nullptr && *detail != '\0') absl::StrAppend(&text, " (", detail, ")");
  switch (result) {
    case ncclSuccess:
    case ncclInProgress:
      return absl::OkStatus();
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return absl::InvalidArgumentError(text);
    case ncclSystemError:
    case ncclRemoteError:
      return absl::UnavailableError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::StatusOr<UniqueEvent> MakeEvent() {
  cudaEvent_t event = nullptr;
  EK_RETURN_IF_ERROR(FromCuda("cudaEventCreate", cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
  return UniqueEvent(event);
}

// An event behind all that is on `stream` now.
absl::StatusOr<UniqueEvent> Mark(cudaStream_t stream) {
  EK_ASSIGN_OR_RETURN(UniqueEvent event, MakeEvent());
  EK_RETURN_IF_ERROR(FromCuda("cudaEventRecord", cudaEventRecord(event.get(), stream)));
  return event;
}

absl::StatusOr<ncclDataType_t> NcclType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kInt8:
      return ncclInt8;
    case DType::kUint8:
      return ncclUint8;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
    case DType::kInt16:
      break;
  }
  return absl::UnimplementedError(absl::StrCat("nccl: no ", ToString(dtype)));
}

// NCCL's reduction for an operation; made for it where the sum has a scale.
class Reduction {
 public:
  Reduction(const Operation& operation, ncclDataType_t type, ncclComm_t comm) : comm_(comm) {
    const ReduceOp op = operation.what.op;
    const bool is_float = IsFloat(operation.what.dtype);
    if (op == ReduceOp::kMin) op_ = ncclMin;
    if (op == ReduceOp::kMax) op_ = ncclMax;
    if (op == ReduceOp::kProduct) op_ = ncclProd;
    if (op == ReduceOp::kAverage && !is_float) op_ = ncclAvg;  // Rounds towards zero.
    const bool is_scaled = is_float && operation.scale != 1.0;
    const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAverage;
    if (is_scaled && !is_sum) {
      status_ = absl::UnimplementedError(absl::StrCat("nccl: no scale with ", ToString(op)));
    } else if (is_scaled) {
      // Room for any type; NCCL reads as much as the type has.
      alignas(8) std::byte scalar[8] = {};
      WriteScalar(operation.what.dtype, operation.scale, scalar);
      const ncclResult_t made = ncclRedOpCreatePreMulSum(&op_, scalar, type, ncclScalarHostImmediate, comm);
      status_ = FromNccl("ncclRedOpCreatePreMulSum", made, comm);
      is_made_ = status_.ok();
    }
  }
  ~Reduction() {
    if (is_made_) ncclRedOpDestroy(op_, comm_);
  }
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  const absl::Status& status() const { return status_; }
  ncclRedOp_t op() const { return op_; }

 private:
  static void WriteScalar(DType dtype, double value, std::byte* to) {
    const auto write = [to](auto scalar) { std::memcpy(to, &scalar, sizeof(scalar)); };
    if (dtype == DType::kFloat64) return write(value);
    if (dtype == DType::kFloat16) return write(Float16(static_cast<float>(value)));
    if (dtype == DType::kBFloat16) return write(BFloat16(static_cast<float>(value)));
    write(static_cast<float>(value));
  }

  const ncclComm_t comm_;
  ncclRedOp_t op_ = ncclSum;
  bool is_made_ = false;
  absl::Status status_;
};

// What OrderBefore() needs of an operation, which may outlive it.
struct LaunchMark {
  absl::Notification is_decided;
  UniqueEvent done;  // Behind the operation; null if it was never launched.
};

struct Flight {
  Operation operation;
  std::shared_ptr<WorkState> work;
  UniqueEvent ready;  // Behind what the operation starts after; null: nothing.
  std::shared_ptr<LaunchMark> mark = std::make_shared<LaunchMark>();
  std::vector<std::byte> identity;  // Host memory that the stream still reads.
};

class NcclBackend : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<NcclBackend>> Create(int rank, int world_size, int device);
  ~NcclBackend() override;

  absl::Status Connect(ControlChannel& control, const NcclOptions& options);

  absl::string_view name() const override { return "nccl"; }
  Device device() const override { return Device::Cuda(device_); }
  absl::Status Supports(const Collective& what) const override;
  bool checks_pairs() const override { return false; }  // NCCL sends no header.
  void Start(Operation operation, std::shared_ptr<WorkState> work) override;
  void Abort(const absl::Status& why) override;
  absl::StatusOr<Memory> Allocate(int64_t bytes) override;

 private:
  NcclBackend(int rank, int world_size, int device, UniqueStream stream)
      : rank_(rank), world_size_(world_size), device_(device), stream_(std::move(stream)) {}

  void Launch(const std::shared_ptr<Flight>& flight);
  absl::Status PutOnStream(Flight& flight);
  absl::Status PutOnStreamLocked(Flight& flight) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FillWithIdentity(Flight& flight) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until NCCL has done what it was told.
  absl::Status AwaitProgress(absl::string_view what, absl::Time deadline);
  void WatchCompletions();
  absl::Status Completed(const Flight& flight, bool& is_done);

  const int rank_;
  const int world_size_;
  const int device_;
  const UniqueStream stream_;

  absl::Mutex mutex_;
  UniqueNcclComm comm_ ABSL_GUARDED_BY(mutex_);  // Null before Connect() and after Abort().
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Flight>> flights_ ABSL_GUARDED_BY(mutex_);  // Launched, in stream order.
  bool is_leaving_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<internal::LaunchQueue> queue_;  // Made by Connect(), before the first operation.
  std::thread completions_;
};

absl::StatusOr<std::unique_ptr<NcclBackend>> NcclBackend::Create(int rank, int world_size, int device) {
  EK_ASSIGN_OR_RETURN(const int devices, CudaDeviceCount());
  if (device < 0 || device >= devices) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " wants CUDA device ", device, ", there are ", devices));
  }
  const ScopedDevice scope(device);
  cudaStream_t stream = nullptr;
  EK_RETURN_IF_ERROR(FromCuda("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  return std::unique_ptr<NcclBackend>(new NcclBackend(rank, world_size, device, UniqueStream(stream)));
}

NcclBackend::~NcclBackend() {
  Abort(absl::CancelledError(absl::StrCat("rank ", rank_, " left the group")));
  queue_.reset();
  {
    absl::MutexLock lock(&mutex_);
    is_leaving_ = true;
  }
  if (completions_.joinable()) completions_.join();
}

absl::Status NcclBackend::Connect(ControlChannel& control, const NcclOptions& options) {
  const absl::Time deadline = absl::Now() + options.connect_timeout;
  std::string bytes = options.unique_id;
  if (bytes.empty()) {
    if (rank_ == 0) {
      EK_ASSIGN_OR_RETURN(bytes, MakeNcclUniqueId());
      control.Put("nccl unique id", bytes);
    } else {
      EK_ASSIGN_OR_RETURN(bytes, control.Get("nccl unique id", options.connect_timeout));
    }
  }
  ncclUniqueId id;
  if (bytes.size() != sizeof(id)) {
    return absl::InvalidArgumentError(absl::StrCat("an NCCL id has ", sizeof(id), " bytes, not ", bytes.size()));
  }
  std::memcpy(&id, bytes.data(), sizeof(id));
  {
    const ScopedDevice scope(device_);
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) return ended_;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    const ncclResult_t result = ncclCommInitRankConfig(&comm, world_size_, id, rank_, &config);
    comm_.reset(comm);
    EK_RETURN_IF_ERROR(FromNccl("ncclCommInitRankConfig", result, comm));
  }
  EK_RETURN_IF_ERROR(AwaitProgress("connecting the group", deadline));
  queue_ = std::make_unique<internal::LaunchQueue>(control, "nccl");
  completions_ = std::thread([this] { WatchCompletions(); });
  return absl::OkStatus();
}

absl::Status NcclBackend::AwaitProgress(absl::string_view what, absl::Time deadline) {
  constexpr absl::Duration kLongestPause = absl::Milliseconds(1);
  for (absl::Duration pause = absl::Microseconds(10);; pause = std::min(2 * pause, kLongestPause)) {
    {
      absl::MutexLock lock(&mutex_);
      if (!ended_.ok()) return ended_;
      ncclResult_t state = ncclInProgress;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_.get(), &state);
      EK_RETURN_IF_ERROR(FromNccl(what, asked, comm_.get()));
      if (state != ncclInProgress) return FromNccl(what, state, comm_.get());
    }
    if (absl::Now() > deadline) return absl::DeadlineExceededError(absl::StrCat("nccl: ", what, " took too long"));
    absl::SleepFor(pause);
  }
}

absl::Status NcclBackend::Supports(const Collective& what) const {
  if (what.kind != CollectiveKind::kAllReduce && what.kind != CollectiveKind::kBroadcast) {
    return absl::UnimplementedError(absl::StrCat("nccl: no ", ToString(what.kind), " yet"));
  }
  if (what.kind == CollectiveKind::kAllReduce && what.op == ReduceOp::kBitOr) {
    return absl::UnimplementedError("nccl: no bit_or");
  }
  return NcclType(what.dtype).status();
}

void NcclBackend::Start(Operation operation, std::shared_ptr<WorkState> work) {
  auto flight = std::make_shared<Flight>();
  flight->operation = std::move(operation);
  flight->work = std::move(work);
  if (flight->operation.after.handle != nullptr) {
    const ScopedDevice scope(device_);
    absl::StatusOr<UniqueEvent> ready = Mark(static_cast<cudaStream_t>(flight->operation.after.handle));
    if (!ready.ok()) return flight->work->Finish(ready.status());
    flight->ready = *std::move(ready);
  }
  flight->work->order_before = [mark = flight->mark, deadline = flight->work->deadline()](StreamRef stream) {
    if (!mark->is_decided.WaitForNotificationWithDeadline(deadline)) {
      return absl::DeadlineExceededError("nccl: the operation was not launched in time");
    }
    if (mark->done == nullptr) return absl::UnavailableError("nccl: the operation was not launched; see Wait()");
    return FromCuda("cudaStreamWaitEvent",
                    cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), mark->done.get(), 0));
  };
  const Operation& op = flight->operation;
  queue_->Push(op.what, op.channel, op.sequence, [this, flight](const absl::Status& turn) {
    if (turn.ok()) return Launch(flight);
    flight->mark->is_decided.Notify();
    flight->work->Finish(turn);
  });
}

void NcclBackend::Launch(const std::shared_ptr<Flight>& flight) {
  absl::Status status = PutOnStream(*flight);
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    status = ended_;
    if (status.ok()) flights_.push_back(flight);
  }
  flight->mark->is_decided.Notify();
  if (!status.ok()) flight->work->Finish(status);
}

absl::Status NcclBackend::PutOnStream(Flight& flight) {
  const ScopedDevice scope(device_);
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) return ended_;
    EK_RETURN_IF_ERROR(PutOnStreamLocked(flight));
  }
  EK_RETURN_IF_ERROR(AwaitProgress(ToString(flight.operation.what), flight.operation.deadline));
  EK_ASSIGN_OR_RETURN(flight.mark->done, Mark(stream_.get()));
  return absl::OkStatus();
}

absl::Status NcclBackend::PutOnStreamLocked(Flight& flight) {
  const Operation& operation = flight.operation;
  const Collective& what = operation.what;
  if (flight.ready != nullptr) {
    EK_RETURN_IF_ERROR(FromCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_.get(), flight.ready.get(), 0)));
  }
  EK_ASSIGN_OR_RETURN(const ncclDataType_t type, NcclType(what.dtype));
  const Reduction reduction(operation, type, comm_.get());
  EK_RETURN_IF_ERROR(reduction.status());
  const bool reduces = what.kind == CollectiveKind::kAllReduce;
  if (reduces && !operation.contributes) EK_RETURN_IF_ERROR(FillWithIdentity(flight));

  EK_RETURN_IF_ERROR(FromNccl("ncclGroupStart", ncclGroupStart(), comm_.get()));
  absl::Status issued;
  for (size_t i = 0; i < operation.in.size() && issued.ok(); ++i) {
    const TensorView& in = operation.in[i];
    const TensorView& out = operation.out[i];
    if (in.count == 0) continue;
    const ncclResult_t result =
        reduces ? ncclAllReduce(in.data, out.data, in.count, type, reduction.op(), comm_.get(), stream_.get())
                : ncclBroadcast(in.data, out.data, in.count, type, what.root, comm_.get(), stream_.get());
    issued = FromNccl(ToString(what), result, comm_.get());
  }
  const ncclResult_t ended = ncclGroupEnd();
  EK_RETURN_IF_ERROR(issued);
  return FromNccl("ncclGroupEnd", ended, comm_.get());
}

absl::Status NcclBackend::FillWithIdentity(Flight& flight) {
  const Operation& operation = flight.operation;
  int64_t largest = 0;
  for (const TensorView& view : operation.in) largest = std::max(largest, view.count);
  const DType dtype = operation.what.dtype;
  flight.identity.resize(largest * SizeOf(dtype));
  internal::FillIdentity(operation.what.op, dtype, flight.identity.data(), largest);
  for (const TensorView& view : operation.in) {
    if (view.count == 0) continue;
    EK_RETURN_IF_ERROR(FromCuda("cudaMemcpyAsync", cudaMemcpyAsync(view.data, flight.identity.data(), view.bytes(),
                                                                   cudaMemcpyHostToDevice, stream_.get())));
  }
  return absl::OkStatus();
}

void NcclBackend::WatchCompletions() {
  constexpr absl::Duration kLongestPause = absl::Microseconds(500);
  const ScopedDevice scope(device_);
  absl::Duration pause = absl::Microseconds(10);
  while (true) {
    std::shared_ptr<Flight> front;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_leaving_ || !flights_.empty(); };
      mutex_.Await(absl::Condition(&ready));
      if (is_leaving_) return;
      front = flights_.front();
    }
    bool is_done = false;
    absl::Status status = Completed(*front, is_done);
    if (status.ok() && !is_done) {
      absl::SleepFor(pause);
      pause = std::min(2 * pause, kLongestPause);
      continue;
    }
    pause = absl::Microseconds(10);
    if (!status.ok()) {
      Abort(status);
      continue;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (flights_.empty() || flights_.front() != front) continue;  // Abort() was faster.
      flights_.pop_front();
    }
    front->work->Finish(absl::OkStatus());
  }
}

absl::Status NcclBackend::Completed(const Flight& flight, bool& is_done) {
  const cudaError_t state = cudaEventQuery(flight.mark->done.get());
  is_done = state == cudaSuccess;
  if (state != cudaSuccess && state != cudaErrorNotReady) return FromCuda("nccl: the device", state);
  if (is_done) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return absl::OkStatus();
  ncclResult_t error = ncclSuccess;
  EK_RETURN_IF_ERROR(FromNccl("ncclCommGetAsyncError", ncclCommGetAsyncError(comm_.get(), &error), comm_.get()));
  return FromNccl(ToString(flight.operation.what), error, comm_.get());
}

void NcclBackend::Abort(const absl::Status& why) {
  std::deque<std::shared_ptr<Flight>> flights;
  absl::Status first;
  {
    const ScopedDevice scope(device_);
    absl::MutexLock lock(&mutex_);
    if (ended_.ok()) ended_ = why;
    first = ended_;
    comm_.reset();                         // Ends the kernels that wait for peers.
    cudaStreamSynchronize(stream_.get());  // From here on nothing touches a buffer.
    flights.swap(flights_);
  }
  if (queue_ != nullptr) queue_->Abort(first);
  for (const std::shared_ptr<Flight>& flight : flights) flight->work->Finish(first);
}

absl::StatusOr<Memory> NcclBackend::Allocate(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Allocate: ", bytes, " bytes"));
  const ScopedDevice scope(device_);
  void* data = nullptr;
  if (cudaMalloc(&data, std::max<int64_t>(bytes, 1)) != cudaSuccess) {
    return absl::ResourceExhaustedError(
        absl::StrCat("Allocate: no memory for ", bytes, " bytes on ", ToString(device())));
  }
  Memory memory{std::shared_ptr<void>(data, [](void* pointer) { cudaFree(pointer); }), bytes};
  EK_RETURN_IF_ERROR(FromCuda("cudaMemset", cudaMemset(data, 0, bytes)));
  return memory;
}

}  // namespace

absl::StatusOr<int> CudaDeviceCount() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return absl::FailedPreconditionError(absl::StrCat("no CUDA device: ", cudaGetErrorString(error)));
  }
  if (count == 0) return absl::FailedPreconditionError("no CUDA device: none is visible to this process");
  return count;
}

absl::StatusOr<std::string> MakeNcclUniqueId() {
  EK_RETURN_IF_ERROR(CudaDeviceCount().status());
  ncclUniqueId id;
  EK_RETURN_IF_ERROR(FromNccl("ncclGetUniqueId", ncclGetUniqueId(&id), nullptr));
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclGroup(int rank, int world_size,
                                                              std::unique_ptr<ControlLink> control,
                                                              const NcclOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat("CreateNcclGroup: there is no rank ", rank, " of ", world_size));
  }
  auto channel = std::make_unique<ControlChannel>(rank, world_size, std::move(control));
  absl::StatusOr<std::unique_ptr<NcclBackend>> made = NcclBackend::Create(rank, world_size, options.device);
  if (!made.ok()) {
    channel->Fail(Annotate(made.status(), absl::StrCat("rank ", rank)));
    return made.status();
  }
  NcclBackend& backend = **made;
  // Made before the ranks are connected, so that a rank that is lost meanwhile ends the wait.
  auto comm = std::make_unique<Communicator>(
      *std::move(made), std::move(channel), options.communicator, options.group,
      [options](absl::string_view group, int next_rank, int next_world_size, std::unique_ptr<ControlLink> link,
                absl::Duration timeout) {
        NcclOptions next = options;
        next.group = std::string(group);
        next.connect_timeout = timeout;
        next.unique_id.clear();  // Good for one group.
        return CreateNcclGroup(next_rank, next_world_size, std::move(link), next);
      });
  const absl::Status connected = backend.Connect(comm->control(), options);
  if (connected.ok()) return comm;
  comm->Abort(connected);
  return comm->status();
}

}  // namespace evenkeel
