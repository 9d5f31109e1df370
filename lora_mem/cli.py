"""The command line. `size`, `plan` and `report` need neither torch nor vllm."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lora_mem.errors import SizingError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The memory of LoRA adapters in vLLM.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from lora_mem.version import __version__

        print(f"lora-mem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The memory of LoRA adapters in vLLM."""


# The options of both commands, in vLLM's words.
Model = Annotated[str, typer.Argument(help="A hub name, or a path to a config.json.")]
Rank = Annotated[int, typer.Option(help="The adapter's rank.")]
Targets = Annotated[
    str, typer.Option(help="PEFT's names separated by commas, 'experts' for the routed experts, or 'all-linear'.")
]
MaxLoraRank = Annotated[int | None, typer.Option(help="Rank of the slots; default the smallest that fits.")]
MaxLoras = Annotated[int, typer.Option(help="Slots.")]
MaxCpuLoras = Annotated[int | None, typer.Option(help="Registered adapters; default max_loras.")]
Tp = Annotated[int, typer.Option("--tp", help="tensor_parallel_size.")]
Pp = Annotated[int, typer.Option("--pp", help="pipeline_parallel_size.")]
Dp = Annotated[int, typer.Option("--dp", help="data_parallel_size.")]
Ep = Annotated[bool, typer.Option("--ep", help="enable_expert_parallel.")]
FullySharded = Annotated[bool, typer.Option("--fully-sharded", help="fully_sharded_loras.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
MoeBackend = Annotated[
    str | None, typer.Option(help="What computes the experts: triton, mxfp4_marlin, ...; default by the checkpoint.")
]
StrategyName = Annotated[str, typer.Option(help="keep, offload or stage: where an adapter is after a sync.")]
Why = Annotated[bool, typer.Option("--why", help="Each figure with its formula and inputs; --json has them always.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: integers in bytes per worker.")]


@app.command()
def size(
    model: Model,
    rank: Rank,
    target_modules: Targets = "all-linear",
    max_lora_rank: MaxLoraRank = None,
    max_loras: MaxLoras = 1,
    max_cpu_loras: MaxCpuLoras = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = False,
    fully_sharded: FullySharded = False,
    dtype: Dtype = "bfloat16",
    moe_backend: MoeBackend = None,
    strategy: StrategyName = "stage",
    phases: Annotated[bool, typer.Option("--phases", help="The GPU phase by phase of a colocated run.")] = False,
    why: Why = False,
    as_json: AsJson = False,
) -> None:
    """The bytes of each holder of an adapter, per worker."""
    from lora_mem.sizing.footprints import footprint
    from lora_mem.sizing.units import gib

    try:
        result = footprint(
            model,
            rank=rank,
            **_options(
                target_modules,
                max_lora_rank,
                max_loras,
                max_cpu_loras,
                tp,
                pp,
                dp,
                ep,
                fully_sharded,
                dtype,
                moe_backend,
                strategy,
            ),
        )
    except SizingError as error:
        _fail(error)
    _say_assumed(result.assumes)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    elif phases:
        found = result.phases()
        rows = [
            (phase, *(f"{size:,}" for size in held.values()), gib(sum(held.values()))) for phase, held in found.items()
        ]
        _print_table(
            f"{result.model}, rank {rank}, {strategy}", ("phase", "slots", "adapters", "all"), rows, plain=True
        )
    elif why:
        print("\n\n".join(result.why(line.name) for line in result.lines))
    else:
        rows = [
            (line.name, f"{line.bytes:,}", gib(line.bytes).removesuffix(" GiB"), line.formula) for line in result.lines
        ]
        _print_table(
            f"{result.model}, rank {rank}, {strategy}, per worker",
            ("figure", "bytes", "GiB", "formula"),
            rows,
        )


@app.command()
def plan(
    model: Model,
    rank: Rank,
    gpu: Annotated[str, typer.Option(help="The GPU's memory in GiB, or its name, e.g. H200.")],
    weights: Annotated[float, typer.Option(help="The model's weights in one worker, GiB.")],
    kv_cache: Annotated[float, typer.Option(help="KV cache and other room to leave in one worker, GiB.")] = 0.0,
    host: Annotated[float | None, typer.Option(help="Host memory of a node for adapters, GiB.")] = None,
    target_modules: Targets = "all-linear",
    max_lora_rank: MaxLoraRank = None,
    max_loras: MaxLoras = 1,
    max_cpu_loras: MaxCpuLoras = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = False,
    fully_sharded: FullySharded = False,
    dtype: Dtype = "bfloat16",
    moe_backend: MoeBackend = None,
    strategy: StrategyName = "stage",
    why: Why = False,
    as_json: AsJson = False,
) -> None:
    """Does it fit, how far could it go, what would save memory. Exit code 0: fits, 1: does not, 2: cannot tell."""
    from lora_mem.sizing.planning import plan as make_plan

    try:
        result = make_plan(
            model,
            rank=rank,
            gpu_bytes=_gpu(gpu),
            weights_bytes=_gib("weights", weights),
            kv_cache_bytes=_gib("kv_cache", kv_cache),
            host_memory_bytes=None if host is None else _gib("host", host),
            **_options(
                target_modules,
                max_lora_rank,
                max_loras,
                max_cpu_loras,
                tp,
                pp,
                dp,
                ep,
                fully_sharded,
                dtype,
                moe_backend,
                strategy,
            ),
        )
    except SizingError as error:
        _fail(error)
    _say_assumed(result.footprint.assumes)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    elif why:
        print("\n".join(result.why(answer.question) for answer in result.answers))
    else:
        verdict = "fits" if result.fits else "does not fit"
        rows = [(answer.question, answer.text(), answer.formula) for answer in result.answers]
        _print_table(f"{result.footprint.model}, rank {rank}: {verdict}", ("question", "answer", "formula"), rows)
    raise typer.Exit(0 if result.fits else 1)


def _say_assumed(assumed: str) -> None:
    if assumed:
        typer.echo(f"lora-mem: assumed: {assumed}", err=True)


def _options(
    target_modules: str,
    max_lora_rank: int | None,
    max_loras: int,
    max_cpu_loras: int | None,
    tp: int,
    pp: int,
    dp: int,
    ep: bool,
    fully_sharded: bool,
    dtype: str,
    moe_backend: str | None,
    strategy: str,
) -> dict[str, Any]:
    """Arguments of `footprint`."""
    return {
        "target_modules": _names(target_modules),
        "max_lora_rank": max_lora_rank,
        "max_loras": max_loras,
        "max_cpu_loras": max_cpu_loras,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        "enable_expert_parallel": ep,
        "fully_sharded_loras": fully_sharded,
        "dtype": dtype,
        "moe_backend": moe_backend,
        "strategy": strategy,
    }


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, plain: bool = False) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Plain: many narrow columns of figures, which must fit 80 characters.
    # Formulas are long: where they do not fit they are left to --why, so that figures stay on one line.
    caption = None
    widths = [max(map(len, column)) + 3 for column in zip(columns, *rows, strict=True)]
    if columns[-1] == "formula" and sum(widths) + 1 > Console().width:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
        caption = "formulas: --why"
    table = Table(
        title=title or None,
        caption=caption,
        box=None if plain else box.HEAVY_HEAD,
        padding=(0, 1, 0, 0) if plain else (0, 1),
    )
    for index, column in enumerate(columns):
        numbers = column in ("bytes", "GiB") or (plain and index > 0)
        table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers or index == 0)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _gpu(text: str) -> int:
    from lora_mem.sizing.planning import GPUS

    for name, size in GPUS.items():
        if text.casefold() == name.casefold():
            return size
    try:
        return _gib("gpu", float(text))
    except ValueError:
        raise SizingError("gpu", text, f"must be a size in GiB or one of {', '.join(GPUS)}") from None


