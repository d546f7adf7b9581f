// DistributedDataParallel for C++ programs with libtorch.
//
//   #include "evenkeel/libtorch.h"
//   namespace ekt = evenkeel::libtorch;
//
//   int main() {
//     return ekt::run([](ekt::Group& group) {
//       Net net;                                             // any torch::nn::Module
//       ekt::DataParallel ddp(group, net);                   // rank 0's parameters are sent to all
//       ekt::Optimizer opt(ddp, torch::optim::AdamWOptions(3e-4), {.placement = ekt::Slices{}});
//       ddp.join([&] {                                       // numbers of batches may differ
//         for (auto& batch : *loader_of(group.rank(), group.size())) {
//           opt.zero_grad();
//           auto loss = torch::mse_loss(ddp(batch.data), batch.target);
//           loss.backward();                                 // reduces gradients meanwhile
//           opt.step();
//         }
//       });
//     });
//   }
//
// A launcher that sets RANK and WORLD_SIZE (torchrun, evenkeel's own), Slurm or an MPI starts the
// processes; comm/environment.h lists the variables. docs/libtorch.md begins with a loop for one
// process and ends with a job on a cluster.
//
// Steps. A step ends with one reduction of all gradients. Per rank:
//
//   forward, with gradients enabled, of a module in training mode   begins a step
//   another forward before backward                                 belongs to the same step
//   forward under NoGradGuard                                       begins none
//   forward in evaluation mode                                      begins none; a backward that
//                                                                   follows begins it, late
//   the end of backward                                             ends the step: gradients are
//                                                                   averages over the ranks
//   forward without backward (a skipped loss)                       leaves the step open for the
//                                                                   next forward; an error at the
//                                                                   end of a join(), and of
//                                                                   DataParallel
//   Optimizer::step() in an open step                               ends it: this rank had no
//                                                                   gradient
//   a second backward after the end                                 an error; see no_sync()
//   torch::autograd::grad()                                         neither begins nor ends a step
//   a backward inside a backward                                    belongs to the step, as that of
//                                                                   a part computed again; it must
//                                                                   reach other parameters
//   an exception in backward                                        leaves the step open; let it
//                                                                   leave run() or join()
//   begin()                                                         begins a step, for a custom
//                                                                   order
//   forward of a module of which no parameter requires a gradient   begins none
//
// In training call `ddp(x)`, never `net(x)`; for other methods than forward() `ddp.call(...)`. Each
// DataParallel has steps of its own; a backward may end those of several.
//
// Gradients:    `grad()` of a parameter is a view of memory of this library, valid until the next
//               forward or the end of DataParallel; clone() one that must live longer. It may be
//               set to none or to zeros (zero_grad) before forward, between forward and backward,
//               and after backward, on all ranks alike; without that the next backward adds to it,
//               and counts it once, but inside join() not under no_sync(). Between backward and
//               the optimizer's step it may be changed or replaced; but inside join() exhausted
//               ranks would not apply the change, so step() throws if it finds one. With Slices no
//               rank has a whole gradient after backward: `grad()` is a tensor on the device meta,
//               so that reading it throws, and computing into it (clip_grad_value_()). One step()
//               uses it up; what a later backward adds to it can only be cleared, and a step()
//               before that throws.
// Parameters:   all that `named_parameters()` lists, with requires_grad or without; setting the
//               flag takes effect in the next step, on all ranks in the same one. A tensor that is
//               registered twice is one parameter. Their memory may be replaced (set_data), not
//               their type, device, or strides. They must be on the CPU, dense, and not overlap.
//               Where their strides, or those of buffers, differ from rank 0's when DataParallel is
//               made, they get new memory with rank 0's.
// Buffers:      those of rank 0 are broadcast at the beginning of each step; in a join() those of
//               the highest rank with a batch. A join() ends with equal buffers on all ranks,
//               however its loop ends: those of the highest of the ranks whose batches lasted
//               longest. A forward that begins no step leaves each rank its own.
// Ownership:    a Group must outlive the objects made with it. DataParallel shares its module.
// Threads:      one thread trains. backward() may be called from it only.
// Errors:       ekt::Error. If its `kind` is empty, the call was invalid and the group continues; a
//               constructor throws it on all ranks if their modules or options differ. Otherwise
//               the group has ended on every rank.

