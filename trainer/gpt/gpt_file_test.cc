#include "evenkeel/trainer/gpt/gpt_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kHfTiny[] = "tests/testdata/gpt/hf_tiny.safetensors";

std::string Path(absl::string_view name = "") {
  return absl::StrCat(testing::TempDir(), "/",
                      testing::UnitTest::GetInstance()->current_test_info()->name(), name);
}

std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteBytes(const std::string& path, absl::string_view bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

struct Shape {
  std::string name;
  std::vector<int64_t> sizes;
};

// As the Python package `transformers` names and shapes what a GPT-2 has, word for word.
std::vector<Shape> Shapes(int64_t vocabulary = 5, int64_t context = 3, int64_t width = 4) {
  return {
      {"wte.weight", {vocabulary, width}},
      {"wpe.weight", {context, width}},
      {"h.0.ln_1.weight", {width}},
      {"h.0.ln_1.bias", {width}},
      {"h.0.attn.c_attn.weight", {width, 3 * width}},
      {"h.0.attn.c_attn.bias", {3 * width}},
      {"h.0.attn.c_proj.weight", {width, width}},
      {"h.0.attn.c_proj.bias", {width}},
      {"h.0.ln_2.weight", {width}},
      {"h.0.ln_2.bias", {width}},
      {"h.0.mlp.c_fc.weight", {width, 4 * width}},
      {"h.0.mlp.c_fc.bias", {4 * width}},
      {"h.0.mlp.c_proj.weight", {4 * width, width}},
      {"h.0.mlp.c_proj.bias", {width}},
      {"ln_f.weight", {width}},
      {"ln_f.bias", {width}},
  };
}

// Tensors with a GPT-2's names, which compute nothing.
class Weights : public Model {
 public:
  explicit Weights(const std::vector<Shape>& shapes = Shapes(), DType dtype = DType::kFloat32) {
    for (const Shape& shape : shapes) AddParameter(shape.name, dtype, shape.sizes);
  }
  std::map<std::string, std::string> metadata() const override { return {{"heads", "2"}}; }
  int64_t ActivationBytes() const override { return 0; }

 protected:
  absl::Status Check(const Batch&) const override {
    return absl::UnimplementedError("computes nothing");
  }
  absl::StatusOr<PendingResult> DoForward(const Batch&, Mode, const PassOptions&) override {
    return absl::UnimplementedError("computes nothing");
  }
  absl::Status DoBackward(GradientSink&) override {
    return absl::UnimplementedError("computes nothing");
  }
};

// A file as the tests want it: tensors of ones in float32, to be changed before Write().
struct Draft {
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
    DType dtype = DType::kFloat32;  // kInt32: the floats' bits.
  };
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> metadata;

  explicit Draft(const std::vector<Shape>& shapes = Shapes()) {
    for (const Shape& shape : shapes) Add(shape.name, shape.sizes);
  }
  void Add(const std::string& name, const std::vector<int64_t>& shape) {
    const int64_t count =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    tensors.push_back({name, shape, std::vector<float>(count, 1)});
  }
  Tensor& operator[](absl::string_view name) {
    return *std::ranges::find(tensors, name, &Tensor::name);
  }
  void Remove(absl::string_view name) {
    std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.name == name; });
  }
  std::string Write(const std::string& path = Path()) {
    std::vector<NamedTensor> named;
    for (Tensor& tensor : tensors) {
      const TensorView view(tensor.values.data(), static_cast<int64_t>(tensor.values.size()),
                            tensor.dtype);
      named.push_back({tensor.name, tensor.shape, view});
    }
    EXPECT_TRUE(WriteSafetensors(path, named, metadata).ok());
    return path;
  }
};

// ---- Files of other software ----

TEST(GptFileTest, ReadsSizesOffAFileOfOtherSoftware) {
  const absl::StatusOr<GptFile> file = GptFile::Read(kHfTiny);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->options().vocabulary, 40);
  EXPECT_EQ(file->options().context, 15);
  EXPECT_EQ(file->options().layers, 2);
  EXPECT_EQ(file->options().width, 32);
  EXPECT_EQ(file->options().heads,
            1);  // The file does not say; there are 32 / 64, and at least one.
}

std::vector<Shape> TinyShapes() {
  std::vector<Shape> shapes = Shapes(40, 15, 32), all(shapes.begin(), shapes.begin() + 2);
  for (char layer : {'0', '1'}) {
    for (Shape shape : shapes) {
      if (!absl::StartsWith(shape.name, "h.0")) continue;
      shape.name[2] = layer;
      all.push_back(shape);
    }
  }
  all.insert(all.end(), shapes.end() - 2, shapes.end());
  return all;
}

