#include "evenkeel/bucket/parameter_set.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// A value, a gradient or a buffer in memory.
struct Piece {
  enum class Kind { kValue, kGradient, kBuffer };
  TensorView view;
  Kind kind;
  int index;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(view.data); }
  uintptr_t end() const { return begin() + static_cast<uintptr_t>(view.bytes()); }
};

}  // namespace

int ParameterSet::Add(std::string name, TensorView value, TensorView grad, int64_t row_size,
                      std::vector<int64_t> shape) {
  if (value.data != nullptr && value.count > 0) {
    const auto [same, is_new] = at_.try_emplace(value.data, size());
    if (!is_new && params_[same->second].value == value) {
      const int index = same->second;
      if (params_[index].grad.data == nullptr && grad.data != nullptr) params_[index].grad = grad;
      if (shapes_[index].empty()) shapes_[index] = std::move(shape);
      index_of_.try_emplace(name, index);
      shared_names_.push_back(
          {.name = std::move(name), .index = index, .grad = grad, .row_size = row_size});
      return index;
    }
  }
  if (grad.data == nullptr) grad = TensorView(nullptr, value.count, value.dtype, value.device);
  const int index = size();
  index_of_.try_emplace(name, index);
  params_.push_back({.name = std::move(name), .value = value, .grad = grad});
  shapes_.push_back(std::move(shape));
  own_grads_.push_back(grad);
  grad_states_.push_back(GradState::kNone);
  was_cleared_.push_back(0);
  mask_.Append(true);
  ignored_.Append(false);
  if (row_size != 0) sparse_[index].row_size = row_size;
  ++mask_version_;
  return index;
}

absl::Status CheckMoved(absl::string_view what, const TensorView& from, const TensorView& to) {
  const bool is_there = to.data != nullptr || to.count == 0;
  if (is_there && to.count == from.count && to.dtype == from.dtype && to.device == from.device) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(what, " is ", ToString(from),
                                                 " and cannot move to ",
                                                 is_there ? "" : "no memory for ", ToString(to)));
}

absl::Status ParameterSet::Rebind(int index, TensorView value, TensorView grad) {
  if (index < 0 || index >= size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", index, " is out of range: the number of parameters is ", size()));
  }
  Parameter& param = params_[index];
  EK_RETURN_IF_ERROR(
      CheckMoved(absl::StrCat("parameter \"", param.name, "\""), param.value, value));
  if (grad.data != nullptr) {
    EK_RETURN_IF_ERROR(CheckMoved(absl::StrCat("the gradient of parameter \"", param.name, "\""),
                                  param.value, grad));
  }
  ++memory_version_;
  if (const auto found = at_.find(param.value.data); found != at_.end() && found->second == index)
    at_.erase(found);
  param.value = value;
  if (value.count > 0) at_.try_emplace(value.data, index);
  if (grad.data == nullptr) return absl::OkStatus();
  const bool is_view =
      !attached_.expired() && has_views_ && param.grad.data != own_grads_[index].data;
  own_grads_[index] = grad;
  if (!is_view) param.grad = grad;
  return absl::OkStatus();
}

int64_t ParameterSet::RowSize(int index) const {
  const auto found = sparse_.find(index);
  return found == sparse_.end() ? 0 : found->second.row_size;
}

absl::Status ParameterSet::CheckSparse() const {
  for (const SharedName& shared : shared_names_) {
    if (shared.row_size == row_size(shared.index)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameters \"", params_[shared.index].name, "\" and \"", shared.name,
                     "\" are the same memory, in rows of ", row_size(shared.index), " and of ",
                     shared.row_size, " elements (0: dense)"));
  }
  for (int index = 0; index < size() && !sparse_.empty(); ++index) {
    const int64_t elements = row_size(index);
    if (elements == 0 || (elements > 0 && params_[index].value.count % elements == 0)) continue;
    return absl::InvalidArgumentError(absl::StrCat("parameter \"", params_[index].name, "\" is ",
                                                   ToString(params_[index].value),
                                                   ", which is not in rows of ", elements));
  }
  return absl::OkStatus();
}

absl::Status ParameterSet::SetSparseGrad(int index, std::span<const int64_t> rows,
                                         TensorView values) {
  if (index < 0 || index >= size() || row_size(index) < 1 || !IsFloat(params_[index].value.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", index, " is not a sparse one of a floating-point type"));
  }
  const auto& [name, value, grad] = params_[index];
  const int64_t row_count = value.count / row_size(index);
  const int64_t elements = static_cast<int64_t>(rows.size()) * row_size(index);
  if (values.count != elements || values.dtype != value.dtype || !values.device.is_cpu()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter \"", name, "\": ", rows.size(), " rows are ",
        ToString(TensorView(nullptr, elements, value.dtype)), ", not ", ToString(values)));
  }
  for (const int64_t row : rows) {
    if (row >= 0 && row < row_count) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", name, "\" has no row ", row, ", it has ", row_count));
  }
  SparseRows held;
  if (grad_states_[index] == GradState::kLocal) held = std::move(sparse_[index].grad);
  held.rows.insert(held.rows.end(), rows.begin(), rows.end());
  const auto* bytes = static_cast<const std::byte*>(values.data);
  if (values.count > 0) held.values.insert(held.values.end(), bytes, bytes + values.bytes());
  sparse_[index].grad = CoalesceRows(value.dtype, held, row_size(index));
  grad_states_[index] = GradState::kLocal;
  return absl::OkStatus();
}

