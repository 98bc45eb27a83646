"""Write a trained checkpoint in the published format (config, safetensors, tokenizer, template).

python -m train.export --checkpoint DIR/final.pt --tokenizer DIR --out DIR
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from .encoder import Encoder
from .network import Shape

KEPT_FLOAT = ("A_log", "linear_attn.norm.weight")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    encoder = Encoder(args.tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (value.float() if name.endswith(KEPT_FLOAT) else value.bfloat16()).contiguous()
        for name, value in saved["model"].items()
    }
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    config = Shape(**saved["shape"]).config(encoder.end, encoder.stop)
    (args.out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [encoder.end, encoder.stop],
        "pad_token_id": encoder.stop,
    }
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(args.tokenizer / name, args.out / name)
    if "mtp" in saved:
        record = {key: saved[key] for key in ("trunk", "drill", "mtp", "processes")}
        Path(__file__).parent.with_name("run.json").write_text(json.dumps(record, indent=2) + "\n")
    total = sum(value.numel() for value in weights.values())
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{len(weights)} tensors, {total} parameters, {size} bytes")


if __name__ == "__main__":
    main()
