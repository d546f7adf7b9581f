#include "tensors.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <span>

namespace evenkeel::bridge {
namespace {

abi::Buffer BufferOf(const at::Tensor& tensor, const Encoding& encoding) {
  return {.data = tensor.data_ptr(),
          .count = tensor.numel() * encoding.per_element,
          .dtype = encoding.dtype};
}

using TypePair = std::pair<at::ScalarType, DType>;

// The types that have a counterpart in evenkeel, and those that have one with a sign.
constexpr TypePair kSameTypes[] = {
    {at::kFloat, DType::kFloat32},     {at::kDouble, DType::kFloat64}, {at::kHalf, DType::kFloat16},
    {at::kBFloat16, DType::kBFloat16}, {at::kChar, DType::kInt8},      {at::kByte, DType::kUint8},
    {at::kShort, DType::kInt16},       {at::kInt, DType::kInt32},      {at::kLong, DType::kInt64}};
constexpr TypePair kSignedTypes[] = {
    {at::kUInt16, DType::kInt16}, {at::kUInt32, DType::kInt32}, {at::kUInt64, DType::kInt64}};

std::optional<DType> Find(std::span<const TypePair> types, at::ScalarType type) {
  for (const auto& [torch_type, dtype] : types)
    if (torch_type == type) return dtype;
  return std::nullopt;
}

std::optional<DType> SameType(at::ScalarType type) { return Find(kSameTypes, type); }
std::optional<DType> SignedType(at::ScalarType type) { return Find(kSignedTypes, type); }

// In the order of c10d::ReduceOp::RedOpType, which ends with UNUSED.
constexpr std::pair<const char*, ReduceOp> kReductions[] = {
    {"SUM", ReduceOp::kSum},   {"AVG", ReduceOp::kAverage}, {"PRODUCT", ReduceOp::kProduct},
    {"MIN", ReduceOp::kMin},   {"MAX", ReduceOp::kMax},     {"BAND", ReduceOp::kBitAnd},
    {"BOR", ReduceOp::kBitOr}, {"BXOR", ReduceOp::kBitXor}, {"PREMUL_SUM", ReduceOp::kSum}};
static_assert(std::size(kReductions) == c10d::ReduceOp::UNUSED,
              "this torch has another list of reductions");

ReduceOp ReduceOpOf(const char* operation, c10d::ReduceOp::RedOpType op) {
  TORCH_CHECK(op < c10d::ReduceOp::UNUSED, "evenkeel: ", operation, " got the reduction ",
              static_cast<int>(op), ", which does not exist.");
  return kReductions[op].second;
}

[[noreturn]] void RefuseReduction(const char* operation, at::ScalarType type,
                                  c10d::ReduceOp::RedOpType op) {
  C10_THROW_ERROR(NotImplementedError, c10::str("evenkeel: ", operation, " does not reduce ", type,
                                                " with ReduceOp.", kReductions[op].first, "."));
}

// Returns whether two tensors may have an element in common.
bool Overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& tensor) {
    return static_cast<const std::byte*>(tensor.const_data_ptr());
  };
  const auto end = [&](const at::Tensor& tensor) {
    int64_t elements = tensor.numel() == 0 ? 0 : 1;
    for (int64_t d = 0; elements != 0 && d < tensor.dim(); ++d)
      elements += (tensor.size(d) - 1) * tensor.stride(d);
    return begin(tensor) + elements * static_cast<int64_t>(tensor.element_size());
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

}  // namespace

Encoding EncodeForMove(at::ScalarType type) {
  if (type == at::kBool) return {.dtype = DType::kUint8};
  if (const auto dtype = SameType(type)) return {.dtype = *dtype};
  if (const auto dtype = SignedType(type)) return {.dtype = *dtype};
  if (at::isComplexType(type)) {
    if (const auto part = SameType(c10::toRealValueType(type))) {
      return {.dtype = *part, .per_element = 2};
    }
  }
  return {.dtype = DType::kUint8, .per_element = static_cast<int64_t>(at::elementSize(type))};
}

Encoding EncodeForReduce(const char* operation, at::ScalarType type, const c10d::ReduceOp& op) {
  const c10d::ReduceOp::RedOpType kind = op;
  Encoding encoding = EncodeForMove(type);
  encoding.op = ReduceOpOf(operation, kind);
  if (type == at::kBool) {
    switch (encoding.op) {
      case ReduceOp::kSum:
      case ReduceOp::kMax:
        encoding.op = ReduceOp::kBitOr;
        break;
      case ReduceOp::kProduct:
      case ReduceOp::kMin:
        encoding.op = ReduceOp::kBitAnd;
        break;
      case ReduceOp::kAverage:
        RefuseReduction(operation, type, kind);
      default:
        break;
    }
    if (kind == c10d::ReduceOp::PREMUL_SUM) RefuseReduction(operation, type, kind);
    return encoding;
  }
  if (const auto dtype = SameType(type)) {
    if (IsBitwise(encoding.op) && IsFloat(*dtype)) RefuseReduction(operation, type, kind);
    return encoding;
  }
  if (SignedType(type)) {
    const bool has_order = encoding.op == ReduceOp::kMin || encoding.op == ReduceOp::kMax;
    if (has_order || encoding.op == ReduceOp::kAverage) RefuseReduction(operation, type, kind);
    return encoding;
  }
  const bool is_linear = encoding.op == ReduceOp::kSum || encoding.op == ReduceOp::kAverage;
  if (!at::isComplexType(type) || !is_linear) RefuseReduction(operation, type, kind);
  return encoding;
}

at::Tensor Operation::Dense(const at::Tensor& tensor, bool with_values) {
  CheckTensor(name_, tensor);
  at::Tensor dense = tensor;
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    dense = at::empty(tensor.sizes(), tensor.options().memory_format(std::nullopt));
    if (with_values) dense.copy_(tensor);
  }
  Keep(dense);
  return dense;
}