#ifndef EVENKEEL_LIBTORCH_LIBTORCH_H_
#define EVENKEEL_LIBTORCH_LIBTORCH_H_

#include <torch/torch.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace evenkeel::libtorch {

class Error : public std::runtime_error {
 public:
  Error(const std::string& what, std::string kind, std::vector<int> ranks, std::string operation,
        int64_t position)
      : std::runtime_error(what),
        kind(std::move(kind)),
        ranks(std::move(ranks)),
        operation(std::move(operation)),
        position(position) {}

  const std::string kind;        // "lost", "failed", "disagreement", "deadline"; empty: none.
  const std::vector<int> ranks;  // The causes, ascending; empty if they are not known.
  const std::string operation;   // "all_reduce", ...; empty: outside of one.
  const int64_t position;        // The operation's number on its channel; -1: none.
};

// ---- Group ----

struct GroupOptions {
  std::string backend = "auto";  // The names of comm/factory.h, for the CPU.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};  // Per operation.
  std::chrono::milliseconds connect_timeout{std::chrono::minutes(2)};
};

enum class Reduce { kSum, kAverage, kMin, kMax };

// The parts of a training loop that a program marks; forward, backward and the optimizer's step are
// known.
enum class Phase { kInput, kSaving };

class Group {
 public:
  struct State;

  // Sets the phase of this rank for the lifetime of the object.
  class PhaseScope {
   public:
    PhaseScope(std::shared_ptr<State> state, Phase phase);
    ~PhaseScope();
    PhaseScope(const PhaseScope&) = delete;
    PhaseScope& operator=(const PhaseScope&) = delete;

   private:
    const std::shared_ptr<State> state_;
    const int before_;
  };

  // Waits until all ranks of the job, which the environment describes, have called it.
  explicit Group(const GroupOptions& options = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  std::string backend() const;
  torch::Device device() const { return torch::kCPU; }

  // Collectives, for metrics and the like; not inside of DataParallel::join(). In place; the ranks'
  // strides may differ. An average of integers is exact, rounded toward zero; the sum of bools is
  // "or".
  void all_reduce(const torch::Tensor& tensor, Reduce how = Reduce::kSum);
  void broadcast(const torch::Tensor& tensor, int root = 0);
  void barrier();

  // Marks a phase until the result is destroyed: auto loading = group.phase(ekt::Phase::kInput);
  [[nodiscard]] PhaseScope phase(Phase phase) { return PhaseScope(state_, phase); }
  // Returns "rank 3 cost the group 18 % of the last 500 steps: input" when a rank has begun to make
  // the others wait, with the phase of the step; else "". Does not wait: call it after every step.
  std::string straggler_news();
  // Returns a table: for each rank its cost, and the milliseconds of its mean step by phase.
  // Over all steps of the group.
  std::string straggler_table();

  // Ends the group on all ranks: each later call there throws an Error with this rank and `why`.
  void abort(const std::string& why);
  // Leaves the group: waits until every rank has called it.
  void finalize();

  const std::shared_ptr<State>& state() const { return state_; }  // For this library.

 private:
  const std::shared_ptr<State> state_;
};

// Makes the group, calls `body`, and leaves the group. Returns 0; or prints what went wrong and
// returns 1. If an exception leaves `body`, all other ranks get an Error with its what().
int run(const std::function<void(Group&)>& body, const GroupOptions& options = {});

// ---- DataParallel ----

// Gradients of 16 or 8 bits are rounded on each rank before the sum; docs/libtorch.md has what
// is lost. For kPowerSgd see below.
enum class Compression { kNone, kFloat16, kBFloat16, kInt8, kPowerSgd };

// PowerSGD sends each float32 gradient matrix, [m, n], as two thin ones, [m, rank] and [rank, n].
// Each rank adds what these leave out to its next gradient; no checkpoint contains that. Vectors
// are sent whole.
struct PowerSgdOptions {
  int rank = 1;
  int64_t start_step = 0;           // The number of first steps without compression.
  double min_compression_rate = 2;  // A matrix for which this saves less is sent whole.
};

struct DataParallelOptions {
  // True: backward need not reach all parameters with requires_grad; the ranks need not
  // agree on which ones. Forward must return every tensor that the loss uses (see
  // CollectTensors). False: a missing gradient is an error.
  bool find_unused = false;
  // A gradient that is infinite or not a number is an error on all ranks, with the rank, the
  // parameter and the step. EVENKEEL_CHECK_FINITE=1 does the same.
  bool check_finite = false;
  // Caps 0 and 1 of the buckets of gradients.
  int64_t first_bucket_bytes = int64_t{1} << 20;
  int64_t bucket_bytes = int64_t{25} << 20;
  bool broadcast_buffers = true;     // False: each rank keeps its own.
  bool broadcast_parameters = true;  // At creation.
  Compression compression = Compression::kNone;
  PowerSgdOptions power_sgd;
  // Names of parameters that are not trained in parallel: no broadcast, no reduction.
  std::vector<std::string> ignored;
};

enum class DivideBy {
  kWorldSize,    // The sum of the gradients over the number of all ranks.
  kActiveRanks,  // Their mean over the ranks that have a batch.
  kSamples,      // The sum over the number of all samples; for a BalancedSampler.
};

struct JoinOptions {
  // The divisor of gradients in steps of which only some ranks have a batch. kSamples: in all
  // steps.
  DivideBy divide_by = DivideBy::kWorldSize;
  // All ranks stop before the first step for which one of them has no batch: join() returns false.
  bool stop_early = false;
};

class DataParallelBase {
 public:
  // While it lives, backward adds to the gradients and reduces nothing.
  class NoSync {
   public:
    explicit NoSync(DataParallelBase& ddp);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallelBase& ddp_;
  };

