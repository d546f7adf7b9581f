#include "evenkeel/zero_optim/device/device_update.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <variant>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/device/update.cuh"
#include "evenkeel/zero_optim/device/update_kernels_image.h"

namespace evenkeel {
namespace {

using update::Chunk;
using update::Entry;
using update::Found;
using update::Rule;
using update::Tensor;

const auto kMeasure =
    MakeKernel<&ek_measure>("ek_measure", update_kernels_image, KernelKind::kSynchronises);
const auto kMeasureTotal = MakeKernel<&ek_measure_total>("ek_measure_total", update_kernels_image,
                                                         KernelKind::kSynchronises);
const auto kPrepare = MakeKernel<&ek_prepare_update>("ek_prepare_update", update_kernels_image);

// Two for each Rule, in its order.
const decltype(MakeKernel<&ek_update_sgd_float>("", update_kernels_image)) kUpdates[] = {
    MakeKernel<&ek_update_sgd_float>("ek_update_sgd_float", update_kernels_image),
    MakeKernel<&ek_update_sgd_bfloat>("ek_update_sgd_bfloat", update_kernels_image),
    MakeKernel<&ek_update_momentum_float>("ek_update_momentum_float", update_kernels_image),
    MakeKernel<&ek_update_momentum_bfloat>("ek_update_momentum_bfloat", update_kernels_image),
    MakeKernel<&ek_update_adam_float>("ek_update_adam_float", update_kernels_image),
    MakeKernel<&ek_update_adam_bfloat>("ek_update_adam_bfloat", update_kernels_image),
};
constexpr int kSections = static_cast<int>(std::size(kUpdates));
static_assert(kSections == 2 * static_cast<int>(Rule::kCount));

constexpr absl::Duration kPatience =
    absl::Minutes(10);  // At the end, for a device that is still at work.

update::RuleNumbers NumbersOfRule(const Sgd& sgd) {
  return {.rule = sgd.momentum == 0 ? Rule::kSgd : Rule::kMomentum,
          .nesterov = sgd.nesterov,
          .learning_rate = sgd.learning_rate,
          .momentum = sgd.momentum,
          .weight_decay = sgd.weight_decay};
}
update::RuleNumbers NumbersOfMoments(const auto& adam, bool decoupled) {
  return {.rule = Rule::kAdam,
          .decoupled = decoupled,
          .learning_rate = adam.learning_rate,
          .weight_decay = adam.weight_decay,
          .beta1 = adam.beta1,
          .beta2 = adam.beta2,
          .epsilon = adam.epsilon};
}
update::RuleNumbers NumbersOfRule(const Adam& adam) { return NumbersOfMoments(adam, false); }
update::RuleNumbers NumbersOfRule(const AdamW& adam) { return NumbersOfMoments(adam, true); }
update::RuleNumbers NumbersOf(const UpdateRule& rule) {
  return std::visit([](const auto& it) { return NumbersOfRule(it); }, rule);
}

// By name: their order in `state` is that of the alphabet.
Tensor TensorOf(const UpdateRule& rule, const DeviceUpdateItem& item) {
  Tensor tensor{.value = item.value.data,
                .gradient = item.gradient.data,
                .param = item.param,
                .is_bfloat = item.value.dtype == DType::kBFloat16};
  const auto names = StateTensorNames(rule, item.value.dtype);
  for (size_t t = 0; t < item.state.size(); ++t) {
    float*& place = names[t] == "master"       ? tensor.master
                    : names[t] == "exp_avg_sq" ? tensor.second
                                               : tensor.first;
    place = static_cast<float*>(item.state[t].data);
  }
  return tensor;
}

// One entry of a list as it was given.
struct Given {
  Tensor tensor;
  int64_t count = 0;
  int rule = 0;
  int flag = -1;
  int section = 0;
  bool has_state = false;
  friend bool operator==(const Given&, const Given&) = default;
};

// A part of a table, at a multiple of 16 bytes.
template <typename T>
int64_t Put(std::vector<std::byte>& table, const std::vector<T>& values) {
  table.resize((table.size() + 15) / 16 * 16);
  const int64_t at = static_cast<int64_t>(table.size());
  table.resize(table.size() + values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(table.data() + at, values.data(), values.size() * sizeof(T));
  return at;
}

}  // namespace

struct DeviceUpdate::List {
  std::vector<Given> given;
  bool has_state = true;
  Memory table, partials;
  int64_t tensors_at = 0, chunks_at = 0, entries_at = 0;  // In the table.
  int64_t elements = 0;
  int64_t section_begin[kSections + 1] = {};  // Among the chunks.
  int64_t section_elements[kSections] = {};
  std::vector<int64_t> rule_begin;  // Among the entries; by kMostRules rules.

