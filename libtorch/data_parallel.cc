#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <unordered_set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/hooks/power_sgd.h"
#include "evenkeel/bucket/hooks/quantized_all_reduce.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/libtorch/internal.h"

namespace evenkeel::libtorch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Before the gradient is added: an error must not leave half of it in a bucket.
class GradientPreHook : public torch::autograd::FunctionPreHook {
 public:
  GradientPreHook(std::weak_ptr<DataParallelBase::Replica> replica, int param)
      : replica_(std::move(replica)), param_(param) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto replica = replica_.lock()) replica->BeforeGradient(param_);
    return gradients;
  }

 private:
  const std::weak_ptr<DataParallelBase::Replica> replica_;
  const int param_;
};

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<DataParallelBase::Replica> replica, int param)
      : replica_(std::move(replica)), param_(param) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto replica = replica_.lock()) replica->OnGradient(param_);
    return outputs;
  }

 private:
  const std::weak_ptr<DataParallelBase::Replica> replica_;
  const int param_;
};

std::unique_ptr<BucketReduction> PowerSgdFor(const PowerSgdOptions& options,
                                             const ParameterSet& params) {
  evenkeel::PowerSgdOptions core{.rank = options.rank,
                                 .start_step = options.start_step,
                                 .min_compression_rate = options.min_compression_rate};
  for (int i = 0; i < params.size(); ++i) core.shapes.push_back(MatrixOf(params.shape(i)));
  return std::make_unique<PowerSgd>(std::move(core));
}

std::unique_ptr<BucketReduction> ReductionFor(const DataParallelOptions& options,
                                              const ParameterSet& params) {
  switch (options.compression) {
    case Compression::kNone:
      return nullptr;
    case Compression::kFloat16:
      return std::make_unique<CompressedReduction>(DType::kFloat16);
    case Compression::kBFloat16:
      return std::make_unique<CompressedReduction>(DType::kBFloat16);
    case Compression::kInt8:
      return std::make_unique<QuantizedAllReduce>();
    case Compression::kPowerSgd:
      return PowerSgdFor(options.power_sgd, params);
  }
  Refuse("unknown compression");
}

// Some gradient of this process has been replaced: only then torch's errors about meta tensors come
// from reading one.
std::atomic<bool> has_placeholders = false;

// In place of a gradient of which each rank has a slice. Without memory, whatever reads it fails;
// and since its elements are one place, whatever computes into it does, also through data(), which
// does not count versions.
torch::Tensor PlaceholderFor(const torch::Tensor& param) {
  const std::vector<int64_t> sizes =
      param.numel() == 1 ? std::vector<int64_t>{2} : param.sizes().vec();
  has_placeholders = true;
  return torch::empty_strided(sizes, std::vector<int64_t>(sizes.size(), 0),
                              param.options().requires_grad(false).device(torch::kMeta));
}

// Not one that was set to zeros.
bool IsPlaceholder(const torch::Tensor& grad) {
  return grad.defined() && grad.is_meta() && grad._version() == 0;
}

// Gradients in buckets do not occupy the top of the heap, so glibc trims it after each step, and
// the next step faults the pages in again (5 % of the step of a small GPT). Freeing one large block
// raises the threshold for trimming (mallopt(3)).
void KeepHeap() {
  void* volatile block = std::malloc(size_t{30} << 20);
  std::free(block);
}

// Returns a hash of some elements. torch's functions for clipping change elements without changing
// the gradient's version.
uint64_t SampleOf(const TensorView& gradient) {
  constexpr int64_t kElements = 16;
  const int64_t distance = std::max<int64_t>(1, gradient.count / kElements);
  const auto size = static_cast<size_t>(SizeOf(gradient.dtype));
  const char* const data = static_cast<const char*>(gradient.data);
  uint64_t hash = 0;
  for (int64_t i = 0; i < gradient.count; i += distance)
    hash = StableHash(hash, absl::string_view(data + i * size, size));
  return hash;
}

// The tables of modules whose gradients are sparse, and the elements of their rows.
std::unordered_map<const void*, int64_t> SparseTables(const torch::nn::Module& root) {
  std::unordered_map<const void*, int64_t> tables;
  root.apply([&](const torch::nn::Module& module) {  // modules() refuses a root on the stack.
    if (const auto* embedding = module.as<torch::nn::Embedding>();
        embedding != nullptr && embedding->options.sparse())
      tables[embedding->weight.unsafeGetTensorImpl()] = embedding->weight.size(1);
    if (const auto* bag = module.as<torch::nn::EmbeddingBag>();
        bag != nullptr && bag->options.sparse())
      tables[bag->weight.unsafeGetTensorImpl()] = bag->weight.size(1);
  });
  return tables;
}

}  // namespace

std::string TextOf(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  for (const char* sign :
       {"eta tensor", "meta and cpu", "cpu and meta", "single memory location"}) {
    if (!has_placeholders || text.find(sign) == std::string::npos) continue;
    return absl::StrCat(
        "with the placement Slices, grad() has no values after backward, and between unscale_() "
        "and step() of GradScaler it has none, so it can be neither read nor changed: clip by "
        "Optimizer::clip_grad_norm(), call zero_grad() before the next backward, and ddp(x) "
        "instead of net(x) (torch: ",
        text, ")");
  }
  return text;
}

// ---- Making ----