def _gib(name: str, value: float) -> int:
    if not 0 <= value < float("inf"):
        raise SizingError(name, value, "must be a size in GiB")
    return round(value * 1024**3)


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="tiny, a name of the built-in table, or a path to a config.json.")
    ] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Cut the model to so many layers.")] = None,
    rank: Rank = 64,
    strategy: Annotated[str, typer.Option(help="keep, offload, stage, fill (stage with fill_slot), or all.")] = "all",
    syncs: Annotated[int, typer.Option(help="Versions of the adapter, 2 or more.")] = 2,
    repeats: Annotated[int, typer.Option(help="So many more syncs by stage and fill, to see that nothing grows.")] = 0,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's; room must be left for two adapters.")] = 0.62,
    as_json: AsJson = False,
) -> None:
    """Sync an adapter by each strategy in a real vLLM engine with dummy weights on this machine: seconds and bytes.

    Exit code 0: tokens and slots are equal, 1: they differ, 2: nothing was run.
    """
    from lora_mem import bench as benches
    from lora_mem.bench import WAYS
    from lora_mem.observe.progress import say
    from lora_mem.testing import engine_config

    if strategy not in (*WAYS, "all"):
        _fail(SizingError("strategy", strategy, f"must be one of {', '.join(WAYS)}, all"))
    if not 1 <= rank <= 512:
        _fail(SizingError("rank", rank, "must be 1 to 512, the largest that vLLM takes"))
    if syncs < 2:
        _fail(SizingError("syncs", syncs, "must be 2 or more: the first one pays for what is reserved once"))
    try:
        config = engine_config(model, layers)
    except SizingError as error:
        _fail(error)
    result = benches.run(
        benches.start(config, max_rank=rank, say=say, gpu_memory_utilization=gpu_memory_utilization),
        config,
        model=model,
        rank=rank,
        strategies=tuple(way for way in WAYS if strategy in (way, "all")),
        syncs=syncs,
        repeats=repeats,
        say=say,
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        title, columns, rows = result.table()
        print(title)
        _print_table("", columns, rows, plain=True)
        tokens = {True: "tokens equal", False: "TOKENS DIFFER", None: "no tokens to compare"}
        print(tokens[result.tokens_equal], "slots equal" if result.slots_equal else "SLOTS DIFFER", sep="\n")
    if not result.syncs:
        _fail(RuntimeError("nothing was run: " + "; ".join(f"{way}: {why}" for way, why in result.skipped.items())))
    raise typer.Exit(0 if result.tokens_equal is not False and result.slots_equal else 1)


@app.command()
def demo() -> None:
    """An adapter's life in a real vLLM engine on this machine, with the hook and without."""
    from lora_mem.demo import main as run

    raise typer.Exit(run())


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What is installed, whether the hook fits this vLLM, what this machine can do. Exit code 1: something is bad."""
    from rich.console import Console
    from rich.markup import escape

    from lora_mem import doctor as doctors

    console = Console(highlight=False)
    found = []
    for check in doctors.checks():
        found.append(check)
        if not as_json:
            colour = {"ok": "green", "warn": "yellow", "bad": "bold red"}[check.state]
            console.print(f"[{colour}]{check.state:<5}[/]{escape(check.name)}: {escape(check.found)}", soft_wrap=True)
            if check.advice:
                console.print(f"     -> {check.advice}", soft_wrap=True, markup=False)
    result = doctors.to_dict(found)
    if as_json:
        print(json.dumps(result, indent=2))
    raise typer.Exit(0 if result["ok"] else 1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A dated report: README.md, raw data, plots.")],
    output: Annotated[Path | None, typer.Option(help="The page; default the folder's name with .html, here.")] = None,
) -> None:
    """One report folder as one HTML page that needs nothing else: tables with units, images inlined, no server."""
    from lora_mem.observe.report import ReportError, render

    try:
        page = render(folder)
    except (ReportError, ImportError) as error:
        _fail(error)
    output = output or Path(f"{folder.resolve().name}.html")
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        _fail(SizingError("output", str(output), f"cannot be written ({error.strerror}); name a file"))
    print(output)


def _names(target_modules: str) -> str | list[str]:
    names = [name.strip() for name in target_modules.split(",")]
    return names[0] if len(names) == 1 else names


def _fail(error: Exception) -> NoReturn:
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