  const Tensor* tensors() const { return At<Tensor>(tensors_at); }
  const Chunk* chunks() const { return At<Chunk>(chunks_at); }
  const Entry* entries() const { return At<Entry>(entries_at); }
  template <typename T>
  const T* At(int64_t at) const {
    return reinterpret_cast<const T*>(static_cast<const std::byte*>(table.data.get()) + at);
  }
};

DeviceUpdate::DeviceUpdate(DeviceRuntime* runtime, Device device, int param_count)
    : runtime_(runtime), device_(device), param_count_(param_count) {}

absl::StatusOr<std::unique_ptr<DeviceUpdate>> DeviceUpdate::Create(DeviceRuntime* runtime,
                                                                   Device device, int param_count) {
  std::unique_ptr<DeviceUpdate> made(new DeviceUpdate(runtime, device, param_count));
  EK_ASSIGN_OR_RETURN(made->steps_,
                      runtime->Allocate(device, param_count * int64_t{sizeof(int64_t)}));
  EK_ASSIGN_OR_RETURN(made->numbers_,
                      runtime->Allocate(device, param_count * int64_t{sizeof(update::Numbers)}));
  EK_ASSIGN_OR_RETURN(made->found_, runtime->Allocate(device, sizeof(Found)));
  EK_ASSIGN_OR_RETURN(made->check_, runtime->Allocate(device, sizeof(update::Check)));
  for (CheckPlace& place : made->checks_) {
    EK_ASSIGN_OR_RETURN(place.pinned, runtime->AllocatePinned(sizeof(update::Check)));
  }
  return made;
}

DeviceUpdate::~DeviceUpdate() {
  const absl::Time deadline = SteadyNow() + kPatience;
  for (const auto& [stream, event] : last_use_) (void)runtime_->Synchronize(event, deadline);
}

absl::Status DeviceUpdate::Used(StreamRef stream) {
  EK_ASSIGN_OR_RETURN(Event event, runtime_->Record(stream));
  for (auto& [handle, last] : last_use_) {
    if (handle != stream.handle) continue;
    last = std::move(event);
    return absl::OkStatus();
  }
  last_use_.emplace_back(stream.handle, std::move(event));
  return absl::OkStatus();
}

absl::Status DeviceUpdate::Keep(Memory memory, StreamRef stream) {
  for (size_t i = 0; i < kept_.size();) {
    EK_ASSIGN_OR_RETURN(const bool has_run, runtime_->IsDone(kept_[i].first));
    if (!has_run) {
      ++i;
      continue;
    }
    kept_[i] = std::move(kept_.back());
    kept_.pop_back();
  }
  if (memory.data == nullptr) return Used(stream);
  EK_ASSIGN_OR_RETURN(Event event, runtime_->Record(stream));
  kept_.emplace_back(std::move(event), std::move(memory));
  return Used(stream);
}

absl::StatusOr<Memory> DeviceUpdate::Upload(const void* data, int64_t bytes, StreamRef stream) {
  EK_ASSIGN_OR_RETURN(Memory memory, runtime_->Allocate(device_, bytes));
  EK_ASSIGN_OR_RETURN(Memory pinned, runtime_->AllocatePinned(bytes));
  if (bytes > 0) std::memcpy(pinned.data.get(), data, bytes);
  EK_RETURN_IF_ERROR(runtime_->Copy(memory.data.get(), pinned.data.get(), bytes, stream));
  EK_RETURN_IF_ERROR(Keep(std::move(pinned), stream));
  return memory;
}

absl::Status DeviceUpdate::SetList(int number, absl::Span<const UpdateRule> rules,
                                   absl::Span<const DeviceUpdateItem> items, StreamRef stream) {
  if (number >= static_cast<int>(lists_.size())) lists_.resize(number + 1);
  std::vector<Given> given;
  given.reserve(items.size());
  for (const DeviceUpdateItem& item : items) {
    const UpdateRule& rule = rules[item.rule];
    const bool is_bfloat = item.value.dtype == DType::kBFloat16;
    given.push_back(
        {.tensor = TensorOf(rule, item),
         .count = item.value.count,
         .rule = item.rule,
         .flag = item.flag,
         .section = 2 * static_cast<int>(NumbersOf(rule).rule) + is_bfloat,
         .has_state = item.state.size() == StateTensorNames(rule, item.value.dtype).size()});
  }
  if (lists_[number] != nullptr && lists_[number]->given == given) return absl::OkStatus();

  auto list = std::make_unique<List>();
  std::vector<Tensor> tensors;
  std::vector<Chunk> chunks;
  std::vector<Entry> entries;
  for (int section = 0; section < kSections; ++section) {
    list->section_begin[section] = static_cast<int64_t>(chunks.size());
    for (const Given& one : given) {
      if (one.section != section) continue;
      list->has_state = list->has_state && one.has_state;
      for (int64_t begin = 0; begin < one.count; begin += update::kChunk) {
        chunks.push_back(
            {.begin = begin,
             .tensor = static_cast<int32_t>(tensors.size()),
             .count = static_cast<int32_t>(std::min(update::kChunk, one.count - begin))});
      }
      list->section_elements[section] += one.count;
      list->elements += one.count;
      tensors.push_back(one.tensor);
    }
  }
  list->section_begin[kSections] = static_cast<int64_t>(chunks.size());
  const int rule_count = static_cast<int>(rules.size());
  for (int first = 0; first < rule_count; first += update::kMostRules) {
    list->rule_begin.push_back(static_cast<int64_t>(entries.size()));
    for (const Given& one : given) {
      const int rule = one.rule - first;
      if (rule >= 0 && rule < update::kMostRules) {
        entries.push_back({.param = one.tensor.param, .rule = rule, .flag = one.flag});
      }
    }
  }
  list->rule_begin.push_back(static_cast<int64_t>(entries.size()));

  std::vector<std::byte> table;
  list->tensors_at = Put(table, tensors);
  list->chunks_at = Put(table, chunks);
  list->entries_at = Put(table, entries);
  EK_ASSIGN_OR_RETURN(list->table,
                      Upload(table.data(), static_cast<int64_t>(table.size()), stream));
  const int64_t blocks =
      ShapeFor(list->elements, update::kChunk / update::kThreads, update::kThreads).blocks;
  EK_ASSIGN_OR_RETURN(list->partials, runtime_->Allocate(device_, blocks * int64_t{sizeof(Found)}));
  list->given = std::move(given);
  if (lists_[number] != nullptr) {
    EK_RETURN_IF_ERROR(Keep(lists_[number]->table, stream));
    EK_RETURN_IF_ERROR(Keep(lists_[number]->partials, stream));
  }
  lists_[number] = std::move(list);
  return absl::OkStatus();
}

absl::Status DeviceUpdate::Measure(int number, double norm, StreamRef stream) {
  const List& list = *lists_[number];
  const LaunchShape shape =
      ShapeFor(list.elements, update::kChunk / update::kThreads, update::kThreads);
  auto* const partials = static_cast<Found*>(list.partials.data.get());
  EK_RETURN_IF_ERROR(Launch(*runtime_, kMeasure, shape, stream, list.tensors(), list.chunks(),
                            list.section_begin[kSections], norm, partials));
  EK_RETURN_IF_ERROR(Launch(*runtime_, kMeasureTotal,
                            {.blocks = 1, .threads = update::kTotalThreads}, stream, partials,
                            shape.blocks, norm, static_cast<Found*>(found_.data.get())));
  return Used(stream);
}

TensorView DeviceUpdate::found() const {
  return TensorView(found_.data.get(), 2, DType::kFloat64, device_);
}

absl::Status DeviceUpdate::Prepare(int number, absl::Span<const UpdateRule> rules,
                                   const StepOptions& options, bool is_measured, StreamRef stream,
                                   const TensorView& flags) {
  const List& list = *lists_[number];
  update::Decision decision{.grad_scale = options.grad_scale,
                            .norm = kInfinityNorm,
                            .max_norm = kInfinityNorm,
                            .is_measured = is_measured,
                            .clips = options.clip.has_value(),
                            .skips_nonfinite = options.skip_nonfinite};
  if (options.clip.has_value()) {
    decision.norm = options.clip->norm;
    decision.max_norm = options.clip->max_norm;
  }
  for (size_t part = 0; part + 1 < list.rule_begin.size(); ++part) {
    update::Rules numbers{};
    const size_t first = part * update::kMostRules;
    for (size_t i = first; i < rules.size() && i < first + update::kMostRules; ++i) {
      numbers.at[i - first] = NumbersOf(rules[i]);
    }
    const int64_t begin = list.rule_begin[part], count = list.rule_begin[part + 1] - begin;
    if (count == 0 && !(is_measured && part == 0)) continue;
    EK_RETURN_IF_ERROR(Launch(
        *runtime_, kPrepare, ShapeFor(std::max<int64_t>(count, 1)), stream, list.entries() + begin,
        count, numbers, decision, update::Flags{flags.data, flags.dtype == DType::kBFloat16},
        static_cast<const Found*>(found_.data.get()), static_cast<int64_t*>(steps_.data.get()),
        static_cast<update::Numbers*>(numbers_.data.get()),
        static_cast<update::Check*>(check_.data.get())));
  }
  if (is_measured) {
    CheckPlace& place = checks_[check_count_ % checks_.size()];
    EK_RETURN_IF_ERROR(
        runtime_->Copy(place.pinned.data.get(), check_.data.get(), sizeof(update::Check), stream));
    EK_ASSIGN_OR_RETURN(place.written, runtime_->Record(stream));
    ++check_count_;
  }
  return Used(stream);
}

absl::Status DeviceUpdate::Apply(int number, StreamRef stream) {
  const List& list = *lists_[number];
  if (!list.has_state)
    return absl::InternalError(
        absl::StrCat("list ", number, " cannot be applied: it has no state"));
  for (int section = 0; section < kSections; ++section) {
    const int64_t begin = list.section_begin[section], end = list.section_begin[section + 1];
    LaunchShape shape = ShapeFor(list.section_elements[section], update::kChunk / update::kThreads,
                                 update::kThreads);
    EK_RETURN_IF_ERROR(Launch(*runtime_, kUpdates[section], shape, stream, list.tensors(),
                              list.chunks(), begin, end,
                              static_cast<const update::Numbers*>(numbers_.data.get())));
  }
  return Used(stream);
}

absl::StatusOr<std::optional<GradientCheck>> DeviceUpdate::LastCheck(absl::Time deadline,
                                                                     int back) {
  if (back >= check_count_ || back >= static_cast<int>(checks_.size())) return std::nullopt;
  const CheckPlace& place = checks_[(check_count_ - 1 - back) % checks_.size()];
  EK_ASSIGN_OR_RETURN(const bool is_there, runtime_->IsDone(place.written));
  if (!is_there) EK_RETURN_IF_ERROR(runtime_->Synchronize(place.written, deadline));
  const auto& check = *static_cast<const update::Check*>(place.pinned.data.get());
  return GradientCheck{
      .norm = check.norm, .is_finite = check.is_finite != 0, .is_skipped = check.is_skipped != 0};
}

absl::Status DeviceUpdate::CopyToHost(Memory& pinned, const Memory& from, StreamRef stream,
                                      absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(pinned, runtime_->AllocatePinned(from.bytes));
  EK_RETURN_IF_ERROR(runtime_->Copy(pinned.data.get(), from.data.get(), from.bytes, stream));
  const absl::Status waited = runtime_->Synchronize(stream, deadline);
  if (!waited.ok()) (void)Keep(pinned, stream);
  return waited;
}

absl::StatusOr<GradientCheck> DeviceUpdate::CheckNow(double norm, double grad_scale,
                                                     StreamRef stream, absl::Time deadline) {
  Memory pinned;
  EK_RETURN_IF_ERROR(CopyToHost(pinned, found_, stream, deadline));
  const auto& found = *static_cast<const Found*>(pinned.data.get());
  if (found.nonfinite != 0) return GradientCheck{.norm = kInfinityNorm, .is_finite = false};
  return GradientCheck{.norm = update::NormOf(found, {.grad_scale = grad_scale, .norm = norm})};
}

absl::StatusOr<std::vector<int64_t>> DeviceUpdate::ReadSteps(StreamRef stream,
                                                             absl::Time deadline) {
  Memory pinned;
  EK_RETURN_IF_ERROR(CopyToHost(pinned, steps_, stream, deadline));
  const auto* const first = static_cast<const int64_t*>(pinned.data.get());
  return std::vector<int64_t>(first, first + param_count_);
}

absl::Status DeviceUpdate::WriteSteps(absl::Span<const int64_t> steps, StreamRef stream) {
  EK_ASSIGN_OR_RETURN(Memory pinned, runtime_->AllocatePinned(steps_.bytes));
  if (!steps.empty()) std::memcpy(pinned.data.get(), steps.data(), steps_.bytes);
  EK_RETURN_IF_ERROR(runtime_->Copy(steps_.data.get(), pinned.data.get(), steps_.bytes, stream));
  return Keep(std::move(pinned), stream);
}

}  // namespace evenkeel
