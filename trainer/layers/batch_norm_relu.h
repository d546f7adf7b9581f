// Batch normalisation followed by a rectifier, for one batch size:
// output = max(0, (source - mean) / sqrt(variance + 1e-5) * weight + bias), per channel.
//
//   BatchNormRelu norm(dnn, source_desc, Mode::kTraining);
//   dnnl::memory output = norm.Forward(source, state);
//   dnnl::memory diff_source = norm.Backward(diff_output, weight_target, bias_target);
//
// In training mode mean and (biased) variance are the batch's, with a BatchNormSync those of the
// batches of all ranks (bucket/layers/sync_batch_norm.h), and the running statistics move a
// tenth of the way to them, the running variance to the unbiased one, as PyTorch's do. In
// evaluation mode the running ones are used.
//
// Shapes:    source [batch, channels, height, width] in a layout of float32; output and gradients
//            in the same one; everything in `state` [channels].
// Ownership: results are the layer's memory, valid until its next call; `source` and `state` must
//            outlive Backward.
// Errors:    throws dnnl::error. In evaluation mode there is no backward. Errors of collectives are
//            in BatchNormSync::status; results are undefined then.
// Source:    Ioffe and Szegedy, "Batch normalization", ICML 2015.

#ifndef EVENKEEL_TRAINER_LAYERS_BATCH_NORM_RELU_H_
#define EVENKEEL_TRAINER_LAYERS_BATCH_NORM_RELU_H_

#include <optional>

#include "absl/status/status.h"
#include "evenkeel/bucket/layers/sync_batch_norm.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

struct BatchNormState {
  const float* weight = nullptr;
  const float* bias = nullptr;
  float* running_mean = nullptr;
  float* running_variance = nullptr;
};

// Shared by the batch norms of a model that have the statistics of all ranks.
struct BatchNormSync {
  JoinScope* scope = nullptr;  // Of the training loop that runs.
  absl::Status status;         // The first error; nothing is sent after it.
};

class BatchNormRelu {
 public:
  // `sync` may be null.
  BatchNormRelu(const OneDnn& dnn, const dnnl::memory::desc& source_desc, Mode mode,
                BatchNormSync* sync = nullptr);

  dnnl::memory Forward(const dnnl::memory& source, const BatchNormState& state);
  // Either target may be null.
  dnnl::memory Backward(const dnnl::memory& diff_output, GradTarget<float> weight,
                        GradTarget<float> bias);

 private:
  // Normalises over all ranks, in plain memory, since SyncBatchNorm takes no blocked layout.
  struct OverRanks {
    BatchNormSync* sync;
    SyncBatchNorm norm;
    SyncBatchNorm::Shape shape;
    LayoutAdapter source_to_plain, diff_to_plain, from_plain;
    dnnl::memory source, output, diff_output, diff_source;
  };

  void UpdateRunning(const BatchNormState& state) const;
  dnnl::memory ForwardOverRanks(const dnnl::memory& source, const BatchNormState& state);
  dnnl::memory BackwardOverRanks(const dnnl::memory& diff_output);

  const OneDnn& dnn_;
  const Mode mode_;
  const int channels_;
  const double samples_per_channel_;
  const dnnl::memory::desc channel_desc_;

  dnnl::batch_normalization_forward forward_;
  dnnl::memory output_;
  dnnl::memory mean_;
  dnnl::memory variance_;
  dnnl::memory workspace_;

  dnnl::batch_normalization_backward backward_;
  dnnl::memory diff_source_;
  dnnl::memory diff_weight_;
  dnnl::memory diff_bias_;

  std::optional<OverRanks> over_ranks_;  // In training, with a BatchNormSync.

  dnnl::memory source_;  // The arguments of the last Forward.
  BatchNormState state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_BATCH_NORM_RELU_H_
