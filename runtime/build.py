"""From a configuration to a running engine: load, allocate, warm up, prove the commit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from runtime.api import CapabilityError, CapacityError, ConfigError, EngineConfig, ModelInfo
from runtime.attention.registry import build_backend
from runtime.auditor import Auditor
from runtime.engine import Engine
from runtime.machine import available_memory, resident_memory, usable_cpus
from runtime.memory import MIB, Memory, MemoryPlan, fitting, held, kv_shapes, longest, plan_memory, recurrent_shapes
from runtime.models.registry import DTYPES, load_model
from runtime.plan import RowKind
from runtime.runner import ModelRunner
from runtime.sampling.store import SamplingStore
from runtime.scheduler import Drafting, Limits, Scheduler
from runtime.selftest import check_commit
from runtime.sizing import Sizes, Step, size_of
from runtime.spec import ModelSpec
from runtime.speculation.proposer import Placement, SpeculativeProposer
from runtime.speculation.registry import ProposerParts, build_proposer, parse
from runtime.speculation.verify import Verifier
from runtime.state.ledger import Ledger
from runtime.state.paged import PagedStore
from runtime.state.pool import StatePool
from runtime.state.prefix import CacheSettings
from runtime.state.recurrent import RecurrentStore

Progress = Callable[[str, float], None]
KINDS = frozenset({RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY})


class _Startup:
    """Times the phases of a start and reports them."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    def report(self, phase: str, done: float) -> None:
        if self._progress is not None:
            self._progress(phase, done)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.report(name, 0.0)
        yield
        self.seconds[name] = time.perf_counter() - start
        self.report(name, 1.0)


def build_engine(config: EngineConfig, progress: Progress | None = None, *, poison: float | None = None) -> Engine:
    """Builds an engine and runs its self-test.

    Raises ConfigError or CapabilityError, one sentence each, when a setting, the model directory or their combination
    cannot work; StateError when the self-test finds a commit that does not commit. `poison` is for tests: what leases
    leave behind is overwritten with it.
    """
    startup = _Startup(progress)
    method, k_max = parse(config.speculative)
    if config.settle_lag not in (0, 1):
        raise ConfigError(f"--settle-lag must be 0 or 1, not {config.settle_lag}")
    if config.prefix_cache and config.checkpoint_interval < 1 + k_max:
        raise ConfigError(
            f"--checkpoint-interval {config.checkpoint_interval} is too short: one verification can pass "
            f"{1 + k_max} tokens, and leaves one checkpoint"
        )
    if config.dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {config.dtype!r}; there are {', '.join(DTYPES)}")
    threads = config.threads or usable_cpus()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    device = _device(config.device)
    dtype = DTYPES[config.dtype]
    with startup.phase("load"):
        loaded = load_model(
            Path(config.model_dir),
            dtype,
            device,
            with_mtp=method == "mtp",
            progress=lambda done: startup.report("load", done),
        )
    spec = loaded.model.spec
    with startup.phase("alloc"):
        step = Step(
            tokens=config.max_num_batched_tokens,
            rows=config.max_num_seqs,
            width=1 + k_max,
            context=held(config, longest(config, spec)),
        )
        kv_bytes = _kv_bytes_per_token(spec, dtype, with_mtp=method == "mtp")
        sizes = size_of(
            config,
            spec,
            step,
            weights=loaded.num_bytes,
            kv_token=kv_bytes,
            widest=loaded.widest,
            drafter=method != "none",
        )
        plan = plan_memory(config, spec, sizes, _memory(config, device))
        pool = _pool(config, spec, plan, _cache(config, plan, sizes), k_max, dtype, device, poison)
        pool.backend.reserve(config.max_num_seqs, 1 + k_max, frozenset(KINDS if k_max else KINDS - {RowKind.VERIFY}))
        parts = ProposerParts(loaded.model, loaded.mtp, pool, device)
        proposer = None if method == "none" else build_proposer(method, parts)
        if proposer is not None:
            pool.copies.attach(proposer.paged_stores(), proposer.slot_stores())
        runner = ModelRunner(loaded.model, num_slots=plan.num_slots, k_max=k_max, device=device)
        sampling = SamplingStore(plan.num_slots, spec.vocab_size, device)
        if config.memory_gb:
            pool.touch()
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            max_queued_requests=config.max_queued_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            max_queued_tokens=config.max_queued_tokens,
            aging_tokens=config.priority_aging_tokens,
            k_max=k_max,
            settle_lag=config.settle_lag,
        )
        on_host = proposer is not None and proposer.placement is Placement.HOST
        scheduler = Scheduler(pool.ledger, limits, Drafting(k=k_max, host=on_host))
    with startup.phase("selftest"):
        try:
            check_commit(pool, runner, vocab_size=spec.vocab_size, k_max=k_max)
        except CapacityError as error:
            raise ConfigError(f"{error}: give the engine more --num-blocks or --num-slots") from error
    info = ModelInfo(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=scheduler.max_len,
        eos_ids=spec.eos_ids,
        max_drafts=k_max,
        choices=_choices(config, spec, plan, pool, proposer, threads, scheduler.max_len)
        | _sizing(config, plan, sizes, scheduler.max_len, k_max),
        startup_seconds=startup.seconds,
        versions={"torch": str(torch.__version__), "cuda": torch.version.cuda or "none", "triton": _triton_version()},
    )
    return Engine(
        info=info,
        scheduler=scheduler,
        states=pool,
        runner=runner,
        sampling=sampling,
        verifier=Verifier(sampling, k_max),
        proposer=proposer,
        auditor=Auditor(pool, runner, config.audit_interval),
        weight_bytes=loaded.num_bytes,
        settle_lag=config.settle_lag,
    )


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device can be used here")
    if device.type not in ("cpu", "cuda"):
        raise CapabilityError(f"--device {name}: only cpu and cuda are supported")
    return device


