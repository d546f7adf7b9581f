// Converts tensors of any type, shape and layout to the buffers of evenkeel's calls.
//
//   Operation operation("evenkeel:broadcast", c10d::OpType::BROADCAST);
//   operation.Add({.kind = abi::Kind::kBroadcast, .out = {operation.Write(tensor)}, .root = 0});
//
// A tensor that is contiguous in the memory of the CPU is used where it lies. Any other is copied,
// and an output is copied back after the operation.
//
// Errors: c10::Error with a sentence that names the operation and the value; Python's RuntimeError.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_TENSORS_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/comm/abi/group.h"
#include "torch/csrc/distributed/c10d/Types.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace evenkeel::bridge {

// The encoding of a type in a call: each element travels as `per_element` elements of `dtype`.
struct Encoding {
  DType dtype = DType::kUint8;
  int64_t per_element = 1;
  ReduceOp op = ReduceOp::kSum;
};
// Returns the encoding of any type; one without counterpart in evenkeel travels as bytes.
Encoding EncodeForMove(at::ScalarType type);
// Returns the encoding for arithmetic. bool: a sum or maximum is "or", a product or minimum is
// "and". Complex numbers: only sum and average. Unsigned integers of more than 8 bits: the
// reductions that give the same bits with a sign.
Encoding EncodeForReduce(const char* operation, at::ScalarType type, const c10d::ReduceOp& op);

// One operation of torch.distributed: evenkeel's calls, and the tensors that they use.
class Operation {
 public:
  // `title` must be a literal, "evenkeel:NAME": the profiler keeps the pointer.
  Operation(const char* title, c10d::OpType type)
      : title_(title), name_(title + sizeof("evenkeel:") - 1), type_(type) {}

  const char* title() const { return title_; }
  const char* name() const { return name_; }
  c10d::OpType type() const { return type_; }

  // Return the buffer of a tensor that is read or written. The tensor lives as long as the
  // operation.
  abi::Buffer Read(const at::Tensor& tensor);
  abi::Buffer Write(const at::Tensor& tensor);
  // Returns the buffer of a tensor that is reduced. A tensor of bool, or for a PREMUL_SUM, is
  // copied.
  abi::Buffer ReadReduced(const at::Tensor& tensor, const c10d::ReduceOp& op);

  void Add(abi::Call call) { calls_.push_back(std::move(call)); }
  // Adds an all-reduce, or a reduce to `root`. The result goes to `result`, often `tensor` itself,
  // and is dropped if `result` is undefined. `tensor` changes only if it is `result`.
  void AddReduce(abi::Kind kind, const at::Tensor& tensor, const c10d::ReduceOp& op,
                 const at::Tensor& result, int root = -1);
  const std::vector<abi::Call>& calls() const { return calls_; }
  // `last` computes outputs from the received data, in CopyBack().
  void Then(std::function<void()> last) { last_ = std::move(last); }
  // Returns whether outputs are still in copies, for CopyBack().
  bool has_copies() const { return !copies_.empty() || last_ != nullptr; }
  // Copies the outputs to the tensors of the caller.
  void CopyBack();

  // The sender of a receive from any rank, once it has succeeded.
  std::shared_ptr<int> sender;

 private:
  // Returns the tensor, or a copy whose elements are contiguous, and keeps it.
  at::Tensor Dense(const at::Tensor& tensor, bool with_values);
  void Keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  void CopyLater(const at::Tensor& to, const at::Tensor& from);
  // Returns the tensor, or a copy with its values times the factor of a PREMUL_SUM. Any byte but 0
  // is true in a bool tensor; in the copy each true is 1, so that bits combine like truth values.
  at::Tensor Contribution(const at::Tensor& tensor, const c10d::ReduceOp& op);

  const char* title_;
  const char* name_;
  c10d::OpType type_;
  std::vector<abi::Call> calls_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // To, from.
  std::function<void()> last_;
};

// Fails unless `tensor` is a dense tensor of the CPU.
void CheckTensor(const char* operation, const at::Tensor& tensor);
// Fails unless there is exactly one tensor in `tensors`; returns it.
const at::Tensor& OnlyOne(const char* operation, const char* what,
                          const std::vector<at::Tensor>& tensors);
// Fails unless `tensor` has the type `type` and `count` elements.
void CheckElements(const char* operation, const char* what, const at::Tensor& tensor,
                   at::ScalarType type, int64_t count);

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_TENSORS_H_
