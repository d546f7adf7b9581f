#include "evenkeel/bucket/layers/sync_batch_norm.h"

#include <c10/util/accumulate.h>

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/libtorch/internal.h"

namespace evenkeel::libtorch {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::nn::Module;

// A forward and its backward.
struct Run : torch::CustomClassHolder {
  Run(std::weak_ptr<DataParallelBase::Replica> replica, const SyncBatchNormOptions& options)
      : replica(std::move(replica)), norm(options) {}

  // Exhausted ranks take part in calls of the scope of join().
  template <class Call>
  void InScope(const Call& call) const {
    const auto owner = replica.lock();
    if (owner == nullptr)
      Refuse(
          "SyncBatchNorm is trained outside of a DataParallel: create it, or call "
          "convert_sync_batchnorm(), before the DataParallel is made");
    JoinScope outside(owner->group->comm.get(), /*is_followed=*/false);
    Check(call(owner->scope != nullptr ? *owner->scope : outside));
  }

  const std::weak_ptr<DataParallelBase::Replica> replica;
  evenkeel::SyncBatchNorm norm;
};

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                        const Tensor& bias, const Tensor& mean, const Tensor& variance,
                        const c10::intrusive_ptr<Run>& run) {
    const Tensor output = torch::empty_like(input);
    const evenkeel::SyncBatchNorm::Shape shape{
        .samples = input.size(0), .spatial = c10::multiply_integers(input.sizes().slice(2))};
    run->InScope([&](JoinScope& scope) {
      return run->norm.Forward(scope, shape, MemoryOf(input), {MemoryOf(weight), MemoryOf(bias)},
                               {MemoryOf(mean), MemoryOf(variance)}, MemoryOf(output));
    });
    context->save_for_backward({input, weight});
    context->saved_data["run"] = c10::IValue::make_capsule(run);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (torch::GradMode::is_enabled())
      Refuse("SyncBatchNorm has no second derivative: call backward without create_graph");
    const auto run =
        c10::static_intrusive_pointer_cast<Run>(context->saved_data["run"].toCapsule());
    const variable_list saved = context->get_saved_variables();  // Refuses a changed input.
    const Tensor grad_output = gradients[0].contiguous(), grad_input = torch::empty_like(saved[0]);
    const Tensor grad_weight = torch::empty_like(saved[1]), grad_bias = torch::empty_like(saved[1]);
    run->InScope([&](JoinScope& scope) {
      return run->norm.Backward(scope, MemoryOf(grad_output), MemoryOf(saved[1]),
                                {MemoryOf(grad_input), MemoryOf(grad_weight), MemoryOf(grad_bias)});
    });
    return {grad_input, grad_weight, grad_bias, {}, {}, {}};
  }
};

std::shared_ptr<SyncBatchNormImpl> SynchronizedFrom(const Module& module) {
  if (const auto* norm = module.as<torch::nn::BatchNorm1dImpl>())
    return std::make_shared<SyncBatchNormImpl>(*norm);
  if (const auto* norm = module.as<torch::nn::BatchNorm2dImpl>())
    return std::make_shared<SyncBatchNormImpl>(*norm);
  if (const auto* norm = module.as<torch::nn::BatchNorm3dImpl>())
    return std::make_shared<SyncBatchNormImpl>(*norm);
  return nullptr;
}

bool IsContainer(const Module& module) {
  return module.as<torch::nn::SequentialImpl>() != nullptr ||
         module.as<torch::nn::ModuleListImpl>() != nullptr ||
         module.as<torch::nn::ModuleDictImpl>() != nullptr;
}

// Replaces the layer that the container's forward() uses.
void ReplaceIn(Module& container, const Module* old,
               const std::shared_ptr<SyncBatchNormImpl>& norm) {
  if (auto* sequential = container.as<torch::nn::SequentialImpl>()) {
    for (torch::nn::AnyModule& layer : *sequential)
      if (layer.ptr().get() == old) layer = norm;
  } else if (auto* list = container.as<torch::nn::ModuleListImpl>()) {
    for (std::shared_ptr<Module>& layer : *list)
      if (layer.get() == old) layer = norm;
  } else if (auto* dict = container.as<torch::nn::ModuleDictImpl>()) {
    for (auto& layer : *dict)
      if (layer.value().get() == old) layer.value() = norm;
  }
}

// Appends the replacements in `parent`, or refuses before any is made.
void Convert(Module& parent, const std::string& prefix,
             std::vector<std::function<void()>>& replacements) {
  const auto children = parent.named_children();
  for (const auto& child : children) {
    const std::string name = prefix + child.key();
    auto norm = SynchronizedFrom(*child.value());
    if (norm == nullptr) {
      Convert(*child.value(), name + ".", replacements);
      continue;
    }
    const bool is_in_container = IsContainer(parent);
    // `children`, the parent's list of children, and the container's own.
    if (child.value().use_count() > (is_in_container ? 3 : 2)) {
      const char* const remedy =
          is_in_container
              ? "release that reference first"
              : "if that is a member of the parent, declare it there as a SyncBatchNorm";
      Refuse(absl::StrCat("convert_sync_batchnorm() cannot replace \"", name,
                          "\", because a member or variable beside the parent's list of children "
                          "holds it, too, and would keep the old layer: ",
                          remedy));
    }
    replacements.push_back([&parent, key = child.key(), old = child.value().get(), norm] {
      ReplaceIn(parent, old, norm);
      parent.replace_module(key, norm);
    });
  }
}

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options.num_features())
    Refuse(absl::StrCat("SyncBatchNorm of ", options.num_features(),
                        " features: the input has the sizes ", c10::str(input.sizes()),
                        "; expected [samples, features, ...]"));
}

Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  _check_input_dim(input);
  if (!is_training())
    return torch::batch_norm(input, weight, bias, running_mean, running_var,
                             /*training=*/!options.track_running_stats(), /*momentum=*/0,
                             options.eps(), /*cudnn_enabled=*/false);
  double momentum = options.momentum().value_or(0);
  if (options.track_running_stats()) {
    num_batches_tracked += 1;
    if (!options.momentum().has_value()) momentum = 1 / num_batches_tracked.item<double>();
  }
  // 16 bits are computed in float32.
  const auto type = input.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
  const auto in_type = [&](const Tensor& tensor, double otherwise) {
    return tensor.defined() ? tensor.to(type).contiguous()
                            : torch::full({options.num_features()}, otherwise, type);
  };
  const Tensor mean = in_type(running_mean, 0), variance = in_type(running_var, 1);
  const auto run = c10::make_intrusive<Run>(
      replica_,
      evenkeel::SyncBatchNormOptions{
          .channels = options.num_features(), .epsilon = options.eps(), .momentum = momentum});
  const Tensor output = Normalize::apply(input.to(type).contiguous(), in_type(weight, 1),
                                         in_type(bias, 0), mean, variance, run);
  if (options.track_running_stats()) {
    const torch::NoGradGuard no_grad;
    running_mean.copy_(mean);
    running_var.copy_(variance);
  }
  return output.to(input.options(), /*non_blocking=*/false, /*copy=*/false,
                   input.suggest_memory_format());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "evenkeel::libtorch::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ")";
}

void convert_sync_batchnorm(Module& module) {
  if (SynchronizedFrom(module) != nullptr)
    Refuse(
        "convert_sync_batchnorm() replaces the layers of a module, and this one is a layer: "
        "create a SyncBatchNorm from it");
  std::vector<std::function<void()>> replacements;
  Convert(module, "", replacements);
  for (const auto& replace : replacements) replace();
}

}  // namespace evenkeel::libtorch
