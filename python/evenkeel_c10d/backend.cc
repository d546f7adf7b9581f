#include "backend.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <limits>
#include <utility>

#include "error.h"
#include "store.h"

namespace evenkeel::bridge {
namespace {

using abi::Kind;
using c10d::OpType;

// The time that an end without shutdown() waits for issued operations.
constexpr std::chrono::milliseconds kDestructorTimeout{5'000};

// The time that each end waits for callbacks of futures.
constexpr std::chrono::seconds kCallbackTimeout{5};

// An operation looks at this many flights that have not landed.
constexpr size_t kFlightsToLookAt = 4;

// Torch has the first names since 2.14; before, such a call has the type of one with one tensor.
#ifdef C10D_BACKEND_HAS_RECONFIGURE
constexpr OpType kAllGatherIntoTensor = OpType::ALLGATHER_INTO_TENSOR_COALESCED;
constexpr OpType kReduceScatterTensor = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
constexpr OpType kAllGatherIntoTensor = OpType::_ALLGATHER_BASE;
constexpr OpType kReduceScatterTensor = OpType::_REDUCE_SCATTER_BASE;
#endif

// The backends that have not been destroyed. Never freed: they may outlive static objects.
struct Live {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<Backend>> backends;
};
Live& LiveBackends() {
  static auto* live = new Live;
  return *live;
}

// Returns `count` elements of the tensor of `buffer`, whose elements are `encoding`.
abi::Buffer PartOf(const abi::Buffer& buffer, int64_t per_element, int64_t begin, int64_t count) {
  const int64_t offset = begin * per_element * SizeOf(buffer.dtype);
  return {.data = static_cast<char*>(buffer.data) + offset,
          .count = count * per_element,
          .dtype = buffer.dtype};
}

// Returns an all-to-all whose parts are all empty, of the type of `buffer`.
abi::Call EmptyAllToAll(const abi::Buffer& buffer, int world_size) {
  const std::vector<abi::Buffer> empty(world_size, {.dtype = buffer.dtype});
  return {.kind = Kind::kAllToAll, .in = empty, .out = empty};
}

// Returns the parts of a buffer that lies `splits` rows for each rank along dimension 0; or even
// parts if `splits` is empty.
std::vector<abi::Buffer> SplitRows(const char* operation, const char* what,
                                   const at::Tensor& tensor, const abi::Buffer& buffer,
                                   const std::vector<int64_t>& splits, int world_size) {
  TORCH_CHECK(tensor.dim() > 0, "evenkeel: ", operation, " splits the ", what,
              " along dimension 0 and got a tensor without dimensions.");
  const int64_t rows = tensor.size(0);
  std::vector<int64_t> parts = splits;
  if (parts.empty()) {
    TORCH_CHECK(rows % world_size == 0, "evenkeel: ", operation, " cannot split the ", rows,
                " rows of the ", what, " evenly over ", world_size,
                " ranks. Pass the sizes of the parts.");
    parts.assign(world_size, rows / world_size);
  }
  TORCH_CHECK(static_cast<int>(parts.size()) == world_size, "evenkeel: ", operation, " needs ",
              world_size, " sizes of parts of the ", what, ", one per rank, and got ", parts.size(),
              ".");
  const int64_t per_row = rows == 0 ? 0 : tensor.numel() / rows;
  const int64_t per_element = EncodeForMove(tensor.scalar_type()).per_element;
  std::vector<abi::Buffer> buffers;
  int64_t begin = 0;
  for (const int64_t part : parts) {
    TORCH_CHECK(part >= 0 && part <= rows - begin, "evenkeel: ", operation,
                " got parts of the sizes ", parts, " for the ", rows, " rows of the ", what, ".");
    buffers.push_back(PartOf(buffer, per_element, begin * per_row, part * per_row));
    begin += part;
  }
  TORCH_CHECK(begin == rows, "evenkeel: ", operation, " got parts of the sizes ", parts,
              " for the ", rows, " rows of the ", what, ".");
  return buffers;
}

// The facts about a sparse tensor that all ranks need before its elements can be gathered: its
// rows (the number of its indices), type, dimensions that are sparse, dimensions, and sizes.
constexpr int64_t kMaxSparseDims = 12;
enum Fact : int64_t { kRows, kType, kSparseDims, kDims, kSizes, kFacts = kSizes + kMaxSparseDims };

at::Tensor NewFacts() { return at::zeros({kFacts}, at::kLong); }

at::Tensor FactsOf(const at::Tensor& tensor) {
  at::Tensor facts = NewFacts();
  auto* fact = facts.mutable_data_ptr<int64_t>();
  fact[kRows] = tensor._nnz();
  fact[kType] = static_cast<int64_t>(tensor.scalar_type());
  fact[kSparseDims] = tensor.sparse_dim();
  fact[kDims] = tensor.dim();
  std::ranges::copy(tensor.sizes(), fact + kSizes);
  return facts;
}

int64_t RowsOf(const at::Tensor& facts) { return facts.const_data_ptr<int64_t>()[kRows]; }

// All ranks have the same facts, so that all of them throw.
void CheckSameFacts(const TensorList& facts) {
  const auto text = [](const int64_t* fact) {
    return c10::str(static_cast<at::ScalarType>(fact[kType]), " of shape ",
                    at::IntArrayRef(fact + kSizes, fact[kDims]), ", ", fact[kSparseDims],
                    " dimensions of it sparse");
  };
  const auto* first = facts[0].const_data_ptr<int64_t>();
  for (size_t rank = 1; rank < facts.size(); ++rank) {
    const auto* other = facts[rank].const_data_ptr<int64_t>();
    TORCH_CHECK(std::equal(first + kType, first + kFacts, other + kType),
                "evenkeel: all_reduce adds sparse tensors of one type and shape. Rank 0 has ",
                text(first), ", rank ", rank, " ", text(other), ".");
  }
}

void CheckSparse(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu(), "evenkeel: ", operation,
              " takes tensors of the CPU and got one on ", tensor.device(),
              ". Use the backend \"cpu:evenkeel,cuda:nccl\", which leaves CUDA tensors to NCCL.");
  TORCH_CHECK(tensor.dim() <= kMaxSparseDims, "evenkeel: ", operation,
              " takes sparse tensors with at most ", kMaxSparseDims,
              " dimensions and got one with ", tensor.dim(), ". Convert it with to_dense().");
}

void CheckSameSize(const char* operation, size_t outputs, size_t inputs) {
  TORCH_CHECK(inputs > 0 && outputs == inputs, "evenkeel: ", operation,
              " needs as many outputs as inputs, at least one, and got ", outputs, " outputs and ",
              inputs, " inputs.");
}

}  // namespace

// ---- Life ----

c10::intrusive_ptr<Backend> Backend::Create(const Settings& settings) {
  TORCH_CHECK(settings.rank >= 0 && settings.rank < settings.world_size, "evenkeel: the rank ",
              settings.rank, " is not in a group of ", settings.world_size, " ranks.");
  StoreAdapter store(settings.store, settings.rank,
                     settings.global_ranks.empty() ? settings.name : "ranks", settings.name,
                     settings.global_ranks);
  const abi::Options options = OptionsOf(settings.store, settings.rank, settings.world_size,
                                         settings.timeout, store.name(), settings.global_ranks);
  abi::Failure failure;
  std::unique_ptr<abi::Group> group = abi::CreateGroup(store, options, &failure);
  if (group == nullptr) std::rethrow_exception(ExceptionOf(failure));
  auto backend = c10::make_intrusive<Backend>(settings, std::move(group));
  backend->clones_ = store.clones();
  Live& live = LiveBackends();
  const std::lock_guard lock(live.mutex);
  // Those have ended: what remains of them is memory.
  std::erase_if(live.backends, [](const auto& other) { return other.expired(); });
  live.backends.emplace_back(backend);
  return backend;
}

Backend::Backend(const Settings& settings, std::unique_ptr<abi::Group> group)
    : c10d::Backend(settings.rank, settings.world_size),
      pid_(getpid()),
      options_(c10::make_intrusive<Options>("evenkeel", settings.timeout)),
      group_(std::move(group)),
      completer_(std::make_shared<Completer>()),
      timeout_ms_(settings.timeout.count()) {
  options_->group_name = settings.name;
  options_->global_ranks_in_group = settings.global_ranks;
  init();
}

bool Backend::IsForkedChild() const { return getpid() != pid_; }

void Backend::CheckUsable(const char* operation) const {
  TORCH_CHECK(!IsForkedChild(), "evenkeel: ", operation, " was called in a process that was",
              " forked after its group had been made. Make a group in the new process.");
  TORCH_CHECK(!has_left_, "evenkeel: ", operation,
              " was called on a group that has been destroyed.");
}

void Backend::End() {
  if (group_ == nullptr) return;
  Leave("", kDestructorTimeout);
  if (IsForkedChild()) {
    // It has neither the threads nor the right to use the parent's connections.
    group_.release();  // NOLINT(bugprone-unused-return-value)
    new std::shared_ptr<Completer>(completer_);
    new std::shared_ptr<StoreClones>(clones_);
  } else {
    WithoutGil([this] { group_.reset(); });
  }
}

std::string Backend::FlightJson() const {
  CheckUsable("flight_json");
  return group_->FlightJson();
}

void Backend::LeaveAll(const std::string& why, std::chrono::milliseconds timeout) {
  std::vector<c10::intrusive_ptr<Backend>> backends;
  {
    Live& live = LiveBackends();
    const std::lock_guard lock(live.mutex);
    for (const auto& weak : live.backends) {
      if (auto backend = weak.lock(); backend != nullptr && !backend->IsForkedChild()) {
        backends.push_back(std::move(backend));
      }
    }
  }
  // Each may wait for its timeout, or for its ranks if this one hosts the hub. Without a thread for
  // that, they leave one after the other.
  std::vector<std::future<void>> leaving;
  for (const auto& backend : backends) {
    leaving.push_back(std::async([&] { backend->Leave(why, timeout); }));
  }
  for (std::future<void>& one : leaving) one.wait();
}

void Backend::Leave(const std::string& why, std::chrono::milliseconds timeout) {
  if (has_left_.exchange(true) || IsForkedChild()) return;
  WithoutGil([&] {
    if (!why.empty()) {
      group_->Abort(why);
      group_->Leave(timeout);
    } else {
      const bool has_failed = group_->failure().code != abi::Code::kOk;
      const abi::Failure failure = group_->Leave(timeout);
      if (failure.code != abi::Code::kOk && !has_failed) TORCH_WARN("evenkeel: ", failure.message);
    }
    if (!completer_->Stop(kCallbackTimeout)) {
      TORCH_WARN("evenkeel: the group ", options_->group_name,
                 " has ended, and a callback of a future", " still runs after ",
                 kCallbackTimeout.count(), " s. It goes on, at most until the", " process ends.");
    }
    Keep(nullptr);
    clones_ = nullptr;
  });
}

void Backend::shutdown() { Leave("", std::chrono::milliseconds(timeout_ms_)); }

void Backend::abort() {
  if (IsForkedChild()) return;
  const std::string why = c10::str("rank ", rank_, " called abort()", ReasonOfAbort());
  WithoutGil([&] { group_->Abort(why); });
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  timeout_ms_ = timeout.count();
}

c10d::ErrorType Backend::getError() {
  switch (group_->failure().code) {
    case abi::Code::kOk:
      return c10d::ErrorType::SUCCESS;
    case abi::Code::kDeadlineExceeded:
      return c10d::ErrorType::TIMEOUT;
    case abi::Code::kAborted:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      options == nullptr || options->backend != "gloo",
      "evenkeel: the group is to be split with Gloo's pg_options, which evenkeel cannot follow: ",
      "leave pg_options out, and set timeout= instead of their timeout.");
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  std::vector<uint64_t> global_ranks;
  for (const int rank : ranks) {
    const std::vector<uint64_t>& ours = options_->global_ranks_in_group;
    global_ranks.push_back(ours.empty() ? rank : ours.at(rank));
  }
  const c10::intrusive_ptr<Options> given = options == nullptr ? options_ : options;
  return Create({.store = store,
                 .rank = static_cast<int>(found - ranks.begin()),
                 .world_size = static_cast<int>(ranks.size()),
                 .timeout = given->timeout,
                 .name = given->group_name,
                 .global_ranks = std::move(global_ranks)});
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<Options>& options,
                                                 const int& rank, const int& size) {
  const c10::intrusive_ptr<Options> given = options == nullptr ? options_ : options;
  return Create({.store = store,
                 .rank = rank,
                 .world_size = size,
                 .timeout = given->timeout,
                 .name = given->group_name,
                 .global_ranks = given->global_ranks_in_group});
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK(options.device().is_cpu(), "evenkeel: allocate_tensor() gives memory of the CPU and ",
              "was asked for ", options.device(), ".");
  CheckUsable("allocate_tensor()");
  const int64_t element = static_cast<int64_t>(options.dtype().itemsize());
  TORCH_CHECK(size >= 0, "evenkeel: allocate_tensor() was asked for ", size, " elements.");
  std::shared_ptr<void> memory;
  if (size <= std::numeric_limits<int64_t>::max() / element)
    memory = group_->Allocate(size * element);
  TORCH_CHECK(memory != nullptr, "evenkeel: there is no memory for ", size, " elements of ",
              element, " bytes.");
  void* data = memory.get();
  return at::from_blob(
      data, {size}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

// ---- Running operations ----

WorkPtr Backend::Run(Operation operation, std::chrono::milliseconds timeout, TensorList inputs,
                     TensorLists results, int source_rank) {
  CheckUsable(operation.name());
  if (timeout.count() <= 0) timeout = std::chrono::milliseconds(timeout_ms_);
  const bool is_message = c10d::isP2POp(operation.type());
  TORCH_CHECK(
      is_message || !Completer::IsRunning(), "evenkeel: ", operation.name(),
      " was called in a callback that runs beside the program, so the ranks cannot agree on",
      " its order. Callbacks of a message's future or of torch.futures.collect_all() do so.",
      " Wait for the future, and then call ", operation.name(), ".");
  const bool has_copies = operation.has_copies();
  const Work::Attributes attributes{.rank = rank_,
                                    .source_rank = source_rank,
                                    .sender = operation.sender,
                                    .title = operation.title(),
                                    .type = operation.type(),
                                    .sequence = is_message ? sequence_.load() : ++sequence_,
                                    .timeout = timeout,
                                    .inputs = std::move(inputs),
                                    .results = std::move(results)};
  if (!is_message) {
    const std::thread::id before = issuer_.exchange(std::this_thread::get_id());
    if (before != std::thread::id() && before != std::this_thread::get_id())
      *has_several_issuers_ = true;
  }
  std::vector<std::shared_ptr<abi::Work>> works;
  for (abi::Call call : operation.calls()) {
    call.timeout = timeout;
    works.push_back(group_->Issue(call));
  }
  auto flight =
      std::make_shared<Flight>(std::move(operation), std::move(works), has_several_issuers_);
  auto work = c10::make_intrusive<Work>(attributes, flight, completer_);
  Keep(std::move(flight));
  // Outputs must be right after any later barrier(), even if no caller waits for this work.
  if (has_copies) work->WatchOnce();
  return work;
}

void Backend::Keep(std::shared_ptr<Flight> flight) {
  // Thousands may be in the air: an operation looks at few that have not landed, in turn.
  const size_t most = flight == nullptr ? std::numeric_limits<size_t>::max() : kFlightsToLookAt;
  std::vector<std::shared_ptr<Flight>> flying;
  while (flying.size() < most) {
    std::shared_ptr<Flight> oldest;  // Dropped without the lock.
    {
      const std::lock_guard lock(mutex_);
      if (flying_.empty()) break;
      oldest = std::move(flying_.front());
      flying_.pop_front();
    }
    if (!oldest->TryEnd()) flying.push_back(std::move(oldest));
  }
  if (flight != nullptr) flying.push_back(std::move(flight));
  const std::lock_guard lock(mutex_);
  flying_.insert(flying_.end(), flying.begin(), flying.end());
}

void Backend::CheckRank(const char* operation, const char* what, int64_t rank) const {
  TORCH_CHECK(rank >= 0 && rank < size_, "evenkeel: ", operation, " got the ", what, " rank ", rank,
              ", which is not in a group of ", size_, " ranks.");
}

void Backend::CheckListSize(const char* operation, const char* what, size_t size) const {
  TORCH_CHECK(static_cast<int>(size) == size_, "evenkeel: ", operation, " needs ", size_, " ", what,
              ", one per rank, and got ", size, ".");
}

void Backend::CheckTag(const char* operation, int tag) const {
  TORCH_CHECK(tag >= 0, "evenkeel: ", operation, " got the tag ", tag, ", which is negative.");
}

// ---- Operations ----

WorkPtr Backend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == at::kSparse)
    return allreduce_sparse(tensors, options);
  Operation operation("evenkeel:all_reduce", OpType::ALLREDUCE);
  const at::Tensor& tensor = OnlyOne(operation.name(), "tensor", tensors);
  operation.AddReduce(Kind::kAllReduce, tensor, options.reduceOp, tensor);
  return Run(std::move(operation), options.timeout, tensors, {tensors});
}

WorkPtr Backend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& options) {
  Operation operation("evenkeel:all_reduce", OpType::_ALLREDUCE_SPARSE);
  const at::Tensor& tensor = OnlyOne(operation.name(), "tensor", tensors);
  CheckSparse(operation.name(), tensor);
  EncodeForReduce(operation.name(), tensor.scalar_type(), options.reduceOp);
  TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "evenkeel: ", operation.name(),
              " of sparse tensors adds them. Use ReduceOp.SUM, or convert them with to_dense().");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor my_indices = mine._indices(), my_values = mine._values();
  const TensorList facts = GatherSparseFacts(mine, options.timeout);
  CheckSameFacts(facts);
  TensorList all_indices, all_values;
  try {
    abi::Call indices{.kind = Kind::kAllGather, .in = {operation.Read(my_indices)}};
    abi::Call values{.kind = Kind::kAllGather, .in = {operation.Read(my_values)}};
    for (const at::Tensor& one : facts) {
      const int64_t rows = RowsOf(one);
      std::vector<int64_t> shape = my_values.sizes().vec();
      shape[0] = rows;
      all_indices.push_back(at::empty({mine.sparse_dim(), rows}, my_indices.options()));
      all_values.push_back(at::empty(shape, my_values.options()));
      indices.out.push_back(operation.Write(all_indices.back()));
      values.out.push_back(operation.Write(all_values.back()));
    }
    operation.Add(std::move(indices));
    operation.Add(std::move(values));
  } catch (const std::exception& error) {  // There may be no memory; the others wait for the rows.
    group_->Abort(c10::str("rank ", rank_, " cannot add sparse tensors: ", error.what()));
    throw;
  }
  operation.Then(
      [tensor, all_indices = std::move(all_indices), all_values = std::move(all_values)] {
        // Rank by rank, so that each row is a sum of two: coalesce() of all rows at once adds them
        // in an order of its own, which may depend on the processor.
        const auto coalesced = [&](const at::Tensor& indices, const at::Tensor& values) {
          return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), tensor.options())
              .coalesce();
        };
        at::Tensor sum = coalesced(all_indices[0], all_values[0]);
        for (size_t rank = 1; rank < all_values.size(); ++rank) {
          sum = coalesced(at::cat({sum._indices(), all_indices[rank]}, 1),
                          at::cat({sum._values(), all_values[rank]}));
        }
        tensor.copy_(sum);
        tensor._coalesced_(true);  // Also without rows.
      });
  return Run(std::move(operation), options.timeout, tensors, {tensors});
}

