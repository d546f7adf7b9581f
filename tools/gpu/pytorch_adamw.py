"""How long a step of PyTorch's fused AdamW takes, over the tensors of bench_device's AdamWCase() in float32.

The last line is the median of the seconds of a step, by CUDA's events; or why there is none, with exit code 1.
"""

import statistics
import sys

ELEMENTS = (256 << 20) // 4
CYCLE = [1 << 20, 1 << 18, 1 << 10, 3 << 18, 1 << 10, 1 << 16]  # device_cases.cc


def tensors(torch):
    left, at = ELEMENTS, 0
    while left > 0:
        count = min(left, CYCLE[at % len(CYCLE)])
        yield torch.full((count,), 0.5, device="cuda", requires_grad=True)
        left, at = left - count, at + 1


def main():
    try:
        import torch
    except ImportError as error:
        return f"python3 has no PyTorch: {error}"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} has no CUDA device"
    params = list(tensors(torch))
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    try:
        optimizer = torch.optim.AdamW(params, fused=True)
    except (TypeError, RuntimeError) as error:
        return f"PyTorch {torch.__version__} has no fused AdamW: {error}"
    for _ in range(5):
        optimizer.step()
    times = []
    for _ in range(30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            optimizer.step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4e3)
    print(statistics.median(times))
    return None


if __name__ == "__main__":
    WHY = main()
    if WHY:
        print(WHY)
        sys.exit(1)
