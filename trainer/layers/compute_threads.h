// Sets the number of threads that a model's kernels use.
//
//   SetComputeThreads(1);   // several ranks share this host
//
// Call it before the first model is made: kernels are planned for the number of threads at that
// time. It applies to models that the calling thread uses; other threads start from
// OMP_NUM_THREADS, or all cores.

#ifndef EVENKEEL_TRAINER_LAYERS_COMPUTE_THREADS_H_
#define EVENKEEL_TRAINER_LAYERS_COMPUTE_THREADS_H_

namespace evenkeel {

// Sets the number of threads; a value below 1 counts as 1.
void SetComputeThreads(int threads);
int ComputeThreads();

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_COMPUTE_THREADS_H_