TensorList Backend::GatherSparseFacts(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
  Operation operation("evenkeel:all_reduce", OpType::_ALLREDUCE_SPARSE);
  TensorList facts;
  for (int rank = 0; rank < size_; ++rank) facts.push_back(NewFacts());
  const at::Tensor mine = FactsOf(tensor);
  abi::Call call{.kind = Kind::kAllGather, .in = {operation.Read(mine)}};
  for (const at::Tensor& one : facts) call.out.push_back(operation.Write(one));
  operation.Add(std::move(call));
  const WorkPtr work = Run(std::move(operation), timeout, {}, {});
  WithoutGil([&] { work->wait(); });
  return facts;
}

WorkPtr Backend::allreduce_coalesced(TensorList& tensors,
                                     const c10d::AllreduceCoalescedOptions& options) {
  Operation operation("evenkeel:all_reduce", OpType::ALLREDUCE_COALESCED);
  TORCH_CHECK(!tensors.empty(), "evenkeel: all_reduce_coalesced got no tensor.");
  for (const at::Tensor& tensor : tensors)
    operation.AddReduce(Kind::kAllReduce, tensor, options.reduceOp, tensor);
  return Run(std::move(operation), options.timeout, tensors, {tensors});
}

WorkPtr Backend::reduce(TensorList& tensors, const c10d::ReduceOptions& options) {
  Operation operation("evenkeel:reduce", OpType::REDUCE);
  CheckRank(operation.name(), "root", options.rootRank);
  const at::Tensor& tensor = OnlyOne(operation.name(), "tensor", tensors);
  operation.AddReduce(Kind::kReduce, tensor, options.reduceOp,
                      options.rootRank == rank_ ? tensor : at::Tensor(),
                      static_cast<int>(options.rootRank));
  return Run(std::move(operation), options.timeout, tensors, {tensors});
}

