#!/usr/bin/python3
"""The training steps of gpt_benchmark in PyTorch, on one thread: tokens per second of forward, backward and AdamW.

    OMP_NUM_THREADS=1 python3 trainer/gpt/pytorch_gpt.py [--preset=mini] [--steps=20] [--compile] [--compute=bfloat16]

Requires PyTorch 2 (pip install torch); --compile requires a C++ compiler. Prints median and best.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

PRESETS = {"tiny": (256, 64, 2, 64, 2), "mini": (256, 128, 4, 128, 4), "words": (4096, 128, 4, 128, 4)}


class Conv1D(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.c_fc, self.c_proj_2 = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x):
        n, context, width = x.shape
        query, key, value = (
            part.view(n, context, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(n, context, width))
        return x + self.c_proj_2(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    def __init__(self, vocabulary, context, layers, width, heads):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(context, width)
        self.h = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(width)
        for table in (self.wte, self.wpe):
            torch.nn.init.normal_(table.weight, std=0.02)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight
        for block in self.h:
            x = block(x)
        scores = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="mini")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary, context = PRESETS[args.preset][:2]
    model = Gpt(*PRESETS[args.preset])
    inputs, targets = torch.randint(vocabulary, (2, args.sequences, context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = torch.compile(model) if args.compile else model
    seconds = []
    for step in range(args.steps + 3):
        begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.compute == "bfloat16"):
            loss = run(inputs, targets)
        loss.backward()
        optimizer.step()
        if step >= 3:  # The first ones warm up.
            seconds.append(time.perf_counter() - begin)
    median, best = statistics.median(seconds), min(seconds)
    print(f"{args.preset}: median {median * 1e3:.1f} ms, {args.sequences * context / median:.0f} tokens/s, best {best * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