  ~DataParallelBase();
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  // Begins a step, unless one is open; see the table above.
  void begin();
  // auto accumulating = ddp.no_sync();
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  // join() of this model alone; see below.
  bool join(const std::function<void()>& loop, const JoinOptions& options = {});

  std::vector<torch::Tensor> parameters() const;  // Those that data parallelism trains.
  std::string describe_buckets() const;           // A line per bucket.

  struct Replica;
  const std::shared_ptr<Replica>& replica() const { return replica_; }  // For this library.

 protected:
  DataParallelBase(Group& group, std::shared_ptr<torch::nn::Module> module,
                   const DataParallelOptions& options);
  bool begin_forward();  // True: it wants the outputs.
  void note_outputs(const std::vector<torch::Tensor>& outputs);

 private:
  std::shared_ptr<Replica> replica_;
  const int exceptions_at_creation_;
};

// Calls `loop`, a training loop of these models, on each rank. A rank whose loop has ended goes on
// to take part in the steps of the others, and returns when all loops have ended, with equal
// parameters, buffers and optimizer states, and with the gradients of those whose batches lasted
// longest, unless these have cleared them. Each Optimizer and Joined of the models takes part;
// each model must have one. No other DataParallel may train in the loop. An exhausted rank does not
// run the code that follows step() in the loop: pass what changes parameters, averages of them or a
// schedule by steps to the optimizer's after_step(). All ranks end with the rates of those whose
// batches lasted longest. Returns whether all batches were used.
//
//   ekt::join({&generator, &discriminator}, [&] { ... });
bool join(const std::vector<DataParallelBase*>& models, const std::function<void()>& loop,
          const JoinOptions& options = {});

namespace internal {

template <class Net>
concept IsModule = std::derived_from<Net, torch::nn::Module>;

template <class Net>
std::shared_ptr<torch::nn::Module> ModuleOf(const Net& net) {
  if constexpr (std::is_pointer_v<Net>) {
    return {std::shared_ptr<void>(), net};  // Not owned.
  } else if constexpr (requires { net.ptr(); }) {
    return net.ptr();
  } else {
    return net;
  }
}

// Tensors in values of other types than these are not seen.
template <class Value>
void CollectTensors(const Value& value, std::vector<torch::Tensor>& tensors) {
  if constexpr (std::convertible_to<const Value&, const torch::Tensor&>) {
    tensors.push_back(value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) CollectTensors(*value, tensors);
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                       }) {
    for (const auto& part : value) CollectTensors(part, tensors);
  } else if constexpr (requires { std::tuple_size<Value>::value; }) {
    std::apply([&](const auto&... parts) { (CollectTensors(parts, tensors), ...); }, value);
  }
}

}  // namespace internal

