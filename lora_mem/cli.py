"""The command line: `lora-mem size`. Prints what `footprint` calculates; needs neither torch nor vllm."""

from __future__ import annotations

import json
import sys
from typing import Annotated, NoReturn

import typer

from lora_mem.layers import SizingError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The memory of LoRA adapters in vLLM.")


@app.callback()
def _root() -> None:
    """The memory of LoRA adapters in vLLM."""


@app.command()
def size(
    model: Annotated[str, typer.Argument(help="A hub name, or a path to a config.json.")],
    rank: Annotated[int, typer.Option(help="The adapter's rank.")],
    target_modules: Annotated[
        str, typer.Option(help="PEFT's names separated by commas, 'experts' for the routed experts, or 'all-linear'.")
    ] = "all-linear",
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Rank of the slots; default the smallest that fits.")
    ] = None,
    max_loras: Annotated[int, typer.Option(help="Slots.")] = 1,
    max_cpu_loras: Annotated[int | None, typer.Option(help="Registered adapters; default max_loras.")] = None,
    tp: Annotated[int, typer.Option("--tp", help="tensor_parallel_size.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="enable_expert_parallel.")] = False,
    fully_sharded: Annotated[bool, typer.Option("--fully-sharded", help="fully_sharded_loras.")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: integers in bytes per worker.")] = False,
) -> None:
    """The bytes of each holder of an adapter, per worker."""
    from lora_mem.footprints import footprint, gib

    try:
        result = footprint(
            model,
            rank=rank,
            target_modules=_names(target_modules),
            max_lora_rank=max_lora_rank,
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            tensor_parallel_size=tp,
            enable_expert_parallel=ep,
            fully_sharded_loras=fully_sharded,
            dtype=dtype,
        )
    except SizingError as error:
        _fail(error)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result.shape.name}, rank {rank}, bytes per worker")
    table.add_column("figure", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("formula")
    for line in result.lines:
        table.add_row(line.name, f"{line.bytes:,}", gib(line.bytes).removesuffix(" GiB"), line.formula)
    Console().print(table)


@app.command()
def demo() -> None:
    """An adapter's life in a real vLLM engine on this machine, with the hook and without."""
    from lora_mem.demo import main as run

    raise typer.Exit(run())


def _names(target_modules: str) -> str | list[str]:
    names = [name.strip() for name in target_modules.split(",")]
    return names[0] if len(names) == 1 else names


def _fail(error: SizingError) -> NoReturn:
    print(f"lora-mem: {error}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the `lora-mem` command; a wrong command line is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        # Typer's usage errors; anything else is a bug and keeps its traceback.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if text := " ".join(message().split()):
            print(f"lora-mem: {text}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)