absl::Status ParameterSet::Validate(std::span<const TensorView> buffers) const {
  EK_RETURN_IF_ERROR(CheckNames());
  EK_RETURN_IF_ERROR(CheckSparse());
  for (int index = 0; index < size(); ++index) {
    if (is_ignored(index)) continue;
    const auto& [name, value, grad] = params_[index];
    if (value.count < 0 || (value.data == nullptr && value.count > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter \"", name, "\" has no memory for ", ToString(value)));
    }
    if (grad.count != value.count || grad.dtype != value.dtype || grad.device != value.device) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter \"", name, "\" is ", ToString(value), ", its gradient ", ToString(grad)));
    }
    const auto& shape = shapes_[index];
    const auto elements =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
    if (!shape.empty() && elements != value.count) {
      return absl::InvalidArgumentError(absl::StrCat("parameter \"", name, "\" is ",
                                                     ToString(value), ", its shape [",
                                                     absl::StrJoin(shape, ", "), "]"));
    }
  }
  for (const auto& [name, index, grad, row_size] : shared_names_) {
    // A gradient that has moved into a bucket is no longer where it was added; then it was compared
    // before.
    if (is_ignored(index) || !attached_.expired() || grad.data == nullptr ||
        grad == params_[index].grad)
      continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameters \"", params_[index].name, "\" and \"", name,
                     "\" are the same memory, their gradients are not"));
  }
  return CheckOverlaps(buffers);
}

absl::Status ParameterSet::CheckNames() const {
  const auto check = [this](absl::string_view name, int index) -> absl::Status {
    const int first = Find(name);
    if (first == index) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("parameters ", std::min(first, index), " and ",
                                                   std::max(first, index), " are both named \"",
                                                   name, "\""));
  };
  for (int index = 0; index < size(); ++index)
    EK_RETURN_IF_ERROR(check(params_[index].name, index));
  for (const SharedName& shared : shared_names_)
    EK_RETURN_IF_ERROR(check(shared.name, shared.index));
  return absl::OkStatus();
}

absl::Status ParameterSet::CheckOverlaps(std::span<const TensorView> buffers) const {
  std::vector<Piece> pieces;
  for (int index = 0; index < size(); ++index) {
    if (is_ignored(index)) continue;
    pieces.push_back({params_[index].value, Piece::Kind::kValue, index});
    pieces.push_back({params_[index].grad, Piece::Kind::kGradient, index});
  }
  for (const TensorView& buffer : buffers)
    pieces.push_back({buffer, Piece::Kind::kBuffer, static_cast<int>(&buffer - buffers.data())});
  std::erase_if(pieces, [](const Piece& piece) {
    return piece.view.data == nullptr || piece.view.count <= 0;
  });
  std::ranges::sort(pieces, {}, [](const Piece& piece) {
    const Device& device = piece.view.device;
    return std::tuple(device.kind, device.index, piece.begin(), piece.kind, piece.index);
  });
  const auto name = [this](const Piece& piece) {
    const std::string what = ToString(piece.view);
    if (piece.kind == Piece::Kind::kBuffer)
      return absl::StrCat("buffer ", piece.index, " (", what, ")");
    return absl::StrCat(piece.kind == Piece::Kind::kGradient ? "the gradient of " : "the value of ",
                        "\"", params_[piece.index].name, "\" (", what, ")");
  };
  // The piece before this one that ends last; buffers may overlap each other.
  const Piece *last = nullptr, *last_buffer = nullptr;
  for (const Piece& piece : pieces) {
    const bool is_buffer = piece.kind == Piece::Kind::kBuffer;
    for (const Piece* before : {last, is_buffer ? nullptr : last_buffer}) {
      if (before == nullptr || before->view.device != piece.view.device ||
          before->end() <= piece.begin())
        continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the memory of ", name(*before), " overlaps that of ", name(piece),
                       is_buffer || before == last_buffer ? ": a buffer needs memory of its own"
                                                          : " without being the same"));
    }
    const Piece*& of_kind = is_buffer ? last_buffer : last;
    if (of_kind == nullptr || of_kind->view.device != piece.view.device ||
        of_kind->end() < piece.end())
      of_kind = &piece;
  }
  return absl::OkStatus();
}

int ParameterSet::Find(absl::string_view name) const {
  const auto found = index_of_.find(name);
  return found == index_of_.end() ? -1 : found->second;
}