DataParallelBase::Replica::Replica(std::shared_ptr<Group::State> group,
                                   std::shared_ptr<torch::nn::Module> module,
                                   const DataParallelOptions& options)
    : group(std::move(group)), module(std::move(module)), options(options) {
  this->group->DropParked();  // The exception has been caught.
  KeepHeap();
  AddParameters();
  AddBuffers();
  AdoptStrides();
  std::vector<TensorView> buffer_views;
  for (const torch::Tensor& buffer : buffers) buffer_views.push_back(MemoryOf(buffer));

  evenkeel::DataParallelOptions core_options;
  core_options.reducer.caps = {Bytes{options.first_bucket_bytes}, Bytes{options.bucket_bytes}};
  core_options.reducer.gradient_as_bucket_view = true;
  core_options.reducer.find_unused = options.find_unused;
  core_options.reducer.check_finite = options.check_finite;
  core_options.broadcast_initial_state = options.broadcast_parameters;
  core_options.buffers.every = options.broadcast_buffers ? 1 : 0;
  core_options.trainability = {
      .reader =
          [this](int param) {
            Parameter& one = params[param];
            const bool is_trained = one.tensor.requires_grad();
            if (!is_trained && ShowsBucket(param)) {  // A frozen parameter has no bucket.
              one.tensor.mutable_grad() = one.view.clone();
              if (set.grad_state(param) == GradState::kReduced) one.kept = one.tensor.grad();
            }
            return is_trained;
          },
      .writer = [this](int param, bool trained) { params[param].tensor.requires_grad_(trained); },
      .warn_on_change = false,
      .wasted_after = 0};
  core_options.memory = {.value = [this](int param) { return MemoryOf(params[param].tensor); },
                         .buffer = [this](int buffer) { return MemoryOf(buffers[buffer]); }};
  core_options.on_plan = [this] { FollowGradients(); };
  core = Value(evenkeel::DataParallel::Create(this->group->comm.get(), &set, buffer_views,
                                              core_options, ReductionFor(options, set)));
}

DataParallelBase::Replica::~Replica() { Detach(); }

void DataParallelBase::Replica::Detach() {
  if (std::exchange(is_detached, true)) return;
  for (int i = 0; i < static_cast<int>(params.size()); ++i) {
    RemoveHooks(i);
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    if (ShowsBucket(i)) grad = grad.clone();  // The bucket ends with this object.
  }
}

void DataParallelBase::Replica::AddParameters() {
  const auto tables = SparseTables(*module);
  const auto is_ignored = [&](const std::string& name) {
    return std::count(options.ignored.begin(), options.ignored.end(), name) != 0;
  };
  for (const auto& item : module->named_parameters()) {
    const torch::Tensor& tensor = item.value();
    const auto table = tables.find(tensor.unsafeGetTensorImpl());
    if (table != tables.end() && !tensor.is_contiguous())  // Rows must be rows of memory.
      tensor.set_data(tensor.detach().contiguous());
    const TensorView value = is_ignored(item.key())
                                 ? MemoryOf(tensor)
                                 : ViewOf(tensor, "parameter \"" + item.key() + "\"");
    const int index = table != tables.end() ? set.AddSparse(item.key(), value, table->second)
                                            : set.Add(item.key(), value, {}, tensor.sizes().vec());
    if (index < static_cast<int>(params.size())) {  // Another name.
      if (!params[index].tensor.is_same(tensor))
        Refuse(absl::StrCat("parameters \"", NameOf(index), "\" and \"", item.key(),
                            "\" are two tensors with the same memory; register one tensor twice"));
      continue;
    }
    params.push_back({.tensor = tensor, .strides = tensor.strides().vec()});
    index_of[tensor.unsafeGetTensorImpl()] = index;
    set.SetTrainable(index, tensor.requires_grad());
  }
  if (params.empty()) Refuse("the module has no parameters");
  for (const std::string& name : options.ignored) {
    const int index = set.Find(name);
    if (index < 0)
      Refuse(absl::StrCat("DataParallelOptions::ignored names \"", name,
                          "\", but the module has no such parameter"));
    Check(set.Ignore(index));
  }
}

void DataParallelBase::Replica::AddBuffers() {
  if (!options.broadcast_buffers) return;
  for (const auto& item : module->named_buffers()) {
    if (!item.value().defined()) continue;
    ViewOf(item.value(), "buffer \"" + item.key() + "\"");
    buffers.push_back(item.value());
  }
}

// Elements are sent in the order of memory, so each tensor takes the strides that it has on rank 0.
void DataParallelBase::Replica::AdoptStrides() {
  const at::NoGradGuard no_grad;
  std::vector<torch::Tensor> tensors = buffers;
  for (int i = 0; i < set.size(); ++i)
    if (!set.is_ignored(i)) tensors.push_back(params[i].tensor);
  std::vector<int64_t> mine;  // By tensor: the number of dimensions, sizes, strides.
  for (const torch::Tensor& tensor : tensors) {
    mine.push_back(tensor.dim());
    mine.insert(mine.end(), tensor.sizes().begin(), tensor.sizes().end());
    mine.insert(mine.end(), tensor.strides().begin(), tensor.strides().end());
  }
  const std::string bytes(reinterpret_cast<const char*>(mine.data()),
                          mine.size() * sizeof(int64_t));
  const std::vector<std::string> all =
      Value(AgreeOnEqual(*group->comm, "strides", absl::OkStatus(), bytes));
  if (all.empty() || all[0].size() != bytes.size()) return;  // Creation names what differs.
  std::vector<int64_t> first(mine.size());
  std::memcpy(first.data(), all[0].data(), bytes.size());
  auto at = first.begin();
  for (const torch::Tensor& tensor : tensors) {
    const int64_t dims = *at++;
    if (!std::equal(tensor.sizes().begin(), tensor.sizes().end(), at, at + dims)) break;
    const std::vector<int64_t> strides(at + dims, at + 2 * dims);
    at += 2 * dims;
    if (tensor.strides() == at::IntArrayRef(strides)) continue;
    tensor.set_data(torch::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor));
  }
  for (int i = 0; i < set.size(); ++i) {
    params[i].strides = params[i].tensor.strides().vec();
    if (!set.is_ignored(i)) Check(set.Rebind(i, MemoryOf(params[i].tensor)));
  }
}

