#!/usr/bin/python3
"""Records what PyTorch computes for the layers and the tiny model of trainer/gpt, in float64.

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 /usr/bin/python3 tests/testdata/gpt/record.py tests/testdata/gpt

Writes layers.safetensors and model.safetensors (README.md says what is in them). Wants PyTorch 1.13 (Debian:
python3-torch). Every starting value is one that float32 holds, too.
"""

import json
import math
import struct
import sys

import torch
import torch.nn.functional as F

VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS = 32, 8, 2, 16, 2
SEQUENCES, STEPS = 3, 5
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TYPES = {torch.float64: "F64", torch.int32: "I32"}


def write_safetensors(path, tensors, metadata):
    """The format by hand: the header's size in 8 bytes, the header as JSON, the tensors one after the other."""
    header, data = {"__metadata__": metadata}, b""
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach().contiguous()
        content = tensor.numpy().tobytes()
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def random(*shape, deviation=1.0, mean=0.0):
    return (torch.randn(*shape, dtype=torch.float64) * deviation + mean).float().double()


def attention(qkv, heads):
    sequences, context, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    query, key, value = (
        part.view(sequences, context, heads, width // heads).transpose(1, 2) for part in qkv.split(width, dim=2)
    )
    scores = query @ key.transpose(2, 3) / math.sqrt(width // heads)
    hidden = torch.ones(context, context, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).reshape(sequences, context, width)


def norm(x, values, name):
    return F.layer_norm(x, x.shape[-1:], values[name + ".weight"], values[name + ".bias"], 1e-5)


def linear(x, values, name):
    return x @ values[name + ".weight"] + values[name + ".bias"]


def loss_of(values, inputs, targets):
    x = values["wte.weight"][inputs.long()] + values["wpe.weight"][: inputs.shape[1]]
    for layer in range(LAYERS):
        at = f"h.{layer}."
        mixed = attention(linear(norm(x, values, at + "ln_1"), values, at + "attn.c_attn"), HEADS)
        x = x + linear(mixed, values, at + "attn.c_proj")
        hidden = linear(norm(x, values, at + "ln_2"), values, at + "mlp.c_fc")
        x = x + linear(F.gelu(hidden, approximate="tanh"), values, at + "mlp.c_proj")
    scores = norm(x, values, "ln_f") @ values["wte.weight"].T
    return F.cross_entropy(scores.view(-1, VOCABULARY), targets.long().view(-1))


def initial_values():
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        at = f"h.{layer}."
        shapes[at + "ln_1.weight"] = shapes[at + "ln_1.bias"] = (WIDTH,)
        shapes[at + "ln_2.weight"] = shapes[at + "ln_2.bias"] = (WIDTH,)
        for name, inputs, outputs in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            shapes[at + name + ".weight"] = (inputs, outputs)
            shapes[at + name + ".bias"] = (outputs,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (WIDTH,)
    # Larger than in training, so that no part of the model is nearly linear.
    return {
        name: random(*shape, deviation=0.3, mean=1.0 if "ln_" in name and "weight" in name else 0.0)
        for name, shape in shapes.items()
    }


def train(initial, inputs, targets, dtype):
    """Losses of all steps, gradients of the first, values after the last."""
    values = {name: value.to(dtype).clone().requires_grad_() for name, value in initial.items()}
    optimizer = torch.optim.AdamW(values.values(), **ADAMW)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(values, inputs[step], targets[step])
        loss.backward()
        if step == 0:
            gradients = {name: value.grad.clone() for name, value in values.items()}
        losses.append(loss.detach().double())
        optimizer.step()
    return torch.stack(losses), gradients, {name: value.detach() for name, value in values.items()}


def record_model(folder):
    torch.manual_seed(1)
    initial = initial_values()
    tokens = torch.randint(VOCABULARY, (STEPS, SEQUENCES, CONTEXT + 1), dtype=torch.int32)
    inputs, targets = tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()
    losses, gradients, final = train(initial, inputs, targets, torch.float64)
    _, gradients32, final32 = train(initial, inputs, targets, torch.float32)
    tensors = {"inputs": inputs, "targets": targets, "loss": losses}
    for name in initial:
        tensors |= {f"init.{name}": initial[name], f"grad.{name}": gradients[name], f"final.{name}": final[name]}

    def differences(ours, theirs):
        return json.dumps({name: float((ours[name].double() - theirs[name]).abs().max()) for name in theirs})

    metadata = {
        "adamw": json.dumps(ADAMW),
        "float32.grad": differences(gradients32, gradients),
        "float32.final": differences(final32, final),
    }
    write_safetensors(f"{folder}/model.safetensors", tensors, metadata)


def with_gradients(name, function, arguments):
    """Arguments, output, a gradient of the output, and the arguments' gradients."""
    leaves = {key: value.clone().requires_grad_() for key, value in arguments.items()}
    output = function(**leaves)
    diff = random(*output.shape)
    output.backward(diff)
    tensors = {f"{name}.{key}": value for key, value in arguments.items()}
    tensors |= {f"{name}.diff_{key}": value.grad for key, value in leaves.items()}
    return tensors | {f"{name}.output": output, f"{name}.diff_output": diff}


def record_layers(folder):
    torch.manual_seed(2)
    rows, width, context = 6, 24, 70  # More rows than a block of attention has.
    tensors = with_gradients(
        "layer_norm",
        lambda input, weight, bias: F.layer_norm(input, (width,), weight, bias, 1e-5),
        {"input": random(rows, width, mean=0.5), "weight": random(width), "bias": random(width)},
    )
    tensors |= with_gradients(
        "gelu", lambda input: F.gelu(input, approximate="tanh"), {"input": random(101, deviation=3)}
    )
    tensors |= with_gradients(
        "linear",
        lambda input, weight, bias: input @ weight + bias,
        {"input": random(rows, 5), "weight": random(5, 7), "bias": random(7)},
    )
    tensors |= with_gradients("attention", lambda qkv: attention(qkv, 2), {"qkv": random(2, context, 3 * 8)})
    tokens = torch.randint(11, (3, 4), dtype=torch.int32)
    tensors |= with_gradients(
        "embedding",
        lambda tokens_table, positions_table: tokens_table[tokens.long()] + positions_table[:4],
        {"tokens_table": random(11, 6), "positions_table": random(5, 6)},
    )
    tensors["embedding.tokens"] = tokens
    scores, targets = random(9, 37, deviation=20), torch.randint(37, (9,), dtype=torch.int32)
    leaf = scores.clone().requires_grad_()
    loss = F.cross_entropy(leaf, targets.long())
    loss.backward()
    tensors |= {"loss.scores": scores, "loss.targets": targets}
    tensors |= {"loss.mean": loss.view(1), "loss.diff_scores": leaf.grad}
    write_safetensors(f"{folder}/layers.safetensors", tensors, {})


def main():
    torch.set_num_threads(1)
    folder = sys.argv[1]
    record_layers(folder)
    record_model(folder)


if __name__ == "__main__":
    main()
