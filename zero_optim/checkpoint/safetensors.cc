#include "evenkeel/zero_optim/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/mapped_file.h"
#include "evenkeel/files/strict_json.h"

// A file is: the header's length (8 bytes, little-endian), the header (JSON), the tensors' bytes.

namespace evenkeel {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are copied as they lie in memory");

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes =
    100'000'000;  // The same limit as the reference implementation's.
constexpr char kMetadataKey[] = "__metadata__";
constexpr int kMaxDepth = 3;  // The header, a tensor, its shape.

absl::Status Malformed(absl::string_view how) { return absl::InvalidArgumentError(how); }

struct DTypeName {
  DType dtype;
  absl::string_view name;
};
// For a type with two names the first is written.
constexpr DTypeName kDTypeNames[] = {
    {DType::kFloat32, "F32"},   {DType::kFloat64, "F64"}, {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"}, {DType::kInt8, "I8"},     {DType::kUint8, "U8"},
    {DType::kInt16, "I16"},     {DType::kInt32, "I32"},   {DType::kInt64, "I64"},
    {DType::kUint8, "BOOL"},
};

const DTypeName* FindDType(absl::string_view name) {
  const auto* found = std::ranges::find(kDTypeNames, name, &DTypeName::name);
  return found == std::end(kDTypeNames) ? nullptr : found;
}

absl::string_view NameOf(DType dtype) {
  return std::ranges::find(kDTypeNames, dtype, &DTypeName::dtype)->name;
}

// ---- The header's entries ----

absl::Status ReadMetadata(const Json& json, std::map<std::string, std::string>& metadata) {
  if (!json.is_object()) return Malformed("__metadata__ is not an object");
  for (const auto& [key, value] : json.items()) {
    const auto* text = value.get_ptr<const std::string*>();
    if (text == nullptr) return Malformed(absl::StrCat("metadata \"", key, "\" is not text"));
    metadata[key] = *text;
  }
  return absl::OkStatus();
}

// The numbers of an array of natural numbers; false for anything else.
bool ReadNumbers(const Json& json, std::vector<int64_t>& numbers) {
  if (!json.is_array()) return false;
  for (const Json& item : json) {
    const auto* number = item.get_ptr<const uint64_t*>();
    if (number == nullptr || *number > INT64_MAX) return false;
    numbers.push_back(static_cast<int64_t>(*number));
  }
  return true;
}

// Bytes of a tensor; false if that is more than 63 bits can say.
bool BytesOf(std::span<const int64_t> shape, DType dtype, int64_t& bytes) {
  bytes = SizeOf(dtype);
  // A zero makes any product zero, also one that would overflow before it.
  if (std::ranges::find(shape, 0) != shape.end()) bytes = 0;
  for (int64_t size : shape) {
    if (bytes != 0 && __builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  return true;
}

absl::StatusOr<SafetensorsFile::Tensor> ReadTensor(const std::string& name, const Json& json,
                                                   absl::string_view data) {
  const auto malformed = [&](absl::string_view how) {
    return Malformed(absl::StrCat("tensor ", name, ": ", how));
  };
  if (!json.is_object()) return malformed("is not an object");
  const auto dtype_json = json.find("dtype");
  const auto shape_json = json.find("shape");
  const auto offsets_json = json.find("data_offsets");
  if (json.size() != 3 || dtype_json == json.end() || shape_json == json.end() ||
      offsets_json == json.end()) {
    return malformed("needs dtype, shape and data_offsets, and nothing else");
  }

  SafetensorsFile::Tensor tensor{.name = name};
  const auto* dtype_name = dtype_json->get_ptr<const std::string*>();
  const DTypeName* dtype = dtype_name ? FindDType(*dtype_name) : nullptr;
  if (dtype == nullptr)
    return malformed(absl::StrCat("unknown dtype ", dtype_name ? *dtype_name : "(not text)"));
  tensor.dtype = dtype->dtype;
  if (!ReadNumbers(*shape_json, tensor.shape)) return malformed("its shape is not a list of sizes");
  std::vector<int64_t> offsets;
  if (!ReadNumbers(*offsets_json, offsets) || offsets.size() != 2)
    return malformed("data_offsets is not [begin, end]");

  const int64_t begin = offsets[0];
  const int64_t end = offsets[1];
  if (begin > end || end > static_cast<int64_t>(data.size())) {
    return malformed(absl::StrCat("bytes ", begin, " to ", end, " are not within the file's ",
                                  data.size(), " bytes of data"));
  }
  int64_t bytes;
  if (!BytesOf(tensor.shape, tensor.dtype, bytes) || bytes != end - begin) {
    return malformed(absl::StrCat(dtype->name, " of shape [", absl::StrJoin(tensor.shape, ","),
                                  "] does not fill the ", end - begin, " bytes it has"));
  }
  tensor.bytes = data.substr(begin, bytes);
  return tensor;
}

// `tensors` are in the order of their bytes.
absl::Status CheckThatTensorsCover(absl::string_view data,
                                   std::span<const SafetensorsFile::Tensor> tensors) {
  size_t covered = 0;
  for (const auto& tensor : tensors) {
    const size_t begin = tensor.bytes.data() - data.data();
    if (begin != covered) {
      return Malformed(begin < covered
                           ? absl::StrCat("tensor ", tensor.name, " overlaps the one before it")
                           : absl::StrCat(begin - covered, " bytes before tensor ", tensor.name,
                                          " belong to no tensor"));
    }
    covered += tensor.bytes.size();
  }
  if (covered == data.size()) return absl::OkStatus();
  return Malformed(absl::StrCat(data.size() - covered, " bytes follow the last tensor"));
}

// ---- Writing ----

absl::Status CheckTensor(const NamedTensor& tensor) {
  const auto wrong = [&](absl::string_view how) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name, ": ", how));
  };
  if (tensor.name == kMetadataKey) return wrong("this name is reserved");
  if (!tensor.value.device.is_cpu()) return wrong("is not on the CPU");
  int64_t bytes;
  if (std::ranges::any_of(tensor.shape, [](int64_t size) { return size < 0; }) ||
      !BytesOf(tensor.shape, tensor.value.dtype, bytes) || bytes != tensor.value.bytes()) {
    return wrong(absl::StrCat("shape [", absl::StrJoin(tensor.shape, ","), "] is not that of ",
                              ToString(tensor.value)));
  }
  return absl::OkStatus();
}

// Length and header, padded so that the tensors' bytes begin at a multiple of 64.
std::string Preamble(const Json& header) {
  std::string text = header.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  const size_t used = kLengthBytes + text.size();
  text.append((64 - used % 64) % 64, ' ');
  const uint64_t length = text.size();
  std::string preamble(kLengthBytes, '\0');
  std::memcpy(preamble.data(), &length, kLengthBytes);
  return preamble + text;
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Read(const std::string& path) {
  EK_ASSIGN_OR_RETURN(MappedFile mapped, MapFile(path));
  const absl::string_view bytes = *mapped;
  auto file = Parse(bytes, std::move(mapped));
  if (!file.ok()) return Annotate(file.status(), path);
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(std::string contents) {
  const auto owner = std::make_shared<const std::string>(std::move(contents));
  return Parse(*owner, owner);
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(absl::string_view all,
                                                       std::shared_ptr<const void> owner) {
  SafetensorsFile file;
  file.contents_ = std::move(owner);
  if (all.size() < kLengthBytes) {
    return Malformed(absl::StrCat("not a safetensors file: ", all.size(), " bytes are too few"));
  }
  if (absl::StartsWith(all, internal::kLfsPointer))
    return Malformed("a Git LFS pointer; fetch the file itself with `git lfs pull`");
  uint64_t length;
  std::memcpy(&length, all.data(), kLengthBytes);
  if (length > all.size() - kLengthBytes || length > kMaxHeaderBytes) {
    return Malformed(absl::StrCat("not a safetensors file: a header of ", length,
                                  " bytes does not fit into a file of ", all.size()));
  }
  EK_ASSIGN_OR_RETURN(const Json header, internal::ParseStrictJson(all.substr(kLengthBytes, length),
                                                                   kMaxDepth, "the header"));
  const absl::string_view data = all.substr(kLengthBytes + length);
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadataKey) {
      if (!entry.is_null()) EK_RETURN_IF_ERROR(ReadMetadata(entry, file.metadata_));
      continue;
    }
    EK_ASSIGN_OR_RETURN(Tensor tensor, ReadTensor(name, entry, data));
    file.tensors_.push_back(std::move(tensor));
  }
  // Empty tensors first where they begin at the same byte as another.
  std::ranges::sort(file.tensors_, {}, [](const Tensor& tensor) {
    return std::pair(tensor.bytes.data(), tensor.bytes.size());
  });
  EK_RETURN_IF_ERROR(CheckThatTensorsCover(data, file.tensors_));
  return file;
}

const SafetensorsFile::Tensor* SafetensorsFile::Find(absl::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &Tensor::name);
  return found == tensors_.end() ? nullptr : &*found;
}

absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata,
                              std::vector<int64_t>* offsets) {
  // Wide elements first, so that all are aligned to their size.
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::greater<>(),
                           [](const NamedTensor* t) { return SizeOf(t->value.dtype); });

  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::vector<absl::string_view> pieces(1);
  if (offsets != nullptr) offsets->assign(tensors.size(), 0);
  int64_t offset = 0;
  for (const NamedTensor* tensor : order) {
    EK_RETURN_IF_ERROR(CheckTensor(*tensor));
    if (header.contains(tensor->name)) {
      return absl::InvalidArgumentError(absl::StrCat("two tensors are named ", tensor->name));
    }
    const int64_t end = offset + tensor->value.bytes();
    header[tensor->name] = {{"dtype", NameOf(tensor->value.dtype)},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, end}}};
    pieces.emplace_back(static_cast<const char*>(tensor->value.data), tensor->value.bytes());
    if (offsets != nullptr) (*offsets)[tensor - tensors.data()] = offset;
    offset = end;
  }
  const std::string preamble = Preamble(header);
  if (offsets != nullptr) {
    for (int64_t& at : *offsets) at += static_cast<int64_t>(preamble.size());
  }
  pieces[0] = preamble;
  return WriteFileAtomically(path, pieces);
}

}  // namespace evenkeel