void DataParallelBase::Replica::CheckLayouts() const {
  for (int i = 0; i < set.size(); ++i) {
    if (set.is_ignored(i)) continue;
    const torch::Tensor& tensor = params[i].tensor;
    const TensorView now = MemoryOf(tensor);
    if (now.dtype != set[i].value.dtype || now.count != set[i].value.count)
      Refuse(absl::StrCat("parameter \"", NameOf(i), "\" has become a ", tensor.toString(), " ",
                          c10::str(tensor.sizes()), " on ", tensor.device().str(),
                          "; convert the module before DataParallel is made"));
    if (tensor.strides() != at::IntArrayRef(params[i].strides))
      Refuse(absl::StrCat("parameter \"", NameOf(i), "\" has changed its strides from ",
                          c10::str(at::IntArrayRef(params[i].strides)), " to ",
                          c10::str(tensor.strides()),
                          "; bring the module to its memory format before DataParallel is made"));
  }
}

// An accumulator exists only while its tensor requires a gradient.
void DataParallelBase::Replica::Attach(int param) {
  Parameter& one = params[param];
  if (!one.tensor.requires_grad() || set.is_ignored(param)) return;
  auto accumulator = torch::autograd::impl::grad_accumulator(one.tensor);
  if (accumulator == one.accumulator) return;
  RemoveHooks(param);
  one.accumulator = std::move(accumulator);
  one.hook =
      one.accumulator->add_post_hook(std::make_unique<GradientHook>(weak_from_this(), param));
  auto pre_hook = std::make_unique<GradientPreHook>(weak_from_this(), param);
  one.pre_hook = pre_hook.get();
  one.accumulator->add_pre_hook(std::move(pre_hook));
}

void DataParallelBase::Replica::RemoveHooks(int param) {
  Parameter& one = params[param];
  if (one.hook == 0) return;
  one.accumulator->del_post_hook(std::exchange(one.hook, 0));
  std::erase_if(one.accumulator->pre_hooks(),
                [&](const auto& hook) { return hook.get() == one.pre_hook; });
}

// ---- A step ----

void DataParallelBase::Replica::MoveTo(Step next) {
  switch (next) {
    case Step::kClosed:
      assert(step_ == Step::kForward || step_ == Step::kBackward);
      break;
    case Step::kEvaluated:
    case Step::kForward:
      assert(!is_open());
      break;
    case Step::kBackward:
      assert(step_ == Step::kForward);
      break;
    case Step::kThrown:
      assert(step_ == Step::kBackward || step_ == Step::kThrown);
      break;
  }
  step_ = next;
}

void DataParallelBase::Replica::AttachAll() {
  for (int i = 0; i < set.size(); ++i) Attach(i);
}

void DataParallelBase::Replica::Begin() {
  if (IsIncomplete()) Finish();
  if (is_open()) return;
  CheckLayouts();
  RefuseSlices();
  AttachAll();
  TakeGradients();
  for (Parameter& param : params) {
    param.arrival = Arrival::kAwaited;
    param.access = Access::kFree;
  }
  is_accumulating = no_sync > 0;
  Check(core->BeginStep(is_accumulating ? StepMode::kAccumulate : StepMode::kSync));
  MoveTo(Step::kForward);
  graph_tasks_.clear();
}

bool DataParallelBase::Replica::ShowsBucket(int param) const {
  const torch::Tensor& grad = params[param].tensor.grad();
  return grad.defined() && params[param].view.defined() && grad.is_alias_of(params[param].view);
}

void DataParallelBase::Replica::FollowGradients() {
  for (int i = 0; i < set.size(); ++i) {
    if (!ShowsBucket(i) || params[i].view.data_ptr() == set[i].grad.data) continue;
    Parameter& one = params[i];
    const bool is_as_reduced = one.reduced.has_value() && one.reduced->first == one.view._version();
    one.tensor.mutable_grad().reset();
    if (set.grad_state(i) == GradState::kNone) continue;
    ShowGradient(i);
    if (is_as_reduced) one.reduced->first = one.view._version();
  }
}

void DataParallelBase::Replica::ShowGradient(int param) {
  Parameter& one = params[param];
  const TensorView& place = set[param].grad;
  if (place.data == nullptr) return;
  if (!one.view.defined() || one.view.data_ptr() != place.data) {
    one.view = at::from_blob(place.data, one.tensor.sizes(), one.strides,
                             one.tensor.options().requires_grad(false));
  }
  one.tensor.mutable_grad() = one.view;
}

void DataParallelBase::Replica::RefuseSlices() const {
  for (int i = 0; i < set.size(); ++i) {
    if (params[i].access != Access::kForStep || !IsPlaceholder(params[i].tensor.grad())) continue;
    Refuse(absl::StrCat("the gradient of \"", NameOf(i),
                        "\" is left from the last backward, and with Slices, or after unscale_() "
                        "of GradScaler, no rank has it: call step() before the next forward"));
  }
}

// A gradient that a step has used up: no rank can compute what a later backward adds to it.
void DataParallelBase::Replica::DropUsedUp() {
  for (int i = 0; i < set.size(); ++i) {
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    if (!IsPlaceholder(grad)) continue;
    if (is_accumulating)
      Refuse(absl::StrCat("the gradient of \"", NameOf(i),
                          "\" is left from the last step, and with Slices no rank has it: call "
                          "zero_grad() after step(), before a backward under no_sync()"));
    grad.reset();
    params[i].access = Access::kSpoiled;
  }
}

