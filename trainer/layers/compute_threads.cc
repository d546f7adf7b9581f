#include "evenkeel/trainer/layers/compute_threads.h"

#include <algorithm>

// oneDNN's threads are OpenMP's. Declared here because not every compiler brings omp.h.
extern "C" {
void omp_set_num_threads(int threads);
int omp_get_max_threads();
}

namespace evenkeel {

void SetComputeThreads(int threads) { omp_set_num_threads(std::max(1, threads)); }
int ComputeThreads() { return omp_get_max_threads(); }

}  // namespace evenkeel
