"""`lora-mem demo`: one adapter's life in a real vLLM engine on this machine, with the hook and without, as a table.

The model is tiny and random and is made here; vLLM's CPU engine runs it where there is no GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lora_mem.testing.scenarios import Life, Phase, Round
    from lora_mem.vllm_hook import Strategy

RANK = 16
HOLDERS = ("slots", "registered", "staged")
STRATEGIES: dict[Strategy, str] = {
    "keep": "Without the hook's help (keep): what was received, and what vLLM packs from it, stay where they are",
    "offload": "With it (offload): once vLLM's slots hold the adapter, the rest goes to the host",
    "stage": "With it (stage, the default): received straight into host memory, as vLLM packs it",
}
CPU_NOTE = """\
There is no GPU here, so vLLM's CPU engine ran it: host memory and "GPU" memory are the same, and there is nothing
to move. On a GPU, staged and registered are on cuda:0 with keep; with offload they are on cpu from "offloaded" on, and
with stage from the start, page-locked, and the GPU's allocated and reserved bytes are back at those of "rest".
That a rebuilt adapter is the same to the bit is checked here as it is there."""
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
        console.print(f"\n{STRATEGIES[cast('Strategy', life.strategy)]}", style="bold")
        console.print(_phases(life, gpu))
    console.print(SHARED_NOTE)
    if not gpu:
        console.print(f"\n{CPU_NOTE}\n", soft_wrap=True)
    checks = _checks(lives, rounds)
    console.print(_equal(checks))
    equal = all(all(row.values()) for row in checks.values())
    left = _left_on_gpu(lives) if gpu else []
    for line in left:
        console.print(line, style="bold red")
    return 0 if equal and not left else 1


def _left_on_gpu(lives: list[Life]) -> list[str]:
    """What the GPU holds above rest in phases where the adapter should be on the host; a line each."""
    lines = []
    for life in lives[1:]:
        rest = life.phase("rest")
        for phase in life.phases:
            size = max(phase.allocated - rest.allocated, phase.reserved - rest.reserved)
            if phase.name in ("offloaded", "evicted", "rebuilt") and size > 0:
                lines.append(f"{life.strategy}: the GPU holds {size:,} bytes more when {phase.name} than at rest")
    return lines


def _run(gpu: bool) -> tuple[list[Life], list[Round]]:
    from lora_mem.testing import scenarios

    with tempfile.TemporaryDirectory() as directory:
        config = scenarios.TINY_MOE if gpu else scenarios.TINY_DENSE
        llm = scenarios.start_engine(scenarios.write_model(f"{directory}/model", config), max_lora_rank=RANK)
        lives = [scenarios.adapter_life(llm, strategy, rank=RANK) for strategy in STRATEGIES]
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
    """What must be equal to the bit: {what: {between what: whether it is}}."""
    first = lives[0]
    strategies = {
        "tokens": all(life.tokens == first.tokens for life in lives),
        "log-probabilities": all(life.logprobs == first.logprobs for life in lives),
        "slots": all(life.slots == first.slots for life in lives),
    }
    rebuilt = {
        "tokens": all(life.tokens == life.rebuilt_tokens for life in lives),
        "log-probabilities": all(life.logprobs == life.rebuilt_logprobs for life in lives),
        "slots": all(life.slots == life.rebuilt_slots for life in lives),
    }
    directory = {
        "tokens": all(one.tokens_equal for one in rounds),
        "log-probabilities": all(one.logprobs_equal for one in rounds),
        "slots": all(one.slots_equal for one in rounds),
    }
    columns = {"all strategies": strategies, "loaded and rebuilt": rebuilt, "memory and directory": directory}
    return {what: {name: column[what] for name, column in columns.items()} for what in strategies}


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
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            if failed:
                log.seek(0)
                sys.stderr.write(log.read())


if __name__ == "__main__":
    sys.exit(main())