WorkPtr Backend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) {
  Operation operation("evenkeel:broadcast", OpType::BROADCAST);
  CheckRank(operation.name(), "root", options.rootRank);
  const at::Tensor& tensor = OnlyOne(operation.name(), "tensor", tensors);
  const bool is_root = options.rootRank == rank_;
  operation.Add({.kind = Kind::kBroadcast,
                 .out = {is_root ? operation.Read(tensor) : operation.Write(tensor)},
                 .root = static_cast<int>(options.rootRank)});
  return Run(std::move(operation), options.timeout, tensors, {tensors});
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  Operation operation("evenkeel:barrier", OpType::BARRIER);
  operation.Add({.kind = Kind::kBarrier});
  return Run(std::move(operation), options.timeout, {}, {});
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  const auto timeout = options.timeout == c10d::kUnsetTimeout
                           ? std::chrono::milliseconds(timeout_ms_)
                           : std::max(options.timeout, std::chrono::milliseconds(1));
  CheckUsable("monitored_barrier");
  abi::Failure failure;
  WithoutGil([&] { failure = group_->MonitoredBarrier(timeout); });
  if (failure.code != abi::Code::kOk) std::rethrow_exception(ExceptionOf(failure));
}

WorkPtr Backend::allgather(TensorLists& outputs, TensorList& inputs,
                           const c10d::AllgatherOptions& options) {
  Operation operation("evenkeel:all_gather", OpType::ALLGATHER);
  const at::Tensor& input = OnlyOne(operation.name(), "input", inputs);
  TORCH_CHECK(outputs.size() == 1, "evenkeel: all_gather takes one list of outputs and got ",
              outputs.size(), ".");
  CheckListSize(operation.name(), "outputs", outputs[0].size());
  CheckElements(operation.name(), "an output of this rank", outputs[0][rank_], input.scalar_type(),
                input.numel());
  abi::Call call{.kind = Kind::kAllGather, .in = {operation.Read(input)}};
  for (const at::Tensor& output : outputs[0]) {
    CheckElements(operation.name(), "an output", output, input.scalar_type(), output.numel());
    call.out.push_back(operation.Write(output));
  }
  operation.Add(std::move(call));
  return Run(std::move(operation), options.timeout, inputs, outputs);
}

