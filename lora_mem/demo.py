"""`lora-mem demo`: one adapter's life in a real vLLM engine on this machine, strategy by strategy.

The model is tiny, random and made here; where there is no GPU, vLLM's CPU engine runs it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

if TYPE_CHECKING:
    from lora_mem.testing import Life, Moment, Round
    from lora_mem.vllm_hook import Strategy

RANK = 16
WIDTH = 100
HOLDERS = ("slots", "registered", "staged")
STRATEGIES: dict[Strategy, str] = {
    "keep": "keep: no help. The adapter stays where it arrived, and so does what vLLM packs from it.",
    "offload": "offload: once vLLM's slots hold the adapter, the rest moves to pinned host memory.",
    "stage": "stage (the default): received straight into pinned host memory, packed as vLLM packs it.",
}
LEGEND = (
    "Bytes, and where they are. Memory that two holders share is counted once, under the one further left. Another "
    'adapter evicts this one from its slot and from vLLM\'s host cache ("evicted"); vLLM then builds it again '
    '("rebuilt").'
)
CPU_NOTE = (
    "There is no GPU here: all memory is the host's, and nothing has to move. On a GPU, keep leaves registered and "
    'staged bytes on cuda:0; with offload they are on the host from "offloaded" on, with stage from the start, and the '
    "GPU is back at its baseline. What must be equal is checked here as it is there:"
)
BETWEEN = ("by every strategy", "loaded and rebuilt", "from memory and from a directory")
COMPARED = {"tokens": "tokens", "log-probabilities": "logprobs", "slots": "slots"}


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
    print(f"vLLM {vllm.__version__} on {where}: starting an engine takes about half a minute ...", flush=True)
    with _quiet():
        lives, rounds = _run()
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for life in lives:
        console.print(f"\n{STRATEGIES[life.strategy]}", style="bold")
        columns = ("", *HOLDERS, *(("allocated", "reserved") if gpu else ()), "ms")
        console.print(_table(columns, "right", (_moment(moment, life.moments[0], gpu) for moment in life.moments)))
    console.print(LEGEND)
    if not gpu:
        console.print(f"\n{CPU_NOTE}")
    equal = {what: _equal(field, lives, rounds) for what, field in COMPARED.items()}
    words = {True: "[green]equal[/]", False: "[bold red]DIFFERENT[/]"}
    rows = ([what, *(words[one] for one in found)] for what, found in equal.items())
    console.print()
    console.print(_table(("equal to the bit", *BETWEEN), "center", rows))
    retained = _retained(lives) if gpu else []
    for line in retained:
        console.print(line, style="bold red")
    return 0 if all(map(all, equal.values())) and not retained else 1


def _run() -> tuple[list[Life], list[Round]]:
    from lora_mem import testing

    device = testing.device_at_hand()
    with tempfile.TemporaryDirectory() as directory:
        config = testing.TINY_MOE if device == "cuda" else testing.TINY_DENSE
        llm = testing.start_engine(testing.write_model(f"{directory}/model", config), max_lora_rank=RANK)
        lives = [testing.adapter_life(llm, strategy, rank=RANK) for strategy in STRATEGIES]
        # Two in turn: with one slot and one place in the host cache each load evicts the other.
        adapters = [testing.random_adapter(llm, rank=RANK, seed=seed, device=device) for seed in (1, 2)]
        rounds = testing.memory_against_directory(llm, directory, adapters, rounds=2)
    return lives, rounds


def _table(columns: Sequence[str], justify: JustifyMethod, rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify=justify if index else "left", no_wrap=justify == "right")
    for row in rows:
        table.add_row(*row)
    return table


def _moment(moment: Moment, baseline: Moment, gpu: bool) -> list[str]:
    """Its name, bytes of each holder and where they are, GPU memory above the baseline, milliseconds."""
    held = (moment.holders[holder].items() for holder in HOLDERS)
    above = (moment.allocated - baseline.allocated, moment.reserved - baseline.reserved)
    return [
        moment.name,
        *(", ".join(f"{size:,} {device}" for device, size in sizes) or "0" for sizes in held),
        *([f"{size:+,}" for size in above] if gpu else []),
        "" if moment.milliseconds is None else f"{moment.milliseconds:.1f}",
    ]


def _retained(lives: list[Life]) -> list[str]:
    """What the GPU holds above the baseline when the adapter should be on the host; a line each."""
    lines = []
    for life in lives:
        baseline = life.moments[0]
        for moment in life.moments:
            size = max(moment.allocated - baseline.allocated, moment.reserved - baseline.reserved)
            if life.strategy != "keep" and moment.name in ("offloaded", "evicted", "rebuilt") and size > 0:
                lines.append(f"{life.strategy}: the GPU retains {size:,} bytes above the baseline when {moment.name}")
    return lines


def _equal(field: str, lives: list[Life], rounds: list[Round]) -> list[bool]:
    """Whether one field of an output is the same to the bit, for each of `BETWEEN`."""
    loaded = [getattr(life.loaded, field) for life in lives]
    rebuilt = [getattr(life.rebuilt, field) for life in lives]
    by_strategy = all(one == loaded[0] for one in loaded)
    return [by_strategy, loaded == rebuilt, all(getattr(one, f"{field}_equal") for one in rounds)]


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