// The float that 16 bits of a file mean, computed by another way than the library's.
double Meaning(DType dtype, absl::string_view two) {
  const int bits = static_cast<uint8_t>(two[0]) | static_cast<uint8_t>(two[1]) << 8;
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const int bias = dtype == DType::kFloat16 ? 15 : 127;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const double mantissa = bits & ((1 << mantissa_bits) - 1);
  const double one = exponent == 0 ? 0 : 1 << mantissa_bits;
  return (bits & 0x8000 ? -1 : 1) *
         std::ldexp(one + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
}

TEST(GptFileTest, ConvertsEachFloatExactly) {
  const SafetensorsFile stored = *SafetensorsFile::Read(kHfTiny);
  const absl::StatusOr<GptFile> file = GptFile::Read(kHfTiny);
  ASSERT_TRUE(file.ok()) << file.status();
  std::set<DType> dtypes;
  int odd = 0;
  for (DType wide : {DType::kFloat32, DType::kFloat64}) {
    Weights model(TinyShapes(), wide);
    const absl::Status status = file->LoadInto(model);
    ASSERT_TRUE(status.ok()) << status;
    for (int i = 0; i < model.parameters().size(); ++i) {
      const Parameter& parameter = model.parameters()[i];
      const SafetensorsFile::Tensor& tensor = *stored.Find("transformer." + parameter.name);
      dtypes.insert(tensor.dtype);
      odd += reinterpret_cast<uintptr_t>(tensor.bytes.data()) % 2;
      for (int64_t k = 0; k < tensor.count(); ++k) {
        float single;
        double expected;
        if (tensor.dtype == DType::kFloat32) {
          std::memcpy(&single, tensor.bytes.data() + 4 * k, 4);
          expected = single;
        } else {
          expected = Meaning(tensor.dtype, tensor.bytes.substr(2 * k, 2));
        }
        const double loaded = wide == DType::kFloat32 ? parameter.value.as<float>()[k]
                                                      : parameter.value.as<double>()[k];
        ASSERT_EQ(loaded, expected) << tensor.name << " at " << k;
      }
    }
  }
  EXPECT_EQ(dtypes.size(), 3u);  // Else the file would not test what it is for.
  EXPECT_GT(odd, 0);
}

TEST(GptFileTest, TakesTheHeadForAnEmbeddingThatIsNotThere) {
  Draft draft;
  draft["wte.weight"].name = "lm_head.weight";
  draft["lm_head.weight"].values[7] = 3;
  const absl::StatusOr<GptFile> file = GptFile::Read(draft.Write());
  ASSERT_TRUE(file.ok()) << file.status();
  Weights model;
  ASSERT_TRUE(file->LoadInto(model).ok());
  EXPECT_EQ(model.parameters()[0].value.as<float>()[7], 3);
}

TEST(GptFileTest, KnowsHeadsFromTheMetadataElseFromTheWidth) {
  const auto heads = [](int64_t width, std::map<std::string, std::string> metadata) {
    Draft draft(Shapes(2, 2, width));
    draft.metadata = std::move(metadata);
    const absl::StatusOr<GptFile> file = GptFile::Read(draft.Write());
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? file->options().heads : -1;
  };
  EXPECT_EQ(heads(4, {}), 1);
  EXPECT_EQ(heads(64, {}), 1);
  EXPECT_EQ(heads(128, {}), 2);
  EXPECT_EQ(heads(128, {{"heads", "8"}}), 8);
}

// A folder for each, since config.json is read beside the file.
TEST(GptFileTest, ConfigBesideTheFileMustFit) {
  std::filesystem::create_directories(Path());
  const std::string path = Path("/model.safetensors");
  const auto read = [&](const std::string& config, std::map<std::string, std::string> metadata) {
    Draft draft;
    draft.metadata = std::move(metadata);
    draft.Write(path);
    WriteBytes(Path("/config.json"), config);
    return GptFile::Read(path);
  };
  const auto config = [](absl::string_view changes) {
    return absl::StrCat(R"({"vocab_size": 5, "n_positions": 3, "n_embd": 4, "n_layer": 1)", changes,
                        "}");
  };
  const auto file = read(config(R"(, "num_attention_heads": 2, "eos_token_id": 3)"), {});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->options().heads, 2);
  EXPECT_THAT(file->options().text_tokens->ends, ElementsAre(3));
  const auto error = [&](absl::string_view changes, std::map<std::string, std::string> metadata) {
    const absl::Status status = read(config(changes), std::move(metadata)).status();
    EXPECT_THAT(status.message(), HasSubstr("/model.safetensors: "));
    return std::string(status.message());
  };
  EXPECT_THAT(error("", {}), HasSubstr("has 12 heads by its metadata or config.json"));
  EXPECT_THAT(error(R"(, "n_head": 4)", {{"heads", "2"}}),
              HasSubstr("metadata has heads=2, but n_head in config.json beside it is 4"));
  const auto other = [&](const std::string& text) {
    return std::string(read(text, {}).status().message());
  };
  EXPECT_THAT(other(R"({"n_head": 2, "vocab_size": 5, "n_positions": 3, "n_embd": 4})"),
              HasSubstr("n_layer in config.json beside it is 12, stated or by default, but the "
                        "tensors have 1"));
  EXPECT_THAT(other(R"({"n_head": 2, "vocab_size": 6, "n_positions": 3, "n_embd": 4})"),
              HasSubstr("vocab_size in config.json beside it is 6,"));
  EXPECT_THAT(other(R"({"n_head": 2, "vocab_size": 5, "n_positions": 2, "n_embd": 4})"),
              HasSubstr("n_positions in config.json beside it is 2,"));
}