WorkPtr Backend::allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                                     const c10d::AllgatherOptions& options) {
  Operation operation("evenkeel:all_gather", OpType::ALLGATHER_COALESCED);
  CheckListSize(operation.name(), "lists of outputs", outputs.size());
  for (const TensorList& list : outputs) {
    CheckSameSize(operation.name(), list.size(), inputs.size());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    abi::Call call{.kind = Kind::kAllGather, .in = {operation.Read(inputs[i])}};
    for (const TensorList& list : outputs) {
      CheckElements(operation.name(), "an output", list[i], inputs[i].scalar_type(),
                    inputs[i].numel());
      call.out.push_back(operation.Write(list[i]));
    }
    operation.Add(std::move(call));
  }
  return Run(std::move(operation), options.timeout, inputs, outputs);
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& options) {
  TensorList outputs{output};
  TensorList inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Backend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                 const c10d::AllgatherOptions& options) {
  Operation operation("evenkeel:all_gather", kAllGatherIntoTensor);
  CheckSameSize(operation.name(), outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckElements(operation.name(), "an output", outputs[i], inputs[i].scalar_type(),
                  inputs[i].numel() * size_);
    operation.Add({.kind = Kind::kAllGather,
                   .in = {operation.Read(inputs[i])},
                   .out = {operation.Write(outputs[i])}});
  }
  return Run(std::move(operation), options.timeout, inputs, {outputs});
}

