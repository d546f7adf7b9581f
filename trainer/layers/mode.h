// The mode of a forward pass: training or evaluation.

#ifndef EVENKEEL_TRAINER_LAYERS_MODE_H_
#define EVENKEEL_TRAINER_LAYERS_MODE_H_

namespace evenkeel {

enum class Mode {
  kTraining,    // Keeps the inputs of Backward; batch norm uses the batch's statistics and updates
                // the running ones.
  kEvaluation,  // Batch norm uses the running statistics; nothing in the model changes.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_MODE_H_
