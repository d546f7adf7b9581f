"""Flags for files that call Vectorised() (vectorised.h)."""

# Contraction to fused operations is GCC's default, set here for other compilers.
VECTORISED_COPTS = [
    "-O3",
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