WorkPtr Backend::gather(TensorLists& outputs, TensorList& inputs,
                        const c10d::GatherOptions& options) {
  Operation operation("evenkeel:gather", OpType::GATHER);
  CheckRank(operation.name(), "root", options.rootRank);
  const at::Tensor& input = OnlyOne(operation.name(), "input", inputs);
  const bool is_root = options.rootRank == rank_;
  const abi::Buffer whole = operation.Read(input);
  abi::Call call = EmptyAllToAll(whole, size_);
  call.in[options.rootRank] = whole;
  if (is_root) {
    TORCH_CHECK(outputs.size() == 1, "evenkeel: gather takes one list of outputs on the root and ",
                "got ", outputs.size(), ".");
    CheckListSize(operation.name(), "outputs", outputs[0].size());
    CheckElements(operation.name(), "an output of this rank", outputs[0][rank_],
                  input.scalar_type(), input.numel());
    for (int rank = 0; rank < size_; ++rank) {
      const at::Tensor& output = outputs[0][rank];
      CheckElements(operation.name(), "an output", output, input.scalar_type(), output.numel());
      call.out[rank] = operation.Write(output);
    }
  } else {
    TORCH_CHECK(outputs.empty() || (outputs.size() == 1 && outputs[0].empty()),
                "evenkeel: gather takes outputs on the root ", options.rootRank,
                " alone, and got some on rank ", rank_, ".");
  }
  operation.Add(std::move(call));
  return Run(std::move(operation), options.timeout, inputs, outputs);
}

WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                    const c10d::GatherOptions& options) {
  Operation operation("evenkeel:gather", OpType::GATHER);
  CheckRank(operation.name(), "root", options.rootRank);
  const abi::Buffer whole = operation.Read(input);
  abi::Call call = EmptyAllToAll(whole, size_);
  call.in[options.rootRank] = whole;
  TensorList outputs;
  if (options.rootRank == rank_) {
    CheckElements(operation.name(), "an output", output, input.scalar_type(),
                  input.numel() * size_);
    const abi::Buffer all = operation.Write(output);
    const int64_t per_element = EncodeForMove(input.scalar_type()).per_element;
    for (int rank = 0; rank < size_; ++rank) {
      call.out[rank] = PartOf(all, per_element, rank * input.numel(), input.numel());
    }
    outputs.push_back(output);
  }
  operation.Add(std::move(call));
  return Run(std::move(operation), options.timeout, {input}, {outputs});
}

WorkPtr Backend::scatter(TensorList& outputs, TensorLists& inputs,
                         const c10d::ScatterOptions& options) {
  Operation operation("evenkeel:scatter", OpType::SCATTER);
  CheckRank(operation.name(), "root", options.rootRank);
  const at::Tensor& output = OnlyOne(operation.name(), "output", outputs);
  const abi::Buffer whole = operation.Write(output);
  abi::Call call = EmptyAllToAll(whole, size_);
  call.out[options.rootRank] = whole;
  TensorList read;
  if (options.rootRank == rank_) {
    TORCH_CHECK(inputs.size() == 1, "evenkeel: scatter takes one list of inputs on the root and ",
                "got ", inputs.size(), ".");
    read = inputs[0];
    CheckListSize(operation.name(), "inputs", read.size());
    CheckElements(operation.name(), "an input of this rank", read[rank_], output.scalar_type(),
                  output.numel());
    for (int rank = 0; rank < size_; ++rank) {
      CheckElements(operation.name(), "an input", read[rank], output.scalar_type(),
                    read[rank].numel());
      call.in[rank] = operation.Read(read[rank]);
    }
  } else {
    TORCH_CHECK(inputs.empty() || (inputs.size() == 1 && inputs[0].empty()),
                "evenkeel: scatter takes inputs on the root ", options.rootRank,
                " alone, and got some on rank ", rank_, ".");
  }
  operation.Add(std::move(call));
  return Run(std::move(operation), options.timeout, std::move(read), {outputs});
}

