#!/usr/bin/env python3
"""Writes hf_tiny.safetensors and hf_tiny_scores.safetensors, next to this file.

A GPT-2 of two layers with random weights in a file as other software writes it:
with Hugging Face's names, the prefix "transformer.", causal masks, a tied
lm_head.weight, three types of floats, tensors in any order and at any
alignment. And the scores that it gives, computed here in double precision.

Needs nothing but Python, shares no code with the C++ that reads the files, and
gives the same bytes each time.
"""

import json
import math
import os
import random
import struct

VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS = 40, 15, 2, 32, 2
PREFIX = "transformer."


def bfloat16_bits(value):
    """The upper half of a float32, rounded to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


ENCODE = {
    "F32": lambda values: struct.pack(f"<{len(values)}f", *values),
    "F16": lambda values: struct.pack(f"<{len(values)}e", *values),
    "BF16": lambda values: struct.pack(f"<{len(values)}H", *map(bfloat16_bits, values)),
    "BOOL": lambda values: bytes(values),
    "I64": lambda values: struct.pack(f"<{len(values)}q", *values),
}


def decode(dtype, data):
    """The floats that a file's reader sees."""
    if dtype == "BF16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        data = b"".join(struct.pack("<I", half << 16) for half in halves)
        dtype = "F32"
    size, code = {"F32": (4, "f"), "F16": (2, "e")}[dtype]
    return list(struct.unpack(f"<{len(data) // size}{code}", data))


def shapes():
    """Name and shape of each parameter."""
    yield "wte.weight", [VOCABULARY, WIDTH]
    yield "wpe.weight", [CONTEXT, WIDTH]
    for layer in range(LAYERS):
        for part, shape in [
            ("ln_1", [WIDTH]),
            ("attn.c_attn", [WIDTH, 3 * WIDTH]),
            ("attn.c_proj", [WIDTH, WIDTH]),
            ("ln_2", [WIDTH]),
            ("mlp.c_fc", [WIDTH, 4 * WIDTH]),
            ("mlp.c_proj", [4 * WIDTH, WIDTH]),
        ]:
            yield f"h.{layer}.{part}.weight", shape
            yield f"h.{layer}.{part}.bias", shape[-1:]
    yield "ln_f.weight", [WIDTH]
    yield "ln_f.bias", [WIDTH]


def write(path, tensors, metadata):
    """Tensors are (name, dtype, shape, bytes), in the order of their bytes."""
    header, offset = {"__metadata__": metadata}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, _, data in tensors))


# ---- The model, row by row ----


def add(a, b):
    return [x + y for x, y in zip(a, b)]


def layer_norm(row, weight, bias):
    mean = sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / math.sqrt(variance + 1e-5) * w + b for x, w, b in zip(row, weight, bias)]


def linear(row, weight, bias):
    """`weight` is [len(row), len(bias)], flat."""
    n = len(bias)
    return [bias[j] + sum(x * weight[i * n + j] for i, x in enumerate(row)) for j in range(n)]


def gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(rows):
    """`rows` hold query, key and value, one after the other; one head at a time, each row sees those up to itself."""
    size = WIDTH // HEADS
    results = []
    for t, row in enumerate(rows):
        result = []
        for head in range(HEADS):
            query = row[head * size : (head + 1) * size]
            scores = []
            for other in rows[: t + 1]:
                key = other[WIDTH + head * size : WIDTH + (head + 1) * size]
                scores.append(sum(q * k for q, k in zip(query, key)) / math.sqrt(size))
            weights = [math.exp(score - max(scores)) for score in scores]
            for i in range(size):
                values = [other[2 * WIDTH + head * size + i] for other in rows[: t + 1]]
                result.append(sum(w * v for w, v in zip(weights, values)) / sum(weights))
        results.append(result)
    return results


def forward(p, tokens):
    """The scores after each of the tokens."""
    wte = [p["wte.weight"][i * WIDTH : (i + 1) * WIDTH] for i in range(VOCABULARY)]
    rows = [add(wte[token], p["wpe.weight"][t * WIDTH : (t + 1) * WIDTH]) for t, token in enumerate(tokens)]
    for layer in range(LAYERS):

        def of(part):
            return p[f"h.{layer}.{part}.weight"], p[f"h.{layer}.{part}.bias"]

        attended = attend([linear(layer_norm(row, *of("ln_1")), *of("attn.c_attn")) for row in rows])
        rows = [add(row, linear(a, *of("attn.c_proj"))) for row, a in zip(rows, attended)]
        for t, row in enumerate(rows):
            hidden = [gelu(x) for x in linear(layer_norm(row, *of("ln_2")), *of("mlp.c_fc"))]
            rows[t] = add(row, linear(hidden, *of("mlp.c_proj")))
    rows = [layer_norm(row, p["ln_f.weight"], p["ln_f.bias"]) for row in rows]
    return [[sum(x * y for x, y in zip(row, token)) for token in wte] for row in rows]


def main():
    dice = random.Random(2019)
    parameters, tensors = {}, []
    for index, (name, shape) in enumerate(shapes()):
        is_scale = ".ln_" in f".{name}" and name.endswith("weight")
        values = [(1.0 if is_scale else 0.0) + dice.gauss(0, 0.15) for _ in range(math.prod(shape))]
        dtype = ["F32", "F16", "BF16"][index % 3]
        data = ENCODE[dtype](values)
        parameters[name] = decode(dtype, data)
        tensors.append((PREFIX + name, dtype, shape, data))
    _, dtype, shape, data = tensors[0]
    tensors.append(("lm_head.weight", dtype, shape, data))
    mask = [int(column <= row) for row in range(CONTEXT) for column in range(CONTEXT)]
    for layer in range(LAYERS):
        tensors.append((f"{PREFIX}h.{layer}.attn.bias", "BOOL", [1, 1, CONTEXT, CONTEXT], ENCODE["BOOL"](mask)))
        tensors.append((f"{PREFIX}h.{layer}.attn.masked_bias", "F32", [], ENCODE["F32"]([-1e4])))
    dice.shuffle(tensors)
    # First a mask, of an odd number of bytes, so that most of the others lie at odd addresses.
    tensors.sort(key=lambda tensor: not tensor[0].endswith("h.1.attn.bias"))

    folder = os.path.dirname(os.path.abspath(__file__))
    write(os.path.join(folder, "hf_tiny.safetensors"), tensors, {"format": "pt"})

    tokens = [dice.randrange(VOCABULARY) for _ in range(CONTEXT)]
    scores = [score for row in forward(parameters, tokens) for score in row]
    write(
        os.path.join(folder, "hf_tiny_scores.safetensors"),
        [("tokens", "I64", [CONTEXT], ENCODE["I64"](tokens)),
         ("scores", "F32", [CONTEXT, VOCABULARY], ENCODE["F32"](scores))],
        {"heads": str(HEADS)},
    )


if __name__ == "__main__":
    main()