// ---- What is wrong ----

TEST(GptFileTest, SaysWhatIsWrongInOneSentence) {
  struct Case {
    std::function<void(Draft&)> change;
    std::string message;
  };
  const Case cases[] = {
      {[](Draft& d) { d.Remove("wte.weight"); }, "has no tensor wte.weight"},
      {[](Draft& d) { d.Remove("wpe.weight"); }, "has no tensor wpe.weight"},
      {[](Draft& d) { d.Remove("h.0.ln_1.weight"); }, "has no tensor h.0.ln_1.weight"},
      {[](Draft& d) { d.Remove("h.0.mlp.c_fc.bias"); }, "has no tensor h.0.mlp.c_fc.bias"},
      {[](Draft& d) { d.Remove("ln_f.bias"); }, "has no tensor ln_f.bias"},
      {[](Draft& d) { d["wte.weight"].shape = {20}; },
       "tensor wte.weight has the shape [20]; expected are 2 dimensions, rows and width"},
      {[](Draft& d) {
         d["wpe.weight"] = {"wpe.weight", {0, 4}, {}};
       },
       "tensor wpe.weight has the shape [0,4]; expected are 2 dimensions, rows and width"},
      {[](Draft& d) {
         d["wpe.weight"].shape = {4, 3};
       },
       "tensor wpe.weight has the shape [4,3], but the other tensors require [4,4]"},
      // As a linear layer of PyTorch has it.
      {[](Draft& d) {
         d["h.0.attn.c_attn.weight"].shape = {12, 4};
       },
       "tensor h.0.attn.c_attn.weight has the shape [12,4], but the other tensors require [4,12]"},
      {[](Draft& d) { d["ln_f.bias"].dtype = DType::kInt32; },
       "tensor ln_f.bias is int32, not a floating-point type"},
      {[](Draft& d) { d.Add("h.2.ln_1.weight", {4}); },
       "tensor h.2.ln_1.weight is not part of a GPT-2 with 1 layers"},
      {[](Draft& d) { d.Add("h.0.attn.bias.x", {4}); },
       "tensor h.0.attn.bias.x is not part of a GPT-2 with 1 layers"},
      {[](Draft& d) { d.Add("h.x.attn.bias", {4}); },
       "tensor h.x.attn.bias is not part of a GPT-2 with 1 layers"},
      {[](Draft& d) { d.Add("transformer.ln_f.bias", {4}); },
       "tensor ln_f.bias occurs both with and without the prefix \"transformer.\""},
      {[](Draft& d) {
         d.Add("lm_head.weight", {5, 4});
         d["lm_head.weight"].values[19] = 2;
       },
       "tensor lm_head.weight differs from wte.weight, but GPT-2 uses one tensor for both"},
      {[](Draft& d) {
         d.Add("lm_head.weight", {4, 5});
       },
       "tensor lm_head.weight differs from wte.weight, but GPT-2 uses one tensor for both"},
      {[](Draft& d) { d.metadata["heads"] = "3"; },
       "has 3 heads by its metadata or config.json; the number of heads must divide the width, 4"},
      {[](Draft& d) { d.metadata["heads"] = "0"; },
       "has 0 heads by its metadata or config.json; the number of heads must divide the width, 4"},
      {[](Draft& d) { d.metadata["heads"] = "two"; },
       "metadata has heads=two, which is not a number"},
  };
  for (const Case& wrong : cases) {
    Draft draft;
    wrong.change(draft);
    const std::string path = draft.Write();
    EXPECT_EQ(GptFile::Read(path).status(),
              absl::InvalidArgumentError(absl::StrCat(path, ": ", wrong.message)));
  }
  Draft good;
  good.Add("lm_head.weight", {5, 4});
  good.Add("h.0.attn.bias", {1, 1, 3, 3});
  good.Add("h.0.attn.masked_bias", {});
  EXPECT_TRUE(GptFile::Read(good.Write()).ok());
  EXPECT_EQ(GptFile::Read(Path("nothing")).status().code(), absl::StatusCode::kNotFound);
}