void DataParallelBase::Replica::TakeGradients() {
  const at::NoGradGuard no_grad;
  for (int i = 0; i < set.size(); ++i) {
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    if (grad.defined() && grad.is_meta() && !IsPlaceholder(grad))  // Set to zeros.
      grad = torch::zeros_like(params[i].tensor);
    if (!grad.defined()) {
      params[i].kept.reset();
      if (set.grad_state(i) != GradState::kNone) set.SetGradState(i, GradState::kNone);
    } else if (!set.trainable(i) || !params[i].tensor.requires_grad() || IsPlaceholder(grad)) {
      continue;
    } else if (set.row_size(i) > 0) {
      ReadSparseGradient(i);
    } else if (!ShowsBucket(i)) {
      const bool is_reduced = grad.is_same(params[i].kept);  // Before it was frozen.
      MoveToBucket(i);
      params[i].kept.reset();
      if (set.grad_state(i) == GradState::kNone)
        set.SetGradState(i, is_reduced ? GradState::kReduced : GradState::kLocal);
    }
  }
}

void DataParallelBase::Replica::MoveToBucket(int param) {
  const torch::Tensor stored = params[param].tensor.grad();
  ShowGradient(param);
  params[param].view.copy_(stored);
}

void DataParallelBase::Replica::PrepareGradients() {
  TakeGradients();
  DropUsedUp();
  if (!has_followers) return;
  const at::NoGradGuard no_grad;
  std::vector<int> kept;
  for (int i = 0; i < set.size(); ++i)
    if (set.trainable(i) && set.grad_state(i) == GradState::kReduced) kept.push_back(i);
  if (kept.empty()) return;
  if (is_accumulating) {  // Later it cannot be told from what was added.
    for (const int i : kept) {
      const torch::Tensor& grad = params[i].tensor.grad();
      if (set.row_size(i) > 0 || grad.any().item<bool>())
        Refuse(absl::StrCat("the gradient of \"", NameOf(i),
                            "\" is left from an earlier reduction; inside join() call zero_grad() "
                            "before a backward under no_sync()"));
    }
    return;
  }
  const StepAnswer answer = Value(StepControl::Of(*group->comm).current()->Wait());
  const bool divides_by_all =
      core->join_config().divisor.by() == evenkeel::DivideBy::kInitialWorldSize;
  if (answer.everyone_active() || !divides_by_all) return;
  for (const int i : kept) {
    params[i].tensor.mutable_grad().mul_(static_cast<double>(answer.world_size) / answer.active);
    if (set.row_size(i) > 0) ReadSparseGradient(i);
  }
}

// A sparse gradient has memory of its own on both sides.
void DataParallelBase::Replica::ReadSparseGradient(int param) {
  Parameter& one = params[param];
  const torch::Tensor& grad = one.tensor.grad();
  if (one.sparse_grad.defined() && grad.is_same(one.sparse_grad) &&
      grad._version() == one.sparse_version)
    return;
  if (!grad.is_sparse())
    Refuse(absl::StrCat("the gradient of \"", NameOf(param), "\" is ", grad.toString(),
                        ", but its module was created with sparse(true)"));
  const torch::Tensor given = grad.detach().coalesce();
  const torch::Tensor rows = given.indices().contiguous(), values = given.values().contiguous();
  const bool is_reduced = set.grad_state(param) == GradState::kReduced;
  set.SetGradState(param, GradState::kNone);  // Else the rows would be added to those of before.
  Check(set.SetSparseGrad(param, {rows.data_ptr<int64_t>(), static_cast<size_t>(rows.numel())},
                          MemoryOf(values)));
  set.SetGradState(param, rows.numel() == 0 ? GradState::kNone
                          : is_reduced      ? GradState::kReduced
                                            : GradState::kLocal);
}

// Queued with a graph task, which destroys it without a call if backward throws.
class DataParallelBase::Replica::BackwardEnd {
 public:
  BackwardEnd(std::weak_ptr<Replica> replica, int graph_task)
      : replica_(std::move(replica)), graph_task_(graph_task) {}
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  ~BackwardEnd() { Call(/*has_thrown=*/true); }
  void Call(bool has_thrown) {
    const auto replica = std::exchange(replica_, {}).lock();
    if (replica != nullptr) replica->EndBackward(graph_task_, has_thrown);
  }

 private:
  std::weak_ptr<Replica> replica_;
  const int graph_task_;
};

void DataParallelBase::Replica::BeforeGradient(int param) {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  bool has_begun = false;
  {
    const std::lock_guard lock(mutex_);
    has_begun = BeforeBackward(graph_task);
  }
  if (has_begun) {  // Without the lock, which a BackwardEnd takes.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<BackwardEnd>(weak_from_this(), graph_task)] {
          end->Call(/*has_thrown=*/false);
        });
  }
  if (params[param].arrival == Arrival::kUnreached)
    Refuse(
        absl::StrCat("backward reached \"", NameOf(param),
                     "\", but no output of forward depends on it: with find_unused, forward must "
                     "return every tensor that the loss uses, as a tensor or in a tuple, an "
                     "optional or a container, and no part of it may be computed again in "
                     "backward"));
  if (std::exchange(params[param].arrival, Arrival::kReady) == Arrival::kReady && !is_accumulating)
    Refuse(absl::StrCat("backward reached \"", NameOf(param),
                        "\" twice in one step: a backward inside of this step's backward must "
                        "not reach parameters that another part of it reaches"));
}

