#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/libtorch.h"
#include "evenkeel/libtorch/internal.h"

namespace evenkeel::libtorch {

struct BalancedSampler::State {
  std::shared_ptr<Group::State> group;
  BalancedSamplerOptions options;
  std::unique_ptr<Balance> balance;
  size_t size = 0;
  std::vector<size_t> order;  // Of the epoch.
  int64_t epoch = -1;
  int64_t batches = 0;      // Of the epoch that were used.
  bool is_resumed = false;  // The next reset() continues this epoch.

  std::map<std::string, int64_t> Saved() const {
    return {{"size", static_cast<int64_t>(size)},
            {"batch", options.batch},
            {"shuffle", options.shuffle ? 1 : 0},
            {"seed", static_cast<int64_t>(options.seed)},
            {"epoch", epoch},
            {"batches", batches}};
  }
};

BalancedSampler::BalancedSampler(Group& group, size_t size, const BalancedSamplerOptions& options)
    : state_(std::make_shared<State>(
          State{.group = group.state(), .options = options, .balance = nullptr, .size = size})) {
  Communicator& comm = *state_->group->comm;
  Check(VerifySame(comm, "BalancedSampler", absl::OkStatus(),
                   {{"size", absl::StrCat(size)},
                    {"shuffle", absl::StrCat(options.shuffle)},
                    {"seed", absl::StrCat(options.seed)}}));
  state_->balance = Value(Balance::Create(&comm, {.batch = options.batch,
                                                  .quantum = options.quantum,
                                                  .least = options.least,
                                                  .most = options.most}));
}

BalancedSampler::~BalancedSampler() = default;
BalancedSampler::BalancedSampler(const BalancedSampler&) = default;
BalancedSampler& BalancedSampler::operator=(const BalancedSampler&) = default;

void BalancedSampler::reset(std::optional<size_t> size) {
  State& state = *state_;
  if (size.has_value()) state.size = *size;
  if (!std::exchange(state.is_resumed, false)) {
    ++state.epoch;
    state.batches = 0;
  }
  state.order.resize(state.size);
  std::iota(state.order.begin(), state.order.end(), size_t{0});
  if (!state.options.shuffle) return;
  const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(
      state.options.seed + static_cast<uint64_t>(state.epoch));
  const torch::Tensor order = torch::randperm(static_cast<int64_t>(state.size), generator,
                                              torch::TensorOptions(torch::kInt64));
  std::copy_n(order.const_data_ptr<int64_t>(), state.size, state.order.begin());
}

std::optional<std::vector<size_t>> BalancedSampler::next(size_t batch_size) {
  State& state = *state_;
  const int64_t batch = state.options.batch;
  if (static_cast<int64_t>(batch_size) != batch) {
    Refuse(absl::StrCat("the loader's batch size is ", batch_size,
                        ", and that of its BalancedSampler ", batch, ": pass the same one"));
  }
  const int64_t first = state.batches * batch;
  const int64_t left = static_cast<int64_t>(state.order.size()) - first;
  if (left <= 0) return std::nullopt;
  // Places differ between epochs, so that ranks in different ones are found.
  const int64_t epochs_before = state.epoch * static_cast<int64_t>(state.order.size());
  const Share mine = Value(state.balance->Next(epochs_before + first, std::min(batch, left)));
  ++state.batches;
  if (mine.count == 0) return std::nullopt;
  StepControl::Of(*state.group->comm).AddSamples(mine.count);
  const auto begin = state.order.begin() + (mine.first - epochs_before);
  return std::vector<size_t>(begin, begin + mine.count);
}

void BalancedSampler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& [name, value] : state_->Saved())
    archive.write(name, torch::tensor(value), /*is_buffer=*/true);
}

void BalancedSampler::load(torch::serialize::InputArchive& archive) {
  std::map<std::string, int64_t> loaded = state_->Saved();
  for (auto& [name, value] : loaded) {
    torch::Tensor tensor = torch::empty({}, torch::kInt64);
    archive.read(name, tensor, /*is_buffer=*/true);
    value = tensor.item<int64_t>();
  }
  for (const auto& [name, value] : state_->Saved()) {
    if (name == "epoch" || name == "batches" || loaded[name] == value) continue;
    Refuse(absl::StrCat("the state is that of a BalancedSampler with ", name, " ", loaded[name],
                        ", and this one has ", value));
  }
  state_->epoch = loaded["epoch"];
  state_->batches = loaded["batches"];
  state_->is_resumed = state_->epoch >= 0;
}

int64_t BalancedSampler::epoch() const {
  const bool has_ended =
      state_->batches * state_->options.batch >= static_cast<int64_t>(state_->size);
  return std::max<int64_t>(0, state_->epoch + (has_ended ? 1 : 0));
}

std::vector<int64_t> BalancedSampler::shares() const { return state_->balance->shares(); }
std::string BalancedSampler::news() { return state_->balance->News(); }

}  // namespace evenkeel::libtorch
