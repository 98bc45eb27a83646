"""`python -m runtime support`: what works with what, found by building it from the registries at a tiny size."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import torch

from kernels.registry import IMPLEMENTATIONS, PREFERENCE
from runtime.api import MAX_DRAFTS, CapabilityError, ConfigError
from runtime.attention.registry import STRATEGIES, build_backend
from runtime.layers.linear import Placement
from runtime.memory import kv_shapes, recurrent_shapes
from runtime.models.base import Family
from runtime.models.registry import DTYPES, FAMILIES
from runtime.sampling.processors import PROCESSORS
from runtime.spec import ConfigFile, ModelSpec
from runtime.speculation.registry import PROPOSERS, ProposerParts, build_proposer
from runtime.state.ledger import Ledger
from runtime.state.paged import PagedStore
from runtime.state.pool import StatePool
from runtime.state.recurrent import RecurrentStore

# What has been run there, which no registry knows. A device that is not named here is refused at start.
DEVICES: dict[str, str] = {
    "cpu": "supported: all tests run on it",
    "cuda": "untested: it should run, but no card has run the tests yet",
}
MODES = ("decode", "prefill")
CPU = torch.device("cpu")

# A config.json that every family can read: each finds its own keys in it, and an MTP head where it knows of any.
SAMPLE: dict[str, object] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "shared_intermediate_size": 16,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
}

INTRO = f"""\
Found by building every combination from the registries at a tiny size. What is refused here is refused at start, with
the same sentence. *yes* covers both values of `--speculative-attention-mode`, and K from 0 to {MAX_DRAFTS}.

`--dtype` is the type of weights and KV cache: {", ".join(f"`{name}`" for name in DTYPES)}. Recurrent state is float32
with each of them (docs/adr/0008-float32-state.md)."""

REFUSED = """\
Refused by name when a model directory asks for it: quantised weights, experts (mixture of experts), scaled rotary
embeddings, activations other than SiLU, gated attention switched off, more than one MTP layer, weights that are not
safetensors. Not there at all: several devices, images, adapters."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as plain text."""

    title: str
    head: Seq[str]
    rows: Seq[Seq[str]]

    def markdown(self) -> str:
        """As a Markdown table under a heading."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return f"## {self.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def text(self) -> str:
        """In columns, without marks."""
        lines = [[cell.replace("`", "") for cell in line] for line in (self.head, *self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        padded = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return f"{self.title}\n" + "\n".join(f"  {line}" for line in padded)


def targets() -> dict[str, list[str]]:
    """The families' implementations, each with the names config.json may use for it."""
    found: dict[str, list[str]] = {}
    for name, target in FAMILIES.items():
        found.setdefault(target, []).append(name)
    return found


def read(target: str) -> tuple[Family, ConfigFile, ModelSpec]:
    """A family and what it makes of the sample."""
    module, _, attribute = target.partition(":")
    family = cast(Family, vars(import_module(module))[attribute])
    config = ConfigFile("the sample", SAMPLE)
    return family, config, family.spec(config, (2,))


def refusal(target: str, method: str, prefill: str, decode: str) -> str:
    """Why this combination does not start; empty when it does."""
    family, config, spec = read(target)
    try:
        built = family.build(config, spec, Placement(torch.float32, CPU), with_mtp=method == "mtp")
        for mode in MODES:
            pool = _pool(spec, prefill, decode, mode)
            if method != "none":
                build_proposer(method, ProposerParts(built.model, built.mtp, pool, CPU))
    except (CapabilityError, ConfigError) as error:
        return str(error)
    return ""


def _pool(spec: ModelSpec, prefill: str, decode: str, mode: str) -> StatePool:
    kv = PagedStore(kv_shapes(spec.layers), 4, 4, dtype=torch.float32, device=CPU)
    recurrent = RecurrentStore(recurrent_shapes(spec.layers), 2, device=CPU)
    backend = build_backend(prefill, decode, mode, kv=kv, recurrent=recurrent, max_fed=1 + MAX_DRAFTS)
    ledger = Ledger(num_blocks=4, block_size=4, num_slots=2)
    return StatePool(ledger, kv, recurrent, backend, max_blocks=3, reserve_ahead=MAX_DRAFTS, device=CPU)


def families() -> Table:
    """Every family, its names and its layers."""
    rows = []
    for target, names in targets().items():
        kinds = dict.fromkeys(layer.kind.value for layer in read(target)[2].layers)
        rows.append([f"`{names[-1]}`", ", ".join(f"`{name}`" for name in names), ", ".join(kinds)])
    return Table("Families", ["family", "names in config.json", "layers that mix tokens"], rows)


def combinations() -> Table:
    """Family by proposer, by pair of commit strategies; on the CPU."""
    pairs = list(itertools.product(STRATEGIES, repeat=2))
    rows = []
    for target, names in targets().items():
        for method in ("none", *PROPOSERS):
            reasons = [refusal(target, method, prefill, decode) for prefill, decode in pairs]
            why = "; ".join(dict.fromkeys(filter(None, reasons)))
            drafting = "`none`" if method == "none" else f"`{method}:K`"
            rows.append([f"`{names[-1]}`", drafting, *("refused" if reason else "yes" for reason in reasons), why])
    head = ["family", "`--speculative`", *(f"`{prefill}` + `{decode}`" for prefill, decode in pairs), "why"]
    return Table("Families, drafting, and commit strategies (prefill half + decode half)", head, rows)


def chosen(device: str) -> dict[str, str]:
    """The implementation that each op uses on a device type."""
    return {
        op: next(name for name in PREFERENCE[device] if name in available) for op, available in IMPLEMENTATIONS.items()
    }


def devices() -> Table:
    """Every device type, and which code runs there."""
    rows = []
    for device, state in DEVICES.items():
        names = list(chosen(device).values())
        counts = ", ".join(f"{name} ({names.count(name)} ops)" for name in dict.fromkeys(names))
        rows.append([f"`{device}`", state, counts])
    return Table("Devices", ["`--device`", "all families, drafting and strategies above", "implementations"], rows)


def ops() -> Table:
    """Every op of kernels/ and what runs it."""
    by_device = {device: chosen(device) for device in DEVICES}
    rows = [[f"`{op}`", *(by_device[device][op] for device in DEVICES)] for op in IMPLEMENTATIONS]
    return Table("Ops", ["op", *(f"on `{device}`" for device in DEVICES)], rows)


def processors() -> Table:
    """What may change logits, at every verified position."""
    rows = [[f"`{feature.name}`", type(processor).__name__] for feature, processor in PROCESSORS.items()]
    return Table("Sampling processors, in their order", ["feature", "class"], rows)


def tables() -> Iterator[Table]:
    """All of them."""
    yield families()
    yield combinations()
    yield devices()
    yield processors()
    yield ops()


def markdown() -> str:
    """docs/support.md."""
    header = "<!-- Generated by `lockstep support --markdown`; do not edit. -->"
    return _joined(["# Support", header, INTRO, *(each.markdown() for each in tables()), "## Refused", REFUSED])


def text() -> str:
    """The same for a terminal."""
    return _joined(each.text() for each in tables())


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def main(arguments: Seq[str]) -> int:
    """Prints the matrix."""
    parser = argparse.ArgumentParser(prog="lockstep support", description="What the engine can run, and what not.")
    parser.add_argument("--markdown", action="store_true", help="as docs/support.md has it")
    wanted: bool = parser.parse_args(arguments).markdown
    sys.stdout.write(markdown() if wanted else text())
    return 0
