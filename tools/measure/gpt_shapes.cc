#include "evenkeel/tools/measure/gpt_shapes.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace evenkeel {

std::vector<NamedShape> GptShapes() {
  std::vector<NamedShape> shapes = {{"wte.weight", kGptVocabulary, kGptWidth},
                                    {"wpe.weight", kGptContext, kGptWidth}};
  for (int layer = 0; layer < kGptLayers; ++layer) {
    const std::string h = absl::StrCat("h.", layer, ".");
    shapes.insert(shapes.end(), {{h + "ln_1.weight", 1, kGptWidth},
                                 {h + "ln_1.bias", 1, kGptWidth},
                                 {h + "attn.c_attn.weight", 3 * kGptWidth, kGptWidth},
                                 {h + "attn.c_attn.bias", 1, 3 * kGptWidth},
                                 {h + "attn.c_proj.weight", kGptWidth, kGptWidth},
                                 {h + "attn.c_proj.bias", 1, kGptWidth},
                                 {h + "ln_2.weight", 1, kGptWidth},
                                 {h + "ln_2.bias", 1, kGptWidth},
                                 {h + "mlp.c_fc.weight", 4 * kGptWidth, kGptWidth},
                                 {h + "mlp.c_fc.bias", 1, 4 * kGptWidth},
                                 {h + "mlp.c_proj.weight", kGptWidth, 4 * kGptWidth},
                                 {h + "mlp.c_proj.bias", 1, kGptWidth}});
  }
  shapes.insert(shapes.end(), {{"ln_f.weight", 1, kGptWidth}, {"ln_f.bias", 1, kGptWidth}});
  return shapes;
}

}  // namespace evenkeel