// `Net`: a module holder, a shared_ptr to a module, or a module, which must outlive this object.
template <class Net>
class DataParallel : public DataParallelBase {
 public:
  DataParallel(Group& group, Net net,
               const DataParallelOptions& options = {}) requires(!internal::IsModule<Net>)
      : DataParallelBase(group, internal::ModuleOf(net), options), net_(std::move(net)) {}
  DataParallel(Group& group, Net& net,
               const DataParallelOptions& options = {}) requires internal::IsModule<Net>
      : DataParallelBase(group, internal::ModuleOf(&net), options), net_(net) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return call([&](Net& net) {
      if constexpr (internal::IsModule<Net>) {
        return net.forward(std::forward<Args>(args)...);
      } else {
        return net->forward(std::forward<Args>(args)...);
      }
    });
  }
  // Calls `forward` in place of the module's forward(), to train by other methods:
  //
  //   torch::Tensor code = ddp.call([&](Net& net) { return net->encode(input); });
  template <class Forward>
  auto call(const Forward& forward) {
    const bool wants_outputs = begin_forward();
    auto outputs = forward(net_);
    if (wants_outputs) {
      std::vector<torch::Tensor> tensors;
      internal::CollectTensors(outputs, tensors);
      note_outputs(tensors);
    }
    return outputs;
  }

  const Net& module() const { return net_; }

 private:
  std::conditional_t<internal::IsModule<Net>, Net&, Net> net_;
};

// ---- BalancedSampler ----

struct BalancedSamplerOptions {
  // Equal on all ranks. An epoch has the samples 0, ..., size - 1 in the order of `seed` plus its
  // number, if they are shuffled.
  int64_t batch = 0;    // Samples of a global batch, of all ranks together.
  int64_t quantum = 0;  // As in join/balance.h, and `least` and `most` of this rank.
  bool shuffle = true;
  uint64_t seed = 0;

  int64_t least = 0;
  int64_t most = 0;
};

// Divides each global batch between the ranks by their measured speed, so that slower ranks get
// fewer samples and all finish together; the result is that of one process on the same batches.
//
//   ekt::BalancedSampler sampler(group, dataset.size().value(), {.batch = 256});
//   auto loader = torch::data::make_data_loader(dataset, sampler, /*batch_size=*/256);
//   ddp.join([&] {
//     for (auto& batch : *loader) {
//       opt.zero_grad();
//       // A sum over samples, not their mean.
//       torch::mse_loss(ddp(batch.data), batch.target, torch::Reduction::Sum).backward();
//       opt.step();
//     }
//   }, {.divide_by = ekt::DivideBy::kSamples});
//
// With no_sync() a step has several batches, and the divisor counts the samples of all of them.
// Made by all ranks together; a group has one at a time. Copies share their state. A loader must
// not have workers: they would ask for batches before the shares are known. In the last, short
// batch of an epoch a rank may have no sample: its loop ends there, so a join() has one epoch.
// BatchNorm uses a rank's own samples; SyncBatchNorm is exact. join/balance.h has the model.
// Errors: those of Balance, as Error, on all ranks or in next().
class BalancedSampler : public torch::data::samplers::Sampler<> {
 public:
  BalancedSampler(Group& group, size_t size, const BalancedSamplerOptions& options);
  ~BalancedSampler() override;
  BalancedSampler(const BalancedSampler&);
  BalancedSampler& operator=(const BalancedSampler&);

  // Begins the next epoch, or continues that of load(). Loaders call it. `size`: of the data.
  void reset(std::optional<size_t> size = std::nullopt) override;
  // Returns this rank's samples of the next batch; nullopt if there are none left. `batch_size`,
  // that of the loader, must be that of the global batch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;
  // Writes the epoch and the number of its batches that were used. load() accepts them in a group
  // of another size, for equal data, batch, shuffle and seed; else it throws. Call load() on all
  // ranks before the loader's begin().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // The number of epochs whose batches were all used. One that a break has ended counts, too, once
  // the next one has begun.
  int64_t epoch() const;
  // The shares of whole batches that the last next() used, by rank.
  std::vector<int64_t> shares() const;
  // Returns a sentence if these differ by a tenth or more from those of the last sentence, else "".
  std::string news();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// ---- SyncBatchNorm ----

// BatchNorm1d, 2d and 3d with the statistics of all ranks' samples: the result is that of one
// process with their concatenated batches, also if these differ in size or are empty.
// To be trained it must be in the module of a DataParallel when that is made. All ranks with a
// batch call it equally often, in equal order; in join() exhausted ranks take part. In evaluation
// mode it does not communicate.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options) : NormImplBase(options) {}
  // Shares the parameters and running statistics of a BatchNorm.
  template <size_t D, class Norm>
  explicit SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Norm>& norm)
      : NormImplBase(norm.options) {
    if (options.affine()) {
      weight = parameters_["weight"] = norm.weight;
      bias = parameters_["bias"] = norm.bias;
    }
    if (options.track_running_stats()) {
      running_mean.set_data(norm.running_mean);
      running_var.set_data(norm.running_var);
      num_batches_tracked.set_data(norm.num_batches_tracked);
    }
    train(norm.is_training());
  }

  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  void attach(std::weak_ptr<DataParallelBase::Replica> replica) {  // For this library.
    replica_ = std::move(replica);
  }

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  std::weak_ptr<DataParallelBase::Replica> replica_;
};
TORCH_MODULE(SyncBatchNorm);