WorkPtr Backend::reduce_scatter(TensorList& outputs, TensorLists& inputs,
                                const c10d::ReduceScatterOptions& options) {
  Operation operation("evenkeel:reduce_scatter", OpType::REDUCE_SCATTER);
  const at::Tensor& output = OnlyOne(operation.name(), "output", outputs);
  TORCH_CHECK(inputs.size() == 1, "evenkeel: reduce_scatter takes one list of inputs and got ",
              inputs.size(), ".");
  const TensorList& parts = inputs[0];
  CheckListSize(operation.name(), "inputs", parts.size());
  bool is_even = true;
  for (const at::Tensor& part : parts) {
    CheckElements(operation.name(), "an input", part, output.scalar_type(), part.numel());
    is_even = is_even && part.numel() == parts[0].numel();
  }
  CheckElements(operation.name(), "an output", output, output.scalar_type(), parts[rank_].numel());
  if (is_even) {
    abi::Call call{
        .kind = Kind::kReduceScatter,
        .out = {operation.Write(output)},
        .op = EncodeForReduce(operation.name(), output.scalar_type(), options.reduceOp).op};
    for (const at::Tensor& part : parts) {
      call.in.push_back(operation.ReadReduced(part, options.reduceOp));
    }
    operation.Add(std::move(call));
  } else {
    for (int rank = 0; rank < size_; ++rank) {
      operation.AddReduce(Kind::kReduce, parts[rank], options.reduceOp,
                          rank == rank_ ? output : at::Tensor(), rank);
    }
  }
  return Run(std::move(operation), options.timeout, parts, {outputs});
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& options) {
  TensorList outputs{output};
  TensorList inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  Operation operation("evenkeel:reduce_scatter", kReduceScatterTensor);
  CheckSameSize(operation.name(), outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::ScalarType type = outputs[i].scalar_type();
    CheckElements(operation.name(), "an input", inputs[i], type, outputs[i].numel() * size_);
    operation.Add({.kind = Kind::kReduceScatter,
                   .in = {operation.ReadReduced(inputs[i], options.reduceOp)},
                   .out = {operation.Write(outputs[i])},
                   .op = EncodeForReduce(operation.name(), type, options.reduceOp).op});
  }
  return Run(std::move(operation), options.timeout, inputs, {outputs});
}

