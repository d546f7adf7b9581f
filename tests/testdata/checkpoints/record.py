"""Writes the checkpoints of this folder, and what the same program makes of them.

    record.py path/to/train          # of the commit whose checkpoints are wanted

See README.md.
"""

import gzip
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

STEP = 5
SIDE = 28
COMMON = ["--nproc=2", "--epochs=2"]
IMAGES = ["--data=images", "--batch_size=8"]
RUNS = {
    "mlp_whole": ["--model=mlp", "--hidden=3", "--nozero", "--optimizer=sgd", "--momentum=0.9",
                  "--backend=local"] + IMAGES,
    "mlp_tensors": ["--model=mlp", "--hidden=3", "--shards=tensors", "--optimizer=adam",
                    "--backend=shm", "--bucket_cap_mb=0", "--freeze=fc2.bias@2:9"] + IMAGES,
    "mlp_slices": ["--model=mlp", "--hidden=3", "--optimizer=adamw", "--backend=shm",
                   "--clip=0.5", "--grad_view"] + IMAGES,
    "cnn_slices": ["--model=cnn", "--widths=2,3", "--backend=gloo"] + IMAGES,
    "gpt_slices": ["--model=gpt", "--preset=tiny", "--layers=1", "--width=8", "--heads=2",
                   "--context=8", "--backend=shm", "--data=text.txt", "--batch_size=4",
                   "--accumulate=2", "--max_steps=12"],
}


def write_images(folder, split, count):
    """Images with a bright stripe whose row says the label, and a pattern that differs."""
    labels = bytes((7 * i + i // 10) % 10 for i in range(count))
    pixels = bytearray()
    for i, label in enumerate(labels):
        for y in range(SIDE):
            bright = 120 if y // 2 == label + 2 else 0
            pixels += bytes((3 * i * y + 5 * x) % 97 + bright for x in range(SIDE))
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, count, SIDE, SIDE) + pixels
    for name, data in (("images-idx3", images),
                       ("labels-idx1", struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)):
        path = folder / f"{split}-{name}-ubyte.gz"
        path.write_bytes(gzip.compress(data, mtime=0))


def text():
    """As old_checkpoints_test.cc writes it: too long to be kept here."""
    words = ["even", "keel", "steps", "ranks", "wait", "for", "no", "one", "and", "all", "sail"]
    return "".join(words[i * i % 11] + ("\n" if i % 7 == 6 else " ") for i in range(20000))


def main():
    here = pathlib.Path(__file__).resolve().parent
    train = os.path.abspath(sys.argv[1])
    (here / "images").mkdir(exist_ok=True)
    write_images(here / "images", "train", 100)
    write_images(here / "images", "t10k", 20)
    runs = {}
    for name, flags in RUNS.items():
        flags = flags + COMMON
        target = here / name
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(here / "images", f"{folder}/images")
            pathlib.Path(f"{folder}/text.txt").write_text(text())

            def run(*more):
                environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
                subprocess.run([train, *flags, *more], check=True, cwd=folder, env=environment)

            run(f"--checkpoint_dir={folder}", f"--checkpoint_every={STEP}", "--keep=0")
            shutil.copytree(f"{folder}/step-{STEP:09d}", target / "checkpoint")
            metrics = f"{folder}/metrics.jsonl"
            run(f"--resume={target}/checkpoint", f"--save={target}/resumed.safetensors",
                f"--metrics={metrics}")
            with open(metrics) as lines:
                events = [json.loads(line) for line in lines]
            runs[name] = {"flags": flags, "state_hash": events[-1]["state_hash"]}
    (here / "runs.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