// Replaces each BatchNorm in a Sequential, ModuleList or ModuleDict, at any depth, and children
// that only their parent's list holds, by a SyncBatchNorm with its parameters and statistics.
// Throws, with the layer's name, before it changes anything, if another variable holds a layer,
// such as a member that forward() uses: declare that member as a SyncBatchNorm instead.
void convert_sync_batchnorm(torch::nn::Module& module);

// ---- Optimizers ----

struct Replicated {};          // Each rank has the state of all parameters.
struct WholeTensors {          // Each parameter has a rank that keeps its state, as
                               // ZeroRedundancyOptimizer.
  double max_imbalance = 2.0;  // zero_optim/optimizer.h
};
// Each rank keeps 1/N of the state of each bucket: half the traffic, least memory. One such
// optimizer per DataParallel, of all its parameters.
struct Slices {};
using Placement = std::variant<Replicated, WholeTensors, Slices>;

struct OptimizerOptions {
  Placement placement = Replicated{};
};

// SGD, Adam or AdamW by evenkeel's kernels; a torch::optim::Optimizer, so that schedulers of torch
// change its rates. Other settings than the rate are fixed at creation. The state of a parameter of
// 16 bits includes a float32 master copy, made by its first step. Each step rounds the parameter
// from it, so load parameters before the first step, or together with load_sharded().
class Optimizer : public torch::optim::Optimizer {
 public:
  // One group, with all parameters that `ddp` trains.
  template <std::derived_from<torch::optim::OptimizerOptions> Rule>
  Optimizer(DataParallelBase& ddp, const Rule& rule, const OptimizerOptions& options = {})
      : Optimizer(ddp, {torch::optim::OptimizerParamGroup(ddp.parameters())},
                  std::make_unique<Rule>(rule), options) {}
  Optimizer(DataParallelBase& ddp, std::vector<torch::optim::OptimizerParamGroup> groups,
            std::unique_ptr<torch::optim::OptimizerOptions> defaults,
            const OptimizerOptions& options = {});
  ~Optimizer() override;

  // Updates the parameters, on all ranks with a batch together. A closure is called once, before
  // that, with gradients enabled; returns its result.
  torch::Tensor step(LossClosure closure = nullptr) override;
  // Adds a function that runs at the end of each step, under NoGradGuard: inside join() also on
  // ranks without a batch, at the end of the steps that they take with the others. For averages of
  // the weights, clamping, schedules by steps. It sees the whole parameters, with every placement,
  // may change them and the rates, equally on all ranks, and must not communicate. Those of 16 bits
  // may not be changed: the next step rounds them from the master copy. It must not read gradients.
  // It also runs after a step that GradScaler skips. The same functions on all ranks.
  void after_step(std::function<void()> function);

  // For the next step(): scales the gradients of all ranks' parameters down to this joint norm.
  // torch::nn::utils::clip_grad_norm_() throws with Slices; inside join(), the next step() throws.
  void clip_grad_norm(double max_norm, double norm_type = 2.0);
  // For the next step(): multiplies gradients by `scale`, one over that of the loss, and changes
  // nothing if a gradient of any rank is not finite.
  void unscale(double scale);
  // After a step with one of these: the norm before clipping, and whether the step was skipped.
  double last_norm() const;
  bool last_was_skipped() const;

