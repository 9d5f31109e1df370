"""`lora-mem demo`: one adapter's life in a real vLLM engine on this machine, with the hook and without, as a table.

The model is tiny and random and is made here; vLLM's CPU engine runs it where there is no GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lora_mem.scenarios import Life, Phase, Round

RANK = 16
HOLDERS = ("slots", "registered", "staged")
TITLES = {
    "keep": "Without the offload (keep): what was received stays where it is",
    "offload": "With it (offload): vLLM's slots stay, the rest goes to the host",
}
CPU_NOTE = """\
There is no GPU here, so vLLM's CPU engine ran it. Host memory and "GPU" memory are the same memory on this machine: the
offload finds everything on the host already and moves nothing. On a GPU, staged and registered are on cuda:0; with the
offload both are on cpu from "offloaded" on, page-locked, and the GPU's allocated and reserved bytes are back at "rest".
That the rebuilt adapter is the same to the bit is checked here as it is there."""
SHARED_NOTE = "Memory that two holders share is counted once, for the left one."


def main() -> int:
    """Run it and print the tables. Returns the exit code: 0 if all that must be equal is, else 1."""
    try:
        import torch
        import vllm
    except ImportError as error:
        print(f"lora-mem demo: needs vLLM ({error}); pip install 'lora-mem[vllm]', without a GPU 'lora-mem[cpu]'")
        return 1
    gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if gpu else "the CPU"
    print(f"vLLM {vllm.__version__} on {where}: starting the engine takes half a minute or so ...", flush=True)
    with _quiet():
        lives, rounds = _run(gpu)
    # Wide enough for every figure where the output is no terminal.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for life in lives:
        console.print(f"\n{TITLES[life.strategy]}", style="bold")
        console.print(_phases(life, gpu))
    console.print(SHARED_NOTE)
    if not gpu:
        console.print(f"\n{CPU_NOTE}\n", soft_wrap=True)
    checks = _checks(lives, rounds)
    console.print(_equal(checks))
    equal = all(all(row.values()) for row in checks.values())
    left = {phase.name: _left(phase, lives[1].phase("rest")) for phase in lives[1].phases} if gpu else {}
    left = {name: size for name, size in left.items() if name in ("offloaded", "evicted", "rebuilt") and size > 0}
    if left:
        console.print(f"With the offload the GPU still holds more than at rest, in bytes: {left}", style="bold red")
    return 0 if equal and not left else 1


def _left(phase: Phase, rest: Phase) -> int:
    """Bytes of the GPU that a phase holds above rest, allocated or reserved."""
    return max(phase.allocated - rest.allocated, phase.reserved - rest.reserved)


def _run(gpu: bool) -> tuple[list[Life], list[Round]]:
    from lora_mem import scenarios

    with tempfile.TemporaryDirectory() as directory:
        config = scenarios.TINY_MOE if gpu else scenarios.TINY_DENSE
        llm = scenarios.start_engine(scenarios.write_model(f"{directory}/model", config), max_lora_rank=RANK)
        lives = [scenarios.adapter_life(llm, strategy, rank=RANK) for strategy in ("keep", "offload")]
        device = "cuda" if gpu else "cpu"
        manager = scenarios.only_manager()
        # Two in turn: with one slot and one place in the host cache each load evicts the other.
        adapters = [scenarios.random_adapter(manager, rank=RANK, seed=seed, device=device) for seed in (1, 2)]
        rounds = scenarios.memory_against_directory(llm, directory, adapters, rounds=2)
    return lives, rounds


def _phases(life: Life, gpu: bool) -> Table:
    """One row a phase: bytes of each holder and where they are, and milliseconds."""
    table = Table()
    table.add_column("phase")
    for holder in HOLDERS:
        table.add_column(f"{holder}, bytes", justify="right")
    if gpu:
        table.add_column("GPU allocated", justify="right")
        table.add_column("GPU reserved", justify="right")
    table.add_column("ms", justify="right")
    for phase in life.phases:
        table.add_row(*_row(phase, gpu))
    return table


def _row(phase: Phase, gpu: bool) -> Iterator[str]:
    yield phase.name
    for holder in HOLDERS:
        yield ", ".join(f"{size:,} {device}" for device, size in phase.holders[holder].items()) or "0"
    if gpu:
        yield f"{phase.allocated:,}"
        yield f"{phase.reserved:,}"
    yield "" if phase.milliseconds is None else f"{phase.milliseconds:.1f}"


def _checks(lives: list[Life], rounds: list[Round]) -> dict[str, dict[str, bool]]:
    """What must be equal to the bit: {what: {against what: whether it is}}."""
    keep, offload = lives
    against = {
        "tokens": (keep.tokens == offload.tokens, [life.tokens == life.rebuilt_tokens for life in lives]),
        "log-probabilities": (
            keep.logprobs == offload.logprobs,
            [life.logprobs == life.rebuilt_logprobs for life in lives],
        ),
        "slots": (keep.slots == offload.slots, [life.slots == life.rebuilt_slots for life in lives]),
    }
    directory = {
        "tokens": all(one.tokens_equal for one in rounds),
        "log-probabilities": all(one.logprobs_equal for one in rounds),
        "slots": all(one.slots_equal for one in rounds),
    }
    return {
        what: {
            "with and without offload": strategies,
            "loaded and rebuilt": all(rebuilt),
            "memory and directory": directory[what],
        }
        for what, (strategies, rebuilt) in against.items()
    }


def _equal(checks: dict[str, dict[str, bool]]) -> Table:
    table = Table()
    table.add_column("equal to the bit")
    for against in next(iter(checks.values())):
        table.add_column(against, justify="center")
    for what, row in checks.items():
        table.add_row(what, *("[green]equal[/]" if equal else "[bold red]DIFFERENT[/]" for equal in row.values()))
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what vLLM and its libraries write to stdout and stderr, below Python too; show it if they fail."""
    with tempfile.TemporaryFile("w+") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = [os.dup(1), os.dup(2)]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        failed: Any = None
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            if failed is not None:
                log.seek(0)
                sys.stderr.write(log.read())


if __name__ == "__main__":
    sys.exit(main())