void DataParallelBase::Replica::OnGradient(int param) {
  const at::NoGradGuard no_grad;
  const torch::Tensor& grad = params[param].tensor.grad();
  if (set.row_size(param) > 0) {
    ReadSparseGradient(param);
  } else if (grad.layout() != torch::kStrided) {
    Refuse(absl::StrCat("the gradient of \"", NameOf(param), "\" is ", grad.toString(),
                        "; sparse gradients are supported for Embedding and EmbeddingBag with "
                        "sparse(true) only"));
  } else if (grad.data_ptr() != set[param].grad.data) {
    MoveToBucket(param);
  }
  set.SetGradState(param, GradState::kLocal);
  Check(core->GradientReady(param));
}

// A backward inside a backward, such as that of a part computed again to save memory, belongs to
// the step, which ends with the outermost one. The engine shows that at its end: no node is being
// evaluated then. It is seen only if it reaches a parameter itself; if none does so, the step ends
// with the backward inside that completes the gradients.
bool DataParallelBase::Replica::BeforeBackward(int graph_task) {
  if (is_open() && std::count(graph_tasks_.begin(), graph_tasks_.end(), graph_task) != 0)
    return false;
  if (!is_open()) {
    if (no_sync == 0 && step_ != Step::kEvaluated)
      Refuse(absl::StrCat(
          "rank ", group->comm->rank(), " runs backward outside of a step of ", core->join_name(),
          ": no forward of it precedes, or the "
          "gradients of the last one have been reduced. Call ddp(x), not net(x), before each "
          "backward, or add up the gradients of all backwards but the last with no_sync()"));
    Begin();
  } else if (step_ == Step::kThrown) {
    Refuse(
        absl::StrCat("rank ", group->comm->rank(),
                     " called backward again after an exception in this step's backward; let the "
                     "exception leave run() or join()"));
  }
  if (step_ == Step::kForward) {
    PrepareGradients();
    MoveTo(Step::kBackward);
    MarkUnreached();
  }
  graph_tasks_.push_back(graph_task);
  return true;
}

void DataParallelBase::Replica::EndBackward(int graph_task, bool has_thrown) {
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    if (!is_open() || std::erase(graph_tasks_, graph_task) == 0) return;
    if (has_thrown) MoveTo(Step::kThrown);
    if (step_ == Step::kThrown) return;
    is_last = graph_tasks_.empty();
  }
  const bool is_outermost = torch::autograd::get_current_node() == nullptr;
  if (is_outermost || (is_last && IsComplete())) Finish();
}

bool DataParallelBase::Replica::IsComplete() const {
  for (int i = 0; i < set.size(); ++i) {
    const bool is_missing = params[i].arrival == Arrival::kAwaited && params[i].tensor.numel() > 0;
    if (is_missing && set.trainable(i) && !set.is_ignored(i)) return false;
  }
  return true;
}

bool DataParallelBase::Replica::IsIncomplete() const {
  return step_ == Step::kBackward && torch::autograd::get_current_graph_task_id() < 0;
}

// Marks parameters that no output depends on as unused, before backward reaches the others.
void DataParallelBase::Replica::MarkUnreached() {
  if (!options.find_unused || is_accumulating || roots_.empty()) return;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) left.push_back(node);
  };
  for (const auto& root : roots_) visit(root.lock().get());  // Backward holds those that it runs.
  while (!left.empty()) {
    const Node* node = left.back();
    left.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<int> unreached;
  for (int i = 0; i < set.size(); ++i) {
    if (!set.trainable(i) || seen.count(params[i].accumulator.get()) != 0) continue;
    params[i].arrival = Arrival::kUnreached;
    unreached.push_back(i);
  }
  Check(core->MarkUnused(unreached));
}

void DataParallelBase::Replica::FinishUnreached() {
  if (IsIncomplete()) Finish();
  if (!is_open()) return;
  if (step_ == Step::kThrown)
    Refuse(
        "step() was called after an exception in this step's backward; let the exception leave "
        "run() or join()");
  if (!is_accumulating) {
    PrepareGradients();
    for (int i = 0; i < set.size(); ++i) {
      if (!set.trainable(i)) continue;
      if (set.grad_state(i) == GradState::kNone) {
        Check(core->NoGradient(i));
      } else {  // Zeros, or what was accumulated.
        set.SetGradState(i, GradState::kLocal);
        Check(core->GradientReady(i));
      }
    }
  }
  Finish();
}

void DataParallelBase::Replica::Finish() {
  if (!is_open()) return;
  MoveTo(Step::kClosed);
  roots_.clear();
  std::vector<bool> had_gradient;
  for (int i = 0; i < set.size(); ++i)
    had_gradient.push_back(set.grad_state(i) == GradState::kLocal);
  Check(core->FinishStep());
  if (!is_accumulating) AdoptGradients(had_gradient);
}

void DataParallelBase::Replica::AdoptGradients(const std::vector<bool>& had_gradient) {
  const at::NoGradGuard no_grad;
  for (int i = 0; i < set.size(); ++i) {
    if (!set.trainable(i)) continue;
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    const bool is_spoiled = params[i].access == Access::kSpoiled;
    if (set.row_size(i) > 0) {
      ShowSparseGradient(i);
    } else if (set.grad_state(i) == GradState::kReduced) {
      ShowGradient(i);
      if (has_followers) params[i].reduced = {params[i].view._version(), SampleOf(set[i].grad)};
    } else if (is_spoiled || (!had_gradient.empty() && had_gradient[i])) {
      grad = PlaceholderFor(params[i].tensor);
      if (!is_spoiled) params[i].access = Access::kForStep;
    } else if (ShowsBucket(i)) {
      grad.reset();  // No rank has one.
    }
  }
}