int ParameterSet::Find(const void* value) const {
  const auto found = at_.find(value);
  return found == at_.end() ? -1 : found->second;
}

void ParameterSet::SetGradState(int index, GradState state) {
  const GradState old = std::exchange(grad_states_[index], state);
  if (state != GradState::kNone) return;
  was_cleared_[index] = 1;
  if (old == GradState::kLocal && mask_[index] && attached_.expired() &&
      !has_local_gradients(index))
    ++dropped_gradients_;
}

// A program that clears one after the other takes linear time.
bool ParameterSet::has_local_gradients(int first) const {
  for (int i = 0; i < size(); ++i) {
    const int index = (first + i) % size();
    if (grad_states_[index] == GradState::kLocal && mask_[index]) return true;
  }
  return false;
}

void ParameterSet::ClearGradients() {
  if (has_local_gradients()) ++dropped_gradients_;
  std::fill(grad_states_.begin(), grad_states_.end(), GradState::kNone);
  std::fill(was_cleared_.begin(), was_cleared_.end(), 1);
}

void ParameterSet::SetReduced(bool is_reduced) {
  is_reduced_ = is_reduced;
  if (is_reduced) std::fill(was_cleared_.begin(), was_cleared_.end(), 0);
}

absl::Status ParameterSet::Ignore(int index) {
  if (index < 0 || index >= size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", index, " cannot be ignored: the number of parameters is ", size()));
  }
  if (is_ignored(index)) return absl::OkStatus();
  if (const absl::Status detached = CheckDetached(); !detached.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("parameter \"", params_[index].name, "\" (", index,
                     ") is ignored too late: ", detached.message()));
  }
  SetTrainable(index, false);
  ignored_.Set(index, true);
  ++ignored_count_;
  return absl::OkStatus();
}

absl::StatusOr<int> ParameterSet::Ignore(absl::string_view prefix) {
  const std::vector<int> indices = WithPrefix(prefix);
  for (int index : indices) EK_RETURN_IF_ERROR(Ignore(index));
  return static_cast<int>(indices.size());
}

absl::StatusOr<std::shared_ptr<const std::string>> ParameterSet::Attach(absl::string_view reducer,
                                                                        bool has_views) {
  EK_RETURN_IF_ERROR(CheckDetached());
  auto attached = std::make_shared<const std::string>(reducer);
  has_views_ = has_views;
  for (int index = 0; index < size(); ++index) own_grads_[index] = params_[index].grad;
  attached_ = attached;
  return attached;
}

absl::Status ParameterSet::CheckDetached() const {
  const std::shared_ptr<const std::string> attached = attached_.lock();
  if (attached == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the parameters belong to ", *attached, ", which is alive: destroy it before"));
}

void ParameterSet::SetTrainable(int index, bool trained) {
  if (!is_ignored(index) && mask_.Set(index, trained)) ++mask_version_;
}

std::vector<int> ParameterSet::WithPrefix(absl::string_view prefix) const {
  std::vector<int> indices;
  for (int index = 0; index < size(); ++index) {
    if (absl::StartsWith(params_[index].name, prefix) && !is_ignored(index))
      indices.push_back(index);
  }
  const size_t by_first_name = indices.size();
  for (const SharedName& shared : shared_names_) {
    if (absl::StartsWith(shared.name, prefix) && !is_ignored(shared.index))
      indices.push_back(shared.index);
  }
  if (indices.size() == by_first_name) return indices;
  std::ranges::sort(indices);
  indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  return indices;
}

int ParameterSet::SetTrainable(absl::string_view prefix, bool trained) {
  const std::vector<int> indices = WithPrefix(prefix);
  for (int index : indices) SetTrainable(index, trained);
  return static_cast<int>(indices.size());
}

absl::Status ParameterSet::SetTrainable(std::span<const uint8_t> flags) {
  if (flags.size() != params_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", flags.size(), " trainable flags for ", params_.size(), " parameters"));
  }
  if (ignored_count_ == 0) {
    if (mask_.Set(flags)) ++mask_version_;
    return absl::OkStatus();
  }
  TrainableMask next = mask_;
  next.Set(flags);
  for (int index = 0; index < size(); ++index) {
    if (ignored_[index]) next.Set(index, false);
  }
  return SetTrainable(next);
}

absl::Status ParameterSet::SetTrainable(const TrainableMask& mask) {
  if (mask.size() != size()) {
    return absl::InvalidArgumentError(absl::StrCat("got a trainable mask of ", mask.size(),
                                                   " entries for ", size(), " parameters"));
  }
  if (mask == mask_) return absl::OkStatus();
  for (int index = 0; index < size() && ignored_count_ > 0; ++index) {
    if (!ignored_[index] || !mask[index]) continue;
    return absl::InvalidArgumentError(absl::StrCat("a trainable mask trains parameter \"",
                                                   params_[index].name, "\" (", index,
                                                   "), which is ignored"));
  }
  mask_ = mask;
  ++mask_version_;
  return absl::OkStatus();
}

}  // namespace evenkeel
