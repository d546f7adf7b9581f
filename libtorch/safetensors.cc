#include "evenkeel/zero_optim/checkpoint/safetensors.h"

#include <cstring>
#include <map>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "evenkeel/libtorch/internal.h"

namespace evenkeel::libtorch {
namespace {

using torch::Tensor;

// Parameters and buffers under the names of Python's state_dict().
std::map<std::string, Tensor> StateOf(const torch::nn::Module& module) {
  std::map<std::string, Tensor> state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  std::erase_if(state, [](const auto& item) { return !item.second.defined(); });
  return state;
}

// Throws unless the file and the module have the same tensors. One of several names is enough.
void CheckSameNames(const std::string& path, const SafetensorsFile& file,
                    const std::map<std::string, Tensor>& state) {
  std::unordered_set<const void*> found;
  for (const SafetensorsFile::Tensor& one : file.tensors()) {
    const auto own = state.find(one.name);
    if (own == state.end())
      Refuse(absl::StrCat(path, " has a tensor \"", one.name, "\", but the module has none"));
    if (own->second.sizes() != at::IntArrayRef(one.shape))
      Refuse(absl::StrCat(path, ": \"", one.name, "\" has the sizes ",
                          c10::str(at::IntArrayRef(one.shape)), ", but that of the module ",
                          c10::str(own->second.sizes())));
    found.insert(own->second.unsafeGetTensorImpl());
  }
  for (const auto& [name, tensor] : state) {
    if (!found.contains(tensor.unsafeGetTensorImpl()))
      Refuse(absl::StrCat(path, " has no tensor \"", name, "\", but the module has one"));
  }
}

}  // namespace

void save_safetensors(const torch::nn::Module& module, const std::string& path) {
  std::vector<Tensor> kept;
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : StateOf(module)) {
    kept.push_back(tensor.detach().contiguous());
    tensors.push_back({name, tensor.sizes().vec(), ViewOf(kept.back(), "\"" + name + "\"")});
  }
  Check(WriteSafetensors(path, tensors, {{"format", "pt"}}));
}

void load_safetensors(torch::nn::Module& module, const std::string& path) {
  const torch::NoGradGuard no_grad;
  const SafetensorsFile file = Value(SafetensorsFile::Read(path));
  auto state = StateOf(module);
  CheckSameNames(path, file, state);
  for (const SafetensorsFile::Tensor& one : file.tensors()) {
    const Tensor value = torch::empty(one.shape, ScalarTypeOf(one.dtype));
    std::memcpy(value.data_ptr(), one.bytes.data(), one.bytes.size());
    state.at(one.name).copy_(value);
  }
}

}  // namespace evenkeel::libtorch