void DataParallelBase::Replica::ShowSparseGradient(int param) {
  torch::Tensor& grad = params[param].tensor.mutable_grad();
  if (set.grad_state(param) == GradState::kNone) return grad.reset();
  const SparseRows& given = set.sparse_grad(param);
  const auto count = static_cast<int64_t>(given.rows.size());
  const torch::Tensor rows = torch::tensor(given.rows, torch::kLong).unsqueeze(0);
  const torch::Tensor values = torch::empty({count, set.row_size(param)},
                                            params[param].tensor.options().requires_grad(false));
  std::copy(given.values.begin(), given.values.end(), static_cast<std::byte*>(values.data_ptr()));
  grad = torch::sparse_coo_tensor(rows, values, params[param].tensor.sizes());
  params[param].sparse_grad = grad;
  params[param].sparse_version = grad._version();
}

void DataParallelBase::Replica::CheckGradients(const std::vector<int>& of_step,
                                               bool may_clear) const {
  for (const int i : of_step) {
    const Parameter& param = params[i];
    const torch::Tensor& grad = param.tensor.grad();
    const bool is_placeholder = IsPlaceholder(grad), is_for_step = param.access == Access::kForStep;
    if (is_for_step && !is_placeholder)
      Refuse(absl::StrCat("the gradient of \"", NameOf(i),
                          "\" was cleared or replaced between backward and step(); with Slices, "
                          "and after unscale_() of GradScaler, that has no effect, because no rank "
                          "has it: call zero_grad() after step()"));
    if (!is_for_step && is_placeholder)
      Refuse(
          absl::StrCat("step() was called again, but with Slices the first one has used the "
                       "gradient of \"",
                       NameOf(i), "\" up: call zero_grad() after step()"));
    if (!may_clear && grad.defined()) CheckReduced(i);
    if (!has_followers || is_for_step || !set.trainable(i) ||
        set.grad_state(i) != GradState::kReduced)
      continue;
    if (!grad.defined() ? !may_clear : HasChanged(i))
      Refuse(absl::StrCat("the gradient of \"", NameOf(i), "\" was ",
                          grad.defined() ? "changed" : "cleared",
                          " between backward and step() inside join(), where ranks without a batch "
                          "do not do the same; to clip their norm call clip_grad_norm() of "
                          "ekt::Optimizer"));
  }
}

// An optimizer of torch uses each gradient that it finds.
void DataParallelBase::Replica::CheckReduced(int param) const {
  if (group->comm->world_size() == 1 || set.is_ignored(param)) return;
  if (set.trainable(param) && set.grad_state(param) != GradState::kReduced)
    Refuse(absl::StrCat("rank ", group->comm->rank(), ": parameter \"", NameOf(param),
                        "\" holds this rank's own gradient, not reduced: the replicas would "
                        "diverge; the last backward before step() must reduce, not accumulate "
                        "(no_sync())"));
  if (has_followers && !set.trainable(param))
    Refuse(absl::StrCat("parameter \"", NameOf(param),
                        "\" is frozen, but has a gradient, with which torch's optimizer goes on to "
                        "change it; inside join() ranks without a batch cannot follow: set the "
                        "gradient to none"));
}

// Returns whether a step would see another gradient than the reduced one.
bool DataParallelBase::Replica::HasChanged(int param) const {
  const Parameter& one = params[param];
  const torch::Tensor& grad = one.tensor.grad();
  if (set.row_size(param) > 0)
    return !grad.is_same(one.sparse_grad) || grad._version() != one.sparse_version;
  if (one.tensor.numel() == 0 || !one.reduced.has_value()) return false;
  return !ShowsBucket(param) ||
         std::pair(grad._version(), SampleOf(set[param].grad)) != *one.reduced;
}

std::string DataParallelBase::Replica::MissingText(const std::vector<int>& of_step) const {
  int missing = 0;
  uint64_t hash = 0;
  for (const int i : of_step) {
    if (params[i].tensor.grad().defined() || params[i].tensor.numel() == 0) continue;
    ++missing;
    hash = StableHash(hash, static_cast<uint64_t>(i));
  }
  return missing == 0 ? ""
                      : absl::StrCat(", missing gradients=", missing, " (", absl::Hex(hash), ")");
}

bool DataParallelBase::Replica::ScaleGradients(const std::vector<int>& of_step, double factor) {
  const at::NoGradGuard no_grad;
  bool is_finite = true;
  for (const int i : of_step) {
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    if (!grad.defined()) continue;
    is_finite &= torch::isfinite(grad.is_sparse() ? grad._values() : grad).all().item<bool>();
    grad.mul_(factor);
    if (set.row_size(i) > 0) {
      ReadSparseGradient(i);
      params[i].sparse_grad = grad;
      params[i].sparse_version = grad._version();
    } else if (params[i].reduced.has_value()) {
      params[i].reduced = {grad._version(), SampleOf(set[i].grad)};
    }
  }
  return is_finite;
}

void DataParallelBase::Replica::HideGradients(const std::vector<int>& of_step) {
  for (const int i : of_step) {
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    if (!set.trainable(i) || !grad.defined() || params[i].access == Access::kForStep) continue;
    grad = PlaceholderFor(params[i].tensor);
    params[i].access = Access::kForStep;
  }
}

void DataParallelBase::Replica::MarkUsedUp(const std::vector<int>& of_step, double scale) {
  const at::NoGradGuard no_grad;
  for (const int i : of_step) {
    // Slices are there until the next reduction; a further step is not to use them.
    if (set.grad_state(i) == GradState::kNone) set.SetGradState(i, GradState::kNone);
    if (params[i].access != Access::kForStep) continue;
    params[i].access = Access::kFree;
    if (set.grad_state(i) != GradState::kReduced) continue;
    set.row_size(i) > 0 ? ShowSparseGradient(i) : ShowGradient(i);
    params[i].tensor.mutable_grad().mul_(scale);
  }
}