  // They throw, since the state may be split: use save_sharded() and load_sharded().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // Write and read moments, step counts and master copies, in a folder that all ranks see, each
  // rank its part; they load with any placement and number of ranks. Parameters, buffers and
  // learning rates are not part of them. On all ranks, between steps.
  void save_sharded(const std::string& folder);
  void load_sharded(const std::string& folder);
  int64_t state_bytes() const;  // Of this rank.

 private:
  friend class GradScaler;
  // As unscale(), with the gradients of now; until step() any read of them throws.
  void take_scaled_gradients(double scale);

  struct State;
  std::shared_ptr<State> state_;
  const int exceptions_at_creation_;
};

// Any optimizer of torch, with its whole state on each rank, in DataParallel::join(): ranks without
// a batch step with the others.
//
//   torch::optim::SGD sgd(net->parameters(), 0.1);
//   ekt::Joined optimizer(ddp, sgd);
//   ... optimizer.step(), in place of sgd.step()
//
// Its class, its groups of parameters and all settings must be equal on all ranks: at creation,
// which compares them, and in each step. Ranks without a batch follow changes of the rate. The
// options of a class of your own are compared if they have serialize(). LBFGS is refused: it calls
// its closure several times in a step.
class Joined {
 public:
  // On all ranks together. Throws for a parameter that `ddp` does not reduce: one of another
  // module, of a layer added after `ddp` was made, or of DataParallelOptions::ignored.
  Joined(DataParallelBase& ddp, torch::optim::Optimizer& optimizer);
  ~Joined();
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr);  // As Optimizer's.
  void after_step(std::function<void()> function);                             // As Optimizer's.
  void zero_grad(bool set_to_none = true);
  // By a GradScaler; between unscale_() and step(): whether the next one will be.
  bool last_was_skipped() const;

 private:
  friend class GradScaler;
  // Multiplies the gradients; step() does nothing if one of them is not finite.
  void take_scaled_gradients(double scale);

  struct State;
  std::shared_ptr<State> state_;
  const int exceptions_at_creation_;
};

// ---- GradScaler ----

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  bool enabled = true;  // False: losses are not scaled, and no step is skipped.
};

// To save and load.
struct GradScalerState {
  double scale = 1;
  int64_t growth_tracker = 0;  // Steps since the last change.
};

// torch.amp.GradScaler, for float16 under autocast: scales losses, so that small gradients do not
// vanish. If a gradient of any rank is not finite, all ranks skip the step and halve the scale. It
// takes part in each join() of its group.
//
//   ekt::GradScaler scaler(group);
//   ... scaler.scale(loss).backward();
//       scaler.unscale_(optimizer);          // may be left out
//       optimizer.clip_grad_norm(1.0);
//       scaler.step(optimizer);
//       scaler.update();                     // once, after the step() of each optimizer
//
// Between unscale_() and step() of an ekt::Optimizer, grad() has no values, as with Slices: any
// read throws. Joined has its whole gradients then, which outside of join() may be clipped.
class GradScaler {
 public:
  // On all ranks, with equal options.
  explicit GradScaler(Group& group, const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  torch::Tensor scale(const torch::Tensor& loss) const;
  void unscale_(Optimizer& optimizer);
  void unscale_(Joined& optimizer);
  void step(Optimizer& optimizer);  // Optimizer::last_was_skipped() returns whether it did.
  void step(Joined& optimizer);
  void update(std::optional<double> new_scale = std::nullopt);  // Equal on all ranks.
  double get_scale() const;
  bool is_enabled() const;

  GradScalerState state() const;
  // On all ranks, not inside join().
  void load_state(const GradScalerState& state);

 private:
  template <class Any>
  void Unscale(Any& optimizer);
  template <class Any>
  void Step(Any& optimizer);

  struct State;
  std::shared_ptr<State> state_;
  const int exceptions_at_creation_;
};

// ---- Files for Python ----

// Writes parameters and buffers as a safetensors file, with the names of Python's state_dict(). On
// one rank. On failure an older file stays as it was.
void save_safetensors(const torch::nn::Module& module, const std::string& path);
// Reads such a file, from Python, too. Throws, before it changes anything, unless the names and
// sizes are those of the module; of several names of a tensor one is enough. Values are converted
// to the types of the module. Before DataParallel is made, or on every rank.
void load_safetensors(torch::nn::Module& module, const std::string& path);

}  // namespace evenkeel::libtorch

#endif  // EVENKEEL_LIBTORCH_LIBTORCH_H_
