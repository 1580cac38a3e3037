"""Milliseconds that Gemma 4's image encoders take per image, beside transformers' on the same
weights, which are random; and how far their features are apart.

    python tests/bench/image_towers.py [--images 1 4 16] [--tokens 280] [--device cuda]

Both read images of the same size in bfloat16 (float32 on a CPU), so that none is padded. Uploads of
patches are in our time, as in a step, and not in transformers'. Repeats alternate; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import torch
from gemma4_oracle import text_config
from image_shapes import LARGE, SHARED, SMALL
from rich.console import Console
from rich.table import Table
from vision_oracle import BOI, EOI, IMAGE, make_wrapper, padded, random_image

from hydraspec.models import load_target

TOWERS = {"E4B": (SMALL, 2560), "31B": (LARGE, 5376)}
REPEATS = 7


def wrapper(tower: dict[str, Any], text_size: int) -> dict[str, Any]:
    """A wrapper's config with a small text model of the right width."""
    return {
        **{"model_type": "gemma4", "text_config": text_config(hidden_size=text_size)},
        **{"vision_config": tower | SHARED, "audio_config": None},
        **{"boi_token_id": BOI, "image_token_id": IMAGE, "eoi_token_id": EOI},
        "tie_word_embeddings": True,
    }


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Wall time of a call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Print a line for each tower and number of images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=280, help="of an image: 20 columns of them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = Table("tower", "images", "ours, ms", "transformers, ms", "ratio", "largest difference")
    for name, (tower, text_size) in TOWERS.items():
        config = wrapper(tower, text_size)
        oracle = make_wrapper(config, 1)
        with tempfile.TemporaryDirectory() as folder:
            oracle.save_pretrained(folder)
            target: Any = load_target(
                folder,
                weights="checkpoint",
                dtype=dtype,
                device=device,
                seed=0,
                max_model_len=None,
            )
        model = oracle.to(device, dtype).model
        for count in args.images:
            shape = (20, args.tokens // 20)
            images = [random_image(shape, config, i) for i in range(count)]
            values, places = (each.to(device) for each in padded(images, 3))
            values = values.to(dtype)

            ours = partial(target.encoder.encode, images)
            theirs = partial(model.get_image_features, values, places)
            with torch.inference_mode():
                pairs = zip(ours(), theirs().pooler_output, strict=True)
                apart = max(float((a - b).abs().max()) for a, b in pairs)
                times = [
                    (milliseconds(ours, device), milliseconds(theirs, device))
                    for _ in range(REPEATS)
                ]
            a, b = (statistics.median(column) for column in zip(*times, strict=True))
            table.add_row(name, str(count), f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}", f"{apart:.3g}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