void Operation::CopyLater(const at::Tensor& to, const at::Tensor& from) {
  if (!from.is_same(to)) copies_.emplace_back(to, from);
}

at::Tensor Operation::Contribution(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  CheckTensor(name_, tensor);
  if (tensor.scalar_type() == at::kBool) return tensor.view(at::kByte).ne(0);
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "evenkeel: ", name_, " got a PREMUL_SUM without its factor.");
  if (factor->tensor_factor.defined()) {
    return tensor.mul(factor->tensor_factor.to(tensor.options().dtype())).contiguous();
  }
  return tensor.mul(factor->double_factor).to(tensor.scalar_type()).contiguous();
}

abi::Buffer Operation::Read(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return BufferOf(Dense(tensor, true), EncodeForMove(tensor.scalar_type()));
}

abi::Buffer Operation::Write(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor dense = Dense(tensor, false);
  CopyLater(tensor, dense);
  return BufferOf(dense, EncodeForMove(tensor.scalar_type()));
}

abi::Buffer Operation::ReadReduced(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Encoding encoding = EncodeForReduce(name_, tensor.scalar_type(), op);
  return BufferOf(Dense(Contribution(tensor, op), true), encoding);
}

void Operation::AddReduce(abi::Kind kind, const at::Tensor& tensor, const c10d::ReduceOp& op,
                          const at::Tensor& result, int root) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Encoding encoding = EncodeForReduce(name_, tensor.scalar_type(), op);
  const bool is_used = std::any_of(kept_.begin(), kept_.end(), [&](const at::Tensor& other) {
    return Overlap(tensor, other);  // It would be reduced twice.
  });
  at::Tensor dense = Dense(Contribution(tensor, op), true);
  if (dense.is_same(tensor) && (is_used || !dense.is_same(result))) {
    dense = dense.clone();
    Keep(dense);
  }
  if (result.defined()) CopyLater(result, dense);
  Add({.kind = kind, .out = {BufferOf(dense, encoding)}, .op = encoding.op, .root = root});
}

void Operation::CopyBack() {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (auto& [to, from] : copies_) to.copy_(from.view_as(to));
  if (last_ != nullptr) last_();
}

void CheckTensor(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "evenkeel: ", operation, " got an undefined tensor.");
  if (tensor.layout() != at::kStrided) {
    C10_THROW_ERROR(NotImplementedError,
                    c10::str("evenkeel: ", operation, " takes dense tensors and got the layout ",
                             tensor.layout(), ". Convert it with to_dense()."));
  }
  TORCH_CHECK(tensor.device().is_cpu(), "evenkeel: ", operation,
              " takes tensors of the CPU and got one on ", tensor.device(),
              ". Use the backend \"cpu:evenkeel,cuda:nccl\", which leaves CUDA tensors to NCCL.");
  TORCH_CHECK(!tensor.is_quantized(), "evenkeel: ", operation, " does not take quantized tensors.");
}

const at::Tensor& OnlyOne(const char* operation, const char* what,
                          const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "evenkeel: ", operation, " takes one ", what, " and got ",
              tensors.size(), ".");
  return tensors.front();
}

void CheckElements(const char* operation, const char* what, const at::Tensor& tensor,
                   at::ScalarType type, int64_t count) {
  CheckTensor(operation, tensor);
  TORCH_CHECK(tensor.scalar_type() == type, "evenkeel: ", operation, " needs ", what, " of type ",
              type, " and got ", tensor.scalar_type(), ".");
  TORCH_CHECK(tensor.numel() == count, "evenkeel: ", operation, " needs ", what, " with ", count,
              " elements and got one with ", tensor.numel(), ", of shape ", tensor.sizes(), ".");
}

}  // namespace evenkeel::bridge