def _memory(config: EngineConfig, device: torch.device) -> Memory:
    """What may be allocated now, with the weights in place."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(int(config.gpu_memory_utilization * total) - (total - free), "--gpu-memory-utilization")
    host_cache = int(config.host_cache_gb * 2**30)
    if config.memory_gb:
        return Memory(int(config.memory_gb * 2**30) - resident_memory() - host_cache, "--memory-gb")
    return Memory(available_memory() - host_cache, None)


def _kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype, *, with_mtp: bool) -> int:
    shapes = list(kv_shapes(spec.layers).values())
    if with_mtp:
        shapes += kv_shapes(spec.mtp_layers).values()
    values: int = sum(shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in shapes)
    return values * int(dtype.itemsize)


def _cache(config: EngineConfig, plan: MemoryPlan, sizes: Sizes) -> CacheSettings | None:
    """The prefix cache's sizes; cached texts are told apart by everything that makes their tensors what they are."""
    if not plan.num_checkpoints:
        return None
    identity = hashlib.sha256(repr((config.dtype, config.device, config.speculative.partition(":")[0])).encode())
    for path in sorted(Path(config.model_dir).glob("*")):
        if path.is_file():
            identity.update(repr((path.name, path.stat().st_size, path.stat().st_mtime_ns)).encode())
    identity.update((Path(config.model_dir) / "config.json").read_bytes())
    return CacheSettings(
        num_checkpoints=plan.num_checkpoints,
        interval=config.checkpoint_interval,
        identity=identity.digest(),
        host_bytes=int(config.host_cache_gb * 2**30),
        block_bytes=max(1, sizes.block),
        state_bytes=max(1, sizes.checkpoint),
    )


def _pool(
    config: EngineConfig,
    spec: ModelSpec,
    plan: MemoryPlan,
    cache: CacheSettings | None,
    k_max: int,
    dtype: torch.dtype,
    device: torch.device,
    poison: float | None,
) -> StatePool:
    ledger = Ledger(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        num_slots=plan.num_slots,
        max_blocks_per_seq=plan.max_blocks,
        cache=cache,
    )
    kv = PagedStore(kv_shapes(spec.layers), plan.num_blocks, config.block_size, dtype=dtype, device=device)
    recurrent = RecurrentStore(
        recurrent_shapes(spec.layers), plan.num_slots, device=device, num_checkpoints=plan.num_checkpoints
    )
    backend = build_backend(
        config.prefill_backend,
        config.decode_backend,
        config.speculative_attention_mode,
        kv=kv,
        recurrent=recurrent,
        max_fed=1 + k_max,
    )
    return StatePool(
        ledger,
        kv,
        recurrent,
        backend,
        max_blocks=plan.max_blocks,
        reserve_ahead=k_max,
        device=device,
        poison=poison,
    )


def _choices(
    config: EngineConfig,
    spec: ModelSpec,
    plan: MemoryPlan,
    pool: StatePool,
    proposer: SpeculativeProposer | None,
    threads: int,
    max_len: int,
) -> dict[str, str]:
    """Every resolved choice, in the order of the start line."""
    return {
        "architecture": spec.architecture,
        "layers": f"{len(spec.attention_layers)} attention + {len(spec.recurrent_layers)} recurrent",
        "device": config.device,
        "dtype": config.dtype,
        "state_dtype": "float32",
        "threads": str(threads),
        "prefill_backend": config.prefill_backend,
        "decode_backend": config.decode_backend,
        "verify_by": config.speculative_attention_mode,
        "speculative": config.speculative if proposer is not None else "none",
        "settle_lag": str(config.settle_lag),
        "max_model_len": str(max_len),
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "block_size": str(config.block_size),
        "kv_blocks": str(plan.num_blocks - 1),
        "state_slots": str(plan.num_slots - 1),
        "prefix_cache": "on" if plan.num_checkpoints else "off",
        "state_checkpoints": str(plan.num_checkpoints),
        "checkpoint_interval": str(config.checkpoint_interval),
        "host_cache_gb": f"{config.host_cache_gb:g}",
        "kv_mib": f"{pool.kv.num_bytes / 2**20:.1f}",
        "state_mib": f"{pool.recurrent.num_bytes / 2**20:.1f}",
        "checkpoint_mib": f"{pool.recurrent.num_checkpoint_bytes / 2**20:.1f}",
        "draft_mib": f"{0 if proposer is None else proposer.num_bytes() / 2**20:.1f}",
    }


def _sizing(config: EngineConfig, plan: MemoryPlan, sizes: Sizes, max_len: int, k_max: int) -> dict[str, str]:
    """What a unit of everything takes, what all takes together, and how many sequences of which length fit."""
    fits = fitting(config, plan, max_len, k_max)
    return {
        "weights_mib": f"{sizes.weights / MIB:.1f}",
        "slot_kib": f"{sizes.slot / 1024:.1f}",
        "block_kib": f"{sizes.block / 1024:.1f}",
        "checkpoint_kib": f"{sizes.checkpoint / 1024:.1f}",
        "scratch_mib": f"{sizes.scratch / MIB:.1f}",
        "workspace_mib": f"{sizes.workspace / MIB:.1f}",
        "total_mib": f"{sizes.total(plan.num_slots, plan.num_checkpoints, plan.num_blocks) / MIB:.1f}",
        "fits": ", ".join(f"{count} x {length}" for length, count in fits.items()),
    }