TEST(GptFileTest, RefusesAModelOfAnotherSizeOrOfNarrowerFloats) {
  Draft draft;
  for (Draft::Tensor& tensor : draft.tensors) std::ranges::fill(tensor.values, 2.0f);
  const GptFile file = *GptFile::Read(draft.Write());
  Weights other(Shapes(5, 7, 4));
  EXPECT_EQ(file.LoadInto(other).message(),
            Path() + ": tensor wpe.weight is float32[3,4], the model has float32[7,4]");
  Weights narrow(Shapes(), DType::kBFloat16);
  EXPECT_EQ(file.LoadInto(narrow).message(),
            Path() + ": tensor wte.weight is float32[5,4], the model has bfloat16[5,4]");
  EXPECT_EQ(other.parameters()[0].value.as<float>()[0], 0);  // Although wte would have fitted.
}

TEST(GptFileTest, SurvivesTruncationAndFlippedBits) {
  const std::string whole = ReadBytes(kHfTiny);
  ASSERT_GT(whole.size(), 10'000u);
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (size_t size = 0; size < whole.size(); size += size < 64 ? 1 : 997) {
    WriteBytes(Path(), absl::string_view(whole).substr(0, size));
    EXPECT_FALSE(GptFile::Read(Path()).ok()) << size;
  }
  // In the header, which is what is believed; what is still right afterwards has to load, or to be
  // refused by name.
  int refused = 0, taken = 0;
  for (size_t i = 0; i < 8 + header; i += 3) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << i % 7));
    WriteBytes(Path(), flipped);
    const absl::StatusOr<GptFile> file = GptFile::Read(Path());
    if (!file.ok()) {
      EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(file.status().message(), HasSubstr(Path()));
      ++refused;
      continue;
    }
    ++taken;
    Weights model(TinyShapes());
    EXPECT_TRUE(file->LoadInto(model).ok()) << "byte " << i;
  }
  EXPECT_GT(refused, 100);
  EXPECT_LT(taken, refused);
}

// ---- Files of ours ----

// Reads as the format's description says, and shares nothing with the library but a parser of JSON.
struct Entry {
  std::string dtype;
  std::vector<int64_t> shape;
  size_t begin = 0, end = 0;
};

TEST(GptFileTest, OursHaveTheFormAndNamesThatOtherSoftwareReads) {
  Weights model;
  for (int i = 0; i < model.parameters().size(); ++i) {
    for (float& value : model.parameters()[i].value.as<float>())
      value = static_cast<float>(i) + 0.5f;
  }
  ASSERT_TRUE(SaveModel(model, Path(), {{"epoch", "3"}}).ok());

  const std::string bytes = ReadBytes(Path());
  ASSERT_GT(bytes.size(), 8u);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(bytes[i]);
  ASSERT_LE(8 + length, bytes.size());
  EXPECT_EQ((8 + length) % 8,
            0u);  // So that a program which maps the file finds floats where they may lie.
  ASSERT_EQ(bytes[8], '{');
  const nlohmann::json header = nlohmann::json::parse(bytes.substr(8, length));
  EXPECT_EQ(header.at("__metadata__"),
            (nlohmann::json{{"format", "pt"}, {"heads", "2"}, {"epoch", "3"}}));

  std::map<std::string, Entry> entries;
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    EXPECT_EQ(entry.size(), 3u);
    entries[name] = {entry.at("dtype"), entry.at("shape"), entry.at("data_offsets").at(0),
                     entry.at("data_offsets").at(1)};
    ranges.emplace_back(entries[name].begin, entries[name].end);
  }
  std::ranges::sort(ranges);
  size_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    EXPECT_EQ(begin, covered);
    covered = end;
  }
  EXPECT_EQ(8 + length + covered, bytes.size());

  const std::vector<Shape> shapes = Shapes();
  ASSERT_EQ(entries.size(), shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [name, shape] = shapes[i];
    ASSERT_TRUE(entries.contains(name)) << name;
    EXPECT_EQ(entries[name].dtype, "F32");
    EXPECT_EQ(entries[name].shape, shape);
    float first;
    std::memcpy(&first, bytes.data() + 8 + length + entries[name].begin, sizeof(first));
    EXPECT_EQ(first, static_cast<float>(i) + 0.5f);
  }
}

TEST(GptFileTest, ReadsWhatItSaves) {
  Weights model;
  std::ranges::fill(model.parameters()[3].value.as<float>(), 0.25f);
  ASSERT_TRUE(SaveModel(model, Path()).ok());
  const absl::StatusOr<GptFile> file = GptFile::Read(Path());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->options().heads, 2);
  Weights loaded;
  ASSERT_TRUE(file->LoadInto(loaded).ok());
  EXPECT_THAT(loaded.parameters()[3].value.as<float>(), ElementsAre(0.25f, 0.25f, 0.25f, 0.25f));
}

}  // namespace
}  // namespace evenkeel