WorkPtr Backend::alltoall(TensorList& outputs, TensorList& inputs,
                          const c10d::AllToAllOptions& options) {
  Operation operation("evenkeel:all_to_all", OpType::ALLTOALL);
  CheckListSize(operation.name(), "outputs", outputs.size());
  CheckListSize(operation.name(), "inputs", inputs.size());
  CheckElements(operation.name(), "an output of this rank", outputs[rank_],
                inputs[rank_].scalar_type(), inputs[rank_].numel());
  abi::Call call{.kind = Kind::kAllToAll};
  for (int rank = 0; rank < size_; ++rank) {
    call.in.push_back(operation.Read(inputs[rank]));
    call.out.push_back(operation.Write(outputs[rank]));
  }
  operation.Add(std::move(call));
  return Run(std::move(operation), options.timeout, inputs, {outputs});
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& options) {
  Operation operation("evenkeel:all_to_all", OpType::ALLTOALL_BASE);
  CheckElements(operation.name(), "an output", output, input.scalar_type(), output.numel());
  const abi::Buffer in = operation.Read(input);
  const abi::Buffer out = operation.Write(output);
  operation.Add({.kind = Kind::kAllToAll,
                 .in = SplitRows(operation.name(), "input", input, in, input_splits, size_),
                 .out = SplitRows(operation.name(), "output", output, out, output_splits, size_)});
  return Run(std::move(operation), options.timeout, {input}, {{output}});
}

WorkPtr Backend::send(TensorList& tensors, int rank, int tag) {
  Operation operation("evenkeel:send", OpType::SEND);
  CheckRank(operation.name(), "peer", rank);
  CheckTag(operation.name(), tag);
  operation.Add({.kind = Kind::kSend,
                 .in = {operation.Read(OnlyOne(operation.name(), "tensor", tensors))},
                 .root = rank,
                 .tag = tag});
  return Run(std::move(operation), c10d::kUnsetTimeout, tensors, {tensors});
}

WorkPtr Backend::recv(TensorList& tensors, int rank, int tag) {
  Operation operation("evenkeel:recv", OpType::RECV);
  CheckRank(operation.name(), "peer", rank);
  CheckTag(operation.name(), tag);
  operation.Add({.kind = Kind::kRecv,
                 .out = {operation.Write(OnlyOne(operation.name(), "tensor", tensors))},
                 .root = rank,
                 .tag = tag});
  return Run(std::move(operation), c10d::kUnsetTimeout, tensors, {tensors}, rank);
}

WorkPtr Backend::recvAnysource(TensorList& tensors, int tag) {
  Operation operation("evenkeel:recvAnySource", OpType::RECVANYSOURCE);
  CheckTag("recv from any rank", tag);
  operation.sender = std::make_shared<int>(-1);
  operation.Add({.kind = Kind::kRecv,
                 .out = {operation.Write(OnlyOne(operation.name(), "tensor", tensors))},
                 .from = operation.sender.get(),
                 .tag = tag});
  return Run(std::move(operation), c10d::kUnsetTimeout, tensors, {tensors});
}

}  // namespace evenkeel::bridge