void DataParallelBase::Replica::EndLoop() {
  if (IsIncomplete()) Finish();
  if (is_open())
    Refuse(
        step_ == Step::kThrown
            ? "the loop of join() has ended, but its last backward has thrown"
            : absl::StrCat("the loop of join() has ended after a forward of ", core->join_name(),
                           ", with \"", NameOf(0),
                           "\", whose backward was skipped: call the optimizer's step(), or call "
                           "forward under NoGradGuard"));
  AfterLoop();
}

void DataParallelBase::Replica::AfterLoop() {
  for (const Enrolled& optimizer : optimizers)
    if (optimizer.after_loop) optimizer.after_loop();
  TakeGradients();
  for (int i = 0; i < set.size(); ++i) {
    if (set.is_ignored(i)) continue;
    // The plans of the other ranks move buckets, and freeze parameters.
    torch::Tensor& grad = params[i].tensor.mutable_grad();
    if (params[i].access != Access::kForStep)
      params[i].access = IsPlaceholder(grad) ? Access::kSpoiled : Access::kFree;
    params[i].is_as_reduced = (set.row_size(i) > 0 || params[i].reduced) && !HasChanged(i);
    if (set.row_size(i) == 0 && !set.trainable(i)) params[i].kept = grad;
    grad.reset();
  }
}

// The ranks that had batches to the end have what the others lack: gradients that were changed
// after the last reduction, and those of frozen parameters.
void DataParallelBase::Replica::ShareGradients() {
  const int root = core->last_rank();
  if (root < 0) return;
  enum Kind : uint8_t { kNone, kUsedUp, kAsReduced, kOther };
  std::vector<uint8_t> kinds;
  for (int i = 0; i < set.size(); ++i) {
    const Parameter& one = params[i];
    const bool is_kept = set.grad_state(i) == GradState::kReduced || one.kept.defined();
    kinds.push_back(one.access == Access::kSpoiled          ? kUsedUp
                    : !is_kept || one.tensor.numel() == 0   ? kNone
                    : one.is_as_reduced && set.trainable(i) ? kAsReduced
                                                            : kOther);
  }
  Communicator& comm = *group->comm;
  Check(comm.Broadcast(TensorView(kinds.data(), set.size(), DType::kUint8), root));
  absl::Status own;  // All ranks refuse, or none.
  for (int i = 0; i < set.size(); ++i) {
    const bool has_it =
        kinds[i] == kOther ? set.row_size(i) == 0 : set.grad_state(i) == GradState::kReduced;
    if (has_it || (kinds[i] != kOther && kinds[i] != kAsReduced)) continue;
    own.Update(absl::FailedPreconditionError(
        kinds[i] == kOther
            ? absl::StrCat("the sparse gradient of \"", NameOf(i), "\" was changed on rank ", root,
                           " after its last step in join(), and cannot be shared: clear it in the "
                           "loop")
            : absl::StrCat("the gradient of \"", NameOf(i),
                           "\" is missing when join() ends, but rank ", root,
                           " has kept it from its loop: clear it on all ranks, or on none")));
  }
  Check(AgreeOn(comm, "kept gradients", own).status());
  const at::NoGradGuard no_grad;
  for (int i = 0; i < set.size(); ++i) {
    Parameter& one = params[i];
    if (kinds[i] == kUsedUp) {
      one.access = Access::kSpoiled;
    } else if (one.access == Access::kSpoiled) {
      one.access = Access::kFree;
    }
    if (kinds[i] != kOther) one.kept.reset();
    if (kinds[i] != kOther) continue;
    if (set.trainable(i)) {
      ShowGradient(i);
      set.SetGradState(i, GradState::kReduced);
    } else if (comm.rank() != root) {
      one.kept = torch::empty_like(one.tensor, one.tensor.options().requires_grad(false));
    }
    Check(comm.Broadcast(MemoryOf(set.trainable(i) ? one.view : one.kept), root));
  }
}

void DataParallelBase::Replica::AfterJoin() {
  for (int i = 0; i < set.size(); ++i) {
    if (set.is_ignored(i)) continue;
    if (params[i].access == Access::kSpoiled) {
      params[i].access = Access::kFree;
      params[i].tensor.mutable_grad() = PlaceholderFor(params[i].tensor);
    } else if (set.row_size(i) > 0) {
      ShowSparseGradient(i);
    } else if (!set.trainable(i)) {
      params[i].tensor.mutable_grad() = params[i].kept;
    } else if (set.grad_state(i) != GradState::kNone) {
      ShowGradient(i);
    }
  }
  for (const Enrolled& optimizer : optimizers)
    if (optimizer.after_join) optimizer.after_join();
}

void DataParallelBase::Replica::Forget(const Joinable* optimizer) {
  std::erase_if(optimizers, [&](const Enrolled& one) { return one.joinable == optimizer; });
}

// ---- DataParallelBase ----

DataParallelBase::DataParallelBase(Group& group, std::shared_ptr<torch::nn::Module> module,
                                   const DataParallelOptions& options)
    : replica_(std::make_shared<Replica>(group.state(), std::move(module), options)),
      exceptions_at_creation_(std::uncaught_exceptions()) {
  replica_->AttachAll();  // A backward that does not come from its forward is refused.
  replica_->module->apply([this](torch::nn::Module& layer) {
    if (auto* norm = layer.as<SyncBatchNormImpl>()) norm->attach(replica_);
  });
}

DataParallelBase::~DataParallelBase() {
  replica_->Detach();
  const auto group = replica_->group;
  Park(group, std::move(replica_), exceptions_at_creation_);
}

DataParallelBase::NoSync::NoSync(DataParallelBase& ddp) : ddp_(ddp) {
  if (ddp.replica_->is_open() && !ddp.replica_->is_accumulating)
    Refuse(absl::StrCat("no_sync() in a step of ", ddp.replica_->core->join_name(),
                        " that has begun: create it before the forward, and call a forward "
                        "without a backward under NoGradGuard"));
  ++ddp.replica_->no_sync;
}
DataParallelBase::NoSync::~NoSync() { --ddp_.replica_->no_sync; }

void DataParallelBase::begin() { replica_->Begin(); }

bool DataParallelBase::begin_forward() {
  const auto is_trained = [](const auto& param) { return param.tensor.requires_grad(); };
  if (!torch::GradMode::is_enabled() || std::ranges::none_of(replica_->params, is_trained))
    return false;
  if (!replica_->module->is_training()) {
    replica_->AttachAll();
    if (!replica_->is_open()) replica_->MoveTo(Replica::Step::kEvaluated);
    return false;
  }
  replica_->Begin();
  return replica_->options.find_unused && !replica_->is_accumulating;
}

void DataParallelBase::note_outputs(const std::vector<torch::Tensor>& outputs) {
  for (const torch::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    replica_->roots_.push_back(WeakOf(torch::autograd::impl::gradient_edge(output).function));
  }
}

bool DataParallelBase::join(const std::function<void()>& loop, const JoinOptions& options) {
  return libtorch::join({this}, loop, options);
}

std::vector<torch::Tensor> DataParallelBase::parameters() const {
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < replica_->set.size(); ++i)
    if (!replica_->set.is_ignored(i)) tensors.push_back(replica_->params[i].tensor);
  return tensors;
}

std::string DataParallelBase::describe_buckets() const {
  std::string text;
  for (const BucketInfo& bucket : replica_->core->buckets()) {
    absl::StrAppend(&text, "bucket ", bucket.index, ": ", bucket.data.count, " elements of ",
                    ToString(bucket.data.dtype), ",");
    for (const int param : bucket.params) absl::StrAppend(&text, " ", replica_->NameOf(param));
    absl::StrAppend(&text, "\n");
  }
  return text;
}

static evenkeel::DivideBy CoreDivisor(DivideBy divide_by) {
  switch (divide_by) {
    case DivideBy::kActiveRanks:
      return evenkeel::DivideBy::kActiveRanks;
    case DivideBy::kSamples:
      return evenkeel::DivideBy::kSamples;
    case DivideBy::kWorldSize:
      break;
  }
  return evenkeel::DivideBy::kInitialWorldSize;
}

bool join(const std::vector<DataParallelBase*>& models, const std::function<void()>& loop,
          const JoinOptions& options) {
  evenkeel::JoinOptions core_options;
  core_options.throw_on_early_termination = options.stop_early;
  core_options.divide_by = CoreDivisor(options.divide_by);
  if (models.empty()) Refuse("join() needs a DataParallel");
  const std::shared_ptr<Group::State> group = models[0]->replica()->group;
  if (!group->joined.empty()) Refuse("join() was called in the loop of a join()");
  std::vector<std::shared_ptr<DataParallelBase::Replica>> replicas;
  std::vector<Joinable*> joinables(group->scalers.begin(), group->scalers.end());
  for (const DataParallelBase* model : models) {
    const auto& replica = replicas.emplace_back(model->replica());
    joinables.push_back(replica->core.get());
    for (const auto& optimizer : replica->optimizers) joinables.push_back(optimizer.joinable);
    if (replica->optimizers.empty())
      Refuse(absl::StrCat("join() needs an Optimizer or a Joined of ",
                          models.size() == 1 ? "this DataParallel"
                                             : absl::StrCat("each DataParallel, but that with \"",
                                                            replica->NameOf(0), "\" has none"),
                          ": ranks without a batch take the steps of the others"));
  }
  for (const auto& replica : replicas) {
    group->joined.push_back(replica.get());
    replica->has_followers = group->comm->world_size() > 1 && !options.stop_early;
    for (auto& param : replica->params) param.reduced.reset();
  }
  const absl::Cleanup after = [&] {
    group->joined.clear();
    for (const auto& replica : replicas) {
      replica->has_followers = false;
      replica->scope = nullptr;
      replica->AfterJoin();
    }
  };
  const absl::Status status = RunJoined(joinables, core_options, [&](JoinScope& scope) {
    for (const auto& replica : replicas) replica->scope = &scope;
    try {
      loop();
      for (const auto& replica : replicas) replica->EndLoop();
    } catch (const StatusError& error) {
      for (const auto& replica : replicas)  // All ranks stop early.
        if (absl::IsOutOfRange(error.status)) replica->AfterLoop();
      return error.status;
    } catch (const Error& error) {
      const absl::string_view text = absl::StripPrefix(error.what(), "evenkeel: ");
      group->comm->Abort(absl::UnknownError(text), "failed");
      throw;
    } catch (const c10::Error& error) {
      // The others need no backtrace of this rank.
      group->comm->Abort(absl::UnknownError(TextOf(error)), "failed");
      throw;
    }
    return absl::OkStatus();
  });
  const bool has_stopped = options.stop_early && absl::IsOutOfRange(status);
  if (!has_stopped) Check(status);
  for (const auto& replica : replicas) replica->ShareGradients();
  return !has_stopped;
}

}  // namespace evenkeel::libtorch
